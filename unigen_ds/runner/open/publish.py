"""A trained model, or a checkpoint of one -> the published directory of its family."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unigen_ds.config.hub import folder_of
from unigen_ds.core.errors import ConfigError
from unigen_ds.families.base import exported_format
from unigen_ds.models.lora import adapter_record, merge_adapters, rounding, write_adapters
from unigen_ds.models.quantized import QuantizedLinear
from unigen_ds.runner.open.trained import open_model
from unigen_ds.runner.settings.family_settings import family_of_model
from unigen_ds.system.files import check_digests, check_new, new_directory
from unigen_ds.system.log import logger


def publish(
    model: nn.Module,
    processor: Any,
    out: Path,
    *,
    source: Path | None,
    dtype: torch.dtype,
    max_shard_size: str = "5GB",
) -> None:
    """Write ``model`` into the new folder ``out``: completely, or not at all.

    Args:
        source: a published directory of the same sizes; its other files are copied byte for byte.
        dtype: of the weights.
        max_shard_size: of a file, where the format can have several.

    Raises ``ConfigError`` where ``out`` exists, ``source`` does not fit or the model has no published form, and
    ``CheckpointError`` where ``out`` cannot be written.
    """
    directory_format = exported_format(family_of_model(type(model)), type(model))
    if source is not None:
        check_digests(source := folder_of(source, where="--source"))
    directory_format.write(model, processor, out, source=source, dtype=dtype, max_shard_size=max_shard_size)


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    raw: bool = False,
    tag: str | None = None,
    config: Mapping[str, Any] | None = None,
    allow_custom_imports: bool = False,
    base: str | None = None,
    merge: bool = False,
    source: Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: str = "5GB",
) -> None:
    """Open ``checkpoint`` on the CPU and write it into the new folder ``out``. Not collective.

    The arguments up to ``base`` are those of ``open_model``, the others those of ``publish``; so are the errors.
    ``merge``: of adapters: with their base, as any other model; else they alone are written, as peft has them.
    ``dtype``: None: fp32, and bf16 where adapters are merged into packed weights.
    """
    check_new(out)  # before a large model is opened
    model, processor = open_model(
        checkpoint, raw=raw, tag=tag, config=config, allow_custom_imports=allow_custom_imports, base=base
    )
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
    publish(model, processor, out, source=source, dtype=dtype or torch.float32, max_shard_size=max_shard_size)
