"""``NanoVLM``: the family of ``VLM``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from unigen_ds.config.registry import FAMILIES
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.core.json_values import stored_object
from unigen_ds.data.images.tiles import GLOBAL_TOKEN, IMAGE_TOKEN, MAX_TILES_PER_SIDE, TILE_TOKENS, tile_token
from unigen_ds.families.base import ConversationFamily, PublishedFormat, published_folder, read_statement
from unigen_ds.families.nanovlm.model import VLM
from unigen_ds.families.nanovlm.processor import VLMProcessor
from unigen_ds.families.nanovlm.published import (
    CONFIG,
    WEIGHTS,
    nanovlm_sizes,
    save_nanovlm,
    stored_weights,
    vlm_arguments,
)
from unigen_ds.inference.answers import PackedInferencer
from unigen_ds.models.weights import Pretrained, read_json

_CHAT = ("lm_tokenizer", "lm_chat_template", "max_img_size")
"""Keys of nanoVLM since its models read tiles in a chat."""


class NanoVLMDirectory(PublishedFormat):
    """``config.json`` and ``model.safetensors``, and maybe a tokenizer."""

    name = "nanoVLM's directory"
    pretrained = False
    parts = (WEIGHTS,)

    def recognises(self, folder: Path) -> bool:
        return "mp_pixel_shuffle_factor" in read_statement(folder / CONFIG) and (folder / WEIGHTS).is_file()

    def config(self, folder: Path) -> dict[str, Any]:
        """Its tokenizer is the one beside it, or else the one that it names."""
        stored = stored_object(folder / CONFIG)
        lacking = [name for name in _CHAT if name not in stored]
        if lacking:
            raise CheckpointError(
                f"{folder / CONFIG} lacks {', '.join(lacking)}: it is of nanoVLM's first version (nanoVLM-222M), whose"
                " models know no image token and no chat template",
                remedy="a later model (lusxvr/nanoVLM-230M-8k), or one from parts: model.pretrained=dict(vit=, llm=)",
            )
        beside = (folder / "tokenizer_config.json").is_file()
        tokenizer = {"path": str(folder) if beside else stored["lm_tokenizer"]}
        return {
            "model": {"type": "VLM", **vlm_arguments(stored)},
            "tokenizer": {"type": "ChatTokenizer", **tokenizer, "chat_template": stored["lm_chat_template"]},
            "processor": {
                "max_image_size": stored["max_img_size"],
                "resize_to_max_side_len": stored.get("resize_to_max_side_len", False),
            },
        }

    def weights(self, folder: Path) -> Pretrained:
        return stored_weights(folder)

    def sizes(self, folder: Path) -> dict[str, Any]:
        return vlm_arguments(stored_object(folder / CONFIG)) if self.recognises(folder) else {}

    def write(
        self, model: Any, processor: Any, out: Path, *, source: Path | None, dtype: torch.dtype, max_shard_size: str
    ) -> None:
        config = _config(model, processor) if source is None else read_json(source / CONFIG)
        with published_folder(out, processor.tokenizer.chat, source, without=(WEIGHTS,)) as folder:
            save_nanovlm(model.to(dtype), folder, config=config)


@FAMILIES.register_module()
class NanoVLM(ConversationFamily):
    """Texts and tiled images, read; texts, written."""

    model = VLM
    processor_type = VLMProcessor
    terms: ClassVar[Mapping[str, str]] = {"text": "weight of the mean cross-entropy per text target"}
    published = (NanoVLMDirectory(),)

    def inferencer(self, model: Any, processor: Any) -> PackedInferencer:
        """Its answer is the assistant's next message."""
        return PackedInferencer(model, processor)


def _config(model: VLM, processor: VLMProcessor) -> dict[str, Any]:
    """Where nanoVLM has a key that this leaves out, its own default counts."""
    if processor.tiling.transform is not None:
        raise ConfigError(
            "nanoVLM's directory has no processor.vit_transform, and this model was trained with one",
            remedy="--source DIR with a config.json of your own, or tools/zero_to_fp32.py, which writes plain weights",
        )
    tokenizer, chat = processor.tokenizer.chat.name_or_path, processor.tokenizer.chat
    is_here = Path(tokenizer).is_absolute() or Path(tokenizer).exists()  # then the tokenizer is beside the weights
    sides = range(1, MAX_TILES_PER_SIDE + 1)
    tiles = {f"r{r}c{c}": tile_token(r - 1, c - 1) for r in sides for c in sides}
    extra = len(TILE_TOKENS) + 2
    return {
        **nanovlm_sizes(model),
        "lm_base_vocab_size": model.vocab_size - extra,
        "extra_token_amount": extra,
        "lm_tokenizer": "." if is_here else tokenizer,
        "lm_chat_template": chat.chat_template,
        "mp_image_token_length": processor.tokens_per_tile,
        "max_img_size": processor.tiling.max_size,
        "resize_to_max_side_len": processor.tiling.enlarge,
        "vlm_extra_tokens": {"image_token": IMAGE_TOKEN, "global_image_token": GLOBAL_TOKEN, **tiles},
    }
