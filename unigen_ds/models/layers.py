"""Building blocks, named as Qwen2's and BAGEL's. T: tokens, D: width, H: heads, E: head width, L: latent patches."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension, computed in fp32 (Zhang and Sennrich, 2019)."""

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``, the MLP of Llama and Qwen2."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class GeluMLP(nn.Module):
    """Linear, tanh-GELU, Linear: the MLP of SigLIP, and BAGEL's connector of ViT and language model."""

    def __init__(self, width_in: int, inner: int, width_out: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width_in, inner)
        self.fc2 = nn.Linear(inner, width_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class TimestepEmbedder(nn.Module):
    """Time step in [0, 1] (not scaled by 1000) -> model width; frequencies are cosines first, then sines."""

    num_frequencies = 256

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(self.num_frequencies, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, timesteps_L: Tensor, *, dtype: torch.dtype) -> Tensor:
        half = self.num_frequencies // 2
        steps = torch.arange(half, dtype=torch.float32, device=timesteps_L.device)
        angles = timesteps_L.float()[:, None] * torch.exp(steps * (-math.log(10000.0) / half))
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype))


class PositionTable(nn.Module):
    """Frozen 2-D sine-cosine table, ``[side * side, width]``; index = row * side + column."""

    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(sincos_2d(side, width), requires_grad=False)

    def forward(self, position_ids: Tensor) -> Tensor:
        return F.embedding(position_ids, self.pos_embed)


def sincos_2d(side: int, width: int) -> Tensor:
    """The table of ``PositionTable``: the first half of a vector encodes the column, the second the row (as in MAE)."""
    omega = torch.arange(width // 4, dtype=torch.float64) / (width // 4)
    angles = torch.arange(side, dtype=torch.float64)[:, None] * (1.0 / 10000.0**omega)[None]
    line = torch.cat([angles.sin(), angles.cos()], dim=1)  # [side, width / 2]
    columns = line[None].expand(side, side, -1)
    rows = line[:, None].expand(side, side, -1)
    return torch.cat([columns, rows], dim=-1).reshape(side * side, width).float()


def rotary_tables(position_ids_T: Tensor, *, head_width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[T, 1, E]`` in fp32 for rotary positions (Su et al., 2021; Qwen2's half-split layout)."""
    index = torch.arange(0, head_width, 2, dtype=torch.float32, device=position_ids_T.device)
    angles = position_ids_T.float()[:, None] * (1.0 / theta ** (index / head_width))
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos(), angles.sin()


def rotate(x_THE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions; computed in fp32, returned in the dtype of ``x``."""
    wide = x_THE.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat([-second, first], dim=-1) * sin).to(x_THE.dtype)


def run_layers(layers: Iterable[nn.Module], x: Tensor, *rest: Any, recompute: bool) -> Tensor:
    """``layer(x, *rest)``, one after the other; with ``recompute`` once more in the backward pass, to keep less."""
    for layer in layers:
        if recompute and torch.is_grad_enabled():
            x = checkpoint(layer, x, *rest, use_reentrant=False)
        else:
            x = layer(x, *rest)
    return x
