"""What a disk may have after a power cut at any moment of saves, deletions, merges and resumes.

``make crash-states``: 10,000 states of all engines.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "benchmarks"))

from shared.crash_model import Recording, Tree, read_inodes, read_tree  # noqa: E402

STATES = 500


@pytest.mark.timeout(1800)
def test_the_last_saved_checkpoint_is_whole_and_resumed_after_a_power_cut_at_any_moment() -> None:
    command = [sys.executable, "benchmarks/crash_states.py", "--engines", "single", "--no-result"]
    options = ["--num", str(STATES), "--resumes", "1", "--seed", "1"]
    process = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-3000:]
    assert f"{STATES} states, 1 trained to the end, 0 wrong" in process.stdout
    ends = {name: int(number) for name, number in re.findall(r"'([a-z ]+)': (\d+)", process.stdout)}
    assert min(ends["fresh"], ends["resume"], ends["resume newer"]) > STATES // 50, "no part was left out"


PROGRAM = """
import os, shutil
def flush(path):
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)
with open("known", "r+b") as stream:
    stream.truncate(5)
os.mkdir("new")
with open("new/flushed", "wb") as stream:
    stream.write(bytes(range(1, 201)) * 60)
flush("new/flushed"), flush("new"), flush(".")
with open("new/flushed", "ab") as stream:
    stream.write(b"more")
os.rename("new", "renamed")
shutil.copyfile("renamed/flushed", "loose")
os.unlink("known")
"""


def test_the_model_loses_what_was_not_flushed_and_nothing_else(tmp_path: Path) -> None:
    """Else no loss of the package's would be found."""
    root, log, library = tmp_path / "root", tmp_path / "log", tmp_path / "recorder.so"
    root.mkdir()
    (root / "known").write_bytes(b"before the start")
    before = read_inodes(root), read_tree(root)
    source = ROOT / "benchmarks" / "shared" / "file_recorder.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(library), str(source)], check=True)
    variables = {"LD_PRELOAD": str(library), "FILE_RECORDER_ROOT": str(root), "FILE_RECORDER_LOG": str(log)}
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, env={**os.environ, **variables}, check=True)
    recording = Recording(root, log, *before)
    total = len(recording.changes)
    assert recording.whole(total) == read_tree(root) and recording.whole(0) == before[1]
    trees: list[Tree] = [recording.after_cut(total, random.Random(number))[0] for number in range(300)]
    content = bytes(range(1, 201)) * 60
    for tree in trees:
        (contents,) = (tree[name] or b"" for name in ("new/flushed", "renamed/flushed") if name in tree)
        assert contents.startswith(content) and tree.get("known") in (None, b"befor", before[1]["known"])
    states = {(name in tree) for tree in trees for name in ["renamed/flushed"]}
    loose = {tree["loose"] for tree in trees if "loose" in tree}
    assert states == {True, False} == {"known" in tree for tree in trees} == {"loose" in tree for tree in trees}
    assert {b"", content + b"more", bytes(len(content) + 4)} < loose and len(loose) > 20
