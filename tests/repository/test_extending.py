"""docs/extending: its code is that of ``tests/plugin``, all of it, and its tables are the interfaces."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import unigen_ds
import unigen_ds.runner.start.build
from unigen_ds.config import registry
from unigen_ds.config.registry import REGISTRIES
from unigen_ds.families.base import Family
from unigen_ds.hooks.base import Hook, Run, UpdateResult

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "extending").glob("*.md"))
PAGE = "\n".join(path.read_text(encoding="utf-8") for path in PAGES if path.stem != "unified_model")
PACKAGE = sorted((ROOT / "tests" / "plugin").glob("*.py"))
OTHERS = [
    ROOT / "tests" / "plugin_text" / "numbers.py",
    ROOT / "tests" / "end_to_end" / "data" / "own_format.py",
    ROOT / "tests" / "data" / "datasets" / "test_filters.py",
    ROOT / "tests" / "hooks" / "mmengine_hooks_config.py",
    ROOT / "tests" / "end_to_end" / "own_parts" / "own_registered.py",
    ROOT / "tests" / "end_to_end" / "own_parts" / "test_own_parts.py",
    ROOT / "tests" / "end_to_end" / "own_parts" / "own_checks.py",
    ROOT / "unigen_ds" / "examples" / "emoji" / "model.py",
]
MOST_LINES = 300


@cache
def blocks() -> list[str]:
    """Without those that ``test_own_model.py`` and ``test_text_metrics.py`` run."""
    every = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [block for block in every if "class MeanLength" not in block]


def contains(text: str, block: str) -> bool:
    """Whether a block is a run of whole lines of a file."""
    return f"\n{block}" in f"\n{text}"


def test_every_block_is_code_that_runs() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (*PACKAGE, *OTHERS)]
    assert len(blocks()) > 20
    assert [block for block in blocks() if not any(contains(text, block) for text in texts)] == []


def test_the_whole_package_is_on_the_page() -> None:
    """Besides docstrings of modules and imports of ``unigen_ds``, torch and Python."""
    for path in PACKAGE:
        text = path.read_text(encoding="utf-8")
        rest = text
        for block in sorted(blocks(), key=len, reverse=True):
            rest = rest.replace(block, "")
        kinds = [type(node) for node in ast.parse(rest).body]
        assert set(kinds) <= {ast.Import, ast.ImportFrom, ast.Expr} and kinds.count(ast.Expr) <= 1, (path, rest)


def test_the_package_is_small_and_the_page_tells_its_size() -> None:
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE) <= MOST_LINES
    assert f"({MOST_LINES} lines)" in PAGE


def test_nothing_of_the_package_is_known_to_unigen_ds() -> None:
    names = {"tests.plugin", "RowsNetwork", "NumbersLM", "RowsFile", "SoftSign", "LowestLossHook"}
    for path in [*(ROOT / "unigen_ds").rglob("*.py"), *(ROOT / "tools").glob("*.py")]:
        text = path.read_text(encoding="utf-8")
        assert not [name for name in names if name in text], path


def rows(heading: str) -> list[str]:
    """First cells of the table below a line that contains ``heading``."""
    table = PAGE.split(heading)[1].split("|---", 1)[1]
    lines = re.match(r"[^\n]*\n((?:\|[^\n]*\n)+)", table)
    assert lines is not None
    return [re.findall(r"`([^`]+)`", line.split("|")[1])[0].split("(")[0] for line in lines[1].splitlines()]


def public(cls: type) -> set[str]:
    """Own members and annotations without an underscore."""
    return {name for name in (*vars(cls), *vars(cls).get("__annotations__", {})) if not name.startswith("_")}


def test_every_registry_is_in_the_table() -> None:
    names = {name for name, value in vars(registry).items() if any(value is each for each in REGISTRIES)}
    assert set(rows("| registry")) == names


def test_every_method_of_a_hook_is_in_the_table_with_its_arguments() -> None:
    assert set(rows("| method | arguments besides")) == public(Hook) - {"name", "priority", "state_attributes"}
    for line in re.findall(r"^\| `\w+` \|.*$", PAGE.split("| method | arguments besides")[1], re.MULTILINE):
        name, arguments = re.findall(r"`([^`]+)`", line)[0], line.split("|")[2]
        method = getattr(Hook, name, None)
        if method is None:
            break  # the next table
        annotations = {key: hint for key, hint in method.__annotations__.items() if key != "return"}
        assert ("run" not in annotations) == ("no `run`" in arguments), name
        annotations.pop("run", None)
        hints = re.findall(r"`(.+?)`", arguments.replace("(no `run`)", ""))
        assert ", ".join(f"{key}: {hint}" for key, hint in annotations.items()) == ", ".join(hints), name


def test_everything_that_a_run_offers_is_in_the_table() -> None:
    assert set(rows("| member | type")) == public(Run)


def test_everything_of_a_family_is_in_the_table() -> None:
    assert set(rows("| attribute or method")) == public(Family)


def test_every_field_of_an_update_is_named() -> None:
    section = PAGE.split("`UpdateResult` is the same")[1].split("\n\n")[0]
    assert set(UpdateResult.__dataclass_fields__) <= set(re.findall(r"`(\w+)`", section))


def test_every_name_is_imported_from_the_package_itself() -> None:
    for path in (*PACKAGE, *(other for other in OTHERS if other.stem in ("numbers", "own_format"))):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("unigen_ds"):
                assert node.module == "unigen_ds", (path, node.lineno)


def test_every_public_name_is_there() -> None:
    names = [name for text in unigen_ds.PUBLIC.values() for name in text.split()]
    assert len(names) > 90 and len(set(names)) == len(names)
    assert [name for name in names if getattr(unigen_ds, name, None) is None] == []
    assert set(names) <= set(dir(unigen_ds))
    with pytest.raises(AttributeError, match="'unigen_ds' has no attribute 'Runnr'"):
        unigen_ds.Runnr  # noqa: B018
