"""A checkpoint of any layout, or a published directory -> a model, or its published form. Nothing is merged first."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unigen_ds.checkpoint.base_files import find_base
from unigen_ds.checkpoint.convert import read_source
from unigen_ds.checkpoint.foreign import locate
from unigen_ds.checkpoint.manifest import FILE_NAME, Manifest
from unigen_ds.checkpoint.saver import TOKENIZER
from unigen_ds.config.hub import folder_of
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.core.shards import by_first_name, misfit, refuse_misfit, tied_names
from unigen_ds.families.base import PublishedFormat, exported_format, family_of
from unigen_ds.families.directories import formats, published_format
from unigen_ds.models.lora import adapter_record, base_tensors, merge_adapters, rounding, write_adapters
from unigen_ds.models.quantized import QuantizedLinear
from unigen_ds.resume.finding import BUILT_KEY
from unigen_ds.runner.settings.custom_imports import CustomImports, import_custom
from unigen_ds.runner.settings.tree import ModelSettings, load_config
from unigen_ds.runner.start.build import build_model, build_processor
from unigen_ds.system.files import check_digests, check_new, new_directory
from unigen_ds.system.log import logger
from unigen_ds.system.outputs import Entry


def open_model(
    path: Path,
    *,
    raw: bool = False,
    tag: str | None = None,
    config: Mapping[str, Any] | None = None,
    allow_custom_imports: bool = False,
    base: str | None = None,
) -> tuple[nn.Module, Any]:
    """The model on the CPU in fp32, and its processor.

    Args:
        path: a published directory, a checkpoint, or a work dir.
        raw: the weights themselves, also where there is an average of them (EMA).
        tag: name of the checkpoint's folder below ``path``.
        config: of the training, whose ``custom_imports`` are imported first; None: the checkpoint's own.
        allow_custom_imports: whether modules that the checkpoint's config names may be imported (``import_stored``).
        base: of adapters: the folder of the base's files; None: as ``find_base`` finds them.

    Raises ``CheckpointError`` where weights are missing, unexpected or of another shape, or where a published directory
    is not readable; ``ConfigError`` where modules would have to be imported.
    """
    directory, format_, training = find_model(path, tag=tag, config=config, allow_custom_imports=allow_custom_imports)
    if format_ is not None:
        if base is not None:
            raise ConfigError(f"--base {base} has no effect: {path} is a published directory", remedy="leave it out")
        try:
            return _build(format_.config(directory), seed=0)
        except ConfigError as error:  # the config is the directory's, nobody wrote it
            raise CheckpointError(f"{path}: {error.problem}", allowed=error.allowed, remedy=error.remedy) from error
    source = read_source(path, tag=tag)
    if config is None:
        config = self_contained(training, directory)
    else:
        names = (name for kind in source.reader.kinds() for name in source.reader.names(kind))
        if config.get("lora") and not any(".lora_" in name for name in names):  # what tools/export.py --merge wrote
            logger().info("%s has no adapters, so lora of the config is not used.", directory)
            config = {**config, "lora": None}
    if source.base is not None:  # its files are read as in the training
        read = {key: value for key, value in training["model"].items() if key in _OF_FILES}
        folders = find_base(source.base, folder=base, checkpoint=directory)
        config = {**config, "model": {**config["model"], **read, "pretrained": folders}}
    elif base is not None:
        raise ConfigError(f"--base {base} has no effect: {directory} holds no adapters", remedy="leave it out")
    section = {key: value for key, value in config["model"].items() if key != "compile"}
    seed = int((config.get("randomness") or {}).get("seed") or 0)
    model, processor = _build({**config, "model": section}, seed=seed)
    ema = source.average is not None and not raw
    _fill(model, source.entries(dtype=torch.float32, ema=ema), where=directory)
    if source.base is not None:
        model.__dict__["base_folders"] = config["model"]["pretrained"]
    model.published = False  # type: ignore[assignment]  # these weights are not those of its config's ``pretrained``
    weights = "the average of the weights (EMA)" if ema else "the weights"
    also = ", not their average (EMA), which the checkpoint has as well" if source.average is not None and raw else ""
    logger().info("%s: %s%s", directory, weights, also)
    return model, processor


def _build(config: Mapping[str, Any], *, seed: int) -> tuple[nn.Module, Any]:
    settings = ModelSettings.of(config)
    processor = build_processor(settings, seed=seed)
    return build_model(settings, processor, seed=seed), processor


def find_model(
    path: Path, *, tag: str | None, config: Mapping[str, Any] | None, allow_custom_imports: bool
) -> tuple[Path, PublishedFormat | None, Mapping[str, Any]]:
    """The folder, its format where it is published, and the training's config, whose modules are imported."""
    if config is not None:
        import_custom(config)
    path = folder_of(path, where="MODEL")
    format_ = published_format(path, complete=config is not None)
    if format_ is not None and format_.pretrained:
        check_digests(path)
        return path, format_, config or {}
    directory = locate(path, tag)
    if config is None:
        config = config_of(directory)
        import_stored(config, directory, allow=allow_custom_imports)
    return directory, None, config


def source_of(arguments: Any) -> dict[str, Any]:
    """The arguments of ``open_model`` that are options of a tool (``pipes.add_source``)."""
    config = load_config(arguments.config) if arguments.config else None
    names = ("tag", "base", "allow_custom_imports")
    return {"config": config, **{name: getattr(arguments, name) for name in names}}


def open_inferencer(
    path: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, **source: Any
) -> Any:
    """``open_model``, which accepts ``source``, as the inferencer of its family (``Family.inferencer``)."""
    check_device(device)
    model, processor = open_model(path, **source)
    model = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
    return family_of(type(model)).inferencer(model, processor)


