"""Published weights -> sizes and tensors of a ``UnifiedModel``; a ``UnifiedModel`` -> the published directory.

In: BAGEL's directory (``llm_config.json, vit_config.json, ema.safetensors, ae.safetensors``), or a Qwen2 directory, a
SigLIP directory and an ``ae.safetensors`` to start from. Every size is read from the files. A name that is missing,
unexpected or reshaped is an error or, where it must be so (a language model has no gen expert), is logged.

Source: ByteDance-Seed/Bagel (Deng et al., 2025).
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.core.files import fsync_path
from unigen_ds.core.log import logger
from unigen_ds.models.quantized import plain_state_dict

LLM_CONFIG, VIT_CONFIG, WEIGHTS, VAE_WEIGHTS = FILES = (
    "llm_config.json", "vit_config.json", "ema.safetensors", "ae.safetensors"
)  # fmt: skip
_PREFIX = {"llm": "language_model.", "vit": "vit_model.", "vae": "vae."}
_LLM_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "rms_norm_eps", "rope_theta",
)  # fmt: skip
_VIT_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size",
    "num_channels", "layer_norm_eps",
)  # fmt: skip
_VIT_UNUSED_LAYERS = 1  # BAGEL reads the last layer but one; a vit_config.json counts the layer that is not there
_DEFAULTS = {"latent_patch_size": 2, "max_latent_size": 64}
_SHOWN = 8


@dataclass(frozen=True)
class Stored:
    """One tensor in a file."""

    file: Any
    key: str

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.file.get_slice(self.key).get_shape())
        return (shape[0], math.prod(shape[1:])) if self._is_patch_convolution(shape) else shape

    def read(self) -> Tensor:
        """The tensor; a convolution over patches becomes the linear map of (row, column, channel) vectors."""
        tensor: Tensor = self.file.get_tensor(self.key)
        return tensor.permute(0, 2, 3, 1).flatten(1) if self._is_patch_convolution(tensor.shape) else tensor

    def _is_patch_convolution(self, shape: tuple[int, ...]) -> bool:
        return self.key.endswith("patch_embedding.weight") and len(shape) == 4


@dataclass(frozen=True)
class Pretrained:
    """What the files of ``model.pretrained`` hold."""

    where: str
    sizes: Mapping[str, Any]
    """``llm``, ``vit``, ``vae``, ``latent_patch_size``, ``max_latent_size``, as far as the files tell."""
    tensors: Mapping[str, Stored]
    """By the model's names."""
    may_lack: str
    """Pattern of names that keep their initial values where the files do not have them."""
    may_leave: str
    """Pattern of names in the files that are not used."""


