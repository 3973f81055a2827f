"""Our language models and vision tower compared with transformers' own, with random sizes and weights."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SiglipConfig,
    SiglipModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from tests.models.batches import packed
from unigen_ds.core.batch import CAUSAL
from unigen_ds.families.bagel import published as bagel
from unigen_ds.families.bagel.model import MoTForCausalLM
from unigen_ds.families.nanovlm import published as nanovlm
from unigen_ds.models.attention import plan_attention
from unigen_ds.models.llama import LlamaLM
from unigen_ds.models.vision import VisionTransformer

SEEDS = range(4)
BOUND = 1e-5
"""Largest difference of a logit or a feature, divided by the largest value; measured: 2e-6."""


def language_sizes(draw: random.Random) -> dict[str, Any]:
    kv_heads = draw.choice((1, 2, 3))
    heads = kv_heads * draw.choice((1, 2, 4))
    return {
        "hidden_size": heads * 4 * draw.randint(1, 4),
        "intermediate_size": draw.randint(5, 70),
        "num_hidden_layers": draw.randint(1, 3),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": draw.randint(20, 90),
        "rms_norm_eps": draw.choice((1e-5, 1e-6)),
        "rope_theta": draw.choice((1e4, 1e5, 1e6)),
    }


def transformers_words(sizes: Mapping[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in sizes.items() if key != "rope_theta"}
    return {**rest, "rope_parameters": {"rope_type": "default", "rope_theta": sizes["rope_theta"]}}


def randomised(model: nn.Module, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        parameter.data.copy_(0.3 * noise if parameter.ndim > 1 else parameter + 0.2 * noise)
    return model


def documents(draw: random.Random, vocabulary: int) -> list[Tensor]:
    return [torch.randint(vocabulary, (draw.randint(1, 30),)) for _ in range(draw.randint(1, 4))]


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max() / theirs.abs().max()) <= BOUND


@pytest.mark.parametrize("seed", SEEDS)
def test_llama(seed: int) -> None:
    draw = random.Random(seed)
    sizes = {**language_sizes(draw), "tie_word_embeddings": seed % 2 == 0, "max_position_embeddings": 64}
    ours: Any = randomised(LlamaLM(sizes), seed)
    theirs = LlamaForCausalLM(LlamaConfig(**transformers_words(sizes))).eval()
    theirs.load_state_dict(ours.state_dict())
    texts = documents(draw, sizes["vocab_size"])
    with torch.no_grad():
        batch = packed([[(CAUSAL, len(text))] for text in texts])
        found = ours.lm_head(ours.model(ours.model.embed_tokens(torch.cat(texts)), batch))
        assert_close(found, torch.cat([theirs(text[None]).logits[0] for text in texts]))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_und_expert_is_qwen2_with_query_and_key_norms(seed: int) -> None:
    """The same as transformers' Qwen3, except for Qwen2's biases: they are zero here (the golden batch has them)."""
    draw = random.Random(seed)
    sizes = language_sizes(draw)
    ours: Any = randomised(MoTForCausalLM({**sizes, "dropout": 0.0}), seed)
    for name, parameter in ours.named_parameters():
        if name.endswith("_proj.bias"):
            nn.init.zeros_(parameter)
    head = sizes["hidden_size"] // sizes["num_attention_heads"]
    config = Qwen3Config(**transformers_words(sizes), head_dim=head, tie_word_embeddings=False)
    theirs = Qwen3ForCausalLM(config).eval()
    state = ours.state_dict()
    theirs.load_state_dict({n: t for n, t in state.items() if "_moe_gen" not in n and not n.endswith("_proj.bias")})
    texts = documents(draw, sizes["vocab_size"])
    with torch.no_grad():
        batch = packed([[(CAUSAL, len(text))] for text in texts])
        x_TD = ours.model.embed_tokens(torch.cat(texts))
        attend = plan_attention(batch, torch.arange(len(x_TD)))
        found = ours.lm_head(ours.model(x_TD, len(x_TD), batch.position_ids, attend))
        assert_close(found, torch.cat([theirs(text[None]).logits[0] for text in texts]))


@pytest.mark.parametrize("seed", SEEDS)
def test_siglip(seed: int) -> None:
    draw = random.Random(seed)
    heads, patch, side, channels = draw.randint(1, 3), draw.choice((2, 4, 7)), draw.randint(1, 5), draw.choice((1, 3))
    sizes = {
        "hidden_size": heads * draw.choice((4, 6, 8)),
        "intermediate_size": draw.randint(4, 40),
        "num_hidden_layers": draw.randint(1, 3),
        "num_attention_heads": heads,
        "image_size": side * patch,
        "patch_size": patch,
        "num_channels": channels,
    }
    ours: Any = randomised(VisionTransformer(**sizes), seed)
    theirs = SiglipVisionModel(SiglipVisionConfig(**sizes, vision_use_head=False)).eval()
    state, first = ours.state_dict(), "embeddings.patch_embedding.weight"
    state[first] = state[first].unflatten(1, (patch, patch, channels)).permute(0, 3, 1, 2)
    prefix = "vision_model." if any(name.startswith("vision_model.") for name in theirs.state_dict()) else ""
    theirs.load_state_dict({prefix + name: tensor for name, tensor in state.items()})
    images = torch.randn(2, channels, side * patch, side * patch)
    split = images.unflatten(3, (side, patch)).unflatten(2, (side, patch))  # [N, C, row, y, column, x]
    patches = split.permute(0, 2, 4, 3, 5, 1).reshape(2 * side**2, -1)
    with torch.no_grad():
        found = ours(patches, torch.arange(side**2).repeat(2), (side**2, side**2))
        assert_close(found, theirs(images).last_hidden_state.flatten(0, 1))


def test_a_vision_tower_is_read_as_it_is_saved_alone_and_as_a_part(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = SiglipVisionConfig(**sizes, image_size=8, patch_size=4)
    both = SiglipModel(SiglipConfig(
        vision_config=vision.to_dict(), text_config={**sizes, "vocab_size": 8, "max_position_embeddings": 4}
    ))  # fmt: skip
    both.save_pretrained(tmp_path / "both")
    SiglipVisionModel(vision).save_pretrained(tmp_path / "alone")
    for module in (bagel, nanovlm):
        found = [module.read_pretrained({"vit": str(tmp_path / name)}) for name in ("both", "alone")]
        names = [{name for name in each.tensors if "vision_model." in name} for each in found]
        assert names[0] == names[1] and len(names[0]) > 30