def check_device(device: torch.device | str) -> None:
    """Raise ``ConfigError`` for a device that is not here: before the model is read."""
    try:
        torch.empty(1, device=device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            f"device {str(device)!r} cannot be used: {str(error).strip().splitlines()[0]}",
            remedy="device 'cpu', or the PyTorch build for your CUDA version and a free GPU (README.md, GPU)",
        ) from error


def self_contained(config: Mapping[str, Any], checkpoint: Path) -> dict[str, Any]:
    """The config of a checkpoint without folders: the sizes as built, and the tokenizer that was saved with it."""
    whole, sizes = dict(config), (config.get(BUILT_KEY) or {}).get("model")
    if sizes:
        model = {key: value for key, value in config["model"].items() if key not in _OF_FILES}
        whole["model"] = {**model, **sizes}
    if (checkpoint / TOKENIZER).is_dir():
        whole["tokenizer"] = {**config["tokenizer"], "path": str(checkpoint / TOKENIZER)}
    return whole


_OF_FILES = ("pretrained", "copy_init_moe")
"""Keys of a model that need its published files."""


def config_of(directory: Path) -> dict[str, Any]:
    """The config that a checkpoint contains. Raises ``CheckpointError`` where it has none."""
    directory_format = published_format(directory)
    if directory_format is not None and not directory_format.pretrained:
        return directory_format.config(directory)
    if not (directory / FILE_NAME).is_file():
        check_digests(directory)
        read_source(directory)  # raises where it holds something else
        raise CheckpointError(
            f"{directory} does not contain its config"
            + ", at least not one that a registered family recognises" * (directory / "config.json").is_file(),
            allowed="a checkpoint, or " + ", ".join(dict.fromkeys(each.name for each in formats())),
            remedy="--config CONFIG; for a family of your own one with its custom_imports, which register it",
        )
    return Manifest.read(directory).config


def import_stored(config: Mapping[str, Any], directory: Path, *, allow: bool) -> None:
    """Import the modules that a checkpoint's config names. Raises ``ConfigError`` where their code is not allowed.

    A checkpoint may come from anywhere. Allowed are modules that are imported already and those of this package, which
    are found in its own folder whatever the working directory contains.
    """
    modules = CustomImports.parse(config.get("custom_imports"), where="custom_imports").imports
    names = [name for name in modules if name not in sys.modules and not name.startswith("unigen_ds.")]
    if names and not allow:
        raise ConfigError(
            f"the config in {directory} imports {', '.join(names)} (custom_imports), which would execute their code",
            remedy="--allow-custom-imports if you trust them, or name a config of your own: --config CONFIG",
        )
    import_custom(config)


@torch.no_grad()
def _fill(model: nn.Module, entries: list[Entry], *, where: Path) -> None:
    own, base, tied = model.state_dict(), base_tensors(model), tied_names(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items() if tied.get(name, name) not in base}
    old_shapes = {entry.name: tuple(entry.shape) for entry in entries}
    refuse_misfit(where, misfit(by_first_name(old_shapes, tied), by_first_name(shapes, tied)))
    for entry in entries:
        flat, at = own[entry.name].view(-1), 0
        for piece in entry.pieces():
            flat[at : at + piece.numel()].copy_(piece)
            at += piece.numel()


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    merge: bool = False,
    source: Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: str = "5GB",
    **opening: Any,
) -> None:
    """Open ``checkpoint`` on the CPU and write it into the new folder ``out``. Not collective.

    Args:
        merge: of adapters: with their base, as any other model; else they alone are written, as peft has them.
        source: a published directory of the same sizes; its other files are copied byte for byte.
        dtype: of the weights; None: fp32, and bf16 where adapters are merged into packed weights.
        max_shard_size: of a file, where the format can have several.

    ``opening``: as of ``open_model``. Raises what it raises, ``ConfigError`` where ``out`` exists, ``source`` does
    not fit or the model has no published form, and ``CheckpointError`` where ``out`` cannot be written.
    """
    check_new(out)  # before a large model is opened
    model, processor = open_model(checkpoint, **opening)
    with_adapters = adapter_record(model) is not None
    if merge and not with_adapters:
        raise ConfigError(f"{checkpoint} has no adapters to merge", remedy="leave out --merge")
    if with_adapters and not merge:
        if source is not None or dtype is not None:
            raise ConfigError(
                "adapters are written as they are, in fp32", remedy="--merge, or neither --source nor --dtype"
            )
        save_tokenizer = getattr(getattr(processor, "tokenizer", None), "save_pretrained", None)
        with new_directory(out) as folder:
            if save_tokenizer is not None:
                save_tokenizer(str(folder))
            write_adapters(model, folder, base=model.base_folders)
        return
    if with_adapters:
        packed = any(isinstance(layer, QuantizedLinear) for layer in model.modules())
        merge_adapters(model)
        if packed:
            dtype = dtype or torch.bfloat16
            logger().info(
                "Merged into the unpacked weights, on which the adapters were trained, and written in %s: a weight"
                " differs by at most %.2g of itself, the matrix that differs most by %.2g (relative L2).",
                str(dtype).removeprefix("torch."), torch.finfo(dtype).eps / 2, rounding(model, dtype),
            )  # fmt: skip
    directory_format = exported_format(family_of(type(model)), type(model))
    if source is not None:
        check_digests(source := folder_of(source, where="--source"))
    dtype = dtype or torch.float32
    directory_format.write(model, processor, out, source=source, dtype=dtype, max_shard_size=max_shard_size)
