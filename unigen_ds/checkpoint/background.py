"""Save while the training continues (``CheckpointHook(async_save=True)``).

::

    copy     every rank: the tensors of its files go into memory that it shares with its writer, a process of its own,
             and the rest of the ``Save``, while rank 0 prepares the folder
    start    every rank: waits for the copy; training continues
             each writer: writes, hashes and flushes its rank's files; that of rank 0 waits for the others, and commits
    finish   every rank: once all writers are done, the checkpoint, or the error

A writer uses no collective and no device: it ends with its process, whatever ends that, so nothing is written or
committed by a run that is dead. The memory is reused by the next save, which begins after ``finish`` alone.
"""

from __future__ import annotations

import copyreg
import ctypes
import io
import logging
import mmap
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from unigen_ds.core.errors import SaveError
from unigen_ds.system import dist
from unigen_ds.system.log import logger
from unigen_ds.system.machine import num_cores

if TYPE_CHECKING:
    from unigen_ds.checkpoint.saver import Save

_PROGRAM = "import sys; sys.path[:] = sys.argv[4:]; from {module} import serve; serve(*map(int, sys.argv[1:4]))"
_ALIGNMENT = 64
"""Bytes: where each tensor begins in the shared memory."""
_PIECE, _MOST_THREADS = 256 << 20, 8
"""Bytes that are copied at a time, and threads that copy: one core of a host fills a part of its memory's bandwidth,
and the C library writes pieces of that size past the caches, in two thirds of the time."""
_PAGE = 4096
"""Bytes: a core copies at a third of its speed where, in this measure, the target begins up to 512 after the source."""
_LOOK_S = 0.05
"""Between two looks for the end of a save."""
_GRACE_S = 60.0
"""How long the writer of rank 0 waits for the other ranks once its own training has ended."""
_NICE = 10
"""How far the writer steps back where it shares cores with the training."""
_DEATH_SIGNAL = 1
"""``PR_SET_PDEATHSIG`` of Linux's ``prctl``."""


class BackgroundWriter:
    """The writer of this rank, for any number of saves, one at a time."""

    def __init__(self) -> None:
        self._memory = _Memory()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._attempt: Save | None = None
        self._sizes = 0, 0
        self._answer: Any = None
        self._ended = self._failed = False
        self._sums: dist.PendingSum | None = None

    def copy(self, attempt: Save, tensors: Sequence[Tensor]) -> None:
        """Begin to copy the tensors of a save, which must not change until ``start``. ``tensors``: those that must be
        finite. Not collective; an error is raised by ``finish``, on every rank.
        """
        self._answer, self._ended, self._failed = None, False, False
        try:
            if self._process is None:
                self._begin()
            stream = io.BytesIO()
            pickler = _Pickler(stream)
            pickler.dump(attempt)
            # a replica of the data may write none of a tensor, which another rank then writes, and looks at
            pickler.dump([tensor for tensor in tensors if pickler.has(tensor)])
            content = stream.getbuffer()  # by the pipe it would arrive only as fast as the writer reads it
            self._sizes = pickler.nbytes, content.nbytes
            self._memory.fill(pickler, content)
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")

    def wait(self) -> None:
        """Wait for the copy of a save that was not announced."""
        self._memory.wait()

    def start(self, attempt: Save) -> None:
        """Wait for the copy of an announced save, and let it be written; then tensors may change. Collective."""
        self._attempt = attempt
        try:
            self._memory.wait()
            if not self._failed:
                assert self._pipe is not None
                self._pipe.send((*self._sizes, attempt.decisions))
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")
        self._sums = dist.PendingSum([0.0, float(self._failed)])

    def finish(self, *, wait: bool = False) -> Path | None:
        """The checkpoint, once it exists; None while it is being written: without ``wait`` this never waits, and sees
        what the ranks knew at its last call. Collective. Raises as ``Save.commit``.
        """
        while True:
            assert self._attempt is not None and self._sums is not None
            num_ended, num_failed = self._sums.wait()
            if num_failed or num_ended == dist.world_size():
                break
            self._look(_LOOK_S if wait else 0.0)
            self._sums = dist.PendingSum([float(self._ended), float(self._failed)])
            if not wait:
                return None
        attempt, self._attempt = self._attempt, None
        if num_failed:
            self._stop()
        answer = dist.broadcast_object(self._answer)
        if answer is None:
            dist.barrier()  # then no writer is left
            attempt.remove()
            raise SaveError(
                f"could not write checkpoint {attempt.final}: the writer of {num_failed:.0f} rank(s) has failed",
                remedy="the log has the cause on those ranks; older checkpoints and the training itself are untouched",
            )
        result, failure = answer
        if failure is not None:
            raise failure
        path, error = result
        if error is not None:
            raise error
        return Path(path)

    def close(self) -> None:
        """Let the writer complete what it has, then end it. Not collective: safe after an error."""
        if self._process is None:
            return
        if self._attempt is not None and not self._failed:
            assert self._pipe is not None
            try:
                self._pipe.send(None)
                while not (self._ended or self._failed):
                    self._look(1.0)
            except OSError as error:
                self._fail(str(error))
            if self._answer is not None and self._answer[1] is None:
                logger().info("Saved checkpoint %s.", self._answer[0][0])
        self._stop()

    def _begin(self) -> None:
        self._pipe, other = Pipe()
        numbers = (other.fileno(), self._memory.file)
        arguments = [str(number) for number in (*numbers, os.getpid())]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(module=__name__), *arguments, *sys.path],
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        other.close()  # so that the pipe ends with the writer

    def _look(self, timeout: float) -> None:
        """Wait at most so many seconds for the answer of this rank's writer."""
        if self._ended or self._failed or self._pipe is None or not self._pipe.poll(timeout):
            return
        try:
            self._answer, problem, records = self._pipe.recv()
        except (EOFError, OSError):
            assert self._process is not None
            status = self._process.wait()
            how = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
            self._fail(f"its process has ended ({how}; the system kills processes when memory is full: see dmesg)")
            return
        for level, text in records:
            logger().log(level, "%s", text)
        self._ended = problem is None
        if problem is not None:
            self._fail(problem)

    def _fail(self, problem: str) -> None:
        self._failed = True
        logger().error("Rank %d: the writer of checkpoints has failed: %s.", dist.rank(), problem)

    def _stop(self) -> None:
        if self._process is not None and self._pipe is not None:
            self._process.kill()
            self._process.wait()
            self._pipe.close()
        self._process = self._pipe = None


