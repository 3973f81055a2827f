"""Processes that make values ahead of their use: tasks go to them in turns, results come in the order of the tasks.

Each has a pipe of its own, and they share no lock. So one that is killed at any moment, while it sends too, ends its
pipe, and who waits for a result sees that. (torch's ``DataLoader`` has one queue for all: a process that is killed
while it sends leaves a lock taken, or half of a message, and the main process waits for ever. Its handler of SIGCHLD
raises wherever the main process is: inside of a log line, or of a save.)
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper

from unigen_ds.core.errors import TrainingError, UnigenError
from unigen_ds.system.machine import TOKENIZER_THREADS

_PARENT_CHECK_S = 2.0
_END_S = 5.0
"""A process whose pipe has ended ends within."""
_SIGNALS = {number.value: number.name for number in signal.Signals}


class Workers:
    """An iterator of the results. ``close`` when done.

    Args:
        make: applied to each task, in a worker.
        tasks: iterated ahead, in this process.
        number: of processes.
        ahead: tasks that each has at a time.
        timeout: seconds to wait for a result; 0: for ever.
        on_arrival: applied to each result in a thread of this process, as soon as it is there.
    """

    def __init__(
        self,
        make: Callable[[Any], Any],
        tasks: Iterable[Any],
        number: int,
        *,
        ahead: int,
        timeout: float = 0.0,
        on_arrival: Callable[[Any], Any] | None = None,
    ) -> None:
        self._timeout, self._most, self._on_arrival = timeout, number * ahead, on_arrival
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._results: deque[Future[Any] | int] = deque()
        self._turn = 0
        self._end = weakref.finalize(self, _end, os.getpid(), self._processes, self._pipes)
        for i in range(number):
            own, others = multiprocessing.Pipe()
            self._pipes.append(own)
            process = multiprocessing.Process(target=_work, args=(others, make, i), daemon=True)
            process.start()
            self._processes.append(process)
            others.close()  # so that no later process has it: then the pipe ends with its worker
        self._tasks: Iterator[Any] = iter(tasks)  # now: it may start threads, which do not survive a fork
        device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

        def begin() -> None:
            torch.set_num_threads(1)
            if device is not None:
                torch.accelerator.set_device_index(device)

        self._thread = None if on_arrival is None else ThreadPoolExecutor(1, initializer=begin)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The result of the next task, or its error. Raises ``TrainingError`` where a worker has ended, whichever."""
        self._give()
        if not self._results:
            raise StopIteration
        first = self._results.popleft()
        result = self._receive(first) if isinstance(first, int) else first.result()
        self._give()
        if isinstance(result, UnigenError):
            raise result
        if isinstance(result, ExceptionWrapper):
            result.reraise()
        return result

    def close(self) -> None:
        """End the processes. Safe to call twice."""
        self._end()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._results.clear()

    def _give(self) -> None:
        while len(self._results) < self._most:
            try:
                task = next(self._tasks)
            except StopIteration:
                return
            number = self._turn % len(self._pipes)
            try:
                self._pipes[number].send(task)
            except OSError as error:
                raise self._worker_error(error) from None
            self._turn += 1
            self._results.append(self._thread.submit(self._receive, number) if self._thread else number)

    def _receive(self, number: int) -> Any:
        pipe, ends = self._pipes[number], [process.sentinel for process in self._processes]
        ready = wait([pipe, *ends], self._timeout or None)
        if not ready:
            raise TrainingError(
                f"the data loader timed out after {self._timeout:g} seconds: no worker process returned a batch",
                remedy="set a larger train_dataloader.timeout (0: none), or find what the workers wait for; continue"
                " with --resume",
            )
        try:
            if any(end in ready for end in ends):
                raise EOFError
            result = pipe.recv()
        except (EOFError, OSError) as error:
            raise self._worker_error(error) from None
        if self._on_arrival is None or isinstance(result, (ExceptionWrapper, UnigenError)):
            return result
        return self._on_arrival(result)

    def _worker_error(self, error: Exception) -> Exception:
        """Return an error with what a user can do where a worker has ended, or ``error`` where none has."""
        ready = wait([process.sentinel for process in self._processes], _END_S)
        for number, process in enumerate(self._processes):
            if process.sentinel in ready:
                process.join(_END_S)
                code = process.exitcode
                how = f"with exit status {code}" if code is None or code >= 0 else f"by {_SIGNALS.get(-code, -code)}"
                return TrainingError(
                    f"a worker process of the data loader ended: worker {number} (pid {process.pid}), {how}",
                    remedy="the system kills processes when memory (or /dev/shm) is full (see dmesg): lower "
                    "train_dataloader.num_workers, prefetch_factor or index_workers; continue with --resume",
                )
        return error


def _end(owner: int, processes: list[BaseProcess], pipes: list[Connection]) -> None:
    """End the workers at once: they own nothing that must be completed."""
    if os.getpid() == owner:  # not a fork of it
        for process in processes:
            process.kill()
        for process in processes:
            process.join(_END_S)
        for pipe in pipes:
            pipe.close()


def _work(pipe: Connection, make: Callable[[Any], Any], number: int) -> None:
    """A worker: one thread computes, two receive and send, so that neither side waits for the other while both send.

    Schedulers and launchers signal every process of a job. The main process decides what a signal means, after it has
    saved, say; a worker ends when the main process ends it, or has ended itself.
    """
    gc.freeze()  # what the main process has made is not searched for cycles, which would also copy all of its pages
    torch.set_num_threads(1)
    os.environ[TOKENIZER_THREADS] = "false"  # whatever a user has set: threads of a tokenizer do not survive a fork
    for number_of_signal in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number_of_signal, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_for, args=(os.getppid(),), daemon=True).start()
    for seed in (random.seed, torch.manual_seed, np.random.seed):  # no part of this package draws from these
        seed(number)
    tasks: SimpleQueue[Any] = SimpleQueue()
    results: SimpleQueue[Any] = SimpleQueue()
    for forward in (lambda: tasks.put(pipe.recv()), lambda: pipe.send_bytes(results.get())):
        threading.Thread(target=_forever, args=(forward,), daemon=True).start()
    while True:
        task = tasks.get()
        try:
            result = ForkingPickler.dumps(make(task))
        except UnigenError as error:  # as it is: the worker's traceback does not help
            result = ForkingPickler.dumps(error)
        except Exception:
            result = ForkingPickler.dumps(ExceptionWrapper(where=f"in worker process {number} of the data loader"))
        results.put(result)


def _forever(forward: Callable[[], None]) -> None:
    try:
        while True:
            forward()
    finally:
        os._exit(1)  # the main process has ended


def _end_for(parent: int) -> None:
    """End on SIGTERM from the main process alone, and at once where that has ended: to send may wait for ever."""
    while os.getppid() == parent:
        signal_info = signal.sigtimedwait({signal.SIGTERM}, _PARENT_CHECK_S)
        if signal_info is not None and signal_info.si_pid == parent:
            os._exit(0)
    os._exit(1)
