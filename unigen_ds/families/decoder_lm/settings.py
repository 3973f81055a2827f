"""``model.llm`` of a ``DecoderLM``: keys of transformers' own configs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Literal, get_args

from pydantic import ConfigDict, Field
from typing_extensions import Self

from unigen_ds.config.section import Section
from unigen_ds.config.values import Number
from unigen_ds.core.errors import ConfigError, UnknownKey

ModelType = Literal["llama", "qwen2"]
MODEL_TYPES: tuple[str, ...] = get_args(ModelType)


class DecoderSizes(Section):
    """The keys that make a size; the others of that kind's config in transformers are accepted as well."""

    model_config = ConfigDict(extra="allow")
    rest_from: ClassVar[str | None] = "pretrained"

    model_type: ModelType = Field(description="`llama` or `qwen2`")
    vocab_size: int | None = Field(
        default=None,
        ge=1,
        description="rows of the embedding, at least the tokenizer's; None: those, where nothing is `pretrained`",
    )
    hidden_size: int | None = Field(default=None, ge=1, description="width; a multiple of `num_attention_heads`")
    intermediate_size: int | None = Field(
        default=None, ge=1, description="inner width of the feed-forward part of a layer"
    )
    num_hidden_layers: int | None = Field(default=None, ge=0, description="number of layers")
    num_attention_heads: int | None = Field(default=None, ge=1, description="attention heads of a layer")
    num_key_value_heads: int | None = Field(
        default=None, ge=1, description="heads of keys and values; a divisor of `num_attention_heads`"
    )
    head_dim: int | None = Field(default=None, ge=1, description="width of a head; of `llama` alone")
    max_position_embeddings: int | None = Field(
        default=None,
        ge=1,
        description="tokens of a document at most; a start with longer ones in the data is refused",
    )
    tie_word_embeddings: bool | None = Field(
        default=None, description="one table for the embedding and the output head"
    )
    rms_norm_eps: Number | None = Field(default=None, gt=0, description="epsilon of the norms")
    rope_parameters: Mapping[str, Any] | None = Field(
        default=None,
        description="rotary positions: `dict(rope_type=, rope_theta=, ...)`; `rope_type` is `default`, `linear`,"
        " `llama3` or `yarn`",
    )
    attention_dropout: Number | None = Field(default=None, ge=0, lt=1, description="dropout on the attention scores")
    initializer_range: Number | None = Field(
        default=None, ge=0, description="standard deviation of the initial weights"
    )
    use_sliding_window: Literal[False] | None = Field(
        default=None, description="of `qwen2`; not True: every token sees its whole document"
    )

    @classmethod
    def checked(
        cls, given: Any, *, where: str = "", whole: bool = True, missing: bool = True
    ) -> tuple[Self | None, list[ConfigError]]:
        """Also an error for each key that the kind's config does not have; transformers is imported only for those."""
        found, errors = super().checked(given, where=where, whole=whole, missing=missing)
        unusual = [key for key in given or () if key not in _OF_EVERY_KIND] if isinstance(given, Mapping | None) else []
        if unusual and whole:
            kind = (given or {}).get("model_type")
            known = frozenset[str]().union(*map(transformers_keys, [kind] if kind in MODEL_TYPES else MODEL_TYPES))
            errors += [UnknownKey(key, section=where, valid=known) for key in unusual if key not in known]
        return (None if errors else found), errors


_OF_EVERY_KIND = DecoderSizes.model_fields.keys() - {"head_dim", "use_sliding_window"}


@cache
def transformers_keys(model_type: str) -> frozenset[str]:
    """The keys of a kind's config in transformers."""
    from transformers import CONFIG_MAPPING

    config_class: Any = CONFIG_MAPPING[model_type]
    return frozenset({"model_type", *(field.name for field in dataclasses.fields(config_class))})
