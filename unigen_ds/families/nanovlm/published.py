"""Published weights of a ``VLM``: nanoVLM's directory in and out, or its parts (a vision tower, a language model) in.

What differs in nanoVLM's from ours: names; query, key and value are one tensor; the patch embedding is a
convolution; the table of positions has a leading 1; the rotary frequencies are stored; of tied embeddings only
``decoder.head.weight`` is, and the file's metadata states this. Reading and writing again results in the same bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.models.quantized import plain_state_dict
from unigen_ds.models.weights import (
    Pretrained,
    Stored,
    check_fixed,
    read_json,
    stated_sizes,
    stored_tensors,
    vision_tensors,
)
from unigen_ds.system.files import write_atomic, write_text_atomic
from unigen_ds.system.outputs import save_safetensors

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_PREFIXES = (
    ("vision_encoder.patch_embedding.conv.", "vision_model.embeddings.patch_embedding."),
    ("vision_encoder.patch_embedding.position_embedding", "vision_model.embeddings.position_embedding.weight"),
    ("vision_encoder.layer_norm.", "vision_model.post_layernorm."),
    ("vision_encoder.blocks.", "vision_model.encoder.layers."),
    ("decoder.token_embedding.", "language_model.model.embed_tokens."),
    ("decoder.head.", "language_model.lm_head."),
    ("decoder.norm.", "language_model.model.norm."),
    ("decoder.blocks.", "language_model.model.layers."),
    ("MP.", "connector."),
)
_INSIDE = {
    "vision_encoder.blocks.": ((".ln1.", ".layer_norm1."), (".ln2.", ".layer_norm2."), (".attn.", ".self_attn.")),
    "decoder.blocks.": (
        (".attn.out_proj.", ".self_attn.o_proj."),
        (".attn.", ".self_attn."),
        (".norm1.", ".input_layernorm."),
        (".norm2.", ".post_attention_layernorm."),
    ),
}
_LLM = {
    "vocab_size": "lm_vocab_size", "hidden_size": "lm_hidden_dim", "intermediate_size": "lm_inter_dim",
    "num_hidden_layers": "lm_n_blocks", "num_attention_heads": "lm_n_heads", "num_key_value_heads": "lm_n_kv_heads",
    "rms_norm_eps": "lm_rms_eps", "rope_theta": "lm_re_base",
    "max_position_embeddings": "lm_max_position_embeddings", "tie_word_embeddings": "lm_tie_weights",
}  # fmt: skip
_VIT = {
    "hidden_size": "vit_hidden_dim", "intermediate_size": "vit_inter_dim", "num_hidden_layers": "vit_n_blocks",
    "num_attention_heads": "vit_n_heads", "image_size": "vit_img_size", "patch_size": "vit_patch_size",
    "layer_norm_eps": "vit_ln_eps",
}  # fmt: skip
_FIXED = {"vit_cls_flag": False, "vit_dropout": 0.0, "lm_dropout": 0.0, "lm_attn_scaling": 1.0, "lm_use_tokens": False}
_HEAD, _EMBEDDING = "decoder.head.weight", "decoder.token_embedding.weight"
_FREQUENCIES = "decoder.rotary_embd.inv_freq"

EXTRA_TOKENS = 66
"""Image, global image and 8 x 8 rows and columns: the tokens that nanoVLM adds to a language model's."""


def vlm_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``VLM`` from nanoVLM's ``config.json``."""
    check_fixed(config, _FIXED, "nanoVLM config")
    try:
        return {
            "llm": {ours: config[theirs] for ours, theirs in _LLM.items()},
            "vit": {ours: config[theirs] for ours, theirs in _VIT.items()},
            "pixel_shuffle_factor": config["mp_pixel_shuffle_factor"],
        }
    except KeyError as error:
        raise ConfigError(f"nanoVLM config: {error.args[0]} is missing") from error


def nanovlm_sizes(model: Any) -> dict[str, Any]:
    """Return the keys of nanoVLM's ``config.json`` that ``vlm_arguments`` reads, with the sizes of a model."""
    sizes = {theirs: model.llm_config[ours] for ours, theirs in _LLM.items()}
    sizes |= {theirs: model.vit_config[ours] for ours, theirs in _VIT.items()}
    return {**sizes, **_FIXED, "mp_pixel_shuffle_factor": model.connector.factor}


def read_pretrained(pretrained: str | Mapping[str, str]) -> Pretrained:
    """``pretrained``: nanoVLM's directory, or ``dict(vit=..., llm=...)`` of a SigLIP and a Llama-type directory.

    Raises ``ConfigError`` or ``CheckpointError`` naming the file that is not as it must be.
    """
    if isinstance(pretrained, Mapping):
        return _open_parts(pretrained)
    directory = Path(pretrained)
    sizes = vlm_arguments(read_json(directory / CONFIG))
    return Pretrained(str(directory), sizes, stored_nanovlm(directory / WEIGHTS))


