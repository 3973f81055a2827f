"""A small run for hook tests: real progress, ruler, clock and work dir; the results of the training are arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from unigen_ds.backends.base import Backend
from unigen_ds.core.progress import Geometry, Progress, Ruler
from unigen_ds.hooks.base import Hook, UpdateResult
from unigen_ds.system.clock import Clock


class TinyRun:
    """Satisfies ``hooks.base.Run``. One update = 2 iterations of 2 sequences; an epoch has 40 sequences."""

    def __init__(self, work_dir: Path, hooks: Sequence[Hook] = (), *, progress: Progress | None = None) -> None:
        self.geometry = Geometry(batch_size=2, accumulative_counts=2)
        self.ruler = Ruler(self.geometry, sequences_per_epoch=40)
        self.progress = progress or Progress()
        self.previous = self.progress
        self.total_sequences = 80.0
        self.work_dir = work_dir
        self.peak_tflops: float | None = None
        self.config: Mapping[str, Any] = {"optim_wrapper": {"optimizer": {"type": torch.optim.AdamW, "lr": 0.5}}}
        self.clock = Clock()
        self.hooks = hooks
        self.stopped: str | None = None
        self.datasets: Sequence[Any] = ()
        self.skips: Sequence[Any] = ()
        self.iteration = None

    @property
    def backend(self) -> Backend:
        raise AssertionError("these hooks do not touch the engine")

    def request_stop(self, reason: str, *, error: Exception | None = None) -> None:
        self.stopped = reason

    def save_checkpoint(self) -> Path | None:
        raise AssertionError("these hooks do not save")

    def call(self, point: str, *arguments: Any) -> None:
        for hook in sorted(self.hooks, key=lambda hook: hook.priority):
            getattr(hook, point)(self, *arguments)

    def start(self, *, resumed_from: str | None = None) -> None:
        """The calls of the runner before the first update."""
        self.call("before_run")
        if resumed_from is not None:
            self.call("after_load_checkpoint", {"path": resumed_from, "progress": asdict(self.progress)})
        self.call("before_train")

    def update(
        self,
        *,
        text: float = 6.0,
        image: float = 2.0,
        image_count: float = 4.0,
        applied: bool = True,
        scale_fell: bool = False,
        tokens: int = 100,
        grad_norm: float = 1.5,
    ) -> UpdateResult:
        """One update, with sums ``text`` over 3 targets and ``image`` over ``image_count``."""
        first, samples = self.progress.sequences, 4
        stop = first + self.geometry.global_batch_size
        result = UpdateResult(
            local_sums={"text": torch.tensor(text), "image": torch.tensor(image)},
            counts={"text": 3.0, "image": image_count},
            loss_weights={"text": 1.0, "image": 0.5},
            grad_norm=torch.tensor(grad_norm if applied else float("nan")),
            applied=applied,
            loss_scale=4.0 if scale_fell else None,
            scale_fell=scale_fell,
            hparams=[{"name": "base", "lr": 0.1}, {"name": "connector", "lr": 0.2}],  # type: ignore[dict-item]
            num_skipped=1 if first == 4 else 0,
            sequences=(first, stop),
            sample_digest=f"digest-{first}",
            sample_ids=[f"source:{index}:0" for index in range(first, first + samples)],
            tokens=tokens,
        )
        self.previous = self.progress
        self.progress = self.progress.advance(
            sequences=stop - first, samples=samples, tokens=tokens, epoch=stop // 40, applied=applied
        )
        self.call("after_update", result)
        return result

    def finish(self) -> None:
        self.call("after_train")
        self.call("after_run")
