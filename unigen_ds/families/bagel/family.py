"""``Bagel``: the family of ``UnifiedModel``. A model of a user's own that no other family has is treated as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from unigen_ds.config.registry import FAMILIES
from unigen_ds.families.bagel.flow_settings import FlowSettings, flow_for
from unigen_ds.families.bagel.inference import InterleaveInferencer
from unigen_ds.families.bagel.model import UnifiedModel
from unigen_ds.families.bagel.processor import UnifiedProcessor
from unigen_ds.families.bagel.published import BagelDirectory
from unigen_ds.families.base import ConversationFamily, PublishedFormat


@FAMILIES.register_module()
class Bagel(ConversationFamily):
    """Texts and images, read and written: a mixture of transformers."""

    model = UnifiedModel
    processor_type = UnifiedProcessor
    terms: ClassVar[Mapping[str, str]] = {
        **ConversationFamily.terms,
        "image": "weight of the mean squared velocity error per latent patch",
    }
    published: ClassVar[tuple[PublishedFormat, ...]] = (BagelDirectory(),)
    inferencer = InterleaveInferencer
    drawing = FlowSettings

    def drawing_settings(self, model: Any, settings: Mapping[str, Any], *, where: str = "flow") -> FlowSettings:
        return flow_for(model, settings, where=where)

    def chance_level(self, processor: Any) -> Mapping[str, float]:
        """Add that of an image: the mean square of noise minus latents, both of unit variance."""
        return {**super().chance_level(processor), "image": 2.0}
