"""Skipped updates are reported; too many in succession stop the run."""

import logging
import math
from pathlib import Path

import pytest

from tests.hooks.tiny_run import TinyRun
from unigen_ds.core.errors import TrainingError
from unigen_ds.hooks.guard.losses import NanGuardHook
from unigen_ds.system.log import NAME


def test_a_warning_names_update_and_sequences(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(NAME), "propagate", True)
    run = TinyRun(tmp_path, [NanGuardHook()])
    run.update()
    run.update(applied=False)
    (record,) = caplog.records
    assert "update 2 (sequences 4:8)" in record.getMessage() and record.levelno == logging.WARNING


def test_so_many_in_a_row_stop_the_run(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, [NanGuardHook(max_consecutive=3)])
    run.update(applied=False)
    run.update()
    run.update(applied=False)
    run.update(applied=False)
    with pytest.raises(TrainingError) as error:
        run.update(applied=False)
    message = str(error.value)
    assert "3 updates in a row" in message and "updates 3 to 5, sequences 8:20" in message and "0:4" not in message
    remedy, _, rest = message.partition(": source:8:0")
    assert remedy.endswith("inspect_data.py CONFIG --sequences 8:20` shows all of these samples") and len(remedy) < 350
    assert message.count("tools/inspect_data.py") == 1 and rest.endswith("source:15:0 and 4 more.")


def test_an_overflow_of_fp16_is_no_gradient_that_is_not_finite(tmp_path: Path) -> None:
    """While the loss scale falls; at its least, or where the loss itself is not finite, it counts."""
    run = TinyRun(tmp_path, [NanGuardHook(max_consecutive=2)])
    for _ in range(5):
        run.update(applied=False, scale_fell=True)
    run.update(applied=False)
    run.update(applied=False, scale_fell=True)
    with pytest.raises(TrainingError, match=r"updates 6 to 8"):
        run.update(applied=False, scale_fell=True, text=math.inf)
