"""What is logged before the log is set up is in its file, once."""

from __future__ import annotations

import logging

import pytest

from unigen_ds.system import log


def test_what_is_noticed_before_the_log_is_set_up_is_in_it(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_waiting", {})
    monkeypatch.setattr(log, "_notices", set())
    own = logging.getLogger("test_log")
    monkeypatch.setattr(log, "NAME", own.name)
    path = tmp_path_factory.mktemp("log") / "train.log"
    log.notice("first")
    log.notice("first")
    log.setup(rank=0, log_file=path)
    log.notice("second")
    log.notice("second")
    for handler in [*own.handlers]:
        own.removeHandler(handler)
        handler.close()
    lines = [line.split(" ", 2)[2] for line in path.read_text().splitlines()]
    assert [line.split(" ")[-1] for line in lines] == ["first", "second"]
