"""At the end of the digits run: ``samples.png``, ``curves.png`` and ``results.json`` in the work dir."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import torch
from annotated_types import Ge

from unigen_ds.config.registry import HOOKS, checked
from unigen_ds.core.errors import ConfigError
from unigen_ds.evaluation.plots import plot_curves
from unigen_ds.examples.digits.dataset import DigitsDataset, write_digits
from unigen_ds.examples.digits.scores import evaluate, plot_samples
from unigen_ds.families.bagel.flow_settings import FlowSettings
from unigen_ds.hooks.base import Hook, Run
from unigen_ds.hooks.evaluate.ema import ema_of
from unigen_ds.system import dist
from unigen_ds.system.files import write_text_atomic
from unigen_ds.system.journals import METRICS_FILE
from unigen_ds.system.log import logger


@HOOKS.register_module()
class DigitsReportHook(Hook):
    """Runs once the training is complete (a run that was only stopped has nothing to report), with the EMA weights.

    Args:
        num_timesteps: times of the sampler, one more than its steps.
        text_scale: guidance towards the prompt; 1 is none.
        seed: of the first noise of each drawing.
        root: folder of the digits; None: that of the run's ``DigitsDataset``.
    """

    name = "digits_report"

    @checked()
    def __init__(
        self,
        *,
        num_timesteps: Annotated[int, Ge(2)] = 26,
        text_scale: float = 2.0,
        seed: int = 0,
        root: str | None = None,
    ) -> None:
        self.flow = FlowSettings(num_timesteps=num_timesteps, text_scale=text_scale)
        self.seed, self.root = seed, root

    def before_run(self, run: Run) -> None:
        self._root(run)  # refused now, not when the training is complete

    def _root(self, run: Run) -> Path:
        if self.root is not None:
            return write_digits(Path(self.root))
        roots = [dataset.root for dataset in run.datasets if isinstance(dataset, DigitsDataset)]
        if not roots:
            problem = (
                f"DigitsReportHook.root is not given, and the run has no DigitsDataset but {len(run.datasets)} other"
            )
            raise ConfigError(problem, remedy="root='work_dirs/data/digits', or any folder that does not exist")
        return roots[0]

    def after_run(self, run: Run) -> None:
        if not run.finished:
            return
        ema, model = ema_of(run), run.backend.model
        root = self._root(run)
        model.eval()
        try:
            with ema.swapped(run) if ema else nullcontext(), torch.no_grad():
                scores = evaluate(model, run.processor, root, flow=self.flow, seed=self.seed)
        finally:
            model.train()
        if not dist.is_main():
            return
        work_dir = run.work_dir
        write_text_atomic(work_dir / "results.json", json.dumps(scores.results, indent=1) + "\n")
        plot_samples(scores, root, work_dir / "samples.png")
        plot_curves(work_dir / METRICS_FILE, work_dir / "curves.png")
        logger().info(
            "Of %d drawn digits the classifier reads %.1f %% as requested (of real ones it reads %.1f %% correctly);"
            " %.1f %% of %d held-out images read correctly. Pictures: %s, %s; numbers: %s.",
            scores.results["drawn"],
            100 * scores.results["prompt_accuracy"],
            100 * scores.results["judge_accuracy"],
            100 * scores.results["caption_accuracy"],
            scores.results["captioned"],
            work_dir / "samples.png",
            work_dir / "curves.png",
            work_dir / "results.json",
        )
