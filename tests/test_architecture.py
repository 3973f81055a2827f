"""The architecture: imports of lower layers only, small folders and files, engines named in ``backends`` only.

The layers are those of ``docs/architecture.md``. A module may import its own package, and packages of lower layers.
Imports inside functions count as well: they are dependencies, too. Tests mirror the package.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import run
from tests.text_run import text_config, words
from tests.tiny import tiny_config
from tools import evaluate, generate, inspect_data, plan, resume
from tools.train import main
from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.config import overrides
from unigen_ds.config.section import Component
from unigen_ds.evaluation.scoring import Validation
from unigen_ds.optim import optimizer
from unigen_ds.runner import Runner
from unigen_ds.runner.settings import tree as settings_tree
from unigen_ds.runner.settings.tree import Settings, load_config, load_settings
from unigen_ds.runner.start import build

ROOT = Path(__file__).resolve().parents[1]
LAYERS = {
    "core": 1,
    "system": 2,
    "config": 3,
    "optim": 4, "models": 4, "data": 4, "schedule": 4, "tracking": 4, "migration": 4,
    "backends": 5,
    "inference": 6,
    "families": 7,
    "checkpoint": 8,
    "evaluation": 9,
    "report": 10,
    "hooks": 11, "resume": 11,
    "runner": 12, "examples": 12,
    "checks": 13, "app": 13,
    "tools": 14,
}  # fmt: skip
ENGINES = {"deepspeed", "fsdp", "single"}
PER_FOLDER = {"families", "examples"}
"""Packages whose folders all have the same modules."""
COMPONENTS = {
    "unigen_ds.data.sources.find", "unigen_ds.tracking.settings", "unigen_ds.evaluation.metrics",
}  # fmt: skip
"""Modules that import components to register them, a file each."""
SOURCES = sorted([*(ROOT / "unigen_ds").rglob("*.py"), *(ROOT / "tools").glob("*.py")])
FACADE = ROOT / "unigen_ds" / "__init__.py"


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def package_of(module: str) -> str:
    """``unigen_ds.data.order.order`` -> ``data``; a tool -> ``tools``; the package itself -> ``''``."""
    parts = module.split(".")
    if parts[0] in ("tools", "unigen_ds_tools"):
        return "tools"
    return parts[1] if len(parts) > 1 else ""


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in SOURCES}


def imports_of(path: Path, *, within: ast.AST | None = None) -> Iterator[tuple[str, int]]:
    """The modules of the project that a file imports; ``from unigen_ds.system import dist`` is system.dist."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in ast.walk(within or tree(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - (node.level - 1)]
                base = ".".join([*above, base]).rstrip(".")
            names = [f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base for a in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] in ("unigen_ds", "tools", "unigen_ds_tools"):
                yield name, node.lineno


def test_imports_run_downwards() -> None:
    wrong = []
    for path in SOURCES:
        here = package_of(module_of(path))
        if path == FACADE:  # it imports lazily, in a function
            assert not any(
                list(imports_of(path, within=one)) for one in tree(path).body if "Import" in type(one).__name__
            )
            continue
        assert here in LAYERS, f"{label(path)} is in no layer: {sorted(LAYERS)}"
        for name, line in imports_of(path):
            there = package_of(name)
            of_the_package = there == "" and here in ("tools", "runner", "checkpoint")
            if there != here and not of_the_package and LAYERS.get(there, 99) >= LAYERS[here]:
                wrong.append(f"{label(path)}:{line} imports {name} of layer {LAYERS.get(there)}, which is not lower")
    assert wrong == []


def test_no_circles_among_modules() -> None:
    graph = {
        name: {target for target, _ in imports_of(path) if target in MODULES and target != name}
        for name, path in MODULES.items()
        if path != FACADE
    }
    checked_names: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, "circle: " + " -> ".join([*trail[trail.index(name) :], name])
        if name in checked_names:
            return
        for target in sorted(graph.get(name, ())):
            visit(target, (*trail, name))
        checked_names.add(name)

    for name in sorted(graph):
        visit(name, ())


MOST_MODULES = 15
"""In one folder."""
SHORT, LONG = 130, 400
"""A module of fewer lines than ``SHORT`` that one module of its folder alone imports is part of it, up to ``LONG``."""


