"""``NanoVLM``: the family of ``VLM``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from unigen_ds.config.registry import FAMILIES
from unigen_ds.families.base import ConversationFamily
from unigen_ds.families.nanovlm.model import VLM
from unigen_ds.families.nanovlm.processor import VLMProcessor
from unigen_ds.families.nanovlm.published import NanoVLMDirectory
from unigen_ds.inference.answers import PackedInferencer


@FAMILIES.register_module()
class NanoVLM(ConversationFamily):
    """Texts and tiled images, read; texts, written."""

    model = VLM
    processor_type = VLMProcessor
    terms: ClassVar[Mapping[str, str]] = {"text": "weight of the mean cross-entropy per text target"}
    published = (NanoVLMDirectory(),)

    def inferencer(self, model: Any, processor: Any) -> PackedInferencer:
        """Its answer is the assistant's next message."""
        return PackedInferencer(model, processor)
