"""The matrix of engines as plain values: engines, jobs, phases. ``groups.py`` names what is run.

A job is a list of phases in one work dir; a phase is one start of ``world`` processes. All jobs of a launch share one
import of torch and DeepSpeed (``worker.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unigen_ds.runner.settings.tree import load_config

UPDATES, MATRIX_UPDATES = 8, 20
"""Of ``make test``, one more than an epoch of ``USED`` records has; and of the whole matrix."""
USED = 56
LR = 2e-3
_WHOLE = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0, "sub_group_size": 8000}
"""By default ZeRO-3 keeps parameters under 100,000 elements gathered: all of a tiny model's; and groups whole."""

ENGINES: dict[str, dict[str, Any]] = {
    "zero1": {"type": "deepspeed", "config": "zero1"},
    "zero2": {"type": "deepspeed", "config": "zero2"},
    "zero2_offload": {"type": "deepspeed", "config": "zero2_offload"},
    "zero3": {"type": "deepspeed", "config": {"zero_optimization": {"stage": 3, **_WHOLE}}},
    "FULL_SHARD": {"type": "fsdp", "sharding_strategy": "FULL_SHARD"},
    "SHARD_GRAD_OP": {"type": "fsdp", "sharding_strategy": "SHARD_GRAD_OP"},
    "NO_SHARD": {"type": "fsdp", "sharding_strategy": "NO_SHARD"},
}
"""The seven that the matrix is made of, at 1 and 2 processes."""

OTHERS: dict[str, dict[str, Any]] = {
    "single": {"type": "single"},
    "zero3_preset": {"type": "deepspeed", "config": "zero3"},
    "zero3_offload": {"type": "deepspeed", "config": "zero3_offload"},
    "HYBRID_SHARD": {"type": "fsdp", "sharding_strategy": "HYBRID_SHARD", "num_shard": 2},
    "FULL_SHARD_offload": {"type": "fsdp", "sharding_strategy": "FULL_SHARD", "cpu_offload": True},
}
ALL = {**ENGINES, **OTHERS}

FEW = ("zero1", "zero3", "FULL_SHARD")
"""One for each kind of sharding."""

GEOMETRY = {1: (4, 2), 2: (2, 2), 4: (1, 2), 8: (1, 1)}
"""World size -> (batch_size, accumulative_counts): 8 sequences an update, up to 4 processes in two iterations."""


@dataclass(frozen=True)
class Phase:
    """One start of ``world`` processes. ``config``: overrides of ``tests/tiny.py``, dots written as ``__``."""

    world: int
    config: dict[str, Any]
    max_updates: int = UPDATES
    killed: bool = False
    data: str = "digits/mixed.jsonl"
    """Below the folder of the launch's data, which ``{data}`` stands for in ``config``."""
    config_file: str | None = None
    """A config below the repository's root, which ``main`` of ``tools/train.py`` trains; None: ``tests/tiny.py``."""
    per_node: int | None = None
    """Processes of a node, as a launcher announces them; None: all are on one."""
    folder: str = ""
    """The work dir below the job's, where all phases are in the same processes; empty: the phase's number."""


@dataclass(frozen=True)
class Job:
    name: str
    phases: list[Phase] = field(default_factory=list)
    same_process: bool = False
    """All phases in the same processes, one after the other, each in its own work dir ``<name>/<number>``."""
    resumes: str | None = None
    """A job that must be done before; this one goes on from its last checkpoint, in its own work dir, or takes its
    weights where there is a ``load_cfg``."""


def config(engine: str, world: int, *, geometry: tuple[int, int] | None = None, **overrides: Any) -> dict[str, Any]:
    """Overrides of one run: unpacked mixed data, constant learning rate, the average of the weights kept."""
    batch_size, counts = geometry or GEOMETRY[world]
    return {
        "backend": ALL[engine],
        "train_dataloader__batch_size": batch_size,
        "train_dataloader__packing": None,
        "optim_wrapper__accumulative_counts": counts,
        "optim_wrapper__optimizer__lr": LR,
        "param_scheduler": [],
        "custom_hooks": [{"type": "EMAHook", "momentum": 0.1}, {"type": "RecordHook"}],
        "env": {"dist_timeout_s": 120.0},
        **overrides,
    }


