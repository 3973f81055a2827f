"""``NanoVLM``: the family of ``VLM``."""

from __future__ import annotations

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
    published = (NanoVLMDirectory(),)
    inferencer = PackedInferencer
    """Its answer is the assistant's next message."""
