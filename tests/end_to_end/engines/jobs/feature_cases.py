"""Jobs that show one feature each under a real engine, where the matrix of engines would pass without it."""

from __future__ import annotations

from typing import Any

from tests.end_to_end.engines.jobs.cases import (
    ALL,
    DECODER,
    KILL_AT,
    RESUME_UPDATES,
    Job,
    Phase,
    config,
    killed_and_straight,
)

OWN_OPTIMIZERS = {"imports": ["tests.end_to_end.engines.jobs.own_optimizers"]}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Muon": {"type": "Muon", "lr": 2e-2, "weight_decay": 0.1, "adamw": {"lr": 2e-3, "betas": [0.9, 0.95]}},
    "NormalizedMomentum": {"type": "NormalizedMomentum", "lr": 0.2, "adamw": {"lr": 2e-3, "patterns": ["mix"]}},
}
OPTIMIZER_LINK, OPTIMIZER_UPDATES = 2, 4
MATRIX_ENGINES = (("FULL_SHARD", 2), ("NO_SHARD", 2), ("FULL_SHARD", 3), ("HYBRID_SHARD", 4))

WATCHED_UPDATES = 6
WATCHED_SAVED_AT = 3
WANDB: dict[str, Any] = {  # W&B writes its file every 15 s otherwise, and a kill takes what it holds back
    "type": "WandbVisBackend",
    "init_kwargs": {
        "entity": "us", "project": "unigen", "name": "a name", "group": "a group", "mode": "offline",
        "config": {"our_own": 7}, "settings": {"x_transaction_log_flush_interval": 0.05},
    },
    "define_metric_cfg": [{"name": "grad_norm", "summary": "max"}],
}  # fmt: skip


def watched_jobs(*, full: bool) -> list[Job]:
    """Both writers, of two processes killed with SIGKILL in update 5, resumed by one process from update 3."""
    writers = {
        "visualizer": {"vis_backends": [WANDB, {"type": "TensorboardVisBackend"}]},
        "default_hooks__checkpoint__interval": 2 * WATCHED_SAVED_AT,
    }
    first = {**config("FULL_SHARD", 2), **writers, "custom_hooks": [{"type": "KillHook", "at_update": KILL_AT}]}
    second = {**config("single", 1), **writers, "custom_hooks": [], "resume": True}
    return [Job("watched", [Phase(2, first, WATCHED_UPDATES, killed=True), Phase(1, second, WATCHED_UPDATES)])]


def adapter() -> list[Job]:
    """A user's own data set, with random numbers of its own: killed and resumed, beyond an epoch of 51 records."""
    own = {
        "type": "DatasetAdapter",
        "dataset": {"type": "tests.end_to_end.engines.jobs.users.OwnDataset"},
        "images": "generate",
    }
    phase = Phase(1, config("single", 1, train_dataloader__dataset=own), RESUME_UPDATES)
    return killed_and_straight("resume/adapter", phase)


def fused_zero() -> list[Job]:
    """torch's fused AdamW inside of ZeRO-2, which keeps its step count where its kernel reads it."""
    base = config("zero2", 2, optim_wrapper__optimizer__fused=True)
    with_steps = {**base, "custom_hooks": [*base["custom_hooks"], {"type": "StepsHook"}]}
    return killed_and_straight("resume/zero2@2-fused", Phase(2, with_steps, RESUME_UPDATES))


def mmengine_hooks(*, full: bool) -> list[Job]:
    """A user's own hook of mmengine, which stops the training on one rank, and two of mmengine's."""
    own = ["tests.end_to_end.engines.jobs.users.RunnerSeen", "mmengine.IterTimerHook", "mmengine.EmptyCacheHook"]
    hooks = {"custom_hooks": [{"type": kind} for kind in own]}
    engines = (("single", 1), ("zero2", 2), ("SHARD_GRAD_OP", 2))
    return [
        Job(f"mmengine/{engine}", [Phase(world, {**config(engine, world), **hooks}, 8)]) for engine, world in engines
    ]


def structure(*, full: bool) -> list[Job]:
    """Which units FSDP has, and who holds what: a node of two processes each, which ``num_shard`` leaves open."""
    hook = {"custom_hooks": [{"type": "StructureHook"}]}
    hybrid = {**config("HYBRID_SHARD", 4), **hook, "backend": {"type": "fsdp", "sharding_strategy": "HYBRID_SHARD"}}
    return [
        Job("structure/by_node", [Phase(4, hybrid, 1, per_node=2)]),
        Job("structure/FULL_SHARD@2", [Phase(2, {**config("FULL_SHARD", 2), **hook}, 1)]),
        Job("structure/decoder", [_decoder({**config("FULL_SHARD", 2), **hook, "model": DECODER})]),
    ]


COMPILED_ENGINES = (("FULL_SHARD", 1),)
"""Of ``make test``: FSDP2 wraps and compiles in one process as in two."""


