"""10,000 damaged data sets of every format: each is read as it is, is a counted skip, or is an error that names it.

In: ``tests/end_to_end/robustness/cases.py``, numbered. Out: ``results/robustness_<date>.json``; exit status 1 if one of
them ended in another way: a traceback, a crash, more than 20 s, a record that is lost or read as another one without a
message. Cases run in processes of their own, so that one that hangs or crashes is named and the others continue.

    python benchmarks/robustness.py [--num 10000] [--seed 0] [--jobs 2] [--only K] [--no-result]

``--only K`` runs one case in this process, with its traceback, and keeps its files.
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
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shared.record import write_result

SILENT_S = 60
"""Without a line for so long, a process is ended: the alarm of a case is set to less."""
GOOD = ("sample", "skip", "named")


def work(seed: int, numbers: range) -> None:
    """In a process: a line before and after each case."""
    from tests.end_to_end.robustness.outcome import Hangs, ending_of, scratch

    for number in numbers:
        print("begin", number, flush=True)
        with tempfile.TemporaryDirectory(dir=scratch(), prefix="robustness-") as folder:
            try:
                kind, verdict = ending_of(seed, number, Path(folder))
            except (Exception, Hangs) as error:
                where = traceback.extract_tb(error.__traceback__)
                own = [frame for frame in where if "unigen_ds" in frame.filename] or where
                frame = own[-1]
                text = " ".join(f"{type(error).__name__}: {error}".split())[:600].encode("ascii", "replace").decode()
                kind, verdict = "-", f"wrong {text} (at {Path(frame.filename).name}:{frame.lineno})"
        print("end", number, kind.replace(" ", "_"), verdict, flush=True)


class Process(threading.Thread):
    """Works through some cases with as many processes, one after the other, as it needs."""

    def __init__(self, seed: int, numbers: range, results: queue.Queue[tuple[int, str, str]]) -> None:
        super().__init__(daemon=True)
        self.seed, self.numbers, self.results = seed, numbers, results

    def run(self) -> None:
        rest = self.numbers
        while len(rest):
            last = self._run_until_it_ends(rest)
            rest = rest[rest.index(last) + 1 :] if last is not None else rest[:0]

    def _run_until_it_ends(self, numbers: range) -> int | None:
        """The case at which the process ended; None: it has finished all."""
        task = f"{self.seed}:{numbers.start}:{numbers.stop}:{numbers.step}"
        command = [sys.executable, __file__, "--worker", task]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        lines: queue.Queue[str | None] = queue.Queue()
        assert process.stdout is not None and process.stderr is not None
        output, errors = process.stdout, process.stderr
        threading.Thread(target=lambda: [lines.put(line) for line in output] + [lines.put(None)], daemon=True).start()
        tail: list[str] = []
        threading.Thread(target=lambda: [tail.append(line) for line in errors], daemon=True).start()
        current: int | None = None
        while True:
            try:
                line = lines.get(timeout=SILENT_S)
            except queue.Empty:
                process.kill()
                process.wait()
                assert current is not None, "the process did not start"
                self.results.put((current, "-", "wrong hangs"))
                return current
            if line is None:
                break
            word, number, *rest = line.split(" ", 3)
            if word == "begin":
                current = int(number)
            else:
                self.results.put((int(number), rest[0], rest[1].strip()))
                current = None
        if process.wait() == 0:
            return None
        assert current is not None, "".join(tail[-20:])
        self.results.put(
            (current, "-", f"wrong the process ended with {process.returncode}: {''.join(tail[-2:])[:300]}")
        )
        return current


def campaign(seed: int, numbers: range, jobs: int) -> dict[str, Any]:
    """All cases."""
    results: queue.Queue[tuple[int, str, str]] = queue.Queue()
    began = time.monotonic()
    processes = [Process(seed, numbers[k::jobs], results) for k in range(jobs)]
    for process in processes:
        process.start()
    kinds: dict[str, Counter[str]] = {}
    wrong: dict[int, str] = {}
    for count in range(1, len(numbers) + 1):
        number, kind, verdict = results.get()
        if verdict in GOOD:
            kinds.setdefault(kind.replace("_", " "), Counter())[verdict] += 1
        else:
            wrong[number] = verdict.removeprefix("wrong ")
            print(f"case {number}: {wrong[number]}", flush=True)
        if count % 1000 == 0:
            print(f"{count:,} cases, {len(wrong)} wrong, {time.monotonic() - began:.0f} s", flush=True)
    totals = Counter[str]()
    for counts in kinds.values():
        totals += counts
    return {
        "seed": seed,
        "cases": len(numbers),
        "seconds": round(time.monotonic() - began, 1),
        **{name: totals[name] for name in GOOD},
        "wrong": {str(number): text for number, text in sorted(wrong.items())},
        "by_kind": {kind: dict(sorted(counts.items())) for kind, counts in sorted(kinds.items())},
    }


def only(seed: int, number: int) -> int:
    """One case, with its traceback and its files."""
    from tests.end_to_end.robustness.cases import case
    from tests.end_to_end.robustness.outcome import ending_of, scratch

    folder = Path(tempfile.mkdtemp(prefix=f"robustness-{seed}-{number}-"))
    print(case(seed, number, folder))
    with tempfile.TemporaryDirectory(dir=scratch()) as again:
        print(*ending_of(seed, number, Path(again)))
    shutil.rmtree(folder)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 4))
    parser.add_argument("--only", type=int)
    parser.add_argument("--no-result", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        seed, start, stop, step = map(int, options.worker.split(":"))
        work(seed, range(start, stop, step))
        return 0
    if options.only is not None:
        return only(options.seed, options.only)
    result = campaign(options.seed, range(options.first, options.first + options.num), options.jobs)
    print({key: value for key, value in result.items() if key not in ("wrong", "by_kind")})
    if not options.no_result:
        print(write_result("robustness", result))
    return int(bool(result["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
