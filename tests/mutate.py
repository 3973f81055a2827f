"""Apply each edit of ``tests/mutations.toml`` to a copy of the tree and run the test that must then fail.

::

    python -m tests.mutate [--part K/N] [--minutes M] [--only ID ...] [--again] [--tests-passed]
    python -m tests.mutate --sample N [--seed S]

An edit survives if its test passes: then the test, or the claim, is wrong. Results are appended to ``--results`` as
they arrive; an edit is run again only if the edit, the edited file, the test's file or the helpers in its folder have
changed since, so a stopped run continues. Exit status: 0 every edit was detected, 1 one survived or has no result, 2
wrong usage. Edits for which ``--minutes`` leaves no time are listed, and are not a failure.

With ``--sample`` the edits are random ones instead, of lines that a module's own tests
(``tests/<package>/test_<module>*.py``) run: a comparison, a constant, a sign, a number that is off by one, a deleted
statement. The share that those tests detect is printed and written to ``benchmarks/results``; nothing fails.

This process imports torch and the other large packages once and forks for each run of a test, which saves their import.
Edits with the same test run one after the other, after one run of the test without an edit: a test that fails then
shows nothing. ``--tests-passed`` omits that run, if the whole suite has just passed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import hashlib
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

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
Steps = Generator["tuple[str, str | None]", "int | None", None]
"""Tests to run, and the module whose lines are traced; receives pytest's exit status."""
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
    """pytest's id: file, or ``file::function``; of a random edit several files, separated by spaces."""
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
    assert mutation.find in source, f"{mutation.file} has changed since the copy was made"
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
    def start(cls, folder: Path, test: str, traced: str | None, *, timeout_s: float = TIMEOUT_S) -> Child:
        process = os.fork()
        if process == 0:
            _child(folder, test, traced)
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