def plain(engine: str, world: int, *, full: bool, **overrides: Any) -> Job:
    if not full:
        kind, path = "UnifiedGenerationDataset", "{data}/digits/mixed.jsonl"
        overrides["train_dataloader__dataset"] = {"type": kind, "data_path": path, "num_used_data": USED}
    updates = MATRIX_UPDATES if full else UPDATES
    return Job(f"{engine}@{world}", [Phase(world, config(engine, world, **overrides), updates)])


def equivalence(*, full: bool) -> list[Job]:
    """Everybody against ``single@1``; ``single_8x1`` is the same update cut once. Not ``full``: one process of few."""
    at_two = [(engine, 2) for engine in (*ENGINES, "zero3_preset", "FULL_SHARD_offload")]
    runs = [("single", 1), *at_two, *((engine, 1) for engine in (ENGINES if full else FEW)), ("HYBRID_SHARD", 4)]
    if full:
        runs += [("zero3_offload", 2), *((engine, 4) for engine in ENGINES), ("zero2", 8), ("FULL_SHARD", 8)]
    saves = {"default_hooks__checkpoint__interval": 2 * GEOMETRY[2][1]}  # while small parameters are gathered
    jobs = [plain(engine, world, full=full, **saves if engine == "zero3_preset" else {}) for engine, world in runs]
    return [*jobs, replace(plain("single", 1, full=full, geometry=(8, 1)), name="single_8x1")]


BF16_SPREAD = 1.5
"""How much farther from fp32 an engine's bf16 may be than the farther one of the two cuts: each is one draw of the same
rounding, and which is the farthest depends on the processor's kernels (up to 1.31 on an AMD EPYC, below 1 before)."""


FAILS_AT = 3
"""The first preview, at a save; the second, at the end, is whole."""
_PICTURE = "{data}/digits/train/0010.png"
PREVIEWS: dict[str, dict[str, Any]] = {}
PREVIEWS["digits"] = {
    "type": "FailingPreviewHook", "interval": FAILS_AT, "size": [8, 8], "flow": {"num_timesteps": 2},
    "max_new_tokens": 4,
    "prompts": [
        "draw a three", {"prompt": "this is zero", "understand": True},
        {"prompt": "draw a four", "images": [_PICTURE], "understand": False}, "draw a two",
        *({"images": [path], "understand": True} for path in (_PICTURE, "{data}/digits/mixed.jsonl")),
    ],
    "num_held_out": 2,
    "held_out": {"type": "UnifiedGenerationDataset", "data_path": "{data}/digits/mixed.jsonl"},
}  # fmt: skip
"""An odd number of pictures and texts, one of which cannot be made: two ranks need different calls of the model."""
PREVIEWS["words"] = {
    "type": "PreviewHook", "interval": 2, "max_new_tokens": 9, "prompts": ["one two three", "five", "seven zero"],
}  # fmt: skip

PREVIEWING = ("zero2", "zero3", "FULL_SHARD")
"""Engines that make previews in ``make test``, up to half a minute each: one without whole weights for each kind."""

RESUME_UPDATES, KILL_AT, SAVED_AT = 6, 5, 3
CURVE = [
    {"type": "LinearLR", "start_factor": 0.1, "by_epoch": True, "begin": 0, "end": 0.5, "convert_to_iter_based": True},
    {"type": "CosineAnnealingLR", "by_epoch": True, "begin": 0.5, "end": 3, "convert_to_iter_based": True},
]


def resume(*, full: bool) -> list[Job]:
    """Straight, and killed with SIGKILL in update 5 and resumed from update 3: dropout, two loader workers, EMA."""
    few = ("zero2", "zero3", "FULL_SHARD")
    pairs = [(e, 2, "fp32") for e in (ENGINES if full else few)]
    pairs += [(e, 2, "bf16") for e in (ENGINES if full else ("zero1",))]
    if full:
        pairs += [("HYBRID_SHARD", 4, "fp32"), ("single", 1, "fp32"), ("single", 1, "bf16")]
    jobs = []
    for engine, world, precision in pairs:
        base = config(engine, world, model__llm__dropout=0.1, optim_wrapper__precision=precision)
        phase = Phase(world, base, RESUME_UPDATES)
        previews = [PREVIEWS["digits"]] if precision == "fp32" and (full or engine in PREVIEWING) else []
        jobs += killed_and_straight(f"resume/{engine}@{world}-{precision}", phase, previews=previews)
    return jobs


