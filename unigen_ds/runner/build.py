"""Config -> objects: the only room that names concrete classes. In: a ``load_config`` result. Out: ``Parts``.

Order matters twice. What can be refused from files alone (keys, the checkpoint, the geometry, the data) is refused
before the model is built. The random generators are seeded just before the model, so initial weights depend on the
seed and on nothing that was built earlier.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from mmengine.config import Config
from torch import nn

from unigen_ds.backends import deepspeed as _deepspeed  # noqa: F401
from unigen_ds.backends import fsdp as _fsdp  # noqa: F401 - registers itself
from unigen_ds.backends import single as _single  # noqa: F401
from unigen_ds.backends.base import Backend
from unigen_ds.core import dist, log
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.optim import OptimizerConfig, ParamGroup
from unigen_ds.core.progress import Duration, Geometry, Ruler, split_global_batch
from unigen_ds.core.registry import BACKENDS, DATASETS, HOOKS, MODELS, PACKERS, TOKENIZERS, TRANSFORMS, build
from unigen_ds.core.seeding import seed_everything
from unigen_ds.data import augment as _augment  # noqa: F401
from unigen_ds.data import digits as _digits  # noqa: F401
from unigen_ds.data import packing as _packing  # noqa: F401
from unigen_ds.data import tokenizers as _tokenizers  # noqa: F401
from unigen_ds.data.datasets import dataset_weights
from unigen_ds.data.loader import UpdateLoader
from unigen_ds.data.order import GlobalOrder
from unigen_ds.data.processor import UnifiedProcessor
from unigen_ds.data.stream import Cursor, SequenceStream
from unigen_ds.hooks import checkpoint as _checkpoint  # noqa: F401
from unigen_ds.hooks import digits_report as _digits_report  # noqa: F401
from unigen_ds.hooks import ema as _ema  # noqa: F401
from unigen_ds.hooks import writers as _writers  # noqa: F401
from unigen_ds.hooks.base import Hook
from unigen_ds.hooks.ledger import LedgerHook
from unigen_ds.hooks.logger import LoggerHook
from unigen_ds.hooks.nan_guard import NanGuardHook
from unigen_ds.hooks.signals import SignalHook
from unigen_ds.hooks.skipped import SkippedSamplesHook
from unigen_ds.hooks.timer import IterTimerHook
from unigen_ds.models import unified as _unified  # noqa: F401
from unigen_ds.optim.param_groups import build_param_groups
from unigen_ds.resume.plan import ResumePlan, check_unchanged, plan_resume
from unigen_ds.runner.parts import Parts
from unigen_ds.schedule.schedule import Schedules

_REQUIRED = ("model", "tokenizer", "train_dataloader", "optim_wrapper", "train_cfg")
_LIMITS = {"max_epochs": "epoch", "max_iters": "iteration", "max_updates": "update", "max_tokens": "token"}


def build_parts(config: Any, *, max_updates: int | None = None) -> Parts:
    """Build everything. Raises ``ConfigError``, ``DataError``, ``CheckpointError`` or ``ResumeBlocked``."""
    missing = [key for key in _REQUIRED if config.get(key) is None]
    if missing:
        raise ConfigError(f"the config has no {', '.join(missing)}", remedy="see docs/configs.md for the shape")
    import_custom(config)
    dist.launcher_environment(config.get("launcher", "none"))
    backend: Backend = build(BACKENDS, config.get("backend") or {"type": "single"}, where="backend")
    geometry, optimizer_cfg = build_geometry(config, backend), build_optimizer_config(config)
    backend.check(geometry=geometry, optimizer_cfg=optimizer_cfg)
    dist.init(timeout_s=(config.get("env") or {}).get("dist_timeout_s", 1800.0))
    plan = open_run(config)
    seed = int((config.get("randomness") or {}).get("seed", 0))
    manifest = plan.manifest if plan.mode == "resume" else None
    data = build_data(config, seed=seed, geometry=geometry, ruler=manifest.ruler if manifest else None)
    identity = {"seed": seed, "fingerprint": data.stream.fingerprint, "facts": data.stream.facts}
    if manifest:
        check_unchanged(manifest, geometry=geometry, data=identity)
    ruler = manifest.ruler if manifest else Ruler(geometry, data.stream.sequences_per_epoch)
    limits = build_limits(config["train_cfg"], ruler)
    total_sequences = _total_sequences(limits, geometry, data.stream.tokens_per_sequence)
    seed_everything(seed, rank=dist.rank())
    model, groups = build_model(config, data.processor, seed=seed)
    schedules = build_schedules(config, plan, groups, ruler=ruler, total_sequences=total_sequences)
    hooks = build_hooks(config)
    backend.prepare(model, groups, optimizer_cfg, geometry=geometry)
    seed_everything(seed, rank=dist.rank())
    log.logger().info("Effective batch: %s sequences per update; %d per epoch.", geometry, ruler.sequences_per_epoch)
    cursor = Cursor.from_state_dict(manifest.loader["cursor"]) if manifest else Cursor()
    loader = build_loader(config, data, geometry=geometry, backend=backend, cursor=cursor)
    return Parts(
        config=config,
        plain_config=json.loads(json.dumps(config.to_dict(), default=str)),
        config_text=config_text(config),
        work_dir=Path(config["work_dir"]),
        backend=backend,
        loader=loader,
        cursor=cursor,
        source_names=data.stream.names,
        processor=data.processor,
        schedules=schedules,
        hooks=hooks,
        ruler=ruler,
        geometry=geometry,
        limits=limits,
        total_sequences=total_sequences,
        loss_weights=dict(config.get("loss_weights") or {}),
        plan=plan,
        parameters=parameter_table(model, groups),
        data_identity=identity,
        max_updates=max_updates,
    )


def open_run(config: Config) -> ResumePlan:
    """The log, and the checkpoint to go on from."""
    work_dir = Path(config["work_dir"])
    logger = log.setup(rank=dist.rank(), log_file=work_dir / "train.log")
    plan = plan_resume(work_dir, resume=config.get("resume", False), load_from=config.get("load_from"))
    for message in plan.messages:
        logger.info(message)
    if config.get("val_dataloader") is not None:
        logger.warning("val_dataloader is ignored: there is no validation loop yet.")
    if (threads := (config.get("env") or {}).get("num_threads")) is not None:
        torch.set_num_threads(threads)
    return plan


def config_text(config: Config) -> str:
    """The config as Python text. A class, which mmengine prints as no Python can read it, is given by its name."""

    def named(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: named(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(map(named, value))
        return f"{value.__module__}.{value.__qualname__}" if isinstance(value, (type, FunctionType)) else value

    return Config(named(config.to_dict())).pretty_text


def import_custom(config: Mapping[str, Any]) -> None:
    """``custom_imports=dict(imports=['my.module'])``: modules that register a user's own classes."""
    for name in (config.get("custom_imports") or {}).get("imports", ()):
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

    processor: UnifiedProcessor
    stream: SequenceStream


