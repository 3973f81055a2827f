"""Streamed data sets through real runs: exact positions, fetching that fails, and what is refused."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from tests.data.support import make_processor, write_jsonl
from tests.end_to_end.data.test_formats import write_parquet
from tests.end_to_end.data.test_mixtures import train_and_kill
from tests.support.needs import slow
from tests.support.shard_server import Fault, ShardServer, serving
from tests.text_run import KeepBatches, log, run_config, text_config, words
from tools import inspect_data
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core.errors import CheckpointError, ConfigError, DataError, ResumeBlocked
from unigen_ds.data.batches.stream import SequenceStream
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.data.datasets.overflow import Overflow
from unigen_ds.data.datasets.streamed import SPAN
from unigen_ds.data.datasets.streamed_units import ShardWalk, fit_source
from unigen_ds.data.order.order import Cursor, GlobalOrder
from unigen_ds.data.order.packing import BestFitPacking
from unigen_ds.data.sources import shard_files
from unigen_ds.runner import Runner
from unigen_ds.system.files import size_text
from unigen_ds.system.journals import read_lines

SIZES = (13, 4, 9, 1, 22, 7, 11)
KIND = "UnifiedGenerationDataset"
MIXED = {"mixed_shards": 2}


def write_shards(folder: Path, sizes: tuple[int, ...] = SIZES) -> Path:
    for shard, number in enumerate(sizes):
        records = [{"text": words(1 + (shard * 5 + i * 3) % 9, shard + i)} for i in range(number)]
        write_jsonl(folder / f"part-{shard}.jsonl", records)
    return folder


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "shards")


@pytest.fixture
def host(shards: Path) -> Iterator[ShardServer]:
    with serving(shards) as server:
        yield server


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_files, "_LONGEST_WAIT_S", 0.01)


def urls(host: ShardServer, number: int = len(SIZES)) -> str:
    return f"{host.url}/part-{{0..{number - 1}}}.jsonl"


def config(folder: Path, data: Any, **overrides: Any) -> Any:
    data = [
        {"type": KIND, "name": "web", "cache_dir": str(folder / "cache"), **one}
        for one in (data if isinstance(data, list) else [data])
    ]
    settings: dict[str, Any] = dict(
        train_dataloader__dataset=data,
        train_dataloader__seq_length=20,
        train_dataloader__packing=dict(type="BestFitPacking", window=24),
        train_dataloader__batch_size=2,
        optim_wrapper__accumulative_counts=2,
        train_cfg=dict(max_updates=24),
        default_hooks__checkpoint=dict(type="CheckpointHook", interval=-1, by_epoch=False),
        default_hooks__logger=dict(type="LoggerHook", interval=1),
        work_dir=str(folder / "run"),
    )
    return text_config(folder, [{"text": "one"}], **(settings | overrides))


def kill_run(folder: Path, data: Any, updates: int, **overrides: Any) -> None:
    saves = dict(type="CheckpointHook", interval=updates, unit="update")
    train_and_kill(config(folder, data, **{"default_hooks__checkpoint": saves, **overrides}), updates)


def streamed_source(path: Any, **more: Any) -> dict[str, Any]:
    return {"data_path": str(path), "streaming": MIXED, **more}


def digests(folder: Path) -> list[str]:
    return [line["digest"] for line in read_lines(folder / "run" / "ledger.jsonl") if "digest" in line]


def exact(ids: list[str], sizes: tuple[int, ...] = SIZES, name: str = "web") -> int:
    """Every record once in each pass but the last two, of which a window may miss a part. The number of passes."""
    passes: dict[int, list[str]] = defaultdict(list)
    for one in ids:
        source_name, number, pass_number, *_ = one.split(":")
        if source_name == name:
            passes[int(pass_number)].append(number)
    every = {str(shard * SPAN + i) for shard, number in enumerate(sizes) for i in range(number)}
    assert sorted(passes) == [*range(min(passes), min(passes) + len(passes))]
    for number, ids_of_pass in passes.items():
        assert len(ids_of_pass) == len(set(ids_of_pass)) and set(ids_of_pass) <= every
        assert len(ids_of_pass) == len(every) or number >= max(passes) - 1
    return sum(len(ids_of_pass) == len(every) for ids_of_pass in passes.values())


# --- the order ------------------------------------------------------------------------------------------------------


def walk(sizes: tuple[int, ...], mixed: int = 2, units: Any = None) -> ShardWalk:
    shards: Any = MagicMock(num_mixed=mixed, __len__=lambda _: len(sizes))
    return ShardWalk(shards, units or sizes.__getitem__, seed=3, source=1, first_pass=2)


@pytest.mark.parametrize("sizes", [SIZES, (5,), (0, 3, 0, 0, 2, 0), (1, 0)])
@pytest.mark.parametrize("mixed", [1, 2, 7])
def test_every_pass_is_every_record_once_from_any_position(sizes: tuple[int, ...], mixed: int) -> None:
    total, numbers = sum(sizes), np.arange(5 * sum(sizes) + 3)
    units, passes = walk(sizes, mixed).draws(numbers)
    every = sorted(shard * SPAN + i for shard, number in enumerate(sizes) for i in range(number))
    for number in range(5):
        assert sorted(units[number * total : (number + 1) * total].tolist()) == every
    assert passes.tolist() == [2 + n // total for n in numbers.tolist()]
    if total > 3:
        assert units[:total].tolist() != units[total : 2 * total].tolist()
    shuffled = np.random.default_rng(0).permutation(numbers)
    other = walk(sizes, mixed)
    for some in np.array_split(shuffled, 7):
        pair = other.draws(some)
        assert pair[0].tolist() == units[some].tolist() and pair[1].tolist() == passes[some].tolist()


def test_a_state_is_enough_to_continue_without_the_shards_before() -> None:
    units, _ = walk(SIZES).draws(np.arange(300))
    for number in (0, 1, 66, 67, 150, 201, 299):
        before = walk(SIZES)
        before.draws(np.arange(number))
        sizes = MagicMock(side_effect=SIZES.__getitem__)
        later = walk(SIZES, units=sizes)
        assert later.remember(before.state(number))
        assert later.draws(np.asarray([number]))[0].tolist() == [units[number]]
        assert sizes.call_count <= 4, "at most the block that ends there, and the next one"
    assert not walk(SIZES).remember((5, 2, 99)) and not walk(SIZES).remember((5, 1, 0))
    with pytest.raises(DataError, match="none of 3 shards has a record that can be used"):
        walk((0, 0, 0)).draws(np.arange(2))


# --- runs -----------------------------------------------------------------------------------------------------------


Straight = tuple[Runner, KeepBatches, list[str]]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    folder = tmp_path_factory.mktemp("straight")
    return *run_config(config(folder, streamed_source(write_shards(folder / "shards")))), digests(folder)


def test_a_run_is_the_same_over_kills_and_wherever_its_shards_are(
    tmp_path: Path, host: ShardServer, straight: Straight
) -> None:
    """From local files in one go; from a server, killed within windows, with other splits and without copies."""
    reference, hook, expected = straight
    assert exact(hook.ids) >= 3
    folder, data = tmp_path / "killed", streamed_source(urls(host))
    chain = [(7, 2, 2, 0), (8, 4, 1, 3), (19, 1, 4, 1)]
    for number, (stop, batch_size, counts, workers) in enumerate(chain):
        options = dict(train_dataloader__batch_size=batch_size, optim_wrapper__accumulative_counts=counts)
        kill_run(folder, data, stop, **options, train_dataloader__num_workers=workers, resume=number > 0)
        if number == 1:
            shutil.rmtree(folder / "cache")
    runner, _ = run_config(config(folder, data, resume=True))
    assert digests(folder) == expected and runner.progress == reference.progress
    newest = max((folder / "run").glob("iter_*"), key=lambda path: path.stat().st_mtime)
    cursor = Manifest.read(newest).loader["cursor"]
    assert len(cursor["blocks"]) == 3 and cursor["blocks"][1] == max(int(one.split(":")[2]) for one in hook.ids)


def test_unpacked_and_beside_a_source_with_random_access(tmp_path: Path, shards: Path) -> None:
    write_jsonl(tmp_path / "own.jsonl", [{"text": words(3, i)} for i in range(10)])
    data = [streamed_source(shards, weight=3), {"data_path": str(tmp_path / "own.jsonl"), "name": "own", "weight": 1}]
    plain = dict(train_dataloader__packing=None, train_dataloader__max_sample_tokens=None)
    _, hook = run_config(config(tmp_path / "straight", data, **plain))
    assert exact(hook.ids) == 1
    names = [one.split(":")[0] for one in hook.ids]
    shares = np.abs(np.cumsum([name == "web" for name in names]) - 0.75 * np.arange(1, len(names) + 1))
    assert shares.max() <= 1
    folder = tmp_path / "killed"
    kill_run(folder, data, 23, **plain)
    shutil.rmtree(shards / ".unigen_index")
    workers = dict(train_dataloader__num_workers=2)
    run_config(config(folder, data, **plain, **workers, resume=True))
    assert digests(folder) == digests(tmp_path / "straight")


def test_what_is_not_exact_is_reported_at_the_start(tmp_path: Path, host: ShardServer) -> None:
    host.etags = False
    run_config(config(tmp_path, streamed_source(urls(host)), train_cfg=dict(max_updates=1)))
    text = log(tmp_path)
    size = sum(path.stat().st_size for path in host.folder.glob("*.jsonl"))
    estimate = 13 * size // (host.folder / "part-0.jsonl").stat().st_size
    assert f"streamed from 7 shards of {size_text(size)} together; about {estimate} samples a pass" in text
    assert "records are shuffled within 2 shards at a time" in text
    assert "7 of 7 shards have no version" in text
    run_config(config(tmp_path / "local", streamed_source(host.folder), train_cfg=dict(max_updates=1)))
    assert "copies of shards" in text and "copies of shards" not in log(tmp_path / "local")


def test_numbers_of_a_streamed_source_name_the_part_that_is_measured(
    tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 13 records, 1 of 7 shards: an epoch is as many passes over the first shard as it draws of all."""
    write_jsonl(tmp_path / "own.jsonl", [{"text": "one two three"}] * 10)
    write_jsonl(shards / "part-0.jsonl", [{"text": words(4)}] * 12 + [{"text": words(50)}])  # 6 and 52 tokens
    filters = [{"type": "MostCharacters", "most": 200}]
    data = [
        streamed_source(shards, weight=3, filters=filters),
        {"data_path": str(tmp_path / "own.jsonl"), "name": "own", "weight": 1},
    ]
    run_config(config(tmp_path, data, train_cfg=dict(max_updates=1)))
    options = [f"train_dataloader.dataset={config(tmp_path, data)['train_dataloader']['dataset']!r}"]
    options += ["train_dataloader.seq_length=20", "train_dataloader.packing.type=BestFitPacking"]
    command = [str(tmp_path / "config.py"), "--cfg-options", *options, "train_dataloader.packing.window=24"]
    assert inspect_data.main(["--json", *command]) == 0
    report = json.loads(capsys.readouterr().out)
    draws = report["sources"]["web"]["draws_per_epoch"]
    streamed_part = report["sources"]["web"]["streamed"]
    assert streamed_part["measured"] == {"shards": ["part-0.jsonl"], "records": 12} and draws > 30
    text, shard = log(tmp_path), "shard part-0.jsonl (1 of 7)"
    assert f"All further numbers of its records are of the 12 of {shard}" in text
    assert f"Data, web, {shard}: filters remove 1 of 13 records" in text
    assert f"Data, web, {shard}: all 12 records fit" in text
    assert f"Data, web, {shard}: about {draws:,} samples drawn an epoch, {6 * draws:,} tokens" in text
    own = report["sources"]["own"]["draws_per_epoch"]
    total = f"{draws + own:,} samples drawn an epoch, {6 * draws + 5 * own:,} tokens"
    assert f"all sources: {total}" in text
    assert inspect_data.main(command) == 0
    output = capsys.readouterr().out
    assert f"web: 12 records of {shard}, about {draws:,} used" in output and "10 records, " in output
    assert f"streamed from 7 shards: every number below is of {shard}" in output