class _Pickler(pickle.Pickler):
    """Pickles all but the memory of tensors, for which it chooses offsets in the shared memory."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.storages: dict[tuple[int, int], tuple[int, torch.UntypedStorage]] = {}
        self.nbytes = 0
        # called for tensors alone: ``reducer_override`` would be called for every object, ``persistent_id`` for values
        self.dispatch_table = copyreg.dispatch_table | {Tensor: self._reduce, Parameter: self._reduce}

    def has(self, tensor: Tensor) -> bool:
        """Whether its memory is in what was pickled."""
        storage = tensor.untyped_storage()
        return (storage.data_ptr(), storage.nbytes()) in self.storages

    def _reduce(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), storage.nbytes()
        if key not in self.storages:
            if key[1] > _PAGE << 8:  # half a page apart
                self.nbytes += (key[0] + _PAGE // 2 - self.nbytes) % _PAGE // _ALIGNMENT * _ALIGNMENT
            self.storages[key] = self.nbytes, storage
            self.nbytes += -(-key[1] // _ALIGNMENT) * _ALIGNMENT
        span = self.storages[key][0], key[1]
        return _in_memory, (span, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def _in_memory(*_: Any) -> Any:
    """Names ``_Unpickler.tensor`` in a pickle."""
    raise NotImplementedError


class _Unpickler(pickle.Unpickler):
    """Reads what a ``_Pickler`` of the same run has made: the tensors are in the shared memory."""

    def __init__(self, content: bytes, memory: mmap.mmap) -> None:
        super().__init__(io.BytesIO(content))
        self._memory = memory
        self._storages: dict[tuple[int, int], torch.UntypedStorage] = {}

    def find_class(self, module: str, name: str) -> Any:
        return self.tensor if (module, name) == (__name__, _in_memory.__name__) else super().find_class(module, name)

    def tensor(self, span: tuple[int, int], dtype: torch.dtype, *view: Any) -> Tensor:
        if span not in self._storages:
            content = torch.empty(0, dtype=torch.uint8)
            if span[1]:
                content = torch.frombuffer(self._memory, dtype=torch.uint8, offset=span[0], count=span[1])
            self._storages[span] = content.untyped_storage()
        return torch.empty(0, dtype=dtype).set_(self._storages[span], *view)


class _Memory:
    """Memory that another process can map. It grows to the largest save, and is pinned where there is CUDA."""

    def __init__(self) -> None:
        self.file = os.memfd_create("unigen_ds")
        self._threads: ThreadPoolExecutor | None = None
        self._copies: list[Future[None]] = []
        self._map: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def fill(self, pickler: _Pickler, content: memoryview) -> None:
        """Begin to copy each storage to its offset, and ``content`` after them; ``wait`` ends it. On CPUs every core of
        this rank copies.
        """
        end = pickler.nbytes + content.nbytes
        if end > self._bytes.nbytes:  # with space for numbers that get longer: to map it anew is slower than a copy
            self._pin(False)
            os.ftruncate(self.file, end + _PIECE // 8)
            self._map = mmap.mmap(self.file, 0)
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
            self._pin(True)
        self._bytes[pickler.nbytes : end].copy_(torch.frombuffer(content, dtype=torch.uint8))

        address = self._bytes.data_ptr()

        def copy() -> None:
            for begin, storage, start, stop in pieces:
                if storage.device.type == "cpu":  # a call for each of thousands of tensors
                    ctypes.memmove(address + begin + start, storage.data_ptr() + start, stop - start)
                else:
                    source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[start:stop]
                    self._bytes[begin + start : begin + stop].copy_(source, non_blocking=True)

        pieces = iter(  # of a list, from which several threads can take
            [
                (begin, storage, start, min(start + _PIECE, nbytes))
                for (_, nbytes), (begin, storage) in pickler.storages.items()
                for start in range(0, nbytes, _PIECE)
            ]
        )
        if torch.cuda.is_available():  # on the stream of this thread
            copy()
            return
        ranks = dist.env_processes_per_node() or dist.world_size()
        number = max(1, min(_MOST_THREADS, num_cores() // ranks))
        self._threads = self._threads or ThreadPoolExecutor(number)
        self._copies = [self._threads.submit(copy) for _ in range(number)]

    def wait(self) -> None:
        """Wait until all is copied. Raises the error of a copy."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        copies, self._copies = self._copies, []
        for future in copies:
            future.result()

    def _pin(self, pin: bool) -> None:
        if torch.cuda.is_available() and self._bytes.nbytes:
            runtime, address = torch.cuda.cudart(), self._bytes.data_ptr()
            if not pin:
                runtime.cudaHostUnregister(address)
            elif status := int(runtime.cudaHostRegister(address, self._bytes.nbytes, 0)):
                text = "The memory for asynchronous saves cannot be pinned (CUDA error %d): copies to it are slower."
                logger().warning(text, status)


