"""The learning rate after a resume with another batch size: mmengine 0.10.7's own Runner, ours, and no interruption.

32 samples, 4 epochs, cosine from 0.1 to 0.001 over all of them; stopped after epoch 2 at batch 4, and resumed at batch
8 and at batch 2. Both Runners really train and write and read their own checkpoints. The measure is the largest
difference from the uninterrupted curve, as a function of the samples consumed. Ours keeps the effective batch by
accumulation where possible (4 -> 2 x 2), and uses ``keep-lr`` where it is not (4 -> 8). (mmengine's files contain
pickled objects that torch >= 2.6 refuses to load; here, for files written by this process, the check is switched off.)
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.shared.record import RESULTS, write_result
from tests.tiny import tiny_config
from unigen_ds.examples.digits.dataset import write_digits
from unigen_ds.runner import Runner
from unigen_ds.system.journals import read_lines

SAMPLES, EPOCHS, STOP_AFTER, LR, ETA_MIN = 32, 4, 2, 0.1, 0.001
CURVE = {
    "type": "CosineAnnealingLR",
    "eta_min": ETA_MIN,
    "by_epoch": True,
    "T_max": EPOCHS,
    "convert_to_iter_based": True,
}
Curve = list[tuple[int, float]]
"""(samples consumed before the update, its learning rate)."""


def mmengine_curve(folder: Path, batch_sizes: Sequence[int]) -> Curve:
    """mmengine's Runner: epochs 1 and 2 at the first batch size, the rest at the second, from its own checkpoint."""
    from mmengine.hooks import Hook
    from mmengine.model import BaseModel
    from mmengine.runner import Runner as TheirRunner

    curve: Curve = []

    class Model(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 1)

        def forward(self, x: torch.Tensor, mode: str = "loss") -> Any:
            return {"loss": self.linear(x).square().mean()}

    class Record(Hook):
        priority = "LOWEST"

        def __init__(self, batch_size: int, stop_after: int) -> None:
            self.batch_size, self.stop_after = batch_size, stop_after

        def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            updates = curve[-1][0] + self.before if curve else 0
            curve.append((updates, runner.optim_wrapper.param_groups[0]["lr"]))
            self.before = self.batch_size

        before = 0

        def before_train(self, runner: Any) -> None:
            self.before = batch_sizes[0] if curve else 0

        def after_train_epoch(self, runner: Any) -> None:
            if runner.epoch + 1 == self.stop_after:
                raise KeyboardInterrupt  # after its checkpoint hook has saved

    for part, batch_size in enumerate(batch_sizes):
        runner = TheirRunner(
            model=Model(),
            work_dir=str(folder),
            train_dataloader={
                "batch_size": batch_size,
                "dataset": [{"x": torch.full((1,), float(i))} for i in range(SAMPLES)],
                "sampler": {"type": "DefaultSampler", "shuffle": True},
                "collate_fn": {"type": "default_collate"},
            },
            train_cfg={"by_epoch": True, "max_epochs": EPOCHS},
            optim_wrapper={"optimizer": {"type": "SGD", "lr": LR}},
            param_scheduler=[CURVE],
            default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 1}},
            custom_hooks=[Record(batch_size, STOP_AFTER if part == 0 and len(batch_sizes) > 1 else 0)],
            resume=part > 0,
            experiment_name=f"{folder.name}_{part}",
            log_level="ERROR",
        )
        try:
            runner.train()
        except KeyboardInterrupt:
            continue
    return curve


def our_curve(folder: Path, digits: Path, splits: Sequence[tuple[int, int]]) -> Curve:
    """Our Runner: the same, ``splits`` as (batch_size, accumulative_counts)."""
    data = digits / "32.jsonl"
    records = (digits / "train_caption.jsonl").read_text(encoding="utf-8").splitlines()[:SAMPLES]
    data.write_text("\n".join(records) + "\n", encoding="utf-8")
    for part, (batch_size, counts) in enumerate(splits):
        config = tiny_config(
            folder,
            digits,
            train_dataloader__dataset={"type": "UnifiedGenerationDataset", "data_path": str(data)},
            train_dataloader__batch_size=batch_size,
            train_dataloader__packing=None,
            optim_wrapper__accumulative_counts=counts,
            optim_wrapper__optimizer={"type": "SGD", "lr": LR},
            train_cfg__max_epochs=EPOCHS,
            param_scheduler=[CURVE],
            resume=part > 0,
            on_batch_change="keep-lr",
        )
        stop = STOP_AFTER * SAMPLES // (splits[0][0] * splits[0][1]) if part == 0 and len(splits) > 1 else None
        Runner.from_cfg(config, max_updates=stop).train()
    lines = read_lines(folder / "metrics.jsonl")
    return [(before["sequences"], line["lr"]) for before, line in zip([{"sequences": 0}, *lines], lines, strict=False)]


def worst(curve: Curve, straight: Curve) -> float:
    """Largest difference from the uninterrupted curve, where both have an update at the same number of samples."""
    rates = dict(straight)
    return max(abs(rate - rates[samples]) for samples, rate in curve if samples in rates)


def draw(curves: dict[str, dict[str, Curve]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(curves), figsize=(5.2 * len(curves), 3.4), sharey=True)
    style = {"uninterrupted": ("0.6", "-", 4), "mmengine": ("tab:red", "--", 1.6), "unigen_ds": ("tab:blue", "-", 1.4)}
    for axis, (title, lines) in zip(axes, curves.items(), strict=True):
        for name, curve in lines.items():
            color, dash, width = style[name]
            axis.step(*zip(*curve, strict=True), where="post", label=name, color=color, linestyle=dash, linewidth=width)
        axis.axvline(STOP_AFTER * SAMPLES, color="0.8", linewidth=1)
        axis.set(title=title, xlabel="samples consumed")
    axes[0].set_ylabel("learning rate")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--out", type=Path, default=RESULTS)
    arguments = p.parse_args()
    logging.disable(logging.WARNING)
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    torch.set_num_threads(1)
    curves: dict[str, dict[str, Curve]] = {}
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        digits = write_digits(folder / "digits")
        straight = our_curve(folder / "straight", digits, [(4, 1)])
        theirs_straight = mmengine_curve(folder / "mm_straight", [4])
        assert all(math.isclose(a, b, rel_tol=1e-9) for (_, a), (_, b) in zip(straight, theirs_straight, strict=True))
        for batch, split in ((8, (8, 1)), (2, (2, 2))):
            title = f"batch 4 -> {batch} after epoch {STOP_AFTER}"
            theirs = mmengine_curve(folder / f"mm_{batch}", [4, batch])
            ours = our_curve(folder / f"own_{batch}", digits, [(4, 1), split])
            curves[title] = {"uninterrupted": straight, "mmengine": theirs, "unigen_ds": ours}
            after = [rate for samples, rate in theirs if samples >= STOP_AFTER * SAMPLES]
            figures[title] = {
                "mmengine_worst": worst(theirs, straight), "ours_worst": worst(ours, straight),
                "mmengine_last": theirs[-1][1], "ours_last": ours[-1][1], "uninterrupted_last": straight[-1][1],
                "mmengine_after": after, "ours_after": [r for samples, r in ours if samples >= STOP_AFTER * SAMPLES],
            }  # fmt: skip
    for title, values in figures.items():
        print(title)
        for name, value in values.items():
            if not isinstance(value, list):
                print(f"  {name:<20} {value:.4g}")
    path = write_result("resume_vs_mmengine", {"figures": figures}, folder=arguments.out)
    draw(curves, path.with_suffix(".png"))
    print(f"Written: {path} and {path.with_suffix('.png').name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
