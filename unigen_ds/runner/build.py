"""Config -> objects, one function a piece: the only room that names concrete classes. In: a ``load_config`` result."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from unigen_ds.backends import deepspeed as _deepspeed  # noqa: F401
from unigen_ds.backends import fsdp as _fsdp  # noqa: F401 - registers itself
from unigen_ds.backends import single as _single  # noqa: F401
from unigen_ds.backends.base import Backend
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core.choices import BATCH_CHOICES
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.optim import (
    OptimizerConfig,
    ParamGroup,
    build_torch_optimizer,
    default_fused,
    element_wise,
    optimizer_arguments,
)
from unigen_ds.core.optimizer_state import state_of
from unigen_ds.core.progress import Duration, Geometry, Ruler, split_global_batch
from unigen_ds.core.registry import DATASETS, HOOKS, MODELS, PACKERS, TOKENIZERS, build, find, resolve
from unigen_ds.data import augment as _augment  # noqa: F401
from unigen_ds.data import packing as _packing  # noqa: F401
from unigen_ds.data import tokenizers as _tokenizers  # noqa: F401
from unigen_ds.data.datasets import dataset_weights, source_names
from unigen_ds.data.loader import UpdateLoader
from unigen_ds.data.order import GlobalOrder
from unigen_ds.data.overflow import Fitted, Overflow, check_overflow
from unigen_ds.data.rules import CURRENT, DataRules
from unigen_ds.data.stream import Cursor, SequenceStream
from unigen_ds.families.bagel.family import Bagel
from unigen_ds.families.base import Family, family_of
from unigen_ds.families.decoder_lm import family as _decoder_lm  # noqa: F401
from unigen_ds.families.nanovlm import family as _nanovlm  # noqa: F401
from unigen_ds.hooks import ema as _ema  # noqa: F401
from unigen_ds.hooks.base import Hook
from unigen_ds.hooks.checkpoint import CheckpointHook
from unigen_ds.hooks.continuity import ContinuityHook
from unigen_ds.hooks.ledger import LedgerHook
from unigen_ds.hooks.logger import LoggerHook
from unigen_ds.hooks.nan_guard import NanGuardHook
from unigen_ds.hooks.signals import SignalHook
from unigen_ds.hooks.skipped import SkippedSamplesHook
from unigen_ds.hooks.timer import IterTimerHook
from unigen_ds.optim.param_groups import build_param_groups
from unigen_ds.resume.geometry import check_choice, lr_factor
from unigen_ds.schedule.schedule import Schedules
from unigen_ds.tracking import tensorboard as _tensorboard  # noqa: F401
from unigen_ds.tracking import wandb as _wandb  # noqa: F401

DEFAULT_HOOKS: dict[str, type[Hook]] = {
    "timer": IterTimerHook,
    "nan_guard": NanGuardHook,
    "signals": SignalHook,
    "continuity": ContinuityHook,
    "checkpoint": CheckpointHook,
    "logger": LoggerHook,
}
_LIMITS = {"max_epochs": "epoch", "max_iters": "iteration", "max_updates": "update", "max_tokens": "token"}


def custom_modules(config: Mapping[str, Any]) -> list[str]:
    """The modules of ``custom_imports``. Raises ``ConfigError`` where it names none."""
    given = config.get("custom_imports") or {}
    names = given.get("imports", ()) if isinstance(given, Mapping) else None
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"custom_imports is {given!r}", allowed="dict(imports=['my.module', ...])")
    return list(names)


def import_custom(config: Mapping[str, Any]) -> None:
    """``custom_imports=dict(imports=['my.module'])``: modules that register a user's own classes."""
    for name in custom_modules(config):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(f"custom_imports: {name!r} cannot be imported: {error}") from error


