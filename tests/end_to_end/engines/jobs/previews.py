"""Hooks and a metric of the engine tests for what a model says and draws in training. Every worker imports it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tests.end_to_end.engines.jobs.cases import FAILS_AT
from unigen_ds.config.registry import DATASETS, HOOKS, METRICS, build
from unigen_ds.evaluation.generation import Answering, Records, answers
from unigen_ds.evaluation.metrics.text_metrics import ExactMatch
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.hooks.evaluate.preview import PreviewHook
from unigen_ds.system import dist


@HOOKS.register_module()
class FailingPreviewHook(PreviewHook):
    """On the last rank, at one update, it fails as no one expects, after its first answer."""

    def preview(self, run: Run) -> None:
        self._fails = run.progress.updates == FAILS_AT and dist.rank() == dist.world_size() - 1
        super().preview(run)

    def _make(self, inferencer: Any, number: int, request: Any) -> Any:
        preview = super()._make(inferencer, number, request)
        if self._fails:
            raise RuntimeError("on purpose")
        return preview


@METRICS.register_module()
class FailsOnTheLastRank(ExactMatch):
    """As a program does that ends."""

    name = "fails"

    def rows(self, predictions: Any, references: Any, keys: Any) -> Any:
        if dist.rank() == dist.world_size() - 1:
            raise BrokenPipeError("on purpose")
        return super().rows(predictions, references, keys)


@HOOKS.register_module()
class AnswersHook(Hook):
    """After the update ``at_update``: what ``answers`` returns on each rank."""

    def __init__(self, at_update: int, data_path: str, kinds: list[str]) -> None:
        self.at_update, self.data_path, self.kinds = at_update, data_path, kinds

    def after_update(self, run: Run, result: UpdateResult) -> None:
        if run.progress.updates != self.at_update:
            return
        spec = {"type": "UnifiedGenerationDataset", "data_path": self.data_path}
        dataset = build(DATASETS, spec, where="test", processor=run.processor)
        results: dict[str, Any] = {}
        for kind in self.kinds:
            answering = Answering(seed=1, batch_size=2, max_new_tokens=4, flow={"num_timesteps": 2})
            replies = answers(run.backend, Records([dataset], ["mixed"], run.processor), kind, answering, max_samples=3)
            rows = [[a.key, _plain(a.prediction), _plain(a.reference), a.prompt] for a in replies.mine]
            results[kind] = {"rows": rows, "asked": replies.num_asked, "left_out": dict(replies.left_out)}
        (run.work_dir / f"answers_{dist.rank()}.json").write_text(json.dumps(results), encoding="utf-8")


def _plain(value: Any) -> Any:
    return value if isinstance(value, str) else np.asarray(value).astype(int).tolist()
