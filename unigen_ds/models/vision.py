"""SigLIP vision tower over packed patches of images of any size (navit): names and numbers of BAGEL's ``vit_model``.

Shape suffixes: V patches of all images, D width, H heads, E head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from unigen_ds.models.attention import AttentionPlan, plan_full_attention
from unigen_ds.models.flops import trains
from unigen_ds.models.layers import GeluMLP, run_layers


class VisionAttention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x_VD: Tensor, attend: AttentionPlan) -> Tensor:
        q, k, v = (proj(x_VD).unflatten(-1, (self.num_heads, -1)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(attend(q, k, v).flatten(1))


class VisionLayer(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["layer_norm_eps"]
        self.layer_norm1 = nn.LayerNorm(width, eps=eps)
        self.self_attn = VisionAttention(width, config["num_attention_heads"])
        self.layer_norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = GeluMLP(width, config["intermediate_size"], width)

    def forward(self, x_VD: Tensor, attend: AttentionPlan) -> Tensor:
        x_VD = x_VD + self.self_attn(self.layer_norm1(x_VD), attend)
        return x_VD + self.mlp(self.layer_norm2(x_VD))


class VisionTransformer(nn.Module):
    """``embeddings``, ``encoder.layers``, ``post_layernorm``. ``config``: all sizes of ``VisionSizes``."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, side = config["hidden_size"], config["image_size"] // config["patch_size"]
        patches = nn.Linear(config["num_channels"] * config["patch_size"] ** 2, width)
        positions = nn.Embedding(side * side, width)
        self.embeddings = nn.ModuleDict({"patch_embedding": patches, "position_embedding": positions})
        layers = nn.ModuleList(VisionLayer(config) for _ in range(config["num_hidden_layers"]))
        self.encoder: Any = nn.ModuleDict({"layers": layers})
        self.post_layernorm = nn.LayerNorm(width, eps=config["layer_norm_eps"])
        self.activation_checkpointing = False

    def forward(self, patches: Tensor, position_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Patches ``[V, channels * p * p]`` of images with ``lengths`` patches each -> ``[V, D]``."""
        attend = plan_full_attention(lengths, patches.device)
        x_VD = self.embeddings["patch_embedding"](patches) + self.embeddings["position_embedding"](position_ids)
        # a frozen tower keeps nothing for the backward pass, so there is nothing to save
        recompute = self.activation_checkpointing and trains(self)
        return self.post_layernorm(run_layers(self.encoder.layers, x_VD, attend, recompute=recompute))
