"""Native PyTorch FSDP2 (``fully_shard``): every parameter is a DTensor whose local part is one flat range.

==============  ==========================================================================================
FULL_SHARD      parameters, gradients and optimizer state sharded over all processes
SHARD_GRAD_OP   the same, but parameters stay gathered between forward and backward
HYBRID_SHARD    shard inside groups of ``num_shard`` processes (a node), replicate across them
NO_SHARD        replicate: a mesh of (processes, 1), so no second code path is needed
==============  ==========================================================================================

Masters are the sharded fp32 parameters themselves; in bf16 and fp16 FSDP casts them when it gathers, and reduces
gradients in fp32. Units are the model's ``shard_units()``; the root has the rest.

Functions import ``torch.distributed.fsdp`` and ``.tensor`` (0.7 s): every run imports this module for its settings.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from unigen_ds.backends.memory import allocate
from unigen_ds.backends.torch_optimizer import TorchOptimizerBackend, local_part, whole
from unigen_ds.config.registry import BACKENDS
from unigen_ds.core.errors import CheckpointError, ConfigError, suggestion
from unigen_ds.core.json_values import STAMP
from unigen_ds.core.shards import BUFFER, MASTER, STEP, Shard
from unigen_ds.optim.optimizer import COMPUTE_DTYPE, JoinedOptimizer, ParamGroup
from unigen_ds.system import dist
from unigen_ds.system.outputs import HashedFile, Output, StateFiles, bytes_output

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")


@BACKENDS.register_module(name="fsdp")
class FSDPBackend(TorchOptimizerBackend):
    """See the module docstring.

    Args:
        sharding_strategy: ``FULL_SHARD``, ``SHARD_GRAD_OP``, ``HYBRID_SHARD`` or ``NO_SHARD``.
        num_shard: processes that share one copy, for ``HYBRID_SHARD``; a divisor of the process count; None: the
            processes of a node, as torchrun, deepspeed, SLURM or MPI report them.
        cpu_offload: keep parameters, gradients and optimizer state in host memory.
    """

    model_needs: ClassVar[dict[str, str]] = {
        "shard_units": "add `def shard_units(self): return list(self.layers)`, the layers that are sharded one by one"
        " (as in unigen_ds/families/nanovlm/model.py), or use --backend deepspeed:zero2"
    }
    """Methods that a model must have, and how to add each."""

    def __init__(
        self,
        *,
        sharding_strategy: str = "FULL_SHARD",
        num_shard: int | None = None,
        cpu_offload: bool = False,
    ) -> None:
        if sharding_strategy not in STRATEGIES:
            raise ConfigError(
                f"sharding_strategy is {sharding_strategy!r}",
                allowed=", ".join(STRATEGIES),
                remedy=suggestion(str(sharding_strategy), STRATEGIES),
            )
        if dist.env_world_size() > 1 and torch.__version__ < "2.9" and not torch.cuda.is_available():
            problem = f"FSDP2 of PyTorch {torch.__version__} has the sum of CPU processes' gradients for their mean"
            raise ConfigError(problem, remedy="PyTorch 2.9 or later, or --backend deepspeed:zero3")
        self.strategy, self.cpu_offload = sharding_strategy, cpu_offload
        self.num_shard = check_num_shard(sharding_strategy, num_shard, world_size=dist.env_world_size())
        # sharded gradients are reduced after every iteration, so that no rank ever holds a whole one
        self._sync_every = sharding_strategy != "NO_SHARD"

    def prepare(self, model: nn.Module, param_groups: Sequence[ParamGroup]) -> None:
        from torch.distributed.fsdp import FSDPModule

        dist.ensure_initialized()
        cuda = torch.cuda.is_available()
        self._device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._replica = dist.rank() // self.num_shard
        root = self._shard(model)
        device = torch.device("cpu") if self.cpu_offload else self._device
        allocate(
            root,
            lambda tensor: torch.empty_like(tensor, device=device),
            make_buffer=lambda tensor: torch.empty_like(tensor, device=self._device),  # forward reads them there
        )
        _settle(root)
        self._own(root, dict(root.named_parameters()), param_groups)
        units = [name or "the root" for name, module in root.named_modules() if isinstance(module, FSDPModule)]
        self.log_summary(f"FSDP2 {self.strategy} ({self.num_shard} shard(s))", units=units)

    def _shard(self, model: Any) -> Any:
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
            register_fsdp_forward_method,
        )

        world, num_shard, cuda = dist.world_size(), self.num_shard, self._device.type == "cuda"
        if num_shard == world:
            mesh = init_device_mesh(self._device.type, (world,), mesh_dim_names=("shard",))
        else:  # ``init_device_mesh`` would make the groups of every rank in turn; here a rank makes its own two
            ranks = torch.arange(world).view(-1, num_shard)
            row, column = divmod(dist.rank(), num_shard)
            groups = [dist.group(ranks[:, column].tolist()), dist.group(ranks[row].tolist())]
            mesh = DeviceMesh.from_group(groups, self._device.type, ranks, mesh_dim_names=("replicate", "shard"))
        low = None if self._cfg.precision == "fp32" else COMPUTE_DTYPE[self._cfg.precision]
        settings: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": self.strategy in ("FULL_SHARD", "HYBRID_SHARD"),
            # activations already have the weights' dtype; casting inputs would round the rotary tables
            "mp_policy": MixedPrecisionPolicy(low, torch.float32 if low else None, cast_forward_inputs=False),
            "offload_policy": CPUOffloadPolicy(pin_memory=cuda) if self.cpu_offload else OffloadPolicy(),
        }
        # fully_shard moves one unit after the other to the device and keeps this rank's part, so it never has the model
        for unit in model.shard_units():
            fully_shard(unit, **settings)
        root = fully_shard(model, **settings)
        for method in getattr(model, "forward_methods", ()):
            register_fsdp_forward_method(root, method)
        return root

    @property
    def gathers_in_forward(self) -> bool:
        return self.num_shard > 1

    @property
    def lighter(self) -> str | None:
        return None if self.strategy == "FULL_SHARD" else "fsdp:FULL_SHARD"

    def topology(self) -> dict[str, Any]:
        return {
            "engine": "fsdp",
            "sharding_strategy": self.strategy,
            "num_shard": self.num_shard,
            "cpu_offload": self.cpu_offload,
            "dp_size": self.dp_size,
            "precision": self._cfg.precision,
        }

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        self._model.set_requires_gradient_sync(last or self._sync_every)
        self._model.set_is_last_backward(last)
        yield

    def backward(self, loss: Tensor) -> None:
        """FSDP averages over the processes; the loop wants the sum (``set_gradient_divide_factor`` fails on gloo). In
        fp16 their number is multiplied in ``step``, in fp32: here overflows would be more likely."""
        scale = self._scale.scale if self._scale else float(self.dp_size)
        (loss * scale if scale != 1.0 else loss).backward()

    @torch.no_grad()
    def _update(self) -> None:
        """An optimizer that is not element-wise gets whole matrices, one after the other as under ``single``: gathered
        on each process, which computes all updates and keeps its rows. Every other one gets the shards.
        """
        if not isinstance(self._optimizer, JoinedOptimizer):
            super()._update()
            return
        optimizer = self._optimizer.matrices
        state, groups = optimizer.state, optimizer.param_groups
        members = [group["params"] for group in groups]
        for group in groups:
            group["params"] = []
        try:
            for group, masters in zip(groups, members, strict=True):
                for master in masters:
                    matrix = nn.Parameter(whole(master).to(self._device))
                    matrix.grad = whole(master.grad).to(self._device)
                    matrix_state = {k: whole(v).to(self._device) for k, v in state[master].items() if k != STEP}
                    if STEP in state[master]:
                        matrix_state[STEP] = state[master][STEP]
                    optimizer.state = defaultdict(dict, {matrix: matrix_state} if matrix_state else {})
                    group["params"] = [matrix]
                    optimizer.step()
                    group["params"] = []
                    self._keep_rows(matrix.detach(), master)
                    for kind, value in optimizer.state[matrix].items():
                        if kind == STEP:
                            state[master][kind] = value
                        elif value is not None:
                            self._keep_rows(value, state[master].setdefault(kind, torch.zeros_like(master)))
        finally:
            optimizer.state = state
            for group, masters in zip(groups, members, strict=True):
                group["params"] = masters
        self._optimizer.step_rest()

    def refresh_copies(self) -> None:
        """Drop gathered copies; the next forward gathers anew from the masters."""
        from torch.distributed.fsdp import FSDPModule

        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def named_parameters(self) -> dict[str, nn.Parameter]:
        self.refresh_copies()  # a forward pass may have left gathered ones registered
        return super().named_parameters()

    def _shards(self, tensors: Mapping[str, Tensor]) -> list[Shard]:
        shards = []
        for name, tensor in tensors.items():
            local = local_part(tensor)
            if local.numel():
                flat, primary = local.detach().view(-1), self._replica == 0
                shards.append(Shard(name, tuple(tensor.shape), self._flat_start(tensor), flat, primary=primary))
        return shards

    def _flat_start(self, tensor: Tensor) -> int:
        """Return the index in the flattened tensor at which this process's part begins."""
        rows = shard_rows(len(tensor), dist.rank() % self.num_shard, self.num_shard)
        row = tensor.numel() // len(tensor)
        assert local_part(tensor).numel() == len(rows) * row, tensor.shape
        return rows.start * row

    def _keep_rows(self, whole: Tensor, sharded: Tensor) -> None:
        """Copy this process's part of a whole tensor."""
        local, start = local_part(sharded), self._flat_start(sharded)
        local.copy_(whole.reshape(-1)[start : start + local.numel()].view(local.shape))

    def _parameters_of(self, *, trained: bool) -> dict[str, nn.Parameter]:
        parameters = self.named_parameters().items()
        return {name: p for name, p in parameters if name in self._masters and p.requires_grad == trained}

    def state_files(self) -> StateFiles:
        """PyTorch's distributed checkpoint. Keys are ``kind|name`` (``core/shards.py``); DCP knows the offsets."""
        masters, buffers = self._without_base(self._masters), self._without_base(self.buffers())
        state: dict[str, Tensor] = {f"{MASTER}|{name}": p for name, p in masters.items()}
        state |= {f"{BUFFER}|{name}": b for name, b in buffers.items()}
        for (kind, name), value in self._optimizer_tensors().items():
            state[f"{kind}|{name}"] = value.reshape(1) if value.ndim == 0 else value
        stamp = torch.tensor(list(self.stamp.encode()), dtype=torch.uint8)
        table = TensorTable.of(state, num_shard=self.num_shard, stamp=stamp)
        own = [local_part(state.get(key, stamp)) for key in table.keys(dist.rank())]
        own = [tensor.detach() if tensor.requires_grad else tensor for tensor in own]
        name = f"__{dist.rank()}_0.distcp"
        output = Output(name, sum(tensor.nbytes for tensor in own), partial(_write, name, own))
        return StateFiles("dcp", [output] if own else [], table.index)