def open_pretrained(given: str | Mapping[str, str]) -> Pretrained:
    """``given``: a published directory, or ``dict(llm=..., vit=..., vae=...)`` of some of the three.

    Raises ``ConfigError`` or ``CheckpointError`` naming the file that is not as it must be.
    """
    if isinstance(given, Mapping):
        return _open_parts(given)
    directory = Path(given)
    weights, vae = _index([directory / WEIGHTS], ""), _index([directory / VAE_WEIGHTS], _PREFIX["vae"])
    sizes: dict[str, Any] = {
        "llm": _llm_sizes(_read_json(directory / LLM_CONFIG)),
        "vit": _vit_sizes(_read_json(directory / VIT_CONFIG)),
        "vae": _vae_sizes(vae, directory / VAE_WEIGHTS),
    }
    if "vae2llm.weight" in weights:
        sizes["latent_patch_size"] = math.isqrt(weights["vae2llm.weight"].shape[1] // sizes["vae"]["latent_channels"])
    if "latent_pos_embed.pos_embed" in weights:
        sizes["max_latent_size"] = math.isqrt(weights["latent_pos_embed.pos_embed"].shape[0])
    return Pretrained(str(directory), sizes, {**weights, **vae}, r"pos_embed$", r"$^")


def _open_parts(given: Mapping[str, str]) -> Pretrained:
    if not given or set(given) - set(_PREFIX):
        raise ConfigError(f"model.pretrained is {dict(given)}", allowed="a directory, or dict(llm=, vit=, vae=)")
    sizes: dict[str, Any] = {}
    tensors: dict[str, Stored] = {}
    for part, path in given.items():
        place = Path(path)
        if part == "vae":
            file = place / VAE_WEIGHTS if place.is_dir() else place
            found = _index([file], _PREFIX[part])
            sizes[part] = _vae_sizes(found, file)
        else:
            config = _read_json(place / "config.json")
            found = _index(sorted(place.glob("*.safetensors")) or [place / "model.safetensors"], _PREFIX[part])
            sizes[part] = _llm_sizes(config) if part == "llm" else _vit_sizes(config.get("vision_config", config))
            embedding = found.get(_PREFIX["llm"] + "model.embed_tokens.weight")
            if part == "llm" and embedding is not None:  # a tied head is not stored
                found.setdefault(_PREFIX["llm"] + "lm_head.weight", embedding)
        tensors |= found
    begun = "|".join(re.escape(_PREFIX[part]) for part in given)
    may_lack = rf"^(?!{begun})|_moe_gen|\.[qk]_norm\."
    return Pretrained(
        str(dict(given)), sizes, tensors, may_lack, r"^vit_model\.(?!vision_model\.(embed|post))|inv_freq"
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"model.pretrained: {path} cannot be read: {error}") from error


def _index(paths: list[Path], prefix: str) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for path in paths:
        try:
            file = safe_open(path, framework="pt")
            found |= {prefix + key: Stored(file, key) for key in file.keys()}  # noqa: SIM118 - not a dict
        except Exception as error:  # the reader has its own exception types
            raise CheckpointError(f"model.pretrained: {path} cannot be read: {error}") from error
    return found


def _llm_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    flat = {**(config.get("rope_parameters") or {}), **config}
    return {key: flat[key] for key in _LLM_KEYS if key in flat}


def _vit_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {key: config[key] for key in _VIT_KEYS if key in config}
    if "num_hidden_layers" in sizes:
        sizes["num_hidden_layers"] -= _VIT_UNUSED_LAYERS
    return sizes


def _vae_sizes(tensors: Mapping[str, Stored], path: Path) -> dict[str, Any]:
    """The published directory has no config of the autoencoder, but the shapes tell all but scale and shift."""
    levels = {int(m[1]) for name in tensors if (m := re.match(r"vae\.encoder\.down\.(\d+)\.", name))}
    blocks = {m[1] for name in tensors if (m := re.match(r"vae\.encoder\.down\.0\.block\.(\d+)\.", name))}
    try:
        base, channels = tensors["vae.encoder.conv_in.weight"].shape[:2]
        widths = [tensors[f"vae.encoder.down.{i}.block.0.conv1.weight"].shape[0] for i in sorted(levels)]
        latent = tensors["vae.encoder.conv_out.weight"].shape[0] // 2
    except KeyError as error:
        raise CheckpointError(f"{path} is no FLUX autoencoder: it has no {error}") from error
    return {
        "type": "FluxAutoencoder",
        "base_channels": base,
        "channel_multipliers": [width // base for width in widths],
        "num_blocks": len(blocks),
        "latent_channels": latent,
        "channels": channels,
    }


def model_sizes(source: Pretrained | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """``llm``, ``vit``, ``vae``, ``latent_patch_size`` and ``max_latent_size``: as given, else as in the files."""
    found = source.sizes if source else {}
    sizes: dict[str, Any] = {}
    for part in _PREFIX:
        own, read = given.get(part) or {}, found.get(part, {})
        same_kind = own.get("type", read.get("type")) == read.get("type")
        sizes[part] = {**(read if same_kind else {}), **own}
        if not sizes[part]:
            raise ConfigError(f"model.{part} is not given", remedy=f"give its sizes, or pretrained=dict({part}='...')")
    for key, default in _DEFAULTS.items():
        own = given.get(key)
        sizes[key] = found.get(key, default) if own is None else own
    return sizes


@torch.no_grad()
def load_pretrained(model: nn.Module, source: Pretrained, *, copy_init_moe: bool) -> None:
    """Copy every tensor. Raises ``CheckpointError`` with all names that are missing, unexpected or reshaped.

    ``copy_init_moe``: a gen expert that the files lack starts as a copy of its und expert.
    """
    own, stored = model.state_dict(), source.tensors
    missing = [name for name in own if name not in stored]
    unexpected = [name for name in stored if name not in own]
    wrong = {
        "missing": [name for name in missing if not re.search(source.may_lack, name)],
        "unexpected": [name for name in unexpected if not re.search(source.may_leave, name)],
        "reshaped": [
            f"{name} {stored[name].shape} for {tuple(own[name].shape)}"
            for name in own
            if name in stored and stored[name].shape != tuple(own[name].shape)
        ],
    }
    if any(wrong.values()):
        told = "; ".join(f"{kind}: {_named(names)}" for kind, names in wrong.items() if names)
        raise CheckpointError(f"{source.where} does not fit the model: {told}")
    for name, tensor in own.items():
        if name in stored and not tensor.is_meta:  # a model without memory is only asked for its names and shapes
            tensor.copy_(stored[name].read())
    copied = [name for name in missing if copy_init_moe and "_moe_gen" in name]
    for name in copied:
        own[name].copy_(own[name.replace("_moe_gen", "")])
    fresh = [name for name in missing if name not in copied]
    for what, names in (("not used", unexpected), ("copied from und", copied), ("initialised", fresh)):
        if names:
            logger().info(f"pretrained {source.where}: {what}: {_named(names)}")


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def write_published(model: Any, out: Path, *, source: Path | None = None, dtype: torch.dtype | None = None) -> None:
    """Write ``model`` as a published directory; it appears complete or not at all. Quantised weights are unpacked.

    Args:
        out: a new folder.
        source: a published directory whose other files (configs, tokenizer) are copied byte for byte.
        dtype: of the weights; None: the model's.

    Raises ``ConfigError`` where ``out`` exists or ``source`` is of another size, ``CheckpointError`` on a full disk.
    """
    if out.exists():
        raise ConfigError(f"{out} exists", allowed="a new folder")
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in plain_state_dict(model).items()}
    if dtype is not None:
        state = {name: t.to(dtype) if t.is_floating_point() else t for name, t in state.items()}
    vae = {name.removeprefix(_PREFIX["vae"]): t for name, t in state.items() if name.startswith(_PREFIX["vae"])}
    if not vae:
        raise ConfigError("this model's autoencoder has no weights", allowed="FluxAutoencoder, for ae.safetensors")
    rest = {name: tensor for name, tensor in state.items() if not name.startswith(_PREFIX["vae"])}
    configs = _configs(model.sizes)
    if source is not None:
        _check_source(source, configs)
    staging = out.with_name(f".{out.name}.writing-{os.getpid()}")
    try:
        staging.mkdir(parents=True)
        for name, config in configs.items():
            (staging / name).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for path in source.iterdir() if source else ():
            if path.is_file() and path.name not in (WEIGHTS, VAE_WEIGHTS):
                shutil.copyfile(path, staging / path.name)
        for file, tensors in ((WEIGHTS, rest), (VAE_WEIGHTS, vae)):
            save_file(tensors, staging / file, metadata={"format": "pt"})
        for path in (*staging.iterdir(), staging):
            fsync_path(path)
        os.rename(staging, out)
        fsync_path(out.absolute().parent)
    except (OSError, SafetensorError) as error:
        remedy = "free disk space, fix the permission, or name another folder"
        raise CheckpointError(f"could not write {out}: {error}", remedy=remedy) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check_source(source: Path, configs: Mapping[str, Mapping[str, Any]]) -> None:
    for file, config in configs.items():
        stated = _read_json(source / file)
        other = [
            f"{key} {stated[key]}, not {value}" for key, value in config.items() if stated.get(key, value) != value
        ]
        if other:
            raise ConfigError(f"{source / file} is of another model: {', '.join(other)}")


def _configs(sizes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    llm = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "qk_norm": True,
        "layer_module": "Qwen2MoTDecoderLayer",
        **{key: sizes["llm"][key] for key in _LLM_KEYS if key in sizes["llm"]},
    }
    vit = {"model_type": "siglip_vision_model", "hidden_act": "gelu_pytorch_tanh", **sizes["vit"]}
    vit["num_hidden_layers"] += _VIT_UNUSED_LAYERS
    return {LLM_CONFIG: llm, VIT_CONFIG: vit}
