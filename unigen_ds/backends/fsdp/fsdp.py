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
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from unigen_ds.backends.memory import allocate
from unigen_ds.backends.torch_optimizer import TorchOptimizerBackend, local_part, whole
from unigen_ds.config.registry import BACKENDS
from unigen_ds.core.errors import ConfigError, suggestion
from unigen_ds.core.progress import Geometry
from unigen_ds.core.shards import BUFFER, MASTER, STAMP, STEP, Shard
from unigen_ds.optim.optimizer import COMPUTE_DTYPE, JoinedOptimizer, OptimizerConfig, ParamGroup
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
        self.strategy, self.cpu_offload = sharding_strategy, cpu_offload
        self.num_shard = check_num_shard(sharding_strategy, num_shard, world_size=dist.env_world_size())
        # sharded gradients are reduced after every iteration, so that no rank ever holds a whole one
        self._sync_every = sharding_strategy != "NO_SHARD"

    def prepare(
        self,
        model: nn.Module,
        param_groups: Sequence[ParamGroup],
        optimizer_cfg: OptimizerConfig,
        *,
        geometry: Geometry,
    ) -> None:
        from torch.distributed.fsdp import FSDPModule

        dist.ensure_initialized()
        cuda = torch.cuda.is_available()
        self._device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._replica = dist.rank() // self.num_shard
        root = self._shard(model, optimizer_cfg.precision)
        held = torch.device("cpu") if self.cpu_offload else self._device
        allocate(
            root,
            lambda tensor: torch.empty_like(tensor, device=held),
            make_buffer=lambda tensor: torch.empty_like(tensor, device=self._device),  # forward reads them there
        )
        _settle(root)
        self._own(root, dict(root.named_parameters()), param_groups, optimizer_cfg)
        units = [name or "the root" for name, module in root.named_modules() if isinstance(module, FSDPModule)]
        self.log_summary(f"FSDP2 {self.strategy} ({self.num_shard} shard(s))", units=units)

    def _shard(self, model: Any, precision: str) -> Any:
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
        low = None if precision == "fp32" else COMPUTE_DTYPE[precision]
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
        fp16 their number is multiplied in ``step``, in fp32: here overflows would be more likely.
        """
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
                    kept = {k: whole(v).to(self._device) for k, v in state[master].items() if k != STEP}
                    if STEP in state[master]:
                        kept[STEP] = state[master][STEP]
                    optimizer.state = defaultdict(dict, {matrix: kept} if kept else {})
                    group["params"] = [matrix]
                    optimizer.step()
                    group["params"] = []
                    _keep_rows(matrix.detach(), master)
                    for kind, value in optimizer.state[matrix].items():
                        if kind == STEP:
                            state[master][kind] = value
                        elif value is not None:
                            _keep_rows(value, state[master].setdefault(kind, torch.zeros_like(master)))
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
                shape, start = tuple(tensor.shape), _flat_start(tensor)
                shards.append(Shard(name, shape, start, local.detach().view(-1), primary=self._replica == 0))
        return shards

    def _parameters_of(self, *, trained: bool) -> dict[str, nn.Parameter]:
        parameters = self.named_parameters().items()
        return {name: p for name, p in parameters if name in self._masters and p.requires_grad == trained}

    def state_files(self) -> StateFiles:
        """PyTorch's distributed checkpoint. Keys are ``kind|name`` (``core/shards.py``); DCP knows the offsets."""
        self.refresh_copies()
        masters, buffers = self._without_base(self._masters), self._without_base(self.buffers())
        state: dict[str, Tensor] = {f"{MASTER}|{name}": p.detach() for name, p in masters.items()}
        state |= {f"{BUFFER}|{name}": b for name, b in buffers.items()}
        for (kind, name), value in self._optimizer_tensors().items():
            state[f"{kind}|{name}"] = value.reshape(1) if value.ndim == 0 else value
        replicas = dist.world_size() // self.num_shard
        return dcp_files(state, replica=self._replica, replicas=replicas, stamp=self.stamp)


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
    give the masters other memory, which ``master_data``, collected before, would not refer to.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in root.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
                for parameter in group.fsdp_params if group else ():
                    parameter.reset_sharded_param()


def _keep_rows(whole: Tensor, sharded: Tensor) -> None:
    """Copy this process's part of a whole tensor."""
    local, start = local_part(sharded), _flat_start(sharded)
    local.copy_(whole.reshape(-1)[start : start + local.numel()].view(local.shape))


def _flat_start(tensor: Any) -> int:
    """Return the index in the flattened tensor at which the local part begins: ``Shard(0)`` splits into whole rows."""
    from torch.distributed.tensor import Shard as ShardPlacement
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements = [p for p in tensor.placements if p.is_shard()]
    assert all(isinstance(p, ShardPlacement) and p.dim == 0 for p in placements), tensor.placements
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    row = tensor.numel() // tensor.shape[0] if tensor.ndim else 1
    return int(offset[0]) * row if tensor.ndim else 0


# PyTorch's distributed checkpoint (``.metadata`` and one ``__<rank>_0.distcp`` per process) without its collectives:
# ``torch.distributed.checkpoint.save`` writes between them, and its error is no ``Exception``. Which replica writes a
# tensor is decided by the same rule on every rank. ``torch.distributed.checkpoint.load`` reads the result. Source:
# torch 2.13, ``state_dict_saver.py`` and ``filesystem.py``.

Written = tuple[str, list[tuple[int, int]]]
"""The file of a rank, and where it wrote each item of its plan: first byte, length."""


def dcp_files(state: Mapping[str, Tensor], *, replica: int, replicas: int, stamp: str = "") -> StateFiles:
    """The file that this rank writes. ``replica``: which of the ``replicas`` copies of the DTensors is here.

    Plain tensors are rank 0's: running statistics (BatchNorm) differ between ranks, and one rank's belong together.
    ``stamp``, as of ``Backend``, is the first item.
    """
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
    from torch.distributed.tensor import DTensor

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


def _index(plans: Sequence[Any], results: Sequence[Sequence[Written]]) -> list[Output]:
    """``.metadata``: all plans in the order of the ranks, and where each item is."""
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import StorageMeta

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
