"""``tools/generate.py`` and ``tools/export.py`` take the checkpoints of every engine as they are: nothing is merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.end_to_end.engines.launch import Outcome, want
from tools.export import main as export
from tools.generate import main as generate
from unigen_ds.core.shards import EMA, MASTER
from unigen_ds.runner.open.trained import open_model

runs = want("equivalence", "models")
pytestmark = pytest.mark.timeout(3600)

WEIGHTS = [(True, MASTER), (False, EMA)]
"""(``--raw``, what is then read)."""


def check_weights(run: Outcome, *, raw: bool, kind: str) -> None:
    weights = open_model(run.folder, raw=raw)[0].state_dict()
    expected = {name: tensor for (k, name), tensor in run.final.items() if k == kind}
    assert expected and [n for n, t in expected.items() if not torch.equal(weights[n].flatten(), t.flatten())] == []


def generate_row(run: Outcome, out: Path, *words: str, raw: bool) -> dict:
    words = (str(run.folder), *words, "--device", "cpu", "--out", str(out), *(["--raw"] * raw))
    assert generate([*words]) == 0
    return json.loads((out / "results.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize("name", ["single@1", "zero1@2", "zero2@2", "zero3@2", "FULL_SHARD@2", "HYBRID_SHARD@4"])
@pytest.mark.parametrize(("raw", "kind"), WEIGHTS)
def test_every_layout_draws_with_the_weights_or_their_average(name, raw, kind, tmp_path):
    run = runs().outcome(name)
    check_weights(run, raw=raw, kind=kind)
    row = generate_row(run, tmp_path, "--prompt", "draw a three", "--num-timesteps", "3", raw=raw)
    assert (tmp_path / row["file"]).stat().st_size


@pytest.mark.parametrize(
    "name", [f"{m}/{engine}@2" for m in ("vlm", "flux") for engine in ("zero2", "zero3", "FULL_SHARD")]
)
@pytest.mark.parametrize(("raw", "kind"), WEIGHTS)
def test_every_layout_is_exported(name, raw, kind, tmp_path):
    run = runs().outcome(name)
    check_weights(run, raw=raw, kind=kind)
    assert export([str(run.folder), str(tmp_path / "out"), *(["--raw"] * raw)]) == 0
    if name.startswith("flux"):
        assert {"ema.safetensors", "ae.safetensors"} < {path.name for path in (tmp_path / "out").iterdir()}
        return
    generate_row(run, tmp_path, "--prompt", "?", "--max-length", "3", raw=raw)
    weights, again = (open_model(path, raw=raw)[0].state_dict() for path in (run.folder, tmp_path / "out"))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in again.items())
