"""A prompt and its settings -> an answer of a model of any family: for ``tools/generate.py`` and ``tools/app.py``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from unigen_ds.backends.memory import is_out_of_memory
from unigen_ds.families.base import family_of
from unigen_ds.inference.generated import Generated
from unigen_ds.inference.prompts import Prompt, Sampling
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


@torch.inference_mode()
def answer(inferencer: Any, prompt: Prompt, *, top_p: float = 1.0, **options: Any) -> Generated:
    """Ask for one answer. ``options``: of ``unified_generate``, which a family may have without ``top_p``. A warning
    has the number of words that the tokenizer does not have."""
    _warn_of_unknown(inferencer, prompt)
    if top_p < 1.0:
        options["top_p"] = top_p
    result: Generated = inferencer.unified_generate(prompt.prompt, **prompt.arguments, **options)
    return result


def answer_all(inferencer: Any, prompts: Sequence[tuple[int, Prompt]], **options: Any) -> Iterator[Generated]:
    """The answers to prompts with seeds: together where all are requests for the inferencer (``request``), in two
    halves where memory is not enough, else one by one. ``options``: of ``answer``."""
    ask = getattr(inferencer, "request", None) if len(prompts) > 1 else None
    requests = [ask and ask(prompt, seed=seed, **options) for seed, prompt in prompts]
    if None in requests:
        yield from (answer(inferencer, prompt, seed=seed, **options) for seed, prompt in prompts)
        return
    for _, prompt in prompts:
        _warn_of_unknown(inferencer, prompt)
    values = {"sampling": Sampling(options["temperature"], options["top_p"]), "flow": options["flow"]}
    results: Sequence[Generated] = ()
    try:
        with torch.inference_mode():
            results = inferencer.complete(requests, max_new_tokens=options["max_length"], together=True, **values)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        logger().warning("memory is not enough for %d answers together: they are made in two parts", len(prompts))
    if not results:  # outside of the error, which keeps the tensors
        for half in (prompts[: len(prompts) // 2], prompts[len(prompts) // 2 :]):
            results = [*results, *answer_all(inferencer, half, **options)]
    yield from results


def _warn_of_unknown(inferencer: Any, prompt: Prompt) -> None:
    tokenizer: Any = getattr(inferencer.processor, "tokenizer", None)
    unknown = getattr(tokenizer, "unk_id", None)
    ids = [] if unknown is None else tokenizer.encode(prompt.text)
    if number := ids.count(unknown):
        text = "%d of %d tokens of the prompt are words that the tokenizer does not have (<unk>)"
        logger().warning(text, number, len(ids))
