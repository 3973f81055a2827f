"""Apply each edit of ``tests/mutations.toml`` to a copy of the tree and run the test that must then fail.

::

    python -m tests.mutate [--part K/N] [--minutes M] [--only ID ...] [--tests-passed]
    python -m tests.mutate --sample N [--seed S]

An edit survives if its test passes: then the test, or the claim, is wrong. Exit status: 0 every edit was detected, 1
one survived or has no result, 2 wrong usage. Edits for which ``--minutes`` leaves no time are listed: no failure.

With ``--sample`` the edits are random ones instead, of lines that a module's own tests
(``tests/<package>/test_<module>*.py``) run: a comparison, a constant, a sign, a number that is off by one, a deleted
statement. The share that those tests detect is printed and written to ``benchmarks/results``; nothing fails.

Edits with the same test run one after the other, after one run of the test without an edit: a test that fails then
shows nothing. ``--tests-passed`` omits that run, if the whole suite has just passed."""

from __future__ import annotations

import argparse
import ast
import contextlib
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutations.toml"
TIMEOUT_S = 600.0
"""Of one test. A test that does not end has not failed: it counts as without a result."""
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
    operator: str = ""
    line: int = 0
    """Both of a random edit: then ``find`` is the whole module, and one change of ``operator`` is in ``line``."""

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


def load(path: Path = LIST) -> list[Mutation]:
    """All edits, in the order of the file."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10: installed by pytest
        import tomli as tomllib  # type: ignore[import-not-found,no-redef]
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    return [Mutation(id=name, **{**table, "rows": tuple(table["rows"])}) for name, table in tables.items()]


def part_of(mutations: Sequence[Mutation], part: str) -> list[Mutation]:
    """Part ``K/N``: whole tests, chosen by a hash of their name, so that edits which share a test stay together."""
    number, _, total = part.partition("/")
    if not (number.isdigit() and total.isdigit() and 1 <= int(number) <= int(total)):
        raise SystemExit(f"--part is {part!r}; allowed: K/N with 1 <= K <= N")
    wanted_part = int(number) - 1
    return [m for m in mutations if int(hashlib.blake2b(m.test.encode()).hexdigest(), 16) % int(total) == wanted_part]


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


class Campaign:
    """Tests edits in ``jobs`` copies of the tree at a time and keeps each outcome."""

    def __init__(self, *, jobs: int, minutes: float | None) -> None:
        self.jobs = jobs
        self.until = float("inf") if minutes is None else time.monotonic() + 60 * minutes
        self.outcomes: dict[str, str] = {}

    def run(self, tasks: Sequence[Callable[[Path], None]]) -> None:
        """Call each with a copy of the tree that no other uses meanwhile."""
        free: SimpleQueue[Path] = SimpleQueue()

        def run_one(task: Callable[[Path], None]) -> None:
            folder = free.get()
            try:
                task(folder)
            finally:
                free.put(folder)

        with tempfile.TemporaryDirectory(prefix="mutate-") as scratch, ThreadPoolExecutor(self.jobs) as threads:
            for number in range(self.jobs):
                free.put(tree_copy(Path(scratch) / f"tree{number}"))
            list(threads.map(run_one, tasks))

    def test_edits(self, edits: Sequence[Mutation], folder: Path, *, check: bool) -> None:
        """All edits of one test."""
        if check and (status := run_tests(folder, edits[0].test)[0]) != 0:
            for edit in edits:
                self._record(edit, f"no result: the test without the edit: {_outcome(status)}", "", 0.0)
            return
        for edit in edits:
            if time.monotonic() > self.until:
                return
            start, path = time.monotonic(), folder / edit.file
            source = path.read_text(encoding="utf-8")
            assert edit.find in source, f"{edit.file} has changed since the copy was made"
            path.write_text(source.replace(edit.find, edit.replace), encoding="utf-8")
            try:
                status, output = run_tests(folder, edit.test)
            finally:
                path.write_text(source, encoding="utf-8")
            self._record(edit, _outcome(status), output, time.monotonic() - start)

    def _record(self, edit: Mutation, outcome: str, output: str, seconds: float) -> None:
        self.outcomes[edit.id] = outcome
        print(f"{outcome:<9} {edit.id}  ({seconds:.0f} s, {edit.test})", flush=True)
        if outcome != "detected":
            print("  " + "\n  ".join(output.splitlines()[-15:]), flush=True)


def run_tests(folder: Path, tests: str, *, module: str = "") -> tuple[int | None, str]:
    """pytest's exit status in a copy of the tree, None where it had to be killed, and what was printed. The copy is
    first on the path, also for processes that a test starts. ``module``: a module; the numbers of its lines that the
    tests run are printed last."""
    program = ["-m", "tests.mutate", "--trace", module] if module else ["-m", "pytest"]
    options = ["-q", "-x", "-m", "", "-p", "no:cacheprovider", "--tb=short", *tests.split()]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(folder),
        "ENGINE_JOBS": "needed",  # tests/end_to_end/engines/launch.py
        "PYTHONDONTWRITEBYTECODE": "1",  # two edits within a second have the same timestamp
    }
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    with subprocess.Popen([sys.executable, *program, *options], cwd=folder, env=environment, text=True, **how) as one:
        try:
            output = one.communicate(timeout=TIMEOUT_S)[0]
            return one.returncode, output
        except subprocess.TimeoutExpired:
            os.killpg(one.pid, signal.SIGKILL)
            return None, ""


def _outcome(status: int | None) -> str:
    """``detected``, ``survived``, or the reason for no result, from pytest's exit status."""
    if status is None:
        return f"no result: no end within {TIMEOUT_S:.0f} s"
    return _PYTEST.get(status, f"no result: exit status {status}")


