"""The mapped index and its memory, kills and two processes at once; images loaded by threads."""

from __future__ import annotations

import ctypes
import logging
import mmap
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.support import (
    build_index,
    make_processor,
    mixed_dataset,
    mixed_records,
    write_jsonl,
)
from tests.data.text.chat_support import character_tokenizer
from tests.processes import popen
from unigen_ds.config.registry import FILTERS
from unigen_ds.data.batches.stream import SequenceStream
from unigen_ds.data.cache import array_cache
from unigen_ds.data.cache.array_cache import FOLDER, load_or_fill
from unigen_ds.data.datasets import overflow
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.data.datasets.filters import CheckedRecord, RecordFilter
from unigen_ds.data.datasets.overflow import Fitted, Overflow
from unigen_ds.data.datasets.subset import Division, apply_filters, divide
from unigen_ds.data.index import index as index_module
from unigen_ds.data.order.order import Cursor, GlobalOrder
from unigen_ds.data.order.packing import BestFitPacking
from unigen_ds.data.samples.sample import COLUMNS
from unigen_ds.data.text.tokenizers import ChatTokenizer
from unigen_ds.families.nanovlm.processor import VLMProcessor

ROOT = Path(__file__).resolve().parents[3]


def vlm_processor(folder: Path) -> VLMProcessor:
    character_tokenizer().save_pretrained(folder / "tokenizer")
    tokenizer = ChatTokenizer(path=str(folder / "tokenizer"))
    return VLMProcessor(tokenizer, tile_size=16, vit_patch_size=4, pixel_shuffle_factor=2, max_image_size=48)


def is_mapped(array: np.ndarray) -> bool:
    """Whether its memory is that of a file."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    base = base.obj if isinstance(base, memoryview) else base
    return isinstance(base, mmap.mmap)


def private_bytes() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # what was freed
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) * 1024


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux shows the memory of a process")
def test_a_million_records_take_at_most_16_bytes_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened, fitted and drawn from, with pieces of long texts, by a process that did not make the files."""
    number = 1_100_000

    class Large:
        name, weight, cache_folder, fingerprint = "large", None, tmp_path, "large"

        def __init__(self) -> None:
            def fill(new: array_cache.ArrayFile) -> None:
                for name in COLUMNS:
                    new.add(name, number)
                new.put("tokens", 0, np.arange(number) % 1500 + 1)
                new.put("text_targets", 0, np.arange(number) % 1500)

            self.arrays = load_or_fill(tmp_path / "large.arrays", "large", fill)

        def __len__(self) -> int:
            return number

        def counts(self) -> Any:
            return index_module.Counts(*(self.arrays[name] for name in COLUMNS))

        def lengths(self) -> Any:
            return self.arrays["tokens"], self.arrays["tiles"]

        def prefix_digest(self, first: int) -> str:
            return f"{first}"

    def use() -> Any:
        data: Any = Large()
        order = GlobalOrder([len(Fitted(data, Overflow(1024)))], seed=0)
        stream = SequenceStream(
            [data], order, packer=BestFitPacking(64), seq_length=1024, sequences_per_epoch=7, overflow=Overflow(1024)
        )
        assert len(list(islice(stream.rows(Cursor(0, 5, 0, 9)), 5))) == 5 and stream.fitted[0].report("large")["split"]
        return stream

    use()
    before = private_bytes()
    stream = use()
    assert private_bytes() - before < 16 * number and is_mapped(stream.fitted[0].tokens)
    monkeypatch.setattr(overflow, "SHARED_FROM", number + 1)
    monkeypatch.setattr(array_cache, "FOLDER", "none")
    alone = use()
    for name in ("tokens", "tiles", "_records", "_pieces"):
        assert np.array_equal(getattr(stream.fitted[0], name), getattr(alone.fitted[0], name))


@FILTERS.register_module()
class WithoutCaptions(RecordFilter):
    def keeps(self, record: CheckedRecord) -> bool:
        return not any("seen" in text for text in record.texts)


def test_what_filters_keep_of_many_records_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, and the share that is trained on of it."""
    given = [{"type": "WithoutCaptions"}]
    found = []
    for least in (1 << 20, 1):
        monkeypatch.setattr("unigen_ds.data.samples.sample.SHARED_FROM", least)
        kept = apply_filters(mixed_dataset(tmp_path, 40, filters=given))
        train, _ = divide([kept], Division(0.3, 1))
        assert len(kept) == 30 and kept.lengths()[0] is kept.counts().tokens
        found.append((kept.counts(), train[0].counts()))
    for alone, shared in zip(*found, strict=True):
        assert is_mapped(shared.tokens) and not is_mapped(alone.tokens)
        assert all(np.array_equal(getattr(alone, name), getattr(shared, name)) for name in COLUMNS)


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
    killed = build_process(path, 5.0)
    assert killed.stdout is not None
    assert killed.stdout.readline().startswith("chunk")
    time.sleep(0.1)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    names = [found.name for found in (tmp_path / FOLDER).iterdir()]
    assert [name for name in names if ".tmp-" in name], names
    assert not [name for name in names if name.endswith(".arrays")], names
    (tmp_path / "whole").mkdir()
    whole = write_jsonl(tmp_path / "whole" / "t.jsonl", mixed_records(tmp_path / "whole", 24))
    assert build_index(path).digest == build_index(whole).digest
    assert not [found for found in (tmp_path / FOLDER).iterdir() if ".tmp-" in found.name]


def test_two_processes_build_it_once(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", mixed_records(tmp_path, 24))
    both = [build_process(path, 0.1) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert all(process.returncode == 0 for process in both), outputs
    assert outputs[0].splitlines()[-1] == outputs[1].splitlines()[-1]
    assert sum(output.count("chunk") for output in outputs) == 6, "one of them plans"
    assert len(list((tmp_path / FOLDER).glob("*.arrays"))) == 1


# ------------------------------------------------------------------------------------------------ images
