"""``load_cfg`` under every engine: a ZeRO-3 checkpoint of two processes fills a larger, partly renamed model."""

from __future__ import annotations

import json

import pytest
import torch

from tests.end_to_end.engines.jobs import cases
from tests.end_to_end.engines.launch import want

runs = want("partial")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

LOADERS = [job.name for job in cases.partial() if job.resumes]
EMBEDDING, HEAD = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"


@pytest.mark.parametrize("name", LOADERS)
def test_masters_are_the_stored_ones_by_name_and_the_rest_stays_as_initialised(name):
    """Rename, grow, keep: worked out here from the checkpoint's tensors, compared bit by bit with what was loaded."""
    source, fresh = runs().outcome("partial/source").final, runs().outcome("partial/fresh").initial
    after = runs().outcome(name).initial
    expected = dict(fresh)
    for kind, theirs in source:
        ours = theirs.replace("layers.0.", "layers.1.") if theirs.startswith("language_model.") else theirs
        if kind not in ("master", "buffer") or ours.startswith("vae2llm.") or ours not in fresh:
            continue
        tensor, target = source[kind, theirs].flatten(), fresh[ours]
        if ours in (EMBEDDING, HEAD):
            tensor = tensor.view(-1, target.shape[1])
            mean = tensor.double().mean(0, keepdim=True).float()
            expected[ours] = torch.cat([tensor, mean.expand(len(cases.NEW_WORDS), -1)])
        elif tensor.numel() == target.numel():
            expected[ours] = tensor.view(target.shape)
    assert after.keys() == expected.keys()
    assert [key for key in after if not torch.equal(after[key], expected[key])] == []
    changes = {key for key in after if not torch.equal(after[key], fresh[key])}
    assert {EMBEDDING, HEAD, "language_model.model.layers.1.mlp.up_proj.weight"} <= changes and len(changes) > 20


@pytest.mark.parametrize("name", LOADERS)
def test_every_difference_is_in_the_report(name):
    report = json.loads((runs().outcome(name).folder / "load_report.json").read_text())
    assert report["checkpoint"].endswith(".pth")
    layer = "language_model.model.layers.{}.mlp.up_proj.weight"
    assert report["renamed"][layer.format(1)] == layer.format(0)
    assert sorted(report["unexpected"]) == ["vae2llm.bias", "vae2llm.weight"] and "vae2llm.bias" in report["missing"]
    assert set(report["resized"]) == {EMBEDDING, HEAD}
    assert set(report["reshaped"]) == {f"vit_model.{n}" for n in VIT_MLP}


VIT_MLP = [f"vision_model.encoder.layers.0.mlp.{n}" for n in ("fc1.weight", "fc1.bias", "fc2.weight")]
