"""Sequences stay within both limits, contain every sample once, and are nearly full."""

from __future__ import annotations

import math
import random
import time

import numpy as np
import pytest

from tests.golden_files import NANOVLM, read_json
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.registry import PACKERS, build
from unigen_ds.data import packing
from unigen_ds.data.packing import WindowPacking

STORED = read_json(NANOVLM / "packing.json")
SEQ_LENGTH, MAX_IMAGES = (STORED["settings"][key] for key in ("seq_length", "max_images_per_knapsack"))


def check(groups: list[list[int]], lengths: list[int], tiles: list[int], seq_length: int, max_tiles: int) -> float:
    """Checks that every index occurs once within both limits; the utilisation."""
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        assert group and group == sorted(group)
        assert sum(min(lengths[i], seq_length) for i in group) <= seq_length
        assert sum(tiles[i] for i in group) <= max_tiles or sum(tiles[i] > 0 for i in group) == 1
    return sum(min(n, seq_length) for n in lengths) / (max(len(groups), 1) * seq_length)


@pytest.mark.parametrize(("name", "least"), [("long_tailed", 0.99), ("uniform", 0.99), ("many_images", None)])
def test_utilisation_on_public_lists(name: str, least: float | None) -> None:
    stored = STORED["lists"][name]
    lengths, tiles = (list(column) for column in zip(*stored["samples"], strict=True))
    groups = WindowPacking(max_tiles=MAX_IMAGES).plan(lengths, tiles, SEQ_LENGTH, key=1)
    utilisation = check(groups, lengths, tiles, SEQ_LENGTH, MAX_IMAGES)
    bound = max(math.ceil(sum(min(n, SEQ_LENGTH) for n in lengths) / SEQ_LENGTH), math.ceil(sum(tiles) / MAX_IMAGES))
    print(f"{name}: {utilisation:.4f} with {len(groups)} sequences, at least {bound} are needed")
    assert utilisation > stored["one_shot"]["utilisation"] or len(groups) == bound
    if least is not None:
        assert utilisation >= least
    else:  # here the image limit decides, and no plan can have fewer sequences
        assert len(groups) == bound


def test_random_lists_keep_both_limits() -> None:
    draw = random.Random(0)
    for _ in range(60):
        number, seq_length, limit = draw.randint(0, 60), draw.randint(1, 50), draw.randint(1, 6)
        lengths = [draw.randint(0, 70) for _ in range(number)]
        tiles = [draw.choice([0, 0, 1, 2, 9]) for _ in range(number)]
        check(WindowPacking(max_tiles=limit).plan(lengths, tiles, seq_length, 3), lengths, tiles, seq_length, limit)
        free = WindowPacking().plan(lengths, tiles, seq_length, 3)
        check(free, lengths, [0] * number, seq_length, 1)


def test_halves_that_fit_in_no_pairs() -> None:
    groups = WindowPacking().plan([51] * 40, [0] * 40, 100, 0)
    assert [len(group) for group in groups] == [1] * 40


def test_key_shuffles_sequences_and_nothing_else() -> None:
    lengths = [random.Random(i).randint(1, 60) for i in range(200)]
    plans = [WindowPacking().plan(lengths, [0] * 200, 100, key) for key in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    assert sorted(plans[0]) == sorted(plans[2])


def test_a_whole_window_is_planned_fast() -> None:
    draw = random.Random(0)
    lengths = [min(7000, int(draw.lognormvariate(6, 1))) for _ in range(8192)]
    start = time.perf_counter()
    WindowPacking(max_tiles=18).plan(lengths, [1] * 8192, 4096, 0)
    assert time.perf_counter() - start < 5.0


def test_wrong_settings() -> None:
    for key in ("window", "max_tiles"):
        with pytest.raises(ConfigError, match=f"{key} is 0. Allowed: a whole number of at least 1"):
            build(PACKERS, {"type": "WindowPacking", key: 0}, where="train_dataloader.packing")


@pytest.mark.parametrize("max_tiles", [None, 2, 7])
def test_count_is_the_length_of_the_plan(max_tiles: int | None) -> None:
    """Short, long, equal and empty samples, with and without images."""
    packer, draw = WindowPacking(512, max_tiles), np.random.default_rng(7)
    windows = []
    for trial in range(60):
        number, longest = int(draw.integers(1, 120)), (3, 30, 140)[trial % 3]
        lengths = draw.integers(0, longest, number) if trial % 5 else draw.choice([1, 24, 32, 33, 48], number)
        windows.append((lengths, draw.integers(0, 4, number) * (trial % 2)))
    plans = [packer.plan(*map(list, window), 96, 5) for window in windows]
    assert packer.counts(windows, 96) == list(map(len, plans))
    assert packer.count(np.zeros(3, dtype=int), np.zeros(3, dtype=int), 96) == 1


def test_many_windows_with_images_are_counted_by_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    packer, draw = WindowPacking(64, 3), np.random.default_rng(8)
    windows = [(draw.integers(1, 40, 20), draw.integers(0, 3, 20)) for _ in range(12)]
    alone = packer.counts(windows, 96)
    monkeypatch.setattr(packing, "_PARALLEL", 4)
    monkeypatch.setattr(packing, "num_cores", lambda: 2)
    monkeypatch.setattr(WindowPacking, "_groups", lambda *_: pytest.fail("planned in this process"))
    assert packer.counts(windows, 96) == alone
