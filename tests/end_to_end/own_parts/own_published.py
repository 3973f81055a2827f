"""A family that publishes its models in a format of its own: other names and shapes, in a file of another ending."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.plugin.family import Rows, RowsNetwork
from unigen_ds import FAMILIES, MODELS, Pretrained, PublishedFormat, new_directory, stored_tensors

NAMES = {"layers.0.0": "in", "layers.0.1": "norm1", "layers.1.0": "inner", "layers.1.1": "norm2", "head": "outer"}
"""Ours -> theirs."""
WEIGHTS = "points.tensors"


class PointsDirectory(PublishedFormat):
    """``points.json`` and ``points.tensors``, whose matrices are transposed."""

    name = "a directory of points"
    pretrained = False
    parts = (WEIGHTS,)

    def recognises(self, folder: Path) -> bool:
        return (folder / "points.json").is_file()

    def config(self, folder: Path) -> dict[str, Any]:
        return {"model": json.loads((folder / "points.json").read_text(encoding="utf-8"))}

    def weights(self, folder: Path) -> Pretrained:
        found = {}
        for theirs, stored in stored_tensors(folder / WEIGHTS).items():
            layer, _, kind = theirs.rpartition(".")
            name = next(ours for ours, their in NAMES.items() if their == layer)
            if len(stored.shape) == 2:
                stored = replace(stored, shape=stored.shape[::-1], changed=torch.t)
            found[f"{name}.{kind}"] = stored
        return Pretrained(str(folder), self.config(folder)["model"], found)

    def write(self, model: Any, processor: Any, out: Path, *, dtype: torch.dtype, **_: Any) -> None:
        tensors: dict[str, Tensor] = {}
        for name, tensor in model.state_dict().items():
            layer, _, kind = name.rpartition(".")
            tensors[f"{NAMES[layer]}.{kind}"] = (tensor.t() if tensor.ndim == 2 else tensor).contiguous()
        config = {"type": "PublishedNetwork", **model.arguments()}
        with new_directory(out) as folder:
            (folder / "points.json").write_text(json.dumps(config), encoding="utf-8")
            save_file(tensors, folder / WEIGHTS)


@MODELS.register_module()
class PublishedNetwork(RowsNetwork):
    pass


@FAMILIES.register_module()
class PublishedRows(Rows):
    model = PublishedNetwork
    published = (PointsDirectory(),)
