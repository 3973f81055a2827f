"""A trained model -> the published directory of its kind: BAGEL's of a ``UnifiedModel``, nanoVLM's of a ``VLM``,
transformers' of a ``DecoderLM``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unigen_ds.core.errors import ConfigError
from unigen_ds.core.files import copy_files, new_directory
from unigen_ds.data.processor import UnifiedProcessor
from unigen_ds.data.tiles import GLOBAL_TOKEN, IMAGE_TOKEN, MAX_TILES_PER_SIDE, TILE_TOKENS, tile_token
from unigen_ds.families.bagel.model import UnifiedModel
from unigen_ds.families.bagel.published import write_published
from unigen_ds.families.decoder_lm.model import DecoderLM
from unigen_ds.families.decoder_lm.published import write_directory
from unigen_ds.families.nanovlm.model import VLM
from unigen_ds.families.nanovlm.processor import VLMProcessor
from unigen_ds.families.nanovlm.published import nanovlm_sizes, save_nanovlm


def publish(
    model: nn.Module,
    processor: UnifiedProcessor,
    out: Path,
    *,
    source: Path | None,
    dtype: torch.dtype,
    max_shard_size: str = "5GB",
) -> None:
    """Write ``model`` into the new folder ``out``: complete, or not at all.

    Args:
        source: a published directory of the same sizes; its other files are copied byte for byte.
        dtype: of the weights.
        max_shard_size: of a file of a ``DecoderLM``; a larger one is written as several.

    Raises ``ConfigError`` where ``out`` exists, ``source`` does not fit or the model has no published form, and
    ``CheckpointError`` where ``out`` cannot be written.
    """
    if isinstance(model, VLM) and isinstance(processor, VLMProcessor):
        _publish_vlm(model.to(dtype), processor, out, source=source)
    elif isinstance(model, UnifiedModel):
        write_published(model, out, processor=processor, source=source, dtype=dtype)
    elif isinstance(model, DecoderLM):
        write_directory(
            model, out, tokenizer=processor.tokenizer, source=source, dtype=dtype, max_shard_size=max_shard_size
        )
    else:
        raise ConfigError(
            f"{type(model).__name__} has no published form",
            allowed="UnifiedModel, VLM, DecoderLM",
            remedy="tools/zero_to_fp32.py writes plain weights of any model",
        )


def _publish_vlm(model: VLM, processor: VLMProcessor, out: Path, *, source: Path | None) -> None:
    if source is None:
        config = _nanovlm_config(model, processor)
    else:
        try:
            config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--source {source}: config.json cannot be read: {error}") from error
    with new_directory(out) as folder:
        if source is None:
            processor.tokenizer.chat.save_pretrained(folder)
        else:
            copy_files(source, folder, wanted=lambda name: name != "model.safetensors")
        save_nanovlm(model, folder, config=config)


def _tokenizer_name(name: str) -> str:
    """A hub's name as it is; of a folder of this machine ``.``: the tokenizer is beside the weights."""
    return "." if Path(name).is_absolute() or Path(name).exists() else name


def _nanovlm_config(model: VLM, processor: VLMProcessor) -> dict[str, Any]:
    """Where nanoVLM has a key that this leaves out, its own default counts."""
    places = range(1, MAX_TILES_PER_SIDE + 1)
    tiles = {f"r{r}c{c}": tile_token(r - 1, c - 1) for r in places for c in places}
    extra = len(TILE_TOKENS) + 2
    return {
        **nanovlm_sizes(model),
        "lm_base_vocab_size": model.vocab_size - extra,
        "extra_token_amount": extra,
        "lm_tokenizer": _tokenizer_name(processor.tokenizer.chat.name_or_path),
        "lm_chat_template": processor.tokenizer.chat.chat_template,
        "mp_image_token_length": processor.tokens_per_tile,
        "max_img_size": processor.tiling.max_size,
        "resize_to_max_side_len": processor.tiling.enlarge,
        "vlm_extra_tokens": {"image_token": IMAGE_TOKEN, "global_image_token": GLOBAL_TOKEN, **tiles},
    }
