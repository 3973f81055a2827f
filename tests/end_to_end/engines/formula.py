"""Bytes of parameters, gradients and optimizer state that a rank should hold: what the counted ones are compared with.

T trainable and F frozen elements, W processes, S processes that share one copy (FSDP), c bytes of the dtype of
computation (4 or 2). Adam keeps two fp32 moments.

==================  ======================  ===================  ============
engine              parameters              gradients            optimizer
==================  ======================  ===================  ============
single              4 (T + F) [1]           4 T                  8 T
zero1               c (T + F) + 4 T / W     4 T [2]              8 T / W
zero2               c (T + F) + 4 T / W     4 T / W              8 T / W
zero3               (c (T + F) + 4 T) / W   4 T / W              8 T / W
FSDP, any strategy  4 (T + F) / S           4 T / S              8 T / S
==================  ======================  ===================  ============

[1] c (T + F) more where c = 2: masters beside the copies. [2] At its peak, before the reduction.

What DeepSpeed 0.19.8 really does beside (``extra``): with optimizer offload the host also holds a staging buffer of
the partition's low-precision weights (c T / W), the sums of accumulated gradients (4 T / W) and two buffers of the size
of the largest parameter; ZeRO-1 in bf16 keeps the bf16 gradients beside their fp32 sums (2 T).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bytes:
    """Per rank."""

    parameters: float
    gradients: float
    optimizer: float
    extra: float = 0.0

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.extra


def expected(engine: str, world: int, precision: str, *, trainable: int, frozen: int, largest: int) -> Bytes:
    """``largest``: elements of the largest parameter."""
    t, f, c = 4.0 * trainable, frozen, 4 if precision == "fp32" else 2
    copies = c * (trainable + f)
    if engine == "single":
        return Bytes(t + 4 * f + (copies if c == 2 else 0), t, 2 * t)
    if engine == "zero1":
        return Bytes(copies + t / world, t, 2 * t / world, 2.0 * trainable if c == 2 else 0.0)
    if engine == "zero2":
        return Bytes(copies + t / world, t / world, 2 * t / world)
    if engine == "zero2_offload":
        extra = (c * trainable + t) / world + 8 * largest
        return Bytes(copies + t / world, t / world, 2 * t / world, extra)
    if engine == "zero3":
        return Bytes((copies + t) / world, t / world, 2 * t / world)
    shared = {"NO_SHARD": 1, "HYBRID_SHARD": 2}.get(engine, world)
    return Bytes((t + 4 * f) / shared, t / shared, 2 * t / shared)
