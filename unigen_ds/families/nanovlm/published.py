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
from unigen_ds.core.json_values import stored_object
from unigen_ds.data.images.tiles import GLOBAL_TOKEN, IMAGE_TOKEN, MAX_TILES_PER_SIDE, TILE_TOKENS, tile_token
from unigen_ds.families.base import PublishedFormat, published_folder, read_statement
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
_CONST = {"vit_cls_flag": False, "vit_dropout": 0.0, "lm_dropout": 0.0, "lm_attn_scaling": 1.0, "lm_use_tokens": False}
_HEAD, _EMBEDDING = "decoder.head.weight", "decoder.token_embedding.weight"
_FREQUENCIES = "decoder.rotary_embd.inv_freq"

EXTRA_TOKENS = len(TILE_TOKENS) + 2
"""Image, global image and 8 x 8 rows and columns: the tokens that nanoVLM adds to a language model's."""


class NanoVLMDirectory(PublishedFormat):
    """``config.json`` and ``model.safetensors``, and maybe a tokenizer."""

    name = "nanoVLM's directory"
    pretrained = False
    parts = (WEIGHTS,)

    def recognises(self, folder: Path) -> bool:
        return "mp_pixel_shuffle_factor" in read_statement(folder / CONFIG) and (folder / WEIGHTS).is_file()

    def config(self, folder: Path) -> dict[str, Any]:
        """Its tokenizer is the one beside it, or else the one that it names."""
        config = stored_object(folder / CONFIG)
        if lacking := [name for name in ("lm_tokenizer", "lm_chat_template", "max_img_size") if name not in config]:
            raise CheckpointError(
                f"{folder / CONFIG} lacks {', '.join(lacking)}: it is of nanoVLM's first version (nanoVLM-222M), whose"
                " models know no image token and no chat template",
                remedy="a later model (lusxvr/nanoVLM-230M-8k), or one from parts: model.pretrained=dict(vit=, llm=)",
            )
        path = str(folder) if (folder / "tokenizer_config.json").is_file() else config["lm_tokenizer"]
        return {
            "model": {"type": "VLM", **vlm_arguments(config)},
            "tokenizer": {"type": "ChatTokenizer", "path": path, "chat_template": config["lm_chat_template"]},
            "processor": {
                "max_image_size": config["max_img_size"],
                "resize_to_max_side_len": config.get("resize_to_max_side_len", False),
            },
        }

    def weights(self, folder: Path) -> Pretrained:
        """Return the tensors; where embeddings are tied, the stored one serves both names."""
        weights = read_published(str(folder))
        embedding, head = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"
        if embedding in weights.tensors:
            return weights
        tensors = {embedding if name == head else name: tensor for name, tensor in weights.tensors.items()}
        return replace(weights, tensors=tensors, tied={head: embedding})

    def sizes(self, folder: Path) -> dict[str, Any]:
        return vlm_arguments(stored_object(folder / CONFIG)) if self.recognises(folder) else {}

    def write(
        self, model: Any, processor: Any, out: Path, *, source: Path | None, dtype: torch.dtype, max_shard_size: str
    ) -> None:
        """Where nanoVLM has a key that ``config.json`` leaves out, its own default counts."""
        chat = processor.tokenizer.chat
        if source is not None:
            config = read_json(source / CONFIG)
        else:
            is_here = Path(chat.name_or_path).exists()  # then the tokenizer is beside the weights
            sides = range(1, MAX_TILES_PER_SIDE + 1)
            tiles = {f"r{r}c{c}": tile_token(r - 1, c - 1) for r in sides for c in sides}
            config = {
                **_nanovlm_sizes(model),
                "lm_base_vocab_size": model.vocab_size - EXTRA_TOKENS,
                "extra_token_amount": EXTRA_TOKENS,
                "lm_tokenizer": "." if is_here or Path(chat.name_or_path).is_absolute() else chat.name_or_path,
                "lm_chat_template": chat.chat_template,
                "mp_image_token_length": processor.tokens_per_tile,
                "max_img_size": processor.tiling.max_size,
                "resize_to_max_side_len": processor.tiling.enlarge,
                "vlm_extra_tokens": {"image_token": IMAGE_TOKEN, "global_image_token": GLOBAL_TOKEN, **tiles},
            }
        with published_folder(out, chat, source, without=(WEIGHTS,)) as folder:
            save_nanovlm(model.to(dtype), folder, config=config)


