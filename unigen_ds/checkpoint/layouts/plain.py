"""Weights that ``torch.save`` wrote in plain form: by torch itself, mmengine, accelerate, transformers, or a merge.

In: one file, or the files of an index; a state dict at the top, or under one of ``WRAPPERS``. Out: its tensors under
the model's names, without the prefixes that wrappers of a model leave. Nothing is executed (``torch_file.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unigen_ds.checkpoint.layouts.base import Fetch, PieceReader, slices_of
from unigen_ds.checkpoint.layouts.torch_file import load_file
from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.shards import MASTER

WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which trainers keep the model's state dict, next to the optimizer's."""
PREFIXES = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put before every name."""


class TorchReader(PieceReader):
    """A ``ShardReader`` over plain torch files. Names that share a tensor are tied.

    Attributes:
        others: keys at the top of the files that are not read (the optimizer's state, an average).
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        super().__init__(unique=True)
        self.others: list[str] = []
        found: dict[str, tuple[Tensor, Path]] = {}
        for path in paths:
            content = load_file(path)
            state = _state_dict(content, path)
            if state is not content:
                self.others += [str(key) for key in content if content[key] is not state]
            found |= {name: (tensor, path) for name, tensor in state.items() if isinstance(tensor, Tensor)}
        first: dict[tuple[int, ...], str] = {}
        for name, (tensor, path) in without_prefixes(found).items():
            memory = (tensor.data_ptr(), tensor.numel(), *tensor.stride())
            if tensor.numel() and memory in first:
                self.tied = {**self.tied, name: first[memory]}
                continue
            first[memory] = name
            self.add(MASTER, name, 0, tensor.numel(), _fetch(tensor, name), source=str(path), shape=tensor.shape)


def _state_dict(content: Any, path: Path) -> Mapping[str, Any]:
    """The mapping of names to tensors. Raises ``CheckpointError`` where there is none."""
    state = content
    while isinstance(state, Mapping) and not any(isinstance(value, Tensor) for value in state.values()):
        state = next((state[key] for key in WRAPPERS if isinstance(state.get(key), Mapping)), None)
    if not isinstance(state, Mapping):
        held = ", ".join(map(str, content)) if isinstance(content, Mapping) else f"a {type(content).__name__}"
        raise CheckpointError(
            f"{path} contains no weights ({held[:200] or 'nothing'})",
            allowed=f"a state dict, or one under {', '.join(WRAPPERS)}",
            remedy="save model.state_dict(); a whole model is a pickle of classes, which is not executed",
        )
    return state


def without_prefixes(found: Mapping[str, Any]) -> dict[str, Any]:
    """``found`` without those of ``PREFIXES`` that every name has."""
    names = {str(name): value for name, value in found.items()}
    for prefix in PREFIXES:
        if names and all(name.startswith(prefix) for name in names):
            names = {name.removeprefix(prefix): value for name, value in names.items()}
    return names


def _fetch(tensor: Tensor, name: str) -> Fetch:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise CheckpointError(f"{name} is a {tensor.layout} tensor", allowed="dense tensors")
    return slices_of(tensor) if tensor.is_contiguous() else lambda start, stop: tensor.reshape(-1)[start:stop]