def check_num_shard(strategy: str, num_shard: int | None, *, world_size: int) -> int:
    """Processes that share one copy of the model. Raises ``ConfigError`` before any process group exists."""
    if strategy == "NO_SHARD":
        number = 1
    elif strategy == "HYBRID_SHARD":
        number = num_shard or dist.env_processes_per_node() or 0
        if not number:
            problem = "HYBRID_SHARD has no num_shard, and the launcher does not report the processes of a node"
            raise ConfigError(problem, remedy="num_shard=N: how many processes share one copy of the model")
    else:
        number = world_size
    if strategy != "HYBRID_SHARD" and num_shard not in (None, number):
        raise ConfigError(f"num_shard={num_shard} with {strategy}", remedy="num_shard belongs to HYBRID_SHARD")
    if number < 1 or world_size % number:
        divisors = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
        raise ConfigError(
            f"num_shard is {number} and there are {world_size} process(es)",
            allowed=f"a divisor of the process count: {', '.join(divisors)}",
        )
    return number


def _settle(root: nn.Module) -> None:
    """Let FSDP pad and page-lock the shards that ``allocate`` has made. It would do so in the first forward pass and
    give the masters other memory, which ``master_data``, collected before, would not refer to."""
    from torch.distributed.fsdp import FSDPModule

    for module in root.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            for group in filter(None, getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]):
                group.lazy_init()


