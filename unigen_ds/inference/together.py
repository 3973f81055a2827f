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

Idle = Callable[[str], "tuple[Any, ...]"]
"""Name of a method of the model -> arguments with which it does nothing."""


class AnotherRankFailed(TrainingError):
    """Raised on the ranks that have not failed themselves."""


class TrainedModel:
    """The model of an engine, with the attributes of the model; ``forward`` and ``forward_methods`` are made together.

    Args:
        backend: prepared.

    ``idle`` is set when the inferencer is known; None: it has none, and all ranks must make the same calls.
    """

    def __init__(self, backend: Backend) -> None:
        self._model: Any = backend.model
        self.compute_device = backend.device
        self.idle: Idle | None = None
        self._methods = ("forward", *getattr(backend.model, "forward_methods", ()))
        self.in_step: bool = backend.gathers_in_forward
        """Whether a forward pass gathers weights: then all ranks make it together, by the methods of the model."""
        self._together = self.in_step and dist.world_size() > 1

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._model, name)
        return partial(self._call, name) if name in self._methods else attribute

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._call("forward", *arguments, **options)

    @property
    def shares(self) -> bool:
        """Whether each rank may generate something else."""
        return not self._together or self.idle is not None

    def finish(self) -> None:
        """This rank has no more work: help the others until they have none. Collective."""
        while self._together and (turn := self._turn(None)) is not None:
            self._pass_idle(turn)

    def fail(self) -> None:
        """Report a failure to the others, instead of ``finish``. Collective."""
        if self._together:
            dist.sum_floats(self._vote(None, failed=True))

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        number = self._methods.index(name)
        while self._together and (turn := self._turn(number)) != number:
            assert turn is not None
            self._pass_idle(turn)
        return self._method(number)(*arguments, **options)

    def _method(self, number: int) -> Any:
        return getattr(self._model, self._methods[number]) if number else self._model

    def _pass_idle(self, number: int) -> None:
        assert self.idle is not None
        self._method(number)(*self.idle(self._methods[number]))

    def _turn(self, own: int | None) -> int | None:
        """The method that is next, the same on all ranks; None: no rank needs any. Collective."""
        failed, *needed = dist.sum_floats(self._vote(own))
        if failed:
            raise AnotherRankFailed(f"{failed:.0f} other process(es) failed")
        turn = max(range(len(needed)), key=lambda number: needed[number])
        if not needed[turn]:
            return None
        if self.idle is None and needed[turn] < dist.world_size():
            raise AnotherRankFailed(
                "the processes made different calls of the model",
                remedy="give the inferencer of this family `idle(method)` (docs/inference.md), or use --backend"
                " deepspeed:zero2",
            )
        return turn

    def _vote(self, own: int | None, *, failed: bool = False) -> list[float]:
        return [float(failed), *(float(number == own) for number in range(len(self._methods)))]