def killed_and_straight(name: str, phase: Phase, *, previews: Sequence[dict[str, Any]] = ()) -> list[Job]:
    """The run of ``phase``, with two loader workers and a curve, never stopped and stopped once.

    ``previews``: hooks of the former alone. So what they change of the training would be found, too."""
    changes = {
        "train_dataloader__num_workers": 2,
        "default_hooks__checkpoint__interval": 2 * SAVED_AT,
        "param_scheduler": CURVE,
        "train_cfg__max_epochs": 3,
    }
    base = {**phase.config, **changes}
    with_kill = {**base, "custom_hooks": [*base["custom_hooks"], {"type": "KillHook", "at_update": KILL_AT}]}
    phases = [replace(phase, config=with_kill, killed=True), replace(phase, config={**base, "resume": True})]
    straight = {**base, "custom_hooks": [*base["custom_hooks"], *previews]}
    return [Job(f"{name}/straight", [replace(phase, config=straight)]), Job(f"{name}/killed", phases)]


OWN_RECORDS = 51


SAVERS = (
    ("single", 1), ("zero1", 2), ("zero2", 2), ("zero2", 4), ("zero3", 2), ("zero3", 4),
    ("FULL_SHARD", 2), ("FULL_SHARD", 4), ("HYBRID_SHARD", 4),
)  # fmt: skip
LOADERS = (
    ("single", 1), ("zero2", 1), ("zero2", 3), ("zero3", 2), ("zero3", 3),
    ("FULL_SHARD", 1), ("FULL_SHARD", 3), ("HYBRID_SHARD", 4),
)  # fmt: skip
COVER = (
    ("single@1", "zero3@3"), ("zero1@2", "FULL_SHARD@3"), ("zero2@2", "HYBRID_SHARD@4"),
    ("zero2@4", "FULL_SHARD@1"), ("zero3@2", "zero2@3"), ("zero3@4", "single@1"), ("FULL_SHARD@2", "zero2@1"),
    ("FULL_SHARD@4", "zero3@2"), ("HYBRID_SHARD@4", "zero2@3"),
)  # fmt: skip
"""What ``make test`` has time for: every saver, every loader, DeepSpeed and FSDP crossed both ways."""
LOW_PAIRS = (
    ("bf16", "FULL_SHARD@2", "zero3@3"),
    ("fp16", "FULL_SHARD@2", "zero3@2"), ("fp16", "single@1", "FULL_SHARD@3"), ("fp16", "zero2@2", "single@1"),
)  # fmt: skip
ELASTIC_SAVED, ELASTIC_UPDATES, OVERFLOW_AT = 3, 5, 2
SAVER_CUT = {1: (6, 2), 2: (3, 2), 4: (3, 1)}
LOADER_CUT = {1: (4, 3), 2: (2, 3), 3: (2, 2), 4: (1, 3)}
"""Always 12 sequences an update. 5 updates are 60 sequences: less than an epoch, whatever the first cut."""


def elastic(*, full: bool) -> list[Job]:
    """A user's own model saved by one engine and loaded by another; ``SaveAtOnceHook`` saves what was loaded."""
    names = [[f"{engine}@{world}" for engine, world in group] for group in (SAVERS, LOADERS)]
    pairs = [("fp32", a, b) for a in names[0] for b in names[1]] if full else [("fp32", a, b) for a, b in COVER]
    pairs += LOW_PAIRS
    jobs = [Job("elastic/straight", [_elastic("fp32", "single@1", SAVER_CUT, ELASTIC_UPDATES)])]
    for precision, saver in dict.fromkeys((precision, saver) for precision, saver, _ in pairs):
        phase = _elastic(precision, saver, SAVER_CUT, ELASTIC_SAVED)
        phase = replace(phase, config={**phase.config, "default_hooks__checkpoint__form": "both"})
        jobs.append(Job(f"elastic/{precision}-{saver}", [phase]))
    for precision, saver, loader in pairs:
        name = f"elastic/{precision}-{saver}"
        phase = _elastic(precision, loader, LOADER_CUT, ELASTIC_UPDATES)
        jobs.append(Job(f"{name}-to-{loader}", [phase], resumes=name))
    return jobs


