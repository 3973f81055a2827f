"""Hooks that question what a run computes: gradients that are not finite, a first update or a resume with wrong losses.

``NanGuardHook``: the backend has left every weight unchanged for an update whose gradients are not finite; its data
counts as consumed. One bad batch is a warning; ``max_consecutive`` in a row mean that the model or the data is broken.
In fp16 an overflow that makes the loss scale smaller is not one of them, unless the loss itself is not finite.

``FirstUpdateHook``: a run can train for days from published weights that are of no use to it: names that did not match,
another tokenizer, latents of another scale. Its first losses show that.

``ContinuityHook``: before each save the losses of the update that has just been made are computed at its new weights,
without gradients and dropout, and kept in the checkpoint. After a resume, under any engine and geometry, the same
sequences are read again and must have the same losses. It costs one forward pass for each save and for each resume.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt

from unigen_ds.config.registry import HOOKS, checked
from unigen_ds.core.errors import TrainingError
from unigen_ds.core.shards import first_names
from unigen_ds.evaluation.generation import trained_family
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.hooks.log.logger import global_losses
from unigen_ds.hooks.save.checkpoint import CheckpointHook
from unigen_ds.system import dist
from unigen_ds.system.log import logger
from unigen_ds.system.outputs import all_finite


@HOOKS.register_module()
class NanGuardHook(Hook):
    """Raises ``TrainingError`` after ``max_consecutive`` updates in a row were not applied, on all ranks alike.

    Args:
        max_consecutive: updates in a row without a finite gradient that stop the run.
    """

    name = "nan_guard"

    @checked()
    def __init__(self, *, max_consecutive: Annotated[int, Ge(1)] = 5) -> None:
        self.max_consecutive = max_consecutive
        self._bad_updates: list[tuple[int, UpdateResult]] = []
        """The present row of updates that were not applied."""

    def after_update(self, run: Run, result: UpdateResult) -> None:
        if result.applied:
            self._bad_updates.clear()
            return
        bad = [value for value in result.local_sums.values() if not math.isfinite(float(value))]
        loss_is_finite = not dist.sum_floats([float(len(bad))])[0]  # of all ranks, which skip alike
        if result.scale_fell and loss_is_finite:
            logger().info("update %d: the gradient overflowed at the loss scale %g, which is now smaller; no weight"
                          " changed", run.progress.updates, result.loss_scale)  # fmt: skip
            return
        first, stop = result.sequences
        self._bad_updates.append((run.progress.updates, result))
        logger().warning(
            "update %d (sequences %d:%d): the %s is not finite; no weight changed, it is skipped (%d of %d"
            " in a row that stop the run)",
            run.progress.updates, first, stop, "gradient" if loss_is_finite else "loss",
            len(self._bad_updates), self.max_consecutive,
        )  # fmt: skip
        if len(self._bad_updates) >= self.max_consecutive:
            (first_update, first_result), (last_update, last_result) = self._bad_updates[0], self._bad_updates[-1]
            first, stop = first_result.sequences[0], last_result.sequences[1]
            ids = [name for _, result in self._bad_updates for name in result.sample_ids]
            raise TrainingError(
                f"{len(self._bad_updates)} updates in a row had a loss or gradients that are not finite: updates"
                f" {first_update} to {last_update}, sequences {first}:{stop}",
                remedy="lower the learning rate, resume from an earlier checkpoint, or look at the data: `python"
                f" tools/inspect_data.py CONFIG --sequences {first}:{stop}` shows all of these samples:"
                f" {first_names(ids)}",
            )

    def after_train(self, run: Run) -> None:
        """The last save checks this; a run without one must not end as complete either."""
        if not any(isinstance(hook, CheckpointHook) for hook in run.hooks):
            bad = not all(map(all_finite, run.backend.trained_tensors()))
            if dist.sum_floats([float(bad)])[0]:
                names = [shard.name for shard in run.backend.master_shards() if not all_finite(shard.data)]
                raise TrainingError(
                    "training ends with weights that are not finite" + (f": {names[0]}" if names else ""),
                    remedy="lower the learning rate, or look at the data (tools/inspect_data.py)",
                )


KNOWS = 0.9
"""A loaded model whose first loss is more than this share of chance knows nothing of its task."""
LARGEST, SMALLEST = 10.0, 1e-5
"""Root mean square of a weight matrix; those of published models are between 0.005 and 1."""


@HOOKS.register_module()
class FirstUpdateHook(Hook):
    """Compares the first losses of a fine-tune with chance and with recorded ones, and looks at what was loaded.

    Args:
        expected: loss terms of the published model, as ``dict(text=0.9, image=0.4)``, for example those of a first
            update that was known to be good; None: no comparison but with chance.
        factor: a first loss of more than so many times the expected one is a warning.

    Chance is ``Family.chance_level``; a term of which the family states none is not compared with it. A run that begins
    from random weights, and a resume, are not looked at.
    """

    name = "first_update"

    @checked()
    def __init__(self, *, expected: Mapping[str, float] | None = None, factor: Annotated[float, Gt(1)] = 1.5) -> None:
        self.expected, self.factor = dict(expected or {}), factor
        self._begins = False

    def before_train(self, run: Run) -> None:
        loads = run.config.get("load_from") or (run.config.get("model") or {}).get("pretrained")
        self._begins = run.progress.updates == 0 and bool(loads)
        if self._begins:
            number, problems = _tensors(run)
            if dist.is_main():
                logger().info("First update: the values of %s tensors are looked at.", f"{number:,}")
                for problem in problems:
                    logger().warning("First update: %s", problem)

    def after_update(self, run: Run, result: UpdateResult) -> None:
        if not self._begins:
            return
        self._begins = False
        means = {key.removeprefix("loss/"): value for key, value in global_losses(result).items() if key != "loss"}
        losses = {name: value for name, value in means.items() if value is not None}
        if not dist.is_main():
            return
        levels = trained_family(run.backend)[0].chance_level(run.processor)
        chance = {name: level for name, level in levels.items() if name in losses}
        texts = [", ".join(f"{name} {value:.4g}" for name, value in each.items()) for each in (losses, chance)]
        logger().info("First update: losses %s", "; chance is ".join(filter(None, texts)) + ".")
        problems = [*self._loss_problems(losses, chance)]
        for problem in problems:
            logger().warning("First update: %s", problem)
        if problems:
            logger().warning("First update: the likely causes are in docs/checkpoints/load_from.md#the-first-update")

    def _loss_problems(self, losses: Mapping[str, float], chance: Mapping[str, float]) -> Iterator[str]:
        """A sentence for each loss that a trained model would not have."""
        for name, loss in losses.items():
            if not math.isfinite(loss):
                yield f"the loss {name} is {loss}"
            elif loss >= KNOWS * chance.get(name, math.inf):
                yield (
                    f"the loss {name} is {loss:.4g}, and chance is {chance[name]:.4g}: the task is new to the loaded"
                    " weights, or they are not the trained ones"
                )
            elif loss > self.factor * self.expected.get(name, math.inf):
                expected = f"{self.factor:g} times the expected {self.expected[name]:.4g}"
                yield f"the loss {name} is {loss:.4g}, more than {expected} (FirstUpdateHook.expected)"
        if missing := ", ".join(sorted(set(self.expected) - set(losses))):
            yield f"FirstUpdateHook.expected has {missing}, of which this update had no targets"


@torch.no_grad()
def _tensors(run: Run) -> tuple[int, list[str]]:
    """The number of tensors, and what is wrong with their values. Collective; the same for every engine."""
    backend, config = run.backend, run.config
    names = [*backend.trainable_sizes(), *backend.frozen_sizes()]
    at = {name: i for i, name in enumerate(names)}
    sums = torch.zeros(len(names), 2, dtype=torch.float64)  # of squares, and elements: replicas count in both
    for shard in (*backend.master_shards(), *backend.frozen_shards()):
        if shard.data.is_floating_point():
            norm = float(torch.linalg.vector_norm(shard.data, dtype=torch.float64)) if shard.data.numel() else 0.0
            sums[at[shard.name]] += torch.tensor([norm**2, shard.data.numel()])
    whole = torch.tensor(dist.sum_floats(sums.flatten().tolist())).view(-1, 2)
    scale = {name: math.sqrt(square / number) for name, (square, number) in zip(names, whole.tolist(), strict=True)
             if number}  # fmt: skip
    layers = (torch.nn.Linear, torch.nn.Embedding, torch.nn.modules.conv._ConvNd)
    matrices = {f"{name}.weight" for name, module in backend.model.named_modules() if isinstance(module, layers)}
    finite = {name: value for name, value in scale.items() if name in matrices and math.isfinite(value)}
    # where not all weights were read, some keep their initial values, which may be zeros
    parts = not isinstance((config.get("model") or {}).get("pretrained"), str | None)
    missing = "missing" in ((config.get("load_cfg") or {}).get("allow") or ())
    complete = not parts and not config.get("lora") and not missing
    kinds = {
        "are not finite": [name for name, value in scale.items() if not math.isfinite(value)],
        "of weight matrices are all zeros": [name for name, value in finite.items() if value == 0 and complete],
        f"of weight matrices have a root mean square of more than {LARGEST:g} or less than {SMALLEST:g}": [
            name for name, value in finite.items() if value > 0 and not SMALLEST <= value <= LARGEST
        ],
    }
    return len(names), [
        f"{len(some):,} of {len(names):,} tensors {what}, such as {', '.join(some[:3])}. Likely causes: a damaged or"
        " incomplete file, or names of weights that did not match."
        for what, some in kinds.items()
        if some
    ]


TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}
"""Relative. Engines and geometries differ by rounding: 1e-6 in fp32; bf16 has 8 bits of precision."""


@HOOKS.register_module()
class ContinuityHook(Hook):
    """Compares the losses of the checkpoint's last update with those computed after the resume.

    Args:
        tolerance: largest relative difference of the last update's losses after a resume; None: 1e-4 in fp32, 2e-2 in
            bf16, 5e-3 in fp16.
        on_mismatch: ``'warn'``, or ``'halt'``: stop with an error; the checkpoint is left as it is.
    """

    name = "continuity"
    state_attributes = ("losses",)

    @checked()
    def __init__(
        self, *, tolerance: Annotated[float, Gt(0)] | None = None, on_mismatch: Literal["warn", "halt"] = "warn"
    ) -> None:
        self.tolerance, self.on_mismatch = tolerance, on_mismatch
        self.losses: dict[str, float] = {}

    def before_save_checkpoint(self, run: Run, metrics: dict[str, float]) -> None:
        self.losses = run.last_losses() or {}

    def after_load_checkpoint(self, run: Run, manifest: Mapping[str, Any]) -> None:
        if not self.losses:
            return
        if (losses := run.last_losses()) is None:
            logger().info("Continuity is not checked: the present batch size cannot split the last update into"
                          " iterations.")  # fmt: skip
            return
        precision = run.backend.topology()["precision"]
        bound = TOLERANCE[precision] if self.tolerance is None else self.tolerance
        pairs = {name: (value, losses.get(name, float("nan"))) for name, value in self.losses.items()}
        differences = [abs(now - was) / max(abs(was), 1e-12) for was, now in pairs.values()]
        worst = max(math.inf if math.isnan(one) else one for one in differences)
        changes = ", ".join(f"{name} {was:.6g} -> {now:.6g}" for name, (was, now) in pairs.items())
        if worst <= bound:
            logger().info("Continuity: the last update's losses are the recorded ones (%s).", changes)
            return
        problem = f"the last update's losses are not the recorded ones: {changes} (relative difference {worst:.1e})"
        if self.on_mismatch == "halt":
            raise TrainingError(
                problem,
                allowed=f"a difference of {bound:g}",
                remedy="look for what changed: code, data under the same names, precision; or set on_mismatch='warn'",
            )
        if dist.is_main():  # the ranks agree on the losses
            logger().warning("Continuity: %s, more than %g: model or data may not be what was saved.", problem, bound)
