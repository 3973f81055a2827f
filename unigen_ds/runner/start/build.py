"""Settings -> objects, one function for each part: the only module that names concrete classes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from unigen_ds.backends.base import Backend
from unigen_ds.checkpoint.saver import states_text
from unigen_ds.config.hub import folder_of
from unigen_ds.config.section import Component
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.core.progress import Duration, Geometry, Ruler, split_global_batch
from unigen_ds.data.batches.loader import MicroBatch, UpdateLoader
from unigen_ds.data.batches.stream import SequenceStream
from unigen_ds.data.batches.validation_data import ValidationData
from unigen_ds.data.datasets.dataset import check_readable, source_names
from unigen_ds.data.datasets.groups import blend
from unigen_ds.data.datasets.overflow import FittedSource, Overflow, check_overflow
from unigen_ds.data.datasets.streamed_units import check_streamed, fit_source
from unigen_ds.data.datasets.subset import Division, apply_filters, divide, first_records
from unigen_ds.data.order.order import Cursor, GlobalOrder
from unigen_ds.data.settings import TrainDataloader, ValDataloader
from unigen_ds.evaluation.scoring import Validation
from unigen_ds.families.base import family_of
from unigen_ds.hooks.base import Hook
from unigen_ds.hooks.evaluate.evaluate import EvaluateHook
from unigen_ds.hooks.guard.time_limit import TimeLimitHook
from unigen_ds.hooks.log.journal import LedgerHook, SkippedSamplesHook, TimelineHook
from unigen_ds.hooks.mmengine import with_runtime_info
from unigen_ds.hooks.save.best import BestHook
from unigen_ds.models.lora import adapter_record, add_adapters, base_tensors, hold_base_in
from unigen_ds.optim.optimizer import COMPUTE_DTYPE, OptimizerConfig, ParamGroup, settled_precision
from unigen_ds.optim.param_groups import build_param_groups
from unigen_ds.resume.geometry import keep_batch
from unigen_ds.runner.settings.family_settings import check_kind
from unigen_ds.runner.settings.tree import ModelSettings, Settings
from unigen_ds.system.log import logger, notice


def build_geometry(settings: Settings, *, dp_size: int) -> Geometry:
    meant = settings.world_size
    if settings.on_batch_change == "keep-batch" and meant not in (None, dp_size):
        geometry = build_geometry(settings, dp_size=meant)
        return keep_batch(geometry.global_batch_size, dp_size, most=geometry.batch_size)
    loader, counts = settings.train_dataloader, settings.optim_wrapper.accumulative_counts
    if loader.global_batch_size is None:
        assert loader.batch_size is not None, "checked with the settings"
        return Geometry(loader.batch_size, counts, dp_size)
    return split_global_batch(
        loader.global_batch_size, accumulative_counts=counts, dp_size=dp_size, batch_size=loader.batch_size
    )


@dataclass(frozen=True)
class SkippedSource:
    """A data set that is left out (``on_error='skip'``)."""

    name: str
    """Its name, or the path that the config has."""
    why: str
    group: str | None = None


def build_sources(
    components: Sequence[Component], processor: Any, *, again: bool = True
) -> tuple[list[Any], list[SkippedSource]]:
    """The data sets, and what is left out: one with ``on_error='skip'`` that cannot be opened or read, with a warning.

    A source that comes back is a change of the data. ``again``: try once more what could not be used earlier, which on
    a resume would be other data. Raises ``DataError`` where none is left, ``ConfigError`` with a data set's path.
    """
    datasets, skips = [], list[SkippedSource]()
    for component in components:
        try:
            dataset = component.build(processor=processor)
            if again and hasattr(dataset, "forget_mended") and dataset.forget_mended():
                dataset = component.build(processor=processor)
            dataset = apply_filters(first_records(dataset))
            if component.arguments.get("on_error") == "skip":
                check_readable([dataset], [dataset.name])
            datasets.append(dataset)
        except ConfigError as error:
            raise error.at(component.where) from error
        except DataError as error:
            if component.arguments.get("on_error") != "skip":
                raise
            name = component.arguments.get("name") or component.arguments.get("data_path")
            skips.append(SkippedSource(str(name), str(error), component.arguments.get("group")))
            logger().warning("data set %s is skipped (on_error='skip'): %s", name, error)
    if len(datasets) < len(components):
        count = len(components) - len(datasets)
        if not datasets:
            raise DataError(f"No valid datasets were loaded: all {count} were skipped", remedy="see the warnings above")
        logger().warning("%d of %d data sets are skipped, %d are used", count, len(components), len(datasets))
    return datasets, skips


@dataclass(frozen=True)
class Data:
    processor: Any
    """What ``Family.processor`` has made."""
    stream: SequenceStream
    validation: Validation
    """False where the config has none."""
    skipped_sources: Sequence[SkippedSource] = ()

    @property
    def parts(self) -> list[Any]:
        """The training data and, if any, the validation data; each has ``fitted_sources`` and ``names``."""
        return [self.stream, self.validation] if self.validation else [self.stream]


def build_data(settings: Settings, *, geometry: Geometry, ruler: Ruler | None) -> Data:
    """Tokenizer, processor, data sets, order, packer, stream. ``ruler``: stored on a resume, it fixes the epoch."""
    loader, seed = settings.train_dataloader, settings.seed
    processor = build_processor(settings, seed=seed)
    again = ruler is None or settings.on_data_change == "restart"
    datasets, skips = build_sources(loader.dataset, processor, again=again)
    held_out: list[Any] = []
    share, seed_of_share = settings.val_dataloader.division if settings.val_dataloader else (None, None)
    if share is not None:
        datasets, held_out = divide(datasets, Division(share, seed if seed_of_share is None else seed_of_share))
    overflow = Overflow(loader.seq_length, loader.overflow)
    if loader.max_sample_tokens is not None:
        overflow = replace(overflow, seq_length=loader.max_sample_tokens, key="max_sample_tokens")
    sources = [fit_source(dataset, overflow) for dataset in datasets]
    if not all(map(len, sources)):  # else the start refuses, and tools/inspect_data.py shows the numbers
        check_overflow(sources, source_names(datasets))
    packer = None if loader.packing is None else loader.packing.build()
    sizes = [len(source) for source in sources]
    mixture = blend(datasets, sizes, loader.groups, skips=[(one.name, one.group) for one in skips])
    stream = SequenceStream(
        datasets,
        GlobalOrder(sizes, mixture.weights, seed=seed, mandatory=mixture.mandatory),
        packer=packer,
        seq_length=loader.seq_length,
        overflow=overflow,
        drop_last=loader.drop_last,
        sequences_per_iteration=(ruler.geometry if ruler else geometry).sequences_per_iteration,
        sequences_per_epoch=ruler.sequences_per_epoch if ruler else None,
        blend=mixture,
    )
    validation = build_validation(settings, processor, held_out, geometry=geometry, again=again)
    return Data(processor, stream, validation, skips)


def build_validation(
    settings: Settings, processor: Any, held_out: Sequence[Any], *, geometry: Geometry, again: bool = True
) -> Validation:
    """What ``val_dataloader`` names: data sets of its own, or the share ``held_out`` of the training's."""
    training = settings.train_dataloader

    def build(loader: ValDataloader) -> ValidationData:
        datasets = build_sources(loader.dataset, processor, again=again)[0] or held_out
        check_streamed(datasets, what="val_dataloader.dataset")
        members = [(name, one) for name, one in zip(source_names(datasets), datasets, strict=True) if len(one)]
        seq_length = training.seq_length if loader.seq_length is None else loader.seq_length
        overflow = Overflow(seq_length, loader.overflow or training.overflow)
        return ValidationData(
            [FittedSource(dataset, overflow) for _, dataset in members],
            [name for name, _ in members],
            processor=processor,
            seed=settings.seed if loader.seed is None else loader.seed,
            batch_size=loader.batch_size or geometry.batch_size,
            num_workers=training.num_workers if loader.num_workers is None else loader.num_workers,
            prefetch_factor=loader.prefetch_factor,
            pin_memory=torch.cuda.is_available() if loader.pin_memory is None else loader.pin_memory,
            timeout=loader.timeout,
        )

    return Validation(settings.val_dataloader, build, settings.term_weights)


