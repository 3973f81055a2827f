"""Floating point operations of a step of a model of transformers, by the sizes of its modules (``models/flops.py``).

Layers of the language model compute every token of the records, the head those with a target, layers of the vision
tower every patch, and what is between them every token of an image. Of experts those count that a token is sent to.
Attention counts whole squares of documents and images, also where a layer has a window. Norms, poolings and the class
token of a tower are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from unigen_ds.models.flops import attention_flops, linear_flops, trains


class Cost:
    """Counts the operations of a model. Built before an engine shards it: only parameters show the sizes of experts."""

    def __init__(self, model: Any, units: Sequence[nn.Module]) -> None:
        decoder, head = set(model.get_decoder().modules()), model.get_output_embeddings()
        self._config, self._head, self._embeddings = model.config, head, model.get_input_embeddings()
        self._layers = [unit for unit in units if unit in decoder]
        rest = {module: name for name, module in model.named_modules() if module not in decoder and module is not head}
        pooling = {module for module, name in rest.items() if ".head" in name}
        self._patches: Any = next((m for m in rest if hasattr(m, "kernel_size") and hasattr(m, "in_channels")), None)
        self._tower = [u for u in units if u in rest and u not in pooling and self._patches not in set(u.modules())]
        inside = {module for unit in self._tower for module in unit.modules()} | pooling
        self._between = [
            module
            for module in rest
            if module not in inside and isinstance(getattr(module, "out_features", None), int)
            if not [*module.children()]
        ]
        text = model.config.get_text_config()
        chosen = getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None) or 0
        self._experts = [
            (module, chosen * sum(p.numel() / p.shape[0] for p in module.parameters(recurse=False) if p.ndim == 3))
            for layer in self._layers
            for module in layer.modules()
            if not hasattr(module, "kernel_size")
        ]

    def of(self, batch: Any) -> float:
        """Forward and backward on this micro-batch, without the image that no record has."""
        lengths, text = batch.document_lengths, self._config.get_text_config()
        if sum(lengths) > batch.num_tokens:
            lengths = lengths[:-1]
        before = trains(self._embeddings) or any(map(trains, (*self._tower, *self._between)))
        learns = before or any(map(trains, self._layers))
        token = _in_order(self._layers, input_grad=before)
        token += sum(2 * numel * (2 + trains(module)) for module, numel in self._experts)
        heads = _whole(text, "num_attention_heads")  # 0: it has no attention
        width = heads * _whole(text, "head_dim") or _whole(text, "hidden_size") * bool(heads)
        total = token * batch.num_tokens + attention_flops(lengths, width, grad=learns) * len(self._layers)
        total += linear_flops(self._head, input_grad=learns) * len(batch.text_target_index)
        return total + (self._vision(batch) if getattr(batch, "num_pictures", 0) else 0.0)

    def _vision(self, batch: Any) -> float:
        """Operations of the vision tower and of the layers that make tokens of its features."""
        pixels, config = batch.image_inputs.get("pixel_values"), getattr(self._config, "vision_config", None)
        if pixels is None or config is None or self._patches is None:
            return 0.0
        size = self._patches.kernel_size
        kernel = self._patches.in_channels * math.prod(size if isinstance(size, tuple) else (size,))
        patches, embedding_trains = pixels.numel() / kernel, trains(self._patches)
        images = [int(grid.prod()) for grid in batch.host.get("image_grid_thw", ())]
        if not images:
            number = math.prod(pixels.shape[:-3])
            images = [round(patches / number)] * number
        learns = any(map(trains, self._tower))
        total = patches * 2.0 * kernel * self._patches.out_channels * (1 + embedding_trains)
        total += patches * _in_order(self._tower, input_grad=embedding_trains)
        width = _whole(config, "hidden_size") or _whole(config, "embed_dim")
        total += attention_flops(images, width, grad=learns) * len(self._tower)
        return total + int(batch.host["token_types"].sum()) * _in_order(self._between, input_grad=learns)


def _whole(config: Any, key: str) -> int:
    """A number of a config; 0 where it has none, or one for each layer."""
    number = getattr(config, key, None)
    return number if isinstance(number, int) else 0


def _in_order(modules: Sequence[nn.Module], *, input_grad: bool) -> float:
    """``linear_flops`` of modules that follow each other."""
    total = 0.0
    for module in modules:
        total += linear_flops(module, input_grad=input_grad)
        input_grad = input_grad or trains(module)
    return total
