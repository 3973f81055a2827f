"""A config in Python is read without executing it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unigen_ds.core.errors import ConfigError
from unigen_ds.migration.python_file import Computed, Reference, read_python


def read(folder: Path, text: str) -> tuple[dict[str, Any], list[str]]:
    (folder / "config.py").write_text(text, encoding="utf-8")
    return read_python(folder / "config.py")


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("{'x': -0.5, 'y': None}", {"x": -0.5, "y": None}),
        ("dict(a=1, b=[dict(c=(number,))])", {"a": 1, "b": [{"c": (7,)}]}),
        ("{'a': nested, 2: 'b'}", {"a": {"a": [7]}, 2: "b"}),
        ("AdamW", "torch.optim.AdamW"),
        ("torch.bfloat16", "torch.bfloat16"),
        ("nn.functional.relu", "torch.nn.functional.relu"),
        ("second", 2),
    ],
)
def test_values(tmp_path: Path, source: str, value: Any) -> None:
    text = "import torch, os.path\nimport torch.nn as nn\nfrom torch.optim import AdamW\nnumber = 7\n"
    values, others = read(
        tmp_path, f'"""Text."""\n{text}first, second = 1, 2\nnested = dict(a=[number])\nx = {source}\n'
    )
    assert values["x"] == value and not others
    assert isinstance(values["x"], Reference) == (isinstance(value, str)) and values["AdamW"].last == "AdamW"


@pytest.mark.parametrize(
    "source",
    [
        "open('started', 'w').write('x')",
        "__import__('os').system('touch started')",
        "[i for i in range(3)]",
        "unheard_of",
        "'ab' * 10000000",
        "9 ** 9 ** 9",
        "[*[1, 2], 3]",
        "number.real",
        "dict(nested, a=1)",
        "dict(**nested)",
    ],
)
def test_what_only_code_could_compute_is_its_source(tmp_path: Path, source: str) -> None:
    values, _ = read(tmp_path, f"nested = dict()\nnumber = 7\nx = {source}\ny = dict(z=[{source}], w=1)\n")
    inside = values["y"]["z"]
    inside = inside[0] if isinstance(inside, list) else inside
    assert values["x"] == source and isinstance(values["x"], Computed) and isinstance(inside, Computed)
    assert not (tmp_path / "started").exists() and not Path("started").exists()


def test_other_statements_are_returned(tmp_path: Path) -> None:
    text = "x = dict(a=1)\nx['a'] = 2\nx.update(a=3)\nif x:\n    y = 1\nfor z in x:\n    pass\n"
    values, others = read(tmp_path, f"{text}def f():\n    return 1\ndel x\n")
    assert values == {"x": {"a": 1}}
    expected = ["x['a'] = 2", "x.update(a=3)", "if x: y = 1", "for z in x: pass", "def f(): return 1", "del x"]
    assert others == expected


def test_files_that_are_no_whole_config(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text("a = 1\n")
    for text, part in (
        ("x = (", "is no Python"),
        (f"x = {'-' * 5000}1", "is no Python"),
        ("x = '\0'", "is no Python"),
        (
            "_base_ = './base.py'\n",
            r"has bases.*Remedy: give the whole of it, plain.py, which .*fromfile\('.*config.py'\)",
        ),
        ("from mmengine.config import read_base\nwith read_base():\n    from .base import *\n", "has bases"),
    ):
        with pytest.raises(ConfigError, match=part):
            read(tmp_path, text)
    with pytest.raises(ConfigError, match=r"missing\.py cannot be read"):
        read_python(tmp_path / "missing.py")