def build_processor(settings: ModelSettings, *, seed: int) -> Any:
    """The tokenizer and the family's processor; every size that the model determines is read from the model."""
    tokenizer = None if settings.tokenizer is None else settings.tokenizer.build()
    family, spec = family_of(settings.model.cls), locate_pretrained(settings.model)
    return family.processor(spec, dict(settings.processor), tokenizer=tokenizer, seed=seed)


def locate_pretrained(model: Component) -> Mapping[str, Any]:
    """``model`` with folders for the hub's names in ``pretrained``. Raises ``ConfigError`` for another family's."""
    spec, where = model.spec, "model.pretrained"
    pretrained = spec.get("pretrained")
    if isinstance(pretrained, str):
        folder = folder_of(pretrained, where=where)
        check_kind(model.cls, folder)
        return {**spec, "pretrained": str(folder)}
    if not isinstance(pretrained, Mapping):
        return spec
    parts = {
        part: str(folder_of(path, where=f"{where}.{part}")) if isinstance(path, str) else path
        for part, path in pretrained.items()
    }
    return {**spec, "pretrained": parts}


def total_sequences(limits: Sequence[Duration], geometry: Geometry, tokens_per_sequence: float) -> float:
    """Sequences until the first limit; for a limit in tokens an estimate from the mean length."""
    total = min(limit.value / tokens_per_sequence if limit.unit == "token" else limit.value for limit in limits)
    if total < geometry.global_batch_size:
        raise ConfigError(
            f"train_cfg ends after {total:g} sequences, before the first update of {geometry} sequences",
            remedy="train for longer, or with a smaller effective batch",
        )
    return math.floor(total)