# --- fetching -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["short", "silent", "503", *slow("reset", "long", "chunks_cut", "page", "429")])
def test_a_transfer_that_fails_is_tried_again(
    tmp_path: Path, host: ShardServer, straight: Straight, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_files, "_SILENCE_S", 0.2)
    host.faults = {f"part-{shard}.jsonl": [Fault(fault, times=1)] for shard in range(7)}
    run_config(config(tmp_path, streamed_source(urls(host))))
    assert digests(tmp_path) == straight[-1]
    assert "part-4.jsonl: attempt 1 of 5 failed" in log(tmp_path).replace(f"{host.url}/", "")


def test_a_copy_that_is_too_short_is_fetched_again(tmp_path: Path, host: ShardServer, straight: Straight) -> None:
    data = streamed_source(urls(host))
    kill_run(tmp_path, data, 3)
    for path in (tmp_path / "cache").glob("streamed/shards/*/part-*"):
        path.write_bytes(path.read_bytes()[:-9])
    run_config(config(tmp_path, data, resume=True))
    assert digests(tmp_path) == straight[-1]
    assert re.search(r"shard part-\d\.jsonl: its copy \S+ is damaged, and is fetched again", log(tmp_path))


def test_a_copy_that_another_process_replaces_is_whole_or_not(tmp_path: Path) -> None:
    """A damaged copy is deleted while the reader of another process looks at it."""
    file, stop = tmp_path / "part-0.jsonl", threading.Event()

    def put_anew() -> None:
        while not stop.is_set():
            file.write_bytes(b"12345")
            file.unlink()

    with ThreadPoolExecutor(1) as pool:
        replacing = pool.submit(put_anew)
        shard = shard_files.DataShard("part-0.jsonl", "https://host/part-0.jsonl", size=5)
        try:
            assert {shard.is_whole(file) for _ in range(20_000)} <= {True, False}
        finally:
            stop.set()
        replacing.result()