def test_folders_are_small() -> None:
    sources = [*SOURCES, *(ROOT / "tests").rglob("*.py")]
    folders = Counter(path.parent for path in sources if path.stem not in ("__init__", "conftest", "_path"))
    assert {label(folder): number for folder, number in folders.items() if number > MOST_MODULES} == {}


def test_a_short_module_of_one_other_is_part_of_it() -> None:
    importers: dict[str, set[str]] = {name: set() for name in MODULES}
    for name, path in MODULES.items():
        for target, _ in imports_of(path):
            if target in MODULES and target != name:
                importers[target].add(name)

    def lines(name: str) -> int:
        return len(MODULES[name].read_text(encoding="utf-8").splitlines())

    parts = []
    for name, users in importers.items():
        folder, _, stem = name.rpartition(".")
        if len(users) != 1 or lines(name) >= SHORT or package_of(name) in PER_FOLDER or stem == "settings":
            continue
        (user,) = users
        if user.rpartition(".")[0] == folder and user not in COMPONENTS and lines(name) + lines(user) <= LONG:
            parts.append(f"{name} -> {user}")
    assert parts == []


def test_tests_mirror_the_package() -> None:
    """``tests/<package>/test_<module>[_<aspect>].py``; what a user does from end to end is in ``tests/end_to_end``."""
    others, wrong = ("end_to_end", "fake_cuda", "repository", "support"), []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        folder = path.relative_to(ROOT / "tests").parent
        if not folder.parts or folder.parts[0] in others:
            continue
        package = ROOT / "tools" if folder.parts == ("tools",) else ROOT / "unigen_ds" / folder
        names = {module.stem for module in package.glob("*.py")} | {inner.name for inner in package.glob("*/")}
        if not any(f"{path.stem}_".startswith(f"test_{name}_") for name in names):
            wrong.append(label(path))
    assert wrong == [], "name a test by its module, or put it into tests/end_to_end"


def test_every_folder_of_the_package_is_in_the_table_of_tests() -> None:
    table = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    assert [name for name in LAYERS if f"`{name}/`" not in table] == []


DELETED_IN = "unigen_ds/system/files.py"
"""The one module that deletes folders: ``delete_inside``."""


def deleted_folders(source: ast.AST) -> list[int]:
    """Lines that name a function which deletes folders."""
    names = {"rmtree", "rmdir", "removedirs"}
    fields = {ast.Attribute: "attr", ast.Name: "id", ast.alias: "name"}
    nodes = [node for node in ast.walk(source) if type(node) in fields]
    return [node.lineno for node in nodes if getattr(node, fields[type(node)]) in names]  # type: ignore[attr-defined]


def test_folders_are_deleted_in_one_function() -> None:
    """By ``delete_inside(path, folder of the run)``."""
    lines = {label(path): deleted_folders(tree(path)) for path in SOURCES}
    assert [name for name, numbers in lines.items() if numbers] == [DELETED_IN] and len(lines[DELETED_IN]) == 1


def engine_names(node: ast.AST) -> set[str]:
    strings = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return {text for text in strings if text.lower() in ENGINES}


