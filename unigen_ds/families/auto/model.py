"""A model of transformers by its own class and code, trained on our batches (``CausalLM``, ``ImageTextToText``).

Parameters have transformers' names, so a merged checkpoint is a state dict of the model itself. Documents follow each
other in one row where the model's attention keeps them apart (positions begin anew at each; ``attention.py``, or the
mask or lengths that transformers makes of positions), else each is a row of its own, filled up. Which of these is found
in the first forward pass: the model computes two short documents each way. The head computes rows of targets alone.

Shape suffixes: T tokens of the micro-batch, D documents, L tokens of the longest, C targets.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from unigen_ds.backends.memory import allocate
from unigen_ds.config.hub import folder_of
from unigen_ds.config.registry import MODELS, checked
from unigen_ds.core.batch import LossTerms, to_device
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.shards import BUFFER, MASTER, persistent_buffers
from unigen_ds.families.auto.attention import documents, is_causal, use_documents
from unigen_ds.families.auto.batch import ModelBatch, rows_of, slots_of
from unigen_ds.families.auto.loading import auto_config, build_auto, model_keys, read_weights
from unigen_ds.models.attention import Attend, plan_attention
from unigen_ds.models.flops import attention_flops, linear_flops
from unigen_ds.models.losses import loss_terms, text_losses
from unigen_ds.models.weights import PretrainedModel, match
from unigen_ds.system.log import logger

_TOLERANCE, _LOW_TOLERANCE = 1e-3, 0.1
"""Largest difference of packed documents, relative to the root mean square of the logits: fp32, lower precision."""


class TransformersModel(PretrainedModel):
    """``forward(ModelBatch) -> LossTerms`` with the term ``text``.

    Args:
        pretrained: a directory with ``config.json`` and ``*.safetensors``, or a name on the hub: initial weights and
            all sizes.
        config: keys of the model's config in transformers, over those of ``pretrained``; without ``pretrained`` with
            ``model_type``, and the initial weights are transformers' own.
        freeze: regular expressions; parameters in whose names one is found have no gradient and stay bit-identical.
        packing: whether documents share a row; None: checked at the start, by the model itself.
        attention: transformers' name of an attention: ``sdpa``, ``flash_attention_2``, ``flex_attention``, ``eager``;
            None: transformers chooses, and where that is SDPA and plainly causal, documents of a row attend inside of
            each (``attention.py``).
        activation_checkpointing: compute each layer again in the backward pass: less memory, more time.
        compile: ``torch.compile`` each layer.
    """

    transformers_model: Any
    """transformers' own model, whose modules are this one's."""
    auto: ClassVar[str]
    """transformers' class that chooses the model's own."""
    reads_images: ClassVar[bool]
    config_key: ClassVar[str] = "config"
    """The key of the section ``model`` that has the model's config."""
    fixes_of_processor: ClassVar[tuple[str, ...]] = ("reads_images",)
    """Arguments of the processor that follow from the class: no config sets them."""
    forward_methods = ("logits", "next_token_logits")
    """Entry points beside ``forward``; a sharding engine must hook these too."""

    @checked("model")
    def __init__(
        self,
        *,
        pretrained: str | None = None,
        config: Mapping[str, Any] | None = None,
        freeze: Sequence[str] = (),
        packing: bool | None = None,
        attention: str | None = None,
        activation_checkpointing: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__()
        if not pretrained and not (config or {}).get("model_type"):
            raise ConfigError(
                f"model has neither pretrained nor {self.config_key}.model_type",
                remedy="model.pretrained='DIR' or a name on the hub",
            )
        meta = torch.empty(0).is_meta
        folder = folder_of(pretrained, where="model.pretrained") if pretrained else None
        settings = auto_config(folder, config or {}, where=f"model.{self.config_key}")
        causal = build_auto(self.auto, settings, attention=attention, whole=folder is None and not meta)
        # not registered: its modules are registered here, so that parameters have transformers' names
        self.__dict__["transformers_model"] = causal
        for name, module in causal.named_children():
            self.add_module(name, module)
        if [*causal.parameters(recurse=False)] or causal.get_output_embeddings() is None:
            problem = f"{type(causal).__name__} of transformers has parameters outside of its layers, or no head"
            raise ConfigError(problem, remedy="another model, or a family of your own (docs/extending/model.md)")
        self.packing = packing
        self._may_change_attention = attention is None and not compile
        self._inside_documents = False
        self._pair: Callable[[], tuple[ModelBatch, ModelBatch]] | None = None
        self._targets: Tensor | None = None
        causal.get_output_embeddings().register_forward_pre_hook(self._of_targets)
        self._file_tensors = {}
        if folder is not None:
            self._file_tensors = match(self, read_weights(folder, causal, auto=self.auto))
            if not meta:
                self._fill()
        _freeze_by_name(self, freeze)
        if activation_checkpointing:
            causal.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        if compile:
            for layer in self.shard_units():
                layer.compile()

    @torch.no_grad()
    def _fill(self) -> None:
        """Memory for the parameters, and what the files hold."""
        allocate(self, lambda tensor: torch.empty_like(tensor, device="cpu"))
        reader, parameters = self.initial_weights(seed=0), dict(self.named_parameters())
        for name, tensor in {**parameters, **persistent_buffers(self)}.items():
            kind = MASTER if name in parameters else BUFFER
            tensor.view(-1).copy_(reader.read(kind, name, 0, tensor.numel()))

    def use_processor(self, processor: Any) -> None:
        """Called once, with the processor of the data, whose documents are then used to check packing."""
        self._pair = getattr(processor, "two_documents", None)

    @property
    def vocab_size(self) -> int:
        return int(self.transformers_model.config.get_text_config().vocab_size)

    @property
    def max_document_tokens(self) -> int | None:
        """Tokens of a document at most: the model has no more positions. None: it does not say."""
        limit = getattr(self.transformers_model.config.get_text_config(), "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else None

    def arguments(self) -> dict[str, Any]:
        """The config as the argument of the constructor, which then needs no ``pretrained``."""
        return {self.config_key: model_keys(self.transformers_model.config)}

    def initialise(self, name: str, tensor: Tensor, generator: torch.Generator | None = None) -> None:
        """New rows of a vocabulary: Normal(0, ``initializer_range``). Everything else is in the files."""
        buffer = dict(self.named_buffers()).get(name)
        if buffer is not None:
            tensor.copy_(buffer)
            return
        text = self.transformers_model.config.get_text_config()
        tensor.normal_(std=getattr(text, "initializer_range", None) or 0.02, generator=generator)

    def shard_units(self) -> list[nn.Module]:
        """Layers that transformers never splits over devices, or computes again for activation checkpointing."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        names, units = self.transformers_model._no_split_modules or (), dict[str, nn.Module]()
        for name, module in self.named_modules():
            inside = any(name.startswith(f"{outer}.") for outer in units)
            if not inside and (isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in names):
                units[name] = module
        return list(units.values())

    def train(self, mode: bool = True) -> Self:
        self.transformers_model.training = mode
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Buffers that no file has (rotary frequencies) keep their precision where a model is cast."""
        exact = [
            (module, name, buffer)
            for module in self.modules()
            for name, buffer in module._buffers.items()
            if name in module._non_persistent_buffers_set and buffer is not None and buffer.is_floating_point()
        ]
        super()._apply(fn, recurse)
        for module, name, buffer in exact:
            now = module._buffers[name]
            if now is not None and now.dtype != buffer.dtype:
                module._buffers[name] = buffer.to(now.device)
        return self

    def forward(self, batch: ModelBatch) -> LossTerms:
        logits = self._compute(batch, batch.text_target_index)
        text = text_losses(logits, batch.text_target_ids, batch.text_target_weight)
        return loss_terms({"text": text}, training=self.training)

    def flops(self, batch: ModelBatch) -> float:
        """Floating point operations of forward and backward on this micro-batch (``models/flops.py``): every token in
        the layers of the language model, every target in the head, every patch of an image in all other linear layers.
        """
        text, (per_token, per_target, per_pixel) = self.transformers_model.config.get_text_config(), self._flops
        attention = attention_flops(batch.document_lengths, text.hidden_size, grad=True) * text.num_hidden_layers
        total = per_token * batch.num_tokens + attention + per_target * len(batch.text_target_index)
        if batch.num_images and (pixels := batch.image_inputs.get("pixel_values")) is not None:
            total += per_pixel * pixels.numel()
        return total

    @cached_property
    def _flops(self) -> tuple[float, float, float]:
        """Operations of a token in the decoder, of a target in the head, of a number of an image outside of both."""
        model, text = self.transformers_model, self.transformers_model.config.get_text_config()
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        experts_per_token = getattr(text, "num_experts_per_tok", None) or 0
        experts = [p for p in decoder.parameters() if p.ndim == 3 and p.numel()] if experts_per_token else []
        per_token = linear_flops(decoder, input_grad=True)
        per_token += sum(2.0 * experts_per_token * p[0].numel() * (2 + p.requires_grad) for p in experts)
        inside = {*decoder.modules(), head}
        others = [m for m in model.modules() if m not in inside and not [*m.children()]]
        patch = next((m for m in others if hasattr(m, "kernel_size") and hasattr(m, "in_channels")), None)
        sides = getattr(patch, "kernel_size", ())  # not of its weight: an engine may have left an empty shard
        numbers = math.prod(sides) * patch.in_channels if patch is not None else 1
        per_pixel = sum(linear_flops(m, input_grad=False) for m in others) / numbers
        return per_token, linear_flops(head, input_grad=True), per_pixel

    def logits(self, batch: ModelBatch) -> Tensor:
        """``[T, vocabulary]``: for every token what follows it."""
        return self._compute(batch, torch.arange(batch.position_ids.numel(), device=batch.text_ids.device))

    def next_token_logits(self, batch: ModelBatch, *, attend: Attend | None = None) -> Tensor:
        """Logits ``[D, vocabulary]`` of the token that follows each document."""
        last = torch.tensor(batch.document_lengths).cumsum(0) - 1
        return self._compute(batch, to_device(last, batch.text_ids.device), attend)

    def _compute(self, batch: ModelBatch, index: Tensor, attend: Attend | None = None) -> Tensor:
        """Logits ``[C, vocabulary]`` at the tokens ``index``."""
        if self.packing is None:
            self.packing = self._can_pack(batch.text_ids.device)
        return self._in_one_row(batch, index, attend) if self.packing else self._rows(batch, index)

    def inputs(self, batch: ModelBatch) -> dict[str, Any]:
        """transformers' arguments for one document without positions, which ``generate`` makes itself."""
        ids = batch.text_ids[None]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **self._images(batch, in_rows=False)}

    def _in_one_row(self, batch: ModelBatch, index: Tensor, attend: Attend | None = None) -> Tensor:
        inputs = {"input_ids": batch.text_ids[None], **self._accept({"position_ids": self.positions(batch)})}
        inputs |= self._images(batch, in_rows=False)
        if not self._inside_documents:
            return self._call(inputs, index)
        with documents(batch.document_lengths, attend or plan_attention(batch)):
            return self._call({**inputs, "attention_mask": torch.ones_like(batch.text_ids)[None]}, index)

    def _rows(self, batch: ModelBatch, index: Tensor) -> Tensor:
        """A row for each document, filled up at its end."""
        lengths = batch.document_lengths
        ids, slots = rows_of(batch.text_ids, lengths, fill=self._pad_id), slots_of(lengths, batch.text_ids.device)
        inputs = {"input_ids": ids, "attention_mask": rows_of(torch.ones_like(batch.text_ids), lengths)}
        if self._inner_positions is None:
            inputs |= self._accept({"position_ids": torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)})
        return self._call(inputs | self._images(batch, in_rows=True), slots[index])

    def _call(self, inputs: Mapping[str, Any], index: Tensor) -> Tensor:
        """Logits, of which the head computes those at the tokens ``index`` alone."""
        self._targets = index
        try:
            logits: Tensor = self.transformers_model(**inputs, use_cache=False).logits
        finally:
            self._targets = None
        return logits.flatten(0, 1)

    def _of_targets(self, head: nn.Module, arguments: tuple[Any, ...]) -> Any:
        if self._targets is None:
            return None
        return (arguments[0].flatten(0, -2)[self._targets][None], *arguments[1:])

    @cached_property
    def _input_names(self) -> frozenset[str]:
        return frozenset(inspect.signature(type(self.transformers_model).forward).parameters)

    def _accept(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return those inputs that the model's own forward pass accepts."""
        return {name: value for name, value in inputs.items() if value is not None and name in self._input_names}

    @cached_property
    def _pad_id(self) -> int:
        config = self.transformers_model.config.get_text_config()
        return next((i for i in (config.pad_token_id, config.eos_token_id) if isinstance(i, int) and i >= 0), 0)

    def _images(self, batch: ModelBatch, *, in_rows: bool) -> dict[str, Tensor]:
        """Inputs of images in the precision of the weights, and marks of their tokens; ``in_rows``: by document."""
        if not self.reads_images:
            return {}
        dtype = self.transformers_model.get_input_embeddings().weight.dtype
        inputs = {n: t.to(dtype) if t.is_floating_point() else t for n, t in batch.image_inputs.items()}
        host = batch.host.get("token_types")
        types = torch.zeros_like(batch.text_ids) if host is None else to_device(host, batch.text_ids.device)
        token_types = rows_of(types, batch.document_lengths) if in_rows else types[None]
        return self._accept({**inputs, "mm_token_type_ids": token_types, "token_type_ids": token_types})

    @cached_property
    def _inner_positions(self) -> Any:
        """The model's own function of positions in images (Qwen2-VL and its successors), where it has one."""
        inner = getattr(self.transformers_model, "model", None)
        return getattr(inner, "get_rope_index", None) if self.reads_images else None

    def positions(self, batch: ModelBatch) -> Tensor:
        """``[1, T]``, from 0 in each document; with images ``[4, 1, T]`` of transformers: then time, row, column."""
        flat = batch.position_ids
        if self._inner_positions is None:
            return flat[None]
        ids = batch.host.get("text_ids")
        if ids is None:
            return flat.expand(4, 1, -1)
        # on the CPU, where the batch was made: the function reads numbers, and the device would be waited for
        lengths = batch.document_lengths
        names = inspect.signature(self._inner_positions).parameters
        inputs = {
            **{name: tensor for name, tensor in batch.host.items() if name in names},
            "mm_token_type_ids": rows_of(batch.host["token_types"], lengths),
            "attention_mask": rows_of(torch.ones_like(ids), lengths),
        }
        positions, _ = self._inner_positions(rows_of(ids, lengths, fill=self._pad_id), **inputs)
        inside = to_device(positions.flatten(1)[:, slots_of(lengths, ids.device)].contiguous(), flat.device)
        return torch.cat([flat[None], inside])[:, None]

    def _can_pack(self, device: torch.device) -> bool:
        """Whether the model keeps documents of one row apart: what it computes, in short forward passes of its own.
        Where its attention is plainly causal SDPA, first with attention inside of each document (``attention.py``).
        """
        model, training, why = self.transformers_model, self.training, ""
        if self._pair is None:
            why = "no processor has documents to check it"
        elif "position_ids" not in self._input_names:
            why = "its forward pass has no position_ids"
        else:
            first, other = (batch.to(device) for batch in self._pair())
            self.eval()
            for inside in (True, False) if self._may_change_attention and is_causal(model) else (False,):
                self._attend_inside_documents(inside)
                if not (why := self._cannot_pack(first, other)):
                    break
            self.train(training)
        how = f"every document is a row of its own, filled up to the longest: {why}"
        if not why:
            kind = "attention inside of each" if self._inside_documents else "a mask of all pairs of its tokens"
            how = f"documents share one row, with {kind}"
        logger().info(f"{type(model).__name__}: {how}.")
        return not why

    def _attend_inside_documents(self, on: bool) -> None:
        if on != self._inside_documents:
            use_documents(self.transformers_model, on=on)
            self._inside_documents = on

    @torch.no_grad()
    def _cannot_pack(self, first: ModelBatch, other: ModelBatch) -> str:
        """Why not; '' for nothing. ``other`` differs from ``first`` in its first document."""
        index = torch.arange(first.position_ids.numel(), device=first.position_ids.device)
        alone, second = self._rows(first, index), first.document_lengths[0]
        try:
            packed, packed_other = self._in_one_row(first, index), self._in_one_row(other, index)
        except (AttributeError, IndexError, TypeError, ValueError) as error:  # its own attention expects a mask
            return f"its code has an error with it ({str(error).strip().splitlines()[0]})"
        if not torch.equal(packed[second:], packed_other[second:]):
            return "a document changes the one after it"
        apart = float((packed - alone).float().abs().max() / alone.float().square().mean().sqrt())
        if not apart <= (_TOLERANCE if packed.dtype == torch.float32 else _LOW_TOLERANCE):
            return f"packed documents differ from separate ones by {apart:.2g} of their size"
        return ""


@MODELS.register_module()
class CausalLM(TransformersModel):
    """A language model of transformers, of any kind that ``AutoModelForCausalLM`` has."""

    auto = "AutoModelForCausalLM"
    reads_images = False


@MODELS.register_module()
class ImageTextToText(TransformersModel):
    """A model of transformers that reads images and texts, of any kind that ``AutoModelForImageTextToText`` has."""

    auto = "AutoModelForImageTextToText"
    reads_images = True

    @staticmethod
    def processor_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
        return {"reads_images": True}


def _freeze_by_name(model: nn.Module, patterns: Sequence[str]) -> None:
    """Parameters that a pattern matches anywhere in their names get no gradient; of tied ones any name counts. Raises
    ``ConfigError`` for a pattern that cannot be read or matches nothing, and where nothing remains.
    """
    parameters = [*model.named_parameters(remove_duplicate=False)]
    for pattern in patterns:
        try:
            matches = [parameter for name, parameter in parameters if re.search(pattern, name)]
        except re.error as error:
            raise ConfigError(f"model.freeze: {pattern!r} is no regular expression: {error}") from error
        if not matches:
            parts = ", ".join(dict.fromkeys(".".join(name.split(".")[:2]) for name, _ in parameters))
            raise ConfigError(f"model.freeze: {pattern!r} matches no parameter", allowed=f"a part of {parts}")
        for parameter in matches:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for _, parameter in parameters):
        raise ConfigError(f"model.freeze {[*patterns]} leaves nothing to train")