def stored_weights(directory: Path) -> Pretrained:
    """``read_pretrained`` of nanoVLM's directory; of tied embeddings the one stored serves both names."""
    weights = read_pretrained(str(directory))
    embedding, head = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"
    if embedding in weights.tensors:
        return weights
    tensors = {embedding if name == head else name: stored for name, stored in weights.tensors.items()}
    return replace(weights, tensors=tensors, tied={head: embedding})


def stored_nanovlm(path: Path) -> dict[str, Stored]:
    """The tensors of nanoVLM's ``model.safetensors`` by our names."""
    tensors: dict[str, Stored] = {}
    for theirs, stored in stored_tensors(path).items():
        if theirs == _FREQUENCIES:
            continue
        name, shape = _rename(theirs, inwards=True), stored.shape
        if ".qkv_proj." in name:
            rows = shape[0] // 3
            for at, letter in enumerate("qkv"):
                part = replace(stored, shape=(rows, *shape[1:]), first_row=at * rows)
                tensors[name.replace("qkv_proj", f"{letter}_proj")] = part
        elif name.endswith("position_embedding.weight"):
            tensors[name] = replace(stored, shape=shape[1:], changed=lambda table: table[0])
        else:
            tensors[name] = stored
    return tensors


def _open_parts(paths: Mapping[str, str]) -> Pretrained:
    prefixes = {"vit": "vision_model.", "llm": "language_model."}
    if not paths or set(paths) - set(prefixes):
        raise ConfigError(f"model.pretrained is {dict(paths)}", allowed="a directory, or dict(vit=, llm=)")
    sizes: dict[str, Any] = {}
    tensors: dict[str, Stored] = {}
    for part, path in paths.items():
        sizes[part] = stated_sizes(part, Path(path) / CONFIG, _VIT if part == "vit" else _LLM)
        if part == "vit":
            tensors |= vision_tensors(Path(path))
        else:
            tensors |= {prefixes[part] + key: stored for key, stored in stored_tensors(Path(path)).items()}
    if "vocab_size" in sizes.get("llm", {}):
        sizes["llm"]["vocab_size"] += EXTRA_TOKENS
    begun = "|".join(re.escape(prefixes[part]) for part in paths)
    return Pretrained(
        str(dict(paths)),
        sizes,
        tensors,
        may_lack=rf"^(?!{begun})",
        may_leave=r"^vision_model\.head\.|^text_model\.|^logit_(scale|bias)$|inv_freq",
        may_grow=r"embed_tokens\.weight$|lm_head\.weight$",
    )


def save_nanovlm(model: Any, directory: Path, *, config: Mapping[str, Any]) -> None:
    """Write a ``VLM`` as nanoVLM would; quantised weights are unpacked.

    ``config``: its ``config.json``, whose sizes must be the model's.
    """
    for key, value in nanovlm_sizes(model).items():
        if config.get(key, value) != value:
            raise ConfigError(f"{key} of config.json is {config[key]}", allowed=f"{value}, the model's")
    tensors = to_nanovlm(plain_state_dict(model), patch_size=model.vit_config["patch_size"])
    backbone = model.language_model.model
    index = torch.arange(0, backbone.head_width, 2, dtype=torch.float32)
    tensors[_FREQUENCIES] = 1.0 / (backbone.theta ** (index / backbone.head_width))
    metadata = {}
    if model.llm_config["tie_word_embeddings"]:
        del tensors[_EMBEDDING]
        metadata[_EMBEDDING] = _HEAD
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    write_atomic(directory / WEIGHTS, lambda path: save_safetensors(path, tensors, metadata))
    write_text_atomic(directory / CONFIG, json.dumps(config, indent=4))


def to_nanovlm(state: Mapping[str, Tensor], *, patch_size: int) -> dict[str, Tensor]:
    """Their names and shapes, of weights or of gradients."""
    tensors: dict[str, Tensor] = {}
    for ours, tensor in state.items():
        name = _rename(ours, inwards=False)
        vision = name.startswith("vision_encoder.")
        if vision and ".attn.q_proj." in name:
            parts = [state[ours.replace("q_proj", f"{letter}_proj")] for letter in "qkv"]
            tensors[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif vision and (".attn.k_proj." in name or ".attn.v_proj." in name):
            continue
        elif name.endswith("patch_embedding.conv.weight"):
            tensors[name] = tensor.unflatten(1, (patch_size, patch_size, -1)).permute(0, 3, 1, 2)
        elif name.endswith("patch_embedding.position_embedding"):
            tensors[name] = tensor[None]
        else:
            tensors[name] = tensor
    return tensors


def _rename(name: str, *, inwards: bool) -> str:
    """Their name -> ours (``inwards``) or back."""
    way = 1 if inwards else -1
    for pair in _PREFIXES:
        old, new = pair[::way]
        if name.startswith(old):
            rest = name.removeprefix(old)
            for inner in _INSIDE.get(pair[0], ()):
                old_part, new_part = inner[::way]
                rest = rest.replace(old_part, new_part)
            return new + rest
    raise CheckpointError(f"{name!r} is no name of {'nanoVLM' if inwards else 'VLM'}")
