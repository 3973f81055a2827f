"""Backend, checkpoint layout, packer, curve and log writer of a user's module that only ``custom_imports`` loads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import tiny_config
from tools.export import main as export
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.runner import Runner
from unigen_ds.system.journals import read_lines

MODULE = "tests.end_to_end.own_parts.own_registered"
OWN: dict[str, Any] = {
    "custom_imports": {"imports": [MODULE]},
    "backend": {"type": "RegisteredBackend"},
    "train_dataloader__packing": {"type": "RegisteredPairs"},
    "param_scheduler": [{"type": "RegisteredThird", "unit": "update", "end": 1000}],
    "visualizer": {"vis_backends": [{"type": "RegisteredWriter"}]},
}


def train(work_dir: Path, data: Path, *, updates: int, **changes: Any) -> Runner:
    runner = Runner.from_cfg(tiny_config(work_dir, data, **changes), max_updates=updates)
    runner.train()
    return runner


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    """Two updates, and two more after a resume."""
    folder = tmp_path_factory.mktemp("run")
    assert MODULE not in sys.modules
    train(folder, digits, updates=2, **OWN)
    train(folder, digits, updates=4, resume=True, **OWN)
    return folder


def lines(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(folder / "metrics.jsonl") if "loss" in line]


def test_backend_and_layout(run: Path, tmp_path: Path, digits: Path) -> None:
    newest = max(run.glob("*.pth"), key=lambda path: path.stat().st_mtime)
    manifest = Manifest.read(newest)
    assert manifest.layout == "registered_layout" and manifest.topology["engine"] == "registered"
    assert sys.modules[MODULE].OPENED, "the resume read it"
    straight = train(tmp_path, digits, updates=4, **{**OWN, "backend": {"type": "single"}})
    assert [line["loss"] for line in lines(run)] == [line["loss"] for line in lines(tmp_path)]
    second = train(run, digits, updates=4, resume=True, **OWN)
    for a, b in zip(second.backend.master_shards(), straight.backend.master_shards(), strict=True):
        assert torch.equal(a.data, b.data), a.name


def test_packer(run: Path) -> None:
    manifest = Manifest.read(next(run.glob("*.pth")))
    assert "RegisteredPairs" in str(manifest.loader)
    samples = [line["samples"] for line in lines(run)]
    assert samples[-1] > lines(run)[-1]["sequences"], "two samples in one sequence"


def test_curve(run: Path) -> None:
    rates = [line["lr"] for line in lines(run)]
    assert rates == pytest.approx([rates[0] / 3**k for k in range(4)])


def test_log_writer(run: Path) -> None:
    folder = run / "registered"
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "3", "4", "closed"]
    assert [float((folder / str(line["update"])).read_text()) for line in lines(run)] == [x["loss"] for x in lines(run)]


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before the module was imported."""
    for registry in ("BACKENDS", "LAYOUTS", "PACKERS", "CURVES", "WRITERS"):
        names = getattr(sys.modules["unigen_ds.config.registry"], registry).module_dict
        for name in [name for name in names if name.lower().startswith("registered")]:
            monkeypatch.delitem(names, name)


def test_a_checkpoint_of_the_layout_is_exported_on_request_alone(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its reader is in a module of the checkpoint's config, which nothing else would import before it is read."""
    forget(monkeypatch)
    monkeypatch.delitem(sys.modules, MODULE)
    assert export([str(run), str(tmp_path / "out")]) == 2
    assert f"imports {MODULE} (custom_imports), which would execute" in capsys.readouterr().err
    assert MODULE not in sys.modules
    assert export([str(run), str(tmp_path / "out"), "--allow-custom-imports"]) == 0
    assert MODULE in sys.modules and any((tmp_path / "out").glob("*.safetensors"))
