"""The models of ``test_models.py`` in bf16 and with a frozen part, and further models of transformers."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.end_to_end.engines.jobs import cases, model_cases
from tests.end_to_end.engines.launch import has_zero_gradient, metric_deviation, unequal, want, weight_deviation
from tests.families.tiny_transformers import IMAGE
from tools.zero_to_fp32 import main as merge
from unigen_ds.system.journals import read_lines

runs = want("models", "auto", "models_bf16", "parts")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

BOUND = 1e-5
LOW = [job.name for job in model_cases.models_bf16(full=False)]
FLUX = [job.name for job in model_cases.models(full=False) if job.name.startswith("flux")]


@pytest.mark.parametrize("kind", model_cases.AUTO)
def test_a_run_of_a_model_of_transformers_goes_from_engine_to_engine(kind, tmp_path):
    """Each begins with the checkpoint of the one before, or with the files; merged it is transformers' state dict."""
    run, single = runs().outcome("auto/engines", kind), runs().outcome("auto/single", kind)
    count = len(model_cases.AUTO[kind])
    assert [line["update"] for line in run.lines] == [*range(1, count + 1)]
    assert [line["begun"] for line in run.records(0)] == [i for i in range(count) for _ in range(2)]
    assert unequal({("", k): v for k, v in run.initial.items()}, {("", k): v for k, v in single.initial.items()}) == []
    assert metric_deviation(run, single) <= BOUND
    weights = weight_deviation(run.final, single.final)
    assert weights.relative_l2 <= BOUND, weights.where
    ledgers = [read_lines(outcome.folder / "ledger.jsonl") for outcome in (run, single)]
    mine, alone = ([{k: v for k, v in line.items() if k != "time"} for line in ledger] for ledger in ledgers)
    assert mine == alone and len(mine) == count
    assert merge([str(run.folder), str(tmp_path / "merged")]) == 0
    state = torch.load(tmp_path / "merged" / "pytorch_model.bin", weights_only=True)
    auto = AutoModelForImageTextToText if kind in IMAGE else AutoModelForCausalLM
    theirs = auto.from_pretrained(runs().out / "data" / "models" / kind)
    theirs.load_state_dict(state)
    assert unequal({("", k): v for k, v in state.items()}, {("", k): v for k, v in run.state.items()}) == []
    if "FULL_SHARD" in model_cases.AUTO[kind]:
        units = json.loads((run.folder / "structure_0.json").read_text())["units"]
        kinds = theirs._no_split_modules
        layers = {name for name, module in theirs.named_modules() if type(module).__name__ in kinds}
        assert len(layers) >= 2
        assert [name for name in layers if not any(f"{name}.".startswith(f"{unit}.") for unit in units if unit)] == []


@pytest.mark.parametrize("name", [name for name in LOW if not name.endswith("/single@1")])
def test_bf16_adds_no_more_error_than_bf16_itself(name):
    """As in ``test_equivalence.py``: no farther from one process's fp32 than its own bf16, cut either way."""
    low = name.partition("/")[0]
    run, single = runs().outcome(name), runs().outcome(low.removesuffix("-bf16") + "/single@1")
    cuts = [runs().outcome(f"{low}/{cut}") for cut in ("single@1", "single_8x1")]
    own = max(metric_deviation(cut, single) for cut in cuts)
    assert 1e-4 < own < 0.1
    assert metric_deviation(run, single) <= cases.BF16_SPREAD * own
    rounding = weight_deviation(cuts[0].final, single.final).relative_l2
    assert weight_deviation(run.final, cuts[0].final).relative_l2 <= rounding


@pytest.mark.parametrize("name", [*FLUX, *LOW])
def test_the_autoencoder_computes_in_fp32_under_every_engine_and_precision(name):
    """Its weights are neither rounded nor changed, on any rank, and a picture's latents are bit-equal."""
    expected = load_file(runs().outcome("flux/single@1").folder / "autoencoder_0.safetensors")
    run = runs().outcome(name)
    for rank in range(int(name[-1]) if "@" in name else 1):
        ours = load_file(run.folder / f"autoencoder_{rank}.safetensors")
        assert {value.dtype for value in ours.values()} == {torch.float32}
        assert unequal({("", k): v for k, v in ours.items()}, {("", k): v for k, v in expected.items()}) == []
    buffers = {key[1]: value for key, value in run.final.items() if key[0] == "buffer"}
    assert buffers.keys() == {f"vae.{key}" for key in expected} - {"vae.latents"}
    for key, value in buffers.items():
        assert torch.equal(value, expected[key.removeprefix("vae.")].flatten()), key


@pytest.mark.parametrize("name", [job.name for job in model_cases.parts(full=False)])
def test_a_frozen_part_stays_bit_identical_and_the_others_move(name):
    """Frozen by ``freeze``, which keeps no moments, or by a learning rate of 0, which does."""
    _, part, _ = name.split("/")
    model, _, which = part.partition("-")
    prefix = model_cases.PARTS[model]["vit" if which == "rate" else which]
    run = runs().outcome(name)
    frozen = {n for n in run.initial if n.startswith(prefix)}
    tables = {n for n in run.initial if n.endswith("pos_embed") or n.startswith("vae.")}
    assert frozen and len(frozen | tables) < len(run.initial)
    for key, weight in run.initial.items():
        if not has_zero_gradient(key) or key in frozen:
            assert torch.equal(run.state[key], weight) == (key in frozen | tables), key
    names = {key for kind, key in run.final if kind == "exp_avg"}
    assert bool(frozen & names) == (which == "rate")
    assert metric_deviation(run, runs().outcome(f"parts/{part}/single@1")) <= BOUND
