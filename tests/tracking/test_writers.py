"""Real event files and a real offline W&B run; and a writer that fails ends nothing but itself."""

import json
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.engines.cases import KILL_AT
from tests.engines.feature_cases import WANDB, WATCHED_SAVED_AT, WATCHED_UPDATES
from tests.engines.launch import want
from tests.tiny import tiny_config
from unigen_ds.core.metrics import read_lines
from unigen_ds.examples.digits.dataset import write_digits
from unigen_ds.runner import Runner

runs = want("watched")


@pytest.fixture(autouse=True)
def no_settings_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_RUN_ID", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)


@dataclass
class OfflineRun:
    """What one ``.wandb`` file holds."""

    run: Any
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[Any] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a ``.wandb`` file: LevelDB's log format, a 7-byte header, then blocks of 32 KiB.

    wandb 0.31 reads it in Go alone, so the framing is read here; the records are parsed by wandb's own classes.
    """
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


def read_wandb(path: Path) -> OfflineRun:
    found = OfflineRun(None)
    for record in wandb_records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found.run = record.run
        if kind in ("run", "config"):
            entries = record.run.config.update if kind == "run" else record.config.update
            found.config |= {entry.key or ".".join(entry.nested_key): json.loads(entry.value_json) for entry in entries}
        if kind == "metric":
            found.metrics.append(record.metric)
        if kind == "history":
            items = record.history.item
            found.rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return found


@pytest.fixture(scope="module")
def watched() -> Path:
    """The work dir of a run of two processes with both writers, killed in update 7 and resumed from update 5."""
    pytest.importorskip("wandb")
    return runs().outcome("watched").folder


@pytest.fixture(scope="module")
def offline(watched: Path) -> list[OfflineRun]:
    """The files of the killed and of the resumed process."""
    return [read_wandb(path) for path in sorted(watched.glob("wandb/offline-run-*/*.wandb"))]


def starts(folder: Path) -> list[list[dict[str, Any]]]:
    """Every line that each start of the run wrote to ``metrics.jsonl``, those that a resume made void included."""
    found: list[list[dict[str, Any]]] = [[]]
    for line in map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
        if line.get("event") == "resume":
            found.append([])
        else:
            found[-1].append(line)
    return found


def test_an_offline_wandb_run_of_the_real_runner_holds_what_metrics_jsonl_holds(
    watched: Path, offline: list[OfflineRun]
) -> None:
    written = starts(watched)
    updates = [[line["update"] for line in lines] for lines in written]
    resumed = list(range(WATCHED_SAVED_AT + 1, WATCHED_UPDATES + 1))
    assert updates == [list(range(1, KILL_AT)), resumed]
    first, second = ([row["update"] for row in found.rows] for found in offline)
    assert first == updates[0][: len(first)] and len(first) > 0, "a kill takes what W&B has not yet written"
    assert second == updates[1]
    for found, lines in zip(offline, written, strict=True):
        for row, line in zip(found.rows, lines, strict=False):
            assert {name: row.get(name) for name in line} == line  # the axis, every loss, rate and count
            names = {"ce": "loss/text", "batch_loss": "loss", "mem_allocated": "memory", "total_samples": "samples"}
            assert {alias: row[alias] for alias in names} == {alias: line[name] for alias, name in names.items()}
            assert row.get("mse") == line["loss/image"]
    assert any("mse" in row for found in offline for row in found.rows)


def test_one_wandb_run_id_across_a_kill_and_a_resume(watched: Path, offline: list[OfflineRun]) -> None:
    checkpoint = Path((watched / "last_checkpoint").read_text().strip())
    state = json.loads((checkpoint / "hooks.json").read_text(encoding="utf-8"))["logger"]
    assert [found.run.run_id for found in offline] == 2 * [state["run_ids"]["WandbVisBackend"]]
    assert "is disabled" not in (watched / "train.log").read_text(encoding="utf-8")


def test_wandb_gets_the_arguments_and_the_whole_config(offline: list[OfflineRun]) -> None:
    wanted = WANDB["init_kwargs"]
    for found in offline:
        run = found.run
        given = {"entity": run.entity, "project": run.project, "name": run.display_name, "group": run.run_group}
        assert given == {name: wanted[name] for name in given}
        assert found.config["our_own"] == wanted["config"]["our_own"]
        assert found.config["model"]["type"] == "UnifiedModel" and found.config["model"]["llm"]["hidden_size"] == 32
        assert any(metric.glob_name == "*" and metric.step_metric == "update" for metric in found.metrics)
        (own,) = (metric for metric in found.metrics if metric.name == "grad_norm")
        assert own.summary.max


def test_tensorboard_of_the_real_runner_holds_what_metrics_jsonl_holds(watched: Path) -> None:
    """What the resumed process writes again is hidden: each update is there once."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(watched / "tensorboard"))
    events.Reload()
    lines = read_lines(watched / "metrics.jsonl")
    assert len(lines) == WATCHED_UPDATES
    for name in ("loss", "loss/text", "grad_norm", "tokens", "lr"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(line["update"], pytest.approx(line[name], rel=1e-6)) for line in lines]


def trained(work_dir: Path, data: Path, writer: dict[str, Any]) -> list[str]:
    """Three updates of a real run with a writer that fails. Returns what the log says of it."""
    settings = {"train_dataloader__batch_size": 4, "train_dataloader__packing": None}
    config = tiny_config(work_dir, data, visualizer={"vis_backends": [writer]}, **settings)
    assert Runner.from_cfg(config, max_updates=3).train().updates == 3
    assert [line["update"] for line in read_lines(work_dir / "metrics.jsonl")] == [1, 2, 3]
    lines = (work_dir / "train.log").read_text(encoding="utf-8").splitlines()
    return [line.partition(" WARNING ")[2] for line in lines if "is disabled" in line]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("data") / "digits")


def test_a_folder_that_cannot_be_written_disables_the_writer_once(tmp_path: Path, data: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("a file where a folder should be")
    writer = {"type": "TensorboardVisBackend", "save_dir": str(tmp_path / "file")}
    (said,) = trained(tmp_path / "run", data, writer)
    assert said.startswith("TensorboardVisBackend is disabled, training continues")


def test_wandb_refusing_its_arguments_stops_nothing(tmp_path: Path, data: Path) -> None:
    pytest.importorskip("wandb")
    writer = {"type": "WandbVisBackend", "init_kwargs": {"mode": "no such mode"}}
    (said,) = trained(tmp_path / "run", data, writer)
    assert said.startswith("WandbVisBackend is disabled, training continues")


def test_a_missing_package_names_what_to_install(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # Python's own way to say "not installed"
    (said,) = trained(tmp_path / "run", data, {"type": "TensorboardVisBackend"})
    assert "unigen_ds[tensorboard]" in said
