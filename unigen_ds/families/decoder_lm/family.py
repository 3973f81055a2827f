"""``Decoder``: the family of ``DecoderLM``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from unigen_ds.config.registry import FAMILIES
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.data.samples.processor import Processor
from unigen_ds.data.samples.splits import TokenSplit
from unigen_ds.families.bagel.processor import UnifiedProcessor
from unigen_ds.families.base import TRANSFORMERS_WEIGHTS, ConversationFamily, PublishedFormat, published_folder, stated
from unigen_ds.families.decoder_lm.model import MODEL_TYPES, DecoderLM
from unigen_ds.inference.answers import PackedInferencer
from unigen_ds.models.weights import read_json

_OF_IMAGES = ("vit_transform", "vae_transform", "augment", "vit_augment", "vit_dropout", "vae_dropout")
"""Keys of ``UnifiedProcessor`` that nothing of a text depends on."""


class TransformersDirectory(PublishedFormat):
    """``config.json``, safetensors and a tokenizer."""

    name = "a directory of transformers"

    def recognises(self, folder: Path) -> bool:
        return stated(folder / "config.json").get("model_type") in MODEL_TYPES

    def config(self, folder: Path) -> dict[str, Any]:
        """Begin and end are the tokens that its config names."""
        from transformers import AutoTokenizer

        stored = read_json(folder / "config.json")
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            ids = [stored.get("bos_token_id"), stored.get("eos_token_id")]
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

    reads_images = False
    limits = "this model continues a text, and does nothing else"

    def prompt(self, text: str, images: Sequence[Path]) -> list[TokenSplit]:
        tokenizer = self.processor.tokenizer
        return [TokenSplit.unlearned([tokenizer.bos_id, *tokenizer.encode(text)])]


@FAMILIES.register_module()
class Decoder(ConversationFamily):
    """Texts, read and written, by transformers' own Llama and Qwen2. Its records are planned as BAGEL's are."""

    model = DecoderLM
    processor_type = UnifiedProcessor
    terms: ClassVar[Mapping[str, str]] = {"text": "weight of the mean cross-entropy per text target"}
    published = (TransformersDirectory(),)

    def processor(self, spec: Mapping[str, Any], given: Mapping[str, Any], *, tokenizer: Any, seed: int) -> Processor:
        """Return the processor. Raises ``ConfigError`` for what changes images: no record of this model has one."""
        if without_effect := [key for key in _OF_IMAGES if given.get(key)]:
            raise ConfigError(
                f"processor sets {', '.join(without_effect)}, and DecoderLM reads texts alone: no record has an image",
                allowed="text_dropout, ce_reweight",
                remedy="leave it out; or a model with images: UnifiedModel, VLM, ImageTextToText",
            )
        return super().processor(spec, given, tokenizer=tokenizer, seed=seed)

    def inferencer(self, model: Any, processor: Any) -> TextInferencer:
        return TextInferencer(model, processor)