@pytest.mark.parametrize(
    ("fault", "number", "message"),
    [
        (Fault("short"), 7, r"fetching shard part-0\.jsonl from http://\S+ failed in 2 attempts: "),
        (Fault("changed", after=0), 7, r"shard part-0\.jsonl from http://\S+ failed in 2 attempts: it changed"),
        (Fault("503", ("HEAD", "GET")), 7, r"looking for shard part-0\.jsonl at http://\S+ failed in 2 attempts: 503"),
        (None, 8, r"shard part-7\.jsonl at http://\S+: it does not exist, or may not be read \(404\)"),
    ],
)
def test_what_cannot_be_fetched_ends_the_run_and_is_named(
    tmp_path: Path, host: ShardServer, fault: Fault | None, number: int, message: str
) -> None:
    host.faults = {} if fault is None else {"part-0.jsonl": [fault]}
    host.later = (host.folder / "part-0.jsonl").read_bytes().replace(b"one", b"two")
    with pytest.raises(DataError, match=message):
        run_config(config(tmp_path, streamed_source(urls(host, number), streaming={**MIXED, "attempts": 2})))


def test_a_shard_that_changes_during_the_run_is_noticed(tmp_path: Path, host: ShardServer) -> None:
    """Of the same size, at a server without versions: by its copy, which is fetched again."""
    host.etags = False
    kill_run(tmp_path, streamed_source(urls(host)), 12)
    shutil.rmtree(tmp_path / "cache" / "streamed" / "shards")
    for path in host.folder.glob("*.jsonl"):
        if path.name != "part-0.jsonl":
            path.write_text(path.read_text().replace("one", "two").replace("five", "four"))
    with pytest.raises(
        DataError, match=r"shard part-\d\.jsonl: its content is not that of its index: the shard changed"
    ):
        run_config(config(tmp_path, streamed_source(urls(host)), resume=True))


