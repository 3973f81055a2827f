"""A causal language model of Llama's kind (SmolLM2): RMSNorm, grouped-query attention, rotary positions, SwiGLU.

Parameter names are those of transformers' Llama. Positions beyond ``max_position_embeddings`` are squeezed into it,
each document by its own length (nanoVLM squeezes by the longest of the call: there a neighbour changes a sample).

Shape suffixes: T tokens, D width, H heads, E head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from unigen_ds.core.batch import PackedBatch
from unigen_ds.models.attention import Attend, plan_attention
from unigen_ds.models.layers import RMSNorm, SwiGLU, rotary_tables, rotate, run_layers


class LlamaAttention(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, num_heads = config["hidden_size"], config["num_attention_heads"]
        self.head_width, num_kv_heads = width // num_heads, config["num_key_value_heads"]
        self.q_proj = nn.Linear(width, num_heads * self.head_width, bias=False)
        self.k_proj = nn.Linear(width, num_kv_heads * self.head_width, bias=False)
        self.v_proj = nn.Linear(width, num_kv_heads * self.head_width, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_width, width, bias=False)

    def forward(self, x_TD: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q, k, v = (p(x_TD).unflatten(-1, (-1, self.head_width)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attend(rotate(q, *rotary), rotate(k, *rotary), v).flatten(1))


class LlamaLayer(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn = LlamaAttention(config)
        self.mlp = SwiGLU(width, config["intermediate_size"])
        self.input_layernorm = RMSNorm(width, eps=eps)
        self.post_attention_layernorm = RMSNorm(width, eps=eps)

    def forward(self, x_TD: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), rotary, attend)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class LlamaBackbone(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], width)
        self.layers = nn.ModuleList(LlamaLayer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(width, eps=config["rms_norm_eps"])
        self.head_width, self.theta = width // config["num_attention_heads"], config["rope_theta"]
        self.max_positions = config["max_position_embeddings"]
        self.activation_checkpointing = False

    def forward(self, x_TD: Tensor, batch: PackedBatch, attend: Attend | None = None) -> Tensor:
        """Input embeddings in token order -> final hidden states."""
        positions = batch.position_ids.float()
        longest = positions.new_zeros(len(batch.document_lengths))
        longest = longest.scatter_reduce(0, batch.document_ids, positions + 1, "amax")
        positions = positions / (longest / self.max_positions).clamp(min=1.0)[batch.document_ids]  # squeezed
        rotary = rotary_tables(positions, head_width=self.head_width, theta=self.theta)
        attend = attend or plan_attention(batch)
        return self.norm(run_layers(self.layers, x_TD, rotary, attend, recompute=self.activation_checkpointing))


class LlamaLM(nn.Module):
    """Wrapper with the published names ``model.*`` and ``lm_head``; one embedding where ``tie_word_embeddings``."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = LlamaBackbone(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        if config["tie_word_embeddings"]:
            self.lm_head.weight = self.model.embed_tokens.weight