def compiled(*, full: bool) -> list[Job]:
    """``torch.compile`` of every decoder layer, off and on: one layer (it takes 40 s), one update uncut (each shape is
    compiled anew). ``make test``: without C++.
    """
    hook: dict[str, Any] = {"custom_hooks": [{"type": "StructureHook"}], "env": {"dist_timeout_s": 800.0}}
    if not full:
        hook["custom_imports"] = {"imports": ["tests.end_to_end.engines.jobs.quick_compiler"]}
    jobs = []
    further = (("single", 1), ("FULL_SHARD", 2), ("zero2", 2), ("zero3", 2))
    for engine, world in (*COMPILED_ENGINES, *(further if full else ())):
        for on in (False, True):
            one = {"model__llm__num_hidden_layers": 1, "model__compile": on}
            settings = {**config(engine, world, geometry=(8 // world, 1), **one), **hook}
            jobs.append(Job(f"compiled/{engine}@{world}-{on}", [Phase(world, settings, 1)]))
    for on in (False, True) if full else ():
        small = {"type": "DecoderLM", "llm": {**_LLAMA, "num_hidden_layers": 1}, "compile": on}
        decoder = {**config("FULL_SHARD", 2, geometry=(4, 1)), **hook, "model": small}
        jobs.append(Job(f"compiled/decoder-{on}", [_decoder(decoder)]))
    return jobs


_LLAMA = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 80,
}  # fmt: skip


def _decoder(settings: dict[str, Any]) -> Phase:
    """One update of a decoder language model on documents."""
    return Phase(2, {**settings, "processor": None}, 1, data="digits/text.jsonl")


def optimizers(*, full: bool) -> list[Job]:
    """Optimizers that are not torch's AdamW, on a model of odd sizes with two groups.

    Those of whole matrices get equal gradients everywhere, never stopped, and resumed half way: Muon from ``single`` to
    ``fsdp``, the other back. Muon gets real ones in addition.
    """
    jobs = [
        Job(f"optimizers/Muon/{engine}", [_optimizer("Muon", engine, world, OPTIMIZER_UPDATES)])
        for engine, world in (("single", 1), ("FULL_SHARD", 2))
    ]
    for name in ("Muon", "NormalizedMomentum"):
        engines = MATRIX_ENGINES if name == "Muon" else MATRIX_ENGINES[:1]
        base = f"optimizers/equal/{name}"
        for engine in (("single", 1), *engines):
            jobs.append(Job(f"{base}/{_at(engine)}", [_optimizer(name, *engine, OPTIMIZER_UPDATES, equal=True)]))
        one, other = (("single", 1), ("FULL_SHARD", 2)) if name == "Muon" else (("FULL_SHARD", 2), ("single", 1))
        half = Job(f"{base}/half", [_optimizer(name, *one, OPTIMIZER_LINK, equal=True)])
        rest = _optimizer(name, *other, OPTIMIZER_UPDATES, equal=True)
        jobs += [half, Job(f"{base}/resumed", [rest], resumes=half.name)]
    return jobs


def _at(engine: tuple[str, int]) -> str:
    return f"{engine[0]}@{engine[1]}"


def _optimizer(name: str, engine: str, world: int, updates: int, *, equal: bool = False) -> Phase:
    overrides = config(
        engine,
        world,
        geometry=(2, 2) if world == 3 else None,
        model={"type": "OddModel"},
        custom_imports=OWN_OPTIMIZERS,
        optim_wrapper__optimizer=OPTIMIZERS[name],
        optim_wrapper__clip_grad=None,
        optim_wrapper__paramwise_cfg={"groups": [{"pattern": "connector", "lr_mult": 0.5, "weight_decay": 0.02}]},
    )
    hooks = [*overrides["custom_hooks"], {"type": "SaveAtOnceHook"}, *[{"type": "EqualGradientsHook"}] * equal]
    return Phase(world, {**overrides, "custom_hooks": hooks}, updates)


EVALUATED_UPDATES = 2
EVALUATED_ENGINES = (("zero2", 2), ("zero3", 2), ("FULL_SHARD", 2))
EVALUATED_BY_FOUR = (("HYBRID_SHARD", 4),)
_HELD = [
    {"type": "UnifiedGenerationDataset", "data_path": "{data}/digits/held.jsonl"},
    {"type": "UnifiedGenerationDataset", "data_path": "{data}/digits/few.jsonl"},
]
EVALUATED_METRICS = ("bleu", "exact_match", "perplexity")
"""Of the evaluated runs; another one fails on the last rank."""
EVALUATION: dict[str, Any] = {
    "type": "EvaluateHook", "interval": 1, "unit": "update", "at_start": True,
    "metrics": [{"type": name} for name in ("BLEU", "FailsOnTheLastRank", "ExactMatch", "Perplexity")],
    "generation": {"max_new_tokens": 6},
}  # fmt: skip


def metric_interval(engine: str) -> int:
    """Updates between metrics. Of ZeRO-3 only those of the start: its answers take ten seconds."""
    return 1000 if engine == "zero3" else EVALUATED_UPDATES


def evaluated_jobs(*, full: bool) -> list[Job]:
    """The weights of a short run of one process, evaluated by each engine on 13 and 3 records, two at a time: ranks
    have uneven shares, of text alone or with images. Two processes train on, with dropout, with and without evaluation
    of the average.
    """
    start = Job("evaluated/start", [Phase(1, config("single", 1), 4)])
    jobs = [start]
    further = (("zero1", 2), ("SHARD_GRAD_OP", 2), ("NO_SHARD", 2), ("zero2", 4), ("zero3", 4), ("FULL_SHARD", 4))
    for engine, world in (("single", 1), *EVALUATED_ENGINES, *EVALUATED_BY_FOUR, *(further if full else ())):
        base = config(engine, world, model__llm__dropout=0.1, load_cfg={})
        ema = {"type": "EMAHook", "momentum": 0.1}
        hook = {**EVALUATION, "use_ema": world == 2, "metric_interval": metric_interval(engine)}
        overrides = {
            **base, "val_dataloader": {"dataset": _HELD, "batch_size": 2}, "custom_hooks": [ema, hook],
        }  # fmt: skip
        updates = EVALUATED_UPDATES if world == 2 else 1
        name = f"evaluated/{engine}@{world}"
        jobs.append(Job(name, [Phase(world, overrides, updates)], resumes=start.name))
        if world == 2:
            without = {**base, "custom_hooks": [ema]}
            jobs.append(Job(f"{name}/without", [Phase(world, without, updates)], resumes=start.name))
    return jobs


PLUGIN = "tests/plugin/config.py"
PLUGIN_TEXT = "tests/plugin_text/config.py"
PLUGIN_CHAIN = (("zero2", 2, 3), ("FULL_SHARD", 2, 6), ("zero3", 2, 9), ("single", 1, None))
"""Engine, processes, and the update in the middle of which the run is killed; a checkpoint is saved every second."""
PLUGIN_UPDATES = 12
PLUGIN_ENGINES = (("single", 1), ("zero2", 2), ("zero3", 2), ("FULL_SHARD", 2))
PLUGIN_TEXT_UPDATES = 6
MUON = {"type": "Muon", "lr": 2e-2, "adamw": {"lr": 2e-3}}


def plugin(*, full: bool) -> list[Job]:
    """The packages ``tests/plugin`` and ``tests/plugin_text``, as a user of ``tools/train.py`` trains them.

    The regression is never stopped, on each engine; and killed three times, resumed each time under another engine.
    The texts are trained on each engine, and by Muon where that is possible.
    """
    jobs = [Job(f"plugin/{engine}", [_regression(engine, world)]) for engine, world in PLUGIN_ENGINES]
    chain = [_regression(engine, world, kill_at=at, resume=i > 0) for i, (engine, world, at) in enumerate(PLUGIN_CHAIN)]
    jobs.append(Job("plugin/chain", chain))
    jobs += [Job(f"plugin_text/{engine}", [_numbers(engine, world)]) for engine, world in PLUGIN_ENGINES]
    for engine, world in (("single", 1), ("FULL_SHARD", 2)):
        jobs.append(Job(f"plugin_text/Muon/{engine}", [_numbers(engine, world, optim_wrapper__optimizer=MUON)]))
    return jobs


def _regression(engine: str, world: int, *, kill_at: int | None = None, resume: bool = False) -> Phase:
    hooks: list[dict[str, Any]] = [{"type": "LowestLossHook"}]
    settings = {
        "backend": ALL[engine],
        "train_dataloader__dataset__path": "{data}/rows.txt",
        "train_dataloader__batch_size": 8 // world,
        "custom_hooks": [*hooks, {"type": "KillHook", "at_update": kill_at}] if kill_at else hooks,
        "env": {"dist_timeout_s": 120.0},
        "resume": resume,
    }
    return Phase(world, settings, PLUGIN_UPDATES, killed=kill_at is not None, config_file=PLUGIN)


def _numbers(engine: str, world: int, **overrides: Any) -> Phase:
    settings = {
        "backend": ALL[engine],
        "train_dataloader__dataset__path": "{data}/numbers.txt",
        "train_dataloader__batch_size": 4 // world,
        "env": {"dist_timeout_s": 120.0},
        **overrides,
    }
    return Phase(world, settings, PLUGIN_TEXT_UPDATES, config_file=PLUGIN_TEXT)


BEST_CHAIN = (("zero2", 2, 3), ("FULL_SHARD", 2, 6), ("single", 1, 8))
"""Engine, processes, and the update at which the phase ends; each resumes the one before."""


def best() -> list[Job]:
    """The best checkpoint of one run under three engines: the loss falls, so the *greatest* ``val/loss`` is an early
    one, which ``max_keep_ckpts=1`` would delete.
    """
    phases = []
    for number, (engine, world, updates) in enumerate(BEST_CHAIN):
        hook = {"type": "EvaluateHook", "interval": 1, "unit": "update", "save_best": "val/loss", "rule": "greater"}
        overrides = config(
            engine,
            world,
            custom_hooks=[hook, {"type": "EMAHook", "momentum": 0.1}],
            val_dataloader={"split": 0.3, "batch_size": 2},
            default_hooks__checkpoint__max_keep_ckpts=1,
            resume=number > 0,
        )
        phases.append(Phase(world, overrides, updates))
    return [Job("best", phases)]