def _elastic(precision: str, name: str, cut: dict[int, tuple[int, int]], updates: int) -> Phase:
    engine, _, world = name.partition("@")
    model: dict[str, Any] = {"model": {"type": "OddModel"}}
    groups = [{"pattern": "connector", "lr": 5e-3, "weight_decay": 0.1}]
    hooks = ["SaveAtOnceHook"]
    if precision == "fp16":  # an overflow in update 2: the loss scale must not be the initial one
        model = {"model__type": "FaultyModel", "model__bad_update": OVERFLOW_AT, "model__bad_rank": 0}
        model["custom_imports"] = {"imports": ["tests.end_to_end.engines.jobs.fp16_on_cpu"]}
        hooks.append("FaultHook")
    model |= {"optim_wrapper__paramwise_cfg": {"groups": groups}, "optim_wrapper__precision": precision}
    overrides = config(engine, int(world), geometry=cut[int(world)], **model)
    overrides["custom_hooks"] = [*overrides["custom_hooks"], *({"type": hook} for hook in hooks)]
    return Phase(int(world), overrides, updates)


FAULTS_AT = 2
ASYNC_ENGINES = ("single", "zero2", "zero3", "FULL_SHARD")


def full_disk(*, full: bool) -> list[Job]:
    """The runs of ``odd``, on a small disk of their own. After update 2, before any save, a checkpoint is saved again
    and again, while the N-th write of each rank in turn fails. ``async``: the same saves, asynchronous."""
    jobs = []
    for engine in ODD_ENGINES:
        world, overrides = _odd(engine)
        overrides |= {
            "default_hooks__checkpoint__interval": 2 * GEOMETRY[world][1],
            "default_hooks__checkpoint__max_keep_ckpts": -1,
        }
        hook = {"type": "FullDiskHook", "at_update": FAULTS_AT}
        faults = {**overrides, "custom_hooks": [*overrides["custom_hooks"], hook]}
        jobs.append(Job(f"full_disk/{engine}@{world}", [Phase(world, faults, ODD_UPDATES)]))
        if engine not in ASYNC_ENGINES and not full:
            continue
        overrides |= {"default_hooks__checkpoint__async_save": True, **_weights(world)}
        if engine in ("single", "zero2"):
            overrides["custom_hooks"] = faults["custom_hooks"]
        jobs.append(Job(f"async/{engine}@{world}", [Phase(world, overrides, ODD_UPDATES)]))
    return jobs


BAD_UPDATE, BAD_UPDATES = 3, 4


def faulty(*, full: bool) -> list[Job]:
    """Rank 1's gradient is not finite in update 3; a checkpoint after every update."""
    jobs = []
    same = () if full else ("SHARD_GRAD_OP", "NO_SHARD")  # the step of FULL_SHARD
    runs = [("single", 1, "fp32")] + [(e, 2, "fp32") for e in ENGINES if e not in same]
    runs += [("zero1", 2, "bf16"), ("zero2_offload", 2, "bf16")]
    runs += [(e, 2, "bf16") for e in ENGINES if e not in ("zero1", "zero2_offload")] if full else []
    for engine, world, precision in runs:
        model = {"model__type": "FaultyModel", "model__bad_update": BAD_UPDATE, "model__bad_rank": world - 1}
        saves = {"default_hooks__checkpoint__interval": 2, "default_hooks__checkpoint__max_keep_ckpts": -1}
        overrides = config(engine, world, optim_wrapper__precision=precision, **model, **saves)
        overrides["custom_hooks"] = [*overrides["custom_hooks"], {"type": "FaultHook"}]
        jobs.append(Job(f"faulty/{engine}@{world}-{precision}", [Phase(world, overrides, BAD_UPDATES)]))
    return jobs


PACKED_UPDATES = 2
PACKED_CHAIN = (("zero2", "fp32"), ("FULL_SHARD", "fp32"), ("zero3", "fp32"), ("zero1", "bf16"))


def packed(*, full: bool) -> list[Job]:
    """NF4 and INT8 weights in frozen parts: one run that goes from engine to engine, two updates each; one process."""
    quantized = {
        "model__freeze": ["vae", "vit", "llm"], "model__quantize": {"vit": "int8", "llm": "nf4"},
        "default_hooks__checkpoint__max_keep_ckpts": -1,
    }  # fmt: skip
    phases = []
    for number, (engine, precision) in enumerate(PACKED_CHAIN):
        overrides = config(engine, 2, optim_wrapper__precision=precision, resume=number > 0, **quantized)
        phases.append(Phase(2, overrides, PACKED_UPDATES * (number + 1)))
    single = Phase(1, config("single", 1, **quantized), PACKED_UPDATES * len(PACKED_CHAIN))
    return [Job("packed/engines", phases), Job("packed/single", [single])]


