"""The curves of a real run as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.tiny import tiny_config
from tools.plot_run import main
from unigen_ds.runner import Runner


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    Runner.from_cfg(tiny_config(folder, folder / "digits"), max_updates=4).train()
    return folder


def test_a_run_is_drawn(work_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(work_dir)]) == 0
    assert capsys.readouterr().out.strip() == str(work_dir / "curves.png")
    assert main([str(work_dir), "--out", str(tmp_path / "again.png")]) == 0
    pictures = [np.asarray(Image.open(path)) for path in (work_dir / "curves.png", tmp_path / "again.png")]
    assert np.array_equal(*pictures) and pictures[0].std() > 10


def test_what_cannot_be_drawn_is_said(work_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert "holds no update" in capsys.readouterr().err
    assert main([str(work_dir), "--out", str(tmp_path / "curves.gif")]) == 2
    assert ".svg" in capsys.readouterr().err
    assert main([str(work_dir), "--out", str(tmp_path / "no" / "such" / "curves.png")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
