"""The mapped index on a full disk, killed while it is built, and built by two processes at once."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.data.support import build_index, make_processor, mixed_records, write_jsonl
from tests.support.processes import popen
from unigen_ds.data.cache import array_cache
from unigen_ds.data.cache.array_cache import FOLDER
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset

ROOT = Path(__file__).resolve().parents[3]


def test_a_full_disk_costs_the_cache_alone(tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("unigen_ds"), "propagate", True)
    path = write_jsonl(tmp_path / "t.jsonl", mixed_records(tmp_path, 8))
    expected = build_index(path).digest

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for cache in (tmp_path / FOLDER).glob("*.arrays"):
        cache.unlink()
    monkeypatch.setattr(array_cache, "write_atomic", full)
    data = UnifiedGenerationDataset(path, make_processor())
    assert data.fingerprint == expected and data.sample(0).num_tokens
    assert "cannot be written: [Errno 28]" in caplog.text and not list((tmp_path / FOLDER).glob("*.arrays"))


BUILD = """
import sys, time
sys.path.insert(0, {root!r})
from tests.data.support import ByteTokenizer, make_processor
from unigen_ds.data.index import index
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
index._CHUNK = 4
slow = float(sys.argv[2])
batches = index.batches
def waiting(source, chunk):
    if sys._getframe(1).f_code.co_name == "__call__":
        print("chunk", chunk, flush=True)
        time.sleep(slow)
    return batches(source, chunk)
index.batches = waiting
data = UnifiedGenerationDataset(sys.argv[1], make_processor())
print("done", data.fingerprint, sum(data.sample(i).num_tokens for i in range(len(data))), flush=True)
"""


def build_process(path: Path, slow: float) -> subprocess.Popen[str]:
    script = BUILD.format(root=str(ROOT))
    command = [sys.executable, "-c", script, str(path), str(slow)]
    return popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_killed_while_it_is_built(tmp_path: Path) -> None:
    """SIGKILL after some chunks: no file of that name, and the next start makes the whole one and removes the rest."""
    path = write_jsonl(tmp_path / "t.jsonl", mixed_records(tmp_path, 24))
    process = build_process(path, 5.0)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("chunk")
    time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    names = [file.name for file in (tmp_path / FOLDER).iterdir()]
    assert [name for name in names if ".tmp-" in name], names
    assert not [name for name in names if name.endswith(".arrays")], names
    (tmp_path / "whole").mkdir()
    whole = write_jsonl(tmp_path / "whole" / "t.jsonl", mixed_records(tmp_path / "whole", 24))
    first, second = (UnifiedGenerationDataset(one, make_processor()) for one in (path, whole))
    assert first.fingerprint == second.fingerprint
    assert not [file for file in (tmp_path / FOLDER).iterdir() if ".tmp-" in file.name]


def test_two_processes_build_it_once(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", mixed_records(tmp_path, 24))
    both = [build_process(path, 0.1) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert all(process.returncode == 0 for process in both), outputs
    assert outputs[0].splitlines()[-1] == outputs[1].splitlines()[-1]
    assert sum(output.count("chunk") for output in outputs) == 6, "one of them plans"
    assert len(list((tmp_path / FOLDER).glob("*.arrays"))) == 1
