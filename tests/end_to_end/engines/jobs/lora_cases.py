"""Jobs of adapters: one run that goes from engine to engine, each of which saves what it loaded before it trains on."""

from __future__ import annotations

from typing import Any

from tests.end_to_end.engines.jobs.cases import DECODER, PREVIEWS, PUBLISHED, Job, Phase, config
from tests.end_to_end.engines.jobs.model_cases import VLM, of_transformers

CHAINS: dict[str, tuple[tuple[str, int], ...]] = {
    "dora": (("zero2", 2), ("FULL_SHARD", 2), ("zero3", 2), ("zero1", 2)),
    "qlora": (("zero3", 2), ("FULL_SHARD", 2)),
}
"""Engines and processes of a run."""
MORE: dict[str, tuple[tuple[str, int], ...]] = {"qlora": (("zero1", 2), ("zero2", 2))}
"""Those that follow in the whole matrix."""
LINK = 2
_DECODER = r"self_attn\.(q|v)_proj|down_proj"
LAYERS = {"dora": _DECODER, "qlora": r"language_model.*(q|v)_proj|connector"}
_CHANGES: dict[str, dict[str, Any]] = {
    "dora": {"model": DECODER, "processor": None},
    "qlora": {
        **VLM, "model__freeze": ["llm", "vit"], "model__quantize": {"llm": "nf4"}, "optim_wrapper__precision": "bf16",
    },
}  # fmt: skip
_DATA = {"dora": "digits/text.jsonl", "qlora": "talks/mixed.jsonl"}


def _phase(kind: str, engine: tuple[str, int], last: int, **more: Any) -> Phase:
    adapters = {"lora": {"r": 4, "alpha": 8, "target_modules": LAYERS[kind], "use_dora": kind == "dora"}}
    options = config(*engine, **_CHANGES[kind], **adapters, **more)
    texts = [PREVIEWS["words"]] * (kind == "dora" and engine[0] in ("FULL_SHARD", "zero3"))
    options["custom_hooks"] = [*options["custom_hooks"], {"type": "SaveAtOnceHook"}, *texts]
    return Phase(engine[1], options, last, data=_DATA[kind])


def lora(*, full: bool) -> list[Job]:
    """The chains, each link in a folder of its own, and one process that is never stopped."""
    jobs = []
    for kind, few in CHAINS.items():
        chain = (*few, *MORE.get(kind, ())) if full else few
        jobs.append(Job(f"lora/{kind}/straight", [_phase(kind, ("single", 1), LINK * len(chain))]))
        for number, engine in enumerate(chain):
            before = link(kind, number - 1) if number else None
            jobs.append(Job(link(kind, number), [_phase(kind, engine, LINK * (number + 1))], resumes=before))
    return jobs


OTHERS: dict[str, tuple[str, str]] = {
    "qwen3": (r"self_attn\.(q|v)_proj|down_proj", "FULL_SHARD"),
    "unified": (r"language_model.*(q|v)_proj", "zero3"),
}
"""A model of transformers by its own class and the unified model, from parts: which layers, and the first engine."""


def others() -> list[Job]:
    """Two updates in one process; and one each under two engines, in the same processes."""
    chain, single = [], []
    for kind, (layers, first) in OTHERS.items():
        settings, data = of_transformers(kind) if kind != "unified" else ({"model": PUBLISHED}, "digits/mixed.jsonl")
        settings = {**settings, "lora": {"r": 4, "alpha": 8, "target_modules": layers}}
        single.append(Phase(1, config("single", 1, **settings), 2, data=data, folder=kind))
        for number, engine in enumerate((first, "zero3" if first == "FULL_SHARD" else "FULL_SHARD")):
            options = config(engine, 2, **settings, resume=number > 0)
            chain.append(Phase(2, options, number + 1, data=data, folder=kind))
    return [Job("lora/others", chain, same_process=True), Job("lora/others-single", single, same_process=True)]


def link(kind: str, number: int) -> str:
    engine, world = (*CHAINS[kind], *MORE.get(kind, ()))[number]
    return f"lora/{kind}/{number}-{engine}@{world}"
