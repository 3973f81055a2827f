"""DeepSpeed's own files, read without deepspeed and without executing a pickle.

========================================  =====================================================================
``mp_rank_00_model_states.pt``            ZeRO-1/2: low-precision module, frozen parameters, buffers
``zero_pp_rank_R_..._model_states.pt``    ZeRO-3: the same, with the shapes of each sub-group
``[bf16_]zero_pp_rank_R_..optim_states.pt``  rank R's flat fp32 masters and Adam moments
========================================  =====================================================================

ZeRO-1/2 split one flat buffer per group into equal parts; ``param_slice_mappings`` lists the slices of parameters in a
part. Under ZeRO-3 every rank has ``ceil(numel / ranks)`` elements of each parameter, padded at the end. Tensors are
memory-mapped, so only the requested elements are read.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unigen_ds.checkpoint.layouts.torch_file import load_file, shared_names
from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.json_values import STAMP
from unigen_ds.core.shards import BUFFER, LOSS_SCALE, MASTER, STEP, ShardReader, slices_of

_OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt$")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt$")
_STAGES = ("disabled", "optimizer_states", "gradients", "weights")
"""Members of DeepSpeed's ``ZeroStageEnum``, from 0. Python 3.11.0 to 3.11.3 store a member by its name."""


def is_deepspeed(name: str) -> bool:
    return bool(_OPTIM.match(name) or _MODEL.match(name))


class DeepSpeedReader(ShardReader):
    """A ``ShardReader`` over a directory that DeepSpeed wrote, on its own or for this project.

    Attributes:
        header: what rank 0's model file holds besides tensors: ``ds_config``, counters, the trainer's client state.
        frozen: names of the parameters that were not trained.
        groups: name -> number of the optimizer's group, where the files state it (ZeRO-3 may split a group further).
        zero_stage: 0 is DeepSpeed without ZeRO; then the module's own weights are the only ones, in its precision, and
            its optimizer's state is not read.
    """

    def __init__(
        self, directory: Path, *, parameters: Iterable[str] | None = None, files: Iterable[str] | None = None
    ) -> None:
        super().__init__()
        names = [path.name for path in directory.iterdir()] if files is None else list(files)
        for name in sorted(names):
            if re.match(r"(?:zero_pp_rank_\d+_)?mp_rank_(?!00_)\d+_|layer_\d+|expp?_rank_|.*expert_\d+", name):
                raise CheckpointError(
                    f"{directory / name} is a part of a model split by tensor, pipeline or expert parallelism",
                    allowed="ZeRO stages 0 to 3",
                    remedy="merge it with the tool of the trainer that wrote it",
                )
        contents: list[list[Any]] = []
        for kind in (_MODEL, _OPTIM):
            paths = _by_rank(directory, kind, names)
            contents.append([load_file(path) for path in paths])
            for path, content in zip(paths, contents[-1], strict=True):
                self.stamps[path.name] = partial(str, content.get(STAMP, ""))
        model, optim = contents[0], [content["optimizer_state_dict"] for content in contents[1]]
        if not model or (not optim and model[0].get("param_shapes") is not None):
            raise CheckpointError(
                f"{directory} lacks DeepSpeed's model or optimizer files",
                allowed="a folder with the files of all ranks, *_model_states.pt and *_optim_states.pt",
                remedy="copy the whole folder: one file holds a part of the weights, or rounded ones",
            )
        self.header = {k: v for k, v in model[0].items() if k not in ("module", "frozen_param_fragments", "optimizer")}
        self.tied = dict(model[0].get("shared_params") or {})
        self.frozen: set[str] = set()
        self.groups = {name: i for i, group in enumerate(model[0].get("param_shapes") or ()) for name in group}
        self.zero_stage = 0
        if optim:
            values = getattr(optim[0].get("zero_stage"), "values", None) or ()
            self.zero_stage = 3 if "fp32_flat_groups" in optim[0] else 1
            if values:
                self.zero_stage = _STAGES.index(values[1]) if len(values) == 2 else int(values[0])
        module: Mapping[str, Tensor] = model[0]["module"]
        for name in model[0]["buffer_names"]:
            self.add(BUFFER, name, 0, module[name].numel(), slices_of(module[name]), shape=module[name].shape)
        if not optim:  # without ZeRO it is a plain state dict
            state = {name: tensor for name, tensor in module.items() if (BUFFER, name) not in self.shapes}
            self.tied = {**self.tied, **shared_names(state)}
            for name in [name for name in state if name not in self.tied]:
                tensor = state[name]
                self.add(MASTER, name, 0, tensor.numel(), slices_of(tensor), shape=tensor.shape)
            return
        count = optim[0]["partition_count"]  # ZeRO-1/2: one number for each group
        number = max(count) if isinstance(count, (list, tuple)) else int(count)
        if len(optim) != number:
            missing = f"{directory} lacks the optimizer file of rank {len(optim)}"
            raise CheckpointError(f"{missing}: {number} ranks wrote it, {len(optim)} are here")
        if self.zero_stage == 3 and len(optim) != len(model):
            raise CheckpointError(f"{directory} has {len(model)} model files and {len(optim)} optimizer files")
        self._add_frozen(model)
        for shapes in model[0]["param_shapes"]:
            self.shapes |= {(MASTER, name): tuple(shape) for name, shape in shapes.items()}
        self._add_optimizer(model[0]["param_shapes"], optim)
        scaler = getattr(optim[0].get("loss_scaler"), "state", None) or {}
        if "cur_iter" in scaler:  # the dynamic one
            good = scaler["cur_iter"] - scaler["last_overflow_iter"] - 1  # -1: none yet
            pair = torch.tensor([scaler["cur_scale"], good], dtype=torch.float64)
            self.add(LOSS_SCALE, LOSS_SCALE, 0, 2, slices_of(pair))

    def _add_optimizer(self, param_shapes: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]) -> None:
        """Masters and moments; a moment that is one number is the step."""
        sharded, starts = self.zero_stage == 3, defaultdict[str, int](int)
        for rank, state in enumerate(ranks):
            flats = state["fp32_flat_groups" if sharded else "single_partition_of_fp32_groups"]
            tables = param_shapes if sharded else state["param_slice_mappings"]
            optimizer = state["optimizer_state_dict" if sharded else "base_optimizer_state"]
            for group, (flat, table) in enumerate(zip(flats, tables, strict=True)):
                moments, end = _moments(optimizer, group), 0
                for name, entry in table.items():
                    if sharded:
                        start, numel, part = _zero3_part(math.prod(entry), rank, len(ranks))
                        offset, end = end, end + part
                    else:
                        start, offset, numel = starts[name], entry.state["start"], entry.state["numel"]
                        starts[name] += numel
                    self.add(MASTER, name, start, numel, slices_of(flat, offset))
                    for kind, value in moments.items():
                        if value.numel() == 1 and kind == STEP:
                            self.add(STEP, name, 0, 1, slices_of(value))
                        else:
                            self.add(kind, name, start, numel, slices_of(value, offset))

    def _add_frozen(self, model: Sequence[Mapping[str, Any]]) -> None:
        """ZeRO-2 and 3 list frozen parameters; ZeRO-1 has them only among the module's tensors."""
        shapes, fragments = model[0].get("frozen_param_shapes"), model[0].get("frozen_param_fragments") or {}
        if shapes is None:
            others = {*self.names(BUFFER), *self.groups, *self.tied}
            fragments = {name: tensor for name, tensor in model[0]["module"].items() if name not in others}
            shapes = {name: tensor.shape for name, tensor in fragments.items()}
        self.frozen = set(shapes)
        for name, shape in shapes.items():
            if self.zero_stage < 3:
                self.add(MASTER, name, 0, math.prod(shape), slices_of(fragments[name]), shape=shape)
                continue
            for rank, state in enumerate(model):
                start, numel, _ = _zero3_part(math.prod(shape), rank, len(model))
                part = state["frozen_param_fragments"][name]
                self.add(MASTER, name, start, numel, slices_of(part), shape=shape)


