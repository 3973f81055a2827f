"""A trained model -> the published directory of its family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from unigen_ds.core.errors import ConfigError
from unigen_ds.families.base import families
from unigen_ds.runner.settings import family_of_model


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
    formats = family_of_model(type(model)).published
    if not formats:
        raise ConfigError(
            f"{type(model).__name__} has no published form",
            allowed=", ".join(family.model.__name__ for family in families() if family.published),
            remedy="tools/zero_to_fp32.py writes plain weights of any model",
        )
    formats[0].write(model, processor, out, source=source, dtype=dtype, max_shard_size=max_shard_size)
