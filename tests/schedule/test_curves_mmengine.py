"""Comparison with mmengine 0.10.7's own schedulers at every iteration of whole runs.

Where mmengine is wrong, the docstrings of ``TestWhereMmengineIsWrong`` describe it; otherwise the curves are equal to
1e-9 of the base learning rate (mmengine multiplies at each step, so its own rounding grows with the run).
"""

from __future__ import annotations

import math
import warnings

import mmengine
import pytest
import torch
from mmengine.optim import scheduler as mm

from tests.checkpoint.support import schedules_of
from unigen_ds.core.progress import Geometry, Progress, Ruler

BASE = (1e-4, 5e-3)
PER_ITERATION = 8


def mmengine_run(specs: list[dict], *, iterations: int, epoch_length: int) -> list[tuple[float, ...]]:
    """Learning rates of both groups that mmengine sets for each iteration (accumulation 1)."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in BASE]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    schedulers = []
    for spec in specs:
        arguments = {key: value for key, value in spec.items() if key not in ("type", "convert_to_iter_based")}
        cls = getattr(mm, spec["type"])
        if spec.get("convert_to_iter_based"):
            schedulers.append(cls.build_iter_from_epoch(optimizer, epoch_length=epoch_length, **arguments))
        else:
            schedulers.append(cls(optimizer, **arguments))
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for iteration in range(iterations):
            rates.append(tuple(group["lr"] for group in optimizer.param_groups))
            optimizer.step()
            for scheduler in schedulers:
                if not scheduler.by_epoch or (iteration + 1) % epoch_length == 0:
                    scheduler.step()
    return rates


def our_run(specs: list[dict], *, iterations: int, epoch_length: int) -> list[tuple[float, ...]]:
    """The same, computed from progress only and in reverse order: no value may depend on the previous one."""
    ruler = Ruler(Geometry(4, 1, 2), epoch_length * PER_ITERATION)
    schedules = schedules_of(
        specs,
        ruler=ruler,
        base=[{"name": str(lr), "lr": lr} for lr in BASE],
        total_sequences=iterations * PER_ITERATION,
    )
    rates = {
        i: tuple(group["lr"] for group in schedules.at(Progress(sequences=i * PER_ITERATION)))
        for i in reversed(range(iterations))
    }
    return [rates[i] for i in range(iterations)]


def assert_equal(ours: list[tuple[float, ...]], theirs: list[tuple[float, ...]]) -> None:
    assert len(ours) == len(theirs)
    for iteration, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for mine, its, base in zip(a, b, BASE, strict=True):
            assert mine == pytest.approx(its, rel=1e-9, abs=1e-9 * base), f"iteration {iteration}"


def epochs(type: str, begin: float, end: float, **more) -> dict:
    return dict(type=type, by_epoch=True, begin=begin, end=end, convert_to_iter_based=True, **more)


def iters(type: str, begin: float, end: float, **more) -> dict:
    return dict(type=type, by_epoch=False, begin=begin, end=end, **more)


CASES: dict[str, tuple[list[dict], int, int]] = {
    # name: (schedulers, iterations, epoch length)
    "xtuner": (
        [epochs("LinearLR", 0, 0.1, start_factor=1e-5), epochs("CosineAnnealingLR", 0.1, 4, eta_min=0.0)], 400, 100
    ),
    "xtuner, 78.1 iterations of warm-up": (
        [epochs("LinearLR", 0, 0.1, start_factor=1e-5), epochs("CosineAnnealingLR", 0.1, 3, eta_min=0.0)], 3 * 781, 781
    ),
    "eta_min_ratio": (
        [iters("LinearLR", 0, 13, start_factor=0.01), iters("CosineAnnealingLR", 13, 120, eta_min_ratio=0.1)], 120, 30
    ),
    "T_max shorter than the range, rising again": ([iters("CosineAnnealingLR", 0, 70, T_max=20, eta_min=1e-6)], 90, 30),
    "T_max in fractions of an epoch": ([epochs("CosineAnnealingLR", 0, 3, T_max=0.55)], 60, 20),
    "cosine after the end keeps its last step": ([iters("CosineAnnealingLR", 0, 40, eta_min=1e-6)], 80, 20),
    "linear down": ([iters("LinearLR", 10, 31, start_factor=1.0, end_factor=0.2)], 60, 20),
    "linear two steps": ([iters("LinearLR", 0, 2, start_factor=0.5)], 6, 3),
    "constant": ([iters("ConstantLR", 0, 12, factor=0.1)], 30, 10),
    "poly": ([iters("PolyLR", 0, 60, power=0.9, eta_min=1e-6)], 75, 20),
    "poly after warm-up": (
        [epochs("LinearLR", 0, 0.5, start_factor=0.001), epochs("PolyLR", 0.5, 3, power=2.0)], 60, 20
    ),
    "multi-step from begin, a milestone twice, one out of range": (
        [iters("MultiStepLR", 10, 60, milestones=[0, 15, 15, 49, 50, 70], gamma=0.5)], 100, 20
    ),
    "multi-step in epochs, per iteration": ([epochs("MultiStepLR", 0, 4, milestones=[0.5, 2, 3], gamma=0.3)], 80, 20),
    "by_epoch linear": ([dict(type="LinearLR", begin=0, end=4, start_factor=0.1)], 60, 10),
    "by_epoch linear then cosine": (
        [dict(type="LinearLR", begin=0, end=3, start_factor=0.1, by_epoch=True),
         dict(type="CosineAnnealingLR", begin=3, end=9, eta_min=1e-6, by_epoch=True)], 100, 10
    ),
    "by_epoch multi-step": ([dict(type="MultiStepLR", begin=0, end=8, milestones=[2, 5])], 80, 10),
    "by_epoch poly": ([dict(type="PolyLR", begin=1, end=6, power=1.5)], 80, 10),
    "warm-up per iteration, decay per epoch": (
        [iters("LinearLR", 0, 10, start_factor=0.01),
         dict(type="MultiStepLR", begin=1, end=6, milestones=[1, 3], by_epoch=True)], 60, 10
    ),
    "three ranges": (
        [iters("LinearLR", 0, 10, start_factor=0.1, end_factor=0.8), iters("CosineAnnealingLR", 10, 40, eta_min=1e-5),
         iters("LinearLR", 50, 60, start_factor=1.0, end_factor=0.5)], 80, 20
    ),
    "ranges listed out of order": (
        [iters("CosineAnnealingLR", 10, 60, eta_min=1e-6),
         iters("LinearLR", 0, 10, start_factor=0.1, end_factor=0.7)], 60, 20
    ),
    "overlap: factors multiply": (
        [iters("LinearLR", 0, 20, start_factor=0.01), iters("CosineAnnealingLR", 0, 80)], 80, 20
    ),
    "overlap: steps during a linear decay": (
        [iters("LinearLR", 0, 50, start_factor=1.0, end_factor=0.1),
         iters("MultiStepLR", 0, 80, milestones=[10, 60], gamma=0.5)], 80, 20
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_equal_to_mmengine(name: str) -> None:
    assert mmengine.__version__ == "0.10.7", "the comparison was made with this version"
    specs, iterations, epoch_length = CASES[name]
    theirs = mmengine_run(specs, iterations=iterations, epoch_length=epoch_length)
    assert len(set(theirs)) > 1, "the learning rate of the case must change"
    assert_equal(our_run(specs, iterations=iterations, epoch_length=epoch_length), theirs)


@pytest.mark.parametrize(
    ("warmup", "epoch_length"),  # at least two steps of warm-up: for one see TestWhereMmengineIsWrong
    [(0.05, 97), (0.05, 250), (0.1, 33), (0.1, 97), (0.1, 250), (0.3, 10), (0.3, 33), (0.3, 97), (0.3, 250)],
)
@pytest.mark.parametrize("eta_min", [0.0, 1e-5])
def test_warmup_and_cosine_grid(warmup: float, epoch_length: int, eta_min: float) -> None:
    specs = [epochs("LinearLR", 0, warmup, start_factor=1e-5), epochs("CosineAnnealingLR", warmup, 2, eta_min=eta_min)]
    run = dict(iterations=2 * epoch_length, epoch_length=epoch_length)
    assert_equal(our_run(specs, **run), mmengine_run(specs, **run))


@pytest.mark.parametrize("end", [{}, {"end": None}, {"end": 10**9}, {"end": math.inf}])
def test_end_left_out_is_the_end_of_training(end: dict) -> None:
    """mmengine's runner sets it; an explicit ``INF`` has the same meaning here."""
    left_out = our_run([dict(type="PolyLR", by_epoch=False, **end)], iterations=50, epoch_length=10)
    assert_equal(left_out, mmengine_run([iters("PolyLR", 0, 50)], iterations=50, epoch_length=10))


