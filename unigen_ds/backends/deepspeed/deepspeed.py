"""DeepSpeed ZeRO stages 1, 2 and 3, optimizer offload included.

DeepSpeed keeps the fp32 masters of a group in one flat buffer that may split a tensor anywhere; only this file knows
where (``_fragments``), and the test beside it pins the version whose private attributes it reads. The optimizer is
torch's, built by us, so that every engine computes the same update. Source: DeepSpeed 0.19.8.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from unigen_ds.backends.base import Backend, StepResult
from unigen_ds.backends.deepspeed.deepspeed_config import (
    ALLOWED_VERSIONS,
    TESTED_VERSION,
    check_by_deepspeed,
    check_ds_config,
    fill,
    load_ds_config,
    offloads,
    stage_of,
)
from unigen_ds.backends.deepspeed.deepspeed_files import SAVE_FOLDER, CapturedSave, gathered_parameters_released
from unigen_ds.backends.memory import allocate, blocks_freed_at_once, on_meta
from unigen_ds.config.registry import BACKENDS
from unigen_ds.core.batch import LossTerms
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.core.progress import Geometry
from unigen_ds.core.shards import STEP, Shard, persistent_buffers
from unigen_ds.optim.optimizer import (
    COMPUTE_DTYPE,
    OptimizerConfig,
    ParamGroup,
    build_torch_optimizer,
    check_state,
    element_wise,
    initialize_state,
    optimizer_class,
    step_count,
)
from unigen_ds.system import dist
from unigen_ds.system.machine import check_packages
from unigen_ds.system.outputs import StateFiles


def _choose_accelerator() -> None:
    """Set the variable before DeepSpeed is imported (about 2 s), which reads it at import."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")


def leave_out_operator() -> None:
    """Leave out an operator that DeepSpeed would compile on a CPU at the start: for minutes, and after a build that was
    killed for ever, as its lock remains (pytorch issue 189245). Tensor parallelism alone calls it, and needs it not.
    Its Muon, which no run uses, is imported without ``torch.compile``, whose compiler needs 1.5 s to import.
    """
    comm: Any = import_module("deepspeed.comm.torch")  # ``deepspeed.comm`` has torch itself under that name
    comm.build_shm_op = lambda: None
    with mock.patch.dict(os.environ, TORCHDYNAMO_DISABLE="1"):
        import_module("deepspeed.runtime.zero.muon.muon_optimizer")


_EACH = "each:"
"""Before the name of a term: the values of its targets. ZeRO-3 needs texts as keys."""


def _terms_to_dict(module: nn.Module, inputs: Any, output: Any) -> Any:
    if not isinstance(output, LossTerms):
        return None
    return {**output.sums, **{_EACH + name: value for name, value in output.each.items()}}


def _dict_to_terms(module: nn.Module, inputs: Any, output: Any) -> Any:
    if not isinstance(output, dict):
        return None
    each = {key.removeprefix(_EACH): value for key, value in output.items() if key.startswith(_EACH)}
    return LossTerms({key: value for key, value in output.items() if not key.startswith(_EACH)}, each)


def _skip_modules_without_parameters(module: nn.Module) -> None:
    """ZeRO-3's hooks need one order on all ranks; a VAE of buffers runs once for each image size, so it gets none."""
    from deepspeed.utils import set_z3_leaf_module

    for child in module.children():
        if next(child.parameters(), None) is None:
            set_z3_leaf_module(child, True)
        else:
            _skip_modules_without_parameters(child)


