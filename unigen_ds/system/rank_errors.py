"""How ranks learn of each other's errors: by the key-value store of the job, which is there before they join.

A rank that fails writes its error there and waits until rank 0 has it. Rank 0 reports the errors of all ranks in its
``train.log``; a thread reads them, because the main thread may compute or wait, and a launcher that stops all processes
once one has ended would stop it before it has looked. An error of a connection is a consequence of another rank's end:
``explain`` replaces it with that rank's error, or names the ranks that do not answer. An error that every rank finds
by itself (of the config, say) is reported by rank 0 alone.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as td

from unigen_ds.core.errors import TrainingError, UnigenError
from unigen_ds.system import dist
from unigen_ds.system.hangs import STOP_ADVICE, Watch
from unigen_ds.system.log import logger

_PATIENCE_S = 10.0
"""Time for another rank to find the same error, to read one, or to answer: it may be slower, or have started later."""
_POLL_S = 0.5
_MOST = 2000
"""Characters of an error that another rank repeats."""
_OF_CONNECTION = re.compile(
    r"gloo|nccl|broken pipe|process ?group|connection (was )?(closed|reset|refused|timed out)|socket closed|"
    r"(application|read|write|wait) timeout|timed out waiting|operation timed out|pair (is not connected|closure)", re.I
)  # fmt: skip
"""A lost connection in a ``RuntimeError`` of torch's C++ parts. A timeout of the data loader is an error of its own."""
_failure_event, _report_event, _stop_event = threading.Event(), threading.Event(), threading.Event()
"""Whether this rank has an error; whether rank 0 has reported one; whether this process ends."""
_REPORT_MARK = "_reported_by_rank_0"  # attribute of what ``explain`` has returned


class RankEnded(TrainingError):
    """This rank ends because another one has, or does not answer."""

    everywhere = True


def say(error: BaseException) -> None:
    """Report an error: in the log, or on the console before there is one."""
    text = _text(error)
    logger().error("%s", text) if logger().handlers else print(f"error: {text}", file=sys.stderr, flush=True)


def end_here(text: str) -> None:
    """Report a ``RankEnded``, and end this process, whatever its main thread does."""
    error, store = RankEnded(text), dist.job_store()
    _report_event.set()
    say(error)
    for_torchrun(error)
    if dist.is_main():  # the store may end with it: the others read it first
        store.set("heard", text)
        _wait(lambda: store.add("errors", 0) >= dist.world_size() - 1)
        time.sleep(2 * _POLL_S)
    os._exit(error.exit_status)


def is_reported(error: BaseException) -> bool:
    """Whether rank 0 has reported an error that ``explain`` has returned."""
    return bool(getattr(error, _REPORT_MARK, False))


def arrive(*, timeout_s: float) -> None:
    """Wait until all ranks are here. Raises ``RankEnded``: at once where one fails before, else after ``timeout_s``."""
    if (store := dist.job_store()) is None:
        return
    _failure_event.clear()
    _report_event.clear()
    rank = dist.env_rank()
    if rank == 0:
        watcher = threading.Thread(target=_watch, args=(store,), daemon=True)
        watcher.start()
        atexit.register(watcher.join)
        atexit.register(_stop_event.set)  # comes first
    store.set(f"here/{rank}", "")
    if store.add("here", 1) == dist.env_world_size():
        store.set("go", "")
    if not _wait(lambda: store.check(["go"]), timeout_s):
        raise RankEnded(f"{_without(store, 'here')} not here {timeout_s:g} s after this process")
    if (cause := _cause(store)) is not None:
        raise cause


def explain(error: BaseException, *, first: bool = False) -> BaseException:
    """Report to the other ranks what ends this one. Returns what to raise. ``first``: before there is a store, too."""
    if hasattr(error, _REPORT_MARK):
        return error
    try:
        store = dist.open_store(timeout_s=_PATIENCE_S) if first else dist.job_store()
        if store is None:
            return error
        _failure_event.set()
        cause, has_report = _explain(error, store)
    except Exception as store_error:  # of the store
        cause, has_report = error, False
        if _is_consequence(error) and not dist.has_store():
            cause = RankEnded(f"rank 0 has ended; its train.log may say why ({_text(store_error)})")
    setattr(cause, _REPORT_MARK, has_report)
    return cause


