"""Jobs of models with pictures: two vision-language models, and the unified model with FLUX's autoencoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.end_to_end.engines.jobs.cases import ENGINES, RESUME_UPDATES, Job, Phase, config, killed_and_straight
from tests.end_to_end.engines.jobs.pictures import LONGEST
from tests.families.tiny_transformers import IMAGE

MODEL_UPDATES, PARTS_UPDATES = 6, 2
FEW = ("zero2", "zero3", "FULL_SHARD")
"""Engines that stand for the others where time is short."""
_TRANSFORM = {"type": "ImageTransform", "max_size": 16, "min_size": 8, "stride": 4}
VLM: dict[str, Any] = {
    "model": {
        "type": "VLM",
        "llm": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "tie_word_embeddings": True,
        },
        "vit": {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 16, "patch_size": 4,
        },
        "pixel_shuffle_factor": 2,
    },
    "tokenizer": {"type": "ChatTokenizer", "path": "{data}/talks/tokenizer"},
    "processor": {"max_image_size": 32},
    "train_dataloader__seq_length": LONGEST,
    "train_dataloader__overflow": "truncate",
}  # fmt: skip
FLUX: dict[str, Any] = {
    "model__vae": {
        "type": "FluxAutoencoder", "base_channels": 32, "channel_multipliers": [1, 1], "num_blocks": 1,
        "latent_channels": 4,
    },
    "model__vit__image_size": 16,
    "model__vit__num_channels": 3,
    "processor": {"vit_transform": _TRANSFORM, "vae_transform": _TRANSFORM},
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "vlm": (VLM, "talks/mixed.jsonl"),
    "flux": (FLUX, "drawings/mixed.jsonl"),
}


def of_transformers(kind: str) -> tuple[dict[str, Any], str]:
    """Settings and data of a model of ``tests/families/tiny_transformers.py``."""
    settings: dict[str, Any] = {
        "model": {"type": "ImageTextToText" if kind in IMAGE else "CausalLM", "pretrained": f"{{data}}/models/{kind}"},
        "tokenizer": {"type": "ModelTokenizer", "path": f"{{data}}/models/{kind}"},
        "processor": None,
        "train_dataloader__seq_length": 2 * LONGEST,
        "train_dataloader__overflow": "truncate",
    }
    return settings, "talks/mixed.jsonl" if kind in IMAGE else "talks/texts.jsonl"


OTHERS = {"llava": of_transformers("llava")}
"""A model of transformers by its own class; no loss has a gradient for the last layer of its vision tower."""
AUTO: dict[str, tuple[str, ...]] = {
    "qwen3": ("zero2", "zero3"),
    "mistral": ("FULL_SHARD", "zero2"),
    "gemma3": ("FULL_SHARD", "zero3"),
    "qwen2_5_vl": ("zero2", "FULL_SHARD"),
    "smolvlm": ("FULL_SHARD", "zero3"),
}
"""Further ones, and the engines that a run of each goes through: the others' turn is with ``full``."""
PARTS = {
    "vlm": {"vit": "vision_model.", "llm": "language_model.", "connector": "connector."},
    "flux": {"vit": "vit_model.", "llm": "language_model.", "connector": "connector."},
}
"""What ``freeze`` names, and how the names of its parameters begin."""


def phase(model: str, engine: str, world: int, updates: int = MODEL_UPDATES, **overrides: Any) -> Phase:
    """One run of a model; ``EncodeHook`` writes what the autoencoder makes of one picture."""
    settings, data = {**MODELS, **OTHERS}[model]
    options = config(engine, world, **{**settings, **overrides})
    if model == "flux":
        options["custom_hooks"] = [*options["custom_hooks"], {"type": "EncodeHook"}]
    return Phase(world, options, updates, data=data)


def models(*, full: bool) -> list[Job]:
    """All models under every engine. ``make test`` has few: ``equivalence`` has every engine, with another model."""
    runs = [("single", 1), *((engine, 2) for engine in (ENGINES if full else FEW))]
    if full:
        runs += [("HYBRID_SHARD", 4), ("zero2", 4), ("zero3", 4), ("FULL_SHARD", 4)]
        runs += [("zero3_offload", 2), ("FULL_SHARD_offload", 2)]
    jobs = []
    for m in (*MODELS, *OTHERS):
        others = [("NO_SHARD", 2)] if m == "llava" and not full else []  # it answers by transformers' own loop
        jobs += [Job(f"{m}/{e}@{world}", [_answering(phase(m, e, world))]) for e, world in (*runs, *others)]
    return jobs


def _answering(phase: Phase) -> Phase:
    kinds = ["text", "image"] if phase.data.startswith("drawings") else ["text"]
    hook = {"type": "AnswersHook", "at_update": MODEL_UPDATES, "data_path": "{data}/" + phase.data, "kinds": kinds}
    return replace(phase, config={**phase.config, "custom_hooks": [*phase.config["custom_hooks"], hook]})


