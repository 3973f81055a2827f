"""Real event files and a real offline W&B run; and a writer that fails ends nothing but itself."""

import json
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.end_to_end.engines.jobs.cases import KILL_AT
from tests.end_to_end.engines.jobs.feature_cases import WANDB, WATCHED_SAVED_AT, WATCHED_UPDATES
from tests.end_to_end.engines.launch import want
from tests.tiny import tiny_config
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.hooks.log.logger import logger_of
from unigen_ds.runner import Runner
from unigen_ds.system.journals import read_lines
from unigen_ds.tracking.wandb import WandbVisBackend
from unigen_ds.tracking.writer import SafeWriter

runs = want("watched")
SMALL = {"train_dataloader__batch_size": 4, "train_dataloader__packing": None, "default_hooks__logger__interval": 1}


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
        rest = 32768 - position % 32768
        if rest < 7:
            position += rest
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
    one = OfflineRun(None)
    for record in wandb_records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            one.run = record.run
        if kind in ("run", "config"):
            entries = record.run.config.update if kind == "run" else record.config.update
            one.config |= {entry.key or ".".join(entry.nested_key): json.loads(entry.value_json) for entry in entries}
        if kind == "metric":
            one.metrics.append(record.metric)
        if kind == "history":
            items = record.history.item
            one.rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return one


@pytest.fixture(scope="module")
def run_folder() -> Path:
    """The work dir of a run of two processes with both writers, killed in update 7 and resumed from update 5."""
    pytest.importorskip("wandb")
    return runs().outcome("watched").folder


@pytest.fixture(scope="module")
def offline(run_folder: Path) -> list[OfflineRun]:
    """The files of the killed and of the resumed process."""
    return [read_wandb(path) for path in sorted(run_folder.glob("wandb/offline-run-*/*.wandb"))]


def starts(folder: Path) -> list[list[dict[str, Any]]]:
    """Every line that each start of the run wrote to ``metrics.jsonl``, those that a resume made void included."""
    parts: list[list[dict[str, Any]]] = [[]]
    for line in map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
        if line.get("event") == "resume":
            parts.append([])
        else:
            parts[-1].append(line)
    return parts


def test_an_offline_wandb_run_of_the_real_runner_holds_what_metrics_jsonl_holds(
    run_folder: Path, offline: list[OfflineRun]
) -> None:
    lines_of_starts = starts(run_folder)
    updates = [[line["update"] for line in lines] for lines in lines_of_starts]
    after_resume = list(range(WATCHED_SAVED_AT + 1, WATCHED_UPDATES + 1))
    assert updates == [list(range(1, KILL_AT)), after_resume]
    first, second = ([row["update"] for row in one.rows] for one in offline)
    assert first == updates[0][: len(first)] and len(first) >= WATCHED_SAVED_AT, (
        "a kill takes rows after the checkpoint"
    )
    assert second == list(range(KILL_AT, WATCHED_UPDATES + 1)), "the other engine has the same losses: sent once"
    for one, lines in zip(offline, (lines_of_starts[0], lines_of_starts[1][-len(second) :]), strict=True):
        for row, line in zip(one.rows, lines, strict=False):
            assert {name: row.get(name) for name in line} == line  # the axis, every loss, rate and count
            names = {"ce": "loss/text", "batch_loss": "loss", "mem_allocated": "memory", "total_samples": "samples"}
            assert {alias: row[alias] for alias in names} == {alias: line[name] for alias, name in names.items()}
            assert row.get("mse") == line["loss/image"]
    assert any("mse" in row for one in offline for row in one.rows)


def test_one_wandb_run_id_across_a_kill_and_a_resume(run_folder: Path, offline: list[OfflineRun]) -> None:
    """Although the engine and the number of processes are others: losses agree but for rounding."""
    checkpoint = Path((run_folder / "last_checkpoint").read_text().strip())
    state = json.loads((checkpoint / "hooks.json").read_text(encoding="utf-8"))["logger"]
    assert [one.run.run_id for one in offline] == 2 * [state["run_ids"]["WandbVisBackend"]]
    assert not any("parent_run" in one.config for one in offline)
    assert "is disabled" not in (run_folder / "train.log").read_text(encoding="utf-8")


