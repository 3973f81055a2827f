"""Real event files and a real offline W&B run; and a writer that fails ends nothing but itself."""

import json
import logging
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hooks.tiny_run import TinyRun
from unigen_ds.core.log import NAME
from unigen_ds.core.metrics import read_lines
from unigen_ds.core.progress import Progress
from unigen_ds.hooks.logger import LoggerHook
from unigen_ds.hooks.timer import IterTimerHook

OFFLINE = {"type": "WandbVisBackend", "init_kwargs": {"project": "unigen", "mode": "offline", "entity": "us"}}


@pytest.fixture(autouse=True)
def warnings_of_the_logger(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(NAME), "propagate", True)
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_MODE", "WANDB_RUN_ID", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)


def train(run: TinyRun, *, updates: int, resumed_from: str | None = None) -> None:
    run.start(resumed_from=resumed_from)
    for _ in range(updates):
        run.update()
    run.finish()


def test_tensorboard_event_file_and_its_purge_on_resume(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = TinyRun(tmp_path, [IterTimerHook(), LoggerHook(interval=2, writers=[{"type": "TensorboardVisBackend"}])])
    train(run, updates=3)
    again = TinyRun(
        tmp_path,
        [LoggerHook(interval=2, writers=[{"type": "TensorboardVisBackend"}])],
        progress=Progress(sequences=8, samples=8, tokens=200, updates=2),
    )
    train(again, updates=2, resumed_from="iter_4.pth")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("loss/text")
    assert [(event.step, event.value) for event in scalars] == [(1, 2.0), (2, 2.0), (3, 2.0), (4, 2.0)]
    tags = set(events.Tags()["scalars"])
    assert {"loss", "loss/image", "lr", "lr/connector", "grad_norm", "tokens_per_second", "share/data"} <= tags


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a ``.wandb`` file: LevelDB's log format, a 7-byte header, then blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    content, position, part = path.read_bytes(), 7, b""
    while position < len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _crc, length, kind = struct.unpack("<IHB", content[position : position + 7])
        part += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            yield record
            part = b""


def read_wandb(folder: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Run ids and history rows of all offline runs under a folder."""
    ids: list[str] = []
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in wandb_records(path):
            if record.HasField("run"):
                ids.append(record.run.run_id)
            if record.HasField("history"):
                items = record.history.item
                rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return ids, rows


def test_offline_wandb_run_goes_on_under_the_same_id_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    first = LoggerHook(interval=2, writers=[OFFLINE])
    train(TinyRun(tmp_path, [first]), updates=2)
    state = json.loads(json.dumps(first.state_dict()))
    time.sleep(1.1)  # an offline run's folder is named by second and id
    second = LoggerHook(interval=2, writers=[OFFLINE])
    second.load_state_dict(state)
    progress = Progress(sequences=8, samples=8, tokens=200, updates=2)
    train(TinyRun(tmp_path, [second], progress=progress), updates=1, resumed_from="iter_4.pth")
    assert second.state_dict() == state
    ids, rows = read_wandb(tmp_path)
    for _ in range(100):  # W&B's own process may write a little after finish() on a busy machine
        if len(rows) == 3:
            break
        time.sleep(0.2)
        ids, rows = read_wandb(tmp_path)
    assert set(ids) == {state["run_ids"]["WandbVisBackend"]}, rows
    assert [row["update"] for row in rows] == [1, 2, 3]
    row = rows[1]
    assert (row["ce"], row["mse"], row["lr"], row["total_samples"]) == (2.0, 0.5, 0.1, 8)
    assert row["batch_loss"] == row["loss"] == 2.25 and row["mem_allocated"] == row["memory"] > 0


def test_a_folder_that_cannot_be_written_disables_the_writer_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("a file where a folder should be")
    writer = {"type": "TensorboardVisBackend", "save_dir": str(tmp_path / "file")}
    run = TinyRun(tmp_path, [LoggerHook(interval=2, writers=[writer])])
    train(run, updates=3)
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 3
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "TensorboardVisBackend is disabled, training goes on" in warnings[0]


def test_wandb_refusing_its_arguments_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("wandb")
    writer = {"type": "WandbVisBackend", "init_kwargs": {"mode": "no such mode"}}
    run = TinyRun(tmp_path, [LoggerHook(interval=2, writers=[writer])])
    train(run, updates=2)
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 2
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "WandbVisBackend is disabled" in warnings[0]


def test_a_missing_package_names_what_to_install(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # Python's own way to say "not installed"
    run = TinyRun(tmp_path, [LoggerHook(interval=2, writers=[{"type": "TensorboardVisBackend"}])])
    train(run, updates=2)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "unigen_ds[tensorboard]" in warnings[0]