def build_geometry(config: Mapping[str, Any], backend: Backend) -> Geometry:
    """Sequences per device, accumulation and data-parallel ranks."""
    loader, counts = config["train_dataloader"], config["optim_wrapper"].get("accumulative_counts", 1)
    given, total = loader.get("batch_size"), loader.get("global_batch_size")
    if total is None:
        if given is None:
            raise ConfigError("train_dataloader has no batch_size", allowed="sequences per device per iteration")
        return Geometry(given, counts, backend.dp_size)
    return split_global_batch(total, accumulative_counts=counts, dp_size=backend.dp_size, batch_size=given)


@dataclass(frozen=True)
class Data:
    """The processor and the stream of sequences."""

    processor: Any
    """As of ``Family.processor``."""
    stream: SequenceStream


def build_data(
    config: Mapping[str, Any], *, geometry: Geometry, ruler: Ruler | None, rules: DataRules = CURRENT
) -> Data:
    """Tokenizer, processor, data sets, global order, packer, stream. ``ruler`` and ``rules`` are stored ones on a
    resume: they fix the epoch, and how records are read.
    """
    loader, seed = config["train_dataloader"], seed_of(config)
    processor = build_processor(config, seed=seed, rules=rules)
    specs = loader.get("dataset")
    specs = list(specs) if isinstance(specs, (list, tuple)) else [specs]
    datasets = [
        build(DATASETS, spec, where=f"train_dataloader.dataset[{i}]", processor=processor)
        for i, spec in enumerate(specs)
    ]
    overflow = Overflow(loader.get("seq_length", 4096), loader.get("overflow"), rules.overflow)
    fitted = [Fitted(dataset, overflow) for dataset in datasets]
    if not all(map(len, fitted)):  # else the start refuses, and tools/inspect_data.py shows the numbers
        check_overflow(fitted, source_names(datasets))
    packing = loader.get("packing")
    packer = build(PACKERS, packing, where="train_dataloader.packing") if packing else None
    stream = SequenceStream(
        datasets,
        GlobalOrder([len(source) for source in fitted], weights=dataset_weights(datasets), seed=seed),
        packer=packer,
        seq_length=overflow.seq_length,
        overflow=overflow,
        drop_last=loader.get("drop_last", True),
        sequences_per_iteration=(ruler.geometry if ruler else geometry).sequences_per_iteration,
        sequences_per_epoch=ruler.sequences_per_epoch if ruler else None,
        rules=rules,
    )
    return Data(processor, stream)


def rules_of(config: Mapping[str, Any], manifest: Manifest | None) -> DataRules:
    """The versions of the data rules that a run follows: those of its checkpoint.

    A config that sets ``overflow`` asks for the current rule: the change is then compared as any of the data is.
    """
    if manifest is None:
        return CURRENT
    stored = DataRules.stored(manifest.loader["facts"])
    given = config["train_dataloader"].get("overflow") is not None
    return replace(stored, overflow=CURRENT.overflow) if given else stored


def family_of_model(kind: type) -> Family:
    """The family of a model's class; a model that no family has learns from conversations, as a ``UnifiedModel``."""
    return family_of(kind) or Bagel()


def build_family(config: Mapping[str, Any]) -> Family:
    """That of ``model.type``."""
    return family_of_model(find(MODELS, config["model"], where="model"))


def build_processor(config: Mapping[str, Any], *, seed: int, rules: DataRules = CURRENT) -> Any:
    """The tokenizer and the family's processor, with every size that the model fixes taken from the model."""
    model, given = config["model"], config.get("tokenizer")
    resolve(MODELS, model, where="model")
    tokenizer = None if given is None else build(TOKENIZERS, given, where="tokenizer")
    section = dict(config.get("processor") or {})
    return build_family(config).processor(model, section, tokenizer=tokenizer, seed=seed, rules=rules)


def build_limits(train_cfg: Mapping[str, Any], ruler: Ruler) -> list[Duration]:
    """When training is complete, in data. Any of several limits ends it."""
    limits = [ruler.duration(train_cfg[key], unit) for key, unit in _LIMITS.items() if train_cfg.get(key) is not None]
    if not any(math.isfinite(limit.value) for limit in limits):
        raise ConfigError("train_cfg sets no limit", allowed=", ".join(_LIMITS))
    return limits