def _moments(optimizer: Mapping[str, Any], group: int) -> dict[str, Tensor]:
    """Moments of one group as flat tensors. Some optimizers keep the step as a number, or with the group's settings."""
    state = {kind: v for kind, v in optimizer["state"].get(group, {}).items() if isinstance(v, (Tensor, int, float))}
    settings = optimizer.get("param_groups") or []
    if state and STEP not in state and group < len(settings) and STEP in settings[group]:
        state[STEP] = settings[group][STEP]
    return {
        kind: value if isinstance(value, Tensor) else torch.tensor([float(value)])
        for kind, value in state.items()
        if isinstance(value, Tensor) or kind == STEP
    }


def _by_rank(directory: Path, pattern: re.Pattern[str], names: Iterable[str]) -> list[Path]:
    """Files in rank order. Raises ``CheckpointError`` where one of them is missing."""
    files = {int(m.group(1) or 0): directory / name for name in names if (m := pattern.match(name))}
    missing = sorted(set(range(len(files))) - set(files))
    if missing:
        raise CheckpointError(
            f"{directory} lacks the files of rank {missing[0]} (it has {sorted(files)})",
            remedy="copy the whole folder: each rank's file holds a part of the weights",
        )
    return [files[rank] for rank in sorted(files)]


def _zero3_part(numel: int, rank: int, world_size: int) -> tuple[int, int, int]:
    """(first element, elements without padding, elements with padding) of a rank's part of a parameter."""
    part = -(-numel // world_size)
    start = min(rank * part, numel)
    return start, min(part, numel - start), part