# --- changed data ---------------------------------------------------------------------------------------------------


def test_another_list_of_shards_is_changed_data(tmp_path: Path, host: ShardServer) -> None:
    before = streamed_source(urls(host, 6))
    kill_run(tmp_path, before, 9)
    _, whole = run_config(config(tmp_path / "straight", before, train_cfg=dict(max_updates=9)))
    for choice in ("refuse", "append"):
        with pytest.raises(ResumeBlocked, match=r"web had 6 shards and has 7|where a source is streamed"):
            Runner.from_cfg(config(tmp_path, streamed_source(urls(host)), resume=True, on_data_change=choice))
    with pytest.raises(ResumeBlocked, match="mixed_shards"):
        Runner.from_cfg(config(tmp_path, {**before, "streaming": {"mixed_shards": 3}}, resume=True))
    _, hook = run_config(config(tmp_path, streamed_source(urls(host)), resume=True, on_data_change="restart"))
    exact(hook.ids)
    assert not {*whole.ids} & {*hook.ids}


def test_a_moved_copy_and_another_limit_are_the_same_data(tmp_path: Path, shards: Path, straight: Straight) -> None:
    kill_run(tmp_path, streamed_source(shards), 9)
    shutil.move(shards, tmp_path / "moved")
    data = streamed_source(tmp_path / "moved", streaming={**MIXED, "attempts": 2})
    run_config(config(tmp_path, data, resume=True))
    assert digests(tmp_path) == straight[-1]


