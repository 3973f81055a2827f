"""The shortcuts give what torch gives, and are taken."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import Replicate, _sharding_prop

from unigen_ds.planning.counted import CountedBytes
from unigen_ds.planning.shortcuts import PLAIN_OPERATIONS, by_shapes_alone, placements_looked_at_once

aten = torch.ops.aten
EXAMPLES = {
    aten.addmm.default: lambda a, b: (b[:, 0], a, b.t()), aten.as_strided.default: lambda a, b: (a, (2, 2), (6, 1), 1),
    aten.bmm.default: lambda a, b: (a[None], b.t()[None]), aten.cat.default: lambda a, b: ([a, b], 1),
    aten.expand.default: lambda a, b: (a[:, None], (4, 3, 6)), aten.mean.dim: lambda a, b: (a, [-1], True),
    aten.mm.default: lambda a, b: (a, b.t()), aten.permute.default: lambda a, b: (a, (1, 0)),
    aten.pow.Tensor_Scalar: lambda a, b: (a, 2), aten.select.int: lambda a, b: (a, 1, 2),
    aten.slice.Tensor: lambda a, b: (a, 1, 1, 3), aten.split.Tensor: lambda a, b: (a, 3),
    aten.split_with_sizes.default: lambda a, b: (a, [1, 3]), aten.squeeze.dim: lambda a, b: (a[None], 0),
    aten.sum.dim_IntList: lambda a, b: (a, [0], True), aten.transpose.int: lambda a, b: (a, 0, 1),
    aten.unbind.int: lambda a, b: (a, 1), aten.unsqueeze.default: lambda a, b: (a, 1),
    aten.view.default: lambda a, b: (a, [2, 12]), aten._unsafe_view.default: lambda a, b: (a, [2, 12]),
    aten.slice_backward.default: lambda a, b: (a, [4, 9], 1, 2, 8, 1), aten.new_zeros.default: lambda a, b: (a, [3]),
    aten.div.Scalar: lambda a, b: (a, 2.0), aten.mul.Scalar: lambda a, b: (a, 2.0),
}  # fmt: skip
OF_TWO = (aten.add.Tensor, aten.div.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.silu_backward.default)


@pytest.mark.parametrize("function", sorted(PLAIN_OPERATIONS, key=str), ids=str)
def test_an_operation_by_shapes_alone_is_what_torch_makes_of_it(function):
    """Shape, strides, offset, dtype, device, and whether the memory is that of an input."""
    with CountedBytes(fake=True) as counted:
        a, b = torch.randn(4, 6), torch.randn(4, 6)
        args = EXAMPLES.get(function, lambda a, b: (a, b) if function in OF_TWO else (a,))(a, b)
    inputs = [each for each in (args[0] if isinstance(args[0], list) else args) if isinstance(each, FakeTensor)]
    found, expected = by_shapes_alone(counted._without_memory, function, args, {}, inputs), function(*args)
    assert facts(found, inputs) == facts(expected, inputs)


def facts(result, inputs):
    """Of each tensor of a result."""
    memory = [given.untyped_storage()._cdata for given in inputs]
    return [
        (type(t), t.shape, t.stride(), t.storage_offset(), t.dtype, t.device,
         [t.untyped_storage()._cdata == one for one in memory])
        for t in ([result] if isinstance(result, FakeTensor) else result)
    ]  # fmt: skip


def test_anything_else_is_left_to_torch():
    with CountedBytes(fake=True) as counted:
        a = torch.randn(4, 6)
    mode, real = counted._without_memory, torch.zeros(4, 6)
    assert by_shapes_alone(mode, aten.relu.default, (a,), {}, [a]) is NotImplemented
    assert by_shapes_alone(mode, aten.add.Tensor, (a, real), {}, [a, real]) is NotImplemented
    assert by_shapes_alone(mode, aten._to_copy.default, (a,), {"device": "meta"}, [a]) is NotImplemented


def test_placements_of_a_list_are_looked_at_once():
    looked: list[int] = []

    class Schema:
        @property
        def args_spec(self):
            looked.append(1)
            return (SimpleNamespace(placements=(Replicate(),)),)

    schema, strategy, before = Schema(), None, _sharding_prop._propagate_use_strided_shard_flag
    with placements_looked_at_once():
        for _ in range(3):
            _sharding_prop._propagate_use_strided_shard_flag(strategy, schema)
        assert len(looked) == 1
        _sharding_prop._propagate_use_strided_shard_flag(strategy, Schema())
        assert len(looked) == 2
    assert _sharding_prop._propagate_use_strided_shard_flag is before