def _child(folder: Path, test: str, traced: str | None) -> None:
    """Never returns. The copy is first on the path, also for processes that the test starts. The lines of the module
    ``traced`` that the tests run are written beside the copy."""
    status = 3
    lines: set[int] = set()
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

        if traced is not None:
            _trace(str(folder / traced), lines)
        status = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--tb=short", *test.split()]))
        if traced is not None:
            sys.settrace(None)
            folder.with_suffix(".lines").write_text(json.dumps(sorted(lines)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _trace(file: str, lines: set[int]) -> None:
    """Collect the lines of one file that this process runs from now on."""

    def line_of(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            lines.add(frame.f_lineno)
        return line_of

    def call(frame: FrameType, event: str, argument: object) -> Any:
        return line_of if frame.f_code.co_filename == file else None

    threading.settrace(call)
    sys.settrace(call)


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
        self.run_all([functools.partial(self._steps, group) for group in groups.values()])

    def run_all(self, waiting: list[Callable[[Path], Steps]]) -> None:
        """Run the steps of each, in a copy of the tree that no other uses meanwhile."""
        with tempfile.TemporaryDirectory(prefix="mutate-") as scratch:
            free = [tree_copy(Path(scratch) / f"tree{number}") for number in range(self.jobs)]
            running: dict[Path, tuple[Child, Steps]] = {}
            while waiting or running:
                while waiting and free:
                    folder = free.pop()
                    steps = waiting.pop(0)(folder)
                    running[folder] = Child.start(folder, *next(steps)), steps
                time.sleep(0.05)
                for folder, (child, steps) in list(running.items()):
                    ended, status = child.poll()
                    if ended:
                        del running[folder]
                        try:
                            running[folder] = Child.start(folder, *steps.send(status)), steps
                        except StopIteration:
                            free.append(folder)
                if time.monotonic() > self.until:
                    waiting.clear()

    def _steps(self, group: Sequence[Mutation], folder: Path) -> Steps:
        """Yields a test to run and receives its exit status, until all edits of the test have an outcome."""
        status = (yield group[0].node, None) if self.check_tests else 0
        if status != 0:
            for mutation in group:
                self._record(mutation, f"no result: the test without the edit: {outcome_of(status)}", folder, 0.0)
            return
        yield from self._edits(group, folder)

    def sample_steps(self, module: str, number: int, seed: int, folder: Path) -> Steps:
        """``number`` random edits of the lines of a module that its own tests run."""
        tests = " ".join(own_tests(module))
        status = yield tests, module
        if status != 0:
            print(f"{module} is left out: its tests without an edit: {outcome_of(status)}", flush=True)
            return
        lines = set(json.loads(folder.with_suffix(".lines").read_text()))
        edits = [edit for edit in random_edits(folder, module, tests) if edit.line in lines]
        yield from self._edits(random.Random(f"{seed} {module}").sample(edits, min(number, len(edits))), folder)

    def _edits(self, group: Sequence[Mutation], folder: Path) -> Steps:
        for mutation in group:
            if time.monotonic() > self.until:
                return
            started = time.monotonic()
            with applied(mutation, folder):
                status = yield mutation.node, None
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


_PAIRS = ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot))
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {a: b for x, y in _PAIRS for a, b in ((x, y), (y, x))}


@dataclass(frozen=True)
class RandomEdit(Mutation):
    """The whole text of a module with one change of ``operator`` in ``line``."""

    operator: str = ""
    line: int = 0

    @property
    def node(self) -> str:
        return self.test


def own_tests(module: str) -> list[str]:
    """The files of tests of one module."""
    path = Path(module)
    folder = Path("tests", *path.parent.parts[1:])
    names = (f"test_{path.stem}.py", f"test_{path.stem}_*.py")
    return sorted(str(found.relative_to(ROOT)) for name in names for found in (ROOT / folder).glob(name))


def _edited(node: ast.AST) -> tuple[str, str] | None:
    """The operator that fits a node, and the text of the changed node."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=others) if type(operator) in _COMPARISONS:
            changed = ast.Compare(left, [_COMPARISONS[type(operator)]()], others)
            return "comparison", f"({ast.unparse(changed)})"
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as operator, right=right):
            if not isinstance(left, ast.List) and not isinstance(right, ast.List):  # else an error of types
                changed_sum = ast.BinOp(left, ast.Sub() if isinstance(operator, ast.Add) else ast.Add(), right)
                return "sign", f"({ast.unparse(changed_sum)})"
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return "sign", f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            return "constant", str(not value)
        case ast.Constant(value=int(value)):
            return "off by one", str(value + 1)
        case ast.Constant(value=float(value)):
            return "constant", repr(2 * value + 1)
        case ast.AugAssign() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.Expr(value=ast.Call()):
            return "deleted statement", "pass"
    return None


def _without_effect(node: ast.AST) -> list[ast.AST | None]:
    """Parts of a node that are not edited: annotations, texts, and what is logged."""
    match node:
        case ast.arg(annotation=part) | ast.FunctionDef(returns=part) | ast.AnnAssign(annotation=part):
            return [part]
        case ast.JoinedStr() | ast.BinOp(left=ast.Constant(value=str())) | ast.BinOp(right=ast.Constant(value=str())):
            return [node]
        case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="logger")))):
            return [node]
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="logger"))))):
            return [node]
    return []


def random_edits(folder: Path, module: str, tests: str) -> list[RandomEdit]:
    """All edits of a module by operator, in the copy of the tree in ``folder``."""
    source = (folder / module).read_text(encoding="utf-8")
    lines, tree = source.encode().splitlines(keepends=True), ast.parse(source)
    begins = [0, *itertools.accumulate(map(len, lines))]
    left_out = {id(inner) for node in ast.walk(tree) for part in _without_effect(node) if part is not None
                for inner in ast.walk(part)}  # fmt: skip
    edits = []
    for node in ast.walk(tree):
        change = None if id(node) in left_out else _edited(node)
        if change is None or not isinstance(node, (ast.expr, ast.stmt)):
            continue
        begin = begins[node.lineno - 1] + node.col_offset
        end = begins[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        before, text = source.encode()[begin:end].decode(), source.encode()
        name = f"{module}:{node.lineno}:{node.col_offset} {before} -> {change[1]}"
        edited = (text[:begin] + change[1].encode() + text[end:]).decode()
        edits.append(RandomEdit(name, (), module, source, edited, tests, operator=change[0], line=node.lineno))
    return edits


def sample(campaign: Campaign, number: int, seed: int) -> int:
    """Test random edits of modules that have tests of their own, and write the share that these detect."""
    listed = subprocess.run(["git", "ls-files", "unigen_ds"], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = [name for name in listed.stdout.split() if name.endswith(".py") and own_tests(name)]
    sizes = [len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in modules]
    counts = Counter(random.Random(seed).choices(modules, weights=sizes, k=number))
    campaign.run_all([functools.partial(campaign.sample_steps, name, n, seed) for name, n in counts.items()])
    outcomes = {name: outcome.partition(":")[0] for name, outcome in campaign.outcomes.items()}
    counted = Counter(outcomes.values())
    share = {kind: counted[kind] for kind in ("detected", "survived", "no result")}
    survivors = sorted(name for name, outcome in outcomes.items() if outcome == "survived")
    print("\nNot detected:\n  " + "\n  ".join(survivors) if survivors else "")
    tested = share["detected"] + share["survived"]
    print(f"\n{share['detected']} of {tested} random edits detected ({share['detected'] / max(tested, 1):.0%})")
    result = {"sample": number, "seed": seed, "not_run": number - len(outcomes), **share, "survivors": survivors}
    record = importlib.import_module("benchmarks.shared.record")  # after the last fork: it imports the package
    print(record.write_result("mutations_sample", result))
    return 0


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
    parser.add_argument("--sample", type=int, metavar="N", help="N random edits instead of those of the list")
    parser.add_argument("--seed", type=int, default=0, help="of the random edits; default %(default)s")
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
    if given.sample is not None:
        return sample(campaign, given.sample, given.seed)
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
