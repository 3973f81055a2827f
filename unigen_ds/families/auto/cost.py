"""Floating point operations of a step of a model of transformers, by the sizes of its modules (``models/flops.py``).

Layers of the language model compute every token of the records, the head those with a target, layers of the vision
tower every patch, and what is between them every token of an image. Of experts those count that a token is sent to.
Attention counts whole squares of documents and images, and rows of a window where a layer has one. Norms, poolings
and the class token of a tower are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from unigen_ds.families.auto.batch import ModelBatch
from unigen_ds.models.flops import attention_flops, linear_flops, trains


class Cost:
    """Counts the operations of a model. Built before an engine shards it: only parameters show the sizes of experts."""

    def __init__(self, model: Any, units: Sequence[nn.Module]) -> None:
        decoder = set(model.get_decoder().modules())
        head = model.get_output_embeddings()
        self._text = model.config.get_text_config()
        self._layers = [unit for unit in units if unit in decoder]
        rest = {module: name for name, module in model.named_modules() if module not in decoder and module is not head}
        self._patches = next((m for m in rest if hasattr(m, "kernel_size") and hasattr(m, "in_channels")), None)
        pooling = {module for module, name in rest.items() if ".head" in name}
        self._tower = [u for u in units if u in rest and u not in pooling and self._patches not in set(u.modules())]
        inside = {module for unit in self._tower for module in unit.modules()} | pooling
        self._between = [module for module in rest if module not in inside and _is_linear(module)]
        self._vision = getattr(model.config, "vision_config", None)
        self._head, self._embeddings = head, model.get_input_embeddings()
        self._experts = [experts for layer in self._layers for experts in self._experts_of(layer)]

    def _experts_of(self, layer: nn.Module) -> Iterator[tuple[nn.Module, float]]:
        """Each module with experts, and the elements of those that a token is sent to."""
        number = getattr(self._text, "num_experts_per_tok", None) or getattr(self._text, "top_k_experts", None)
        for module in layer.modules():
            own = [p for p in module.parameters(recurse=False) if p.ndim == 3]
            if number and own and not hasattr(module, "kernel_size"):
                yield module, sum(p.numel() / p.shape[0] for p in own) * number

    def of(self, batch: ModelBatch) -> float:
        """Forward and backward on this micro-batch, without the image that no record has."""
        lengths = batch.document_lengths[: len(batch.document_lengths) - bool(batch.added_tokens)]
        before = trains(self._embeddings) or any(map(trains, (*self._tower, *self._between)))
        each = _in_order(self._layers, input_grad=before)
        each += sum(2 * numel * (2 + trains(module)) for module, numel in self._experts)
        total = each * batch.num_tokens + self._read(lengths, before=before)
        learns = before or any(map(trains, self._layers))
        total += linear_flops(self._head, input_grad=learns) * len(batch.text_target_index)
        return total + (self._seen(batch) if batch.num_pictures else 0.0)

    def _read(self, lengths: Sequence[int], *, before: bool) -> float:
        """Attention of the language model."""
        text = self._text
        heads = _whole(text, "num_attention_heads")  # 0: it has no attention
        width = heads * _whole(text, "head_dim") or _whole(text, "hidden_size") * bool(heads)
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * len(self._layers)
        grad = before or any(map(trains, self._layers))
        window = getattr(text, "sliding_window", None) or math.inf
        total = attention_flops(lengths, width, grad=grad) * sum(kind == "full_attention" for kind in kinds)
        near = sum(length * min(length, window) for length in lengths)
        return total + 4.0 * width * near * (3 if grad else 1) * sum(kind == "sliding_attention" for kind in kinds)

    def _seen(self, batch: ModelBatch) -> float:
        """Operations of the vision tower and of the layers that make tokens of its features."""
        pixels, vision = batch.image_inputs.get("pixel_values"), self._vision
        if pixels is None or vision is None:
            return 0.0
        kernel, out = _kernel(self._patches)
        patches = pixels.numel() / (kernel or pixels.shape[-1])
        images = [int(grid.prod()) for name, g in batch.host.items() if name == "image_grid_thw" for grid in g]
        if not images:
            number = math.prod(pixels.shape[:-3])
            images = [round(patches / number)] * number
        learns = any(map(trains, self._tower))
        total = patches * _in_order(self._tower, input_grad=self._patches is not None and trains(self._patches))
        total += patches * 2.0 * kernel * out * (1 + (self._patches is not None and trains(self._patches)))
        width = _whole(vision, "hidden_size") or _whole(vision, "embed_dim")
        whole = getattr(vision, "fullatt_block_indexes", None)
        everywhere = len(self._tower) if whole is None else len(whole)
        total += attention_flops(images, width, grad=learns) * everywhere
        if whole is not None:
            side = vision.window_size // vision.patch_size
            windows = [side**2] * round(patches / side**2)
            total += attention_flops(windows, width, grad=learns) * (len(self._tower) - everywhere)
        image_tokens = int(batch.host["token_types"].sum())
        return total + image_tokens * _in_order(self._between, input_grad=learns)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(getattr(module, "out_features", None), int) and not [*module.children()]


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


def _kernel(module: Any) -> tuple[int, int]:
    """Elements that one patch has, and channels that are made of it."""
    if module is None:
        return 0, 0
    sides = module.kernel_size if isinstance(module.kernel_size, tuple) else (module.kernel_size,)
    return module.in_channels * math.prod(sides), module.out_channels
