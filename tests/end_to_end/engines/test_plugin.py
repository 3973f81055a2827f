"""Packages of a user's own, trained by ``main`` of ``tools/train.py``: their config names them in ``custom_imports``.

``tests/plugin`` is a regression with BatchNorm: no text, no image, two loss terms, and its own split, source,
optimizer, hook and curve. ``tests/plugin_text`` adds numbers to texts.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tests.end_to_end.engines.jobs import feature_cases as cases
from tests.end_to_end.engines.launch import ROOT, Outcome, relative, tensors, want
from tools.export import main as export
from tools.generate import main as generate
from unigen_ds.checkpoint.manifest import Manifest

runs = want("plugin")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
SHARDED = ("zero2", "zero3", "FULL_SHARD")
PROMPT = "[0.5, 1, -1]"
SAVED = {2: "zero2", 4: "FULL_SHARD", 6: "zero3", 8: "zero3", 10: "single", 12: "single"}
"""Updates after which the chain was saved, and the engine that saved."""
WHOLE = 8
"""Updates of the chain that two processes have made: until then its micro-batches are those of an unbroken run."""


def deviation(run: Outcome, other: Outcome, updates: int) -> float:
    """The largest relative deviation of any loss, gradient norm or learning rate."""
    pairs = list(zip(run.lines[:updates], other.lines[:updates], strict=True))
    keys = [key for key in pairs[0][0] if key.startswith("loss") or key in ("grad_norm", "lr")]
    assert len(pairs) == updates and len(keys) == 5
    return max(relative(a[key], b[key]) for a, b in pairs for key in keys)


@pytest.fixture(scope="module")
def chain() -> Outcome:
    """The regression, killed three times and resumed each time under another engine."""
    return runs().outcome("plugin/chain")


def manifests(run: Outcome) -> dict[int, Manifest]:
    manifests = [Manifest.read(path) for path in run.checkpoints]
    return {manifest.progress.updates: manifest for manifest in manifests}


@pytest.mark.parametrize("engine", SHARDED)
def test_the_regression_trains_the_same_on_every_engine(engine: str) -> None:
    run, other = runs().outcome(f"plugin/{engine}"), runs().outcome("plugin/FULL_SHARD")
    assert deviation(run, other, cases.PLUGIN_UPDATES) <= 1e-5
    assert {key for key in run.lines[0] if key.startswith("loss/")} == {"loss/value", "loss/label"}


def test_killed_runs_continue_under_another_engine(chain: Outcome) -> None:
    assert deviation(chain, runs().outcome("plugin/FULL_SHARD"), WHOLE) <= 1e-5
    assert [line["update"] for line in chain.lines] == list(range(1, cases.PLUGIN_UPDATES + 1))
    log = (chain.folder / "train.log").read_text(encoding="utf-8")
    assert log.count("Continuity: the last update's losses are the recorded ones") == len(cases.PLUGIN_CHAIN) - 1


def test_every_engine_of_the_chain_has_saved(chain: Outcome) -> None:
    engines = {updates: manifest.topology for updates, manifest in manifests(chain).items()}
    names = {updates: topology.get("sharding_strategy") or topology["engine"] for updates, topology in engines.items()}
    stages = {updates: topology.get("zero_stage") for updates, topology in engines.items()}
    assert [name if not stages[u] else f"zero{stages[u]}" for u, name in names.items()] == list(SAVED.values())


def test_the_optimizers_state_and_the_running_statistics_go_with_the_run(chain: Outcome) -> None:
    state = tensors(chain.checkpoints[-1])
    names = {name for kind, name in state if kind == "master"}
    assert {name for kind, name in state if kind == "mean"} == names
    assert {float(value) for (kind, _), value in state.items() if kind == "step"} == {cases.PLUGIN_UPDATES}
    batches = cases.PLUGIN_UPDATES * 2
    assert {int(value) for (kind, name), value in state.items() if name.endswith("num_batches_tracked")} == {batches}
    assert all(float(v.abs().sum()) > 0 for (_, name), v in state.items() if name.endswith("running_mean"))


def test_the_curve_the_weights_of_the_terms_and_the_hook_count(chain: Outcome) -> None:
    for number, line in enumerate(chain.lines):
        assert math.isclose(line["lr"], 3e-2 / math.sqrt(1 + number / 10))
        assert math.isclose(line["loss"], line["loss/value"] + 0.5 * line["loss/label"], rel_tol=1e-6)
    lowest = {updates: manifest.metrics["lowest_loss"] for updates, manifest in manifests(chain).items()}
    assert lowest == {updates: min(line["loss"] for line in chain.lines[:updates]) for updates in SAVED}


def answer(model: Path, out: Path, *options: str) -> str:
    assert generate([str(model), "--prompt", PROMPT, "--out", str(out), *options]) == 0
    return str(json.loads((out / "results.jsonl").read_text().splitlines()[-1])["text"])


@pytest.mark.parametrize("number", range(len(SAVED)))
def test_it_exports_and_generates_from_every_engines_checkpoint(chain: Outcome, number: int, tmp_path: Path) -> None:
    checkpoint, out = chain.checkpoints[number], tmp_path / "exported"
    text = answer(checkpoint, tmp_path, "--allow-custom-imports")
    assert export([str(checkpoint), str(out), "--allow-custom-imports"]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "digests.json", "model.safetensors"]
    assert answer(out, tmp_path) == answer(out, tmp_path, "--config", str(ROOT / cases.PLUGIN)) == text
    value, label = text.split()
    assert float(value) == pytest.approx(predict(checkpoint), abs=1e-3) and label in "01"


def predict(checkpoint: Path) -> float:
    """The network by hand: running statistics, no batch."""
    state = {name: value for (kind, name), value in tensors(checkpoint).items() if kind in ("master", "buffer")}
    x = torch.tensor(json.loads(PROMPT)).double()
    shapes = {"head.weight": (2, 16), "layers.0.0.weight": (16, 3), "layers.1.0.weight": (16, 16)}
    part = {name: value.double().view(shapes.get(name, (-1,))) for name, value in state.items()}
    for layer in ("layers.0", "layers.1"):
        x = part[f"{layer}.0.weight"] @ x + part[f"{layer}.0.bias"]
        x = (x - part[f"{layer}.1.running_mean"]) / (part[f"{layer}.1.running_var"] + 1e-5).sqrt()
        x = torch.nn.functional.gelu(x * part[f"{layer}.1.weight"] + part[f"{layer}.1.bias"])
    return float((part["head.weight"] @ x + part["head.bias"])[0])


@pytest.mark.parametrize("engine", SHARDED)
def test_texts_with_numbers_train_as_in_one_process(engine: str) -> None:
    run, single = runs().outcome(f"plugin_text/{engine}"), runs().outcome("plugin_text/single")
    assert deviation(run, single, cases.PLUGIN_TEXT_UPDATES) <= 1e-5
    assert {key for key in run.lines[0] if key.startswith("loss/")} == {"loss/text", "loss/number"}
    assert run.lines[-1]["loss"] < run.lines[0]["loss"]


def test_muon_trains_a_users_own_model_sharded_as_in_one_process() -> None:
    """Muon multiplies in bf16."""
    run, single = (runs().outcome(f"plugin_text/Muon/{engine}") for engine in ("FULL_SHARD", "single"))
    assert deviation(run, single, cases.PLUGIN_TEXT_UPDATES) <= 1e-3
    state = tensors(run.checkpoints[-1])
    matrices = {name for kind, name in state if kind == "momentum_buffer"}
    assert {"number_in.weight", "language_model.model.layers.0.mlp.up_proj.weight"} <= matrices
    assert not {"language_model.model.embed_tokens.weight", "language_model.lm_head.weight"} & matrices