def test_a_cursor_of_other_blocks_is_refused(shards: Path) -> None:
    dataset = UnifiedGenerationDataset(shards, make_processor(), streaming=MIXED)
    order = GlobalOrder([len(fit_source(dataset, Overflow(96)))], [1.0], seed=3)
    stream = SequenceStream([dataset], order, packer=BestFitPacking(24), seq_length=96)
    *_, (_, cursor) = itertools.islice(stream.rows(), 30)
    assert cursor.blocks[0] > 0 and Cursor.from_state_dict(cursor.state_dict()) == cursor
    next(stream.rows(cursor))
    for blocks in ((10**6, 0, 0), (0, 0, 99), (0, -1, 0), cursor.blocks[:2]):
        with pytest.raises(CheckpointError, match=r"the data cursor has .* and the blocks"):
            next(stream.rows(replace(cursor, blocks=blocks)))


# --- other kinds of shards ------------------------------------------------------------------------------------------


def contents(folder: Path, data: Any) -> list[tuple[Any, ...]]:
    """Targets of the samples, with the order of their texts left out."""
    hook: KeepBatches
    _, hook = run_config(config(folder, data))
    return sorted(tuple(sorted(batch.text_target_ids.tolist())) for batch in hook.batches)


def test_names_of_hugging_face_have_the_samples_of_the_files(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "data", (8, 8, 8))
    with serving(folder) as server:
        ways = {
            "http": streamed_source(f"{server.url}/part-{{0..2}}.jsonl"),
            "hub": streamed_source("json", format={"type": "huggingface", "data_files": str(folder / "*.jsonl")}),
            "folder": streamed_source(folder),
            "file": streamed_source(f"file://{folder}/*.jsonl"),
        }
        by_way = {way: contents(tmp_path / way, data) for way, data in ways.items()}
    assert by_way["http"] == by_way["hub"] == by_way["folder"] == by_way["file"]


def hub_files(server: ShardServer, revision: str, token: str | None) -> dict[str, Any]:
    """By the hub's own client, without names of this process's environment."""
    options = {"endpoint": server.url, "token": token or False}
    path = f"hf://datasets/org/name@{revision}/part-*.jsonl"
    return streamed_source(path, streaming={**MIXED, "attempts": 3, "storage_options": options})


