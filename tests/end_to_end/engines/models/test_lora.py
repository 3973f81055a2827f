"""Adapters under the engines: DoRA in fp32 on files of a published directory, and LoRA on packed weights in bf16."""

from __future__ import annotations

import pytest
import torch

from tests.end_to_end.engines.jobs import lora_cases
from tests.end_to_end.engines.launch import metric_deviation, tensors, unequal, want, weight_deviation
from tools.export import main as export
from unigen_ds.data.batches.loader import pack_documents
from unigen_ds.data.records.records import Turn
from unigen_ds.runner.open.trained import open_model

pytest.importorskip("peft")
runs = want("lora")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
LINKS = [(kind, number) for kind, chain in lora_cases.CHAINS.items() for number in range(len(chain))]
RESUMED = [pair for pair in LINKS if pair[1]]


@pytest.mark.parametrize(("kind", "number"), LINKS)
def test_training_is_that_of_one_process(kind, number):
    run, straight = runs().outcome(lora_cases.link(kind, number)), runs().outcome(f"lora/{kind}/straight")
    after, last = lora_cases.LINK * number, lora_cases.LINK * (number + 1)
    bound = 1e-5 if kind == "dora" else 0.05
    assert metric_deviation(run, straight, after=after, updates=last) <= bound
    assert run.lines[-1]["update"] == last and all(line["applied"] for line in run.lines)


@pytest.mark.parametrize(("kind", "number"), RESUMED)
def test_every_tensor_arrives_bit_equal(kind, number):
    before = runs().outcome(lora_cases.link(kind, number - 1)).final
    after = tensors(runs().outcome(lora_cases.link(kind, number)).folder / "loaded.pth")
    different = unequal(before, after)
    assert [key for key in different if ".lora_" in key or kind == "dora"] == []  # else frozen parameters are rounded
    names = {name for which, name in after if which in ("exp_avg", "exp_avg_sq", "step", "ema")}
    assert names and all(".lora_" in name for name in names)


@pytest.mark.parametrize("number", range(len(lora_cases.CHAINS["dora"])))
def test_checkpoints_hold_what_the_files_of_the_base_do_not(number):
    """Adapters; and the embedding, some rows of which are in no file."""
    final = runs().outcome(lora_cases.link("dora", number)).final
    names = {name for kind, name in final if kind in ("master", "buffer")}
    assert {name for name in names if ".lora_" not in name} == {"model.embed_tokens.weight"}
    assert len(names) == 1 + 2 * 3 * 3  # A, B and lengths of three matrices of two layers


def test_the_chain_ends_where_one_process_does():
    run = runs().outcome(lora_cases.link("dora", len(lora_cases.CHAINS["dora"]) - 1))
    deviation = weight_deviation(run.final, runs().outcome("lora/dora/straight").final)
    assert deviation.relative_l2 <= 1e-5, deviation.where


@pytest.mark.parametrize("kind", lora_cases.OTHERS)
def test_adapters_of_other_models_train_and_are_merged(kind, tmp_path):
    """``CausalLM`` and ``UnifiedModel``; the merge has the loss of the model that was trained."""
    run, single = runs().outcome("lora/others", kind), runs().outcome("lora/others-single", kind)
    assert len(run.lines) == 2 and metric_deviation(run, single) <= 1e-5
    deviation = weight_deviation(run.final, single.final)
    assert deviation.relative_l2 <= 1e-5, deviation.where
    names = {name for which, name in run.final if which in ("exp_avg", "exp_avg_sq", "step", "ema")}
    assert names and all(".lora_" in name for name in names)
    assert export([str(run.folder), str(tmp_path / "merged"), "--merge", "--raw"]) == 0
    (model, processor), (merged_model, _) = open_model(run.folder, raw=True), open_model(tmp_path / "merged")
    words = " ".join(["one"] * 5)
    talk = [Turn("user", "text", "this is zero"), Turn("assistant", "text", words)]
    batch = pack_documents([[split.load(processor, ("key",)) for split in processor.plan(talk).splits]], processor)
    losses = [float(model.eval()(batch).sums["text"].detach()), float(merged_model.eval()(batch).sums["text"].detach())]
    base = float(without(model)(batch).sums["text"].detach())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and abs(base - losses[0]) > 1e-3


def without(model):
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.zeros_(parameter)
    return model
