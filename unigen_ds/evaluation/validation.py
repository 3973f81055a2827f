"""The losses on validation data, the same for all engines and ranks: ``val/loss`` and its parts.

In: an engine and ``ValidationData``. Out: means over all targets of all ranks. A target weighs the same wherever it is:
sums and numbers of targets are added in float64, and divided once at the end. ``evaluating`` is what every look at a
model during training needs: afterwards the training continues as if nothing had happened.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from unigen_ds.backends.base import Backend
from unigen_ds.data.batches.validation_data import ValidationData
from unigen_ds.system import dist
from unigen_ds.system.log import logger
from unigen_ds.system.seeding import kept_generators

_Key = tuple[str, ...]
"""(term,) or (term, source)."""


def mean_losses(
    backend: Backend, data: ValidationData, loss_weights: Mapping[str, float], *, max_batches: int | None = None
) -> dict[str, float]:
    """Collective; the same on all ranks. ``val/loss``: the sum of ``loss_weights[k]`` times ``val/loss/k`` over the
    terms k that have targets; ``val/loss/<term>``: the mean over its targets; ``val/loss/<term>/<source>``: over those
    of a source. A mean without targets is left out.
    """
    sums: dict[_Key, Tensor] = {}
    counts: defaultdict[_Key, float] = defaultdict(float)  # weights of targets may be fractional
    skips: list[str] = []

    with evaluating(backend):
        for source, batch in data.batches(max_batches, dp_rank=backend.dp_rank, dp_size=backend.dp_size):
            terms = backend.model(batch.to(backend.device))
            skips += [f"{entry['sample']}: {entry['why']}" for entry in batch.skipped]
            targets = batch.target_counts()
            for term, total in terms.sums.items():
                for key in ((term,), (term, source)):
                    value = total.detach().double()
                    sums[key] = sums[key] + value if key in sums else value
                    counts[key] += targets.get(term, 0.0)
    totals: defaultdict[_Key, float] = defaultdict(float)
    numbers: defaultdict[_Key, float] = defaultdict(float)
    problems: list[str] = []
    mine = ({key: (float(value), counts[key]) for key, value in sums.items()}, skips)
    for rank_values, rank_skipped in dist.gather_objects(mine):  # in the order of the ranks, on all alike
        problems += rank_skipped
        for key, (value, count) in rank_values.items():
            totals[key] += value
            numbers[key] += count
    if problems and dist.is_main():
        logger().warning("%d validation samples could not be read and are left out of val/loss. The first: %s",
                         len(problems), problems[0])  # fmt: skip
    means = {key: totals[key] / number for key, number in sorted(numbers.items()) if number}
    values = {"/".join(("val/loss", *key)): mean for key, mean in means.items()}
    summands = [loss_weights.get(key[0], 1.0) * mean for key, mean in means.items() if len(key) == 1]
    return {"val/loss": sum(summands), **values} if summands else values


@contextmanager
def evaluating(backend: Backend) -> Iterator[None]:
    """Inside, the model computes without gradients and dropout, with the running statistics that a checkpoint would
    store: rank 0's. Afterwards each module is in its mode again, and torch, numpy and Python draw the numbers that they
    would have drawn. Collective.
    """
    modules = [*backend.model.modules()]
    modes, statistics = [module.training for module in modules], list[Tensor]()
    if dist.world_size() > 1:
        norms = [each for each in modules if isinstance(each, _NormBase) and each.track_running_stats]
        statistics = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
    own = [buffer.clone() for buffer in statistics]
    with kept_generators():
        backend.model.eval()
        try:
            with torch.no_grad():
                if statistics:  # each rank's own differ, because each saw other data
                    of_main = dist.broadcast_object([buffer.cpu() for buffer in statistics])
                    for buffer, value in zip(statistics, of_main, strict=True):
                        buffer.copy_(value)
                yield
        finally:
            for module, training in zip(modules, modes, strict=True):
                module.training = training
            with torch.no_grad():
                for buffer, value in zip(statistics, own, strict=True):
                    buffer.copy_(value)
