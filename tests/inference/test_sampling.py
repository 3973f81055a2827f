"""How a token is drawn: temperature, top-p and seeds, document by document."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from unigen_ds.core.errors import ConfigError
from unigen_ds.inference.continuation import chooser, drawn, likeliest
from unigen_ds.inference.sampling import Sampling
from unigen_ds.system.seeding import generator

LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def counts(sampling: Sampling) -> Counter[int]:
    random = generator("test")
    return Counter(drawn(LOGITS, sampling, random) for _ in range(4000))


def test_frequencies_are_those_of_the_probabilities() -> None:
    found = counts(Sampling(1.0))
    assert all(abs(found[i] / 4000 - p) < 0.03 for i, p in enumerate((0.5, 0.3, 0.15, 0.05)))


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.4, {0}), (0.5, {0}), (0.6, {0, 1}), (0.9, {0, 1, 2}), (0.96, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_likeliest_up_to_that_probability(top_p: float, kept: set[int]) -> None:
    found = counts(Sampling(1.0, top_p))
    assert set(found) == kept
    assert abs(found[0] / 4000 - 0.5 / sum((0.5, 0.3, 0.15, 0.05)[i] for i in kept)) < 0.03


def test_a_document_draws_the_same_alone_and_among_others() -> None:
    logits = torch.randn(3, 50, generator=generator("logits"))
    together = chooser(Sampling(2.0), [7, 8, 9])
    first, second = together(logits, [0, 1, 2]), together(logits[1:], [1, 2])
    alone = chooser(Sampling(2.0), [9])
    assert [first[2], second[1]] == [alone(logits[2:], [0])[0], alone(logits[2:], [0])[0]]
    assert chooser(Sampling(), [1]) is likeliest


@pytest.mark.parametrize(
    "values", [(-1.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (1.0, 0.0), (1.0, 1.1), (1.0, math.nan), (0.0, 0.5)]
)
def test_refused(values: tuple[float, float]) -> None:
    with pytest.raises(ConfigError):
        Sampling(*values)
