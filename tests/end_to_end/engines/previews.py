"""Hooks and a metric of the engine tests for what a model says and draws in training. Every worker imports it."""

from __future__ import annotations

from typing import Any

from tests.end_to_end.engines.cases import FAILS_AT
from unigen_ds.config.registry import HOOKS, METRICS
from unigen_ds.evaluation.metrics.text_metrics import ExactMatch
from unigen_ds.hooks.base import Run
from unigen_ds.hooks.evaluate.preview import PreviewHook
from unigen_ds.system import dist


@HOOKS.register_module()
class FailingPreviewHook(PreviewHook):
    """On the last rank, at one update, it fails as no one expects, after its first answer."""

    def preview(self, run: Run) -> None:
        self._fails = run.progress.updates == FAILS_AT and dist.rank() == dist.world_size() - 1
        super().preview(run)

    def _make(self, inferencer: Any, number: int, request: Any) -> Any:
        made = super()._make(inferencer, number, request)
        if self._fails:
            raise RuntimeError("on purpose")
        return made


@METRICS.register_module()
class FailsOnTheLastRank(ExactMatch):
    """As a program does that ends."""

    name = "fails"

    def rows(self, predictions: Any, references: Any, keys: Any) -> Any:
        if dist.rank() == dist.world_size() - 1:
            raise BrokenPipeError("on purpose")
        return super().rows(predictions, references, keys)