def shard_rows(number: int, shard: int, num_shard: int) -> range:
    """The rows of a shard of a tensor that has ``number``: FSDP splits the first dimension, as ``torch.chunk`` does."""
    size = -(-number // num_shard)
    return range(min(shard * size, number), min((shard + 1) * size, number))


# PyTorch's distributed checkpoint (``.metadata`` and one ``__<rank>_0.distcp`` per process) without its collectives:
# ``torch.distributed.checkpoint.save`` writes between them, and its error is no ``Exception``. What every rank writes
# follows from the shapes and the mesh, so no plan is sent, but how long an archive of each shape is. The result is read
# by ``torch.distributed.checkpoint.load``.
# Source: torch 2.13, ``state_dict_saver.py``, ``default_planner.py`` and ``filesystem.py``.

FileReport = tuple[str, int, list[tuple[str, tuple[int, ...], int]]]
"""The file of a rank, its size, and of each dtype and shape in it the length of a ``torch.save`` archive."""


@dataclass(frozen=True)
class TensorTable:
    """What all ranks write of a state: tensors with their owners, the same on every rank, in the order of the files."""

    tensors: Mapping[str, tuple[torch.Size, torch.dtype, range]]
    """Key -> whole shape, dtype, and the ranks that write a part each."""

    @classmethod
    def of(cls, state: Mapping[str, Tensor], *, num_shard: int, stamp: Tensor) -> TensorTable:
        """``stamp``: the first tensor of every file, under a key of its rank (``Backend.stamp``).

        Replicas share the tensors: largest first, each to the one with the fewest bytes so far.
        Plain tensors are those of rank 0: running statistics (BatchNorm) of one rank belong together.
        """
        from torch.distributed.tensor import DTensor

        meshes = [range(rank, rank + num_shard) for rank in range(0, dist.world_size(), num_shard)]
        owners = {key: 0 for key, value in state.items() if isinstance(value, DTensor)}
        loads = [0] * len(meshes)
        for key in sorted(owners, key=lambda key: (-state[key].numel(), key)) if len(meshes) > 1 else ():
            owners[key] = loads.index(min(loads))
            loads[owners[key]] += state[key].numel() * state[key].element_size()
        ranks = {key: meshes[owners[key]] if key in owners else range(1) for key in state}
        shapes = {value.shape: value.shape for value in state.values()}  # a pickle has each once
        tensors = {key: (shapes[value.shape], value.dtype, ranks[key]) for key, value in state.items()}
        writers = sorted(set().union(*set(ranks.values())))
        stamps = {f"{STAMP}|{rank}": (stamp.shape, stamp.dtype, range(rank, rank + 1)) for rank in writers}
        return cls(stamps | tensors)

    def keys(self, rank: int) -> list[str]:
        """The tensors of which a rank writes a part, the stamp first."""
        return [key for key, (_, _, ranks) in self.tensors.items() if rank in ranks]

    def index(self, results: Sequence[Sequence[FileReport]]) -> list[Output]:
        """``.metadata``: every tensor, and where each part is. Raises ``CheckpointError`` where a file has another size
        than follows from that."""
        from torch.distributed.checkpoint import filesystem
        from torch.distributed.checkpoint import metadata as dcp

        names, sizes, reports = zip(*(files[0] if files else ("", 0, []) for files in results), strict=True)
        archives = {(dtype, tuple(shape)): length for report in reports for dtype, shape, length in report}
        tensors: dict[str, Any] = {}
        splits: dict[Any, tuple[Any, ...]] = {}
        columns: list[list[Any]] = [[], [], [], [], []]
        ends = np.zeros(len(results), np.int64)
        for key, (shape, dtype, ranks) in self.tensors.items():
            split = shape, dtype, len(ranks)
            if split not in splits:
                chunks = [dcp.ChunkStorageMetadata(*part) for part in shard_parts(shape, len(ranks))]
                lengths = [archives.get((str(dtype), tuple(chunk.sizes)), 0) for chunk in chunks]
                splits[split] = chunks, [chunk.offsets for chunk in chunks], lengths
            chunks, offsets, lengths = splits[split]
            tensors[key] = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype), shape, chunks)
            group = slice(ranks.start, ranks.stop)
            values = [key] * len(ranks), offsets, names[group], ends[group].tolist(), lengths
            for column, of_tensor in zip(columns, values, strict=True):
                column += of_tensor
            ends[group] += lengths
        for rank in np.flatnonzero(ends != sizes):
            problem = f"rank {rank} has written {sizes[rank]:,} bytes, and {ends[rank]:,} follow from the shapes"
            remedy = "the same versions of unigen_ds and torch, and the same config, on every rank"
            raise CheckpointError(problem, remedy=remedy)
        items = _Call(map, dcp.MetadataIndex, *columns[:2]), _Call(map, filesystem._StorageInfo, *columns[2:])
        positions: Any = _Call(dict, _Call(zip, *items))
        content = dcp.Metadata(tensors, {key: (key,) for key in tensors}, positions, dcp.StorageMeta())
        content.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)  # none before torch 2.9
        return [bytes_output(".metadata", pickle.dumps(content))]


