"""Runs of ``test_not_finite.py``: each case in the same processes, one after the other; prints one JSON line a case."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import tests.end_to_end.engines.jobs.fp16_on_cpu  # noqa: F401
from tests.text_run import word_config
from unigen_ds.config.registry import HOOKS
from unigen_ds.core.errors import TrainingError
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.hooks.evaluate.ema import ema_of
from unigen_ds.runner import Runner
from unigen_ds.system import dist
from unigen_ds.system.journals import read_lines

SAVES = {"default_hooks__checkpoint": {"interval": 1, "by_epoch": False, "max_keep_ckpts": 2}}


@HOOKS.register_module()
class SpoilHook(Hook):
    """One element of this rank's state becomes infinite or NaN after an update."""

    priority = 65

    def __init__(self, *, what: str, update: int, rank: int = 0) -> None:
        self.what, self.update, self.rank = what, update, rank

    def after_update(self, run: Run, result: UpdateResult) -> None:
        if run.progress.updates == self.update and dist.rank() == self.rank:
            if self.what == "weight":
                data = run.backend.master_shards()[0].data
            elif self.what == "ema":
                data = ema_of(run).average.shards[0].data  # type: ignore[union-attr]
            else:
                data = run.backend.moments(self.what)[0].data
            data.view(-1)[-1] = torch.nan if self.what == "weight" else torch.inf


def train_run(work_dir: Path, **changes: Any) -> dict[str, Any]:
    """What a run on ``train.jsonl`` beside its work dir leaves."""
    error, own = None, work_dir.parent / f"config_{dist.env_rank()}"  # each rank writes and reads its own
    own.mkdir(exist_ok=True)
    data = {"train_dataloader__dataset__data_path": str(work_dir.parent / "train.jsonl")}
    try:
        Runner.from_cfg(word_config(own, work_dir=str(work_dir), **data, **changes)).train()
    except TrainingError as training_error:
        error = str(training_error)
    hint = work_dir / "last_checkpoint"
    lines = [line for line in read_lines(work_dir / "metrics.jsonl") if "loss" in line]
    return {
        "error": error,
        "checkpoints": sorted(path.name for path in work_dir.iterdir() if ".pth" in path.name),
        "hint": Path(hint.read_text().strip()).name if hint.exists() else None,
        "applied": [line["applied"] for line in lines],
        "scales": [line.get("loss_scale") for line in lines],
    }


def main() -> None:
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    for name, port, changes in cases:
        os.environ["MASTER_PORT"] = str(port)
        print(json.dumps({"name": name, **train_run(folder / name, launcher="pytorch", **changes)}), flush=True)


if __name__ == "__main__":
    main()
