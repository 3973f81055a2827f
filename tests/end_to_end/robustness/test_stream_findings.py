"""What the campaign found in streams, each as a test of its own: copies that were put together from two answers of a
server, or were kept though they were damaged."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.data.support import make_processor
from tests.end_to_end.robustness.faulty_server import Fault, File, server
from tests.end_to_end.robustness.streams import quick_transfers
from unigen_ds.core.errors import DataError
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.data.sources.shards import spool, transfer
from unigen_ds.data.sources.shards.shard_list import write_records

LINES = [json.dumps({"text": f"text {i}"}) for i in range(40)]
CONTENT = ("\n".join(LINES) + "\n").encode()


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_transfers():
        yield


@pytest.fixture
def file() -> Iterator[File]:
    """``part.jsonl`` on a server."""
    found = server()[1]["/findings/part.jsonl"] = File(CONTENT)
    yield found
    server()[1].clear()


def opened(folder: Path, name: str = "part.jsonl", **more: Any) -> UnifiedGenerationDataset:
    url, streaming = f"{server()[0]}/findings/{name}", {"attempts": 4}
    return UnifiedGenerationDataset(url, make_processor(), cache_dir=folder, streaming=streaming, **more)


def copy(folder: Path) -> Path:
    (found,) = folder.glob("streamed/shards/*/part*")
    return found


@pytest.mark.parametrize("second", ["page", "wrong_range", "no_range", "changed"])
def test_a_transfer_is_not_continued_by_something_else(tmp_path: Path, file: File, second: str) -> None:
    """fsspec takes a page of an error, with status 200, for the block that was asked for."""
    file.faults = [Fault("short", times=1), Fault(second, times=1, ranged=True)]
    file.later = CONTENT.replace(b"text 39", b"TEXT 39")
    if second == "changed":
        with pytest.raises(
            DataError, match=r"part\.jsonl from http\S+ failed in 4 attempts: it changed: size and vers"
        ):
            opened(tmp_path)
        return
    assert len(opened(tmp_path)) == 40 and copy(tmp_path).read_bytes() == CONTENT


def test_a_file_without_a_version_is_not_put_together_from_two(tmp_path: Path, file: File) -> None:
    file.etag, file.later = False, CONTENT.replace(b"text 3", b"TEXT 3")  # before the middle, and after it
    file.faults = [Fault("short", times=1), Fault("changed", times=1)]
    with mock.patch.object(transfer, "_OVERLAP", 8):
        assert len(opened(tmp_path)) == 40
    assert copy(tmp_path).read_bytes() == file.later


def test_a_page_of_the_same_size_is_no_text(tmp_path: Path) -> None:
    server()[1]["/findings/part.txt"] = File(CONTENT, faults=[Fault("page_of_the_size")])
    with pytest.raises(DataError, match=r"part\.txt from \S+ failed .*: the server answers with an HTML page"):
        opened(tmp_path, "part.txt")
    server()[1]["/findings/part.txt"] = File(CONTENT, faults=[Fault("page_of_the_size", times=1)])
    assert len(opened(tmp_path, "part.txt")) == 1 and copy(tmp_path).read_bytes() == CONTENT


def test_a_copy_that_is_too_short_is_fetched_again(
    tmp_path: Path, file: File, caplog: pytest.LogCaptureFixture
) -> None:
    opened(tmp_path)
    copy(tmp_path).write_bytes(CONTENT[: CONTENT.index(b"\n", 300) + 1])
    for index in tmp_path.glob("streamed/index/*.arrays"):
        index.unlink()
    assert len(opened(tmp_path)) == 40 and copy(tmp_path).read_bytes() == CONTENT
    assert re.search(r"shard part\.jsonl: its copy \S+ is damaged, and is fetched again", caplog.text)


def test_a_server_that_asks_to_wait_is_waited_for(tmp_path: Path, file: File) -> None:
    file.faults, file.wait = [Fault("429", times=2)], "7"
    with mock.patch.object(spool.time, "sleep") as slept:
        assert len(opened(tmp_path)) == 40
    assert [call.args[0] for call in slept.call_args_list] == [7, 7]


def test_a_length_that_no_disk_has_names_its_shard(tmp_path: Path, file: File) -> None:
    file.faults = [Fault("endless", methods=("HEAD",))]
    with pytest.raises(DataError, match=r"the largest: part\.jsonl, 909\.5 TiB"):
        opened(tmp_path)


@pytest.mark.parametrize("record", [{"text": "x", 1: "a", "1": "b"}, {"text": {"unigen:bytes": "%%"}}])
def test_keys_that_would_be_read_as_others_are_refused(tmp_path: Path, record: Any) -> None:
    with pytest.raises(DataError, match="a key twice as text, or the key 'unigen:bytes'"):
        write_records([record], tmp_path / "records", name="all", limit=1000)
