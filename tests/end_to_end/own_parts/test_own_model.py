"""The walk-through of ``docs/extending/unified_model.md``: its files trained, resumed, asked and published."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.support import write_jsonl
from tests.support.processes import ROOT
from tools.evaluate import main as evaluate
from tools.export import main as export
from tools.generate import main as generate
from tools.train import main as train_tool
from tools.zero_to_fp32 import main as zero_to_fp32
from unigen_ds.checkpoint.convert import read_source
from unigen_ds.checkpoint.layouts.safetensors import open_reader
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.config.registry import REGISTRIES
from unigen_ds.runner import Runner
from unigen_ds.runner.open.trained import open_model
from unigen_ds.runner.settings.tree import load_config
from unigen_ds.system.journals import read_lines

SKELETON = ROOT / "docs" / "painter"
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "black": (0, 0, 0)}
UPDATES, CUT_AT = 60, 20
MODULES = ("painter",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``painter.py`` and ``config.py`` of the page, and data; all on Python's path."""
    folder = tmp_path_factory.mktemp("own")
    shutil.copy(SKELETON / "painter.py", folder)
    config = (SKELETON / "config.py").read_text(encoding="utf-8")
    (folder / "config.py").write_text(config.replace('"colours.jsonl"', repr(str(folder / "colours.jsonl"))))
    records: list[dict[str, Any]] = []
    for name, colour in COLOURS.items():
        Image.new("RGB", (40, 32), colour).save(folder / f"{name}.png")
        turns = [{"from": "human", "value": "<image>\nwhat is this"}, {"from": "gpt", "value": name}]
        records += [{"text_prompt": f"draw {name}", "image_path": f"{name}.png"}]
        records += [{"image": f"{name}.png", "conversations": turns}]
    write_jsonl(folder / "colours.jsonl", records)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture
def no_registrations() -> Any:
    """As in a process that has imported none of the modules; what a test imports is replaced by what was there."""
    modules = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    removals: list[tuple[Any, str, Any]] = []
    for registry in REGISTRIES:
        own = [name for name, component in registry.module_dict.items() if component.__module__ in MODULES]
        removals += [(registry.module_dict, name, registry.module_dict.pop(name)) for name in own]
    yield
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.modules.update(modules)
    for names, name, component in removals:
        names[name] = component


def config(folder: Path, name: str, **changes: Any) -> Any:
    options = {"work_dir": str(folder / name), **{key.replace("__", "."): value for key, value in changes.items()}}
    return load_config(folder / "config.py", options)


def train(folder: Path, name: str, updates: int, **changes: Any) -> list[dict[str, Any]]:
    """The lines of the log with a loss."""
    Runner.from_cfg(config(folder, name, **changes), max_updates=updates).train()
    return [line for line in read_lines(folder / name / "metrics.jsonl") if "loss" in line]


PAINTER: dict[str, Any] = {
    "default_hooks__checkpoint": {"by_epoch": False, "interval": 20},
    "default_hooks__logger": {"interval": 1},
}