def build_model(settings: ModelSettings, processor: Any, *, seed: int, stream: bool = False) -> nn.Module:
    """The model on the CPU in fp32, with adapters: the same weights on every rank and for every number of processes.

    ``stream``: on the meta device where ``initial_weights`` reads published ones; whole first if it is quantised.
    """
    spec, tokenizer = locate_pretrained(settings.model), getattr(processor, "tokenizer", None)
    kind = settings.model.cls
    torch.manual_seed(seed)
    packed = spec.get("quantize") or (settings.lora is not None and settings.lora.quantize)
    stream = stream and bool(spec.get("pretrained")) and not packed and hasattr(kind, "initial_weights")
    with torch.device("meta") if stream else nullcontext():
        model = family_of(kind).build(spec, vocab_size=None if tokenizer is None else len(tokenizer))
    connect(model, processor)
    if settings.lora is not None:
        add_adapters(model, settings.lora, seed=seed)
    return model


def connect(model: Any, processor: Any) -> None:
    """Let each know what it needs of the other."""
    if getattr(processor, "vocab_size", 0) is None:
        processor.vocab_size = getattr(model, "vocab_size", None)
    if use_processor := getattr(model, "use_processor", None):
        use_processor(processor)


def build_groups(settings: Settings, pairs: Iterable[tuple[str, nn.Parameter]]) -> list[ParamGroup]:
    wrapper = settings.optim_wrapper
    return build_param_groups(pairs, wrapper.optimizer, wrapper.paramwise_cfg)


def build_optimizer_config(settings: Settings) -> OptimizerConfig:
    """How an update is computed. AdamW is fused unless the config sets another kernel."""
    wrapper = settings.optim_wrapper
    return OptimizerConfig(
        type=wrapper.optimizer.type,
        arguments=wrapper.optimizer.arguments,
        adamw=wrapper.optimizer.adamw.arguments if wrapper.optimizer.adamw else {},
        max_norm=wrapper.clip_grad.max_norm,
        precision=settled_precision(wrapper.precision),
        loss_scale=wrapper.loss_scale.arguments,
    )


def prepare_engine(settings: Settings, backend: Backend, model: nn.Module, groups: Sequence[ParamGroup]) -> None:
    """Pass the model to the engine; of adapters the base is held in the precision that is computed in."""
    backend.left_out = base_tensors(model)
    if adapter_record(model) is not None:
        hold_base_in(model, COMPUTE_DTYPE[settled_precision(settings.optim_wrapper.precision)])
    backend.prepare(model, groups)


