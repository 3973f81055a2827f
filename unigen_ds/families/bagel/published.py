"""Published weights -> sizes and tensors of a ``UnifiedModel``; a ``UnifiedModel`` -> the published directory.

In: BAGEL's directory (``llm_config.json, vit_config.json, ema.safetensors, ae.safetensors``), or a Qwen2 directory, a
SigLIP directory and an ``ae.safetensors`` to start from. Every size is read from the files. A name that is missing,
unexpected or reshaped is an error or, where it must be so (a language model has no gen expert), is logged.

Source: ByteDance-Seed/Bagel (Deng et al., 2025).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, model_validator
from typing_extensions import Self

from unigen_ds.config.registry import MODELS, find
from unigen_ds.config.values import Number
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.core.json_values import stored_object
from unigen_ds.core.shards import first_names
from unigen_ds.families.base import PublishedFormat, published_folder
from unigen_ds.models.quantized import plain_state_dict
from unigen_ds.models.settings import LanguageSizes, VisionSizes
from unigen_ds.models.weights import (
    Pretrained,
    Stored,
    check_fixed,
    flat_sizes,
    read_json,
    stated_sizes,
    stored_tensors,
    vision_tensors,
)
from unigen_ds.system.log import logger
from unigen_ds.system.outputs import save_safetensors

LLM_CONFIG, VIT_CONFIG, WEIGHTS, VAE_WEIGHTS = FILES = (
    "llm_config.json", "vit_config.json", "ema.safetensors", "ae.safetensors"
)  # fmt: skip
EXPORT = "unigen_ds.json"
"""What the published format cannot hold: the autoencoder's arguments, the sizes of the image transforms, the
``timestep_shift`` of the training, and another ``vit_select_layer`` than BAGEL's."""
_TRANSFORM = ("max_size", "min_size", "stride", "mode")
_PREFIX = {"llm": "language_model.", "vit": "vit_model.", "vae": "vae."}
_LLM_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "rms_norm_eps", "rope_theta",
)  # fmt: skip
VIT_SELECT_LAYER = -2
"""BAGEL reads the second to last layer of its vision tower; its vit_config.json counts the missing last layer, too."""
_VAE_LARGEST, _VIT_SMALLEST = 1024, 224  # pixels, as BAGEL's own transforms have them


class UnifiedSizes(LanguageSizes):
    """``model.llm`` of a ``UnifiedModel``, under Qwen2's names."""

    vocab_size: int | None = Field(
        default=None, ge=1, description="rows of the embedding; None: the tokenizer's, which is also the least"
    )
    rms_norm_eps: Number = Field(default=1e-6, gt=0, description="epsilon of the norms")
    rope_theta: Number = Field(default=1_000_000.0, gt=0, description="base of the rotary positions")
    dropout: Number = Field(default=0.0, ge=0, lt=1, description="on both residual branches of each layer")

    @model_validator(mode="after")
    def _positions_fit(self) -> Self:
        if self.hidden_size % 4:
            raise ConfigError(
                f"model.llm.hidden_size is {self.hidden_size}", allowed="a multiple of 4, for positions in images"
            )
        return self


def read_exported(folder: Path) -> dict[str, Any]:
    """The values of ``EXPORT``; nothing in a directory that was not exported here. Raises ``ConfigError``."""
    path = folder / EXPORT
    return read_json(path) if path.is_file() else {}


