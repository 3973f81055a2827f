"""The manifest: a lossless round trip, and all damage is detected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoint.support import make_manifest
from unigen_ds.checkpoint.manifest import FILE_NAME, FORMAT_VERSION, WITH_BASE, FileEntry, Manifest
from unigen_ds.core.errors import CheckpointError


def write(directory: Path, manifest: Manifest | None = None, **changes: object) -> Path:
    manifest = manifest or make_manifest()
    path = directory / FILE_NAME
    path.write_text(json.dumps(json.loads(manifest.to_json()) | changes))
    return path


def test_round_trip(tmp_path):
    manifest = make_manifest(
        3, parent="iter_9.pth", layout="safetensors", metrics={"val": 0.1 + 0.2}, files=[FileEntry("a/b", 7, "0" * 32)]
    )
    (tmp_path / FILE_NAME).write_text(manifest.to_json())
    assert Manifest.read(tmp_path) == manifest
    assert json.loads(manifest.to_json())["iteration"] == manifest.iteration == 12


def test_values_that_json_does_not_know_become_text(tmp_path):
    manifest = make_manifest(config={"path": Path("a/b"), "type": dict})
    (tmp_path / FILE_NAME).write_text(manifest.to_json())
    assert Manifest.read(tmp_path).config == {"path": "a/b", "type": "<class 'dict'>"}


@pytest.mark.parametrize("keep", [0, 1, 0.5, 0.99])
def test_a_truncated_manifest(tmp_path, keep):
    path = write(tmp_path)
    text = path.read_text()
    path.write_text(text[: int(len(text) * keep)] if keep < 1 else text[:1])
    with pytest.raises(CheckpointError, match="damaged"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("version", [FORMAT_VERSION - 1, WITH_BASE + 1])
def test_another_format_is_refused_by_its_number(tmp_path, version):
    write(tmp_path, format_version=version, something_new=1)
    with pytest.raises(CheckpointError, match=f"has format {version}. Allowed: 2, or 3 of adapters.*that wrote it"):
        Manifest.read(tmp_path)


def test_an_unreadable_file_is_a_checkpoint_error(tmp_path):
    (tmp_path / FILE_NAME).symlink_to("/proc/self/mem")  # is a file, and reading it fails
    with pytest.raises(CheckpointError, match="damaged: OSError"):
        Manifest.read(tmp_path)