def build_data(config: Mapping[str, Any], *, seed: int, geometry: Geometry, ruler: Ruler | None) -> Data:
    """Tokenizer, processor, data sets, global order, packer, stream. ``ruler`` fixes the epoch on a resume."""
    loader = config["train_dataloader"]
    processor = build_processor(config, seed=seed)
    specs = loader.get("dataset")
    specs = list(specs) if isinstance(specs, (list, tuple)) else [specs]
    datasets = [
        build(DATASETS, spec, where=f"train_dataloader.dataset[{i}]", processor=processor)
        for i, spec in enumerate(specs)
    ]
    packing = loader.get("packing")
    packer = build(PACKERS, packing, where="train_dataloader.packing") if packing else None
    stream = SequenceStream(
        datasets,
        GlobalOrder([len(d) for d in datasets], weights=dataset_weights(datasets), seed=seed),
        packer=packer,
        seq_length=loader.get("seq_length", 4096),
        drop_last=loader.get("drop_last", True),
        sequences_per_iteration=geometry.sequences_per_iteration,
        sequences_per_epoch=ruler.sequences_per_epoch if ruler else None,
    )
    return Data(processor, stream)


def build_processor(config: Mapping[str, Any], *, seed: int) -> UnifiedProcessor:
    """The tokenizer and image transforms, with every size that the model fixes taken from the model."""
    tokenizer = build(TOKENIZERS, config["tokenizer"], where="tokenizer")
    given = dict(config.get("processor") or {})
    for key in ("vit_transform", "vae_transform"):
        if given.get(key) is not None:
            given[key] = build(TRANSFORMS, given[key], where=f"processor.{key}")
    augment = given.get("vit_augment") or ()
    given["vit_augment"] = [
        build(TRANSFORMS, spec, where=f"processor.vit_augment[{i}]") for i, spec in enumerate(augment)
    ]
    model = config["model"]
    sizes = MODELS.get(model["type"]).processor_sizes(model) if isinstance(model.get("type"), str) else {}
    both = sorted(set(sizes) & set(given))
    if both:
        raise ConfigError(f"processor sets {', '.join(both)}", remedy="leave it out: the model's config fixes it")
    try:
        return UnifiedProcessor(tokenizer, seed=seed, **sizes, **given)
    except TypeError as error:
        raise ConfigError(f"processor: {error}") from error


def build_limits(train_cfg: Mapping[str, Any], ruler: Ruler) -> list[Duration]:
    """When training is complete, in data. Any of several limits ends it."""
    limits = [ruler.duration(train_cfg[key], unit) for key, unit in _LIMITS.items() if train_cfg.get(key) is not None]
    if not limits:
        raise ConfigError("train_cfg sets no limit", allowed=", ".join(_LIMITS))
    return limits


def _total_sequences(limits: Sequence[Duration], geometry: Geometry, tokens_per_sequence: float) -> float:
    """Sequences until the first limit; for a limit in tokens an estimate from the mean length."""
    total = min(limit.value / tokens_per_sequence if limit.unit == "token" else limit.value for limit in limits)
    if total < geometry.global_batch_size:
        raise ConfigError(
            f"train_cfg ends after {total:g} sequences, before the first update of {geometry} sequences",
            remedy="train for longer, or with a smaller effective batch",
        )
    return math.floor(total)