def read_pretrained(pretrained: str | Mapping[str, str], *, vit_select_layer: int | None = None) -> Pretrained:
    """``pretrained``: a published directory, or ``dict(llm=..., vit=..., vae=...)`` of some of the three. Raises
    ``ConfigError`` or ``CheckpointError`` naming the file that is not as it must be.

    ``vit_select_layer``: the layer of the vision tower that is read, counted from its end; None: as exported, or
    BAGEL's. Weights of the layers after it are not read.
    """
    if isinstance(pretrained, Mapping):
        return _open_parts(pretrained, vit_select_layer or VIT_SELECT_LAYER)
    directory = Path(pretrained)
    weights, export = stored_tensors(directory / WEIGHTS), read_exported(directory)
    select = vit_select_layer or export.get("vit_select_layer", VIT_SELECT_LAYER)
    vae, vae_sizes = {}, export.get("vae", {})
    if (directory / VAE_WEIGHTS).is_file() or not vae_sizes:
        vae = _below("vae", stored_tensors(directory / VAE_WEIGHTS))
        if vae_sizes.get("type", "FluxAutoencoder") == "FluxAutoencoder":
            vae_sizes = {**_vae_sizes(vae, directory / VAE_WEIGHTS), **vae_sizes}
    llm, vit = _sizes("llm", directory / LLM_CONFIG), _sizes("vit", directory / VIT_CONFIG, select)
    sizes: dict[str, Any] = {"llm": llm, "vit": vit, "vae": vae_sizes, "vit_select_layer": select}
    if "vae2llm.weight" in weights:
        of_vae = {**vae_sizes.get("config", {}), **vae_sizes}
        channels = of_vae.get("latent_channels") or of_vae.get("channels", 1)
        sizes["latent_patch_size"] = math.isqrt(weights["vae2llm.weight"].shape[1] // channels)
    for key, table in {"max_latent_size": "latent_pos_embed", "vit_max_patches_per_side": "vit_pos_embed"}.items():
        if f"{table}.pos_embed" in weights:
            sizes[key] = math.isqrt(weights[f"{table}.pos_embed"].shape[0])
    if select != VIT_SELECT_LAYER:  # layers of the vision tower after it are not read
        layer = re.compile(r"vit_model\.vision_model\.encoder\.layers\.(\d+)\.")
        number = vit["num_hidden_layers"]
        weights = {name: t for name, t in weights.items() if not (m := layer.match(name)) or int(m[1]) < number}
    return Pretrained(str(directory), sizes, {**weights, **vae}, r"pos_embed$")


def _open_parts(paths: Mapping[str, str], select: int) -> Pretrained:
    if not paths or set(paths) - set(_PREFIX):
        raise ConfigError(f"model.pretrained is {dict(paths)}", allowed="a directory, or dict(llm=, vit=, vae=)")
    sizes: dict[str, Any] = {"vit_select_layer": select}
    tensors: dict[str, Stored] = {}
    for part, path in paths.items():
        source = Path(path)
        if part == "vae":
            file = source / VAE_WEIGHTS if source.is_dir() else source
            of_part = _below(part, stored_tensors(file))
            sizes[part] = _vae_sizes(of_part, file)
        else:
            of_part = _below(part, (vision_tensors if part == "vit" else stored_tensors)(source))
            sizes[part] = _sizes(part, source / "config.json", select)
            embedding = of_part.get("language_model.model.embed_tokens.weight")
            if embedding is not None:  # a tied head is not stored
                of_part.setdefault("language_model.lm_head.weight", embedding)
        tensors |= of_part
    pattern = "|".join(re.escape(_PREFIX[part]) for part in paths)
    may_lack = rf"^(?!{pattern})|_moe_gen|\.[qk]_norm\."
    may_leave = r"^vit_model\.(?!vision_model\.(embed|post))|inv_freq"
    return Pretrained(str(dict(paths)), sizes, tensors, may_lack, may_leave)


def _below(part: str, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    return {_PREFIX[part] + key: tensor for key, tensor in tensors.items()}


def _sizes(part: str, path: Path, select: int = VIT_SELECT_LAYER) -> dict[str, Any]:
    """What a model needs of the config of its language model (``llm``) or vision tower (``vit``)."""
    sizes = stated_sizes(part, path, _LLM_KEYS if part == "llm" else VisionSizes.model_fields)
    if part == "vit" and "num_hidden_layers" in sizes:
        sizes["num_hidden_layers"] += 1 + select
    return sizes


def _vae_sizes(tensors: Mapping[str, Stored], path: Path) -> dict[str, Any]:
    """The published directory has no config of the autoencoder, but the shapes determine all but scale and shift."""
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


def model_sizes(source: Pretrained | None, of_config: Mapping[str, Any]) -> dict[str, Any]:
    """``llm``, ``vit``, ``vae``, sides of patches and tables: as given, else as in the files, else the default."""
    of_files = source.sizes if source else {}
    sizes: dict[str, Any] = {}
    for part in _PREFIX:
        own, read = of_config.get(part) or {}, of_files.get(part, {})
        same_kind = own.get("type", read.get("type")) == read.get("type")
        sizes[part] = {**(read if same_kind else {}), **own}
        if not sizes[part]:
            raise ConfigError(f"model.{part} is not given", remedy=f"give its sizes, or pretrained=dict({part}='...')")
    sizes["llm"] = UnifiedSizes.with_defaults(sizes["llm"], where="model.llm")
    sizes["vit"] = VisionSizes.with_defaults(sizes["vit"], where="model.vit")
    per_side = sizes["vit"]["image_size"] // sizes["vit"]["patch_size"]
    for key, default in {"latent_patch_size": 2, "max_latent_size": 64, "vit_max_patches_per_side": per_side}.items():
        own = of_config.get(key)
        sizes[key] = of_files.get(key, default) if own is None else own
    if sizes["vit_max_patches_per_side"] > per_side:
        raise ConfigError(
            f"vit_max_patches_per_side is {sizes['vit_max_patches_per_side']}",
            allowed=f"at most {per_side}: model.vit has learned no position beyond image_size // patch_size",
        )
    return sizes


def with_copied_experts(source: Pretrained, names: Iterable[str]) -> Pretrained:
    """``source``, where a gen expert among ``names`` that its files lack is a copy of its und expert."""
    unds = {name: name.replace("_moe_gen", "") for name in names if "_moe_gen" in name and name not in source.tensors}
    copies = {name: source.tensors[und] for name, und in unds.items() if und in source.tensors}
    logger().info(f"pretrained {source.where}: copied from und: {first_names(list(copies))}")
    return replace(source, tensors={**source.tensors, **copies})


class BagelDirectory(PublishedFormat):
    """``llm_config.json``, ``vit_config.json``, ``ema.safetensors``, ``ae.safetensors`` and a tokenizer."""

    name = "BAGEL's directory"
    complete = True

    def recognises(self, folder: Path) -> bool:
        """One exported here may lack the file of an autoencoder without weights."""
        has_vae = (folder / VAE_WEIGHTS).is_file() or "vae" in read_exported(folder)
        return has_vae and all((folder / name).is_file() for name in FILES if name != VAE_WEIGHTS)

    def config(self, folder: Path) -> dict[str, Any]:
        """Return the sections, with BAGEL's image sizes or those that an export has stored."""
        export = read_exported(folder)
        model: dict[str, Any] = {"type": "UnifiedModel", "pretrained": str(folder)}
        if "timestep_shift" in export:
            model["timestep_shift"] = export["timestep_shift"]
        kind: Any = find(MODELS, model, where="model")  # which imports this module
        sizes = kind.processor_sizes(model)
        latent, patch = sizes["vae_spatial_downsample"] * sizes["latent_patch_size"], sizes["vit_patch_size"]
        vae = min(_VAE_LARGEST, sizes["max_latent_size"] * latent)
        vit = sizes["vit_max_patches_per_side"] * patch
        transforms = {
            "vae_transform": {"max_size": vae, "min_size": vae // 2, "stride": latent},
            "vit_transform": {"max_size": vit, "min_size": min(_VIT_SMALLEST, vit), "stride": patch},
        }
        return {
            "model": model,
            "tokenizer": {"type": "PretrainedTokenizer", "path": str(folder)},
            "processor": {
                name: export.get(name) or {"type": "ImageTransform", **own} for name, own in transforms.items()
            },
        }

    def weights(self, folder: Path) -> Pretrained:
        return read_pretrained(str(folder))

    def sizes(self, folder: Path) -> dict[str, Any]:
        """The configs alone are read: the folder may lack other files."""
        parts = {"llm": folder / LLM_CONFIG, "vit": folder / VIT_CONFIG}
        present = parts["llm"].is_file()
        return {part: flat_sizes(stored_object(path)) for part, path in parts.items() if present and path.is_file()}

    def write(
        self, model: Any, processor: Any, out: Path, *, source: Path | None, dtype: torch.dtype, max_shard_size: str
    ) -> None:
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in plain_state_dict(model).items()}
        state = {name: t.to(dtype) if t.is_floating_point() else t for name, t in state.items()}
        vae = {name.removeprefix(_PREFIX["vae"]): t for name, t in state.items() if name.startswith(_PREFIX["vae"])}
        rest = {name: tensor for name, tensor in state.items() if not name.startswith(_PREFIX["vae"])}
        export: dict[str, Any] = {"vae": dict(model.sizes["vae"]), "timestep_shift": model.timestep_shift}
        if model.vit_select_layer != VIT_SELECT_LAYER:
            export["vit_select_layer"] = model.vit_select_layer
        for name in ("vit_transform", "vae_transform"):
            transform = getattr(processor, name, None)
            if type(transform).__name__ == "ImageTransform":
                export[name] = {"type": "ImageTransform", **{key: getattr(transform, key) for key in _TRANSFORM}}
        of_llm = {key: model.sizes["llm"][key] for key in _LLM_KEYS if key in model.sizes["llm"]}
        configs = {
            LLM_CONFIG: {
                "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
                "tie_word_embeddings": False, "qk_norm": True, "layer_module": "Qwen2MoTDecoderLayer", **of_llm,
            },
            VIT_CONFIG: {
                "model_type": "siglip_vision_model", "hidden_act": "gelu_pytorch_tanh", **model.sizes["vit"],
                "num_hidden_layers": model.sizes["vit"]["num_hidden_layers"] - 1 - model.vit_select_layer,
            },
        }  # fmt: skip
        if source is not None:
            for file, config in configs.items():
                check_fixed(read_json(source / file), config, f"{source / file} is of another model")
        tokenizer = getattr(processor, "tokenizer", None)
        with published_folder(out, tokenizer, source, without=(WEIGHTS, VAE_WEIGHTS, EXPORT)) as folder:
            for name, values in {EXPORT: export, **(configs if source is None else {})}.items():
                (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
            for file, tensors in ((WEIGHTS, rest), (VAE_WEIGHTS, vae)):
                if tensors:  # PixelAutoencoder has none
                    save_safetensors(folder / file, tensors, {"format": "pt"})
