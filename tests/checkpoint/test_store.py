"""Which checkpoint is the newest valid one, and which may be deleted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.checkpoint.support import flip_byte, save, save_chain, tree
from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.manifest import FILE_NAME, Manifest
from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.progress import Duration


def go_on_from(work_dir: Path, checkpoint: Path) -> None:
    listing = store.list_checkpoints(work_dir)
    store.continue_from(work_dir, checkpoint, store.continued_lineage(work_dir, checkpoint, listing))


def newest_name(work_dir: Path) -> str | None:
    checkpoint, _ = store.newest(work_dir)
    return None if checkpoint is None else checkpoint.path.name


def names(checkpoints) -> list[str]:
    return [f.path.name for f in checkpoints]


def test_newest_is_the_last_committed_never_the_highest_number(tmp_path):
    """After a batch change iteration 1500 may follow iteration 3000."""
    save_chain(tmp_path, 900, 1200, 300)
    assert newest_name(tmp_path) == "iter_300.pth"
    assert names(store.list_checkpoints(tmp_path)) == ["iter_900.pth", "iter_1200.pth", "iter_300.pth"]


@pytest.mark.parametrize("hint", [None, "iter_12.pth", "iter_99.pth"], ids=["missing", "older", "deleted"])
def test_the_hint_is_only_a_hint(tmp_path, hint):
    """Older: killed between the rename and the hint. Deleted: removed by a user."""
    save_chain(tmp_path, 12, 24)
    (tmp_path / store.HINT).unlink()
    if hint:
        store.write_hint(tmp_path, tmp_path / hint)
    assert newest_name(tmp_path) == "iter_24.pth"


DAMAGE = {
    "a flipped byte": lambda path: flip_byte(path / "optimizer.safetensors", 2000 % 400),
    "a flipped byte in the EMA": lambda path: flip_byte(path / "ema" / "rank00000.safetensors"),
    "a truncated file": lambda path: os.truncate(path / "model.safetensors", 50),
    "a missing file": lambda path: (path / "rng" / "rank00000.safetensors").unlink(),
    "no manifest": lambda path: (path / FILE_NAME).unlink(),
    "a truncated manifest": lambda path: os.truncate(path / FILE_NAME, 100),
    "a changed manifest": lambda path: (path / FILE_NAME).write_text(
        (path / FILE_NAME).read_text().replace('"updates": 8', '"updates": 9')
    ),
}
REASONS = ["hash differs", "hash differs", "has 50 bytes", "is missing", "has no manifest.json: it was never completed",
           "damaged", "has changed since it was written (its digest differs)"]  # fmt: skip


@pytest.mark.parametrize(("kind", "reason"), zip(DAMAGE, REASONS, strict=True))
def test_a_damaged_one_is_passed_over_and_named(tmp_path, kind, reason):
    save_chain(tmp_path, 12, 24)
    DAMAGE[kind](tmp_path / "iter_24.pth")
    checkpoint, rejects = store.newest(tmp_path)
    assert checkpoint is not None and checkpoint.path.name == "iter_12.pth"
    assert names(rejects) == ["iter_24.pth"] and reason in str(rejects[0].problem)


def test_checkpoints_that_a_resume_abandoned_are_not_used_again(tmp_path):
    """Back to 12 after a loss spike; a kill before the next save must not lead back to 36."""
    paths = save_chain(tmp_path, 12, 24, 36)
    go_on_from(tmp_path, paths[0])
    assert newest_name(tmp_path) == "iter_12.pth"
    assert "abandoned it" in str(store.newest(tmp_path)[1][0].problem)
    assert (tmp_path / store.HINT).read_text() == f"{paths[0]}\n"

    later = save(tmp_path, "iter_18.pth", parent="iter_12.pth")
    assert Manifest.read(later).commit == 4
    assert newest_name(tmp_path) == "iter_18.pth"
    flip_byte(later / "model.safetensors")
    assert newest_name(tmp_path) == "iter_12.pth"  # not 36


def test_continuing_from_another_folder(tmp_path):
    """Before its first own save, the run's newest checkpoint is the one in the other folder."""
    here, there = tmp_path / "here", tmp_path / "there"
    stale = save(here, "iter_99.pth")
    start = save(there, "iter_12.pth")
    go_on_from(here, start)
    checkpoint, rejects = store.newest(here)
    assert checkpoint is not None and checkpoint.path == start and names(rejects) == [stale.name]
    save(here, "iter_24.pth", parent=str(start))
    assert newest_name(here) == "iter_24.pth"
    shutil.rmtree(here / "iter_24.pth")
    shutil.rmtree(there)
    checkpoint, rejects = store.newest(here)
    assert checkpoint is None and str(start) in [str(r.path) for r in rejects]


def test_commit_numbers_are_never_given_twice(tmp_path):
    """Otherwise a new checkpoint would have the number of an abandoned one."""
    paths = save_chain(tmp_path, 12, 24, 36)
    go_on_from(tmp_path, paths[0])
    shutil.rmtree(paths[1])
    shutil.rmtree(paths[2])
    assert store.next_commit(tmp_path) == 4
    save(tmp_path, "iter_18.pth", parent="iter_12.pth")
    assert newest_name(tmp_path) == "iter_18.pth"