def shard_parts(shape: Sequence[int], num_shard: int) -> Iterator[tuple[torch.Size, torch.Size]]:
    """Yield the offset and size of each shard in each dimension."""
    for shard in range(num_shard):
        rows = [shard_rows(number, shard, num_shard) for number in shape[:1]]  # a single number has none
        yield torch.Size([*(r.start for r in rows), *[0] * len(shape[1:])]), torch.Size([*map(len, rows), *shape[1:]])


class _Call(partial[Any]):
    """A call that is done by who unpickles it: a million positions are written as five columns, 20 times as fast."""

    def __reduce__(self) -> tuple[Any, ...]:
        return self.func, self.args


def _write(name: str, tensors: Sequence[Tensor], stream: HashedFile) -> FileReport:
    archives: dict[tuple[str, tuple[int, ...]], int] = {}
    computed = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # half of the time, and no reader of DCP looks at it
    try:
        for tensor in tensors:
            begin = stream.tell()
            torch.save(_alone(tensor), stream)  # type: ignore[arg-type] # a writer without fileno
            archives[str(tensor.dtype), tuple(tensor.shape)] = stream.tell() - begin
    finally:
        torch.serialization.set_crc32_options(computed)
    return name, stream.tell(), [(*archive, length) for archive, length in archives.items()]


def _alone(tensor: Tensor) -> Tensor:
    """The tensor on the host, with a storage of its own: ``torch.save`` writes whole storages, and strides."""
    tensor = tensor.cpu().contiguous()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    content = torch.from_numpy(tensor.reshape(-1).view(torch.uint8).numpy())
    return tensor.new_empty(0).set_(content.untyped_storage(), 0, tensor.shape, tensor.stride())
