"""What the campaign found, each as a test of its own: damaged files that were read in part, crashed or never ended."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.data.support import image, make_processor, picture, talk, text, write_jsonl
from tests.end_to_end.robustness.cases import write_tar
from unigen_ds.core.errors import DataError
from unigen_ds.data.batches.collate import collate
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.data.order.order import Draw
from unigen_ds.data.sources.base import Position
from unigen_ds.data.sources.json_lines import JsonText


def opened(path: Path, **more: Any) -> UnifiedGenerationDataset:
    return UnifiedGenerationDataset(path, make_processor(), **more)


@pytest.fixture
def tar(tmp_path: Path) -> bytes:
    """Four records of 1,024 bytes, and the end mark."""
    write_tar(tmp_path / "t.tar", [(f"{i}.txt", f"text {i}".encode()) for i in range(4)], tarfile.USTAR_FORMAT)
    return (tmp_path / "t.tar").read_bytes()[:5120]


def test_a_tar_is_read_whole_or_not_at_all(tmp_path: Path, tar: bytes) -> None:
    file = tmp_path / "train.tar"
    file.write_bytes(tar)
    assert len(opened(file)) == 4
    damaged = bytearray(tar)
    damaged[2048 + 3] ^= 1  # the name in the third header: Python's reader ends there without a message
    whole = {"at a member": tar[:2048], "in a header": tar[:2300], "in the end mark": tar[:4100]}
    for content in whole.values():
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"train\.tar ends (at byte .* without the end mark|within its member)"):
            opened(file)
    for content in (bytes(damaged), tar + tar, tar + b"x"):
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"train\.tar has bytes that are no member after byte"):
            opened(file)
    file.write_bytes(tar + bytes(9000))
    assert len(opened(file)) == 4, "tars are filled up with zeros"


def test_a_size_below_zero_ends_a_tar(tmp_path: Path, tar: bytes) -> None:
    """Python's reader would find the same members again, for ever."""
    raw = bytearray(tar)
    raw[1024 + 124 : 1024 + 136] = b"\xff" * 11 + b"\x00"
    raw[1024 + 148 : 1024 + 156] = b" " * 8
    raw[1024 + 148 : 1024 + 156] = b"%06o\0 " % sum(raw[1024:1536])
    (tmp_path / "train.tar").write_bytes(raw)
    with pytest.raises(DataError, match=r"train\.tar (ends within|is no whole tar)"):
        opened(tmp_path / "train.tar")


