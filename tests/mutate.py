"""Apply each edit of ``tests/mutations.toml`` to a copy of the tree and run the test that must then fail.

::

    python -m tests.mutate [--part K/N] [--minutes M] [--only ID ...] [--again] [--tests-passed]

An edit survives if its test passes: then the test, or the claim, is wrong. Results are appended to ``--results`` as
they arrive; an edit is run again only if the edit, the edited file, the test's file or the helpers in its folder have
changed since, so a stopped run continues. Exit status: 0 every edit was detected, 1 one survived or has no result, 2
wrong usage. Edits for which ``--minutes`` leaves no time are listed, and are not a failure.

This process imports torch and the other large packages once and forks for each run of a test, which saves their import.
Edits with the same test run one after the other, after one run of the test without an edit: a test that fails then
shows nothing. ``--tests-passed`` omits that run, if the whole suite has just passed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutations.toml"
RESULTS = ROOT / "work_dirs" / "mutations.jsonl"
TIMEOUT_S = 600.0
"""Of one test. A test that does not end has not failed: it counts as without a result."""
SHARED_IMPORTS = (
    "pytest",
    "numpy",
    "torch",
    "torch.distributed",
    "safetensors.torch",
    "mmengine.config",
    "PIL.Image",
    "tokenizers",
)
Steps = Generator[str, "int | None", None]
_PYTEST = {0: "survived", 1: "detected", 2: "no result: interrupted or not importable", 5: "no result: no such test"}


@dataclass(frozen=True)
class Mutation:
    """One edit: ``find``, which is in ``file`` exactly once, is replaced by ``replace``; then ``test`` must fail."""

    id: str
    rows: tuple[str, ...]
    """Ids of ``docs/requirements.md``, or points of an issue (``10.A3``)."""
    file: str
    find: str
    replace: str
    test: str
    """pytest's id: file, or ``file::function``."""
    text: str = field(default="", compare=False)

    def problem(self) -> str | None:
        """The reason why it cannot be applied, or None."""
        path = ROOT / self.file
        if not path.is_file():
            return f"{self.file} does not exist"
        source = path.read_text(encoding="utf-8")
        if (number := source.count(self.find)) != 1:
            return f"'find' is in {self.file} {number} times instead of once"
        if self.find == self.replace:
            return "'replace' equals 'find'"
        if path.suffix == ".py":
            try:
                compile(source.replace(self.find, self.replace), self.file, "exec")
            except SyntaxError as error:
                return f"the edited {self.file} is not valid Python: {error}"
        return None if (ROOT / self.test.partition("::")[0]).is_file() else f"{self.test} does not exist"

    @property
    def node(self) -> str:
        """``test`` as pytest names it: with the class of the function, if there is one."""
        path, _, function = self.test.partition("::")
        name = function.partition("[")[0]
        for item in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
            inside = item.body if isinstance(item, ast.ClassDef) else ()
            if any(isinstance(inner, ast.FunctionDef) and inner.name == name for inner in inside):
                return f"{path}::{item.name}::{function}"  # type: ignore[attr-defined]
        return self.test

    def key(self) -> str:
        """Changes with the edit, the edited file, and all files of the test's folder."""
        digest = hashlib.blake2b(repr((self.file, self.find, self.replace, self.test)).encode(), digest_size=16)
        folder = (ROOT / self.test.partition("::")[0]).parent
        for path in (ROOT / self.file, *sorted(folder.glob("*.py"))):
            digest.update(path.read_bytes())
        return digest.hexdigest()


