"""Published weights: the model is built without memory, sharded, and filled shard by shard from the files."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.engines import cases
from tests.end_to_end.engines.launch import metric_deviation, unequal, want

runs = want("published")
pytestmark = pytest.mark.timeout(3600)
NAMES = [job.name for job in cases.published(full=False) if "resumed" not in job.name]
SINGLE = "published/single@1-fp32"


@pytest.mark.parametrize("name", [name for name in NAMES if name != SINGLE])
def test_every_engine_starts_from_the_same_weights(name):
    """Bit by bit, also those that no file has; tables are frozen, and DeepSpeed rounds what is frozen in bf16."""
    run, single = runs().outcome(name).initial, runs().outcome(SINGLE).initial
    assert run.keys() == single.keys()
    for key, tensor in single.items():
        if not ("bf16" in name and key.endswith("pos_embed")):
            assert torch.equal(run[key], tensor), key


def test_they_are_those_of_the_files():
    folder, state = runs().out / "data" / "parts", runs().outcome(SINGLE).initial
    for number in (1, 2):
        for key, stored in load_file(folder / "llm" / f"model-0000{number}-of-00002.safetensors").items():
            name = f"language_model.{key}"
            assert torch.equal(state[name], stored.float()), name
            if "layers" in key:
                parts = name.split(".")
                at = 5 if parts[4] in ("mlp", "input_layernorm", "post_attention_layernorm") else 6
                parts[at - 1] += "_moe_gen"
                assert torch.equal(state[".".join(parts)], stored.float()), parts
    assert torch.equal(state["language_model.lm_head.weight"], state["language_model.model.embed_tokens.weight"])
    patches = load_file(folder / "vit" / "model.safetensors")["vision_model.embeddings.patch_embedding.weight"]
    expected = patches.permute(0, 2, 3, 1).flatten(1)
    assert torch.equal(state["vit_model.vision_model.embeddings.patch_embedding.weight"], expected)


def test_what_no_file_has_is_initialised():
    state = runs().outcome(SINGLE).initial
    assert not state["llm2vae.weight"].any() and not state["connector.fc1.bias"].any()
    assert (state["language_model.model.layers.0.self_attn.q_norm_moe_gen.weight"] == 1).all()
    assert state["vae2llm.weight"].std() * state["vae2llm.weight"].shape[1] ** 0.5 == pytest.approx(1, rel=0.3)
    assert state["latent_pos_embed.pos_embed"].square().sum(1) == pytest.approx(torch.full((16,), 16.0), rel=1e-5)


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("fp32") and name != SINGLE])
def test_training_on_is_that_of_one_process(name):
    assert metric_deviation(runs().outcome(name), runs().outcome(SINGLE)) <= 1e-5


@pytest.mark.parametrize("engine", ["zero3", "FULL_SHARD"])
def test_a_resumed_run_does_not_start_from_them_again(engine):
    straight, resumed = (runs().outcome(f"published/{engine}@2-{end}") for end in ("fp32", "resumed"))
    assert unequal(resumed.final, straight.final) == []


def test_every_engine_looks_at_the_same_values_before_the_first_update():
    """Tiny random weights: the losses are those of chance, and nothing else is wrong."""
    for name in NAMES:
        log = (runs().outcome(name).folder / "train.log").read_text().splitlines()
        info = [line.partition("First update: ")[2] for line in log if "First update: " in line]
        assert info[0] == f"the values of {len(runs().outcome(SINGLE).initial)} tensors are looked at.", name
        assert info[1].startswith("losses ") and all("the loss" in problem for problem in info[2:-1]), (name, info)
    for engine in ("zero3", "FULL_SHARD"):
        log = (runs().outcome(f"published/{engine}@2-resumed").folder / "train.log").read_text()
        assert log.count("are looked at") == 1, "a resume is no first update"
