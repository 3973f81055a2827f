"""``Workers``: results in the order of the tasks; one that ends, at whatever moment, is an error at once."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from itertools import count, islice
from multiprocessing.connection import Connection
from typing import Any

import pytest

from unigen_ds.core.errors import TrainingError
from unigen_ds.system.workers import Workers

LARGE = 1 << 20
"""Bytes of a result: more than a pipe holds, so that most kills are in the middle of a message."""
KILLS = int(os.environ.get("KILLS", "40"))


def make(task: int) -> tuple[int, bytes]:
    return task, bytes(LARGE)


def odd(task: int) -> int:
    if task == 2:
        raise ValueError(f"task {task}")
    if task == 4:
        os._exit(7)
    time.sleep(task % 3 * 0.01)
    return task


def close(workers: Workers) -> list[int | None]:
    workers.close()
    return [process.exitcode for process in workers._processes]


@pytest.mark.slow
def test_a_worker_is_killed_at_random_moments() -> None:
    """The error is there at once, also where another worker is waited for. 200 times: ``make worker-kills``."""
    draw, slowest = random.Random(0), 0.0
    for _ in range(KILLS):
        workers = Workers(make, count(), 2, ahead=2)
        next(workers)
        victim = draw.randrange(2)
        kill = threading.Timer(draw.random() * 0.01, workers._processes[victim].kill)
        kill.start()
        begin = time.monotonic()
        with pytest.raises(TrainingError, match=rf"worker {victim} \(pid \d+\), by SIGKILL"):
            for k, (task, content) in enumerate(workers, 1):
                assert task == k and len(content) == LARGE
                begin = time.monotonic()
        slowest = max(slowest, time.monotonic() - begin)
        kill.join()
        assert close(workers) == [-signal.SIGKILL] * 2
    assert slowest < 5.0


def test_half_a_message_of_a_dead_worker_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker ends after the length and a part of a result; the other one lives."""

    def half(self: Connection, content: Any) -> None:
        os.write(self.fileno(), (1000).to_bytes(4, "big") + b"part")
        time.sleep(0.3)  # by then the main process reads it
        os._exit(3)

    monkeypatch.setattr(Connection, "send_bytes", half)
    workers = Workers(odd, count(1), 2, ahead=1)
    monkeypatch.undo()
    errors: list[BaseException] = []

    def receive() -> None:
        try:
            next(workers)
        except BaseException as error:
            errors.append(error)

    reader = threading.Thread(target=receive, daemon=True)  # the main thread must not wait where the pipe has no end
    reader.start()
    reader.join(5.0)
    workers.close()
    assert "with exit status 3" in str(errors), errors


def test_another_worker_than_the_one_that_is_waited_for_ends() -> None:
    workers = Workers(time.sleep, [0, 0, 8], 2, ahead=1)
    next(workers)
    threading.Timer(0.2, workers._processes[1].kill).start()
    begin = time.monotonic()
    with pytest.raises(TrainingError, match=r"worker 1 \(pid \d+\), by SIGKILL"):
        list(workers)
    workers.close()
    assert time.monotonic() - begin < 5.0


def test_errors_and_ends() -> None:
    workers = Workers(odd, range(4), 2, ahead=2)
    assert [next(workers), next(workers)] == [0, 1]
    with pytest.raises(ValueError, match=r"in worker process 0[\s\S]*task 2"):
        next(workers)
    assert next(workers) == 3
    workers.close()
    ending = Workers(odd, [0, 4], 1, ahead=1)
    with pytest.raises(TrainingError, match=r"worker 0 \(pid \d+\), with exit status 7"):
        list(ending)
    ending.close()
    finite = Workers(odd, [5, 6, 7], 2, ahead=2)
    assert list(finite) == [5, 6, 7]
    finite.close()
    finite.close()


def test_tasks_are_taken_ahead_and_results_pass_a_thread() -> None:
    numbers: list[int] = []
    threads: set[str] = set()

    def tasks() -> Iterator[int]:
        for k in count(5):
            numbers.append(k)
            yield k

    def on_arrival(result: int) -> int:
        threads.add(threading.current_thread().name)
        return -result

    workers = Workers(odd, tasks(), 2, ahead=3, on_arrival=on_arrival)
    assert list(islice(workers, 4)) == [-5, -6, -7, -8] and numbers == [*range(5, 15)]
    assert len(threads) == 1 and threading.current_thread().name not in threads
    workers.close()


def test_a_worker_that_hangs_is_an_error_after_the_timeout() -> None:
    workers = Workers(time.sleep, [0, 60], 1, ahead=2, timeout=0.5)
    next(workers)
    with pytest.raises(TrainingError, match=r"timed out after 0\.5 seconds.*train_dataloader\.timeout"):
        next(workers)
    workers.close()
