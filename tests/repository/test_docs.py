"""The documentation agrees with the code: every key and argument with its default, every requirement, every link."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from tests.test_architecture import LAYERS
from tools import train
from unigen_ds.config.paths import ds_configs_dir
from unigen_ds.core import errors
from unigen_ds.families.bagel.family import Bagel
from unigen_ds.families.base import Family
from unigen_ds.families.nanovlm.family import NanoVLM
from unigen_ds.runner.settings.tree import known_keys

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted(path for path in (ROOT / "docs").rglob("*.md") if "samples" not in path.parts)
PAGES = sorted([*ROOT.glob("*.md"), *DOCS, *ROOT.glob("tests/golden/*.md"), *ROOT.glob("benchmarks/*.md")])
CONFIG_PAGES = sorted((ROOT / "docs" / "configs").glob("*.md"))
CONFIGS = "\n".join(path.read_text(encoding="utf-8") for path in CONFIG_PAGES)
README = (ROOT / "README.md").read_text(encoding="utf-8")
REQUIREMENTS = (ROOT / "docs" / "requirements.md").read_text(encoding="utf-8")
COUNTS = {"S0.": 33, "S1.": 37, "S2.": 34, "S3.": 34, "S4.": 68, "B": 12, "N": 40}


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# --- docs/configs -------------------------------------------------------------------------------------------------


def schema_keys() -> Iterator[str]:
    """Every valid key, at every depth."""

    def walk(prefix: str, level: Mapping[str, Any]) -> Iterator[str]:
        for key, inner in level.items():
            yield prefix + key
            if isinstance(inner, Mapping):
                yield from walk(f"{prefix}{key}.", inner)

    return walk("", known_keys())


def test_every_key_is_explained() -> None:
    headings = " ".join(re.findall("^# .*", CONFIGS, re.MULTILINE))
    assert [key for key in schema_keys() if f"`{key}`" not in CONFIGS and f"`{key}`" not in headings] == []


@cache
def generate() -> ModuleType:
    """``docs/generate.py``."""
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_keys_are_those_of_the_settings() -> None:
    """``make docs`` writes them."""
    assert "\n".join(map(generate().updated, CONFIG_PAGES)) == CONFIGS, "run make docs"
    assert CONFIGS.count("<!-- keys: ") == 8 and "`train_dataloader.seq_length` | `4096`" in CONFIGS


def test_the_table_of_a_component_is_generated() -> None:
    """Of every one that has arguments, once, below its own heading; where two have the same, of the first."""
    page = generate()
    expected = {name for name, cls in components().items() if page.arguments(cls) and not page.is_repeated(cls)}
    expected |= {"Curve", "processor of UnifiedModel", "processor of VLM"}
    assert sorted(re.findall("<!-- arguments: (.+?) -->", CONFIGS)) == sorted(expected)
    assert len(expected) > 25


def test_no_key_is_explained_that_is_not_there() -> None:
    """Those of ``model`` are generated from the sections of its arguments."""
    keys = set(re.findall(r"^\| `((?!model\.)[a-z_]+(?:\.[a-z_]+)+)` \|", CONFIGS, re.MULTILINE))
    assert len(keys) > 30 and keys <= set(schema_keys()), keys - set(schema_keys())


def components() -> dict[str, type]:
    """Every class of this package that a config can name."""
    return dict(generate().components())


def missing_keys(cls: type) -> set[str]:
    """Arguments that the docstring's section ``Args:`` does not explain."""
    return set(inspect.signature(cls).parameters) - set(generate().meanings(cls))


@pytest.mark.parametrize("name", sorted(components()))
def test_every_argument_of_a_component_has_a_meaning(name: str) -> None:
    missing = missing_keys(components()[name])
    assert not missing, f"the docstring of {name} has no {', '.join(sorted(missing))} in its section Args"


@pytest.mark.parametrize("family", [Bagel(), NanoVLM()], ids=lambda family: type(family).__name__)
def test_every_argument_of_a_processor_has_a_meaning(family: Family) -> None:
    assert not missing_keys(family.processor_arguments())


