"""A config in Python is read without executing it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mmengine.config import Config

from unigen_ds.core.errors import ConfigError
from unigen_ds.migration.static_config import Computed, Reference, read_static


def read(folder: Path, text: str) -> tuple[dict[str, Any], list[str]]:
    (folder / "config.py").write_text(text, encoding="utf-8")
    return read_static(folder / "config.py")


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("int(2048 - (336 / 14) ** 2)", 1472),
        ("dict(a=1, **dict(b=[1, 2]))", {"a": 1, "b": [1, 2]}),
        ("{'x': -0.5, **{'y': None}}", {"x": -0.5, "y": None}),
        ("[*[1, 2], 3][1]", 2),
        ("'a/' + 'b' if 3 > 2 and not False else 'c'", "a/b"),
        ("os.path.join('a', 'b')", "a/b"),
        ("f'{number}-x'", "7-x"),
        ("len('abc') * max(1, number) % 5", 1),
        ("number or 3", 7),
        ("(1, 2) + (3,)", (1, 2, 3)),
        ("torch.optim.AdamW", "torch.optim.AdamW"),
        ("nested['a'].b", 2),
    ],
)
def test_what_is_understood(tmp_path: Path, source: str, value: Any) -> None:
    text = f"import os, torch\nnumber = 7\nnested = dict(a=dict(b=2))\nx = {source}\n"
    assert read(tmp_path, text)[0]["x"] == value


@pytest.mark.parametrize(
    "source",
    [
        "open('started', 'w').write('x')",
        "__import__('os').system('touch started')",
        "os.system('touch started')",
        "[i for i in range(3)]",
        "(lambda: 1)()",
        "unheard_of",
        "'ab' * 10_000_000",
        "9 ** 9 ** 9",
        "''.__class__.__mro__",
        "1 / 0",
        "int('x' + '1')",
        "str(os)",
        "number.real",
    ],
)
def test_what_only_code_could_compute_is_its_source(tmp_path: Path, source: str) -> None:
    found, _ = read(tmp_path, f"import os\nnumber = 7\nx = {source}\ny = dict(z={source})\n")
    assert found["x"] == source and isinstance(found["x"], Computed) and isinstance(found["y"]["z"], Computed)
    assert not (tmp_path / "started").exists() and not Path("started").exists()


def test_a_doubled_text_and_a_grown_number_have_a_limit(tmp_path: Path) -> None:
    found, _ = read(tmp_path, "x = 'ab'\nn = 10\n" + "x = x + x\nn = n * n\n" * 60)
    assert isinstance(found["x"], Computed) and isinstance(found["n"], Computed)


def test_statements(tmp_path: Path) -> None:
    """What a statement that is not understood changes is not known any more."""
    text = """
from torch.optim import AdamW as Chosen
a, b = 1, 2
a += 4
plain: int = 3
section = dict(x=1)
section['x'] = Chosen
if plain > 2:
    c = 'yes'
else:
    c = 'no'
listed = [1]
listed.append(2)
for i in range(3):
    b = i
def helper():
    return a
del plain
"""
    found, left = read(tmp_path, text)
    assert (found["a"], found["c"], found["section"]) == (5, "yes", {"x": "torch.optim.AdamW"})
    assert isinstance(found["section"]["x"], Reference) and found["section"]["x"].last == "AdamW"
    assert isinstance(found["b"], Computed) and found["listed"] == [1, 2] and "plain" not in found
    assert [one.split("(")[0] for one in left] == ["for i in range", "def helper"]
    found, left = read(tmp_path, "listed = [3, 1]\nlisted.sort()\n")
    assert isinstance(found["listed"], Computed) and left == ["listed.sort()"]


def test_a_config_that_changes_its_base_is_what_mmengine_reads(tmp_path: Path) -> None:
    """With ``read_base`` an assignment replaces, and sections are changed by their methods."""
    (tmp_path / "base.py").write_text(
        "optim = dict(opt=dict(lr=2.0, momentum=0.9), clip=1)\nhooks = [dict(type='A')]\nlength = dict(a=1, b=2)\n"
    )
    (tmp_path / "schedule.py").write_text("steps = 5\nunwanted = dict(a=1)\n")
    path = tmp_path / "lazy.py"
    path.write_text(
        "from mmengine.config import read_base\nwith read_base():\n    from .base import *\n"
        "    from .schedule import steps as num_steps\n"
        "optim.update(dict(clip=3), wait=num_steps)\noptim['opt']['lr'] *= 2\noptim.opt.momentum = 0.5\n"
        "hooks.append(dict(type='B'))\nhooks.extend([dict(type='C')])\nhooks.insert(0, dict(type='D'))\n"
        "hooks[1] = dict(type='E')\n"
        "length = dict(a=7)\nextra = dict(x=1, y=2, z=3)\nextra.pop('x')\nextra.setdefault('y', 5)\ndel extra['z']\n"
    )
    found, left = read_static(path)
    found.pop("read_base")
    assert not left and found == Config.fromfile(path).to_dict()
    assert found["length"] == {"a": 7} and found["extra"] == {"y": 2} and found["optim"]["clip"] == 3
    path.write_text(path.read_text().replace("    from .base", "    from mmdet.configs.base import *\n    from .base"))
    assert read_static(path)[1][0].startswith("from mmdet.configs.base import *: of a package that is not read")


def test_bases_are_merged_as_mmengine_merges_them(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text("model = dict(a=1, b=dict(c=2))\nlr = 3\n")
    (tmp_path / "other.py").write_text(
        "from mmengine.config import read_base\nwith read_base():\n    from .base import *\nlr = 4\n"
    )
    body = "_base_ = ['./base.py']\nmodel = dict(b=dict(_delete_=True, d=_base_.lr))\n"
    assert read(tmp_path, body)[0] == {"model": {"a": 1, "b": {"d": 3}}, "lr": 3}
    assert read_static(tmp_path / "other.py")[0]["lr"] == 4
    assert read_static(tmp_path / "other.py")[0]["model"] == {"a": 1, "b": {"c": 2}}
    found, left = read(tmp_path, "_base_ = 'absent.py'\nx = 1\n")
    assert found == {"x": 1} and "there is no config" in left[0]


def test_files_that_are_no_config(tmp_path: Path) -> None:
    (tmp_path / "circle.py").write_text("_base_ = 'circle.py'\n")
    for text, part in (
        ("x = (", "is no Python"),
        ("_base_ = 'circle.py'\n", "form a circle"),
        ("x = '\0'", "is no Python"),
    ):
        with pytest.raises(ConfigError, match=part):
            read(tmp_path, text)
