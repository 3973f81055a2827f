"""A weighted mixture of three formats and a user's own data set, filtered and packed: from engine to engine.

Each step of a run is another start, with other engine, processes and loading processes, and kills in an update and in a
save. ``mixture/single`` is one process, never stopped, one sequence a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tests.end_to_end.engines.jobs.cases import CURVE, ENGINES, Job, Phase, config
from tests.end_to_end.engines.jobs.mixture_data import FILTERS, MAX_SAMPLE, NUM_USED

EVERY, SEQUENCES = 2, 12
"""Updates between saves; sequences of an update."""
WINDOW = 64
CUT = {1: (6, 2), 2: (2, 3), 4: (1, 3)}
"""World size -> (batch_size, accumulative_counts)."""


@dataclass(frozen=True)
class Step:
    """One start, after which ``EVERY`` updates more are kept."""

    engine: str
    world: int
    workers: int
    kill: Literal["", "update", "save"] = ""
    """By SIGKILL, two updates after its last complete save: between two micro-batches, or between two files."""


STEPS = (
    Step("zero2", 2, 0, "update"), Step("FULL_SHARD", 4, 3, "save"), Step("single", 1, 0),
    Step("zero1", 2, 3, "update"), Step("HYBRID_SHARD", 4, 0), Step("zero3", 2, 1), Step("SHARD_GRAD_OP", 2, 0),
    Step("NO_SHARD", 1, 0), Step("zero2_offload", 2, 0),
)  # fmt: skip
"""2 -> 4 -> 1 processes with 0 -> 3 -> 0 workers, and then every other engine."""
WORLDS = (2, 4, 1, 4, 2, 1, 2)
"""Each of 1, 2 and 4 processes after each other number."""
_KILLS: tuple[Literal["", "update", "save"], ...] = ("update", "save", "", "update", "save", "", "")
OF_ONE = {
    engine: tuple(Step(engine, world, (0, 3, 0, 3, 1, 0, 3)[i], _KILLS[i]) for i, world in enumerate(WORLDS))
    for engine in ENGINES
}
OF_ONE["single"] = (Step("single", 1, 0, "update"), Step("single", 1, 3, "save"), Step("single", 1, 1))
OF_ONE["HYBRID_SHARD"] = (
    Step("HYBRID_SHARD", 4, 0, "update"), Step("zero2", 2, 3), Step("HYBRID_SHARD", 4, 3, "save"),
    Step("FULL_SHARD", 1, 0), Step("HYBRID_SHARD", 4, 1),
)  # fmt: skip
"""By engine; it needs four processes, so another one is between them."""
UPDATES = EVERY * max(len(STEPS), len(WORLDS))


def mixtures(*, full: bool) -> list[Job]:
    """One process; one run through all engines; ``full``: each engine through all changes of its processes."""
    single = config("single", 1, geometry=(1, SEQUENCES), **_data())
    jobs = [Job("mixture/single", [Phase(1, single, UPDATES)]), Job("mixture/engines", _phases(STEPS))]
    return jobs + [Job(f"mixture/only-{engine}", _phases(steps)) for engine, steps in OF_ONE.items() if full]


def _phases(steps: tuple[Step, ...]) -> list[Phase]:
    phases = []
    for number, step in enumerate(steps):
        last = EVERY * (number + 1)
        overrides = config(
            step.engine,
            step.world,
            geometry=CUT[step.world],
            resume=number > 0,
            train_dataloader__num_workers=step.workers,
            default_hooks__checkpoint__unit="update",
            default_hooks__checkpoint__interval=EVERY,
            default_hooks__checkpoint__max_keep_ckpts=-1,
            **_data(),
        )
        if step.kill:
            hook = {"type": "KillHook", "at_update": last + EVERY, "saving": step.kill == "save"}
            overrides["custom_hooks"] = [*overrides["custom_hooks"], hook]
        phases.append(Phase(step.world, overrides, last + EVERY * bool(step.kill), killed=bool(step.kill)))
    return phases


def _data() -> dict[str, Any]:
    """Three groups of sources, one mandatory, packed in small windows."""
    kind, folder = "UnifiedGenerationDataset", "{data}/mixture"

    def source(file: str, **more: Any) -> dict[str, Any]:
        return {"type": kind, "data_path": f"{folder}/{file}", "filters": FILTERS[file.partition(".")[0]], **more}

    own = {"type": "DatasetAdapter", "dataset": {"type": "tests.end_to_end.engines.jobs.users.OwnDataset"}}
    return {
        "train_dataloader__dataset": [
            source("rows.jsonl", group="pairs", weight=1.5),
            source("pictures.parquet", group="pairs", weight=1),
            source("documents.tar", group="text", num_used_data=NUM_USED),
            {**own, "group": "own"},
        ],
        "train_dataloader__groups": {
            "pairs": {"weight": 1 / 3}, "text": {"weight": 0.1, "mandatory": True}, "own": {"weight": 0.2},
        },
        "train_dataloader__packing": {"type": "BestFitPacking", "window": WINDOW},
        "train_dataloader__seq_length": 120,
        "train_dataloader__max_sample_tokens": MAX_SAMPLE,
        "train_cfg__max_epochs": 40,
        "param_scheduler": CURVE,
    }  # fmt: skip
