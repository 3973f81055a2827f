"""What the campaign found, each as a test of its own: damaged files that were read in part, crashed or never ended."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from tests.data.support import make_processor
from tests.end_to_end.robustness.cases import write_tar
from unigen_ds.core.errors import DataError
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.data.sources.text_files import JsonText, Position


def open_dataset(path: Path, **more: Any) -> UnifiedGenerationDataset:
    return UnifiedGenerationDataset(path, make_processor(), **more)


@pytest.fixture
def tar(tmp_path: Path) -> bytes:
    """Four records of 1,024 bytes, and the end mark."""
    write_tar(tmp_path / "t.tar", [(f"{i}.txt", f"text {i}".encode()) for i in range(4)], tarfile.USTAR_FORMAT)
    return (tmp_path / "t.tar").read_bytes()[:5120]


def test_a_tar_is_read_whole_or_not_at_all(tmp_path: Path, tar: bytes) -> None:
    file = tmp_path / "train.tar"
    file.write_bytes(tar)
    assert len(open_dataset(file)) == 4
    bad = bytearray(tar)
    bad[2048 + 3] ^= 1  # the name in the third header: Python's reader ends there without a message
    whole = {"at a member": tar[:2048], "in a header": tar[:2300], "in the end mark": tar[:4100]}
    for content in whole.values():
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"train\.tar ends (at byte .* without the end mark|within its member)"):
            open_dataset(file)
    for content in (bytes(bad), tar + tar, tar + b"x"):
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"train\.tar has bytes that are no member after byte"):
            open_dataset(file)
    file.write_bytes(tar + bytes(9000))
    assert len(open_dataset(file)) == 4, "tars are filled up with zeros"


@pytest.mark.parametrize(
    "name", ["train.parquet", "train.arrow", "train.jsonl.gz", "train.tar", "train.jsonl", "a.txt"]
)
def test_a_pipe_is_no_data_file(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=name):
        open_dataset(tmp_path / name)


def test_offsets_of_arrow_are_checked(tmp_path: Path) -> None:
    """They point into the process's memory: a wrong one would read something else, or end the process."""
    file = tmp_path / "train.arrow"
    table = pa.table({"text": ["one two", "three", "four"]})
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    raw, offsets = file.read_bytes(), np.asarray([0, 7, 12, 16], "<i4").tobytes()
    assert raw.count(offsets) == 1 and len(open_dataset(file)) == 3
    file.write_bytes(raw.replace(offsets, np.asarray([0, 7, 2**28, 16], "<i4").tobytes()))
    with pytest.raises(DataError, match=r"train\.arrow cannot be read"):
        open_dataset(file)


def test_a_size_that_no_memory_has_is_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "train.feather"
    feather.write_feather(pa.table({"text": ["one two " * 500]}), str(file), compression="lz4")
    raw = file.read_bytes()
    at = raw.rindex((4000).to_bytes(8, "little"))  # of the texts before they were compressed
    file.write_bytes(raw[:at] + (2**61).to_bytes(8, "little") + raw[at + 8 :])
    with pytest.raises(DataError, match=r"train\.feather cannot be read: .*malloc of size"):
        open_dataset(file)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.table([pa.array(["one"]), pa.array(["two"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "train.parquet")
    with pytest.raises(DataError, match="names a column twice: text"):
        open_dataset(tmp_path / "train.parquet")


def test_values_that_are_nested_too_deeply_are_named(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    deep = "[" * 700 + "]" * 700
    write_tar(tmp_path / "train.tar", [("0.json", f'{{"text": "one", "x": {deep}}}'.encode())], tarfile.GNU_FORMAT)
    with pytest.raises(DataError, match=r"train\.tar sample 0: .*nested too deeply"):
        open_dataset(tmp_path / "train.tar")
    (tmp_path / "train.csv").write_text(f"text,images\none,{deep}\n")
    with pytest.raises(DataError, match=r"train\.csv:2: (its values are nested too deeply|images is no valid JSON)"):
        open_dataset(tmp_path / "train.csv")
    outcomes = []
    for depth in range(900, 1000, 2):  # as deep as JSON can be read, and less than it can be written
        content = f'{{"text": "one", "x": {"[" * depth + "]" * depth}}}'.encode()
        try:
            outcomes.append(bool(JsonText(content, Position(tmp_path / "train.jsonl", 0)).values))
        except DataError as error:
            outcomes.append("nested too deeply" in str(error))
    assert True in outcomes