def branches_on_engines(source: ast.AST) -> list[int]:
    """Lines of comparisons, ``match`` cases and ``startswith`` calls with an engine's name."""
    lines = []
    for node in ast.walk(source):
        condition = (
            isinstance(node, (ast.Compare, ast.MatchValue))
            or (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith")
        )  # fmt: skip
        if condition and engine_names(node):
            lines.append(node.lineno)  # type: ignore[attr-defined]
    return lines


def test_no_branch_on_an_engines_name() -> None:
    """Ask the backend, or use a registry."""
    paths = [path for path in SOURCES if package_of(module_of(path)) != "backends" and path.stem != "build"]
    assert {label(path): lines for path in paths if (lines := branches_on_engines(tree(path)))} == {}


def test_every_package_has_an_init() -> None:
    """Without one it would not be in the wheel; ``configs`` is data, and an init would be listed as a config."""
    folders = {path.parent for path in SOURCES if path.is_relative_to(ROOT / "unigen_ds")}
    missing = [label(f) for f in sorted(folders) if f.name != "configs" and not (f / "__init__.py").exists()]
    assert not missing, missing
    assert not (ROOT / "unigen_ds" / "configs" / "__init__.py").exists()


# ---- wording ---------------------------------------------------------------------------------------------------------
# Everything from here on contains the words itself and is not searched.

PLAIN_TEXT = (
    "README.md", "docs/**/*.md", "benchmarks/*.md", "benchmarks/**/*.py", "tools/*.py", "tests/*.py",
    "tests/checkpoint/**/*.py", "tests/data/**/*.py", "tests/hooks/**/*.py", "tests/models/*.py", "tests/optim/*.py",
    "tests/schedule/*.py", "tests/support/*.py", "tests/repository/*.py", "tests/*.md", "tests/golden/*.md",
    "unigen_ds/**/*.py", "ds_configs/*.json", "setup.py", "pyproject.toml", "Makefile", ".ci/run",
)  # fmt: skip
"""Files in which the words must not occur."""
BANNED = {
    r"(?i)(?<![.\w])floors?\b(?!\()|\bwings?\b": "layer, package",
    r"(?i)\brooms?\b|\bhouse\b": "space, memory, package",
    r"(?i)\b(?:said|told|tells?|says)\b(?!\()": "reported, stated, has the message",
    r"(?i)\b(?:lies|stands?|stood)\b": "is",
    r"(?i)\bin front of\b|\bbehind\b": "before, after",
    r"(?i)\bbecom(?:es?|ing) of\b": "how ... changes",
    r"(?i)\b(?:go|goes|going|went|gone) on\b": "continue, resume",
    r"(?i)\bhand(?:s|ed|ing)?[ -](?:it |them )?(?:over|back)\b": "pass, return",
    r"(?i)\bjudg(?:e|es|ed|ing)\b|\boracles?\b": "reference, classifier, check",
    r"(?<!in )(?<!in-)(?<![.])\bplaces?\b(?!\()": "position, index, folder",
    r"(?i)\b(?:a|an|the|any|each|every|another|its) cuts?\b|\bcuts? of\b": "split, part, truncation",
    r"(?i)\b(?:gives|gave)\b": "returns, has",
    r"(?i)\b(?:takes|took)\b(?! effect| part)": "accepts, needs, loads",
}  # fmt: skip
"""Regular expression -> what to write instead."""
MESSAGES = {
    "tests/schedule/test_schedule.py": ("which has no place",),
    "unigen_ds/config/registry.py": ('("place", "evaluate")',),
    "unigen_ds/evaluation/metrics/text_metrics.py": ('"floor"',),
    "unigen_ds/examples/digits/report_hook.py": ('"judge": f"sklearn',),
}  # fmt: skip
"""File -> messages and headings of ``unigen_ds`` that it quotes (deleted when it is rewritten), and fixed names."""


def banned_words(text: str) -> Iterator[str]:
    """``line: word (what to write instead)`` for each."""
    for number, line in enumerate(text.splitlines(), start=1):
        for pattern, instead in BANNED.items():
            for match in re.finditer(pattern, line):
                yield f"{number}: {match[0]!r} (write: {instead})"


def test_no_banned_word_occurs() -> None:
    paths = {path for pattern in PLAIN_TEXT for path in ROOT.glob(pattern)}
    assert len(paths) > 100
    problems = []
    for path in sorted(paths):
        text = path.read_text(encoding="utf-8")
        if path == Path(__file__).resolve():
            text = text.partition("# ---- wording")[0]
        for message in MESSAGES.get(label(path), ()):
            assert message in text, f"{label(path)} no longer quotes {message!r}: delete it from MESSAGES"
            text = text.replace(message, "")
        problems += [f"{label(path)}:{problem}" for problem in banned_words(text)]
    assert not problems, "\n".join(problems)


PARTICIPLES = re.compile(
    "asked|begun|built|chosen|counted|done|drawn|ended|filled|found|given|held|kept|known|listed|made|merged|named|planned|said"
    "|saved|seen|shown|skipped|spent|stored|written"
)
DOCUMENTED = {
    "checks/dry_run": {"known"}, "core/batch.py": {"skipped"}, "data/order/order.py": {"drawn"},
    "data/samples": {"drawn", "skipped"}, "families/auto/batch.py": {"skipped"}, "hooks/base.py": {"done"},
    "checks/memory/traced.py": {"built", "held"}, "runner/loop/runner.py": {"done"}, "schedule/curves.py": {"given"},
    "tests/plugin": {"skipped"}, "tests/end_to_end/own_parts": {"known"},
}  # fmt: skip
"""Start of a path -> names of ``docs/extending``, and keys of files, that are participles."""


def test_names_say_what_a_thing_is() -> None:
    """No variable, function or class is called by what was done to it (``found``, ``given``)."""
    problems = []
    for path in (path for folder in ("unigen_ds", "tools", "tests") for path in (ROOT / folder).rglob("*.py")):
        name_of = label(path).removeprefix("unigen_ds/")
        exceptions = set[str]().union(*(names for start, names in DOCUMENTED.items() if name_of.startswith(start)))
        for node in ast.walk(tree(path)):
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.FunctionDef(name=name):
                    if PARTICIPLES.fullmatch(name.strip("_")) and name not in exceptions:
                        problems.append(f"{label(path)}:{node.lineno} {name}")
    assert not problems, problems


def test_no_two_modules_have_a_function_or_class_of_one_name() -> None:
    modules: dict[str, list[str]] = defaultdict(list)
    for path in (path for path in SOURCES if label(path).startswith("unigen_ds/")):
        for node in tree(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(label(path))
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}


_SOURCES = (".py", ".toml", ".c", ".cpp")
MOST_LINES = {"unigen_ds": 43_000, "tests": 43_100}
"""A change of these limits, and of those below, needs a sentence in ``docs/decisions.md``."""
MOST_ENTERED = {
    "load_config": 20,
    "a record on its way to a packed row": 15,
    "a save, from the copy to the commit": 20,
    "a save with what hooks do before and after it": 42,
    "a restore": 18,
}
"""Modules that a journey may enter (``tests/journeys.py``)."""


@pytest.mark.parametrize("folder", MOST_LINES)
def test_the_size_stays(folder: str) -> None:
    lines = sum(
        len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / folder).rglob("*")
        if path.suffix in _SOURCES
    )
    assert lines <= MOST_LINES[folder], f"{lines} lines: delete before you add"