def _explain(error: BaseException, store: Any) -> tuple[BaseException, bool]:
    """What to raise, and whether rank 0 has reported it."""
    rank, world_size, text = dist.env_rank(), dist.env_world_size(), _text(error)
    everywhere = getattr(error, "everywhere", False)
    store.set(f"error/{rank}", text)
    store.add("errors", 1)
    if _is_consequence(error):
        if not isinstance(error, RankEnded):  # why was the connection lost?
            watch = Watch.current
            is_answered = watch.answer_event.is_set if watch else lambda: False
            if not _wait(lambda: store.check(["cause"]), 2 * _POLL_S) and watch:
                watch.ask(error)
            _wait(lambda: store.check(["cause"]) or store.add("errors", 0) == world_size or is_answered())
            silent = _without(store, "error")
            own_error = RankEnded(f"{silent} not answer ({text})", remedy=STOP_ADVICE) if silent else error
            if silent and watch and is_answered():
                own_error = RankEnded(watch.text(f" ({text})"), remedy=watch.remedy)
            error = _cause(store) or own_error
    elif not everywhere:
        store.compare_set("cause", "", json.dumps([rank, text, getattr(error, "exit_status", 1)]))
        store.set("go", "")
    if rank == 0:
        if not _report_event.is_set() or not isinstance(error, RankEnded):
            say(error)
        _report_event.set()
        store.set("heard", text)
        if dist.has_store() and not dist.is_joined():  # the others read it before this process ends
            _wait(lambda: store.add("errors", 0) == world_size)
        return error, True
    heard = _wait(lambda: store.check(["heard"]))
    return error, heard and (everywhere or store.get("heard").decode() == text)


def _cause(store: Any) -> RankEnded | None:
    """The first error of a rank that is no consequence."""
    if not store.check(["cause"]):
        return None
    rank, text, status = json.loads(store.get("cause"))
    cause = RankEnded(f"rank {rank} has ended: {text}")
    cause.exit_status = status
    return cause


def _watch(store: Any) -> None:
    """Report the error of another rank, in a thread of rank 0, whatever the main thread does."""
    while not _stop_event.wait(_POLL_S):
        try:
            cause = None if _report_event.is_set() else _cause(store)
            if cause is not None and not _failure_event.wait(2 * _POLL_S):  # else its main thread reports an error
                _report_event.set()
                say(cause)
                store.set("heard", "")
        except Exception:  # of the store: the job ends
            return


def _without(store: Any, key: str) -> str:
    """``rank 1 does``, ``rank 1, 2 does``: those without a key ``key/<rank>``; '' where there is none."""
    ranks = [str(rank) for rank in range(dist.env_world_size()) if not store.check([f"{key}/{rank}"])]
    return f"rank {', '.join(ranks)} {'is' if key == 'here' else 'does'}" if ranks else ""


def _wait(condition: Callable[[], bool], timeout_s: float = _PATIENCE_S) -> bool:
    """Whether ``condition`` becomes true in time. Asked less often after a while: a job may have many ranks."""
    begin = time.monotonic()
    while not (result := condition()) and (seconds := time.monotonic() - begin) < timeout_s:
        time.sleep(min(0.02 + seconds / 20, _POLL_S))
    return result


def _is_consequence(error: BaseException) -> bool:
    """Whether ``error`` is that of a connection between ranks."""
    if isinstance(error, RankEnded | td.DistError):
        return True
    is_foreign = isinstance(error, RuntimeError) and not isinstance(error, UnigenError)
    return is_foreign and _OF_CONNECTION.search(str(error)) is not None


def _text(error: BaseException) -> str:
    return (str(error) if isinstance(error, UnigenError) else f"{type(error).__name__}: {error}")[:_MOST]


def for_torchrun(error: BaseException) -> None:
    """Write the file from which torchrun prints why a process has failed, instead of its exit status alone."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        text = _text(error) if isinstance(error, UnigenError) else "".join(traceback.format_exception(error))
        message = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
