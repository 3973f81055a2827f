"""docs/migrating.md: how far a warm-up is ahead of mmengine's own if gradients are accumulated."""

from __future__ import annotations

import pytest
import torch
from mmengine.optim import LinearLR

from unigen_ds.core.progress import Geometry, Progress, Ruler
from unigen_ds.schedule.schedule import Schedules

EPOCH = 100


def mmengines(warmup: int, iterations: int) -> float:
    """The learning rate of mmengine's own scheduler after this number of iterations."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    span = {"begin": 0, "end": warmup / EPOCH, "epoch_length": EPOCH}
    scheduler = LinearLR.build_iter_from_epoch(optimizer, start_factor=1e-9, **span)
    for _ in range(iterations):
        optimizer.step()
        scheduler.step()
    return float(optimizer.param_groups[0]["lr"])


def ours(warmup: int, iterations: int, *, accumulated: int) -> float:
    curve = {"type": "LinearLR", "start_factor": 1e-9, "begin": 0, "end": warmup / EPOCH, "convert_to_iter_based": True}
    ruler = Ruler(Geometry(1, accumulated, 1), EPOCH)
    schedules = Schedules.from_cfg([curve], ruler=ruler, base=[{"name": "all", "lr": 1.0}], total_sequences=3 * EPOCH)
    done = Progress(sequences=iterations, updates=iterations // accumulated)
    return float(schedules.at(done)[0]["lr"])


@pytest.mark.parametrize(("warmup", "accumulated"), [(14, 2), (14, 1), (20, 2), (40, 4)])
def test_a_warm_up_is_ahead_by_the_documented_factor(warmup: int, accumulated: int) -> None:
    for iterations in range(accumulated, warmup - accumulated, accumulated):
        ratio = ours(warmup, iterations, accumulated=accumulated) / mmengines(warmup, iterations)
        assert ratio == pytest.approx((warmup - 1) / (warmup - accumulated), rel=1e-6)


def test_eight_percent_at_iteration_ten() -> None:
    assert ours(14, 10, accumulated=2) == pytest.approx(0.833, abs=1e-3)
    assert mmengines(14, 10) == pytest.approx(0.769, abs=1e-3)
    assert ours(14, 10, accumulated=2) / mmengines(14, 10) == pytest.approx(1.08, abs=0.005)