def total_sequences(limits: Sequence[Duration], geometry: Geometry, tokens_per_sequence: float) -> float:
    """Sequences until the first limit; for a limit in tokens an estimate from the mean length."""
    total = min(limit.value / tokens_per_sequence if limit.unit == "token" else limit.value for limit in limits)
    if total < geometry.global_batch_size:
        raise ConfigError(
            f"train_cfg ends after {total:g} sequences, before the first update of {geometry} sequences",
            remedy="train for longer, or with a smaller effective batch",
        )
    return math.floor(total)


def build_model(config: Mapping[str, Any], processor: Any, *, stream: bool = False) -> nn.Module:
    """The model on the CPU in fp32: the same weights on every rank and process count.

    ``stream``: on the meta device if its weights are published ones, which its ``initial_weights`` then reads. A model
    that is to be quantised is whole first.
    """
    spec, tokenizer = dict(config["model"]), getattr(processor, "tokenizer", None)
    torch.manual_seed(seed_of(config))
    kind = find(MODELS, spec, where="model")
    stream = stream and bool(spec.get("pretrained")) and not spec.get("quantize") and hasattr(kind, "initial_weights")
    with torch.device("meta") if stream else nullcontext():
        return family_of_model(kind).build(spec, vocab_size=None if tokenizer is None else len(tokenizer))


def build_groups(config: Mapping[str, Any], named: Iterable[tuple[str, nn.Parameter]]) -> list[ParamGroup]:
    """The parameter groups of a model's named parameters."""
    wrapper = config["optim_wrapper"]
    return build_param_groups(named, wrapper["optimizer"], wrapper.get("paramwise_cfg"))


def seed_of(config: Mapping[str, Any]) -> int:
    """``randomness.seed``: of the initial weights, the order of the data and every sample's randomness."""
    return int((config.get("randomness") or {}).get("seed", 0))


def recorded_fused(config: Mapping[str, Any], manifest: Manifest | None) -> bool | None:
    """``optim_wrapper.optimizer.fused`` for the manifest, where the config does not give it; None: no record.

    A new run uses torch's fused AdamW; a resumed one what it has always used, which without a record is not fused.
    """
    optimizer = config["optim_wrapper"]["optimizer"]
    if not default_fused(str(optimizer.get("type", "AdamW")), optimizer):
        return None
    if manifest is None:
        return True
    stored = ((manifest.config.get("optim_wrapper") or {}).get("optimizer") or {}).get("fused")
    return None if stored is None else bool(stored)


def build_optimizer_config(config: Mapping[str, Any], *, fused: bool | None = None) -> OptimizerConfig:
    """``fused``: ``recorded_fused``'s value."""
    wrapper = config["optim_wrapper"]
    if not wrapper.get("optimizer"):
        raise ConfigError("the config has no optim_wrapper.optimizer", allowed="dict(type='AdamW', lr=...)")
    arguments, adamw = optimizer_arguments(wrapper["optimizer"])
    found = OptimizerConfig(
        type=wrapper["optimizer"].get("type", "AdamW"),
        arguments=arguments,
        adamw=adamw,
        max_norm=(wrapper.get("clip_grad") or {}).get("max_norm"),
        precision=wrapper.get("precision", "fp32"),
        fused=bool(fused),
    )
    one = ParamGroup("default", lr=1.0, weight_decay=0.0, parameters=("one",))
    groups = [(one, [nn.Parameter(torch.zeros(1, 1))])]
    if not element_wise(found.type):
        rest = replace(one, name="adamw", parameters=("other",), by_adamw=True)
        groups.append((rest, [nn.Parameter(torch.zeros(1))]))
    build_torch_optimizer(found, groups)  # refuses arguments before processes join, and so does the next
    state_of(found)
    return found


