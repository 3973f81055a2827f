"""Frozen linear layers with packed weights: NF4 (Dettmers et al., 2023) and INT8 (Dettmers et al., 2022).

In: a model whose weights are in place and whose parts are frozen. Out: the same model, the ``nn.Linear`` of the named
parts replaced by ``QuantizedLinear``. The packing is that of bitsandbytes, which has it for CPU and CUDA.

===========  ==================  ==============================  ====================  ==============
scheme       a weight is         scaled by the largest of        bytes a weight        of fp32
===========  ==================  ==============================  ====================  ==============
``nf4``      one of 16 levels    64 neighbours                   0.5625                1 / 7.1
``int8``     one of 255 levels   its row                         1 + 4 / row length    1 / 4
===========  ==================  ==============================  ====================  ==============

The trade-off: less memory, but a weight is unpacked in every forward pass and once more in the backward pass (no
unpacked weight is kept in between), and packed weights are whole on every process, because engines shard parameters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from unigen_ds.core.errors import ConfigError
from unigen_ds.system.machine import import_optional

_BLOCK = 64
_PIECE = 2**14  # blocks packed at once: bitsandbytes compares each weight with all 16 levels on the CPU, 64 MiB here
_HEAD = "lm_head"  # as in transformers: its errors would be errors of the logits


def quantize(weight: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    """``[rows, columns]`` -> packed weight and fp32 scales.

    ``nf4``: uint8 ``[blocks, 32]`` and ``[blocks]``; row after row, filled up with zeros to whole blocks, because the
    AVX-512 kernel requires rows of whole blocks. ``int8``: int8 ``[rows, columns]`` and ``[rows]``.
    """
    if scheme == "int8":
        packed, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(weight)
        return packed, scales
    flat = weight.flatten()
    blocks = F.pad(flat, (0, -flat.numel() % _BLOCK)).view(-1, _BLOCK)
    pieces = [
        torch.ops.bitsandbytes.quantize_4bit(piece, _BLOCK, scheme, torch.uint8) for piece in blocks.split(_PIECE)
    ]
    return torch.cat([p for p, _ in pieces]).view(-1, _BLOCK // 2), torch.cat([s for _, s in pieces])


def dequantize(packed: Tensor, scales: Tensor, *, scheme: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The inverse of ``quantize``, up to its error."""
    if scheme == "int8":
        return torch.ops.bitsandbytes.int8_vectorwise_dequant(packed, scales).to(dtype)
    blocks = torch.ops.bitsandbytes.dequantize_4bit(packed, scales, _BLOCK, scheme, [len(scales), _BLOCK], dtype)
    return blocks.flatten()[: math.prod(shape)].view(shape)


class _MatmulPacked(torch.autograd.Function):
    """``x @ W.T``. Between the passes it keeps the packed weight: autograd alone would keep the unpacked one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, scheme: str, shape: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.scheme, ctx.shape = scheme, shape
        return x @ dequantize(packed, scales, scheme=scheme, shape=shape, dtype=x.dtype).T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        packed, scales = ctx.saved_tensors
        weight = dequantize(packed, scales, scheme=ctx.scheme, shape=ctx.shape, dtype=grad.dtype)
        return grad @ weight, None, None, None, None


class QuantizedLinear(nn.Module):
    """``x @ W.T + bias`` in the precision of ``x``. The input gets its gradient; ``W`` is fixed.

    Packed weight and scales are persistent buffers: checkpoints hold them, every process holds them whole.
    """

    packed: Tensor
    scales: Tensor
    """fp32 bits as int32: nothing that casts floating-point tensors (``model.to(bf16)``, an engine) may round them."""

    def __init__(self, linear: nn.Linear, scheme: str) -> None:
        super().__init__()
        self.scheme, self.shape = scheme, tuple(linear.weight.shape)
        self.out_features, self.in_features = self.shape
        packed, scales = quantize(linear.weight.detach(), scheme)
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales.view(torch.int32))
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """``W`` unpacked, in fp32."""
        scales = self.scales.view(torch.float32)
        return dequantize(self.packed, scales, scheme=self.scheme, shape=self.shape, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        y = _MatmulPacked.apply(x, self.packed, self.scales.view(torch.float32), self.scheme, self.shape)
        return y if self.bias is None else y + self.bias


def quantize_frozen(parts: Mapping[str, nn.Module], schemes: Mapping[str, str | None]) -> None:
    """Replace the linear layers of the frozen, loaded ``parts`` in place, except the output head and tied ones.

    ``schemes``: of ``Quantize``. Raises ``ConfigError`` where a part is trained, and where bitsandbytes is missing.
    """
    for part, scheme in schemes.items():
        if scheme is None:
            continue
        if any(parameter.requires_grad for parameter in parts[part].parameters()):
            raise ConfigError(
                f"model.quantize names {part!r}, which is trained", remedy=f"add {part!r} to model.freeze as well"
            )
        names = [n for n, layer in parts[part].named_modules() if type(layer) is nn.Linear and n != _HEAD]
        pack(parts[part], [name for name in names if name not in shared_weights(parts[part], names)], scheme)


def pack(part: nn.Module, names: Iterable[str], scheme: str) -> None:
    """Replace the named linear layers, which are frozen, in place. Raises ``ConfigError`` without bitsandbytes."""
    # registers ``torch.ops.bitsandbytes``
    import_optional("bitsandbytes", "model.quantize", install="'unigen_ds[quantize]'")
    for name in names:
        layer = part.get_submodule(name)
        if isinstance(layer, nn.Linear):  # else it is packed
            part.set_submodule(name, QuantizedLinear(layer, scheme))


def shared_weights(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return those of the named layers whose weight another module uses, too."""
    owners = Counter(id(p) for layer in model.modules() for p in layer.parameters(recurse=False))
    layers = {name: model.get_submodule(name) for name in names}
    return [name for name, layer in layers.items() if type(layer) is nn.Linear and owners[id(layer.weight)] > 1]


def unpack(layer: QuantizedLinear) -> nn.Linear:
    """A plain layer, in fp32 and with memory of its own, that has the unpacked weight."""
    linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    linear.weight = nn.Parameter(layer.weight.clone(), requires_grad=False)
    linear.bias = layer.bias
    return linear


def plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """``model.state_dict()`` under the names of the model that is not quantised: packed weights are unpacked."""
    state = dict(model.state_dict())
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            del state[f"{name}.packed"], state[f"{name}.scales"]
            state[f"{name}.weight"] = layer.weight
    return state