@pytest.mark.parametrize("name", ["pipe.png", "/dev/zero"])
def test_what_never_ends_is_a_counted_skip(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    picture(tmp_path / "0.png", 8, 8)
    records = [talk(image("user", one), text("assistant", "seen")) for one in ("0.png", name)]
    found = opened(write_jsonl(tmp_path / "train.jsonl", records))
    batch = collate([(Draw(0, 0, 0), Draw(0, 1, 0))], [found], make_processor(), seq_length=99)
    (skipped,) = batch.skipped
    assert name in skipped["why"] and "a pipe, a socket or a device" in skipped["why"]


@pytest.mark.parametrize(
    "name", ["train.parquet", "train.arrow", "train.jsonl.gz", "train.tar", "train.jsonl", "a.txt"]
)
def test_a_pipe_is_no_data_file(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=name):
        opened(tmp_path / name)


def test_offsets_of_arrow_are_checked(tmp_path: Path) -> None:
    """They point into the process's memory: a wrong one would read something else, or end the process."""
    file = tmp_path / "train.arrow"
    table = pa.table({"text": ["one two", "three", "four"]})
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    raw, offsets = file.read_bytes(), np.asarray([0, 7, 12, 16], "<i4").tobytes()
    assert raw.count(offsets) == 1 and len(opened(file)) == 3
    file.write_bytes(raw.replace(offsets, np.asarray([0, 7, 2**28, 16], "<i4").tobytes()))
    with pytest.raises(DataError, match=r"train\.arrow cannot be read"):
        opened(file)


def test_a_size_that_no_memory_has_is_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "train.feather"
    feather.write_feather(pa.table({"text": ["one two " * 500]}), str(file), compression="lz4")
    raw = file.read_bytes()
    at = raw.rindex((4000).to_bytes(8, "little"))  # of the texts before they were compressed
    file.write_bytes(raw[:at] + (2**61).to_bytes(8, "little") + raw[at + 8 :])
    with pytest.raises(DataError, match=r"train\.feather cannot be read: .*malloc of size"):
        opened(file)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([0, 2**62, 0], pa.timestamp("us")),
        pa.StringArray.from_buffers(3, pa.py_buffer(np.arange(4, dtype="<i4").tobytes()), pa.py_buffer(b"a\xffb")),
    ],
)
def test_a_value_that_python_does_not_have_names_its_row(tmp_path: Path, column: Any) -> None:
    pq.write_table(pa.table({"text": ["one", "two", "three"], "more": column}), tmp_path / "train.parquet")
    with pytest.raises(DataError, match=r"train\.parquet row 2: a value cannot be read"):
        opened(tmp_path / "train.parquet")


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.table([pa.array(["one"]), pa.array(["two"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "train.parquet")
    with pytest.raises(DataError, match="names a column twice: text"):
        opened(tmp_path / "train.parquet")


def test_values_that_are_nested_too_deeply_are_named(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    deep = "[" * 700 + "]" * 700
    write_tar(tmp_path / "train.tar", [("0.json", f'{{"text": "one", "x": {deep}}}'.encode())], tarfile.GNU_FORMAT)
    with pytest.raises(DataError, match=r"train\.tar sample 0: .*nested too deeply"):
        opened(tmp_path / "train.tar")
    (tmp_path / "train.csv").write_text(f"text,images\none,{deep}\n")
    with pytest.raises(DataError, match=r"train\.csv:2: (its values are nested too deeply|images is no valid JSON)"):
        opened(tmp_path / "train.csv")
    outcomes = []
    for depth in range(900, 1000, 2):  # as deep as JSON can be read, and less than it can be written
        content = f'{{"text": "one", "x": {"[" * depth + "]" * depth}}}'.encode()
        try:
            outcomes.append(bool(JsonText(content, Position(tmp_path / "train.jsonl", 0)).values))
        except DataError as error:
            outcomes.append("nested too deeply" in str(error))
    assert True in outcomes


@pytest.mark.parametrize(
    "state",
    [{"_data_files": ["a.arrow"]}, {"_data_files": 3}, {"_data_files": [{"filename": "../a"}]}, {"_data_files": {}}],
)
def test_a_saved_folder_names_its_files(tmp_path: Path, state: dict[str, Any]) -> None:
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match="names no files"):
        opened(tmp_path)


@pytest.mark.parametrize("splits", [[1], "train", None, ["../../x"], [None], {}])
def test_a_saved_folder_names_its_splits(tmp_path: Path, splits: Any) -> None:
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
    with pytest.raises(DataError, match="names no splits"):
        opened(tmp_path)


def test_a_message_is_short_and_can_be_printed(tmp_path: Path) -> None:
    picture(tmp_path / "0.png", 8, 8)
    names = ["0.png", "x" * 70_000, "\ud800.png"]
    records = [talk(image("user", one), text("assistant", "seen")) for one in names]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    found = opened(tmp_path / "train.jsonl")
    batch = collate([tuple(Draw(0, i, 0) for i in range(3))], [found], make_processor(), seq_length=99)
    long, half = (one["why"] for one in batch.skipped)
    assert len(long) < 2000 and "xxx" in long
    half.encode()
    str(DataError("a \ud800", allowed="\ud800", remedy="\ud800")).encode()


@pytest.mark.parametrize("mode", ["LAB", "PA", "F", "I;16", "CMYK", "YCbCr", "1"])
def test_an_image_of_any_mode_is_read_or_a_counted_skip(tmp_path: Path, mode: str) -> None:
    bands = len(Image.new(mode, (1, 1)).getbands())
    size = {"F": 4, "I;16": 2, "1": 1}.get(mode, bands)
    raw = bytes(range(64)) * size if mode != "1" else bytes(8)
    Image.frombytes(mode, (8, 8), raw[: 64 * size] if mode != "1" else raw).save(tmp_path / "0.tif")
    found = opened(write_jsonl(tmp_path / "train.jsonl", [talk(image("user", "0.tif"), text("assistant", "seen"))]))
    batch = collate([(Draw(0, 0, 0),)], [found], make_processor(), seq_length=99)
    assert not batch.skipped or "cannot be decoded" in batch.skipped[0]["why"]
