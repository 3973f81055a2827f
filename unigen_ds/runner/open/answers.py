"""A prompt and its settings -> an answer of a model of any family: for ``tools/generate.py`` and ``tools/app.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unigen_ds.families.base import family_of
from unigen_ds.inference.generated import Generated
from unigen_ds.inference.prompts import Prompt
from unigen_ds.system.log import logger


def drawing_of(inferencer: Any, flow: Mapping[str, Any], *, understand: bool) -> Any:
    """The argument ``flow`` of an inferencer. Where nothing is drawn it is None, and ``flow`` is warned about."""
    if understand or "image" not in getattr(inferencer, "answers", ()):
        if flow:
            logger().warning("without effect, since nothing is drawn: %s", ", ".join(flow))
        return None
    drawing = family_of(type(inferencer.model)).drawing_settings(inferencer.model, flow)
    if drawing is not None:
        logger().info("drawn with %s", ", ".join(f"{key} {value}" for key, value in vars(drawing).items()))
    return drawing


def answer(inferencer: Any, prompt: Prompt, *, top_p: float = 1.0, **options: Any) -> Generated:
    """Ask for one answer. ``options``: of ``unified_generate``, which a family may have without ``top_p``. A warning
    has the number of words that the tokenizer does not have."""
    tokenizer: Any = getattr(inferencer.processor, "tokenizer", None)
    unknown = getattr(tokenizer, "unk_id", None)
    ids = [] if unknown is None else tokenizer.encode(prompt.text)
    if number := ids.count(unknown):
        text = "%d of %d tokens of the prompt are words that the tokenizer does not have (<unk>)"
        logger().warning(text, number, len(ids))
    if top_p < 1.0:
        options["top_p"] = top_p
    result: Generated = inferencer.unified_generate(prompt.prompt, **prompt.arguments, **options)
    return result