def models_bf16(*, full: bool) -> list[Job]:
    """The same in bf16, one process with two cuts among them. ``make test``: the one with the autoencoder."""
    low = {"optim_wrapper__precision": "bf16"}
    jobs = []
    for m in MODELS if full else ("flux",):
        jobs.append(Job(f"{m}-bf16/single@1", [phase(m, "single", 1, **low)]))
        jobs.append(Job(f"{m}-bf16/single_8x1", [phase(m, "single", 1, geometry=(8, 1), **low)]))
        engines = ENGINES if full else ("zero1", "FULL_SHARD")
        jobs += [Job(f"{m}-bf16/{engine}@2", [phase(m, engine, 2, **low)]) for engine in engines]
    return jobs


def parts(*, full: bool) -> list[Job]:
    """Each part frozen alone; and the ViT of the vision-language model by a learning rate of 0."""
    jobs = []
    for m, names in PARTS.items():
        for part in names:
            runs = [("single", 1)]
            runs += [(e, 2) for e in FEW] if full else []
            runs += [("zero3" if m == "vlm" else "FULL_SHARD", 2)] if part == "llm" and not full else []
            for engine, world in runs:
                frozen = phase(m, engine, world, PARTS_UPDATES, model__freeze=[part])
                jobs.append(Job(f"parts/{m}-{part}/{engine}@{world}", [frozen]))
    rate = {"optim_wrapper__paramwise_cfg": {"groups": [{"pattern": "vision_model", "lr": 0.0}]}}
    for engine, world in (("single", 1), ("zero2", 2), *((("FULL_SHARD", 2), ("zero3", 2)) if full else ())):
        jobs.append(Job(f"parts/vlm-rate/{engine}@{world}", [phase("vlm", engine, world, PARTS_UPDATES, **rate)]))
    return jobs


def auto(*, full: bool) -> list[Job]:
    """Each of ``AUTO`` goes from engine to engine, an update in each; and is trained in one process."""
    engines = {kind: (*few, *(e for e in ENGINES if full and e not in few)) for kind, few in AUTO.items()}
    stages, single = [], []
    for kind, chain in engines.items():
        settings, data = of_transformers(kind)
        if kind == "gemma3":  # a row for each document
            settings["model"]["packing"] = False
        alone = config("single", 1, **settings)
        single.append(Phase(1, alone, len(chain), data=data, folder=kind))
        for number, engine in enumerate(chain):
            cfg = config(engine, 2, **settings, resume=number > 0)
            cfg["custom_hooks"] = [*cfg["custom_hooks"], *[{"type": "StructureHook"}] * (engine == "FULL_SHARD")]
            stages.append((number, Phase(2, cfg, number + 1, data=data, folder=kind)))
    phases = [phase for _, phase in sorted(stages, key=lambda stage: stage[0])]
    return [Job("auto/engines", phases, same_process=True), Job("auto/single", single, same_process=True)]


def resume(*, full: bool) -> list[Job]:
    """Killed and resumed at the same topology, as ``cases.resume``; ``full`` alone: ``killed_jobs`` has two anyway."""
    kinds = {"llava": ("zero3",), "vlm": ("zero2", "FULL_SHARD"), "flux": ("zero3", "FULL_SHARD")}
    runs = [(m, engine) for m, engines in kinds.items() for engine in engines if full]
    pairs = [killed_and_straight(f"resume/{m}-{e}@2-fp32", phase(m, e, 2, RESUME_UPDATES)) for m, e in runs]
    return [job for pair in pairs for job in pair]


KILLED_UPDATES, KILLED_AT, KEPT = 4, 4, 2
"""Of the jobs of ``killed_jobs``: the last update, the one that SIGKILL ends, and that of the checkpoint before it."""
_ADAPTERS = {"r": 4, "alpha": 8, "dropout": 0.1, "target_modules": r"self_attn\.(q|v)_proj|down_proj"}


def killed_jobs(*, full: bool) -> list[Job]:
    """A language model of transformers, and adapters on it: never stopped; and killed with SIGKILL between two
    micro-batches or between two files of a save, and resumed at the same topology.
    """
    runs = {("qwen3", "zero2"): False, ("adapters", "FULL_SHARD"): True}
    if full:
        saving = {"qwen3": (False, True), "adapters": (True, False)}
        runs = {(kind, engine): saving[kind][i % 2] for kind in saving for i, engine in enumerate(ENGINES)}
    straight, jobs = [], []
    for (kind, engine), in_a_save in runs.items():
        settings, data = of_transformers("qwen3")
        settings |= {"lora": _ADAPTERS} if kind == "adapters" else {}
        base = config(engine, 2, **settings, default_hooks__checkpoint__interval=2 * KEPT)
        hook = {"type": "KillHook", "at_update": KILLED_AT, "saving": in_a_save}
        with_kill = {**base, "custom_hooks": [*base["custom_hooks"], hook]}
        phases = [Phase(2, with_kill, KILLED_UPDATES, killed=True, data=data)]
        phases.append(Phase(2, {**base, "resume": True}, KILLED_UPDATES, data=data))
        jobs.append(Job(f"killed/{kind}-{engine}", phases))
        straight.append(Phase(2, base, KILLED_UPDATES, data=data, folder=f"{kind}-{engine}"))
    return [Job("killed/straight", straight, same_process=True), *jobs]
