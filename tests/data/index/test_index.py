"""The index: built once, cached atomically, rebuilt when damaged, correct for JSON and JSONL."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.support import (
    ByteTokenizer,
    build_index,
    image,
    make_processor,
    mixed_records,
    picture,
    talk,
    text,
    write_jsonl,
)
from unigen_ds.core.errors import DataError
from unigen_ds.data.cache.array_cache import FOLDER, load_or_fill
from unigen_ds.data.index import index as index_module

OTHER = type("Other", (ByteTokenizer,), {"fingerprint": "other"})


def caches(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).glob("*.arrays"))


def test_counts_of_every_record(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 16, 8)
    records = [
        talk(text("user", "ab"), text("assistant", "cde")),
        {"text_prompt": "ab", "image_path": "a.png"},
        talk(image("user", "a.png"), text("user", "x"), image("assistant", "a.png")),
    ]
    counts = build_index(write_jsonl(tmp_path / "t.jsonl", records)).counts
    assert counts.tokens.tolist() == [4 + 5, 4 + 4, 4 + 10 + 3 + 4]
    assert counts.tiles.tolist() == [0, 0, 2]
    assert counts.image_tokens.tolist() == [0, 4, 4 + 10 + 4]
    assert counts.text_targets.tolist() == [4, 0, 0]
    assert counts.image_targets.tolist() == [0, 2, 2]
    assert counts.unreadable.tolist() == [0, 0, 0]


def test_cache_is_used_and_keyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", mixed_records(tmp_path, 8))
    first = build_index(path)
    assert len(caches(tmp_path)) == 1

    def refuse(*_: object) -> dict[str, np.ndarray]:
        raise RuntimeError("planned again")

    with monkeypatch.context() as patch:
        patch.setattr(index_module, "plan_all", refuse)
        again = build_index(path)
        assert again.digest == first.digest and np.array_equal(again.source.offsets, first.source.offsets)
        with pytest.raises(RuntimeError, match="planned again"):
            build_index(path, make_processor(tokenizer=OTHER()))
        path.write_text(path.read_text().replace("draw 1", "draw one"))
        with pytest.raises(RuntimeError, match="planned again"):
            build_index(path)
    assert build_index(path).digest != first.digest


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "text"])
def test_damaged_cache_is_rebuilt_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("unigen_ds"), "propagate", True)
    path = write_jsonl(tmp_path / "t.jsonl", mixed_records(tmp_path, 8))
    first = build_index(path)
    (cache,) = caches(tmp_path)
    content = bytearray(cache.read_bytes())
    content[len(content) // 2] ^= 0xFF
    damaged_bytes = {"truncate": content[: len(content) // 2], "flip": content, "empty": b"", "text": b"hello"}[damage]
    cache.unlink()  # the first index has it mapped
    cache.write_bytes(bytes(damaged_bytes))
    with caplog.at_level(logging.WARNING):
        again = build_index(path)
    assert again.digest == first.digest and np.array_equal(again.source.lengths, first.source.lengths)
    assert "is damaged" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        build_index(path)
    assert not caplog.text


def test_a_cache_is_never_unpickled(tmp_path: Path) -> None:
    cache = tmp_path / "x.npz"
    np.savez(cache, key=np.asarray("k"), values=np.asarray([{"a": 1}], dtype=object))
    assert load_or_fill(cache, "k", lambda new: new.store("values", np.arange(3)))["values"].tolist() == [0, 1, 2]


def test_a_cache_of_another_key_is_not_used(tmp_path: Path) -> None:
    cache = tmp_path / "x.npz"
    for key, number in (("one", 1), ("two", 2)):
        arrays = load_or_fill(cache, key, lambda new, number=number: new.store("values", np.asarray([number])))
        assert arrays["values"] == [number]


def test_worker_processes_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_CHUNK", 5)
    path = write_jsonl(tmp_path / "t.jsonl", mixed_records(tmp_path, 23))
    alone = build_index(path)
    caches(tmp_path)[0].unlink()
    with monkeypatch.context() as patch:
        planned_by(patch, tmp_path, lambda: None)
        many = build_index(path, num_workers=2)
    assert many.digest == alone.digest and np.array_equal(many.records, alone.records)
    assert len(pids(tmp_path)) == 2 and os.getpid() not in pids(tmp_path)
    path = write_jsonl(tmp_path / "u.jsonl", [{"text": "x"} if i not in (13, 30) else {} for i in range(40)])
    with pytest.raises(DataError, match=r"u\.jsonl:14: no layout fits the keys"):
        build_index(path, num_workers=2)


def test_cache_dir_where_the_data_folder_is_not_writable(tmp_path: Path) -> None:
    data = tmp_path / "data"
    path = write_jsonl(data / "t.jsonl", mixed_records(data, 4))
    (data / FOLDER).write_text("a file where the folder should be")
    index = build_index(path, cache_dir=tmp_path / "cache")
    assert index.folder == tmp_path / "cache" and list(index.folder.glob("t.jsonl-*.arrays"))
    assert build_index(path).folder is None  # no folder for the cache: still works


def test_malformed_records_stop_the_build(tmp_path: Path) -> None:
    records = [talk(text("assistant", "x")), talk({"role": "assistant", "type": "image"})]
    path = write_jsonl(tmp_path / "train.jsonl", records)
    with pytest.raises(DataError, match=r"train\.jsonl:2: conversations\[0\]\.image_path is missing"):
        build_index(path)
    assert not caches(tmp_path)
    path = write_jsonl(tmp_path / "u.jsonl", [talk(text("user", "x"))])
    with pytest.raises(DataError, match=r"u\.jsonl:1: no assistant turn"):
        build_index(path)


def test_moved_data_keeps_its_digest_and_other_sizes_change_it(tmp_path: Path) -> None:
    digests = []
    for name in ("one", "two"):
        folder = tmp_path / name
        digests.append(build_index(write_jsonl(folder / "t.jsonl", mixed_records(folder, 8))).digest)
    assert digests[0] == digests[1]
    picture(tmp_path / "two" / "1.png", 8, 8)
    for cache in caches(tmp_path / "two"):
        os.remove(cache)
    assert build_index(tmp_path / "two" / "t.jsonl").digest != digests[0]


def planned_by(monkeypatch: pytest.MonkeyPatch, folder: Path, then: Callable[[], object]) -> None:
    """Each process that plans a chunk leaves a file with its number in ``folder``, then calls ``then``."""
    chunk = index_module.Plan.__call__

    def note(self: Any, part: Any) -> Any:
        (folder / f"{os.getpid()}.pid").touch()
        then()
        return chunk(self, part)

    monkeypatch.setattr(index_module.Plan, "__call__", note)


def pids(folder: Path) -> set[int]:
    return {int(path.stem) for path in folder.glob("*.pid")}
