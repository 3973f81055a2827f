"""``model.llm`` and ``model.vit`` of a ``VLM``: by default those of nanoVLM's own trio."""

from __future__ import annotations

from pydantic import Field

from unigen_ds.core.values import Number
from unigen_ds.models.settings import LanguageSizes, VisionSizes


class LlamaSizes(LanguageSizes):
    """Under Llama's names; what is left out is SmolLM2-360M's."""

    hidden_size: int = Field(default=960, ge=1, description="width; a multiple of `num_attention_heads`")
    intermediate_size: int = Field(default=2560, ge=1, description="inner width of the feed-forward part of a layer")
    num_hidden_layers: int = Field(default=32, ge=0, description="number of layers")
    num_attention_heads: int = Field(default=15, ge=1, description="attention heads of a layer")
    num_key_value_heads: int = Field(
        default=5, ge=1, description="heads of keys and values; a divisor of `num_attention_heads`"
    )
    vocab_size: int | None = Field(
        default=None,
        ge=1,
        description="rows of the embedding; None: the tokenizer's where `model.llm` is given, which is also the least,"
        " else 49218",
    )
    rms_norm_eps: Number = Field(default=1e-5, gt=0, description="epsilon of the norms")
    rope_theta: Number = Field(default=100_000.0, gt=0, description="base of the rotary positions")
    max_position_embeddings: int = Field(
        default=8192, ge=1, description="number of positions; those of a longer document are squeezed into it"
    )
    tie_word_embeddings: bool = Field(default=True, description="one table for the embedding and the output head")


class SiglipSizes(VisionSizes):
    """Under SigLIP's names; what is left out is SigLIP2-base-patch16-512's."""

    hidden_size: int = Field(default=768, ge=1, description="width; a multiple of `num_attention_heads`")
    intermediate_size: int = Field(default=3072, ge=1, description="inner width of the feed-forward part of a layer")
    num_hidden_layers: int = Field(default=12, ge=0, description="number of layers")
    num_attention_heads: int = Field(default=12, ge=1, description="attention heads of a layer")
    image_size: int = Field(
        default=512,
        ge=1,
        description="side of a tile in pixels: an image is split into tiles; a multiple of"
        " `patch_size * pixel_shuffle_factor`",
    )
    patch_size: int = Field(default=16, ge=1, description="side of a patch in pixels")
