"""An fp32 average of the weights, moved once per applied update, on the engine's own shards, without communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Annotated, Any

import torch
from annotated_types import Gt, Lt
from torch import Tensor

from unigen_ds.config.registry import HOOKS, checked
from unigen_ds.config.values import Choices, NotNegative
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.shards import EMA, Shard, ShardReader, copies_in_one_buffer, misfit, refuse_misfit
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.system import dist
from unigen_ds.system.log import logger

Momentum = Annotated[float, Gt(0), Lt(1), Choices("a number above 0 and below 1; the decay is 1 - momentum")]
"""Argument of a component: weight of a new value in an average."""
LARGEST_USUAL = 0.5
"""Above it a momentum is probably a decay, written by mistake; decays are 0.9 and more."""


class ShardEMA:
    """The average of ``shards``, split exactly as they are. ``num_updates`` counts how often it moved."""

    def __init__(self, shards: Sequence[Shard], *, momentum: float) -> None:
        self.momentum = momentum
        self.num_updates = 0
        self._data = copies_in_one_buffer([shard.data.detach() for shard in shards])
        self.shards = [replace(shard, data=data) for shard, data in zip(shards, self._data, strict=True)]

    @torch.no_grad()
    def copy_from(self, weights: Sequence[Tensor]) -> None:
        """Make the average equal to ``weights`` (``Backend.master_data``): what it is until averaging begins."""
        torch._foreach_copy_(self._data, list(weights))

    @torch.no_grad()
    def update(self, weights: Sequence[Tensor]) -> None:
        """Move towards ``weights``, to the bits of ``lerp_``. The first update copies, as mmengine's does."""
        if self.num_updates == 0:
            self.copy_from(weights)
        else:
            torch._foreach_lerp_(self._data, list(weights), self.momentum)
        self.num_updates += 1

    def load(self, reader: ShardReader) -> None:
        """Read the average by name from any layout. Raises ``CheckpointError`` naming what is missing or misfits."""
        sizes = {shard.name: (shard.numel,) for shard in self.shards}  # of this rank: the others have more
        shapes = {name: (reader.numel(EMA, name),) for name in set(reader.names(EMA)) & set(sizes)}
        refuse_misfit("the checkpoint's EMA", misfit(shapes, sizes))
        for shard in self.shards:
            shard.data.copy_(reader.read(EMA, shard.name, shard.flat_start, shard.flat_stop))


@HOOKS.register_module()
class EMAHook(Hook):
    """mmengine's arguments and convention: ``average = (1 - momentum) * average + momentum * weights``.

    Args:
        momentum: weight of the new value; BAGEL's decay of 0.9999 is 0.0001, and a value above 0.5 warns.
        begin_iter: the average equals the weights until so many iterations are done.
        begin_epoch: the same in epochs.
        begin_update: the same in updates; at most one of the three.

    A skipped update (non-finite gradients) does not move it.
    """

    name = "ema"
    average: ShardEMA
    """The averaged weights, available once ``before_run`` has made them."""

    @checked()
    def __init__(
        self,
        *,
        momentum: Momentum = 0.0002,
        begin_iter: NotNegative = 0,
        begin_epoch: NotNegative = 0,
        begin_update: NotNegative = 0,
    ) -> None:
        begins = {"iteration": begin_iter, "epoch": begin_epoch, "update": begin_update}
        self._begins = [(value, unit) for unit, value in begins.items() if value]
        if len(self._begins) > 1:
            raise ConfigError("EMAHook has more than one of begin_iter, begin_epoch, begin_update", remedy="give one")
        self.momentum = momentum

    def before_run(self, run: Run) -> None:
        if self.momentum > LARGEST_USUAL and dist.is_main():
            logger().warning(
                "EMAHook.momentum is %g: each update replaces %g%% of the average, which looks like a decay."
                " Momentum is 1 - decay: for a decay of %g write momentum=%.6g.",
                self.momentum, 100 * self.momentum, self.momentum, 1 - self.momentum,
            )  # fmt: skip
        self.average = ShardEMA(run.backend.master_shards(), momentum=self.momentum)

    def before_train(self, run: Run) -> None:
        if self.average.num_updates == 0:  # weights may have been loaded since before_run
            self.average.copy_from(run.backend.master_data())

    def after_update(self, run: Run, result: UpdateResult) -> None:
        if not result.applied:
            return
        begins = all(run.ruler.duration(*begin).reached(run.progress) for begin in self._begins)
        move = self.average.update if begins else self.average.copy_from
        move(run.backend.master_data())

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self.average.num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.average.num_updates = int(state["num_updates"])

    def shards(self) -> Mapping[str, Sequence[Shard]]:
        return {EMA: self.average.shards}

    def load_shards(self, readers: Mapping[str, ShardReader]) -> None:
        if EMA in readers:
            self.average.load(readers[EMA])
        else:
            logger().warning("The checkpoint has no EMA: the average starts from the loaded weights.")


def ema_of(run: Run) -> EMAHook | None:
    return next((hook for hook in run.hooks if isinstance(hook, EMAHook)), None)


def average_of(run: Run, *, use: bool = True) -> AbstractContextManager[None]:
    """Inside, the model has the average of the weights, where there is one and ``use`` is True."""
    ema = ema_of(run) if use else None
    return run.backend.swapped(ema.average.shards) if ema else nullcontext()