def test_every_deepspeed_preset_is_named_and_leaves_to_the_config_what_is_the_configs() -> None:
    presets = sorted(ds_configs_dir().glob("*.json"))
    assert {"zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"} <= {path.stem for path in presets}
    for path in presets:
        assert f"`{path.stem}`" in CONFIGS
        content = json.loads(path.read_text(encoding="utf-8"))
        assert not {"optimizer", "scheduler", "train_batch_size"} & set(content), path.name
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"):
            assert content[key] == "auto", (path.name, key)


# --- docs/requirements.md -----------------------------------------------------------------------------------------


def requirement_rows() -> dict[str, str]:
    rows = re.findall(r"^\| ((?:S\d\.|B|N)\d+) \| .+? \| (.+) \|$", REQUIREMENTS, re.MULTILINE)
    assert len(rows) == len(dict(rows)), "an id occurs twice"
    return dict(rows)


def test_every_requirement_has_its_row() -> None:
    expected = {f"{prefix}{number}" for prefix, count in COUNTS.items() for number in range(1, count + 1)}
    assert set(requirement_rows()) == expected


@cache
def functions(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_what_shows_a_requirement_exists() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    wrong = []
    for row, evidence in requirement_rows().items():
        names = re.findall(r"`((?:tests|make|tools)\b[^`]*)`", evidence)
        assert names or re.search(r"open: (issue \d|later)", evidence), f"{row} is neither shown nor open"
        for name in names:
            path, _, function = name.split(" ")[0].partition("::")
            there = (ROOT / path).exists() and (not function or function in functions(ROOT / path))
            wrong += [] if there or name.removeprefix("make ") in targets else [f"{row}: {name}"]
    assert wrong == []


def test_the_table_of_sharded_training_has_the_numbers_of_the_results() -> None:
    text = (ROOT / "docs" / "engines" / "choosing.md").read_text(encoding="utf-8")
    page = text.split("## What sharding costs and saves")[1].split("\n## ")[0]
    (path,) = (ROOT / "benchmarks" / "results").glob("scaling_*.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    cells = re.findall(r"^\| .+ \| (\d) \| ([\d.]+) s \| (\d+) \| ([\d.]+) \| ([\d,]+) MiB \|$", page, re.MULTILINE)
    assert cells == [
        (
            str(row["processes"]),
            f"{row['seconds']:.2f}",
            f"{row['processes'] * record['tokens_per_process'] / row['seconds']:.0f}",
            f"{row['efficiency']['median']:.2f}",
            f"{row['peak'] / 2**20:,.0f}",
        )
        for row in record["rows"].values()
    ]
    assert f"`benchmarks/results/{path.name}`" in page and record["accepted"]


def test_the_tables_of_planned_memory_have_the_numbers_of_the_results() -> None:
    """``python benchmarks/plan_table.py --show FILE`` prints them."""
    spec = importlib.util.spec_from_file_location("plan_table", ROOT / "benchmarks" / "plan_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(os.environ), mock.patch.object(sys, "path", [*sys.path]):
        spec.loader.exec_module(module)
    (path,) = (ROOT / "benchmarks" / "results").glob("plan_table_*.json")
    planning = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    tables = module.page(json.loads(path.read_text(encoding="utf-8")))
    assert tables.count("\n| `") > 3 and tables in planning, f"copy what --show {path.name} prints"
    assert f"`benchmarks/results/{path.name}`" in planning


# --- all pages ----------------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as on the web."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{label(page)} links to {link}"
        assert not anchor or anchor in anchors(path), f"{label(page)} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_commands_and_files_exist(page: Path) -> None:
    """Tools, modules and tests named on a page."""
    for name in re.findall(r"\b((?:tools|unigen_ds|tests|docs)/[\w/]+\.\w+)\b", page.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), f"{label(page)} names {name}"


def test_every_page_and_anchor_that_is_named_exists() -> None:
    """In messages, docstrings and scripts: ``docs/configs/model.md#vlm``, ``docs/extending``."""
    count = 0
    files = [path for top in ("unigen_ds", "tools", "tests", "benchmarks") for path in (ROOT / top).rglob("*.py")]
    for source in files:
        for name in re.findall(r"(?<![\w./])docs/[\w/.#-]*", source.read_text(encoding="utf-8")):
            path, _, anchor = name.rstrip("./").partition("#")
            assert (ROOT / path).exists(), f"{label(source)} names {name}"
            assert not anchor or anchor in anchors(ROOT / path), f"{label(source)} names {name}"
            count += 1
    assert count > 60


MOST_LINES, MOST_WORDS = 150, 58_500
REFERENCE = {"architecture.md", "decisions.md", "requirements.md"}
"""Beside the pages of docs/configs, which are tables: as long as they are."""


def test_how_to_pages_and_all_pages_together_are_short() -> None:
    """Of the words those of the generated tables are not counted."""
    words = 0
    for page in DOCS:
        text = page.read_text(encoding="utf-8")
        words += len(generate()._TABLE.sub("", text).split())
        if page.parent.name != "configs" and page.name not in REFERENCE:
            assert text.count("\n") <= MOST_LINES, f"{label(page)}: divide it by task"
    assert words <= MOST_WORDS, f"{words} words: delete before you add"


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    pages = re.findall(r"- ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(pages) == [path.relative_to(ROOT / "docs").as_posix() for path in DOCS]


# --- docs/architecture.md ---------------------------------------------------------------------------------------------

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def repository_names() -> list[str]:
    """Paths of the project's modules and pages, each with a slash before it."""
    return [f"/{label(path)}" for top in ("unigen_ds", "tools", "tests", "docs", "benchmarks")
            for path in (ROOT / top).rglob("*") if path.suffix in (".py", ".md")]  # fmt: skip


def test_architecture_names_no_file_that_is_not_there() -> None:
    """``core/progress.py``, ``parts.py``: any file of the project whose path ends so."""
    names = set(re.findall(r"(?<![\w/.<>])[\w/.]*\w\.(?:py|md)\b", ARCHITECTURE))
    missing = [name for name in names if not any(path.endswith(f"/{name}") for path in repository_names())]
    assert len(names) > 25 and not missing, missing


def test_the_table_of_the_layers_is_that_of_the_code() -> None:
    table = ARCHITECTURE.split("| layer | package |")[1].split("\n\n")[0]
    rows = {name: int(layer) for layer, name in re.findall(r"^\| (\d+) \| `(\w+)/` \|", table, re.MULTILINE)}
    assert rows == LAYERS


def test_every_exit_status_is_that_of_the_code() -> None:
    """The table: each error class in the row of its status, and no error class is missing."""
    table = ARCHITECTURE.split("## Exit statuses")[1].split("\n## ")[0]
    rows = [(int(status), set(re.findall(r"`(\w+Error|ResumeBlocked)`", error_names)))
            for status, error_names in re.findall(r"^\| (\d+) \| .+? \| (.*?) ?\|$", table, re.MULTILINE)]  # fmt: skip
    classes = {
        name: cls.exit_status
        for name, cls in vars(errors).items()
        if isinstance(cls, type) and issubclass(cls, errors.UnigenError)
        if cls is not errors.UnigenError and cls is not errors.UnknownKey
    }
    classes["SaveError"] = getattr(getattr(errors, "SaveError", None), "exit_status", 4)
    statuses = {name: status for status, names in rows for name in names}
    assert statuses == classes
    assert {status for status, _ in rows} == {0, 1, *classes.values(), train.SIGNAL_STATUS, 128 + signal.SIGKILL}
    for text in (README, train.__doc__ or ""):
        assert set(re.findall(r"(?<![\w.])(\d+) (?=[a-z])", text.split("Exit status:")[1].split("\n\n")[0])) == {
            str(status) for status in (0, 1, *classes.values(), train.SIGNAL_STATUS)
        }
