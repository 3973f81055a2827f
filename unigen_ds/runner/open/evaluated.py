"""Evaluate a checkpoint of any engine, files of weights or a published directory on validation data.

In: what ``open_model`` reads, and the ``val_dataloader`` of a config. Out: ``val/loss`` with its parts, and metrics,
each with its provenance. Each process has the whole model and its share of the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unigen_ds.checkpoint.manifest import FILE_NAME, Manifest
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.progress import Geometry
from unigen_ds.core.shards import EMA
from unigen_ds.data.settings import evaluation_sections
from unigen_ds.evaluation.generation import Answering
from unigen_ds.evaluation.metrics import build_metrics
from unigen_ds.evaluation.scoring import Evaluation
from unigen_ds.families.base import family_of
from unigen_ds.optim.optimizer import COMPUTE_DTYPE, settled_precision
from unigen_ds.runner.open.trained import find_model, open_model, self_contained
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.runner.start.stages import read_validation
from unigen_ds.system import dist
from unigen_ds.system.log import logger


class WholeModel:
    """A whole model on each process, with what an evaluation uses of a ``Backend``."""

    gathers_in_forward = False

    def __init__(self, model: nn.Module, *, precision: str) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device).eval().requires_grad_(False)
        self.precision = precision
        self.dp_rank, self.dp_size = dist.rank(), dist.world_size()
        if precision != "fp32":
            for parameter in self.model.parameters():
                parameter.data = parameter.data.to(COMPUTE_DTYPE[precision])


def evaluate(
    path: Path,
    *,
    config: Mapping[str, Any] | None = None,
    data: str | None = None,
    batch_size: int | None = None,
    seq_length: int | None = None,
    max_batches: int | None = None,
    metrics: Sequence[Mapping[str, Any]] = (),
    max_samples: int | None = None,
    generation: Mapping[str, Any] | None = None,
    ema: bool = False,
    tag: str | None = None,
    allow_custom_imports: bool = False,
    base: str | None = None,
) -> Evaluation:
    """Losses and metrics on the validation data. Collective. A metric that fails loses no other value.

    Args:
        path: a checkpoint, a work dir, files of weights, or a published directory.
        config: of the training; None: the checkpoint's own.
        data: a file of records instead of ``val_dataloader``'s data.
        batch_size, seq_length: sequences of a pass on each process, tokens of one; None: as of ``val_dataloader``.
        max_batches, metrics, max_samples, generation: as of ``EvaluateHook``.
        ema: the average of the weights instead of the weights.
        tag, allow_custom_imports, base: as of ``open_model``.

    Raises what ``open_model`` raises, and ``ConfigError`` or ``DataError`` where the data or a metric cannot be used.
    """
    answering = Answering.of(generation or {}, where="generation")
    directory, format_, training = find_model(path, tag=tag, config=config, allow_custom_imports=allow_custom_imports)
    if config is None:  # a published directory has weights and sizes, and no training
        training = self_contained(training, directory) if format_ is None else format_.config(directory)
    manifest = Manifest.read(directory) if format_ is None and (directory / FILE_NAME).is_file() else None
    sections = evaluation_sections(training, data, {"batch_size": batch_size, "seq_length": seq_length})
    if not sections:
        raise ConfigError(
            f"no data is named on which {path} is to be evaluated",
            remedy="--data FILE, or --config with a config that has val_dataloader",
        )
    settings = Settings.of_data({**training, **sections})
    if manifest is not None:
        settings = settings.with_choices(seed=int(manifest.loader["seed"]))
    if answering.flow:  # before the model is read
        family_of(settings.model.cls).drawing_settings(None, answering.flow, where="generation.flow")
    built_metrics = build_metrics(metrics)
    has_average = manifest is not None and bool(manifest.files_in(EMA))
    if ema and not has_average:
        raise ConfigError(f"{path} has no average of the weights (EMA)", remedy="leave out --ema")
    model, _ = open_model(
        path, raw=not ema, tag=tag, config=config, allow_custom_imports=allow_custom_imports, base=base
    )
    if has_average and dist.is_main():
        raw = "the weights themselves; --ema evaluates their average, which tools/generate.py and tools/export.py use"
        logger().info("Evaluated: %s.", "the average of the weights (--ema)" if ema else raw)
    geometry = Geometry(settings.train_dataloader.batch_size or 1) if manifest is None else manifest.geometry
    validation = read_validation(settings, manifest, geometry=geometry)
    for line in validation.start_lines() if dist.is_main() else ():
        logger().info("%s", line)
    precision = settled_precision(
        settings.optim_wrapper.precision, None if manifest is None else manifest.topology.get("precision")
    )
    engine = WholeModel(model, precision=precision)
    validation.check(built_metrics, engine, answering=answering)
    update = "" if manifest is None else f" (update {manifest.progress.updates})"
    return validation.evaluate(
        engine, built_metrics, checkpoint=f"{directory}{update}{' EMA' if ema else ''}",
        max_batches=max_batches, max_samples=max_samples, answering=answering, made_by={"precision": engine.precision},
    )  # fmt: skip
