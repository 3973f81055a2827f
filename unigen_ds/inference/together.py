"""Forward passes of a model that is being trained, for an inferencer: what each rank generates may differ.

Where an engine gathers weights in a forward pass (``Backend.gathers_in_forward``), all ranks make a pass or none. They
have different prompts and answers of different lengths, so before each pass they agree (one small sum over gloo) on the
method that most of them need. The others make an idle pass of the same method, or, where they have no work
left, until nobody has any. A rank that fails reports it in its next turn, and all of them end. A rank that fails
*inside* of a pass (out of memory) leaves the others in a collective, as in training: ``env.dist_timeout_s`` ends them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from unigen_ds.backends.base import Backend
from unigen_ds.core.errors import TrainingError
from unigen_ds.system import dist


class AnotherRankFailed(TrainingError):
    """Raised on the ranks that have not failed themselves."""


class TrainedModel:
    """The model of a prepared engine, with its attributes; ``forward`` and ``forward_methods`` are made together."""

    idle: Callable[[str], tuple[Any, ...]] | None = None
    """Name of a method of the model -> arguments with which it does nothing; None: all ranks must make the same calls.
    Set when the inferencer is known."""

    def __init__(self, backend: Backend) -> None:
        self._model: Any = backend.model
        self.compute_device = backend.device
        self._methods = ("forward", *getattr(backend.model, "forward_methods", ()))
        self._together = backend.gathers_in_forward and dist.world_size() > 1
        self.in_step = backend.gathers_in_forward or any(hasattr(p, "full_tensor") for p in self._model.parameters())
        """Whether weights are whole inside of these methods alone: elsewhere those of FSDP are DTensors, or parts."""

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._model, name)
        return partial(self._call, name) if name in self._methods else attribute

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._call("forward", *arguments, **options)

    @property
    def shares(self) -> bool:
        """Whether each rank may generate something else."""
        return not self._together or self.idle is not None

    def finish(self, *, failed: bool = False) -> None:
        """This rank has no more work: help the others until they have none, or report a failure. Collective."""
        if self._together:
            self._help(None, failed=failed)

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        if self._together:
            self._help(name)
        return self._pass(name, *arguments, **options)

    def _pass(self, name: str, *arguments: Any, **options: Any) -> Any:
        return (self._model if name == "forward" else getattr(self._model, name))(*arguments, **options)

    def _help(self, own: str | None, *, failed: bool = False) -> None:
        """Make idle passes until it is this rank's turn, or, where it needs none, until no rank needs any."""
        while True:
            votes = dist.sum_floats([float(failed), *(float(name == own) for name in self._methods)])
            if failed:
                return
            if votes[0]:
                raise AnotherRankFailed(f"{votes[0]:.0f} other process(es) failed")
            counts = dict(zip(self._methods, votes[1:], strict=True))
            turn = max(counts, key=counts.__getitem__)
            if not counts[turn]:
                return
            if self.idle is None and counts[turn] < dist.world_size():
                raise AnotherRankFailed(
                    "the processes made different calls of the model",
                    remedy="give this family's inferencer `idle(method)` (docs/extending/answers.md), or use --backend"
                    " deepspeed:zero2",
                )
            if turn == own:
                return
            assert self.idle is not None
            self._pass(turn, *self.idle(turn))
