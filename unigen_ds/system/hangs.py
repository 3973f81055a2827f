"""What the ranks do when one of them stalls: the stacks of all threads in ``work_dir/hang``, and who is late.

A thread of each rank looks at the main thread. Where that has not moved for 90 % of the time that a collective may wait
(gloo raises then, and NCCL's own thread aborts the process), or where a connection is lost, the rank asks all others by
the store of the job: each writes its stacks and adds a line of what it does. A process that is stopped, or that holds
Python's lock, adds none.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from unigen_ds.system import dist
from unigen_ds.system.log import logger

STOP_ADVICE = "its output, and its machine's log: it was killed (out of memory?), stopped, or cannot be reached"
_SHARE, _LONGEST_STEP_S, _GRACE_S = 0.9, 2.0, 5.0
_WAITING = ("/torch/distributed/", "/deepspeed/", "/system/dist.py", "/system/rank_errors.py")
"""Files whose functions wait for other ranks."""


class Watch:
    """Watches the thread that makes it, until ``close``; does nothing in one process.

    Args:
        position: the update, its phase, and a number that grows with each phase.
        samples: ids of the samples that this rank has or loads; may fail.
        end: ends the process, with a text, where the job has ended without it, or a collective does not raise in time.
    """

    current: ClassVar[Watch | None] = None

    def __init__(
        self,
        folder: Path,
        *,
        timeout_s: float,
        position: Callable[[], tuple[int, str, int]],
        samples: Callable[[], list[str]],
        end: Callable[[str], None],
    ) -> None:
        self._folder, self._timeout_s, self._store = folder, timeout_s, dist.job_store()
        self._position, self._samples, self._end = position, samples, end
        self._thread_id, self._error = threading.get_ident(), list[BaseException]()
        self._lines: dict[int, tuple[int, str, int, str, bool]] = {}
        self._close_event, self._request_event, self.answer_event = (threading.Event() for _ in range(3))
        if self._store is not None:
            Watch.current = self
            threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        self._close_event.set()
        Watch.current = None

    def ask(self, error: BaseException) -> None:
        """``error`` has ended a collective: ``answered`` is set once the other ranks had time to add their lines."""
        self._error.append(error)
        if not self.answer_event.is_set():
            self._request_event.set()

    def _watch(self) -> None:
        step, number = min(self._timeout_s / 40, _LONGEST_STEP_S), 0
        last_change = since = time.monotonic()
        before: Any = None
        position = self._position()
        try:
            while not self._close_event.wait(step):
                frames = traceback.walk_stack(sys._current_frames()[self._thread_id])
                now = self._position(), [(id(frame), frame.f_lasti) for frame, _ in frames]
                last_change = last_change if now == before else time.monotonic()
                before, still = now, time.monotonic() - last_change
                late = still > _SHARE * self._timeout_s and not self.answer_event.is_set()
                if late or self._request_event.is_set() or self._store.check([f"hang/{number}"]):
                    self._answer(f"hang/{number}", still, step)
                    position, since, number = self._position(), time.monotonic(), number + 1
                elif position[2] != self._position()[2] and not self._error:
                    self.answer_event.clear()
                elif self.answer_event.is_set() and not self._error:
                    if self._location()[1] and still > self._timeout_s + _GRACE_S:
                        self._end(self.text(f" ({still:.0f} s, and the collective does not end)"))
                    if self._store.add("errors", 0) == 0:
                        since = time.monotonic()
                    elif time.monotonic() - since > _GRACE_S:
                        self._end(self.text(" (the others have ended)"))
        except Exception:  # of the store: the job ends
            if self.answer_event.is_set() and not self._error and not self._close_event.wait(_GRACE_S):
                self._end(self.text(" (the others have ended)"))

    def _answer(self, key: str, still: float, step: float) -> None:
        """Add the line of this rank, write its stacks, and wait for the lines of the others."""
        (update, phase, num_sections), (location, waits), rank = self._position(), self._location(), dist.rank()
        self._store.append(key, json.dumps([rank, [update, phase, num_sections, location, waits]]) + "\n")
        path, host = self._folder / f"update_{update}_rank_{rank}.txt", f"{socket.gethostname()}, pid {os.getpid()}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", encoding="utf-8") as file:
                facts = {"rank": rank, "host": host, "time": f"{time.strftime('%F %T')}, here for {still:.0f} s"}
                facts |= {"update": update, "phase": phase, "location": location}
                print(*(f"{name}: {value}" for name, value in facts.items()), sep="\n", file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
                print("samples:", *self._samples(), file=file)  # last: the main thread may be changing them
        except Exception as error:
            logger().warning("%s cannot be written: %s", path, error)
        self._lines = {}
        end = time.monotonic() + 2.5 * step
        while len(self._lines) < dist.world_size() and time.monotonic() < end:
            time.sleep(step / 4)
            self._lines = dict(map(json.loads, self._store.get(key).decode().splitlines()))
        self._request_event.clear()
        self.answer_event.set()
        if not self._error:
            logger().warning("No progress: %s. Stacks: %s.", self.text(), self._folder)

    def _location(self) -> tuple[str, bool]:
        """Where the main thread is, and whether it waits for other ranks there."""
        frames = [*traceback.walk_stack(sys._current_frames()[self._thread_id])]
        if self._error:
            frames = [*traceback.walk_tb(self._error[0].__traceback__)][::-1]
        frame, line = next(one for one in frames if not one[0].f_code.co_filename.endswith("/system/clock.py"))
        file = frame.f_code.co_filename
        return f"{file}:{line} in {frame.f_code.co_name}", bool(self._error) or any(part in file for part in _WAITING)

    def text(self, cause: str = "") -> str:
        """Who is late, with ``cause`` after the first, and what the other ranks do."""
        lines, number = self._lines, dist.world_size()
        silent = [str(rank) for rank in range(number) if rank not in lines]
        late = [rank for rank, line in lines.items() if not line[4]]
        if not silent and len(late) in (0, number):  # on CUDA it is not known who waits
            first = min((line[0], line[2]) for line in lines.values())
            late = [rank for rank, line in lines.items() if (line[0], line[2]) == first]
        doing: dict[str, list[str]] = {f"does not answer{cause}": silent} if silent else {}
        for rank, (update, phase, _, location, waits) in sorted(lines.items(), key=lambda one: one[0] not in late):
            stalls = rank in late and len(late) < number - len(silent)
            what = f"does not continue{'' if doing else cause}" if stalls else "waits" if waits else "is there"
            doing.setdefault(f"{what}: update {update}, {phase}, {location}", []).append(str(rank))
        return "; ".join(f"rank {', '.join(ranks[:8])} {what}" for what, ranks in [*doing.items()][:8])

    @property
    def remedy(self) -> str:
        silent = len(self._lines) < dist.world_size()
        return f"{f'{STOP_ADVICE}; ' if silent else ''}{self._folder} has the stacks of the ranks that answer"
