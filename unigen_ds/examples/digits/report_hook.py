"""At the end of the digits run: a report about drawn and read digits."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge
from PIL import Image

from unigen_ds.config.registry import HOOKS, checked
from unigen_ds.examples.demo import ReportHook
from unigen_ds.examples.digits.dataset import DigitsDataset, write_digits
from unigen_ds.examples.digits.scores import evaluate, sample_sheet
from unigen_ds.families.bagel.flow_settings import FlowSettings
from unigen_ds.hooks.base import Run
from unigen_ds.hooks.evaluate.ema import ema_of
from unigen_ds.system import dist


@HOOKS.register_module()
class DigitsReportHook(ReportHook):
    """Runs once the training is complete (a run that was only stopped has nothing to report), with the EMA weights.

    Args:
        num_timesteps: times of the sampler, one more than its steps.
        text_scale: guidance towards the prompt; 1 is none.
        seed: of the first noise of each drawing.
        root: folder of the digits; None: that of the run's ``DigitsDataset``.
    """

    name = "digits_report"
    dataset = DigitsDataset
    write_files = write_digits

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

    def measure(self, run: Run, root: Path) -> tuple[dict[str, Any], Image.Image, str] | None:
        ema, model = ema_of(run), run.backend.model
        model.eval()
        try:
            with ema.swapped(run) if ema else nullcontext(), torch.no_grad():
                scores = evaluate(model, run.processor, root, flow=self.flow, seed=self.seed)
        finally:
            model.train()
        if not dist.is_main():
            return None
        results = scores.results
        summary = (
            f"Of {results['drawn']} drawn digits the classifier reads {results['prompt_accuracy']:.1%} as requested (of"
            f" real ones it reads {results['judge_accuracy']:.1%} correctly); {results['caption_accuracy']:.1%} of"
            f" {results['captioned']} held-out images read correctly."
        )
        return results, sample_sheet(scores, root), summary
