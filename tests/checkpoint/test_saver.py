"""A checkpoint exists completely or not at all, also on a disk that is really full."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from tests.checkpoint.support import make_backend, make_manifest, save, tree
from unigen_ds.checkpoint import saver, store
from unigen_ds.checkpoint.layouts.safetensors import open_reader, restore_rng
from unigen_ds.checkpoint.manifest import FILE_NAME, Manifest
from unigen_ds.core.errors import CheckpointError, SaveError


def test_what_a_save_leaves(tmp_path):
    path = save(tmp_path)
    assert path == tmp_path / "iter_12.pth"
    assert sorted(tree(path)) == [
        "config.py", "ema/rank00000.safetensors", "hooks.json", "manifest.json", "model.safetensors",
        "optimizer.safetensors", "rng/rank00000.safetensors",
    ]  # fmt: skip
    assert sorted(os.listdir(tmp_path)) == ["iter_12.pth", store.HINT]
    assert (tmp_path / store.HINT).read_text() == f"{path}\n"
    manifest = Manifest.read(path)
    assert manifest.layout == "safetensors"
    assert store.verify(path, manifest, hashes=True) is None
    assert store.read_hook_states(path, manifest) == {"ema": {"num_updates": 4}}


@pytest.mark.parametrize("ranks", [0, 2])
def test_random_states_of_another_process_count_are_not_used(tmp_path, ranks):
    path = save(tmp_path)
    state = path / "rng" / "rank00000.safetensors"
    if ranks == 2:
        (path / "rng" / "rank00001.safetensors").write_bytes(state.read_bytes())
    else:
        state.unlink()
    before = torch.get_rng_state()
    assert not restore_rng(path, Manifest.read(path))
    assert torch.equal(torch.get_rng_state(), before)


# ---- a full disk ----------------------------------------------------------------------------------------------------


def fill(disk: Path, *, leave: int) -> Path:
    ballast = disk / "ballast"
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    ballast.write_bytes(b"x" * (free - leave))
    return ballast


def bytes_of(error: SaveError) -> tuple[int, int]:
    match = re.search(r"it needs ([\d,]+) bytes and ([\d,]+) bytes are free", str(error))
    assert match, error
    need, free = (int(number.replace(",", "")) for number in match.groups())
    return need, free


WIDTH = 12_000  # about 190 KiB of weights, as much of EMA, and twice that of moments


def test_a_disk_that_is_too_full_is_refused_before_anything_is_written(small_disk, monkeypatch):
    backend = make_backend(width=WIDTH)
    first = save(small_disk, backend=backend)
    size = sum(len(content) for name, content in tree(first).items() if name != FILE_NAME)
    ballast = fill(small_disk, leave=size - 65536)
    before = tree(small_disk)
    monkeypatch.setattr(saver, "_write", None)  # not reached
    with pytest.raises(SaveError, match="the disk has too little free space") as error:
        save(small_disk, "iter_24.pth", backend=backend)
    need, free = bytes_of(error.value)
    assert free < size - 60000 <= need == size and str(small_disk / "iter_24.pth") in str(error.value)
    assert tree(small_disk) == before
    monkeypatch.undo()
    ballast.unlink()
    assert save(small_disk, "iter_24.pth", backend=backend).name == "iter_24.pth"


# ---- reading back ---------------------------------------------------------------------------------------------------


def test_an_unknown_layout_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="has layout 'stone'"):
        open_reader(tmp_path, make_manifest(layout="stone"))
