"""The plot of a run shows the valid lines, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from unigen_ds.evaluation.plots import plot_curves


def line(update: int, loss: float | None, **more: Any) -> dict[str, Any]:
    return {"update": update, "sequences": 12 * update, "loss": loss, "loss/text": loss, "loss/image": None,
            "lr": 1e-3 * update, "grad_norm": 1.0 + update, "tokens_per_second": 900.0, **more}  # fmt: skip


def picture(folder: Path, lines: list[dict[str, Any]]) -> np.ndarray:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    plot_curves(folder / "metrics.jsonl", folder / "curves.png")
    return np.asarray(Image.open(folder / "curves.png"))


def test_a_resume_invalidates_later_lines(tmp_path: Path) -> None:
    kept = [line(n, 5.0 / n) for n in (1, 2, 3)]
    void = [line(4, 90.0), line(5, 80.0)]
    again = [line(4, 1.2), line(5, None), line(6, 0.8)]
    event = {"event": "resume", "updates": 3, "sequences": 36}
    late = {"event": "val", "update": 6, "loss": 1000.0}
    expected = picture(tmp_path / "plain", kept + again)
    assert np.array_equal(picture(tmp_path / "resumed", [*kept, *void, event, *again, late]), expected)
    assert not np.array_equal(picture(tmp_path / "without the event", [*kept, *void, line(6, 0.8)]), expected)


def test_validation_is_drawn_beside_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the data consumed by then; what a resume made void does not count, nor a value after the last update."""
    lines = [line(n, 5.0 / n) for n in (1, 2, 4)]
    values = [{"event": "evaluation", "update": n, "val/loss": 4.0 / (n + 1)} for n in (0, 3, 4)]
    plain, drawn = picture(tmp_path / "plain", lines), picture(tmp_path / "drawn", [*lines, *values])
    assert not np.array_equal(plain, drawn)
    void = [{"event": "evaluation", "update": 6, "val/loss": 90.0}, {"event": "resume", "updates": 4, "sequences": 48}]
    late = {"event": "evaluation", "update": 9, "val/loss": 90.0}
    assert np.array_equal(picture(tmp_path / "void", [*lines, *values, *void, late]), drawn)
    files = {name: tmp_path / name / "metrics.jsonl" for name in ("plain", "drawn")}
    figures: list[list[Any]] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(
        [(one.get_label(), list(one.get_xdata())) for one in figure.axes[0].lines]))  # fmt: skip
    plot_curves(files, tmp_path / "both.png")
    assert figures == [[("plain", [12, 24, 48]), ("drawn", [12, 24, 48]), ("drawn val/loss", [0.0, 36.0, 48.0])]]
