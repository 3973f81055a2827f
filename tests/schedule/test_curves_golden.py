"""``WarmupCosineLR`` compared with numbers of public nanoVLM (see ``tests/golden/README.md``)."""

from __future__ import annotations

import pytest

from tests.support.curves import curves
from tests.support.golden_files import NANOVLM, read_json
from unigen_ds.core.progress import Geometry, Progress, Ruler
from unigen_ds.schedule.schedule import Schedules

CURVES = read_json(NANOVLM / "lr.json")
GEOMETRY = Geometry(batch_size=3, accumulative_counts=4, dp_size=2)


def ours(curve: dict, **spec) -> list[float]:
    size, steps = GEOMETRY.global_batch_size, curve["max_steps"]
    schedules = Schedules.from_cfg(
        curves(dict(type="WarmupCosineLR", **spec)),
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
