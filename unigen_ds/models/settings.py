"""Sections that several families share. With ``pretrained`` a config has only what differs from the files, so a model
checks its sizes again as a whole, once the files are read (``Section.with_defaults``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from unigen_ds.config.section import Section
from unigen_ds.config.values import Number
from unigen_ds.core.errors import ConfigError

QuantizeScheme = Literal["nf4", "int8"]


class Sizes(Section):
    """What every transformer has."""

    rest_from: ClassVar[str | None] = "pretrained"
    path: ClassVar[str]

    hidden_size: int = Field(ge=1, description="width; a multiple of `num_attention_heads`")
    intermediate_size: int = Field(ge=1, description="inner width of the feed-forward part of a layer")
    num_hidden_layers: int = Field(ge=0, description="number of layers")
    num_attention_heads: int = Field(ge=1, description="attention heads of a layer")

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        key_heads = getattr(self, "num_key_value_heads", self.num_attention_heads)
        check_heads(self.path, self.hidden_size, self.num_attention_heads, key_heads)
        return self


class LanguageSizes(Sizes):
    """A decoder with grouped-query attention and rotary positions."""

    path: ClassVar[str] = "model.llm"

    num_key_value_heads: int = Field(ge=1, description="heads of keys and values; a divisor of `num_attention_heads`")

    @model_validator(mode="after")
    def _pairs_fit(self) -> Self:
        width, heads = self.hidden_size, self.num_attention_heads
        if width // heads % 2:
            raise ConfigError(
                f"{self.path}: hidden_size {width} over {heads} heads is {width // heads} each",
                allowed="an even number: rotary positions turn pairs",
            )
        return self


class VisionSizes(Sizes):
    """A vision tower, under SigLIP's names."""

    path: ClassVar[str] = "model.vit"

    image_size: int = Field(
        ge=1, description="side of an image in pixels; divided by `patch_size` the side of the position table"
    )
    patch_size: int = Field(ge=1, description="side of a patch in pixels")
    num_channels: int = Field(default=3, ge=1, description="channels of an image: 1 for grey")
    layer_norm_eps: Number = Field(default=1e-6, gt=0, description="epsilon of the layer norms")


class Quantize(Section):
    """Packed weights for the linear layers of frozen parts."""

    llm: QuantizeScheme | None = Field(default=None, description="the language model: `nf4`, `int8` or None")
    vit: QuantizeScheme | None = Field(default=None, description="the vision tower: `nf4`, `int8` or None")
    connector: QuantizeScheme | None = Field(default=None, description="what joins them: `nf4`, `int8` or None")


class Lora(Section):
    """Low-rank adapters on the frozen model."""

    r: int = Field(default=16, ge=1, description="rank: rows of A and columns of B")
    alpha: Number = Field(default=32, gt=0, description="the adapters' share is multiplied by `alpha / r`")
    dropout: Number = Field(default=0.0, ge=0, lt=1, description="on what the adapters read")
    target_modules: str | Sequence[str] = Field(
        description="regular expression, or a list of them, searched in the names of linear layers:"
        " `r'language_model.*(q|v)_proj'`; the output head stays as it is. What matches nothing is an error that lists"
        " the names"
    )
    use_dora: bool = Field(default=False, description="DoRA: the length of each row of a weight is learned, too")
    use_rslora: bool = Field(default=False, description="`alpha / sqrt(r)` instead of `alpha / r`")
    quantize: QuantizeScheme | None = Field(
        default=None,
        description="QLoRA: `nf4` or `int8` packs every linear layer of the base, except the output head; None: those"
        " that `model.quantize` names",
    )

    @property
    def patterns(self) -> tuple[str, ...]:
        """``target_modules`` as expressions that compile."""
        return (self.target_modules,) if isinstance(self.target_modules, str) else tuple(self.target_modules)

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        try:
            for pattern in self.patterns:
                re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"lora.target_modules: {error.pattern!r} is no regular expression: {error}") from error
        if not self.patterns:
            raise ConfigError("lora.target_modules is empty", remedy="lora=None trains without adapters")
        return self


def check_heads(where: str, width: int, heads: int, kv_heads: int) -> None:
    """Raise ``ConfigError`` where they do not fit."""
    if width % heads or heads % kv_heads:
        raise ConfigError(
            f"{where}: hidden_size {width}, num_attention_heads {heads}, num_key_value_heads {kv_heads}",
            allowed="hidden_size a multiple of the heads, the heads a multiple of the key/value heads",
        )