def serve(pipe: int, file: int, parent: int) -> None:
    """The writer: completes one save after the other, until the training's process closes the pipe or ends.

    Signals to the job are for the training, which may save once more; this process ends when that one does.
    """
    for number in {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}:
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        return
    os.nice(_NICE)
    with suppress(OSError):  # Linux shares the time among sessions first: this is one of its own
        Path("/proc/self/autogroup").write_text(str(_NICE))
    torch.set_num_threads(1)
    tasks, memory = Connection(pipe), None
    records: list[tuple[int, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append((record.levelno, record.getMessage()))  # type: ignore[method-assign]
    logger().handlers[:] = [handler]
    logger().setLevel(logging.INFO)

    def wait() -> None:
        if tasks.poll(_LOOK_S):
            tasks.recv()
            deadline.append(time.monotonic() + _GRACE_S)
        if deadline and time.monotonic() > deadline[0]:
            raise TimeoutError("the training has ended, and not all of its ranks have written their files")

    while True:
        try:
            begin, size, decisions = tasks.recv()
        except (EOFError, TypeError):  # the training has ended, or asked for the end while nothing was written
            return
        if memory is None or len(memory) < begin + size:
            memory = mmap.mmap(file, 0)
        deadline: list[float] = []
        unpickler = _Unpickler(memory[begin : begin + size], memory)
        attempt, tensors = unpickler.load(), unpickler.load()
        attempt.decisions = decisions
        answer = problem = None
        try:
            answer = attempt.complete(tensors, wait)
        except Exception as error:
            problem = str(error)
        del unpickler, attempt, tensors  # they refer to the memory
        tasks.send((answer, problem, records[:]))
        records.clear()