def build_model(
    config: Mapping[str, Any], processor: UnifiedProcessor, *, seed: int
) -> tuple[nn.Module, list[ParamGroup]]:
    """The model on the CPU in fp32, and its parameter groups. The same weights on every rank and process count."""
    spec = dict(config["model"])
    vocabulary = len(processor.tokenizer)  # type: ignore[arg-type]
    if isinstance(spec.get("llm"), Mapping) and "vocab_size" not in spec["llm"]:
        spec["llm"] = {**spec["llm"], "vocab_size": vocabulary}
    torch.manual_seed(seed)
    model = build(MODELS, spec, where="model")
    if model.vocab_size < vocabulary:
        raise ConfigError(
            f"model.llm.vocab_size is {model.vocab_size}", allowed=f"at least {vocabulary}, the tokenizer's"
        )
    wrapper = config["optim_wrapper"]
    groups = build_param_groups(model.named_parameters(), wrapper["optimizer"], wrapper.get("paramwise_cfg"))
    return model, groups


def build_optimizer_config(config: Mapping[str, Any]) -> OptimizerConfig:
    wrapper = config["optim_wrapper"]
    optimizer = dict(wrapper["optimizer"])
    return OptimizerConfig(
        type=optimizer.pop("type", "AdamW"),
        arguments={k: v for k, v in optimizer.items() if k not in ("lr", "weight_decay")},
        max_norm=(wrapper.get("clip_grad") or {}).get("max_norm"),
        precision=wrapper.get("precision", "fp32"),
    )


def build_schedules(
    config: Mapping[str, Any],
    plan: ResumePlan,
    groups: Sequence[ParamGroup],
    *,
    ruler: Ruler,
    total_sequences: float,
) -> Schedules:
    """The stored curves where the config is the one they came from; else the config's own, at the present progress."""
    base = [{"name": group.name, "lr": group.lr} for group in groups]
    given = Schedules.from_cfg(config.get("param_scheduler"), ruler=ruler, base=base, total_sequences=total_sequences)
    if plan.mode != "resume" or plan.manifest is None:
        return given
    stored = Schedules.from_state_dict(plan.manifest.schedule)
    if (stored.config, stored.base, stored.total_sequences) == (given.config, given.base, given.total_sequences):
        return stored
    log.logger().warning("The learning rate, its schedule or the length of training was edited: the new curve is"
                         " followed from the present progress on.")  # fmt: skip
    return Schedules.from_cfg(
        config.get("param_scheduler"), ruler=ruler, base=base, total_sequences=total_sequences, lr_scale=stored.lr_scale
    )


def build_hooks(config: Mapping[str, Any]) -> list[Hook]:
    """Default hooks (named ones replace the built-in defaults; None removes one), then the user's."""
    given = dict(config.get("default_hooks") or {})
    logger_spec = {"type": LoggerHook, **{k: v for k, v in (given.pop("logger", None) or {}).items() if k != "type"}}
    writers = (config.get("visualizer") or {}).get("vis_backends") or []
    specs: dict[str, Any] = {
        "timer": {"type": IterTimerHook},
        "nan_guard": {"type": NanGuardHook},
        "signals": {"type": SignalHook},
        "checkpoint": {"type": "CheckpointHook"},
    }
    specs.update(given)
    hooks: list[Hook] = [build(HOOKS, spec, where=f"default_hooks.{name}") for name, spec in specs.items() if spec]
    hooks.append(build(HOOKS, logger_spec, where="default_hooks.logger", writers=writers))
    limit = config["train_dataloader"].get("max_skipped_fraction", 0.01)
    hooks += [LedgerHook(), SkippedSamplesHook(max_skipped_fraction=limit)]
    hooks += [build(HOOKS, s, where=f"custom_hooks[{i}]") for i, s in enumerate(config.get("custom_hooks") or ())]
    names = [hook.name for hook in hooks if hook.name]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"hooks named twice: {', '.join(twice)}", remedy="each may appear once")
    return hooks


def build_loader(
    config: Mapping[str, Any], data: Data, *, geometry: Geometry, backend: Backend, cursor: Cursor
) -> UpdateLoader:
    """Micro-batches of this rank from ``cursor`` on."""
    loader = config["train_dataloader"]
    return UpdateLoader(
        data.stream,
        processor=data.processor,
        geometry=geometry,
        dp_rank=backend.dp_rank,
        cursor=cursor,
        num_workers=loader.get("num_workers", 0),
        prefetch_factor=loader.get("prefetch_factor"),
        pin_memory=loader.get("pin_memory", torch.cuda.is_available()),
        timeout=loader.get("timeout", 0),
    )


def parameter_table(model: nn.Module, groups: Sequence[ParamGroup]) -> list[dict[str, Any]]:
    """Name, shape, dtype, trainable, group and further (tied) names of every parameter, for the manifest."""
    group_of = {name: group.name for group in groups for name in group.parameters}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
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
        for name, parameter in model.named_parameters()
    ]
