"""DeepSpeed's own files, read without deepspeed and without executing a pickle.

========================================  =====================================================================
``mp_rank_00_model_states.pt``            ZeRO-1/2: low-precision module, frozen parameters, buffers
``zero_pp_rank_R_..._model_states.pt``    ZeRO-3: the same, with the shapes of each sub-group
``[bf16_]zero_pp_rank_R_..optim_states.pt``  rank R's flat fp32 masters and Adam moments
========================================  =====================================================================

ZeRO-1/2 cut one flat buffer per group into equal parts; ``param_slice_mappings`` says what of each parameter a part
holds. ZeRO-3 gives every rank ``ceil(numel / ranks)`` elements of each parameter, padded at the end. Tensors are
memory-mapped, so only what is asked for is read.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unigen_ds.checkpoint.layouts.base import PieceReader, slices_of
from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.shards import BUFFER, LOSS_SCALE, MASTER, STEP

_OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt$")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt$")


class _Inert:
    """Stands for a class of DeepSpeed: keeps what was stored and does nothing."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        self.state = state


_ALLOWED = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
_STUBS = [(type(path.rpartition(".")[2], (_Inert,), {}), path) for path in _ALLOWED]


def load_file(path: Path) -> Any:
    """A ``torch.save`` file, memory-mapped, with inert stand-ins for the few classes DeepSpeed stores."""
    try:
        with torch.serialization.safe_globals(list(_STUBS)):
            return torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


class DeepSpeedReader(PieceReader):
    """A ``ShardReader`` over a directory that DeepSpeed wrote (ZeRO-1, 2 or 3)."""

    def __init__(
        self, directory: Path, *, parameters: Iterable[str] | None = None, files: Iterable[str] | None = None
    ) -> None:
        super().__init__()
        optim = [load_file(path)["optimizer_state_dict"] for path in _by_rank(directory, _OPTIM, files)]
        model = [load_file(path) for path in _by_rank(directory, _MODEL, files)]
        if not optim or not model:
            raise CheckpointError(f"{directory} lacks DeepSpeed's model or optimizer files")
        _check_ranks(directory, optim)
        if "fp32_flat_groups" in optim[0]:
            if len(optim) != len(model):
                raise CheckpointError(f"{directory} has {len(model)} model files and {len(optim)} optimizer files")
            self._add_zero3(model, optim)
        else:
            self._add_zero12(optim)
            self._add_frozen(model)
        for name in model[0]["buffer_names"]:
            tensor = model[0]["module"][name]
            self.add(BUFFER, name, 0, tensor.numel(), slices_of(tensor))
        self._add_loss_scale(optim[0])

    def _add_zero12(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        consumed: dict[str, int] = defaultdict(int)
        for state in ranks:
            flats = state["single_partition_of_fp32_groups"]
            moments = state["base_optimizer_state"]["state"]
            for group, (flat, mapping) in enumerate(zip(flats, state["param_slice_mappings"], strict=True)):
                for name, fragment in mapping.items():
                    offset, numel = fragment.state["start"], fragment.state["numel"]
                    self._add_pieces(name, consumed[name], numel, offset, flat, moments.get(group, {}))
                    consumed[name] += numel

    def _add_zero3(self, model: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]) -> None:
        for rank, state in enumerate(ranks):
            moments = state["optimizer_state_dict"]["state"]
            for group, (flat, shapes) in enumerate(
                zip(state["fp32_flat_groups"], model[0]["param_shapes"], strict=True)
            ):
                offset = 0
                for name, shape in shapes.items():
                    start, numel, part = _zero3_part(math.prod(shape), rank, len(ranks))
                    self._add_pieces(name, start, numel, offset, flat, moments.get(group, {}))
                    offset += part
            for name, shape in (model[rank].get("frozen_param_shapes") or {}).items():
                start, numel, _ = _zero3_part(math.prod(shape), rank, len(ranks))
                self.add(MASTER, name, start, numel, slices_of(model[rank]["frozen_param_fragments"][name]))

    def _add_pieces(
        self, name: str, start: int, numel: int, offset: int, flat: Tensor, moments: Mapping[str, Any]
    ) -> None:
        """The same range of the master and of each moment; a moment that is one number is the step."""
        self.add(MASTER, name, start, numel, slices_of(flat, offset))
        for kind, value in moments.items():
            if not isinstance(value, Tensor):
                continue
            if value.numel() == 1 and kind == STEP:
                self.add(STEP, name, 0, 1, slices_of(value))
            else:
                self.add(kind, name, start, numel, slices_of(value, offset))

    def _add_frozen(self, model: Sequence[Mapping[str, Any]]) -> None:
        """ZeRO-2 lists frozen parameters; ZeRO-1 has them only among the module's tensors."""
        fragments = model[0].get("frozen_param_fragments")
        if fragments is None:
            others = {*self.names(MASTER), *model[0]["buffer_names"], *(model[0].get("shared_params") or ())}
            fragments = {name: t for name, t in model[0]["module"].items() if name not in others}
        for name, tensor in fragments.items():
            self.add(MASTER, name, 0, tensor.numel(), slices_of(tensor))

    def _add_loss_scale(self, state: Mapping[str, Any]) -> None:
        scaler = getattr(state.get("loss_scaler"), "state", None) or {}
        if "cur_iter" in scaler:  # the dynamic one
            good = scaler["cur_iter"] - scaler["last_overflow_iter"] - 1  # -1: none yet
            pair = torch.tensor([scaler["cur_scale"], good], dtype=torch.float64)
            self.add(LOSS_SCALE, LOSS_SCALE, 0, 2, slices_of(pair))


def _by_rank(directory: Path, pattern: re.Pattern[str], files: Iterable[str] | None) -> list[Path]:
    """Files in rank order. Raises ``CheckpointError`` where one of them is missing."""
    names = [path.name for path in directory.iterdir()] if files is None else list(files)
    found = {int(m.group(1) or 0): directory / name for name in names if (m := pattern.match(name))}
    missing = sorted(set(range(len(found))) - set(found))
    if missing:
        raise CheckpointError(f"{directory} lacks the files of rank {missing[0]} (it has {sorted(found)})")
    return [found[rank] for rank in sorted(found)]


def _check_ranks(directory: Path, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raises ``CheckpointError`` where files at the end are missing: every file says how many ranks wrote."""
    count = ranks[0]["partition_count"]  # ZeRO-1/2: one number for each group
    wanted = max(count) if isinstance(count, (list, tuple)) else int(count)
    if len(ranks) != wanted:
        raise CheckpointError(
            f"{directory} lacks the optimizer file of rank {len(ranks)}: {wanted} ranks wrote it, {len(ranks)} are here"
        )


def _zero3_part(numel: int, rank: int, world_size: int) -> tuple[int, int, int]:
    """(first element, elements without padding, elements with padding) of a rank's part of a parameter."""
    part = -(-numel // world_size)
    start = min(rank * part, numel)
    return start, min(part, numel - start), part