def test_files_of_a_private_data_set_at_a_revision(
    tmp_path: Path, straight: Straight, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub that asks to wait is asked again; a wrong token or revision is named."""
    old, new = write_shards(tmp_path / "old"), write_shards(tmp_path / "new", (5, 3))
    slept: list[float] = []
    with serving(new) as server:
        server.token, server.revisions = "hf_right", {"v1": old}
        monkeypatch.setattr(shard_files, "time", SimpleNamespace(sleep=slept.append))
        for revision, token in (("v1", None), ("v1", "hf_wrong"), ("v2", "hf_right")):
            with pytest.raises(DataError, match=rf"hf://datasets/org/name@{revision}/part-\*\.jsonl"):
                run_config(config(tmp_path / "refused", hub_files(server, revision, token)))
        assert not slept, "another attempt is of no use"
        server.num_limited = 1
        _, hook = run_config(config(tmp_path / "hub", hub_files(server, "v1", "hf_right")))
        server.num_limited = 2
        run_config(config(tmp_path / "newer", hub_files(server, "main", "hf_right"), train_cfg=dict(max_updates=2)))
    assert slept and "streamed from 2 shards" in log(tmp_path / "newer")
    assert [batch.text_ids.tolist() for batch in hook.batches] == [b.text_ids.tolist() for b in straight[1].batches]


# --- filters, long records, refusals --------------------------------------------------------------------------------


def test_filters_and_long_records_are_counted_shard_by_shard(tmp_path: Path, shards: Path) -> None:
    write_jsonl(shards / "part-2.jsonl", [{"text": words(9, i)} for i in range(4)])  # all are removed
    write_jsonl(shards / "part-5.jsonl", [{"text": words(3 + 12 * (i == 2), i)} for i in range(7)])  # one is split
    data = streamed_source(shards, filters=[{"type": "MostCharacters", "most": 40}])
    _, hook = run_config(config(tmp_path, data, train_dataloader__seq_length=14, train_dataloader__overflow="split"))
    assert "Data, web, shard part-2.jsonl: filters remove 4 of 4 records" in log(tmp_path)
    assert not [one for one in hook.ids if int(one.split(":")[1]) // SPAN == 2]
    everything = streamed_source(shards, filters=[{"type": "MostCharacters", "most": 1}])
    with pytest.raises(DataError, match=r"web, shard part-0\.jsonl \(1 of 7\): all 13 records are"):
        run_config(config(tmp_path / "none", everything))
    long = tmp_path / "long"
    write_jsonl(shards / "part-5.jsonl", [{"text": words(30, i)} for i in range(7)])
    run_config(config(long, streamed_source(shards)))
    assert "Data, web, shard part-5.jsonl: 7 of 7 records are longer than seq_length 20: 7 split into 14" in log(long)
    with pytest.raises(DataError, match=r"web, shard part-5\.jsonl: 7 of 7 records are longer than seq_length 20"):
        run_config(config(tmp_path / "error", streamed_source(shards), train_dataloader__overflow="error"))


def test_what_needs_all_records_is_refused(tmp_path: Path, shards: Path) -> None:
    own = write_jsonl(tmp_path / "own.jsonl", [{"text": "one two"}] * 5)
    beside = {"data_path": str(own), "name": "own"}
    cases = [
        ([streamed_source(shards), beside], {}, "is streamed, so nobody knows how many records it has"),
        (streamed_source(shards, num_used_data=5), {}, "has streaming and num_used_data=5"),
        (streamed_source(shards), {"val_dataloader": {"split": 0.1}}, "val_dataloader.split needs all its records"),
        (
            [streamed_source(shards, group="a", weight=1), {**beside, "group": "b", "weight": 1}],
            {"train_dataloader__groups": {"a": {"weight": 1, "mandatory": True}, "b": {"weight": 1}}},
            "mandatory, which needs the lengths of all samples",
        ),
        (streamed_source(shards, streaming={"cache_gib": 1}), {}, "streaming.cache_gib"),
        (streamed_source(shards, format="jsn"), {}, "format is 'jsn'"),
        (streamed_source("gopher://host/part.jsonl"), {}, "gopher"),
        (streamed_source(tmp_path / "nothing.jsonl"), {}, "nothing.jsonl"),
    ]
    for data, more, message in cases:
        with pytest.raises((ConfigError, DataError), match=message):
            run_config(config(tmp_path / str(zlib.crc32(message.encode())), data, **more))
    validation = {"dataset": {"type": KIND, **streamed_source(shards, cache_dir=str(tmp_path / "cache"))}}
    with pytest.raises(ConfigError, match=r"val_dataloader\.dataset needs the number of all records"):
        run_config(config(tmp_path / "validation", streamed_source(shards), val_dataloader=validation))
    write_parquet(shards / "rows.parquet", [{"text": "one"}])
    with pytest.raises(DataError, match="files of several formats: 7 of json, 1 of parquet"):
        run_config(config(tmp_path / "two", streamed_source(shards)))
