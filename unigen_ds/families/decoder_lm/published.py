"""A causal language model's directory as transformers has it, in and out: ``config.json``, safetensors, tokenizer.

In: ``config.json`` and the names and shapes of ``*.safetensors``, sharded or not; values are read later, row by row.
Out: what ``AutoModelForCausalLM.from_pretrained`` and ``AutoTokenizer.from_pretrained`` load, written by transformers
itself. Parameter names are the same on both sides, so nothing is renamed.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from unigen_ds.core.errors import ConfigError
from unigen_ds.families.decoder_lm.settings import MODEL_TYPES, DecoderSizes
from unigen_ds.models.settings import check_heads
from unigen_ds.models.weights import Pretrained, read_json, stored_tensors
from unigen_ds.system.files import copy_files, new_directory

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Whose angles depend on the position alone; of the others they depend on the longest document of the batch, too."""
_NOT_THE_MODELS = {"use_cache", "pretraining_tp", "bos_token_id", "eos_token_id", "pad_token_id"}
"""Keys of a config that no layer reads; the tokens are the tokenizer's."""
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")


def read_pretrained(directory: Path) -> Pretrained:
    """``sizes`` is the whole ``config.json``. Raises ``ConfigError``, ``CheckpointError``."""
    return Pretrained(
        str(directory),
        read_json(directory / "config.json"),
        stored_tensors(directory),
        may_leave=r"rotary_emb\.inv_freq$",
        may_grow=r"(embed_tokens|lm_head)\.weight$",
    )


def transformers_config(given: Mapping[str, Any], stored: Mapping[str, Any]) -> Any:
    """transformers' config of ``model.llm`` over that of the files.

    Raises ``ConfigError`` for a kind of model, a key or a value that cannot work.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    kind, of_files = given.get("model_type", stored.get("model_type")), stored.get("model_type")
    if kind not in MODEL_TYPES or of_files not in (None, kind):
        of_file = f", and that of pretrained {of_files!r}" if stored else ""
        raise ConfigError(f"model.llm.model_type is {kind!r}{of_file}", allowed=", ".join(MODEL_TYPES))
    config_class: Any = CONFIG_MAPPING[kind]
    try:
        config = config_class.from_dict({**stored, **DecoderSizes.argument_converted(given)})
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ConfigError(f"model.llm: {error}") from error
    _check(config)
    return config


def plain_config(config: Any) -> dict[str, Any]:
    """What ``transformers_config`` made, as values that make it again: the keys of this kind of model, set or not."""
    from transformers import PreTrainedConfig

    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    own = {field.name for field in dataclasses.fields(config)} - common - _NOT_THE_MODELS
    values = config.to_dict()
    return {"model_type": config.model_type, **{key: values[key] for key in sorted(own) if values.get(key) is not None}}


def _check(config: Any) -> None:
    check_heads("model.llm", config.hidden_size, config.num_attention_heads, config.num_key_value_heads)
    rope = config.rope_parameters["rope_type"]
    if rope not in _ROPE_TYPES:
        raise ConfigError(f"model.llm.rope_parameters.rope_type is {rope!r}", allowed=", ".join(_ROPE_TYPES))
    if getattr(config, "use_sliding_window", False):  # of a directory
        raise ConfigError("model.llm.use_sliding_window is True", allowed="False: every token sees its whole document")


def write_directory(
    model: Any,
    out: Path,
    *,
    tokenizer: Any,
    source: Path | None = None,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
) -> None:
    """Write a ``DecoderLM`` as transformers would; ``out`` appears complete or not at all.

    Args:
        out: a new folder.
        tokenizer: has the ids of begin, end and padding, and its own files where there is no ``source``.
        source: the directory that the training began with; all its files but config and weights are copied.
        dtype: of the weights.
        max_shard_size: of a file; a larger model is written as several and an index.

    Raises ``ConfigError`` where ``out`` exists, ``CheckpointError`` where it cannot be written.
    """
    causal = as_transformers(model, tokenizer=tokenizer, dtype=dtype)
    with new_directory(out) as folder:
        if source is None:
            tokenizer.save_pretrained(str(folder))
        else:
            copy_files(source, folder, wanted=lambda name: not name.endswith(_WEIGHTS))
        causal.save_pretrained(folder, max_shard_size=max_shard_size)


def as_transformers(model: Any, *, tokenizer: Any, dtype: torch.dtype = torch.float32) -> Any:
    """The same weights as transformers' own ``LlamaForCausalLM`` or ``Qwen2ForCausalLM``, to be saved."""
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
