"""A trained model, or a checkpoint of one -> the published directory of its family."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unigen_ds.families.base import exported_format
from unigen_ds.runner.settings import family_of_model
from unigen_ds.runner.trained import open_model


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
    found = exported_format(family_of_model(type(model)), type(model))
    found.write(model, processor, out, source=source, dtype=dtype, max_shard_size=max_shard_size)


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    raw: bool = False,
    tag: str | None = None,
    config: Mapping[str, Any] | None = None,
    allow_custom_imports: bool = False,
    source: Path | None = None,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
) -> None:
    """Open ``checkpoint`` on the CPU and write it into the new folder ``out``. Not collective.

    The arguments up to ``allow_custom_imports`` are those of ``open_model``, the others those of ``publish``; so are
    the errors.
    """
    model, processor = open_model(
        checkpoint, raw=raw, tag=tag, config=config, allow_custom_imports=allow_custom_imports
    )
    publish(model, processor, out, source=source, dtype=dtype, max_shard_size=max_shard_size)
