"""docs/migrating has every name of the five old guides, and what it names here exists."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from tests.repository.old_names import GUIDES, ROOT, SOURCE, old_names, rows_of
from tests.repository.test_docs import components
from tools import (
    checkpoints,
    evaluate,
    export,
    generate,
    inspect_data,
    migrate,
    plan,
    report,
    resume,
    train,
    zero_to_fp32,
)
from unigen_ds.config.file import shipped_configs
from unigen_ds.core.choices import GUIDES as CHOICES
from unigen_ds.runner.settings.tree import known_keys

FOLDER = ROOT / "docs" / "migrating"
INDEX = (FOLDER / "index.md").read_text(encoding="utf-8")
TOOLS = (checkpoints, evaluate, export, generate, inspect_data, migrate, plan, report, resume, train, zero_to_fp32)
CODE = re.compile(r"`([^`]+)`")


@pytest.mark.skipif(not SOURCE.is_file(), reason="the list itself is where the project is developed")
def test_the_table_has_the_names_of_the_list() -> None:
    assert old_names() == rows_of(SOURCE.read_text(encoding="utf-8"))


@cache
def rows(guide: str) -> list[tuple[str, str]]:
    """(there, here) of each row in the guide's page."""
    page = (FOLDER / f"{guide}.md").read_text(encoding="utf-8")
    lines = [line.replace(r"\|", "\0") for line in page.splitlines() if line.startswith("| ")]
    cells = [[cell.replace("\0", "|").strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    assert all(len(row) == 2 for row in cells), [row for row in cells if len(row) != 2]
    return [(row[0], row[1]) for row in cells if row[1] != "here"]


def has(cell: str, name: str) -> bool:
    """Whether a cell has a name: as code, or in its text."""
    text = CODE.sub("", cell)
    return name in CODE.findall(cell) or re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None


@pytest.mark.parametrize("section", GUIDES)
def test_every_name_is_on_the_page(section: str) -> None:
    names = [name for s, _, name in old_names() if s == section]
    missing = [name for name in names if not any(has(there, name) and here for there, here in rows(GUIDES[section]))]
    assert not missing, missing
    assert len(names) > 60


def test_the_guides_are_those_of_the_tool() -> None:
    assert [*GUIDES.values()] == [*CHOICES] and set(re.findall(r"^\| \[`(\w+)`\]\(", INDEX, re.M)) == {*CHOICES}


def codes() -> list[str]:
    return [code for guide in CHOICES for _, cell in rows(guide) for code in CODE.findall(cell)]


def test_keys_that_the_page_names_exist() -> None:
    """Dotted keys that begin with a section of a config."""
    schema = known_keys()
    names = {code for text in codes() for code in re.findall(r"(?<![\w/.'-])[a-z_]+(?:\.\w+)+", text)}
    keys = [key for key in names if key.split(".")[0] in schema and not key.endswith((".md", ".py", ".sh", ".jsonl"))]
    assert len(keys) > 50
    unknown = [key for key in keys if not is_known(key.split("."), schema)]
    assert not unknown, unknown


ARGUMENTS = {
    "dataset", "packing", "backend", "model", "tokenizer", "checkpoint", "logger", "optimizer", "pretrained", "groups",
    "param_scheduler", "vis_backends", "processor",
}  # fmt: skip
"""Keys below which a component or a list has keys of its own."""


def is_known(path: list[str], schema: Mapping[str, Any]) -> bool:
    """Whether a config has the key; that of a component is an argument of one of them."""
    node: Any = schema
    for number, step in enumerate(path):
        if isinstance(node, Mapping) and step in node:
            node = node[step]
        else:
            rest = [part for part in path[number:] if not part.isdigit()]
            every = {name for cls in components().values() for name in arguments(cls)}
            return path[number - 1] in ARGUMENTS and all(
                part in every | {"type", "lr", "llm", "vit", "vae"} for part in rest
            )
    return True


@cache
def arguments(cls: type) -> tuple[str, ...]:
    import inspect

    return tuple(inspect.signature(cls).parameters)


def test_components_files_and_options_that_the_page_names_exist() -> None:
    names = {
        match for text in codes() for match in re.findall(r"type='([A-Za-z]+)'|^([A-Z]\w+(?:Hook|Backend))\(", text)
    }
    flat = {one for pair in names for one in pair if one and not one.startswith("My")}
    assert len(flat) >= 15 and not flat - {*components(), "deepspeed", "fsdp", "huggingface", "AdamW"}
    files = {
        match for text in codes() for match in re.findall(r"(?:tools|scripts|docs|unigen_ds|benchmarks)/[\w/.]+", text)
    }
    assert len(files) > 15 and [name for name in files if not (ROOT / name).exists()] == []
    recipes = {match for text in codes() for match in re.findall(r"tools/train\.py (\w+_\w+)$", text)}
    assert not recipes - {*shipped_configs()} - {"my_config"}
    options = {option for tool in TOOLS for action in tool.parser()._actions for option in action.option_strings}
    keys = {
        match
        for text in codes()
        for command in re.findall(r"(?:tools/\w+\.py|^)( .*|--.*)", text)
        for match in re.findall(r"(?<!\S)--[a-z][\w-]*", command)
    }
    launchers = {"--nproc_per_node", "--nnodes", "--node_rank", "--master_addr", "--master_port"}
    launchers |= {"--lr_scheduler"}  # a flag of an old trainer
    assert len(keys) > 6 and not keys - options - launchers, keys - options
