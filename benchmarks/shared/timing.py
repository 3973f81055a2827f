"""Two sides that run in turns in one process: the length of a turn, its clock, and the generators of each side."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Plan:
    """The turns of the two sides, in updates."""

    pairs: int
    timed: int
    lead: int = 5
    """Updates of a block before the timed ones: they consume the batches prepared during the other side's turn."""
    warm_up: int = 20
    settle_s: float = 0.3

    def __post_init__(self) -> None:
        if self.pairs < 2 or self.pairs % 2 or self.timed < 1:
            raise SystemExit("error: --pairs is an even number, --timed at least 1")

    @property
    def block(self) -> int:
        return self.lead + self.timed

    @property
    def total(self) -> int:
        return self.warm_up + self.pairs * self.block


@dataclass(frozen=True)
class Block:
    """The timed updates of one turn: seconds of wall time, of this process's CPU time, and of waiting for data."""

    wall: float
    cpu: float
    data: float


class Stopwatch:
    """Wall and CPU time since its creation; the device is idle at both ends."""

    def __init__(self) -> None:
        _synchronise()
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def block(self, data: float) -> Block:
        _synchronise()
        return Block(time.perf_counter() - self._wall, time.process_time() - self._cpu, data)


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class RandomState:
    """The torch generators of one side, restored for its turn, so that both sides use the same dropout masks."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
