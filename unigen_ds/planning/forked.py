"""Tasks in forked processes: each has what this process has read and imported, and changes nothing in it."""

from __future__ import annotations

import json
import logging
import os
import selectors
import sys
import traceback
import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch

from unigen_ds.core.errors import UnigenError

K = TypeVar("K", bound=Hashable)


def in_processes(
    tasks: Mapping[K, Callable[[], Any]], *, jobs: int, waiting_for: Callable[[], None] = lambda: None
) -> dict[K, tuple[Any, str | None]]:
    """By task: (its JSON value, None), or (None, the text of its error). ``jobs`` processes run at a time.

    ``waiting_for`` is called once a second while they run.
    """
    found: dict[K, tuple[Any, str | None]] = {}
    waiting = [*tasks]
    with selectors.DefaultSelector() as running:
        while waiting or running.get_map():
            while waiting and len(running.get_map()) < jobs:
                name = waiting.pop(0)
                child, pipe = _forked(tasks[name])
                running.register(pipe, selectors.EVENT_READ, (name, child))
            waiting_for()
            for ended, _ in running.select(timeout=1.0):
                name, child = ended.data
                running.unregister(ended.fileobj)
                with open(ended.fd, encoding="utf-8") as stream:
                    text = stream.read()
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                lost = (None, f"the process that traced it ended with {status}")
                found[name] = tuple(json.loads(text)) if text else lost
    return {name: found[name] for name in tasks}


def _forked(task: Callable[[], Any]) -> tuple[int, int]:
    """(process, end of a pipe that has its outcome)."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    try:
        os.close(reading)
        torch.set_num_threads(1)  # torch's threads do not survive the fork
        logging.disable(logging.CRITICAL)  # what an engine logs at its start is not of this command
        warnings.simplefilter("ignore")
        try:
            outcome: tuple[Any, str | None] = (task(), None)
        except UnigenError as error:
            outcome = (None, str(error))
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename}:{last.lineno}"
            text = (str(error).splitlines() or [""])[0]
            outcome = (None, f"it could not be traced: {type(error).__name__}: {text} ({where})")
        with open(writing, "w", encoding="utf-8") as stream:
            json.dump(outcome, stream)
    finally:
        os._exit(0)
