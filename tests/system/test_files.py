"""A name that exists means its content is on disk."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from unigen_ds.system import files
from unigen_ds.system.files import (
    delete_inside,
    quick_digest,
    rename_into_place,
    temporary_beside,
    write_atomic,
    write_text_atomic,
)

MIB = 1 << 20


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


def test_a_new_name_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[str] = []
    fsync = os.fsync

    def note_flush(descriptor: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        assert (tmp_path / "final" / "file").exists(), "flushed after the rename"
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note_flush)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "file").touch()
    rename_into_place(tmp_path / "made", tmp_path / "final")
    assert paths == [str(tmp_path)] and not (tmp_path / "made").exists()


def test_quick_digest_is_whole_for_small_files_and_sampled_for_large_ones(tmp_path: Path) -> None:
    path = tmp_path / "big"
    path.write_bytes(bytes(5 * MIB))
    whole, sample = quick_digest(path), quick_digest(path, blocks=2)
    with path.open("r+b") as stream:
        stream.seek(2 * MIB + 5)
        stream.write(b"x")
    assert quick_digest(path) != whole
    assert quick_digest(path, blocks=2) == sample  # between head and tail
    for offset in (0, 5 * MIB - 1, 5 * MIB):  # head, tail and size
        with path.open("r+b") as stream:
            stream.seek(offset)
            stream.write(b"x")
        assert sample != (sample := quick_digest(path, blocks=2))


WRITER = """
import sys; from pathlib import Path; from unigen_ds.system.files import write_text_atomic
for number in range(60):
    write_text_atomic(Path(sys.argv[1]), f"{number}" * 2000)
"""


def test_processes_of_several_containers_leave_each_others_temporary_files(tmp_path: Path) -> None:
    """Each is process 1 of its numbers, and they have one host name and one folder: every write succeeds."""
    container = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*container, "true"], capture_output=True).returncode != 0:
        pytest.skip("no namespaces of process numbers here")
    command = [*container, sys.executable, "-c", WRITER, str(tmp_path / "shared")]
    processes = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    assert os.listdir(tmp_path) == ["shared"]


def test_a_temporary_name_is_used_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where process number and host name are the same; what a process elsewhere writes stays for a day."""
    names = set()
    for _ in range(2):  # as of two processes
        monkeypatch.setattr(files, "_OWN_NAMES", set())
        names |= {temporary_beside(tmp_path / "a", "tmp").name for _ in range(10)}
    assert len(names) == 20
    monkeypatch.setattr(os, "getpid", lambda: 2**22 - 1)  # a process that does not exist here
    here = temporary_beside(tmp_path / "a", "tmp")
    monkeypatch.setattr(files, "PID_SPACE", "0123456789ab")
    elsewhere = temporary_beside(tmp_path / "a", "tmp")
    monkeypatch.undo()
    here.touch(), elsewhere.symlink_to(tmp_path)  # as of a shard that is a local file
    os.utime(tmp_path, (0, 0))
    assert files.remove_leftovers(tmp_path) == [here] and elsewhere.exists()
    os.utime(elsewhere, (0, 0), follow_symlinks=False)
    assert files.remove_leftovers(tmp_path) == [elsewhere]


def test_only_what_is_really_inside_is_deleted(tmp_path: Path) -> None:
    """Links go, and never what they point to."""
    own, foreign = tmp_path / "own", tmp_path / "foreign"
    for folder in (own / "deep" / "deeper", foreign / "kept"):
        folder.mkdir(parents=True)
        (folder / "file").touch()
    (own / "to_folder").symlink_to(foreign / "kept")
    (own / "deep" / "to_file").symlink_to(foreign / "kept" / "file")
    for path in (
        foreign / "kept",
        own / "to_folder" / "file",
        own / ".." / "foreign" / "kept",
        own,
        own / "deep" / "..",
    ):
        with pytest.raises(PermissionError, match="is not inside of"):
            delete_inside(path, own)
    for path in (own / "to_folder", own / "deep", own / "nothing"):
        delete_inside(path, own)
    assert os.listdir(own) == [] and (foreign / "kept" / "file").exists()
    (tmp_path / "also_own").symlink_to(own)
    (own / "x").mkdir()
    delete_inside(own / "x", tmp_path / "also_own")
    assert os.listdir(own) == []
