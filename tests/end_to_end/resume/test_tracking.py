"""No line twice and none of an abandoned branch: real runs killed between two checkpoints, and what is shown then."""

from __future__ import annotations

import copy
import shutil
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.end_to_end.resume.kill_tools import SAVE_EVERY_UPDATES, Bench
from tests.tracking.test_writer import OfflineRun, read_wandb
from unigen_ds.system.journals import read_lines
from unigen_ds.tracking.writer import SafeWriter

pytestmark = pytest.mark.slow

KILLED_AT, END = SAVE_EVERY_UPDATES + 3, SAVE_EVERY_UPDATES + 5
WRITERS = """
visualizer = dict(
    run_name='{{model}}-{{gpus}}x-{{updates}}',
    vis_backends=[
        dict(type='WandbVisBackend', project='unigen', init_kwargs=dict(mode='offline')),
        dict(type='TensorboardVisBackend', save_dir={tensorboard!r}),
    ],
)
default_hooks['logger'] = dict(type='LoggerHook', interval=1, unit='update', statistics_interval=2)
default_hooks['checkpoint'] = dict(
    type='CheckpointHook', unit='update', interval={interval}, filename_tmpl='step_{{}}')
val_dataloader = dict(split=0.1, batch_size=8)
custom_hooks = custom_hooks + [
    dict(type='EvaluateHook', interval=1, unit='update', max_batches=1),
    dict(type='PreviewHook', prompts=['draw a three'], interval=3, size=[8, 8], flow=dict(num_timesteps=2)),
]
"""
KINDS = {"evaluation": "val/loss", "statistics": "training_stats/avg_fw_bw_time", "preview": "preview"}


def kind_of(line: Mapping[str, Any]) -> str:
    return next((kind for kind, name in KINDS.items() if any(key.startswith(name) for key in line)), "update")


def once(lines: Iterable[Mapping[str, Any]], *, first: int = 1, previews: bool = True) -> None:
    """Each update, evaluation, statistic and picture after update ``first`` - 1 is there once, and nothing else."""
    pairs = sorted((kind_of(line), int(line["update"])) for line in lines)
    every = range(first, END + 1)
    expected = {"evaluation": every, "statistics": [n for n in every if n % 2 == 0], "update": every}
    expected |= {"preview": [n for n in every if n % 3 == 0]} if previews else {}
    assert pairs == sorted((kind, update) for kind, updates in expected.items() for update in updates)


@dataclass
class Case:
    folder: Path
    tensorboard: Path

    @property
    def offline(self) -> list[OfflineRun]:
        return [read_wandb(path) for path in sorted(self.folder.glob("wandb/offline-run-*/*.wandb"))]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    pytest.importorskip("wandb")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_MODE", "WANDB_RUN_ID", "WANDB_DIR"):
            patch.delenv(name, raising=False)
        yield Bench(tmp_path_factory.mktemp("tracked"))


@pytest.fixture(scope="module")
def killed_run(bench: Bench) -> str:
    """A run that saves at update 4 and is killed after update 7."""
    with bench.config.open("a") as config:
        config.write(WRITERS.format(interval=SAVE_EVERY_UPDATES, tensorboard=str(bench.folder / "tb")))
    ending = bench.train("killed", KILL_AT=f"update:{KILLED_AT}", SLOW="0.2")
    assert ending.status == -signal.SIGKILL, ending.output
    return "killed"


@pytest.fixture(scope="module")
def resumed_cases(bench: Bench, killed_run: str) -> dict[str, Case]:
    """The same config, and another learning rate, which branches off; each with the killed run's event files."""
    cases = {}
    for name, arguments in (("same", ()), ("changed", ("--cfg-options", "optim_wrapper.optimizer.lr=5e-3"))):
        folder, events, own = bench.copy(killed_run, name), bench.folder / f"tb-{name}", copy.copy(bench)
        shutil.copytree(bench.folder / "tb", events)
        own.config = bench.folder / f"{name}.py"
        own.config.write_text(bench.config.read_text().replace(f"{bench.folder / 'tb'}'", f"{events}'"))
        cases[name] = Case(folder, events)
        ending = own.train(name, "--resume", "--max-updates", str(END), *arguments)
        assert ending.status == 0, ending.output
    return cases


