"""``load_from`` of a directory that a family of a user's own publishes: read through the family, in a real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.end_to_end.own_parts.own_published import WEIGHTS
from tests.end_to_end.own_parts.test_own_family import config
from tools.export import main as export
from unigen_ds.runner import Runner
from unigen_ds.runner.open.trained import open_model
from unigen_ds.system.files import DIGESTS

MODULES = ["tests.plugin", "tests.end_to_end.own_parts.own_published"]
OWN = {"custom_imports": {"imports": MODULES}, "model__type": "PublishedNetwork"}
STILL = {"optim_wrapper__optimizer": {"type": "AdamW", "lr": 0.0}, "randomness__seed": 5}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    Runner.from_cfg(config(folder / "run", **OWN), max_updates=2).train()
    assert export([str(folder / "run"), str(folder / "out")]) == 0
    assert sorted(path.name for path in (folder / "out").iterdir()) == [DIGESTS, "points.json", WEIGHTS]
    return folder / "out"


def state(folder: Path) -> dict[str, Tensor]:
    model, _ = open_model(folder)
    return dict(model.state_dict())


@pytest.mark.parametrize("named", ["", WEIGHTS], ids=["folder", "file"])
def test_a_run_begins_with_its_weights(named: str, published: Path, tmp_path: Path) -> None:
    """BatchNorm counts one more update; with a learning rate of 0 all else is as it was loaded."""
    run = Runner.from_cfg(config(tmp_path / "run", load_from=str(published / named), **OWN, **STILL), max_updates=1)
    run.train()
    expected, found = state(published.parent / "run"), dict(run.backend.model.state_dict())
    assert expected.keys() == found.keys()
    weights = {name for name in expected if "running" not in name and "num_batches" not in name}
    assert "head.weight" in weights
    assert [name for name in sorted(weights) if not torch.equal(expected[name], found[name])] == []
    assert found["layers.0.1.num_batches_tracked"] == expected["layers.0.1.num_batches_tracked"] + 2
    report = json.loads((tmp_path / "run" / "load_report.json").read_text())
    assert not any(report[kind] for kind in ("missing", "unexpected", "reshaped", "renamed"))
    log = (tmp_path / "run" / "train.log").read_text().splitlines()
    assert sum(f"Loaded weights only from {published}; progress starts at zero." in line for line in log) == 1
