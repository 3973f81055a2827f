"""A causal language model's directory as transformers has it, in and out: ``config.json``, safetensors, tokenizer.

In: ``model.llm`` (keys of transformers' own configs), and ``config.json`` and the names and shapes of
``*.safetensors``, sharded or not; values are read later, row by row. Out: what ``AutoModelForCausalLM.from_pretrained``
and ``AutoTokenizer.from_pretrained`` load, written by transformers itself. Parameter names are the same on both sides.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from pydantic import ConfigDict, Field
from typing_extensions import Self

from unigen_ds.config.section import Section, without_own
from unigen_ds.config.values import Number
from unigen_ds.core.errors import ConfigError, UnknownKey
from unigen_ds.models.settings import check_heads
from unigen_ds.models.weights import Pretrained, read_json, stored_tensors

ModelType = Literal["llama", "qwen2"]
MODEL_TYPES: tuple[str, ...] = get_args(ModelType)
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary angles that depend on the position alone, not on the longest document of the batch."""
_NOT_THE_MODELS = {"use_cache", "pretraining_tp", "bos_token_id", "eos_token_id", "pad_token_id"}
"""Keys of a config that no layer reads; the tokens are the tokenizer's."""


def _number(description: str, *, least: int = 1) -> Any:
    return Field(default=None, ge=least, description=description)


class DecoderSizes(Section):
    """The keys that make a size; the others of that kind's config in transformers are accepted as well."""

    model_config = ConfigDict(extra="allow")
    rest_from: ClassVar[str | None] = "pretrained"

    model_type: ModelType = Field(description="`llama` or `qwen2`")
    vocab_size: int | None = _number(
        "rows of the embedding, at least the tokenizer's; None: those, where nothing is `pretrained`"
    )
    hidden_size: int | None = _number("width; a multiple of `num_attention_heads`")
    intermediate_size: int | None = _number("inner width of the feed-forward part of a layer")
    num_hidden_layers: int | None = _number("number of layers", least=0)
    num_attention_heads: int | None = _number("attention heads of a layer")
    num_key_value_heads: int | None = _number("heads of keys and values; a divisor of `num_attention_heads`")
    head_dim: int | None = _number("width of a head; of `llama` alone")
    max_position_embeddings: int | None = _number(
        "tokens of a document at most; a start with longer ones in the data is refused"
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
    initializer_range: Number | None = _number("standard deviation of the initial weights", least=0)
    use_sliding_window: Literal[False] | None = Field(
        default=None, description="of `qwen2`; not True: every token sees its whole document"
    )

    @classmethod
    def checked(cls, given: Any, *, where: str = "", missing: bool = True) -> tuple[Self | None, list[ConfigError]]:
        """Also an error for each key that the kind's config does not have; transformers is imported only for those."""
        section, errors = super().checked(given, where=where, missing=missing)
        unusual = [key for key in given or () if key not in _OF_EVERY_KIND] if isinstance(given, Mapping | None) else []
        if unusual:
            kind = (given or {}).get("model_type")
            known = frozenset[str]().union(*map(_keys, [kind] if kind in MODEL_TYPES else MODEL_TYPES))
            errors += [UnknownKey(key, section=where, valid=known) for key in unusual if key not in known]
        return (None if errors else section), errors


_OF_EVERY_KIND = DecoderSizes.model_fields.keys() - {"head_dim", "use_sliding_window"}


@cache
def _keys(model_type: str) -> frozenset[str]:
    """The keys of a kind's config in transformers."""
    from transformers import CONFIG_MAPPING

    config_class: Any = CONFIG_MAPPING[model_type]
    return frozenset({"model_type", *(field.name for field in dataclasses.fields(config_class))})


def read_pretrained(directory: Path) -> Pretrained:
    """``sizes`` is the whole ``config.json``. Raises ``ConfigError``, ``CheckpointError``."""
    return Pretrained(
        str(directory),
        read_json(directory / "config.json"),
        stored_tensors(directory),
        may_leave=r"rotary_emb\.inv_freq$",
        may_grow=r"(embed_tokens|lm_head)\.weight$",
    )


def transformers_config(llm: Mapping[str, Any], stored: Mapping[str, Any]) -> Any:
    """transformers' config of ``model.llm`` over that of the files.

    Raises ``ConfigError`` for a kind of model, a key or a value that cannot work.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    kind, of_files = llm.get("model_type", stored.get("model_type")), stored.get("model_type")
    if kind not in MODEL_TYPES or of_files not in (None, kind):
        of_file = f", and that of pretrained {of_files!r}" if stored else ""
        raise ConfigError(f"model.llm.model_type is {kind!r}{of_file}", allowed=", ".join(MODEL_TYPES))
    config_class: Any = CONFIG_MAPPING[kind]
    try:
        config = config_class.from_dict({**stored, **without_own(llm)})
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ConfigError(f"model.llm: {error}") from error
    check_heads("model.llm", config.hidden_size, config.num_attention_heads, config.num_key_value_heads)
    rope = config.rope_parameters["rope_type"]
    if rope not in _ROPE_TYPES:
        raise ConfigError(f"model.llm.rope_parameters.rope_type is {rope!r}", allowed=", ".join(_ROPE_TYPES))
    if getattr(config, "use_sliding_window", False):  # of a directory
        raise ConfigError("model.llm.use_sliding_window is True", allowed="False: every token sees its whole document")
    return config


def plain_config(config: Any) -> dict[str, Any]:
    """Return plain values from which ``transformers_config`` makes the same config again."""
    from transformers import PreTrainedConfig

    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    own = {field.name for field in dataclasses.fields(config)} - common - _NOT_THE_MODELS
    values = config.to_dict()
    return {"model_type": config.model_type, **{key: values[key] for key in sorted(own) if values.get(key) is not None}}


def as_transformers(model: Any, *, tokenizer: Any, dtype: torch.dtype) -> Any:
    """The weights of a ``DecoderLM`` as transformers' own ``LlamaForCausalLM`` or ``Qwen2ForCausalLM``, to be saved."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(model.llm_config)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_id, tokenizer.eos_id
    state = {name: tensor.detach().cpu().to(dtype) for name, tensor in model.state_dict().items()}
    with torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
        )
    causal.load_state_dict(state, assign=True)
    causal.tie_weights()
    causal.generation_config.pad_token_id = tokenizer.pad_id  # not of config: there it would freeze an embedding
    return causal
