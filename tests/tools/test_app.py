"""``tools/app.py`` as a command; its page in a browser: ``make check-app``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools.app import main


def test_without_gradio_the_error_has_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main([str(tmp_path)]) == 2
    assert "pip install 'unigen_ds[app]'" in capsys.readouterr().err
