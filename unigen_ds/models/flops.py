"""Floating point operations of a training step, as MFU counts them: matrix products alone, two a multiply-add.

A linear layer costs 2 a weight and row forward, as much for the gradient of its input and as much for that of its
weight, each where it is needed: 6 where all is trained, 2 for a frozen vision tower. Attention counts whole squares of
document lengths (it may compute half of that where it is causal). Nothing counts twice that is computed again in the
backward pass, and a frozen autoencoder does not count. So a rate measures how fast the training is, not how busy the
device is (Chowdhery et al., 2022).

Sizes are those of the modules, not of the parameters: an engine may have left a rank an empty shard of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from torch import nn

_COUNTS: WeakKeyDictionary[nn.Module, dict[bool, float]] = WeakKeyDictionary()  # of linear_flops: what trains stays


def trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def linear_flops(module: nn.Module, *, input_grad: bool) -> float:
    """Operations a row, forward and backward, of all linear layers of ``module``, which are in forward order.
    ``input_grad``: whether the input gets a gradient. Inner inputs do where anything before them trains.
    """
    counts, key = _COUNTS.setdefault(module, {}), input_grad
    if key in counts:
        return counts[key]
    total = 0.0
    for each in module.modules():
        rows, columns = (getattr(each, name, None) for name in ("out_features", "in_features"))
        if isinstance(rows, int) and isinstance(columns, int) and not hasattr(each, "base_layer"):  # its parts count
            total += 2.0 * rows * columns * (1 + input_grad + trains(each))
            input_grad = input_grad or trains(each)
    return counts.setdefault(key, total)


def attention_flops(lengths: Sequence[int], width: int, *, grad: bool) -> float:
    """Operations of one layer's scores and sums, forward and with ``grad`` backward, for documents of ``lengths``."""
    return 4.0 * width * sum(length**2 for length in lengths) * (3 if grad else 1)
