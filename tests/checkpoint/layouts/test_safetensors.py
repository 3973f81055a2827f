"""Flat ranges of safetensors files, for any division into pieces."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from safetensors.torch import save_file

from unigen_ds.checkpoint.layouts.safetensors import SafetensorsReader
from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.shards import MASTER, ShardReader, slices_of

WHOLE = torch.arange(60, dtype=torch.float32).reshape(5, 4, 3)


def test_elements_that_are_there_twice_are_refused(tmp_path):
    """Which of two copies is used would depend on their names."""
    save_file({"w": WHOLE}, tmp_path / "model.safetensors")
    save_file({"w": WHOLE + 1}, tmp_path / "a_copy.safetensors")
    with pytest.raises(CheckpointError, match=r"master of w is in .*a_copy.*model"):
        SafetensorsReader(tmp_path)
    only = SafetensorsReader(tmp_path, files=["a_copy.safetensors", "hooks.json"])
    assert torch.equal(only.read(MASTER, "w", 0, 60), WHOLE.reshape(-1) + 1)


def test_an_overlap_is_found_in_whatever_order_pieces_are_announced():
    for pieces in permutations([(0, 10), (10, 5), (15, 5), (30, 10)]):
        reader = ShardReader(unique=True)
        for start, numel in pieces:
            reader.add(MASTER, "w", start, numel, slices_of(torch.arange(start, start + numel)), source=str(start))
        assert reader.read(MASTER, "w", 3, 18).tolist() == list(range(3, 18))
        for start, numel in ((0, 1), (12, 1), (9, 2), (14, 30), (25, 10), (5, 90)):
            with pytest.raises(CheckpointError, match="in part again"):
                reader.add(MASTER, "w", start, numel, slices_of(torch.zeros(numel)))
