"""One report of an error in the config that every process of a job finds by itself, before the processes join.

Rank 0 reports it and announces that in a key-value store at MASTER_ADDR:MASTER_PORT: torchrun's own, or else one that
rank 0 opens for a moment. The others wait for the announcement and end without a message: a launcher that stops all
processes once one has ended then stops none before rank 0 has reported. Where rank 0 announces nothing, or another
error, a process reports its own.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as td

from unigen_ds.core import dist

_PATIENCE_S = 10.0
"""For rank 0 to find the error, too: it may have started later, or import more slowly."""
_LEAVE_S = 5.0
"""How long rank 0 keeps a store of its own for processes that may not have the error."""


def announce(error: Exception) -> None:
    """On rank 0, after it has reported ``error``. Nothing happens in one process, or where processes have joined."""
    if not _is_apart():
        return
    try:
        store = _store(is_master=not _of_torchrun(), timeout_s=_LEAVE_S)
        store.set(_key("error"), str(error))
        end = time.monotonic() + (0.0 if _of_torchrun() else _LEAVE_S)
        while time.monotonic() < end and store.add(_key("read"), 0) < dist.env_world_size() - 1:
            time.sleep(0.02)
    except Exception:  # the store is a convenience: without it every process reports the error
        return


def is_announced(error: Exception) -> bool:
    """On another rank: whether rank 0 has reported the same error; waits for that. False where nothing is heard."""
    if not _is_apart():
        return False
    try:
        store = _store(is_master=False, timeout_s=_PATIENCE_S)
        same = store.get(_key("error")).decode() == str(error)
        store.add(_key("read"), 1)
        return same
    except Exception:  # as above
        return False


def _is_apart() -> bool:
    """Whether this is one of several processes that have not joined, with a rank that the launcher has set."""
    return not dist.joined() and dist.env_world_size() > 1 and {"RANK", "MASTER_ADDR"} <= os.environ.keys()


def _of_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _key(name: str) -> str:
    """torchrun's store remains when it starts the processes again."""
    return f"unigen_ds/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{name}"


def _store(*, is_master: bool, timeout_s: float) -> Any:
    address, port = os.environ["MASTER_ADDR"], int(os.environ.get("MASTER_PORT", "29500"))
    store: Any = td.TCPStore  # type: ignore[attr-defined]  # documented, and missing in its stubs
    return store(address, port, is_master=is_master, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
