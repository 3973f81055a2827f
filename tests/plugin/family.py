"""The model, what it predicts for a prompt, the directory that it is published in, and the family of all these."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from unigen_ds import FAMILIES, MODELS, Family, Generated, LossTerms, PublishedFormat, new_directory, pack_documents

from .data import RowsBatch, RowsProcessor, fill_unknown


@MODELS.register_module()
class RowsNetwork(nn.Module):
    """A network with BatchNorm that predicts a value and a label."""

    def __init__(self, *, num_inputs: int, width: int = 16) -> None:
        super().__init__()
        self.sizes = {"num_inputs": num_inputs, "width": width}
        sides = ((num_inputs, width), (width, width))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(*side), nn.BatchNorm1d(width), nn.GELU()) for side in sides)
        self.head = nn.Linear(width, 2)

    @staticmethod
    def processor_sizes(config: Mapping[str, Any]) -> dict[str, int]:
        return {"num_inputs": config["num_inputs"]}

    def arguments(self) -> dict[str, Any]:
        return self.sizes

    def shard_units(self) -> list[nn.Module]:
        return list(self.layers)

    def predict(self, inputs: Tensor) -> Tensor:
        """[N, num_inputs] -> [N, 2]: values, and logits of the label."""
        for layer in self.layers:
            inputs = layer(inputs)
        return self.head(inputs)

    def forward(self, batch: RowsBatch) -> LossTerms:
        values, logits = self.predict(batch.inputs).unbind(1)
        targets, weights = fill_unknown(batch.values)
        labels, label_weights = fill_unknown(batch.labels)
        label_loss = binary_cross_entropy_with_logits(logits, labels, label_weights, reduction="sum")
        return LossTerms({"value": ((values - targets).square() * weights).sum(), "label": label_loss})


class Predictor:
    """Answers a row of inputs."""

    def __init__(self, model: RowsNetwork, processor: RowsProcessor) -> None:
        self.model, self.processor = model, processor

    @torch.no_grad()
    def unified_generate(self, prompt: str, **_: Any) -> Generated:
        batch = pack_documents([[self.processor.split(prompt, "the prompt")]], self.processor)
        [[value, logit]] = self.model.predict(batch.to(self.model.head.weight.device).inputs).tolist()
        return Generated(f"{value:.4f} {int(logit > 0)}", [])


class RowsDirectory(PublishedFormat):
    """``config.json`` with the sections of a config, and ``model.safetensors``."""

    name = "a directory of RowsNetwork"
    pretrained = False

    def recognises(self, folder: Path) -> bool:
        path = folder / "config.json"
        return path.is_file() and '"RowsNetwork"' in path.read_text(encoding="utf-8")

    def config(self, folder: Path) -> dict[str, Any]:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))

    def write(self, model: Any, processor: Any, out: Path, *, dtype: torch.dtype, **_: Any) -> None:
        config = {"model": {"type": "RowsNetwork", **model.arguments()}}
        with new_directory(out) as folder:
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
            save_file(model.to(dtype).state_dict(), folder / "model.safetensors")


@FAMILIES.register_module()
class Rows(Family):
    """Rows of numbers; no text, no image, no tokenizer."""

    model = RowsNetwork
    terms = ("value", "label")
    published = (RowsDirectory(),)
    processor_type = RowsProcessor
    needs_tokenizer = False
    inferencer = Predictor