def test_asynchronous_saving_is_in_few_modules() -> None:
    names = re.compile(r"Background(Writer)?\b|async_save|async_busy|finish_save")
    modules = [label(path) for path in SOURCES if names.search(path.read_text(encoding="utf-8"))]
    assert len(modules) <= 5, modules


def test_that_there_may_be_several_sets_of_validation_data_is_known_to_few_modules() -> None:
    """``Validation`` gives its sets to nobody, so a module that asks for them is one of these."""
    names = re.compile(r"\._?sets\b|is_several|ValidationSet")
    modules = [label(path) for path in SOURCES if names.search(path.read_text(encoding="utf-8"))]
    assert len(modules) <= 3, modules
    assert not {"__iter__", "__getitem__"} & {*vars(Validation)}
    attributes = {name for name in vars(Validation) if not name.startswith("_")}
    questions = {"main_loss", "batch_size", "num_batches", "check", "check_name", "provenance"}
    assert attributes == {"start_lines", "evaluate", *questions}


def test_journeys_enter_few_modules() -> None:
    process = run([sys.executable, "-m", "tests.journeys", "--json"], cwd=ROOT, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    journeys = json.loads(process.stdout.splitlines()[-1])
    assert {name: len(modules) for name, modules in journeys.items() if len(modules) > MOST_ENTERED[name]} == {}
    packages = ("hooks/", "data/", "families/", "backends/", "schedule/", "tracking/", "evaluation/")
    of_components = {name: calls for name, calls in journeys["load_config"].items() if name.startswith(packages)}
    assert [name for name, calls in of_components.items() if {"__init__", "__post_init__"} & {*calls}] == []


def test_a_start_checks_and_translates_a_config_once_and_builds_no_component_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the tools, from a loaded config and from a mapping. A checkpoint's config is translated already."""
    config = tiny_config(tmp_path / "run", tmp_path / "digits")
    import_module("unigen_ds.examples.digits")
    config.val_dataloader = {"split": 0.1}
    config.custom_imports = {}  # what a module registers is known only when it is imported
    config.dump(str(tmp_path / "config.py"))
    name, checkpoint = str(tmp_path / "config.py"), str(tmp_path / "run" / "iter_1.pth")
    functions = ((Settings, "model_validate"), (settings_tree, "translate"), (overrides, "translate"))
    counts = counted_calls(monkeypatch, *functions, (Component, "build"))
    starts: dict[str, Callable[[], object]] = {
        "settings": lambda: load_settings(name),
        "tool": lambda: main([name, "--max-updates", "1"]),
        "loaded": lambda: Runner.from_cfg(load_config(name, {"work_dir": str(tmp_path / "a")}), max_updates=1),
        "mapping": lambda: Runner.from_cfg({**config.to_dict(), "work_dir": str(tmp_path / "b")}, max_updates=1),
        "printed": lambda: main([name, "--print-config"]),
        "dry run": lambda: main([name, "--dry-run"]),
        "resume": lambda: resume.main([name]),
        "plan": lambda: plan.main([name, "--only"]),
        "inspect": lambda: inspect_data.main([name]),
        "evaluate": lambda: evaluate.main([checkpoint, "--max-batches", "1"]),
        "generate": lambda: generate.main(
            [checkpoint, "--prompt", "1", "--out", str(tmp_path / "out"), "--num-timesteps", "2"]
        ),
    }
    expected = {"evaluate": (1, 0), "generate": (0, 0)}  # to generate, the model's sections alone are read
    for title, start in starts.items():
        counts.clear()
        start()
        assert (counts["model_validate"], counts["translate"]) == expected.get(title, (1, 1)), (title, counts)
        if title in ("settings", "printed"):
            assert counts["build"] == 0, title


def counted_calls(monkeypatch: pytest.MonkeyPatch, *functions: tuple[object, str]) -> Counter[str]:
    """How often each ``(owner, name)`` is called from here on; of a function with a path, for each path."""
    calls: Counter[str] = Counter()
    for owner, name in functions:
        original = getattr(owner, name)

        def call(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
            path = f" {args[0].name}" if args and isinstance(args[0], Path) else ""
            calls[name + path] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)
    return calls


@pytest.mark.parametrize("resume", [True, "iter_2.pth"], ids=["the newest", "by name"])
def test_a_resume_lists_reads_and_verifies_checkpoints_once(tmp_path, monkeypatch, resume):
    def run(updates: int, **changes: object) -> None:
        config = text_config(tmp_path, [{"text": words(4, k)} for k in range(8)], **changes)
        Runner.from_cfg(config, max_updates=updates).train()

    saves = {"default_hooks__checkpoint": {"interval": 1, "by_epoch": False}}
    run(2, **saves)
    read, original = Counter[str](), Manifest.read

    def reading(directory: Path) -> Manifest:
        read[directory.name] += 1
        return original(directory)

    monkeypatch.setattr(Manifest, "read", reading)
    calls = counted_calls(monkeypatch, (store, "list_checkpoints"), (store, "verify"), (store, "file_digest"))
    choice = resume if resume is True else str(tmp_path / "run" / resume)
    run(2, **saves, resume=choice)  # nothing is left to train: no save
    newest = store.Manifest.read(tmp_path / "run" / "iter_2.pth")
    read["iter_2.pth"] -= 1
    assert read == {"iter_1.pth": 1, "iter_2.pth": 1}
    files = Counter(Path(entry.path).name for entry in newest.files)
    expected = {"list_checkpoints run": 1, "verify iter_1.pth": 1, "verify iter_2.pth": 2}  # sizes, then content
    assert calls == {**expected, **{f"file_digest {name}": number for name, number in files.items()}}


def test_no_optimizer_and_no_model_is_built_to_be_thrown_away(tmp_path, monkeypatch):
    settings = Settings.from_config(text_config(tmp_path, [{"text": words(4, k)} for k in range(8)]))
    builders = ((optimizer, "construct"), (build, "build_model"))
    calls = counted_calls(monkeypatch, *builders)
    Runner.from_cfg(settings).backend.close()
    assert calls == {"construct": 1, "build_model": 1}