def test_checkpoints_are_saved_and_named_by_update(resumed_cases: dict[str, Case]) -> None:
    names = sorted(path.name for path in resumed_cases["same"].folder.glob("step_*"))
    assert names == [f"step_{SAVE_EVERY_UPDATES}", f"step_{2 * SAVE_EVERY_UPDATES}", f"step_{END}"][-len(names) :]
    assert (resumed_cases["same"].folder / "last_checkpoint").read_text().strip().endswith(f"step_{END}")


def test_one_wandb_run_and_no_line_twice_after_a_kill(resumed_cases: dict[str, Case]) -> None:
    """Lines of updates, evaluations, statistics and pictures."""
    first, second = resumed_cases["same"].offline
    assert first.run.run_id == second.run.run_id
    once([*first.rows, *second.rows])
    steps = [row["_step"] for row in (*first.rows, *second.rows)]
    assert steps == sorted({*steps}), "on W&B's server a row replaces another one of the same step"
    assert first.run.display_name.startswith("UnifiedModel-1x-")


def test_changed_values_begin_a_run_of_their_own(resumed_cases: dict[str, Case]) -> None:
    old, new = resumed_cases["changed"].offline
    assert old.run.run_id != new.run.run_id
    once(new.rows, first=SAVE_EVERY_UPDATES + 1)
    assert new.config["parent_run"] == old.run.run_id and new.config["parent_update"] == SAVE_EVERY_UPDATES
    assert new.run.run_group == old.run.run_group and new.run.display_name.endswith("from update 4")


@pytest.mark.parametrize("name", ["same", "changed"])
def test_event_files_hold_each_update_once(resumed_cases: dict[str, Case], name: str) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    case = resumed_cases[name]
    lines = read_lines(case.folder / "metrics.jsonl")
    once(lines, previews=False)
    (of_run,) = case.tensorboard.iterdir()
    events = accumulator.EventAccumulator(str(of_run), size_guidance={"images": 0, "scalars": 0}).Reload()
    for tag in ("loss", "grad_norm", "lr", "val/loss", KINDS["statistics"]):
        pairs = [(event.step, event.value) for event in events.Scalars(tag)]
        assert pairs == [(line["update"], pytest.approx(line[tag], rel=1e-6)) for line in lines if tag in line]
    assert [event.step for event in events.Images("preview")] == [3, 6, 9]


def test_each_start_has_a_dated_log(resumed_cases: dict[str, Case]) -> None:
    logs = sorted((resumed_cases["same"].folder / "logs").glob("train_*.log"))
    assert len(logs) == 2
    whole = (resumed_cases["same"].folder / "train.log").read_text()
    assert whole == "".join(path.read_text() for path in logs)


# ---- the rule, by a writer that keeps what it gets ------------------------------------------------------------------


class Kept:
    """A tracker in memory: the updates that each of its runs got."""

    runs: ClassVar[dict[str, list[int]]] = {}

    def open(self, *, work_dir: Path, config: Any, run_id: str | None, updates: int) -> str:
        self.current = run_id or f"run{len(self.runs)}"
        self.runs.setdefault(self.current, [])
        return self.current

    def write(self, record: Any, *, update: int) -> None:
        self.runs[self.current].append(update)

    def close(self) -> None: ...


def test_a_kill_before_the_first_save_repeats_nothing(tmp_path: Path) -> None:
    for last in (2, 3):
        writer = SafeWriter(Kept())
        writer.open(work_dir=tmp_path, config={}, updates=0, name="name", identity={"lr": 1.0})
        for update in range(1, last + 1):
            writer.write({"loss": float(update), "time/update": 0.1}, update=update)
    assert Kept.runs == {"run0": [1, 2, 3]}
