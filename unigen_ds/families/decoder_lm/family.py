"""``DecoderLM``, a Llama or Qwen2 of transformers that may be trained from scratch, and its family.

Parameters have transformers' names, so a merged checkpoint is a state dict of ``AutoModelForCausalLM``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Lt
from torch import Tensor, nn
from torch.nn import functional as F

from unigen_ds.config.registry import FAMILIES, MODELS, checked
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.data.records.records import Turn
from unigen_ds.data.samples.processor import Processor
from unigen_ds.data.samples.splits import TokenSplit
from unigen_ds.families.auto.attention import is_causal
from unigen_ds.families.auto.model import CausalLM
from unigen_ds.families.bagel.processor import UnifiedProcessor
from unigen_ds.families.base import (
    TRANSFORMERS_WEIGHTS,
    ConversationFamily,
    PublishedFormat,
    published_folder,
    read_statement,
)
from unigen_ds.inference.answers import PackedInferencer
from unigen_ds.models.settings import check_heads
from unigen_ds.models.weights import read_json

MODEL_TYPES = ("llama", "qwen2")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Their angles depend on the position alone; those of others on the length of the row, which documents share."""
_NOT_THE_MODELS = {"use_cache", "pretraining_tp", "bos_token_id", "eos_token_id", "pad_token_id"}
"""Keys of a config that no layer reads."""


@MODELS.register_module()
class DecoderLM(CausalLM):
    """``forward(PackedBatch) -> LossTerms`` with the term ``text``.

    Args:
        llm: ``model_type`` (``llama`` or ``qwen2``) and keys of that kind's config in transformers, under its names and
            with its defaults: ``hidden_size``, ``intermediate_size``, ``num_hidden_layers``, ``num_attention_heads``,
            ``num_key_value_heads``, ``max_position_embeddings`` (the most tokens of a document),
            ``tie_word_embeddings``, ``rms_norm_eps``, ``rope_parameters``, ``attention_dropout``,
            ``initializer_range``, ...; those that ``pretrained`` does not have. ``vocab_size`` is the tokenizer's
            where it is left out.
        pretrained: a directory as transformers writes it (``config.json``, ``*.safetensors``, in one file or many), or
            a name on the hub: initial weights, and every key that is not given.
        dropout: on both residual branches of each layer; that of the scores is ``llm.attention_dropout``.
        freeze: any of ``embed``, ``layers``, ``head`` (with tied embeddings ``embed`` and ``head`` are one): no
            gradient, bit-identical after training.
        activation_checkpointing: compute each decoder layer again in the backward pass: less memory, more time.
        compile: ``torch.compile`` each decoder layer.
    """

    config_key = "llm"
    model: Any
    lm_head: Any

    @checked("model")
    def __init__(
        self,
        *,
        llm: Mapping[str, Any] | None = None,
        pretrained: str | None = None,
        dropout: Annotated[float, Ge(0), Lt(1)] = 0.0,
        freeze: Sequence[Literal["embed", "layers", "head"]] = (),
        activation_checkpointing: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__(
            pretrained=pretrained,
            config={key: value for key, value in (llm or {}).items() if value is not None},
            packing=True,
            activation_checkpointing=activation_checkpointing,
            compile=compile,
        )
        config = self.transformers_model.config
        rope = (config.rope_parameters or {}).get("rope_type", "default")
        for key, value, choices in (
            ("model_type", config.model_type, MODEL_TYPES), ("rope_parameters.rope_type", rope, ROPE_TYPES)
        ):  # fmt: skip
            if value not in choices:
                raise ConfigError(f"model.llm.{key} is {value!r}", allowed=", ".join(choices), remedy="CausalLM")
        check_heads("model.llm", config.hidden_size, config.num_attention_heads, config.num_key_value_heads)
        self._attend_inside_documents(is_causal(self.transformers_model))
        if not pretrained and not torch.empty(0).is_meta:
            self.start_from(None)
        self.freeze(freeze)
        for layer in self.model.layers if dropout else ():
            for branch in (layer.self_attn.o_proj, layer.mlp.down_proj):
                branch.register_forward_hook(lambda module, _, output: F.dropout(output, dropout, module.training))

    def arguments(self) -> dict[str, Any]:
        """The sizes as arguments of the constructor, which then needs no ``pretrained``; no tokens: the tokenizer's."""
        from transformers import PreTrainedConfig

        config: Any = self.transformers_model.config
        own, common = ({field.name for field in dataclasses.fields(each)} for each in (config, PreTrainedConfig))
        values = {key: config.to_dict().get(key) for key in sorted(own - common - _NOT_THE_MODELS)}
        return {"llm": {"model_type": config.model_type, **{k: v for k, v in values.items() if v is not None}}}

    def initialise(self, name: str, tensor: Tensor, generator: torch.Generator | None = None) -> None:
        """Normal(0, ``initializer_range``), as transformers. Norms one, biases zero."""
        if tensor.ndim > 1:
            tensor.normal_(std=self.transformers_model.config.initializer_range, generator=generator)
        else:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)

    def parts(self) -> dict[str, nn.Module]:
        return {"embed": self.model.embed_tokens, "layers": self.model.layers, "head": self.lm_head}


