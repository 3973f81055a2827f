"""The loss of a whole epoch, across kills, and its throughput: sums of each update in, means out at its end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from unigen_ds.core.batch import DEFAULT_WEIGHT
from unigen_ds.hooks.base import UpdateResult
from unigen_ds.system import dist

_BLOCK = 64


class EpochMeans:
    """Keeps the sums of updates on the device, which nothing waits for; read at a save and at the end of an epoch."""

    def __init__(self) -> None:
        self._local: dict[str, list[Tensor]] = {}
        """This rank's sums since they were last read, one tensor of each update."""
        self._blocks: dict[str, list[Tensor]] = {}
        """Those before, ``_BLOCK`` of them in a tensor: they need less memory."""
        self._sums: dict[str, float] = {}
        """Over all ranks, what was read before."""
        self._counts: dict[str, float] = {}
        self._tokens = 0
        self._since = time.perf_counter()

    def start(self) -> None:
        """Training begins: what was before does not count."""
        self._since = time.perf_counter()

    def add(self, result: UpdateResult) -> None:
        if result.applied:  # the sums of a skipped update may not be finite
            for name, value in result.local_sums.items():
                values = self._local.setdefault(name, [])
                values.append(value)
                if len(values) == _BLOCK:
                    self._blocks.setdefault(name, []).append(torch.stack(values))
                    values.clear()
            for name, count in result.counts.items():
                self._counts[name] = self._counts.get(name, 0.0) + count
        self._tokens += result.tokens

    def settle(self) -> None:
        """Read the device and sum over ranks. Collective."""
        names = sorted(self._counts)
        local = [self._sum(name) for name in names]
        for name, value in zip(names, dist.sum_floats(local), strict=True):
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._local, self._blocks = {}, {}

    def _sum(self, name: str) -> float:
        """Exact, so blocks do not change it."""
        singles = self._local.get(name)
        blocks = [*self._blocks.get(name, ()), *([torch.stack(singles)] if singles else ())]
        return math.fsum(chain.from_iterable(block.tolist() for block in blocks))

    def finish(self, loss_weights: Mapping[str, float]) -> dict[str, float]:
        """``epoch_loss``, ``epoch_loss/<term>`` and ``epoch_tokens_per_second``; the next epoch begins. Collective.

        Means over all targets of the epoch; terms without targets are left out. The throughput is that of this process.
        """
        self.settle()
        means = {name: self._sums.get(name, 0.0) / count for name, count in self._counts.items() if count}
        found = {f"epoch_loss/{name}": mean for name, mean in sorted(means.items())}
        if means:
            found = {
                "epoch_loss": sum(loss_weights.get(name, DEFAULT_WEIGHT) * mean for name, mean in means.items()),
                **found,
            }
        found["epoch_tokens_per_second"] = self._tokens / (time.perf_counter() - self._since)
        self._sums, self._counts, self._tokens = {}, {}, 0
        self.start()
        return found

    def state_dict(self) -> dict[str, Any]:
        """Of what ``settle`` has read. Without times: a resumed run has the same state as one that was never killed."""
        return {"sums": self._sums, "counts": self._counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums, self._counts = dict(state["sums"]), dict(state["counts"])
