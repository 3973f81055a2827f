"""PyTorch's distributed checkpoint (``.metadata`` and one ``__<rank>_0.distcp`` per process) without its collectives.

In: a state dict of DTensors and plain tensors, equal keys on all ranks. Out: the file of this rank, and on rank 0, once
all have written, ``.metadata``. ``torch.distributed.checkpoint.save`` writes between its collectives, and its error is
no ``Exception``. Which replica writes a tensor is decided by the same rule on every rank, so nothing is exchanged
beforehand. ``torch.distributed.checkpoint.load`` reads the result. Source: torch 2.13, ``state_dict_saver.py`` and
``filesystem.py``.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan, create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from unigen_ds.backends.torch_optimizer import local_part
from unigen_ds.core.shards import STAMP
from unigen_ds.system import dist
from unigen_ds.system.outputs import HashedFile, Output, StateFiles, bytes_output

Written = tuple[str, list[tuple[int, int]]]
"""The file of a rank, and where it wrote each item of its plan: first byte, length."""


def dcp_files(state: Mapping[str, Tensor], *, replica: int, replicas: int, stamp: str = "") -> StateFiles:
    """The file that this rank writes. ``replica``: which of the ``replicas`` copies of the DTensors is here. ``stamp``,
    as of ``Backend``, is the first item.

    Plain tensors are rank 0's: running statistics (BatchNorm) differ between ranks, and one rank's belong together.
    """
    sharded = {key: value for key, value in state.items() if isinstance(value, DTensor)}
    own = _own(sharded, replica, replicas) | (state.keys() - sharded.keys() if dist.is_main() else set())
    if own:
        mark = f"{STAMP}|{dist.rank()}"
        state = {mark: torch.tensor(list(stamp.encode()), dtype=torch.uint8), **state}
        own.add(mark)
    plan = create_default_local_save_plan({key: value for key, value in state.items() if key in own}, True)
    name = f"__{dist.rank()}_0.distcp"
    tensors = [local_part(state[item.index.fqn]).detach() for item in plan.items]
    output = Output(name, sum(tensor.nbytes for tensor in tensors), partial(_write, name, tensors))
    return StateFiles("dcp", [output] if tensors else [], _index, plan=plan)


def _write(name: str, tensors: Sequence[Tensor], stream: HashedFile) -> Written:
    ranges = []
    for tensor in tensors:
        begin = stream.tell()
        torch.save(_alone(tensor), stream)  # type: ignore[arg-type] # a writer without fileno
        ranges.append((begin, stream.tell() - begin))
    return name, ranges


def _own(tensors: Mapping[str, Tensor], replica: int, replicas: int) -> set[str]:
    """The keys that this replica writes: largest first, each to the one with the fewest bytes so far."""
    loads, own = [0] * replicas, set()
    for key in sorted(tensors, key=lambda key: (-tensors[key].numel(), key)):
        chosen = min(range(replicas), key=lambda number: loads[number])
        loads[chosen] += tensors[key].numel() * tensors[key].element_size()
        if chosen == replica:
            own.add(key)
    return own


def _alone(tensor: Tensor) -> Tensor:
    """On the host, with a storage of its own: ``torch.save`` writes whole storages."""
    tensor = tensor.cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _index(plans: Sequence[SavePlan], results: Sequence[Sequence[Written]]) -> list[Output]:
    """``.metadata``: all plans in the order of the ranks, and where each item is."""
    plans = [plan for plan in plans if plan.items]
    written = [one for of_rank in results for one in of_rank]
    _, metadata = create_default_global_save_plan(plans)
    metadata.storage_data = {
        item.index: _StorageInfo(name, begin, length)
        for plan, (name, ranges) in zip(plans, written, strict=True)
        for item, (begin, length) in zip(plan.items, ranges, strict=True)
    }
    metadata.planner_data = {key: (key,) for key in metadata.state_dict_metadata}
    metadata.storage_meta = StorageMeta()
    metadata.version = CURRENT_DCP_VERSION
    return [bytes_output(".metadata", pickle.dumps(metadata))]
