"""``mixture-2``: within one draw of the requested share at every position, from any position, over all epochs."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from unigen_ds.data.order.mixture import Mixture, exact
from unigen_ds.data.order.order import Draw, GlobalOrder

KINDS = {
    "decimals": lambda draw: round(draw.uniform(0.01, 3), 2),
    "thirds": lambda draw: draw.choice([1 / 3, 2 / 3, 1 / 6, 1.0, 1 / 7]),
    "tiny": lambda draw: draw.choice([1e-6, 1e-4, 0.5, 1.0, 20.0]),
    "floats": lambda draw: draw.random() + 1e-9,
    "sizes": lambda draw: float(draw.randint(1, 10**7)),
}


def weights_of(kind: str, trial: int) -> list[float]:
    draw = random.Random(f"{kind}{trial}")
    return [KINDS[kind](draw) for _ in range(1 + trial % 20)]


def deviation(weights: list[float], sources: np.ndarray) -> float:
    shares = [exact(weight) / sum(map(exact, weights)) for weight in weights]
    steps = np.arange(1, len(sources) + 1)
    return max(float(np.abs(np.cumsum(sources == k) - float(s) * steps).max()) for k, s in enumerate(shares))


@pytest.mark.parametrize("kind", KINDS)
def test_every_position_is_within_one_draw_of_the_share(kind: str) -> None:
    for trial in range(40):
        weights = weights_of(kind, trial)
        sources, numbers = Mixture([exact(weight) for weight in weights]).draws(0, 3000)
        distance, number = deviation(weights, sources), len(weights)
        assert distance <= (1 - 1 / (2 * number - 2) if number > 1 else 0) + 1e-6, (weights, distance)
        for source in range(number):
            assert numbers[sources == source].tolist() == list(range(int((sources == source).sum())))


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_follow_each_other_without_a_seam(kind: str) -> None:
    """The share holds over several epochs; a source's next pass begins when the one before it is complete."""
    for trial in range(1, 20, 4):
        weights = weights_of(kind, trial)
        sizes = [random.Random(trial + k).randint(1, 40) for k in range(len(weights))]
        order = GlobalOrder(sizes, weights, seed=7)
        draws = [draw for epoch in range(6) for draw in order.draws(epoch, 0, order.epoch_size)]
        assert deviation(weights, np.asarray([draw.source for draw in draws])) <= 1
        for source, size in enumerate(sizes):
            pairs = [(draw.pass_number, draw.index) for draw in draws if draw.source == source]
            assert [number for number, _ in pairs] == [i // size for i in range(len(pairs))]
            assert len(set(pairs)) == len(pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_any_slice_is_the_same_as_from_the_start(kind: str) -> None:
    for trial in (1, 6, 19):
        weights = weights_of(kind, trial)
        order = GlobalOrder([11, 300, 70] * 7, [*weights, *[1.0] * (21 - len(weights))], seed=2)
        size = order.epoch_size
        whole = [draw for epoch in range(3) for draw in order.draws(epoch, 0, size)]
        for start, stop in ((0, 1), (1000, 1030), (1023, 1025), (5, size), (size - 1, size)):
            for epoch in (2, 0, 1):
                alone = GlobalOrder(order.sizes, order.weights, seed=2).draws(epoch, start, stop)
                assert alone == whole[epoch * size + start : epoch * size + stop]


def test_the_number_that_is_meant() -> None:
    assert exact(0.35) == Fraction(7, 20) and exact(1 / 3) == Fraction(1, 3) and exact("3/7") == Fraction(3, 7)
    assert exact(1e-9) == Fraction(1, 10**9) and Mixture([exact(1 / 3), exact(1 / 6), exact(0.5)]).period == 6


def test_the_order_of_the_sources_is_spread_as_evenly_as_it_can_be() -> None:
    assert Mixture([Fraction(1), Fraction(3)]).draws(0, 8)[0].tolist() in ([1, 0, 1, 1] * 2, [1, 1, 0, 1] * 2)
    draws = GlobalOrder([4, 4], [1, 1], seed=0).draws(0, 0, 8)
    assert Counter(draw.source for draw in draws[:4]) == {0: 2, 1: 2}
    assert draws[0] == Draw(draws[0].source, draws[0].index, 0)
