"""``WarmupCosineLR`` against numbers made by public nanoVLM (see ``tests/golden/README.md``)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from unigen_ds.core.progress import Geometry, Progress, Ruler
from unigen_ds.schedule import Schedules

GOLDEN = Path(os.environ.get("UNIGEN_GOLDEN", Path(__file__).resolve().parent.parent / "golden"))
CURVES = json.loads((GOLDEN / "nanovlm" / "lr.json").read_text(encoding="utf-8"))
GEOMETRY = Geometry(batch_size=3, accumulative_counts=4, dp_size=2)


def ours(curve: dict, **spec) -> list[float]:
    size, steps = GEOMETRY.global_batch_size, curve["max_steps"]
    schedules = Schedules.from_cfg(
        dict(type="WarmupCosineLR", **spec),
        ruler=Ruler(GEOMETRY, 10 * size),
        base=[{"name": "default", "lr": curve["max_lr"]}],
        total_sequences=steps * size,
    )
    first, last = curve["it"]
    return [schedules.at(Progress(sequences=i * size))[0]["lr"] for i in range(first, last + 1)]


@pytest.mark.parametrize("curve", CURVES, ids=lambda c: f"{c['max_steps']} updates")
def test_every_value(curve: dict) -> None:
    assert len(curve["values"]) == curve["it"][1] - curve["it"][0] + 1 > 10
    assert ours(curve) == pytest.approx(curve["values"], rel=1e-12, abs=0.0)


@pytest.mark.parametrize("curve", CURVES, ids=lambda c: f"{c['max_steps']} updates")
def test_end_in_updates(curve: dict) -> None:
    assert ours(curve, end=curve["max_steps"], warmup_ratio=0.03, min_ratio=0.1) == ours(curve)


def test_the_overshoot_is_kept() -> None:
    """A warm-up of 0.3 updates: the first update gets 1 / 0.3 of the base. Rounding it would be another curve."""
    overshoots = {c["max_steps"]: max(c["values"]) / c["max_lr"] for c in CURVES}
    assert overshoots[10] == pytest.approx(1 / 0.3)
    for curve in CURVES:
        assert max(ours(curve)) / curve["max_lr"] == pytest.approx(overshoots[curve["max_steps"]], rel=1e-12)