@pytest.fixture(scope="module")
def run(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run to its end."""
    return train(folder, "painter", UPDATES, **PAINTER)


def test_it_trains_and_goes_on_to_the_bit(folder: Path, run: Any) -> None:
    assert run[-1]["loss"] < 0.2 * run[0]["loss"]
    still = {**PAINTER, "custom_hooks": [], "train_dataloader__num_workers": 1}
    train(folder, "parts", CUT_AT, **still)
    parts = train(folder, "parts", CUT_AT + 10, resume=True, **still)
    keys = [key for key in run[0] if key.startswith("loss") or key in ("grad_norm", "tokens", "update")]
    assert [[line.get(key) for key in keys] for line in parts] == [
        [line.get(key) for key in keys] for line in run[: CUT_AT + 10]
    ]


def test_its_previews_draw_and_answer(folder: Path, run: Any) -> None:
    newest = max((folder / "painter" / "previews").glob("*.json"), key=lambda path: int(path.stem))
    rows = json.loads(newest.read_text())
    assert [row["error"] for row in rows] == [""] * len(rows)
    read, drawing = (next(row for row in rows if row["record"] == f"colours:{k}") for k in (1, 0))
    assert (read["prompt"], read["text"]) == ("what is this", "red") and drawing["reference"].endswith("red.png")


def pictures(out: Path) -> list[Any]:
    return [np.asarray(Image.open(path)).tolist() for path in sorted(out.glob("*.png"))]


@pytest.mark.parametrize("tool", ["generate", "evaluate", "zero_to_fp32", "export"])
def test_a_published_directory_needs_config(
    tool: str, folder: Path, run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_registrations: None
) -> None:
    """In a process that has not imported the family; then with the config, whose modules are imported first."""
    source, out = str(folder / "published"), tmp_path / "out"
    if not (folder / "published").exists():
        assert export([str(folder / "painter"), source, "--allow-custom-imports"]) == 0
        for name in MODULES:
            sys.modules.pop(name, None)
        for registry in REGISTRIES:
            for name in [n for n, component in registry.module_dict.items() if component.__module__ in MODULES]:
                registry.module_dict.pop(name)
    command = {
        "generate": (generate, [source, "--prompt", "draw red", "--device", "cpu", "--out", str(out)]),
        "evaluate": (evaluate, [source, "--data", str(folder / "colours.jsonl"), "--out", str(tmp_path / "v.json")]),
        "zero_to_fp32": (zero_to_fp32, [source, str(out)]),
        "export": (export, [source, str(out)]),
    }
    main, arguments = command[tool]
    assert main(arguments) != 0 and "--config" in capsys.readouterr().err
    assert main([*arguments, "--config", str(folder / "config.py")]) == 0
    newest = read_source(folder / "painter")
    masters = {
        name: newest.reader.read("master", name, 0, newest.reader.numel("master", name))
        for name in newest.reader.names("master")
    }
    if tool == "zero_to_fp32":
        state = torch.load(out / "pytorch_model.bin")
        assert all(torch.equal(state[name].flatten(), tensor) for name, tensor in masters.items())
    if tool == "export":
        model, _ = open_model(out)
        assert all(torch.equal(dict(model.state_dict())[name].flatten(), t) for name, t in masters.items())
    if tool == "evaluate":
        text = json.dumps(json.loads((tmp_path / "v.json").read_text()))
        last = [line for line in read_lines(folder / "painter" / "metrics.jsonl") if "val/loss" in line][-1]
        assert repr(last["val/loss"])[:8] in text
    if tool == "generate":
        assert len(pictures(out)) == 1


CHECKS = {"custom_imports": {"imports": ["painter", "tests.end_to_end.own_parts.own_checks"]}, "custom_hooks": []}


def test_own_checks_of_the_checklist_and_of_the_dry_run(
    folder: Path, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {**PAINTER, **CHECKS}
    train(folder, "checked", CUT_AT, **own)
    runner = Runner.from_cfg(config(folder, "checked", resume=True, **own))
    assert runner.progress.updates == CUT_AT
    log = (folder / "checked" / "train.log").read_text()
    assert "own.words" not in log  # what is ok is not shown
    options = [
        "--cfg-options",
        f"work_dir={folder / 'dry'}",
        "custom_imports={'imports':['painter','tests.end_to_end.own_parts.own_checks']}",
    ]
    assert train_tool([str(folder / "config.py"), "--dry-run", *options]) in (0, 1)
    output = capsys.readouterr().out
    order = re.findall(r"^(?:ok|warning|problem|not checked) +(\w+)  ", output, re.MULTILINE)
    assert order[0] == "devices" and order[-1] == "words" and "14 ids" in output


def test_a_training_of_another_trainer_goes_on_with_its_moments(folder: Path, run: Any, tmp_path: Path) -> None:
    own = {**PAINTER, **CHECKS}
    whole = train(folder, "straight", CUT_AT + 4, **own)
    checkpoint = folder / "straight" / f"iter_{CUT_AT}.pth"
    reader = open_reader(checkpoint, Manifest.read(checkpoint))
    shapes = {name: shape for (kind, name), shape in reader.shapes.items() if kind == "master"}
    kinds = ("master", "exp_avg", "exp_avg_sq", "step")
    state = {
        kind: {
            n: reader.read(kind, n, 0, reader.numel(kind, n)).clone().view(shapes[n] if kind != "step" else (1,))
            for n in shapes
        }
        for kind in kinds
    }
    (tmp_path / "foreign").mkdir()
    torch.save({**state, "updates": CUT_AT}, tmp_path / "foreign" / "notebook.pt")
    lines = train(folder, "adopted", CUT_AT + 4, resume=str(tmp_path / "foreign"), **own)
    keys = ("update", "loss", "grad_norm", "lr")
    for line, other in zip(lines, whole[CUT_AT:], strict=True):
        assert [line[key] for key in keys] == pytest.approx([other[key] for key in keys], rel=1e-6)
    log = (folder / "adopted" / "train.log").read_text()
    assert "a notebook" in log and "own.words" in log
