"""What makes a trace faster and changes none of its numbers: two ways around work that torch does for each operation.

Private parts of torch 2.13 are used here alone; ``tests/planning/test_shortcuts.py`` pins them, and where a version has
no such function it is not replaced. With 14 B parameters a trace has 700,000 operations, most of them on a few tensors:
``FakeTensorMode`` needs 0.2 ms for each, its kernels for shapes a tenth of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_aten = torch.ops.aten
PLAIN_OPERATIONS = frozenset((
    _aten.add.Tensor, _aten.addmm.default, _aten.alias.default, _aten.as_strided.default, _aten.bmm.default,
    _aten.cat.default, _aten.clone.default, _aten.detach.default, _aten.div.Scalar, _aten.div.Tensor,
    _aten.expand.default, _aten.mean.dim, _aten.mm.default, _aten.mul.Scalar, _aten.mul.Tensor, _aten.neg.default,
    _aten.permute.default, _aten.pow.Tensor_Scalar, _aten.rsqrt.default, _aten.select.int, _aten.silu.default,
    _aten.silu_backward.default, _aten.slice.Tensor, _aten.split.Tensor, _aten.split_with_sizes.default,
    _aten.squeeze.dim, _aten.sub.Tensor, _aten.sum.default, _aten.sum.dim_IntList, _aten.t.default,
    _aten.transpose.int, _aten.unbind.int, _aten.unsqueeze.default, _aten.view.default, _aten._unsafe_view.default,
    _aten._to_copy.default, _aten.new_zeros.default, _aten.slice_backward.default, _aten.zeros_like.default,
))  # fmt: skip
"""Their results have the device of their inputs, new memory or that of an input, and shapes that no value decides."""


def by_shapes_alone(
    mode: FakeTensorMode, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[Tensor]
) -> Any:
    """The result of one of ``PLAIN_OPERATIONS`` on fake tensors of one device, ``NotImplemented`` for anything else.

    ``inputs``: the tensors of ``args`` and ``kwargs``.
    """
    if function not in PLAIN_OPERATIONS or kwargs.get("device") is not None:
        return NotImplemented
    if any(type(each) is not FakeTensor for each in inputs):
        return NotImplemented
    device = inputs[0].fake_device  # type: ignore[attr-defined]
    if any(each.fake_device != device for each in inputs[1:]):  # type: ignore[attr-defined]
        return NotImplemented
    with in_kernel_invocation_manager(mode):
        result = function(*args, **kwargs)
    if isinstance(result, Tensor):
        return FakeTensor(mode, result, device)
    return [FakeTensor(mode, each, device) for each in result]


@contextmanager
def placements_looked_at_once() -> Iterator[None]:
    """Inside, an operation on a list of DTensors looks at their placements once, not once for each tensor of the list.

    Torch looks for strided placements, which no engine here has, in all arguments for each of them: with 1,500
    parameters a third of the time of a trace.
    """
    from torch.distributed.tensor import _sharding_prop
    from torch.distributed.tensor.placement_types import _StridedShard

    propagate = getattr(_sharding_prop, "_propagate_use_strided_shard_flag", None)
    if propagate is None:  # another version of torch, which does not look
        yield
        return
    without: list[Any] = [None]

    def propagate_once(strategy: Any, schema: Any) -> None:
        if without[0] is schema:
            return
        if any(isinstance(placement, _StridedShard) for spec in schema.args_spec for placement in spec.placements):
            propagate(strategy, schema)
        else:
            without[0] = schema

    with mock.patch.object(_sharding_prop, "_propagate_use_strided_shard_flag", propagate_once):
        yield
