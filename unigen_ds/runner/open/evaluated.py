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
from unigen_ds.data.batches.validation_data import ValidationData
from unigen_ds.data.datasets.overflow import check_overflow
from unigen_ds.data.settings import ValDataloader
from unigen_ds.evaluation.generation import Answering
from unigen_ds.evaluation.metrics import build_metrics
from unigen_ds.evaluation.scoring import Evaluation, check
from unigen_ds.evaluation.scoring import evaluate as score
from unigen_ds.evaluation.validation import Validation
from unigen_ds.families.base import family_of
from unigen_ds.optim.optimizer import COMPUTE_DTYPE, settled_precision
from unigen_ds.runner.open.trained import find_model, open_model, self_contained
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.runner.start.build import build_data, build_processor, build_validation_data
from unigen_ds.system import dist
from unigen_ds.system.log import logger

_SECTIONS = ("model", "tokenizer", "processor", "train_dataloader", "val_dataloader", "optim_wrapper", "loss_weights",
             "randomness", "custom_imports")  # fmt: skip
_TRAINING = {"optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 0.0}}, "train_cfg": {"max_epochs": 1}}
"""Sections that ``Settings`` requires and an evaluation does not use."""


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
    generation = dict(generation or {})
    Answering.of(generation, where="generation")  # of the user, before those of the config
    directory, published, training = find_model(path, tag=tag, config=config, allow_custom_imports=allow_custom_imports)
    if config is None:  # a published directory has weights and sizes, and no training
        training = self_contained(training, directory) if published is None else published.config(directory)
    manifest = Manifest.read(directory) if published is None and (directory / FILE_NAME).is_file() else None
    settings = _settings_of(training, path, data, {"batch_size": batch_size, "seq_length": seq_length})
    if manifest is not None:
        settings = settings.settled(seed=int(manifest.loader["seed"]))
    answering = Answering.of(generation, where="generation")
    if answering.flow:  # before the model is read
        family_of(settings.model.cls).drawing_settings(None, answering.flow, where="generation.flow")
    built = build_metrics(metrics)
    averaged = manifest is not None and bool(manifest.files_in(EMA))
    if ema and not averaged:
        raise ConfigError(f"{path} has no average of the weights (EMA)", remedy="leave out --ema")
    model, _ = open_model(
        path, raw=not ema, tag=tag, config=config, allow_custom_imports=allow_custom_imports, base=base
    )
    if averaged and dist.is_main():
        raw = "the weights themselves; --ema evaluates their average, which tools/generate.py and tools/export.py use"
        logger().info("Evaluated: %s.", "the average of the weights (--ema)" if ema else raw)
    sets = _validation_data(settings, manifest)
    precision = settled_precision(
        settings.optim_wrapper.precision, None if manifest is None else manifest.topology.get("precision")
    )
    engine = WholeModel(model, precision=precision)
    validation = [Validation(one, settings.term_weights) for one in sets]
    check(built, engine, validation, answering=answering)
    update = "" if manifest is None else f" (update {manifest.progress.updates})"
    return score(
        engine, validation, built, checkpoint=f"{directory}{update}{' EMA' if ema else ''}", max_batches=max_batches,
        max_samples=max_samples, answering=answering, made_by={"precision": engine.precision},
    )  # fmt: skip


def _settings_of(training: Mapping[str, Any], path: Path, data: str | None, own: Mapping[str, int | None]) -> Settings:
    """The sections that an evaluation uses, with ``own`` keys of each set."""
    section = dict(training.get("val_dataloader") or {})
    loaders = {"": section}
    if ValDataloader.is_several(section):
        loaders = {name: dict(one) for name, one in section.items() if one is not None}
    if data is not None:  # the first data set that reads a file reads this one, with its filters; else the usual one
        first = next(iter(loaders.values()), {})
        dataset: dict[str, Any] = {"type": "UnifiedGenerationDataset"}
        sources = [one.get("dataset") or () for one in (first, training.get("train_dataloader") or {})]
        members = [member for one in sources for member in ([one] if isinstance(one, Mapping) else one)]
        if reader := next((member for member in members if "data_path" in member), None):
            dataset = {key: value for key, value in reader.items() if key not in ("name", "format", "num_used_data")}
        kept = {key: value for key, value in first.items() if key != "split"}
        loaders = {"": {**kept, "dataset": {**dataset, "data_path": data}}}
    if not loaders or not all(loaders.values()):
        raise ConfigError(
            f"no data is named on which {path} is to be evaluated",
            remedy="--data FILE, or --config with a config that has val_dataloader",
        )
    stated = {key: value for key, value in own.items() if value is not None}
    loaders = {name: {**loader, **stated} for name, loader in loaders.items()}
    sections = {**_TRAINING, **{key: training[key] for key in _SECTIONS if training.get(key) is not None}}
    sections["val_dataloader"] = loaders.get("", loaders)
    first = next(iter(loaders.values()))
    sections.setdefault("train_dataloader", {"batch_size": 1, "dataset": first.get("dataset")})
    return Settings.from_config(sections)


def _validation_data(settings: Settings, manifest: Manifest | None) -> Sequence[ValidationData]:
    """The data of each set, as the run of ``manifest`` has them."""
    geometry = Geometry(settings.train_dataloader.batch_size or 1) if manifest is None else manifest.geometry
    if settings.val_dataloader is not None and settings.val_dataloader.divided is not None:
        sets = build_data(settings, geometry=geometry, ruler=manifest.ruler if manifest else None).validation
    else:  # the training data are not needed, and may not be there
        processor = build_processor(settings, seed=settings.seed)
        sets = build_validation_data(settings, processor, [], geometry=geometry)
    for one in sets:
        check_overflow(one.fitted, one.names)
        for line in one.start_lines() if dist.is_main() else ():
            logger().info("%s", line)
    return sets