def load(path: Path = LIST) -> list[Mutation]:
    """All edits, in the order of the file."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10: installed by pytest
        import tomli as tomllib  # type: ignore[import-not-found,no-redef]
    tables = tomllib.loads(path.read_text(encoding="utf-8")).get("mutation", [])
    return [Mutation(**{**table, "rows": tuple(table["rows"])}) for table in tables]


def part_of(mutations: Sequence[Mutation], part: str) -> list[Mutation]:
    """Part ``K/N``: whole tests, chosen by a hash of their name, so that edits which share a test stay together."""
    number, _, total = part.partition("/")
    if not (number.isdigit() and total.isdigit() and 1 <= int(number) <= int(total)):
        raise SystemExit(f"--part is {part!r}; allowed: K/N with 1 <= K <= N")
    chosen = int(number) - 1
    return [m for m in mutations if int(hashlib.blake2b(m.test.encode()).hexdigest(), 16) % int(total) == chosen]


def tree_copy(folder: Path) -> Path:
    """A copy of all files that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in names:
        if name and (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
    with contextlib.suppress(subprocess.CalledProcessError):  # tests that ask git for the list of files
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


@contextlib.contextmanager
def applied(mutation: Mutation, folder: Path) -> Iterator[None]:
    """Apply the edit to the copy inside the block."""
    path = folder / mutation.file
    source = path.read_text(encoding="utf-8")
    path.write_text(source.replace(mutation.find, mutation.replace), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(source, encoding="utf-8")
        for cache in path.parent.glob(f"__pycache__/{path.stem}.*"):
            cache.unlink()


@dataclass(frozen=True)
class Child:
    """A forked process that runs one test in a copy of the tree."""

    process: int
    until: float

    @classmethod
    def start(cls, folder: Path, test: str, *, timeout_s: float = TIMEOUT_S) -> Child:
        process = os.fork()
        if process == 0:
            _child(folder, test)
        return cls(process, time.monotonic() + timeout_s)

    def poll(self) -> tuple[bool, int | None]:
        """Whether it has ended, and pytest's exit status; None if it had to be killed."""
        done, status = os.waitpid(self.process, os.WNOHANG)
        if done:
            return True, os.waitstatus_to_exitcode(status)
        if time.monotonic() < self.until:
            return False, None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        return True, None


def _child(folder: Path, test: str) -> None:
    """Never returns. The copy is first on the path, also for processes that the test starts."""
    status = 3
    try:
        os.setsid()
        os.chdir(folder)
        stream = os.open(_log(folder), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        os.environ["PYTHONPATH"] = str(folder)
        os.environ["ENGINE_JOBS"] = "needed"  # tests/end_to_end/engines/launch.py
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # two edits within a second have the same timestamp
        sys.dont_write_bytecode = True
        sys.path[:] = [str(folder), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        import pytest

        status = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--tb=short", test]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _log(folder: Path) -> Path:
    return folder.with_suffix(".log")


def outcome_of(status: int | None) -> str:
    """``detected``, ``survived``, or the reason for no result, from pytest's exit status."""
    if status is None:
        return f"no result: no end within {TIMEOUT_S:.0f} s"
    return _PYTEST.get(status, f"no result: exit status {status}")


def known_results(path: Path) -> dict[str, str]:
    """Outcome by key, of an earlier run."""
    if not path.is_file():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    return {line["key"]: line["outcome"] for line in lines if line["outcome"] == "detected"}


class Campaign:
    """Tests edits in ``jobs`` copies of the tree at a time and records each outcome."""

    def __init__(self, results: Path, *, jobs: int, minutes: float | None, check_tests: bool) -> None:
        self.results, self.jobs, self.check_tests = results, jobs, check_tests
        self.until = float("inf") if minutes is None else time.monotonic() + 60 * minutes
        self.outcomes: dict[str, str] = {}
        results.parent.mkdir(parents=True, exist_ok=True)

    def run(self, mutations: Sequence[Mutation], *, again: bool) -> None:
        known = {} if again else known_results(self.results)
        self.outcomes = {m.id: known[m.key()] for m in mutations if m.key() in known}
        groups: dict[str, list[Mutation]] = {}
        for mutation in mutations:
            if mutation.id not in self.outcomes:
                groups.setdefault(mutation.test, []).append(mutation)
        waiting = list(groups.values())
        with tempfile.TemporaryDirectory(prefix="mutate-") as scratch:
            free = [tree_copy(Path(scratch) / f"tree{number}") for number in range(self.jobs)]
            running: dict[Path, tuple[Child, Steps]] = {}
            while waiting or running:
                while waiting and free:
                    folder = free.pop()
                    steps = self._steps(waiting.pop(0), folder)
                    running[folder] = Child.start(folder, next(steps)), steps  # type: ignore[assignment]
                time.sleep(0.05)
                for folder, (child, steps) in list(running.items()):
                    ended, status = child.poll()
                    if ended:
                        del running[folder]
                        try:
                            running[folder] = Child.start(folder, steps.send(status)), steps
                        except StopIteration:
                            free.append(folder)
                if time.monotonic() > self.until:
                    waiting.clear()

    def _steps(self, group: Sequence[Mutation], folder: Path) -> Steps:
        """Yields a test to run and receives its exit status, until all edits of the test have an outcome."""
        status = (yield group[0].node) if self.check_tests else 0
        if status != 0:
            for mutation in group:
                self._record(mutation, f"no result: the test without the edit: {outcome_of(status)}", folder, 0.0)
            return
        for mutation in group:
            if time.monotonic() > self.until:
                return
            started = time.monotonic()
            with applied(mutation, folder):
                status = yield mutation.node
            self._record(mutation, outcome_of(status), folder, time.monotonic() - started)

    def _record(self, mutation: Mutation, outcome: str, folder: Path, seconds: float) -> None:
        self.outcomes[mutation.id] = outcome
        line = {"id": mutation.id, "rows": mutation.rows, "test": mutation.test, "outcome": outcome,
                "seconds": round(seconds, 1), "key": mutation.key()}  # fmt: skip
        with self.results.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        print(f"{outcome:<9} {mutation.id}  ({seconds:.0f} s, {mutation.test})", flush=True)
        if outcome != "detected" and _log(folder).is_file():
            print("  " + "\n  ".join(_log(folder).read_text(errors="replace").splitlines()[-15:]), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description="See tests/mutate.py.")
    parser.add_argument("--part", default="1/1", help="K/N: only this part of the edits")
    parser.add_argument("--minutes", type=float, help="start no further edit after this number of minutes")
    parser.add_argument("--only", nargs="+", metavar="ID", help="only these edits")
    parser.add_argument("--list", type=Path, default=LIST, help="the edits; default %(default)s")
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON lines; default %(default)s")
    parser.add_argument("--jobs", type=int, default=2, help="edits at a time; default %(default)s")
    parser.add_argument("--again", action="store_true", help="also run edits that were detected before")
    parser.add_argument("--tests-passed", action="store_true", help="the tests are known to pass without an edit")
    given = parser.parse_args(arguments)
    listed = load(given.list)
    chosen = part_of(listed, given.part)
    if given.only:
        unknown = sorted(set(given.only) - {m.id for m in listed})
        if unknown:
            parser.error(f"there is no edit {', '.join(unknown)}")
        chosen = [m for m in chosen if m.id in given.only]
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in SHARED_IMPORTS:
        importlib.import_module(name)
    campaign = Campaign(given.results, jobs=given.jobs, minutes=given.minutes, check_tests=not given.tests_passed)
    wrong = [f"{m.id}: {problem}" for m in chosen if (problem := m.problem()) is not None]
    if wrong:
        parser.error("edits that cannot be applied:\n  " + "\n  ".join(wrong))
    campaign.run(chosen, again=given.again)
    return report(chosen, campaign.outcomes)


def report(chosen: Sequence[Mutation], outcomes: dict[str, str]) -> int:
    """Print the sums, the edits that survived, and those that were not run."""
    waiting = [m.id for m in chosen if m.id not in outcomes]
    wrong = [f"{name}: {outcome}" for name, outcome in outcomes.items() if outcome != "detected"]
    if waiting:
        print(f"\nNot run because of --minutes ({len(waiting)}): {', '.join(waiting)}")
    if wrong:
        print("\nNot detected:\n  " + "\n  ".join(wrong))
    counts = Counter(outcome.partition(":")[0] for outcome in outcomes.values())
    print(f"\n{counts['detected']} detected, {counts['survived']} survived, {counts['no result']} without a result, "
          f"{len(waiting)} not run")  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