def vlm_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``VLM`` from nanoVLM's ``config.json``."""
    check_fixed(config, _CONST, "nanoVLM config")
    try:
        return {
            "llm": {ours: config[theirs] for ours, theirs in _LLM.items()},
            "vit": {ours: config[theirs] for ours, theirs in _VIT.items()},
            "pixel_shuffle_factor": config["mp_pixel_shuffle_factor"],
        }
    except KeyError as error:
        raise ConfigError(f"nanoVLM config: {error.args[0]} is missing") from error


def _nanovlm_sizes(model: Any) -> dict[str, Any]:
    """The keys of nanoVLM's ``config.json`` that ``vlm_arguments`` reads, with the sizes of a model."""
    sizes = {theirs: model.llm_config[ours] for ours, theirs in _LLM.items()}
    sizes |= {theirs: model.vit_config[ours] for ours, theirs in _VIT.items()}
    return {**sizes, **_CONST, "mp_pixel_shuffle_factor": model.connector.factor}


def read_published(pretrained: str | Mapping[str, str]) -> Pretrained:
    """``pretrained``: nanoVLM's directory, or ``dict(vit=..., llm=...)`` of a SigLIP and a Llama-type directory.

    Raises ``ConfigError`` or ``CheckpointError`` naming the file that is not as it must be.
    """
    if isinstance(pretrained, Mapping):
        return _open_parts(pretrained)
    directory, tensors = Path(pretrained), dict[str, Stored]()
    sizes = vlm_arguments(read_json(directory / CONFIG))
    for theirs, tensor in stored_tensors(directory / WEIGHTS).items():
        if theirs == _FREQUENCIES:
            continue
        name, shape = _rename(theirs, inwards=True), tensor.shape
        if ".qkv_proj." in name:
            rows = shape[0] // 3
            for at, letter in enumerate("qkv"):
                part = replace(tensor, shape=(rows, *shape[1:]), first_row=at * rows)
                tensors[name.replace("qkv_proj", f"{letter}_proj")] = part
        elif name.endswith("position_embedding.weight"):
            tensors[name] = replace(tensor, shape=shape[1:], changed=lambda table: table[0])
        else:
            tensors[name] = tensor
    return Pretrained(str(directory), sizes, tensors)


def _open_parts(paths: Mapping[str, str]) -> Pretrained:
    prefixes = {"vit": "vision_model.", "llm": "language_model."}
    if not paths or set(paths) - set(prefixes):
        raise ConfigError(f"model.pretrained is {dict(paths)}", allowed="a directory, or dict(vit=, llm=)")
    sizes: dict[str, Any] = {}
    tensors: dict[str, Stored] = {}
    if "vit" in paths:
        sizes["vit"] = stated_sizes("vit", Path(paths["vit"]) / CONFIG, _VIT)
        tensors |= vision_tensors(Path(paths["vit"]))
    if "llm" in paths:
        sizes["llm"] = stated_sizes("llm", Path(paths["llm"]) / CONFIG, _LLM)
        tensors |= {prefixes["llm"] + key: tensor for key, tensor in stored_tensors(Path(paths["llm"])).items()}
        if "vocab_size" in sizes["llm"]:
            sizes["llm"]["vocab_size"] += EXTRA_TOKENS
    pattern = "|".join(re.escape(prefixes[part]) for part in paths)
    return Pretrained(
        str(dict(paths)),
        sizes,
        tensors,
        may_lack=rf"^(?!{pattern})",
        may_leave=r"^vision_model\.head\.|^text_model\.|^logit_(scale|bias)$|inv_freq",
        may_grow=r"embed_tokens\.weight$|lm_head\.weight$",
    )


def save_nanovlm(model: Any, directory: Path, *, config: Mapping[str, Any]) -> None:
    """Write a ``VLM`` as nanoVLM would, weights unpacked. ``config``: ``config.json``, whose sizes are the model's."""
    check_fixed(config, _nanovlm_sizes(model), CONFIG)
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