class TestWhereMmengineIsWrong:
    """Each test checks mmengine's value first, so that it fails when a new version corrects it."""

    def test_warm_up_of_one_step(self) -> None:
        """``LinearLR`` over one step remains at ``start_factor``: 1e-5 of the learning rate for the whole run.

        It happens without a message with end=0.1 and 10 to 19 iterations per epoch. Here the factor is ``end_factor``
        after the range. ``ConstantLR`` over one step has the same error and the same remedy.
        """
        specs = [epochs("LinearLR", 0, 0.1, start_factor=1e-5)]
        assert mmengine_run(specs, iterations=15, epoch_length=10)[-1][0] == pytest.approx(1e-9)
        ours = our_run(specs, iterations=15, epoch_length=10)
        assert ours[0] == pytest.approx([lr * 1e-5 for lr in BASE])
        assert ours[1] == BASE and ours[-1] == BASE

        specs = [iters("ConstantLR", 0, 1, factor=0.5)]
        assert mmengine_run(specs, iterations=5, epoch_length=5)[-1][0] == pytest.approx(0.5 * BASE[0])
        assert our_run(specs, iterations=5, epoch_length=5)[1] == BASE

    def test_fractions_of_an_epoch_lose_an_iteration(self) -> None:
        """``int(0.29 * 100)`` is 28, since 0.29 * 100 is 28.999999999999996: the warm-up ends an iteration early.

        Rounding down to whole iterations (0.1 of 781 are 78) is the same here: it shifts a curve by less than one
        iteration and the numbers stay equal; this case is a rounding error of the conversion and is not copied.
        """
        specs = [epochs("LinearLR", 0, 0.29, start_factor=0.5)]
        theirs = mmengine_run(specs, iterations=100, epoch_length=100)
        assert theirs[27][0] == pytest.approx(BASE[0]) and int(0.29 * 100) == 28
        ours = our_run(specs, iterations=100, epoch_length=100)
        assert_equal(ours, mmengine_run([iters("LinearLR", 0, 29, start_factor=0.5)], iterations=100, epoch_length=100))
        assert ours[27][0] < 0.99 * BASE[0]

    @pytest.mark.parametrize(("milestone", "epoch_length", "first"), [(0.07, 100, 7), (0.5, 33, 17)])
    def test_a_milestone_between_iterations_is_never_seen(
        self, milestone: float, epoch_length: int, first: int
    ) -> None:
        """Milestones are compared with ``==``: 0.07 * 100 = 7.000000000000001 and 16.5 never occur: no drop.

        Here the learning rate decreases at the first iteration at or after the milestone.
        """
        specs = [epochs("MultiStepLR", 0, 1, milestones=[milestone], gamma=0.1)]
        theirs = mmengine_run(specs, iterations=epoch_length, epoch_length=epoch_length)
        assert set(theirs) == {BASE}
        ours = our_run(specs, iterations=epoch_length, epoch_length=epoch_length)
        assert ours[first - 1] == BASE
        assert ours[first] == pytest.approx([lr * 0.1 for lr in BASE])
