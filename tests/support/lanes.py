"""Further processes run tests when the engines' jobs have ended: until then these use the second core.

They are forked when all tests are collected and wait. Then every process claims one test file after the other, this
one from the first, the others from the last; their reports are shown here as if the tests had run here. The tests of
the engines stay here, and are next when the jobs have ended: last, they would leave a core free. More processes than
cores, because a test that waits for its own processes leaves a core free, too. Without jobs in the background there is
one process, as always.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import Any

import pytest

OTHERS = 3
LONG = (
    "models/test_auto_run", "runs/test_wrong_values", "dry_run/test_dry_run", "ended_processes/test_ended_ranks",
    "ended_processes/test_signals", "resume/test_certificate", "saving/test_saving", "ended_processes/test_launchers",
    "saving/test_async_save", "resume/test_kill_resume", "robustness/test_crash_states", "fake_cuda/test_fake_cuda",
)  # fmt: skip
"""Files of a minute and more, the longest last: the other processes begin with them, so that none ends last."""


@dataclass
class Other:
    """Another process, and the file of its reports."""

    process: int
    reports: Path
    num_shown: int = 0


def _rank(items: list[pytest.Item]) -> int:
    """0 for a file, or its position in ``LONG``, from 1."""
    return next((n for n, name in enumerate(LONG, 1) if items[0].path.as_posix().endswith(f"{name}.py")), 0)


class Lanes:
    """The test files of a session, which several processes run."""

    def __init__(self, session: pytest.Session, own: Callable[[pytest.Item], bool], begin: Callable[[], bool]) -> None:
        """``own``: whether a test must run in this process. ``begin``: whether the other processes may begin."""
        self._session, self._begin = session, begin
        files = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
        self._shared = sorted((items for items in files if not own(items[0])), key=_rank)
        self._own = [items for items in files if own(items[0])]
        self._folder = Path(tempfile.mkdtemp(prefix="lanes-"))
        self._others = [self._fork(self._folder / f"reports_{number}.jsonl") for number in range(OTHERS)]

    def run(self) -> None:
        """All tests. The reports of the other processes are shown after each test file, and at the end."""
        try:
            first, rest = self._claim(self._shared, until=self._begin), self._claim(self._shared)
            for item, following in pairwise(chain(first, chain.from_iterable(self._own), rest, [None])):
                assert item is not None
                run_test(self._session, item, following)
                if following is None or following.path != item.path:
                    self._show()
            self._finish()
        finally:
            self._stop()

    def _claim(
        self, files: Sequence[list[pytest.Item]], *, until: Callable[[], bool] = lambda: False
    ) -> Iterator[pytest.Item | None]:
        """The tests of each file that no other process has claimed; no further file where ``until`` holds."""
        for items in files:
            if until():
                return
            try:
                os.mkdir(self._folder / str(self._shared.index(items)))
            except FileExistsError:
                continue
            yield from items

    # ---- another process

    def _fork(self, reports: Path) -> Other:
        reports.touch()
        capture = self._session.config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.stop_global_capturing()  # its files would be shared
        sys.stdout.flush()
        sys.stderr.flush()
        process = os.fork()
        if process == 0:
            atexit._clear()  # of what this process has begun and ends
            os.setpgid(0, 0)
        if capture is not None:
            capture.start_global_capturing()
            capture.suspend_global_capture()  # as it was: it resumes for each test
        if process == 0:
            self._run_other(reports)
        return Other(process, reports)

    def _run_other(self, reports: Path) -> None:
        """Never returns."""
        status = 1
        parent = os.getppid()
        try:
            plugins = self._session.config.pluginmanager
            plugins.getplugin("terminalreporter")._tw._file = open(os.devnull, "w")  # noqa: SIM115
            plugins.register(Sender(self._session.config, reports))
            while not self._begin():
                if os.getppid() != parent:
                    os._exit(0)
                time.sleep(0.2)
            for item, following in pairwise(chain(self._claim(self._shared[::-1]), [None])):
                assert item is not None
                run_test(self._session, item, following)
            status = 0
        except BaseException:
            reports.with_suffix(".error").write_text(traceback.format_exc())
        finally:
            atexit._run_exitfuncs()
            os._exit(status)

    # ---- its reports

    def _show(self) -> None:
        """What has come since the last call."""
        for other in self._others:
            text = other.reports.read_text(encoding="utf-8")
            complete = text[: text.rfind("\n") + 1].splitlines()
            for line in complete[other.num_shown :]:
                other.num_shown += 1
                self._show_line(line)

    def _show_line(self, line: str) -> None:
        hook = self._session.config.hook
        kind, data = json.loads(line)
        if kind == "begins":
            hook.pytest_runtest_logstart(**data)
        else:
            report = hook.pytest_report_from_serializable(config=self._session.config, data=data)
            hook.pytest_runtest_logreport(report=report)

    def _finish(self) -> None:
        """Wait for the last tests of the others."""
        for other in self._others:
            _, status = os.waitpid(other.process, 0)
            other.process = 0
            self._show()
            error = other.reports.with_suffix(".error")
            if status:
                text = error.read_text() if error.exists() else f"status {os.waitstatus_to_exitcode(status)}"
                last = "".join(other.reports.read_text(encoding="utf-8").splitlines()[-1:])[:500]
                raise RuntimeError(f"another process of tests ended early: {text}\nIts last report: {last}")

    def _stop(self) -> None:
        for other in self._others:
            if other.process:
                os.killpg(other.process, signal.SIGKILL)
                os.waitpid(other.process, 0)
        shutil.rmtree(self._folder, ignore_errors=True)


def run_test(session: pytest.Session, item: pytest.Item, following: pytest.Item | None) -> None:
    """As pytest's own loop."""
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


class Sender:
    """Writes reports of tests, which pytest would show, to a file. Warnings are not repeated."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config, self._stream = config, path.open("a", encoding="utf-8")

    def _send(self, kind: str, data: Any) -> None:
        self._stream.write(json.dumps([kind, data]) + "\n")
        self._stream.flush()

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._send("begins", {"nodeid": nodeid, "location": location})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._send("report", data)
