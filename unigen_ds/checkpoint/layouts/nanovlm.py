"""nanoVLM's published directory as master weights under our names, so that ``load_from`` takes it.

A tensor is read when it is asked for, and renamed and reshaped then: no rank holds more than one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from unigen_ds.checkpoint.layouts.base import Fetch, PieceReader
from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.shards import MASTER

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"


def is_nanovlm(folder: Path) -> bool:
    """Whether its ``config.json`` is nanoVLM's."""
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "mp_pixel_shuffle_factor" in config and (folder / _WEIGHTS).is_file()


class NanoVLMReader(PieceReader):
    """A ``ShardReader`` over ``model.safetensors``; of tied embeddings the one stored serves both names."""

    def __init__(self, directory: Path) -> None:
        from unigen_ds.models.hf_names import TIED, from_nanovlm  # models are imported only where they are needed

        super().__init__(unique=True)
        path = directory / _WEIGHTS
        try:
            with safe_open(path, framework="pt") as stream:
                shapes = {name: stream.get_slice(name).get_shape() for name in stream.keys()}  # noqa: SIM118
        except Exception as error:
            raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        ours = {theirs: from_nanovlm({theirs: torch.empty(shape, device="meta")}) for theirs, shape in shapes.items()}
        embedding, head = TIED
        if not any(embedding in state for state in ours.values()):
            self.tied = {head: embedding}
        for theirs, state in ours.items():
            for name, tensor in state.items():
                target = self.tied.get(name, name)
                fetch = _fetch(path, theirs, name, from_nanovlm)
                self.add(MASTER, target, 0, tensor.numel(), fetch, source=str(path), shape=tuple(tensor.shape))


def _fetch(path: Path, theirs: str, ours: str, rename: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Fetch:
    def fetch(start: int, stop: int) -> Tensor:
        with safe_open(path, framework="pt") as stream:
            return rename({theirs: stream.get_tensor(theirs)})[ours].reshape(-1)[start:stop]

    return fetch