def build_schedules(
    config: Mapping[str, Any],
    manifest: Manifest | None,
    groups: Sequence[ParamGroup],
    *,
    ruler: Ruler,
    total_sequences: float,
    global_batch_size: int,
) -> Schedules:
    """The config's curves. On a resume the stored ones, where the config is the one they came from; an edited config's
    own at the present progress. A change of the effective batch scales both as ``on_batch_change`` says.
    """
    base = [{"name": group.name, "lr": group.lr} for group in groups]
    given = Schedules.from_cfg(config.get("param_scheduler"), ruler=ruler, base=base, total_sequences=total_sequences)
    if manifest is None:
        return given
    stored = Schedules.from_state_dict(manifest.schedule)
    same = (stored.config, stored.base, stored.total_sequences) == (given.config, given.base, given.total_sequences)
    choice = check_choice("on_batch_change", config.get("on_batch_change", "refuse"), BATCH_CHOICES)
    factor = lr_factor(choice, was=manifest.geometry.global_batch_size, now=global_batch_size)
    return replace(stored if same else given, lr_scale=stored.lr_scale * factor)


def build_loss_weights(config: Mapping[str, Any]) -> dict[str, float]:
    """The weight of each term that has another than 1; ``components`` has checked them."""
    return dict(config.get("loss_weights") or {})


def build_hooks(config: Mapping[str, Any]) -> list[Hook]:
    """Default hooks (the config's arguments, or another ``type``, replace the default's; None removes one that may be
    missing), then the user's.
    """
    given = config.get("default_hooks") or {}
    hooks: list[Hook] = []
    for name, default in DEFAULT_HOOKS.items():
        spec = given.get(name, {})
        if spec is None and name != "logger":  # which keeps metrics.jsonl: every run has one
            continue
        extra = {"writers": (config.get("visualizer") or {}).get("vis_backends") or []} if name == "logger" else {}
        hooks.append(build(HOOKS, {"type": default, **(spec or {})}, where=f"default_hooks.{name}", **extra))
    limit = config["train_dataloader"].get("max_skipped_fraction", 0.01)
    hooks += [LedgerHook(), SkippedSamplesHook(max_skipped_fraction=limit)]
    hooks += [build(HOOKS, s, where=f"custom_hooks[{i}]") for i, s in enumerate(config.get("custom_hooks") or ())]
    names = [hook.name for hook in hooks if hook.name]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"hooks named twice: {', '.join(twice)}", remedy="each may appear once")
    return hooks


def build_loader(
    config: Mapping[str, Any], data: Data, *, geometry: Geometry, dp_rank: int, cursor: Cursor, workers: bool = True
) -> UpdateLoader:
    """Micro-batches of one rank from ``cursor`` on. Without ``workers`` they are made when they are asked for."""
    loader = config["train_dataloader"]
    return UpdateLoader(
        data.stream,
        processor=data.processor,
        geometry=geometry,
        dp_rank=dp_rank,
        cursor=cursor,
        num_workers=loader.get("num_workers", 0) if workers else 0,
        prefetch_factor=loader.get("prefetch_factor") if workers else None,
        pin_memory=loader.get("pin_memory", torch.cuda.is_available()),
        timeout=loader.get("timeout", 0),
    )


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Every parameter by every name that it has: tied ones come more than once."""
    return list(model.named_parameters(remove_duplicate=False))


def parameter_table(named: Sequence[tuple[str, nn.Parameter]], groups: Sequence[ParamGroup]) -> list[dict[str, Any]]:
    """Name, shape, dtype, trainable, group and further (tied) names of every parameter, for the manifest."""
    group_of = {name: group.name for group in groups for name in group.parameters}
    names: dict[int, list[str]] = {}
    for name, parameter in named:
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
        for name, parameter in named
        if names[id(parameter)][0] == name
    ]