ODD_ENGINES = ("single", "zero1", "zero2", "zero3", "FULL_SHARD")
ODD_UPDATES, MILESTONE = 6, 4


def _weights(world: int) -> dict[str, Any]:
    return {"default_hooks__checkpoint__weights_interval": MILESTONE * GEOMETRY[world][1]}


def _odd(engine: str) -> tuple[int, dict[str, Any]]:
    world = 1 if engine == "single" else 2
    groups = [{"pattern": "connector", "lr": 5e-3, "weight_decay": 0.1}]
    return world, config(engine, world, model={"type": "OddModel"}, optim_wrapper__paramwise_cfg={"groups": groups})


def odd(*, full: bool) -> list[Job]:
    """A user's own model: odd sizes, tied weights, a frozen tower, a buffer, two groups; saved and resumed half way."""
    jobs = []
    for engine in ("single", *ENGINES) if full else ODD_ENGINES:
        world, overrides = _odd(engine)
        hook = {"interval": 2 * GEOMETRY[world][1], "max_keep_ckpts": 1, "keep_every": MILESTONE * GEOMETRY[world][1]}
        saves = {f"default_hooks__checkpoint__{key}": value for key, value in hook.items()}
        jobs.append(
            Job(f"odd/{engine}@{world}", [Phase(world, {**overrides, **saves, **_weights(world)}, ODD_UPDATES)])
        )
        half = {**overrides, "default_hooks__checkpoint__form": "full"}  # resumed from the consolidated files
        phases = [Phase(world, half, ODD_UPDATES // 2), Phase(world, {**overrides, "resume": True}, ODD_UPDATES)]
        if full or engine in ("zero3", "FULL_SHARD"):
            jobs.append(Job(f"odd/{engine}@{world}-resumed", phases))
    return jobs


def recompute(*, full: bool) -> list[Job]:
    """Activation checkpointing, with dropout, off and on."""
    engines = ("single", *ENGINES) if full else ("single", "zero3", "FULL_SHARD")
    jobs = []
    for engine in engines:
        world = 1 if engine == "single" else 2
        for on in (False, True):
            overrides = config(engine, world, model__llm__dropout=0.1, model__activation_checkpointing=on)
            jobs.append(Job(f"recompute/{engine}@{world}-{on}", [Phase(world, overrides, 3)]))
    return jobs


PUBLISHED = {
    "type": "UnifiedModel", "pretrained": {"llm": "{data}/parts/llm", "vit": "{data}/parts/vit"}, "copy_init_moe": True,
    "vae": {"type": "PixelAutoencoder", "channels": 1}, "latent_patch_size": 2, "max_latent_size": 4,
}  # fmt: skip
"""A model that starts from ``users.write_parts``; some of its weights are in no file."""
PUBLISHED_UPDATES = 2


def published_jobs(*, full: bool) -> list[Job]:
    """Published weights read shard by shard; two runs are resumed half way."""
    runs = [("single", 1, "fp32")] + [(e, 2, "fp32") for e in (ENGINES if full else ("zero2", "zero3", "FULL_SHARD"))]
    runs += [("zero3", 2, "bf16"), ("HYBRID_SHARD", 4, "fp32")] if full else []
    jobs = []
    for engine, world, precision in runs:
        overrides = config(engine, world, model=PUBLISHED, optim_wrapper__precision=precision)
        jobs.append(Job(f"published/{engine}@{world}-{precision}", [Phase(world, overrides, PUBLISHED_UPDATES)]))
        if (engine, precision) == ("FULL_SHARD", "fp32") or (full and (engine, precision) == ("zero3", "fp32")):
            phases = [Phase(world, overrides, 1), Phase(world, {**overrides, "resume": True}, PUBLISHED_UPDATES)]
            jobs.append(Job(f"published/{engine}@{world}-resumed", phases))
    return jobs


DECODER = {
    "type": "DecoderLM", "pretrained": "{data}/decoder", "llm": {"vocab_size": 61, "attention_dropout": 0.0},
    "activation_checkpointing": True,
}  # fmt: skip
"""Llama from ``texts.write_decoder``, tied embeddings, some rows of which are in no file."""
DECODER_UPDATES = 4


def decoder(*, full: bool) -> list[Job]:
    """Published weights of a decoder language model, read shard by shard, trained on documents, packed; two sources."""
    runs = [("single", 1)] + [(engine, 2) for engine in (ENGINES if full else ("zero2", "zero3", "FULL_SHARD"))]
    source = {"type": "UnifiedGenerationDataset", "data_path": "{data}/digits/text.jsonl"}
    changes = {
        "model": DECODER,
        "processor": None,
        "train_dataloader__packing": {"type": "BestFitPacking", "window": 32},
        "train_dataloader__dataset": [source, source],
        "default_hooks__logger__statistics_interval": 2,
    }
    jobs = []
    for engine, world in runs:
        overrides = config(engine, world, **changes)
        overrides["custom_hooks"] = [*overrides["custom_hooks"], PREVIEWS["words"]]
        jobs.append(
            Job(f"decoder/{engine}@{world}", [Phase(world, overrides, DECODER_UPDATES, data="digits/text.jsonl")])
        )
    return jobs


MEMORY = (("single", 1), ("zero1", 2), ("zero2", 2), ("zero3", 2), ("FULL_SHARD", 2), ("SHARD_GRAD_OP", 2),
          ("HYBRID_SHARD", 4))  # fmt: skip


def memory() -> list[Job]:
    """Larger, so that a batch's own tensors do not count; three updates of one or two sequences an iteration.

    DeepSpeed's communication buckets are small: by default one alone is 500 million elements."""
    stages = {"zero1": {"stage": 1}, "zero2": {"stage": 2}, "zero3": {"stage": 3, **_WHOLE}}
    buckets = {"reduce_bucket_size": 20000, "allgather_bucket_size": 20000}
    sizes = {
        "model__llm__hidden_size": 128, "model__llm__intermediate_size": 512, "model__llm__num_hidden_layers": 2,
        "model__freeze": ["vae", "vit"],
    }  # fmt: skip
    jobs = []
    for engine, world in MEMORY:
        geometry = (2, 2) if engine == "zero2" else (1, 2)  # with one sequence its ranks need the same
        hooks = [*[{"type": "CountedBytesHook"}] * (engine == "zero2"), {"type": "MemoryHook"}]
        overrides = {**config(engine, world, geometry=geometry), **sizes, "custom_hooks": hooks}
        if engine in stages:
            overrides["backend"] = {"type": "deepspeed", "config": {"zero_optimization": {**stages[engine], **buckets}}}
        jobs.append(Job(f"memory/{engine}@{world}", [Phase(world, overrides, 3)]))
    return jobs


NEW_WORDS = ("red", "green", "blue", "upside", "down")


def partial() -> list[Job]:
    """A larger model with new words takes what it can use of a smaller one's checkpoint; nobody is trained further."""
    words = [*load_config("unified_digits").tokenizer["words"], *NEW_WORDS]
    load_cfg = {
        "revise_keys": [(r"(^language_model.*)layers\.0\.", r"\1layers.1."), (r"^vae2llm\.", "another.")],
        "allow": ["missing", "unexpected", "reshaped"],
        "resize_vocab": True,
    }
    larger = {"tokenizer__words": words, "model__vit__intermediate_size": 48}
    small = config("zero3", 2, model__llm__num_hidden_layers=1)
    jobs = [Job("partial/source", [Phase(2, small, 1)])]
    jobs.append(Job("partial/fresh", [Phase(1, config("single", 1, **larger), 0)]))
    for engine, world in (("single", 1), ("zero3", 2), ("FULL_SHARD", 2)):
        phase = Phase(world, config(engine, world, **larger, load_cfg=load_cfg), 0)
        jobs.append(Job(f"partial/{engine}@{world}", [phase], resumes="partial/source"))
    return jobs


def layouts() -> list[Job]:
    """Small checkpoints of the user's own model, for the tests of the readers."""
    runs = [(engine, low) for engine in ("zero1", "zero2", "zero3", "FULL_SHARD") for low in ("fp32", "bf16")]
    model = {
        "model": {"type": "OddModel"},
        "optim_wrapper__paramwise_cfg": {"groups": [{"pattern": "connector", "lr": 5e-3}]},
    }
    jobs = []
    for engine, precision in [*runs, ("NO_SHARD", "fp32")]:
        overrides = config(engine, 2, optim_wrapper__precision=precision, **model)
        jobs.append(Job(f"layouts/{engine}@2-{precision}", [Phase(2, overrides, 2)]))
    return jobs