# ---- random edits ----------------------------------------------------------------------------------------------------

_PAIRS = ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot))
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {a: b for x, y in _PAIRS for a, b in ((x, y), (y, x))}


def own_tests(module: str) -> list[str]:
    """The files of tests of one module."""
    path = Path(module)
    folder = ROOT / "tests" / Path(*path.parent.parts[1:])
    names = (f"test_{path.stem}.py", f"test_{path.stem}_*.py")
    return sorted(str(file.relative_to(ROOT)) for name in names for file in folder.glob(name))


def _edit(node: ast.AST) -> tuple[str, str] | None:
    """The operator that fits a node, and the text of the changed node."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=others) if type(operator) in _COMPARISONS:
            new_node = ast.Compare(left, [_COMPARISONS[type(operator)]()], others)
            return "comparison", f"({ast.unparse(new_node)})"
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


def _without_effect(node: ast.AST) -> ast.AST | None:
    """The part of a node that is not edited: an annotation, a text, or what is logged."""
    match node:
        case ast.arg(annotation=part) | ast.FunctionDef(returns=part) | ast.AnnAssign(annotation=part):
            return part
        case ast.JoinedStr() | ast.BinOp(left=ast.Constant(value=str())) | ast.BinOp(right=ast.Constant(value=str())):
            return node
        case (
            ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="logger"))))
            | ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="logger")))))
        ):
            return node
    return None


def random_edits(folder: Path, module: str, tests: str) -> Iterator[Mutation]:
    """All edits of a module by operator, in the copy of the tree in ``folder``."""
    source = (folder / module).read_text(encoding="utf-8")
    text, tree = source.encode(), ast.parse(source)
    begins = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
    parts = [part for node in ast.walk(tree) if (part := _without_effect(node)) is not None]
    left_out = {id(inner) for part in parts for inner in ast.walk(part)}
    for node in ast.walk(tree):
        change = None if id(node) in left_out else _edit(node)
        if change is not None and isinstance(node, (ast.expr, ast.stmt)):
            begin = begins[node.lineno - 1] + node.col_offset
            end = begins[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
            name = f"{module}:{node.lineno}:{node.col_offset} {text[begin:end].decode()} -> {change[1]}"
            new_source = (text[:begin] + change[1].encode() + text[end:]).decode()
            yield Mutation(name, (), module, source, new_source, tests, operator=change[0], line=node.lineno)


def trace(file: str, options: Sequence[str]) -> int:
    """Run pytest in this process and print the lines of one file that it runs, as JSON."""
    import pytest

    path, lines = str(Path(file).resolve()), set[int]()

    def line_of(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            lines.add(frame.f_lineno)
        return line_of

    def call(frame: FrameType, event: str, argument: object) -> Any:
        return line_of if frame.f_code.co_filename == path else None

    threading.settrace(call)
    sys.settrace(call)
    status = int(pytest.main([*options]))
    sys.settrace(None)
    print(f"\n{json.dumps(sorted(lines))}")
    return status


def sample(campaign: Campaign, number: int, seed: int) -> int:
    """Test random edits of modules that have tests of their own, and write the share that these detect."""
    files = subprocess.run(["git", "ls-files", "unigen_ds"], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = [name for name in files.stdout.split() if name.endswith(".py") and own_tests(name)]
    sizes = [len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in modules]
    counts = Counter(random.Random(seed).choices(modules, weights=sizes, k=number))

    def test_module(module: str, folder: Path) -> None:
        tests = " ".join(own_tests(module))
        status, output = run_tests(folder, tests, module=module)
        if status != 0:
            print(f"{module} is left out: its tests without an edit: {_outcome(status)}", flush=True)
            return
        lines = set(json.loads(output.splitlines()[-1]))
        edits = [edit for edit in random_edits(folder, module, tests) if edit.line in lines]
        picks = random.Random(f"{seed} {module}").sample(edits, min(counts[module], len(edits)))
        campaign.test_edits(picks, folder, check=False)

    campaign.run([lambda folder, name=name: test_module(name, folder) for name in counts])  # type: ignore[misc]
    outcomes = {name: outcome.partition(":")[0] for name, outcome in campaign.outcomes.items()}
    totals = Counter(outcomes.values())
    share = {kind: totals[kind] for kind in ("detected", "survived", "no result")}
    survivors = sorted(name for name, outcome in outcomes.items() if outcome == "survived")
    print("\nNot detected:\n  " + "\n  ".join(survivors) if survivors else "")
    total = share["detected"] + share["survived"]
    print(f"\n{share['detected']} of {total} random edits detected ({share['detected'] / max(total, 1):.0%})")
    result = {"sample": number, "seed": seed, "not_run": number - len(outcomes), **share, "survivors": survivors}
    result |= {"share": round(share["detected"] / max(total, 1), 3), "outcomes": dict(sorted(outcomes.items()))}
    print(importlib.import_module("benchmarks.shared.record").write_result("mutations_sample", result))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    if words[:1] == ["--trace"]:
        return trace(words[1], words[2:])
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", default="1/1", help="K/N: only part K of N; default %(default)s")
    parser.add_argument("--minutes", type=float, help="start no further edit after so many minutes")
    parser.add_argument("--only", nargs="+", metavar="ID", help="only these edits")
    parser.add_argument("--list", type=Path, default=LIST, help="the file of the edits; default %(default)s")
    parser.add_argument("--jobs", type=int, default=2, help="edits at a time; default %(default)s")
    parser.add_argument("--tests-passed", action="store_true", help="the tests are known to pass without an edit")
    parser.add_argument("--sample", type=int, metavar="N", help="N random edits instead of those of the list")
    parser.add_argument("--seed", type=int, default=0, help="of the random edits; default %(default)s")
    options = parser.parse_args(words)
    campaign = Campaign(jobs=options.jobs, minutes=options.minutes)
    if options.sample is not None:
        return sample(campaign, options.sample, options.seed)
    mutations = [m for m in part_of(load(options.list), options.part) if not options.only or m.id in options.only]
    wrong = [f"{m.id}: {problem}" for m in mutations if (problem := m.problem()) is not None]
    if wrong:
        parser.error("edits that cannot be applied:\n  " + "\n  ".join(wrong))
    groups: dict[str, list[Mutation]] = {}
    for mutation in mutations:
        groups.setdefault(mutation.test, []).append(mutation)
    check = not options.tests_passed
    campaign.run([lambda folder, group=group: campaign.test_edits(group, folder, check=check)  # type: ignore[misc]
                  for group in groups.values()])  # fmt: skip
    outcomes, waiting = campaign.outcomes, [m.id for m in mutations if m.id not in campaign.outcomes]
    failures = [f"{name}: {outcome}" for name, outcome in outcomes.items() if outcome != "detected"]
    if waiting:
        print(f"\nNot run because of --minutes ({len(waiting)}): {', '.join(waiting)}")
    if failures:
        print("\nNot detected:\n  " + "\n  ".join(failures))
    counts = Counter(outcome.partition(":")[0] for outcome in outcomes.values())
    print(f"\n{counts['detected']} detected, {counts['survived']} survived, {counts['no result']} without a result, "
          f"{len(waiting)} not run")  # fmt: skip
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
