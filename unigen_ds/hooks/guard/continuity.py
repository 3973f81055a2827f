"""After a resume, compute the last update's losses once more, to check that model and data are the saved ones.

Before each save the losses of the update that has just been made are computed at its new weights, without gradients and
dropout, and kept in the checkpoint. After a resume, under any engine and geometry, the same sequences are read again
and must have the same losses. It costs one forward pass for each save and one for each resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Gt

from unigen_ds.config.registry import HOOKS, checked
from unigen_ds.core.errors import TrainingError
from unigen_ds.hooks.base import Hook, Run
from unigen_ds.system import dist
from unigen_ds.system.log import logger

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
    kept = ("losses",)

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
        losses = run.last_losses()
        if losses is None:
            logger().info(
                "Continuity is not checked: the present batch size cannot split the last update into iterations."
            )
            return
        precision = run.backend.topology()["precision"]
        bound = TOLERANCE[precision] if self.tolerance is None else self.tolerance
        worst = max(_relative(losses.get(name), value) for name, value in self.losses.items())
        changes = ", ".join(f"{name} {value:.6g} -> {_text(losses.get(name))}" for name, value in self.losses.items())
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


def _text(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


def _relative(loss: float | None, recorded: float) -> float:
    """Infinite where one of them is missing or not finite."""
    if loss is None or not abs(loss - recorded) < float("inf"):
        return float("inf")
    return abs(loss - recorded) / max(abs(recorded), 1e-12)