def test_a_checkpoint_waits_until_wandb_has_written(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    writer = SafeWriter(WandbVisBackend(init_kwargs={"mode": "offline"}))
    writer.open(work_dir=tmp_path, config={}, updates=0, name="name", identity={})
    for update in (1, 2):
        writer.write({"loss": 1.0}, update=update)
        writer.sync()
        (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
        assert [row["update"] for row in read_wandb(path).rows] == [*range(1, update + 1)]
    writer.close()


def test_wandb_gets_the_arguments_and_the_whole_config(offline: list[OfflineRun]) -> None:
    expected = WANDB["init_kwargs"]
    for one in offline:
        run = one.run
        fields = {"entity": run.entity, "project": run.project, "name": run.display_name, "group": run.run_group}
        assert fields == {name: expected[name] for name in fields}
        assert one.config["our_own"] == expected["config"]["our_own"]
        assert one.config["model"]["type"] == "UnifiedModel" and one.config["model"]["llm"]["hidden_size"] == 32
        assert any(metric.glob_name == "*" and metric.step_metric == "update" for metric in one.metrics)
        (own,) = (metric for metric in one.metrics if metric.name == "grad_norm")
        assert own.summary.max


def test_tensorboard_of_the_real_runner_holds_what_metrics_jsonl_holds(run_folder: Path) -> None:
    """What the resumed process writes again is hidden: each update is there once."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run_folder / "tensorboard"))
    events.Reload()
    lines = read_lines(run_folder / "metrics.jsonl")
    assert len(lines) == WATCHED_UPDATES
    for name in ("loss", "loss/text", "grad_norm", "tokens", "lr"):
        points = [(event.step, event.value) for event in events.Scalars(name)]
        assert points == [(line["update"], pytest.approx(line[name], rel=1e-6)) for line in lines]


def test_results_on_an_axis_of_their_own_and_pictures(tmp_path: Path, digits: Path, capfd) -> None:
    """Through the real runner: what a hook logs reaches each writer under its names. W&B ends with one line."""
    pytest.importorskip("wandb")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    wandb = {**WANDB, "define_metric_cfg": []}
    writers = [wandb, {"type": "TensorboardVisBackend", "save_dir": str(tmp_path / "events")}]
    config = tiny_config(tmp_path / "run", digits, visualizer={"vis_backends": writers}, **SMALL)
    runner = Runner.from_cfg(config, max_updates=3)
    runner.hooks = sorted([*runner.hooks, ShowsHook()], key=lambda hook: hook.priority)
    runner.train()
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line for line in lines if "event" in line] == [
        {"event": "lmms_eval", "update": 1, "at": 2, "lmms_eval/mme": 3.0},
        {"event": "evaluation", "update": 2, "val/loss": 0.25},
    ]
    (path,) = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    lines = capfd.readouterr().err.splitlines()
    (end,) = [line for line in lines if "W&B" in line or line.startswith("wandb:")]
    assert end.endswith(f"W&B: this run is uploaded by `wandb sync {path.parent}`.")
    offline_run = read_wandb(path)
    (late,) = [row for row in offline_run.rows if "lmms_eval/mme" in row]
    assert late["<lmms-eval-step>"] == 1 and late["lmms_eval/mme"] == 3.0
    assert any(m.name == "lmms_eval/mme" and m.step_metric == "<lmms-eval-step>" for m in offline_run.metrics)
    (value_row,) = [row for row in offline_run.rows if "val/loss" in row]
    assert value_row["update"] == 2 and value_row["val/loss"] == value_row["val_loss"] == 0.25
    (picture_row,) = [row for row in offline_run.rows if row.get("previews.width") or "previews" in row]
    assert picture_row["update"] == 2 and (picture_row["previews.width"], picture_row["previews.height"]) == (5, 3)
    events = accumulator.EventAccumulator(str(tmp_path / "events" / "run")).Reload()
    assert [(e.step, e.width, e.height) for e in events.Images("previews")] == [(2, 5, 3)]
    assert [(e.step, e.value) for e in events.Scalars("val/loss")] == [(2, 0.25)]


def test_runs_with_one_folder_do_not_mix(tmp_path: Path, digits: Path) -> None:
    """Two work dirs of the same name: each has a folder of its own, which a resume finds again."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = tmp_path / "tensorboard"
    visualizer = {"vis_backends": [{"type": "TensorboardVisBackend", "save_dir": str(events)}]}

    def train(name: str, updates: int, **more: Any) -> list[float]:
        """The losses."""
        Runner.from_cfg(tiny_config(tmp_path / name / "run", digits, visualizer=visualizer, **SMALL, **more),
                        max_updates=updates).train()  # fmt: skip
        return [pytest.approx(line["loss"], rel=1e-6) for line in read_lines(tmp_path / name / "run" / "metrics.jsonl")]

    def logged_values(folder: Path) -> list[float]:
        return [e.value for e in accumulator.EventAccumulator(str(folder)).Reload().Scalars("loss")]

    train("a", 2)
    losses = train("b", 2, optim_wrapper__optimizer__lr=0.5e-3)
    assert logged_values(events / "run-2") == losses
    time.sleep(1.1)  # TensorBoard reads event files in the order of their names, which have the second of the start
    losses = train("a", 4, resume=True)
    assert logged_values(events / "run") == losses
    assert sorted(path.name for path in events.iterdir()) == ["run", "run-2"]


class ShowsHook(Hook):
    """A user's hook: at the second update a result of the first arrives, a validation ends, and a picture is made."""

    def after_update(self, run: Run, result: UpdateResult) -> None:
        if run.progress.updates == 2:
            log = logger_of(run)
            log.log(run, {"lmms_eval/mme": 3.0}, update=1, axis="<lmms-eval-step>", event="lmms_eval")
            log.after_val(run, {"val/loss": 0.25})
            log.image(run, "previews", Image.new("RGB", (5, 3), "red"), update=2)


def train_lines(work_dir: Path, data: Path, writer: dict[str, Any]) -> list[str]:
    """Three updates of a real run with a writer that fails. Returns what the log says of it."""
    config = tiny_config(work_dir, data, visualizer={"vis_backends": [writer]}, **SMALL)
    assert Runner.from_cfg(config, max_updates=3).train().updates == 3
    assert [line["update"] for line in read_lines(work_dir / "metrics.jsonl")] == [1, 2, 3]
    lines = (work_dir / "train.log").read_text(encoding="utf-8").splitlines()
    return [line.partition(" WARNING ")[2] for line in lines if "is disabled" in line]


@pytest.mark.parametrize(
    ("package", "writer"),
    [
        ("tensorboard", {"type": "TensorboardVisBackend", "save_dir": "file"}),
        ("wandb", {"type": "WandbVisBackend", "init_kwargs": {"mode": "no such mode"}}),
    ],
)
def test_a_writer_that_fails_stops_nothing(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch, package: str, writer: dict[str, Any]
) -> None:
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("a file where a folder should be")
    (line,) = train_lines(tmp_path / "run", digits, writer)
    assert line.startswith(f"{writer['type']} is disabled, training continues")


def test_a_missing_package_names_what_to_install(tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # Python's own way to say "not installed"
    (line,) = train_lines(tmp_path / "run", digits, {"type": "TensorboardVisBackend"})
    assert "unigen_ds[tensorboard]" in line
