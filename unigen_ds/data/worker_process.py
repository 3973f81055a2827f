"""How a process begins that loads or plans data for the main process, and how it ends with it."""

from __future__ import annotations

import gc
import os
import signal
import threading

import torch

from unigen_ds.core.cores import TOKENIZERS

_PARENT_CHECK_S = 2.0


def start_worker() -> None:
    """One thread a worker; and a signal to the job must not end workers before the run has saved its checkpoint.

    Schedulers and launchers signal every process of a job. The main process decides what a signal means; a worker ends
    when the main process ends it (or has ended itself, which the loader's own watchdog notices).
    """
    gc.freeze()  # what the main process has made is not searched for cycles, which would also copy all of its pages
    torch.set_num_threads(1)
    os.environ[TOKENIZERS] = "false"  # whatever a user has set: threads of a tokenizer do not survive a fork
    for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):
        parent = os.getppid()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_for, args=(parent,), daemon=True).start()


def _end_for(parent: int) -> None:
    """End on SIGTERM from the main process (the loader ends a worker that hangs so), and from no other process.

    Where the main process has ended (SIGKILL), end at once: a worker may wait for ever to send a batch.
    """
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, _PARENT_CHECK_S)
        if received is not None and received.si_pid == parent:
            os._exit(0)
    os._exit(1)
