"""The timer measures real time, and a share outside its limits is reported once."""

import logging
import time
from pathlib import Path

import pytest

from tests.hooks.tiny_run import TinyRun
from unigen_ds.hooks.log.timer import WARM_UP_UPDATES, IterTimerHook
from unigen_ds.system.log import NAME


def spend(run: TinyRun, **sections: float) -> None:
    for name, seconds in sections.items():
        with run.clock(name):
            time.sleep(seconds)
    run.update()


def test_summary_of_real_time(tmp_path: Path) -> None:
    timer = IterTimerHook(window=2)
    run = TinyRun(tmp_path, [timer])
    time.sleep(0.1)  # building is not part of the first update
    run.start()
    assert timer.summary() == {}
    spend(run, data=0.3)  # leaves the window
    spend(run, data=0.01, forward_backward=0.05, step=0.02)
    time.sleep(0.02)
    spend(run, data=0.01, forward_backward=0.05, step=0.02)
    summary = timer.summary()
    assert 0.09 <= summary["time/update"] < 0.2
    assert 0.01 <= summary["time/data"] < 0.05
    assert summary["share/forward_backward"] > summary["share/step"] > summary["share/data"]
    assert summary["share/other"] > 0.02
    assert sum(value for name, value in summary.items() if name.startswith("share/")) == pytest.approx(1.0)
    assert summary["tokens_per_second"] == pytest.approx(100 / summary["time/update"])
    assert summary["samples_per_second"] == pytest.approx(4 / summary["time/update"])
    assert summary["eta"] == pytest.approx((80 - 12) / 4 * summary["time/update"])


def test_a_share_outside_its_band_is_reported_once_after_the_warm_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(NAME), "propagate", True)
    run = TinyRun(tmp_path, [IterTimerHook()])
    run.start()
    for _ in range(WARM_UP_UPDATES):
        spend(run, data=0.001)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    for _ in range(3):
        spend(run, data=0.001)
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([m for m in messages if "time is data" in m and "num_workers" in m]) == 1
    assert len([m for m in messages if "time is forward_backward" in m]) == 1
    assert len(messages) <= 3