@BACKENDS.register_module(name="deepspeed")
class DeepSpeedBackend(Backend):
    """ZeRO stages 1, 2 and 3.

    Args:
        config: a preset of ``ds_configs/`` (``zero1``, ``zero2``, ``zero2_offload``, ``zero3``, ``zero3_offload``), the
            path of a ``.json`` file, or the mapping itself. ``"auto"`` is filled in; a contradiction with this config
            is an error. An ``optimizer`` or ``scheduler`` is accepted where all its values are ``"auto"``.
    """

    def __init__(self, *, config: str | Mapping[str, Any] = "zero2") -> None:
        self._ds_config = load_ds_config(config)
        check_ds_config(self._ds_config)
        self.stage = stage_of(self._ds_config)
        self._engine: Any = None
        self._state_checked = False

    def check(self, *, geometry: Geometry, optimizer_cfg: OptimizerConfig) -> None:
        super().check(geometry=geometry, optimizer_cfg=optimizer_cfg)
        check_packages({"deepspeed": ALLOWED_VERSIONS})
        if not element_wise(optimizer_cfg.type):
            raise ConfigError(
                f"optim_wrapper.optimizer.type is {optimizer_class(optimizer_cfg.type).__name__!r}, which computes on"
                f" whole matrices: ZeRO-{self.stage} splits them anywhere",
                allowed="an element-wise optimizer under DeepSpeed, such as AdamW",
                remedy="--backend fsdp:FULL_SHARD, or single",
            )
        ds_config = fill(self._ds_config, geometry=geometry, optimizer=optimizer_cfg)
        _choose_accelerator()
        check_by_deepspeed(ds_config)
        from deepspeed.accelerator import get_accelerator

        if optimizer_cfg.precision == "fp16" and not get_accelerator().is_fp16_supported():
            raise ConfigError(
                "optim_wrapper.precision is 'fp16', which DeepSpeed computes on a CPU with fp16 instructions only",
                allowed="fp32 or bf16 on this machine",
                remedy="the backends fsdp and single compute in fp16 on any CPU",
            )

    def prepare(self, model: nn.Module, param_groups: Sequence[ParamGroup]) -> None:
        _choose_accelerator()
        leave_out_operator()
        dist.ensure_initialized()
        import deepspeed  # about 2 s, and it chooses its accelerator at import

        self._names = {name: tuple(p.shape) for name, p in model.named_parameters()}
        ds_config = fill(self._ds_config, geometry=self._geometry, optimizer=self._cfg)
        with blocks_freed_at_once():
            has_memory = not on_meta(model)
            if not has_memory:
                self._allocate(model, ds_config)
            parameters = dict(model.named_parameters())
            self._trainable = [name for name, p in parameters.items() if p.requires_grad]
            keep = self._low_precision and has_memory
            originals = {name: parameters[name].detach().clone() for name in self._trainable if keep}
            groups = [(group, [parameters[name] for name in group.parameters]) for group in param_groups]
            # ZeRO-3's own hooks on the model look for tensors in dicts, not in LossTerms: theirs run between these two
            model.register_forward_hook(_terms_to_dict)
            if self.stage == 3:
                _skip_modules_without_parameters(model)
            self._engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=build_torch_optimizer(self._cfg, groups),
                config=ds_config,
                dist_init_required=False,
            )
            self._engine.module.register_forward_hook(_dict_to_terms)
            self._parameters: dict[str, Any] = dict(self._engine.module.named_parameters())
            self._zero = self._engine.optimizer
            if hasattr(self._zero, "check_grad_overflow"):
                self._zero.check_grad_overflow = True  # in fp32, too, an update with a non-finite gradient is skipped
            if self._scaler is not None:
                self._scaler.raise_error_at_min_scale = False  # NanGuardHook ends the run, under every engine
            if originals:  # DeepSpeed starts from rounded weights
                with torch.no_grad():
                    for shard in self.master_shards():
                        shard.data.copy_(originals[shard.name].view(-1)[shard.flat_start : shard.flat_stop])
                self.refresh_copies()
            del parameters, originals, groups
        self.log_summary(f"DeepSpeed ZeRO-{self.stage}" + (", optimizer in host memory" * self.offloads_optimizer))

    def _allocate(self, model: nn.Module, ds_config: dict[str, Any]) -> None:
        """Memory for a model on the meta device; in stage 3 of this rank's parts (``zero.Init`` would broadcast)."""
        from deepspeed.accelerator import get_accelerator

        device = torch.device(get_accelerator().current_device_name())
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
        if self.stage != 3:
            allocate(model, lambda tensor: torch.empty_like(tensor, device=device))
            return
        from deepspeed.comm import init_distributed
        from deepspeed.runtime.zero.partition_parameters import Init

        low = COMPUTE_DTYPE[self._cfg.precision] if self._low_precision else torch.float32
        init_distributed(dist_init_required=False)
        init = Init(config_dict_or_path=ds_config, dtype=low)

        def partition(parameter: Any) -> None:
            init._convert_to_deepspeed_param(parameter)
            parameter.partition()

        allocate(model, lambda tensor: torch.empty_like(tensor, device=device, dtype=low), finish=partition)

    @property
    def offloads_optimizer(self) -> bool:
        return "offload_optimizer" in offloads(self._ds_config)

    @property
    def _low_precision(self) -> bool:
        return self._cfg.precision != "fp32"

    @property
    def model(self) -> nn.Module:
        return self._engine

    @property
    def device(self) -> torch.device:
        return torch.device(self._engine.device)

    @property
    def gathers_in_forward(self) -> bool:
        return self.stage == 3

    @property
    def lighter(self) -> str | None:
        if self.stage < 3:
            return "deepspeed:zero3"
        return None if self.offloads_optimizer else "deepspeed:zero3_offload"

    def unlike_ranks(self) -> Sequence[int]:
        """ZeRO-2 keeps whole gradients of every parameter that a rank has a part of, from the first on that the
        backward pass reaches: the last rank has them while most activations exist, another may have more of them.
        """
        owners = getattr(self._zero, "param_to_partition_ids", None)
        if self.stage == 3 or owners is None:
            return ()
        whole = [0] * self.dp_size
        for group, parameters in enumerate(self._zero.round_robin_bit16_groups):
            for parameter in parameters:
                for rank in owners[group].get(self._zero.get_param_id(parameter), ()):
                    whole[rank] += parameter.numel()
        last = self.dp_size - 1
        return sorted({max(range(self.dp_size), key=lambda rank: (whole[rank], rank)), last} - {0})

    def topology(self) -> dict[str, Any]:
        return {
            "engine": "deepspeed",
            "zero_stage": self.stage,
            "offload": offloads(self._ds_config),
            "dp_size": self.dp_size,
            "precision": self._cfg.precision,
        }

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        """DeepSpeed averages over the processes and divides by its own accumulation; the loop wants the plain sum."""
        if hasattr(self._zero, "clear_lp_grads"):
            # BF16_Optimizer (ZeRO-1 in bf16) adds each iteration's gradients to its fp32 sums; the engine clears them
            # in between by a hook on output tensors, which do not exist where a model returns LossTerms
            self._zero.clear_lp_grads()
        self._engine.backward(loss * self.dp_size, scale_wrt_gas=False)

    def step(self) -> StepResult:
        scaler = self._scaler
        scale = None if scaler is None else float(scaler.cur_scale)
        self._engine.step()
        applied = bool(self._engine.was_step_applied())
        if not applied and self.offloads_optimizer and hasattr(self._zero, "averaged_gradients"):
            # with the optimizer in host memory DeepSpeed keeps the non-finite sums of a skipped update (in bf16 and
            # fp16), and adds every later gradient to them
            for group in self._zero.averaged_gradients:
                self._zero.averaged_gradients[group] = None
        if applied and not self._state_checked:
            check_state(self._zero.optimizer)
            self._state_checked = True
        norm = self._engine.get_global_grad_norm()
        fell = scale is not None and scaler.cur_scale < scale
        norm = float(norm) if applied and norm is not None else math.inf
        return StepResult(norm, applied, loss_scale=scale, scale_fell=fell)

    @property
    def _scaler(self) -> Any:
        """DeepSpeed's loss scale of fp16; None under another precision."""
        return getattr(self._zero, "loss_scaler", None) if self._cfg.precision == "fp16" else None

    def set_hparams(self, per_group: Sequence[Mapping[str, Any]]) -> None:
        for group, hparams in zip(self._zero.param_groups, per_group, strict=True):
            group.update({key: value for key, value in hparams.items() if key != "name"})

    def _flats(self) -> list[Tensor]:
        """The fp32 flat buffers this rank owns."""
        names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
        name = next((name for name in names if hasattr(self._zero, name)), None)
        assert name is not None, f"{type(self._zero).__name__} is unknown; tested: DeepSpeed {TESTED_VERSION}"
        return list(getattr(self._zero, name))

    def _fragments(self) -> Iterator[tuple[str, int, int, int, int]]:
        """Name, flat buffer, offset in it, first element and length of each trained parameter's piece on this rank."""
        for name in self._trainable:
            parameter = self._parameters[name]
            if self.stage == 3:
                flat, offset, _ = self._zero.grad_position[self._zero.get_param_id(parameter)]
                start, numel = _zero3_part(parameter)
                if numel > 0:
                    yield name, flat, int(offset), start, numel
            elif (mapping := parameter._hp_mapping) is not None:
                low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
                yield name, mapping.param_group_index, high.start, low.start, low.numel

    def _shards(self, flats: Sequence[Tensor]) -> list[Shard]:
        """The pieces of the parameters in flat buffers, which are split as those of the masters."""
        return [
            Shard(name, self._names[name], start, flats[flat].detach().narrow(0, offset, numel))
            for name, flat, offset, start, numel in self._fragments()
        ]

    def master_shards(self) -> list[Shard]:
        return self._shards(self._flats())

    def frozen_shards(self) -> list[Shard]:
        shards = []
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                continue
            if self.stage != 3:
                data, start = parameter.detach().view(-1), 0
            else:
                start, numel = _zero3_part(parameter)
                if numel <= 0:
                    continue
                data = parameter.ds_tensor.detach().view(-1)[:numel]
            shards.append(Shard(name, self._names[name], start, data, primary=self.stage == 3 or dist.is_main()))
        return shards

    def buffers(self) -> Mapping[str, Tensor]:
        return persistent_buffers(self._engine.module)

    def trainable_sizes(self) -> dict[str, int]:
        return {name: math.prod(self._names[name]) for name in self._trainable}

    def frozen_sizes(self) -> dict[str, int]:
        return {name: math.prod(shape) for name, shape in self._names.items() if name not in set(self._trainable)}

    def make_state(self) -> None:
        optimizer = self._zero.optimizer
        if optimizer.state:
            return
        members: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
        for number, flat in enumerate(self._flats()):
            members[self._zero.sub_group_to_group_id[number] if self.stage == 3 else number].append(flat)
        initialize_state(optimizer, optimizer.step, parameters=members)

    def moments(self, kind: str) -> list[Shard]:
        state, flats = self._zero.optimizer.state, self._flats()
        return self._shards([state[flat].setdefault(kind, torch.zeros_like(flat)) for flat in flats])

    def trained_tensors(self) -> list[Tensor]:
        """Without the elements that fill up the flat buffers, which DeepSpeed leaves as the memory was."""
        tensors: list[Tensor] = []
        for flat, ranges in zip(self._flats(), self._parameter_ranges(), strict=True):
            for tensor in (flat, *self._zero.optimizer.state[flat].values()):
                if isinstance(tensor, Tensor):
                    tensors += [tensor[begin:end] for begin, end in ranges] if tensor.ndim else [tensor]
        return tensors

    def _parameter_ranges(self) -> list[list[tuple[int, int]]]:
        """Of each flat buffer the pieces that parameters fill, adjacent ones as one: first element, last + 1."""
        ranges_of: list[list[tuple[int, int]]] = [[] for _ in self._flats()]
        for flat, offset, numel in sorted((flat, offset, numel) for _, flat, offset, _, numel in self._fragments()):
            ranges = ranges_of[flat]
            begin = ranges.pop()[0] if ranges and ranges[-1][1] == offset else offset
            ranges.append((begin, offset + numel))
        return ranges_of

    def set_steps(self, steps: Mapping[str, float]) -> None:
        """One step count per flat buffer: parameters that share one must agree."""
        by_flat: dict[int, set[float]] = {}
        for name, flat, *_ in self._fragments():
            by_flat.setdefault(flat, set()).add(steps[name])
        for number, buffer in enumerate(self._flats()):
            counts = by_flat.get(number) or set(steps.values())
            if len(counts) > 1:
                raise CheckpointError(
                    f"parameters of one optimizer group have different Adam steps: {sorted(counts)}",
                    remedy="ZeRO keeps one step per group; resume with FSDP or single, or put them into own groups",
                )
            state = self._zero.optimizer.state[buffer]
            state[STEP] = step_count(state[STEP], counts.pop())
        if self.stage != 3:
            self._zero._lazy_init_hp_params_optimizer_state()

    @torch.no_grad()
    def refresh_copies(self) -> None:
        if self.stage != 3:
            self._zero.update_lp_params()
            return
        self._zero._partition_all_parameters()
        for number in range(len(self._flats())):
            self._zero._reassign_or_swap_out_partitioned_parameters(number)
        persistent = self._zero.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)

    def load_loss_scale(self, scale: float, good_updates: int) -> None:
        if (scaler := self._scaler) is not None:
            scaler.cur_scale = scale
            scaler.last_overflow_iter = scaler.cur_iter - good_updates - 1

    def state_files(self) -> StateFiles:
        """DeepSpeed's own files but its scripts, listed by ``CapturedSave``: its ``save_checkpoint`` has barriers."""
        capture = CapturedSave(self._engine.checkpoint_engine, left_out=self.left_out, stamp=self.stamp)
        released = gathered_parameters_released(self._zero) if self.stage == 3 else nullcontext()
        with released, capture.install(self._engine):
            self._engine.save_checkpoint(SAVE_FOLDER, tag=".", save_latest=False)
        return StateFiles("deepspeed", capture.outputs)

    def close(self) -> None:
        if self._engine is None:
            return
        self._engine.destroy()
        self._engine = self._zero = None
        self._parameters = {}
        gc.collect()  # hooks and engine hold each other
        from deepspeed.runtime.zero import partition_parameters as patches

        if torch.nn.functional.linear is patches.zero3_linear_wrap:  # ZeRO-3 replaces it for the whole process
            torch.nn.functional.linear = patches.InsertPostInitMethodToModuleSubClasses.linear_bk


def _zero3_part(parameter: Any) -> tuple[int, int]:
    """The first element of this rank's part of a parameter, and how many there are without the padding."""
    start = dist.rank() * parameter.partition_numel()
    return start, min(parameter.partition_numel(), parameter.ds_numel - start)