_OF_IMAGES = ("vit_transform", "vae_transform", "augment", "vit_augment", "vit_dropout", "vae_dropout")
"""Keys of ``UnifiedProcessor`` that nothing of a text depends on."""


class TransformersDirectory(PublishedFormat):
    """``config.json``, safetensors and a tokenizer."""

    name = "a directory of transformers"

    def recognises(self, folder: Path) -> bool:
        return read_statement(folder / "config.json").get("model_type") in MODEL_TYPES

    def config(self, folder: Path) -> dict[str, Any]:
        """Begin and end are the tokens that its config names."""
        from transformers import AutoTokenizer

        config = read_json(folder / "config.json")
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            ids = [config.get("bos_token_id"), config.get("eos_token_id")]
            first = [each[0] if isinstance(each, list) and each else each for each in ids]
            begin, end = (tokenizer.convert_ids_to_tokens(first[1] if each is None else each) for each in first)
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{folder} has no tokenizer with the tokens of its config: {error}",
                remedy="name the config of the training: --config CONFIG",
            ) from error
        names = {"bos": begin, "eos": end, "image_start": None, "image_end": None}
        return {
            "model": {"type": "DecoderLM", "pretrained": str(folder)},
            "tokenizer": {"type": "PretrainedTokenizer", "path": str(folder), **names},
        }

    def write(
        self, model: Any, processor: Any, out: Path, *, source: Path | None, dtype: torch.dtype, max_shard_size: str
    ) -> None:
        from transformers import GenerationConfig

        causal, tokenizer = model.to("cpu", dtype).transformers_model, processor.tokenizer
        causal.config.bos_token_id, causal.config.eos_token_id = tokenizer.bos_id, tokenizer.eos_id
        causal.generation_config = GenerationConfig.from_model_config(causal.config)
        causal.generation_config.pad_token_id = tokenizer.pad_id  # not of config: there it would freeze an embedding
        with published_folder(out, processor.tokenizer, source, without=TRANSFORMERS_WEIGHTS) as folder:
            causal.save_pretrained(folder, max_shard_size=max_shard_size)


class TextInferencer(PackedInferencer):
    """A ``DecoderLM``: its answer is the continuation of the prompt."""

    reads_images = converses = False
    limits = "this model continues a text, and does nothing else"

    def prompt(self, text: str, images: Sequence[Path], history: Sequence[Turn]) -> list[TokenSplit]:
        tokenizer = self.processor.tokenizer
        return [TokenSplit.unlearned([tokenizer.bos_id, *tokenizer.encode(text)])]


@FAMILIES.register_module()
class Decoder(ConversationFamily):
    """Texts, read and written, by transformers' own Llama and Qwen2. Its records are planned as BAGEL's are."""

    model = DecoderLM
    processor_type = UnifiedProcessor
    published = (TransformersDirectory(),)
    inferencer = TextInferencer

    def processor(self, spec: Mapping[str, Any], section: Mapping[str, Any], *, tokenizer: Any, seed: int) -> Processor:
        """Return the processor. Raises ``ConfigError`` for what changes images: no record of this model has one."""
        if without_effect := [key for key in _OF_IMAGES if section.get(key)]:
            raise ConfigError(
                f"processor sets {', '.join(without_effect)}, and DecoderLM reads texts alone: no record has an image",
                allowed="text_dropout, ce_reweight",
                remedy="leave it out; or a model with images: UnifiedModel, VLM, ImageTextToText",
            )
        return super().processor(spec, section, tokenizer=tokenizer, seed=seed)