def build_hooks(settings: Settings) -> list[Hook]:
    """Default hooks (the config's arguments, or another ``type``, replace the default's), then the user's."""
    hooks: list[Hook] = []
    for name, component in settings.default_hooks.items():
        if component is None:
            continue
        extra: dict[str, Any] = {}
        if name == "logger":
            extra["writers"] = [writer.build() for writer in settings.visualizer.vis_backends]
            extra |= {"run_name": settings.run_name} if settings.run_name else {}
        hooks.append(component.build(**extra))
    hooks += [LedgerHook(), TimelineHook(), TimeLimitHook(settings.train_cfg.max_time)]
    hooks.append(SkippedSamplesHook(max_skipped_fraction=settings.train_dataloader.max_skipped_fraction))
    hooks += [component.build() for component in settings.custom_hooks]
    evaluating = [hook for hook in hooks if isinstance(hook, EvaluateHook)]
    if settings.val_dataloader is not None and not evaluating:
        notice("val_dataloader is evaluated after every epoch: EvaluateHook in custom_hooks sets another interval.")
        hooks.append(EvaluateHook())
    hooks += [BestHook(hook.save_best, rule=hook.rule) for hook in evaluating if hook.save_best is not None]
    hooks = with_runtime_info(hooks)
    own = (Hook.state_dict, ())
    with_state = [hook for hook in hooks if hook.name or (type(hook).state_dict, hook.state_attributes) != own]
    names = [hook.name or "a hook with a state and no name" for hook in with_state]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"hooks named twice: {', '.join(twice)}",
            allowed="each once; one EvaluateHook has the interval, save_best and all metrics with their interval",
        )
    return hooks


def check_states(hooks: Sequence[Hook]) -> None:
    """Refuse a hook whose state no checkpoint can store, before the first update. Raises ``ConfigError``."""
    states: dict[str, Any] = {}
    for hook in hooks:
        with suppress(Exception):  # it may work after an update: left to the first save
            states[hook.name or type(hook).__name__] = hook.state_dict()
    states_text(states)


def build_loader(
    settings: TrainDataloader, data: Data, *, geometry: Geometry, dp_rank: int, cursor: Cursor, workers: bool = True
) -> UpdateLoader:
    """Micro-batches of one rank from ``cursor`` on. Without ``workers`` each is made when it is requested."""
    return UpdateLoader(
        data.stream,
        processor=data.processor,
        geometry=geometry,
        dp_rank=dp_rank,
        cursor=cursor,
        num_workers=settings.num_workers if workers else 0,
        prefetch_factor=settings.prefetch_factor if workers else None,
        pin_memory=torch.cuda.is_available() if settings.pin_memory is None else settings.pin_memory,
        timeout=settings.timeout,
    )


def read_sequences(settings: Settings, data: Data, first: int, stop: int) -> list[MicroBatch]:
    """The sequences ``first:stop`` of a run as its loader makes them, each in a micro-batch of its own."""
    cursor, section = data.stream.seek(first), settings.train_dataloader
    loader = build_loader(section, data, geometry=Geometry(1), dp_rank=0, cursor=cursor, workers=False)
    batches = [batch for (batch,) in takewhile(lambda pair: pair[0].cursor.sequences <= stop, loader)]
    loader.close()
    return batches


def parameter_table(pairs: Sequence[tuple[str, nn.Parameter]], groups: Sequence[ParamGroup]) -> list[dict[str, Any]]:
    """Name, shape, dtype, trainable, group and further (tied) names of every parameter, for the manifest."""
    group_of = {name: group.name for group in groups for name in group.parameters}
    names: dict[int, list[str]] = {}
    for name, parameter in pairs:
        names.setdefault(id(parameter), []).append(name)
    return [
        {
            "name": name,
            "shape": list(getattr(parameter, "ds_shape", parameter.shape)),
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "trainable": parameter.requires_grad,
            "group": group_of.get(name),
            "tied": names[id(parameter)][1:],
        }
        for name, parameter in pairs
        if names[id(parameter)][0] == name
    ]
