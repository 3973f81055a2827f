"""A run ends with a checkpoint before its time is over, on all ranks alike, and continues; a hook is the clock."""

from __future__ import annotations

import sys
import time
from itertools import pairwise

import psutil
import pytest

from tests.end_to_end.resume.ended_processes.test_launchers import TRAIN, written_config
from tests.end_to_end.resume.saving import virtual_time
from tests.end_to_end.resume.saving.virtual_time import AGE_S, EVALUATION_S, SAVE_S, START_S, UPDATE_S
from tests.support.needs import slow
from tests.support.processes import ranks
from tests.tiny import tiny_config
from unigen_ds.checkpoint.store import list_checkpoints
from unigen_ds.config.values import time_seconds
from unigen_ds.core.errors import ConfigError
from unigen_ds.hooks.guard.time_limit import JOB_END, process_age
from unigen_ds.runner import Runner
from unigen_ds.system.journals import read_lines

MINUTES = 10
CONFIG = dict(
    custom_imports={"imports": ["unigen_ds.examples.digits", virtual_time.__name__]},
    custom_hooks=[{"type": "VirtualTimeHook"}],
    default_hooks__checkpoint={"type": "CheckpointHook", "interval_minutes": MINUTES, "max_keep_ckpts": 2},
    default_hooks__logger__interval=1000,
)


def updates(work_dir):
    return [line["update"] for line in read_lines(work_dir / "ledger.jsonl")]


@pytest.mark.parametrize("minutes", [*slow(84, 101), 90])
def test_the_last_save_ends_before_max_time_and_the_run_continues(tmp_path, digits, minutes, monkeypatch, capsys):
    """Evaluations take longer than updates, and a periodic save may be the one before the last."""
    monkeypatch.setenv(JOB_END, str(int(START_S) + 7200))

    def runner(**more):
        return Runner.from_cfg(tiny_config(tmp_path, digits, **CONFIG, **more))

    first = runner(train_cfg={"max_updates": 1000, "max_time": f"{minutes}m"})
    limit = START_S - AGE_S + 60 * minutes
    first.train()
    times = first.hooks[0].saved  # type: ignore[attr-defined]
    slack = 2 * (UPDATE_S + EVALUATION_S) + 2 * SAVE_S
    assert limit - slack < times[-1] <= limit and first.stop_reason == "time limit" and not first.finished
    gaps = [b - a for a, b in pairwise(times)]
    assert len(gaps) > 2 and min(gaps[:-1]) >= 60 * MINUTES, "those of interval_minutes"
    assert max(gaps) <= 60 * MINUTES + 2 * UPDATE_S + EVALUATION_S + SAVE_S
    text = capsys.readouterr().err
    assert f"unless it is complete: train_cfg.max_time='{minutes}m', counted from the start of this process." in text
    assert "an update lasted up to 400.0 s, a save 200.0 s. Saving a checkpoint" in text
    last = first.progress.updates
    runner(train_cfg={"max_updates": last + 2}, resume=True).train()
    assert updates(tmp_path) == [*range(1, last + 3)]


@pytest.mark.slow
def test_ranks_stop_after_the_same_update_by_the_clock_of_rank_0(tmp_path, digits):
    config = written_config(tmp_path, digits, train_cfg={"max_updates": 1000}, **CONFIG)
    command = [sys.executable, TRAIN, config, "--backend", "fsdp", "--work-dir", str(tmp_path / "run")]
    both = ranks(command, **{JOB_END: str(int(START_S) + 2500)})
    assert [one.status for one in both] == [143, 143], both[0].ending
    assert f"the end of the SLURM job ({JOB_END}). Until a save is measured, 250 s are assumed" in both[0].err
    assert both[0].err.count("Saved checkpoint") == 2 and "Training stopped (time limit) after 11" in both[0].err
    last = list_checkpoints(tmp_path / "run")[-1]
    assert last.problem is None and last.manifest is not None
    assert [last.manifest.progress.updates] == updates(tmp_path / "run")[-1:] and "The time limit" not in both[1].err


def test_lengths_of_time(tmp_path, digits):
    lengths = ("1d2h", "3h50m", "90m", "1.5h", "45s", 5400, "", "3h 50m", "50", "-1h", "2m1h")
    assert [*map(time_seconds, lengths)] == [93600, 13800, 5400, 5400, 45, 5400, 0, 0, 0, 0, 0]
    with pytest.raises(ConfigError, match=r"train_cfg.max_time is '3 hours'. Allowed: .*'3h50m'.*or seconds"):
        tiny_config(tmp_path, digits, train_cfg={"max_updates": 5, "max_time": "3 hours"})
        Runner.from_cfg(tiny_config(tmp_path, digits, train_cfg={"max_updates": 5, "max_time": "3 hours"}))
    assert process_age() == pytest.approx(time.time() - psutil.Process().create_time(), abs=2.0)