def test_a_damaged_lineage_is_an_error_with_a_remedy(tmp_path):
    save(tmp_path)
    (tmp_path / "lineage.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"(?s)lineage.json is damaged.*Remedy: remove it"):
        store.newest(tmp_path)


def test_sweep_removes_exactly_those(tmp_path):
    path = save(tmp_path)
    before = tree(path)
    folders = [tmp_path / f"iter_24.pth{store.STAGING}2", tmp_path / f"iter_36.pth{store.DELETING}"]
    for folder in folders:
        shutil.copytree(path, folder)
    mine = tmp_path / "notes.tmp-1"  # a user's own folder
    mine.mkdir()
    assert store.sweep(tmp_path) == folders
    assert mine.is_dir() and tree(path) == before
    assert store.sweep(tmp_path / "absent") == []


def test_retention_keeps_the_newest(tmp_path):
    save_chain(tmp_path, 36, 24, 12, 6)
    assert [p.name for p in store.retain(tmp_path, max_keep=2)] == ["iter_36.pth", "iter_24.pth"]
    assert names(store.list_checkpoints(tmp_path)) == ["iter_12.pth", "iter_6.pth"]
    assert store.retain(tmp_path, max_keep=2) == [] == store.retain(tmp_path, max_keep=-1)
    assert not list(tmp_path.glob(f"*{store.DELETING}"))


def test_milestones_are_kept_beyond_number_and_days(tmp_path):
    """The first at or after each multiple; an abandoned one is none, and the next one is."""
    every = Duration(5 * 12.0, "sequence")
    paths = [save(tmp_path / "a", f"iter_{3 * n}.pth", updates=n) for n in (1, 2, 3, 5, 6, 10, 12, 13)]
    deletions = [*paths[:3], paths[4], paths[6]]
    assert store.retain(tmp_path / "a", max_keep=1, max_days=1e-9, every=every) == deletions
    paths = [save(tmp_path, f"iter_{3 * n}.pth", updates=n) for n in (3, 5, 6)]
    go_on_from(tmp_path, paths[0])
    later = [save(tmp_path, f"iter_{3 * n}.pth", updates=n, parent="iter_9.pth") for n in (7, 8)]
    assert store.retain(tmp_path, max_keep=1, every=every) == [*paths[1:], paths[0]]
    assert names(store.list_checkpoints(tmp_path)) == [path.name for path in later]


def test_of_a_link_to_a_checkpoint_the_link_alone_is_deleted(tmp_path):
    """By retention, over what an interrupted deletion left, and by the sweep at a start."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    save_chain(run, 12, 24, 36)
    for name in ("iter_12.pth", "iter_24.pth"):
        shutil.move(run / name, elsewhere / name)
        (run / name).symlink_to(elsewhere / name)
    before = tree(elsewhere)
    (run / f"iter_12.pth{store.DELETING}").symlink_to(elsewhere / "iter_24.pth")
    assert names(store.list_checkpoints(run)) == ["iter_12.pth", "iter_24.pth", "iter_36.pth"]
    assert [path.name for path in store.retain(run, max_keep=1)] == ["iter_12.pth", "iter_24.pth"]
    (run / f"iter_48.pth{store.STAGING}4").symlink_to(elsewhere)
    (run / ".config.py.writing-x.1").symlink_to(elsewhere)
    os.utime(run / ".config.py.writing-x.1", (0, 0), follow_symlinks=False)
    store.sweep(run)
    assert sorted(path.name for path in run.iterdir()) == ["iter_36.pth", "last_checkpoint"]
    assert tree(elsewhere) == before and Manifest.read(elsewhere / "iter_12.pth").commit == 1


def test_retention_does_not_let_damaged_ones_push_out_good_ones(tmp_path):
    paths = save_chain(tmp_path, 12, 24, 36)
    os.truncate(paths[1] / "model.safetensors", 3)
    os.truncate(paths[2] / FILE_NAME, 3)
    assert store.retain(tmp_path, max_keep=1) == []
    assert newest_name(tmp_path) == "iter_12.pth"


def test_one_that_a_hook_keeps_stays_beyond_the_number(tmp_path):
    paths = save_chain(tmp_path, 12, 24, 36, 48)
    assert store.retain(tmp_path, max_keep=2, keeps=lambda manifest: manifest.commit in (1, 4)) == [paths[1]]
    assert [path.name for path in sorted(tmp_path.glob("*.pth"))] == ["iter_12.pth", "iter_36.pth", "iter_48.pth"]


def test_an_interrupted_deletion_leaves_nothing_that_looks_complete(tmp_path, monkeypatch):
    """Every system call of a deletion fails once: the rest is either the unchanged checkpoint or not a checkpoint."""
    original = save(tmp_path / "original")
    calls = ("replace", "fsync", "unlink", "rmdir")
    for number, name in enumerate(calls):
        work_dir = tmp_path / str(number)
        path = Path(shutil.copytree(original, work_dir / "iter_12.pth"))
        with monkeypatch.context() as patch, pytest.raises(OSError, match="stop"):
            patch.setattr(os, name, _failing(getattr(os, name), work_dir))
            store.delete(path)
        checkpoints = store.list_checkpoints(work_dir)
        if checkpoints:
            assert tree(path) == tree(original)
        else:
            assert store.sweep(work_dir) and os.listdir(work_dir) == []


def _failing(call, work_dir):
    def fail(*arguments, **keywords):
        raise OSError("stop")

    return fail
