"""``tools/generate.py`` takes the checkpoints of every engine as they are: nothing is merged first."""

from __future__ import annotations

import json

import pytest
import torch

from tests.engines.launch import want
from tools.generate import main
from unigen_ds.core.shards import EMA, MASTER
from unigen_ds.runner.trained import open_model

runs = want("equivalence")
pytestmark = pytest.mark.timeout(3600)


@pytest.mark.parametrize("name", ["single@1", "zero1@2", "zero2@2", "zero3@2", "FULL_SHARD@2", "HYBRID_SHARD@4"])
def test_every_layout_draws_with_the_weights_or_their_average(name, tmp_path):
    run = runs().outcome(name)
    for raw, kind in ((True, MASTER), (False, EMA)):
        model, _ = open_model(run.folder, raw=raw)
        weights = dict(model.named_parameters())
        stored = {n: tensor for (k, n), tensor in run.final.items() if k == kind}
        assert stored and [n for n, t in stored.items() if not torch.equal(weights[n].flatten(), t.flatten())] == []
        words = [str(run.folder), "--prompt", "draw a three", "--num-timesteps", "3", "--device", "cpu"]
        assert main([*words, "--out", str(tmp_path), *(["--raw"] * raw)]) == 0
    raw_file, average_file = (
        json.loads(line)["file"] for line in (tmp_path / "results.jsonl").read_text().splitlines()
    )
    assert (tmp_path / raw_file).stat().st_size and (tmp_path / average_file).stat().st_size
