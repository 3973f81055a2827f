"""10,000 damaged data sets of every format, and 2,000 streamed ones: each is read as it is, is a counted skip, or is an
error that names it.

In: ``tests/end_to_end/robustness/cases.py`` and ``streams.py`` (damaged shards, servers that answer wrongly, files that
change), numbered. Out: ``results/robustness_<date>.json``; exit status 1 if one of them ended
in another way: a traceback, a crash, more than 20 s, a record that is lost or read as another one without a message.
Cases run in processes of their own, so that one that hangs or crashes is named and the others continue.

    python benchmarks/robustness.py [--num 10000] [--streamed 2000] [--seed 0] [--jobs 2] [--only K] [--no-result]

``--only K`` runs one case in this process, with its traceback, and keeps its files; with ``--streamed 1`` a streamed
one.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shared.record import write_result

SILENT_S = 60
"""Without a line for so long, a process is ended: the alarm of a case is set to less."""
GOOD = ("sample", "skip", "named")


def work(what: str, seed: int, numbers: range) -> None:
    """In a process: a line before and after each case."""
    from tests.end_to_end.robustness.outcome import Hangs, scratch

    ending_of = ending(what)
    for number in numbers:
        print("begin", number, flush=True)
        with tempfile.TemporaryDirectory(dir=scratch(), prefix="robustness-") as folder:
            try:
                kind, found = ending_of(seed, number, Path(folder))
            except (Exception, Hangs) as error:
                where = traceback.extract_tb(error.__traceback__)
                own = [frame for frame in where if "unigen_ds" in frame.filename] or where
                frame = own[-1]
                text = " ".join(f"{type(error).__name__}: {error}".split())[:600].encode("ascii", "replace").decode()
                kind, found = "-", f"wrong {text} (at {Path(frame.filename).name}:{frame.lineno})"
        print("end", number, kind.replace(" ", "_"), found, flush=True)


def ending(what: str) -> Callable[[int, int, Path], tuple[str, str]]:
    """What runs a case: of ``files`` or of ``streams``."""
    from tests.end_to_end.robustness import outcome, streams

    return {"files": outcome.ending_of, "streams": streams.stream_ending_of}[what]


class Process(threading.Thread):
    """Works through some cases with as many processes, one after the other, as it needs."""

    def __init__(self, what: str, seed: int, numbers: range, ended: queue.Queue[tuple[int, str, str]]) -> None:
        super().__init__(daemon=True)
        self.what, self.seed, self.numbers, self.ended = what, seed, numbers, ended

    def run(self) -> None:
        left = self.numbers
        while len(left):
            last = self._run_until_it_ends(left)
            left = left[left.index(last) + 1 :] if last is not None else left[:0]

    def _run_until_it_ends(self, numbers: range) -> int | None:
        """The case at which the process ended; None: it has finished all."""
        given = f"{self.what}:{self.seed}:{numbers.start}:{numbers.stop}:{numbers.step}"
        command = [sys.executable, __file__, "--worker", given]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        lines: queue.Queue[str | None] = queue.Queue()
        assert process.stdout is not None and process.stderr is not None
        output, errors = process.stdout, process.stderr
        threading.Thread(target=lambda: [lines.put(line) for line in output] + [lines.put(None)], daemon=True).start()
        tail: list[str] = []
        threading.Thread(target=lambda: [tail.append(line) for line in errors], daemon=True).start()
        begun: int | None = None
        while True:
            try:
                line = lines.get(timeout=SILENT_S)
            except queue.Empty:
                process.kill()
                process.wait()
                assert begun is not None, "the process did not start"
                self.ended.put((begun, "-", "wrong hangs"))
                return begun
            if line is None:
                break
            word, number, *rest = line.split(" ", 3)
            if word == "begin":
                begun = int(number)
            else:
                self.ended.put((int(number), rest[0], rest[1].strip()))
                begun = None
        if process.wait() == 0:
            return None
        assert begun is not None, "".join(tail[-20:])
        self.ended.put((begun, "-", f"wrong the process ended with {process.returncode}: {''.join(tail[-2:])[:300]}"))
        return begun


def campaign(what: str, seed: int, numbers: range, jobs: int) -> dict[str, Any]:
    """All cases of ``files`` or ``streams``."""
    ended: queue.Queue[tuple[int, str, str]] = queue.Queue()
    began = time.monotonic()
    processes = [Process(what, seed, numbers[k::jobs], ended) for k in range(jobs)]
    for process in processes:
        process.start()
    kinds: dict[str, Counter[str]] = {}
    wrong: dict[int, str] = {}
    for done in range(1, len(numbers) + 1):
        number, kind, found = ended.get()
        if found in GOOD:
            kinds.setdefault(kind.replace("_", " "), Counter())[found] += 1
        else:
            wrong[number] = found.removeprefix("wrong ")
            print(f"{what}, case {number}: {wrong[number]}", flush=True)
        if done % 1000 == 0:
            print(f"{what}: {done:,} cases, {len(wrong)} wrong, {time.monotonic() - began:.0f} s", flush=True)
    totals = Counter[str]()
    for counted in kinds.values():
        totals += counted
    return {
        "seed": seed,
        "cases": len(numbers),
        "seconds": round(time.monotonic() - began, 1),
        **{name: totals[name] for name in GOOD},
        "wrong": {str(number): text for number, text in sorted(wrong.items())},
        "by_kind": {kind: dict(sorted(counted.items())) for kind, counted in sorted(kinds.items())},
    }


def only(what: str, seed: int, number: int) -> int:
    """One case, with its traceback and its files."""
    from tests.end_to_end.robustness.cases import case
    from tests.end_to_end.robustness.outcome import scratch
    from tests.end_to_end.robustness.streams import stream_case

    folder = Path(tempfile.mkdtemp(prefix=f"robustness-{seed}-{number}-"))
    if what == "streams":
        with stream_case(seed, number, folder) as streamed:
            print(streamed)
    else:
        print(case(seed, number, folder))
    with tempfile.TemporaryDirectory(dir=scratch()) as again:
        print(*ending(what)(seed, number, Path(again)))
    shutil.rmtree(folder)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=10_000)
    parser.add_argument("--streamed", type=int, default=None, metavar="N", help="streamed ones (default 2,000)")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 4))
    parser.add_argument("--only", type=int)
    parser.add_argument("--no-result", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        what, *numbers = given.worker.split(":")
        seed, start, stop, step = map(int, numbers)
        work(what, seed, range(start, stop, step))
        return 0
    if given.only is not None:
        return only("streams" if given.streamed else "files", given.seed, given.only)
    numbers = {"files": given.num, "streams": 2000 if given.streamed is None else given.streamed}
    found: dict[str, dict[str, Any]] = {}
    for what, number in numbers.items():
        found[what] = campaign(what, given.seed, range(given.first, given.first + number), given.jobs)
        print(what, {key: value for key, value in found[what].items() if key not in ("wrong", "by_kind")})
    if not given.no_result:
        print(write_result("robustness", {**(found["files"] if given.num else {}), "streamed": found["streams"]}))
    return int(any(one["wrong"] for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
