"""The permutation is a bijection; mixtures repeat a source only after all its records were used."""

from __future__ import annotations

import numpy as np
import pytest

from unigen_ds.data.order.order import GlobalOrder, permute_many, shares


@pytest.mark.parametrize("size", [*range(1, 40), 63, 64, 65, 255, 256, 257, 1000, 4097])
def test_permutation_is_a_bijection(size: int) -> None:
    key = 0xFEDCBA9876543210 ^ size
    many = permute_many(np.arange(size), size, key)
    assert sorted(many.tolist()) == list(range(size))
    assert many.tolist() == [int(permute_many(np.asarray([i]), size, key)[0]) for i in range(size)]


@pytest.mark.parametrize("size", [2, 3, 5, 8, 17])
def test_shuffles_are_even_over_keys(size: int) -> None:
    """Each element is about equally often at each position (a chi-square far below that of a biased order)."""
    trials = 3000
    table = np.zeros((size, size))
    for key in range(trials):
        table[np.arange(size), permute_many(np.arange(size), size, key * 0x9E3779B97F4A7C15 % 2**64)] += 1
    expected = trials / size
    chi = ((table - expected) ** 2 / expected).sum() / max((size - 1) ** 2, 1)
    assert chi < 4.0, chi


@pytest.mark.parametrize("sizes", [[1], [7], [3, 1, 9], [100, 37]])
def test_every_record_once_an_epoch_without_weights(sizes: list[int]) -> None:
    order = GlobalOrder(sizes, seed=1)
    for epoch in range(3):
        draws = order.draws(epoch, 0, order.epoch_size)
        assert sorted((d.source, d.index) for d in draws) == [(k, i) for k, n in enumerate(sizes) for i in range(n)]
        assert {d.pass_number for d in draws} == {epoch}


def test_epochs_and_seeds_have_their_own_order() -> None:
    orders = [GlobalOrder([50], seed=s).draws(e, 0, 50) for s in (1, 2) for e in (0, 1)]
    indices = [tuple(d.index for d in draws) for draws in orders]
    assert len(set(indices)) == 4
    assert all(i != tuple(range(50)) for i in indices)
    rows = [tuple(d.source for d in GlobalOrder([25, 25], seed=s).draws(e, 0, 50)) for s in (1, 2) for e in (0, 1)]
    assert len(set(rows)) == 4, "the order of the sources also differs between epochs"


def test_shares() -> None:
    assert shares(10, [1, 1]) == [5, 5]
    assert shares(10, [2, 1]) == [7, 3]
    assert shares(100, [0.7, 0.2, 0.1]) == [70, 20, 10]
    assert shares(5, [1000, 1, 1]) == [3, 1, 1]
    for weights in ([1, 2, 3], [0.3, 0.3, 0.3], [1e-9, 1, 5]):
        assert sum(shares(17, weights)) == 17
