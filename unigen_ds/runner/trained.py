"""A checkpoint of any layout, or a published directory -> a model that draws and reads. Nothing is merged first."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unigen_ds.checkpoint.convert import open_source
from unigen_ds.checkpoint.layouts.nanovlm import is_nanovlm
from unigen_ds.checkpoint.manifest import FILE_NAME, Manifest
from unigen_ds.checkpoint.saver import TOKENIZER
from unigen_ds.checkpoint.weight_files import locate
from unigen_ds.checkpoint.writers import Entry
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.core.fitting import by_first_name, misfit, refuse_misfit
from unigen_ds.core.log import logger
from unigen_ds.core.modules import tied_names
from unigen_ds.core.registry import LAYOUTS
from unigen_ds.data.processor import UnifiedProcessor
from unigen_ds.families.bagel.exported import read_exported
from unigen_ds.families.bagel.inference import InterleaveInferencer
from unigen_ds.families.bagel.model import UnifiedModel
from unigen_ds.families.bagel.published import is_published
from unigen_ds.families.decoder_lm.inference import TextInferencer
from unigen_ds.families.decoder_lm.model import DecoderLM
from unigen_ds.families.decoder_lm.published import MODEL_TYPES
from unigen_ds.families.nanovlm.inference import ChatInferencer
from unigen_ds.families.nanovlm.processor import VLMProcessor
from unigen_ds.families.nanovlm.published import vlm_arguments
from unigen_ds.models.weights import read_json
from unigen_ds.resume.edited import BUILT
from unigen_ds.runner.build import build_model, build_processor, custom_modules, import_custom, seed_of

_VAE_LARGEST, _VIT_SMALLEST = 1024, 224  # pixels, as BAGEL's own transforms have them


def open_model(
    path: Path,
    *,
    raw: bool = False,
    tag: str | None = None,
    config: Mapping[str, Any] | None = None,
    allow_custom_imports: bool = False,
) -> tuple[nn.Module, UnifiedProcessor]:
    """The model on the CPU in fp32, and its processor.

    Args:
        path: a published directory, a checkpoint, or a work dir.
        raw: the weights themselves, also where there is an average of them (EMA).
        tag: name of the checkpoint's folder below ``path``.
        config: of the training; None: the one that the checkpoint holds.
        allow_custom_imports: import the modules that the checkpoint's config names, which executes them. Those of
            this package need no permission.

    Raises ``CheckpointError`` where weights are missing, unexpected or of another shape, ``ConfigError`` where modules
    would have to be imported.
    """
    if is_published(path) or (config is None and is_decoder(path)):
        config = published_config(path) if is_published(path) else decoder_config(path)
        processor = build_processor(config, seed=0)
        return build_model(config, processor), processor
    _import_layout(path, tag, config=config, allow=allow_custom_imports)
    source = open_source(path, tag=tag)
    if config is None:
        config = nanovlm_config(source.directory) if is_nanovlm(source.directory) else _stored_config(source.directory)
        if not allow_custom_imports:
            _refuse_imports(config, source.directory)
        config = self_contained(config, source.directory)
    import_custom(config)
    processor = build_processor(config, seed=seed_of(config))
    uncompiled = {key: value for key, value in config["model"].items() if key != "compile"}
    model = build_model({**config, "model": uncompiled}, processor)
    ema = source.average is not None and not raw
    _fill(model, source.entries(dtype=torch.float32, ema=ema), where=source.directory)
    model.published = False  # type: ignore[assignment]  # these weights are not those of its config's ``pretrained``
    logger().info(f"{source.directory}: {'the average of the weights (EMA)' if ema else 'the weights'}")
    return model, processor


def open_inferencer(
    path: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, **source: Any
) -> InterleaveInferencer | ChatInferencer | TextInferencer:
    """``open_model``, which takes ``source``, ready to draw and read; a ``VLM`` reads alone, a ``DecoderLM`` writes."""
    model, processor = open_model(path, **source)
    model = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
    if isinstance(model, DecoderLM):
        return TextInferencer(model, processor)
    if isinstance(processor, VLMProcessor):
        return ChatInferencer(model, processor)
    return InterleaveInferencer(model, processor)


def published_config(directory: Path) -> dict[str, Any]:
    """What is needed of a config, for a published directory with its tokenizer: BAGEL's image sizes."""
    exported = read_exported(directory)
    model: dict[str, Any] = {"type": "UnifiedModel", "pretrained": str(directory)}
    if "timestep_shift" in exported:
        model["timestep_shift"] = exported["timestep_shift"]
    sizes = UnifiedModel.processor_sizes(model)
    latent, patch = sizes["vae_downsample"], sizes["vit_patch_size"]
    vae = min(_VAE_LARGEST, sizes["max_latent_size"] * latent)
    vit = sizes["vit_max_patches_per_side"] * patch
    transforms = {
        "vae_transform": {"max_size": vae, "min_size": vae // 2, "stride": latent},
        "vit_transform": {"max_size": vit, "min_size": min(_VIT_SMALLEST, vit), "stride": patch},
    }
    return {
        "model": model,
        "tokenizer": {"type": "PretrainedTokenizer", "path": str(directory)},
        "processor": {
            name: exported.get(name) or {"type": "ImageTransform", **given} for name, given in transforms.items()
        },
    }


def self_contained(config: Mapping[str, Any], checkpoint: Path) -> dict[str, Any]:
    """The config of a checkpoint without the folders that it names: the sizes as the model was built, the tokenizer
    that was saved with it. A checkpoint of an earlier version has neither, and needs its folders.
    """
    found, built = dict(config), (config.get(BUILT) or {}).get("model")
    if built:
        model = {key: value for key, value in config["model"].items() if key not in ("pretrained", "copy_init_moe")}
        found["model"] = {**model, **built}
    if (checkpoint / TOKENIZER).is_dir():
        found["tokenizer"] = {**config["tokenizer"], "path": str(checkpoint / TOKENIZER)}
    return found


def is_decoder(directory: Path) -> bool:
    """Whether it is transformers' directory of a model that ``DecoderLM`` knows."""
    config = directory / "config.json"
    return config.is_file() and not is_nanovlm(directory) and read_json(config).get("model_type") in MODEL_TYPES


def decoder_config(directory: Path) -> dict[str, Any]:
    """The same for transformers' directory with its tokenizer; begin and end are the tokens that its config names."""
    from transformers import AutoTokenizer

    stored = read_json(directory / "config.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        ids = [stored.get("bos_token_id"), stored.get("eos_token_id")]
        first = [each[0] if isinstance(each, list) and each else each for each in ids]
        begin, end = (tokenizer.convert_ids_to_tokens(first[1] if each is None else each) for each in first)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{directory} has no tokenizer with the tokens of its config: {error}",
            remedy="name the config of the training: --config CONFIG",
        ) from error
    names = {"bos": begin, "eos": end, "image_start": None, "image_end": None}
    return {
        "model": {"type": "DecoderLM", "pretrained": str(directory)},
        "tokenizer": {"type": "PretrainedTokenizer", "path": str(directory), **names},
    }


def nanovlm_config(directory: Path) -> dict[str, Any]:
    """The same for nanoVLM's directory; its tokenizer is the one beside it, or else the one that it names."""
    stored = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    beside = (directory / "tokenizer_config.json").is_file()
    tokenizer = {"path": str(directory) if beside else stored["lm_tokenizer"]}
    return {
        "model": {"type": "VLM", **vlm_arguments(stored)},
        "tokenizer": {"type": "ChatTokenizer", **tokenizer, "chat_template": stored["lm_chat_template"]},
        "processor": {
            "max_image_size": stored["max_img_size"],
            "resize_to_max_side_len": stored["resize_to_max_side_len"],
        },
    }


def _stored_config(directory: Path) -> dict[str, Any]:
    if not (directory / FILE_NAME).is_file():
        raise CheckpointError(f"{directory} does not hold its config", remedy="name it: --config CONFIG")
    return Manifest.read(directory).config


def _refuse_imports(config: Mapping[str, Any], directory: Path) -> None:
    """A checkpoint may come from anywhere, and an import executes: harmless is what is imported already or is a module
    of this package, which has its own folder whatever the working directory holds.
    """
    own = ("unigen_ds.",)
    wanted = [name for name in custom_modules(config) if name not in sys.modules and not name.startswith(own)]
    if wanted:
        raise ConfigError(
            f"the config in {directory} imports {', '.join(wanted)} (custom_imports), which would execute their code",
            remedy="--allow-custom-imports if you trust them, or name a config of your own: --config CONFIG",
        )


def _import_layout(path: Path, tag: str | None, *, config: Mapping[str, Any] | None, allow: bool) -> None:
    """Import the modules of a checkpoint with a layout that nothing imported so far reads: one of them may register it.

    ``config``: a trusted one, which is used instead of the checkpoint's. Raises as ``open_model`` does.
    """
    directory = locate(path, tag)
    if not (directory / FILE_NAME).is_file():
        return
    manifest = Manifest.read(directory)
    if manifest.layout not in LAYOUTS.module_dict:
        if config is None and not allow:
            _refuse_imports(manifest.config, directory)
        import_custom(manifest.config if config is None else config)


@torch.no_grad()
def _fill(model: nn.Module, entries: list[Entry], *, where: Path) -> None:
    own = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    stored = {entry.name: tuple(entry.shape) for entry in entries}
    tied = tied_names(model)
    refuse_misfit(where, misfit(by_first_name(stored, tied), by_first_name(shapes, tied)))
    for entry in entries:
        flat, at = own[entry.name].view(-1), 0
        for piece in entry.pieces():
            flat[at : at + piece.numel()].copy_(piece)
            at += piece.numel()
