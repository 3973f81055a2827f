"""Settings of all tests. One thread per process: several processes run, and sums must not depend on the cores."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from tests.end_to_end.engines import launch
from tests.support import lanes, processes
from tests.support import small_disk as disks

torch.set_num_threads(1)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the engines run last: their jobs run at the same time as the other tests, which mostly use one core.

    A test marked ``gpu`` is skipped without a CUDA device.
    """
    items.sort(key=_needs_engines)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _needs_engines(item: pytest.Item) -> bool:
    return isinstance(getattr(getattr(item, "module", None), "runs", None), launch.Runs)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the engines' jobs that selected tests need."""
    modules = {item.module for item in session.items if _needs_engines(item)}  # type: ignore[attr-defined]
    if modules and not session.config.option.collectonly:
        launch.begin({group for module in modules for group in module.runs.groups})


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Where the engines' jobs run in the background, a second process of tests uses their core when they end."""
    if session.testsfailed or session.config.option.collectonly or not any(map(_needs_engines, session.items)):
        return None
    jobs = launch.begin()
    if jobs.on_demand or all(map(_needs_engines, session.items)):
        return None
    processes.server()  # one for both
    lanes.Lanes(session, own=_needs_engines, begin=jobs.has_ended).run()
    return True


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 2 MiB. Skips the test only if this process has no permission to mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if not disks.mount(disk, kib=2048, inodes=500):
        pytest.skip(disks.NO_PERMISSION)
    yield disk
    disks.unmount(disk)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits and the index of their records, made once. A test that changes a file of them writes its own."""
    from unigen_ds.examples.digits.dataset import write_digits  # here: not every test needs it

    return write_digits(tmp_path_factory.mktemp("data") / "digits")


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """A run sets variables of this process; later tests, and the processes that they start, are without them."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys() - {*processes.SET_BY_IMPORTS}:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _plain_logger() -> Iterator[None]:
    """A run configures the logger of the whole process; the next test needs an unconfigured one, for caplog."""
    log = logging.getLogger("unigen_ds")
    log.propagate = True
    for handler in logging.getLogger("transformers").handlers:  # made by a test whose output was captured, maybe
        if type(handler) is logging.StreamHandler and handler.stream.closed:
            vars(handler).pop("flush", None)  # transformers sets that of the stream it began with
            handler.stream = sys.__stderr__
    yield
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.propagate = True
