"""A name that exists means its content is on disk."""

import os
from pathlib import Path

import pytest

from unigen_ds.core.files import file_digest, quick_digest, rename_into_place, write_atomic, write_text_atomic

MIB = 1 << 20


def test_write_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text_atomic(path, "one")
    write_text_atomic(path, "zwei ä")
    assert path.read_text(encoding="utf-8") == "zwei ä"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_an_error_keeps_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text_atomic(path, "old")

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, fail)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("durable", [True, False])
def test_a_new_name_is_on_disk_where_it_must_last(
    durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    fsync = os.fsync

    def counted(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        assert (tmp_path / "final" / "file").exists(), "flushed after the rename"
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", counted)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "file").touch()
    rename_into_place(tmp_path / "made", tmp_path / "final", durable=durable)
    assert flushed == [str(tmp_path)] * durable and not (tmp_path / "made").exists()


def test_file_digest_sees_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "big"
    content = bytearray(os.urandom(2 * MIB + 17))
    path.write_bytes(content)
    before = file_digest(path)
    content[MIB + 3] ^= 1
    path.write_bytes(content)
    assert before.startswith("xxh3_128:") and len(before) == 41 and file_digest(path) != before


def test_quick_digest_is_whole_for_small_files_and_sampled_for_large_ones(tmp_path: Path) -> None:
    path = tmp_path / "big"
    path.write_bytes(bytes(5 * MIB))
    whole, sampled = quick_digest(path), quick_digest(path, blocks=2)
    with path.open("r+b") as stream:
        stream.seek(2 * MIB + 5)
        stream.write(b"x")
    assert quick_digest(path) != whole
    assert quick_digest(path, blocks=2) == sampled  # between head and tail
    with path.open("ab") as stream:
        stream.write(b"x")
    assert quick_digest(path, blocks=2) != sampled


def test_quick_digest_of_a_large_file_sees_head_and_tail(tmp_path: Path) -> None:
    path = tmp_path / "big"
    content = bytearray(4 * MIB)
    path.write_bytes(content)
    before = quick_digest(path, blocks=2)
    for place in (0, len(content) - 1):
        changed = bytearray(content)
        changed[place] = 1
        path.write_bytes(changed)
        assert quick_digest(path, blocks=2) != before
