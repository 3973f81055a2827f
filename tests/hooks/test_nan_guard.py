"""Skipped updates are reported; too many in succession stop the run, and a resume keeps the count."""

import json
import logging
from pathlib import Path

import pytest

from tests.hooks.tiny_run import TinyRun
from unigen_ds.core.errors import ConfigError, TrainingError
from unigen_ds.core.log import NAME
from unigen_ds.core.registry import HOOKS, build
from unigen_ds.hooks.nan_guard import NanGuardHook


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
    run = TinyRun(tmp_path, [NanGuardHook(max_consecutive=2)])
    run.update(applied=False)
    run.update()
    run.update(applied=False)
    with pytest.raises(TrainingError) as error:
        run.update(applied=False)
    message = str(error.value)
    assert "2 updates in a row" in message and "sequences 8:12" in message and "sequences 12:16" in message
    assert "source:8:0" in message and "source:15:0" in message and "0:4" not in message
    assert "tools/inspect_data.py" in message


def test_the_count_survives_a_resume(tmp_path: Path) -> None:
    first = NanGuardHook(max_consecutive=2)
    run = TinyRun(tmp_path, [first])
    run.update(applied=False)
    second = NanGuardHook(max_consecutive=2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    run.hooks = [second]
    with pytest.raises(TrainingError, match=r"sequences 0:4.*sequences 4:8"):
        run.update(applied=False)


def test_wrong_arguments() -> None:
    for wrong in (0, 2.5, True):
        with pytest.raises(ConfigError, match=f"max_consecutive is {wrong}. Allowed: a whole number of at least 1"):
            build(HOOKS, {"type": "NanGuardHook", "max_consecutive": wrong}, where="default_hooks.nan_guard")
    with pytest.raises(ConfigError, match="version"):
        NanGuardHook().load_state_dict({"version": 0})
