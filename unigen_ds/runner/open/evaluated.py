"""Evaluate a checkpoint of any engine, files of weights or a published directory on validation data.

In: what ``open_model`` reads, and the ``val_dataloader`` of a config. Out: ``val/loss`` with its parts, as
``EvaluateHook`` computes them, and further metrics, each with its provenance. With several processes each has the whole
model and its share of the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unigen_ds.checkpoint.foreign import locate
from unigen_ds.checkpoint.manifest import FILE_NAME, Manifest
from unigen_ds.config.hub import folder_of
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.progress import Geometry
from unigen_ds.core.shards import EMA
from unigen_ds.data.datasets.overflow import check_overflow
from unigen_ds.data.samples.sample import check_rules
from unigen_ds.data.settings import ValDataloader
from unigen_ds.evaluation.generation import Answering
from unigen_ds.evaluation.metrics import build_metrics
from unigen_ds.evaluation.scoring import Evaluation, check
from unigen_ds.evaluation.scoring import evaluate as score
from unigen_ds.evaluation.validation import Validation
from unigen_ds.families.directories import published_format
from unigen_ds.optim.optimizer import COMPUTE_DTYPE, settled_precision
from unigen_ds.runner.open.trained import config_of, import_stored, open_model, self_contained
from unigen_ds.runner.settings.custom_imports import import_custom
from unigen_ds.runner.settings.family_settings import family_of_model
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.runner.start.build import build_data, build_processor, build_validation, build_validation_data
from unigen_ds.system import dist
from unigen_ds.system.files import check_digests
from unigen_ds.system.log import logger

_SECTIONS = ("model", "tokenizer", "processor", "train_dataloader", "val_dataloader", "optim_wrapper", "loss_weights",
             "randomness", "custom_imports")  # fmt: skip
_TRAINING = {"optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 0.0}}, "train_cfg": {"max_epochs": 1}}
"""Sections that ``Settings`` requires and an evaluation does not use."""


@dataclass(frozen=True)
class EvaluationSubject:
    """What is evaluated, and how.

    Args:
        path: a checkpoint, a work dir, files of weights, or a published directory.
        config: of the training; None: the checkpoint's own.
        data: a file of records instead of ``val_dataloader``'s data.
        batch_size: sequences of a forward pass on each process; None: that of ``val_dataloader``.
        seq_length: tokens of a sequence at most; None: that of ``val_dataloader``.
        max_batches, metrics: as of ``EvaluateHook``.
        max_samples, generation: as of ``EvaluateHook``; what is not given is that of the config's hook.
        ema: the average of the weights instead of the weights.
        tag: name of the checkpoint's folder below ``path``.
        allow_custom_imports, base: as of ``open_model``.
    """

    path: Path
    config: Mapping[str, Any] | None = None
    data: str | None = None
    batch_size: int | None = None
    seq_length: int | None = None
    max_batches: int | None = None
    metrics: Sequence[Mapping[str, Any]] = ()
    max_samples: int | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    ema: bool = False
    tag: str | None = None
    allow_custom_imports: bool = False
    base: str | None = None

    @cached_property
    def directory(self) -> Path:
        """The folder or the file that ``path`` means."""
        return self.path if self.published is not None else locate(self.path, self.tag)

    @cached_property
    def manifest(self) -> Manifest | None:
        """Of the checkpoint, where it is one of this project."""
        if self.published is not None:
            return None
        return Manifest.read(self.directory) if (self.directory / FILE_NAME).is_file() else None

    @cached_property
    def published(self) -> Any:
        """The format of a published directory, which has weights and sizes but no training."""
        found = published_format(self.path, complete=self.config is not None)
        if found is None or not found.pretrained:
            return None
        check_digests(self.path)
        return found

    @property
    def name(self) -> str:
        """What the provenance calls it."""
        update = "" if self.manifest is None else f" (update {self.manifest.progress.updates})"
        return f"{self.directory}{update}{' EMA' if self.ema else ''}"

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", folder_of(self.path, where="MODEL"))

    @cached_property
    def _training_config(self) -> dict[str, Any]:
        """The config of the training."""
        if self.config is not None:
            return dict(self.config)
        if self.published is not None:
            return dict(self.published.config(self.path))
        return dict(self_contained(config_of(self.directory), self.directory))

    def as_the_hook(self) -> EvaluationSubject:
        """The same with the answers of the config's ``EvaluateHook`` for metrics, where nothing else is given."""
        hooks = (
            *(self._training_config.get("custom_hooks") or ()),
            *dict(self._training_config.get("default_hooks") or {}).values(),
        )
        kinds = [(one, str(one.get("type")).rpartition(".")[2]) for one in hooks if isinstance(one, Mapping)]
        hook = next((one for one, kind in kinds if kind == "EvaluateHook"), None)
        if not self.metrics or hook is None:
            return self
        own, given = dict(hook.get("generation") or {}), dict(self.generation)
        flow = {**(own.get("flow") or {}), **(given.get("flow") or {})}
        generation = {**own, **given, **({"flow": flow} if flow else {})}
        max_samples = self.max_samples
        if max_samples is None and self.max_batches is None:
            max_samples = hook.get("max_samples")
            if max_samples is None and hook.get("max_batches") is not None:
                sets = self.settings.val_dataloader.sets.values() if self.settings.val_dataloader else ()
                sizes = {one.batch_size or 1 for one in sets}
                max_samples = hook["max_batches"] * sizes.pop() if len(sizes) == 1 else None  # else: not one number
        if dist.is_main() and (generation != given or max_samples != self.max_samples):
            logger().info(
                "Answers as those of the config's EvaluateHook: generation %s, max_samples %s (--generation and"
                " --max-samples change them).", generation, max_samples,
            )  # fmt: skip
        return replace(self, generation=generation, max_samples=max_samples)

    @cached_property
    def settings(self) -> Settings:
        """The sections that an evaluation uses. Raises ``ConfigError`` where no data to evaluate on is named."""
        given = self._training_config
        wanted = {**_TRAINING, **{key: given[key] for key in _SECTIONS if given.get(key) is not None}}
        loaders = self._loaders(given)
        wanted["val_dataloader"] = loaders.get("", loaders)
        first = next(iter(loaders.values()))
        wanted.setdefault("train_dataloader", {"batch_size": 1, "dataset": first.get("dataset")})
        found = Settings.from_config(wanted)
        return found if self.manifest is None else found.with_seed(int(self.manifest.loader["seed"]))

    def _loaders(self, given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The section of each set, by its name."""
        section = dict(given.get("val_dataloader") or {})
        loaders = {"": section}
        if ValDataloader.is_several(section):
            loaders = {name: dict(one) for name, one in section.items() if one is not None}
        if self.data is not None:
            first = next(iter(loaders.values()), {})
            data = _with_path(self.data, first, given.get("train_dataloader") or {})
            loaders = {"": {**{key: value for key, value in first.items() if key != "split"}, "dataset": data}}
        if not loaders or not all(loaders.values()):
            raise ConfigError(
                f"no data is named on which {self.path} is to be evaluated",
                remedy="--data FILE, or --config with a config that has val_dataloader",
            )
        own = {"batch_size": self.batch_size, "seq_length": self.seq_length}
        own = {key: value for key, value in own.items() if value is not None}
        return {name: {**loader, **own} for name, loader in loaders.items()}

    def import_modules(self) -> None:
        """Those of ``custom_imports``: they may register the format and metrics. Raises as ``open_model`` does."""
        if self.config is not None:
            import_custom(self.config)
        elif self.published is None:
            import_stored(config_of(self.directory), self.directory, allow=self.allow_custom_imports)

    def open(self) -> tuple[WholeModel, list[Validation]]:
        """The model on this process's device, in the precision of the training, and the data. Not collective."""
        averaged = self.manifest is not None and bool(self.manifest.files_in(EMA))
        if self.ema and not averaged:
            raise ConfigError(f"{self.path} has no average of the weights (EMA)", remedy="leave out --ema")
        model, _ = open_model(
            self.path,
            raw=not self.ema,
            tag=self.tag,
            config=self.config,
            allow_custom_imports=self.allow_custom_imports,
            base=self.base,
        )
        if averaged and dist.is_main():
            raw = (
                "the weights themselves; --ema evaluates their average, which tools/generate.py and tools/export.py use"
            )
            logger().info("Evaluated: %s.", "the average of the weights (--ema)" if self.ema else raw)
        settings, manifest = self.settings, self.manifest
        if manifest is not None:
            check_rules(manifest.loader["facts"])
        geometry = Geometry(settings.train_dataloader.batch_size or 1) if manifest is None else manifest.geometry
        assert settings.val_dataloader is not None
        if settings.val_dataloader.divided is not None:
            data = build_data(settings, geometry=geometry, ruler=manifest.ruler if manifest else None).validation
        else:  # the training data are not needed, and may not be there
            processor = build_processor(settings, seed=settings.seed)
            data = build_validation_data(settings, processor, [], geometry=geometry)
        for one in data:
            check_overflow(one.fitted, one.names)
            for line in one.start_lines() if dist.is_main() else ():
                logger().info("%s", line)
        stored = None if self.manifest is None else self.manifest.topology.get("precision")
        precision = settled_precision(settings.optim_wrapper.precision, stored)
        return WholeModel(model, precision=precision), build_validation(settings, data)


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


def _with_path(data: str, *loaders: Mapping[str, Any]) -> dict[str, Any]:
    """The first data set of the loaders that reads a file, reading all of ``data``, with its filters; else the usual
    one.
    """
    for loader in loaders:
        sources = loader.get("dataset") or ()
        for source in [sources] if isinstance(sources, Mapping) else sources:
            if "data_path" in source:
                kept = {key: value for key, value in source.items() if key not in ("name", "format", "num_used_data")}
                return {**kept, "data_path": data}
    return {"type": "UnifiedGenerationDataset", "data_path": data}


def evaluate(given: EvaluationSubject) -> Evaluation:
    """Losses and metrics on the validation data. Collective. A metric that fails loses no other value.

    Raises what ``open_model`` raises, and ``ConfigError`` or ``DataError`` where the data or a metric cannot be used.
    """
    Answering.of(given.generation, where="generation")  # of the user, before those of the config
    given.import_modules()
    given = given.as_the_hook()
    answering = Answering.of(given.generation, where="generation")
    if answering.flow:  # before the model is read
        family_of_model(given.settings.model.cls).drawing_settings(None, answering.flow, where="generation.flow")
    metrics = build_metrics(given.metrics)
    engine, sets = given.open()
    check(metrics, engine, sets, answering=answering)
    return score(
        engine, sets, metrics, checkpoint=given.name, max_batches=given.max_batches,
        max_samples=given.max_samples, answering=answering, made_by={"precision": engine.precision},
    )  # fmt: skip
