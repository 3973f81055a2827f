"""What to do about names that other trainers have and this one does not have, or has under another path.

In: an unknown key of a config with its path. Out: one sentence for the error, or None. Only tables; nothing is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from unigen_ds.core.errors import ConfigError

SETTINGS = (
    "batch_size", "accumulative_counts", "max_epochs", "max_iters", "max_updates", "max_tokens", "save_steps",
    "save_total_limit", "lr", "betas", "weight_decay", "max_norm", "warmup_ratio", "seq_length", "max_length",
    "dataloader_num_workers", "data_path", "precision", "optim_type", "log_every",
)  # fmt: skip
"""Names that xtuner's configs give their helper variables. At the top of a file they have an effect only where the file
itself reads them."""

MMENGINE: dict[str, str] = {
    "strategy": "backend=dict(type='deepspeed', config='zero2')",
    "env_cfg": "delete it; env.dist_timeout_s, env.num_threads and launcher are what there is of it",
    "default_scope": "delete it, there is one registry for each kind of thing",
    "log_level": "delete it, default_hooks.logger.interval sets how often a line is written",
    "log_processor": "delete it, default_hooks.logger.interval sets how often a line is written",
    "auto_scale_lr": "delete it, on_batch_change='linear' or 'sqrt' scales the learning rate",
    "optim_wrapper.type": "delete it, optim_wrapper.precision is 'fp32', 'bf16' or 'fp16'",
    "optim_wrapper.dtype": "optim_wrapper.precision='bf16' or 'fp16'",
    "optim_wrapper.clip_grad.error_if_nonfinite": "delete it, NanGuardHook skips and counts such updates",
    "optim_wrapper.clip_grad.norm_type": "delete it, the norm is the L2 norm of all gradients",
    "val_dataloader.packing": "delete it, an evaluation has one sample in a sequence, so a sample is always the same",
    "train_cfg.type": "delete it, there is one loop",
    "train_cfg.by_epoch": "delete it, max_epochs or max_iters decides it",
    "train_dataloader.sampler": "delete it, the order follows from randomness.seed alone",
    "train_dataloader.shuffle": "delete it, the order follows from randomness.seed alone",
    "train_dataloader.collate_fn": "delete it, the model's processor does it",
    "train_dataloader.persistent_workers": "delete it, workers live as long as the run",
    "default_hooks.param_scheduler": "delete it, param_scheduler acts by itself",
    "default_hooks.sampler_seed": "delete it, the order follows from randomness.seed alone",
    "default_hooks.runtime_info": "delete it, the logger has all of it",
    "randomness.deterministic": "write env.deterministic",
    "randomness.diff_rank_seed": "delete it, every sample has a seed of its own",
}
"""Keys of mmengine and xtuner configs that are not keys here, and what to do about them."""

_EVALUATION = "delete it, EvaluateHook in custom_hooks sets when and what is evaluated: docs/evaluation.md"
_TEST = "delete it, and give val_dataloader the data: docs/evaluation.md"
ANYWHERE: dict[str, str] = {
    "world_size": "write world_size at the top of the config: it is compared with the number that the launcher starts",
    "runner_type": "delete it, one Runner trains every config, by epochs and by iterations: see train_cfg",
    "val_interval": _EVALUATION,
    "val_begin": _EVALUATION,
    "val_cfg": _EVALUATION,
    "val_evaluator": "delete it, the metrics of EvaluateHook in custom_hooks replace it: docs/evaluation.md",
    "test_cfg": _TEST,
    "test_dataloader": _TEST,
    "test_evaluator": _TEST,
    "max_steps": "train_cfg.max_updates counts optimizer steps, train_cfg.max_iters forward and backward passes",
}
"""The same, at any path of a config."""

ALIASES: dict[str, str] = {
    "lr": "optim_wrapper.optimizer.lr",
    "learning_rate": "optim_wrapper.optimizer.lr",
    "betas": "optim_wrapper.optimizer.betas",
    "weight_decay": "optim_wrapper.optimizer.weight_decay",
    "custom_keys": "optim_wrapper.paramwise_cfg.custom_keys",
    "optim_type": "optim_wrapper.optimizer.type",
    "gradient_accumulation_steps": "optim_wrapper.accumulative_counts",
    "max_grad_norm": "optim_wrapper.clip_grad.max_norm",
    "per_device_train_batch_size": "train_dataloader.batch_size",
    "train_batch_size": "train_dataloader.batch_size",
    "max_length": "train_dataloader.seq_length",
    "max_sequence_length": "train_dataloader.seq_length",
    "dataloader_num_workers": "train_dataloader.num_workers",
    "data_path": "train_dataloader.dataset.data_path",
    "train_data_path": "train_dataloader.dataset.data_path",
    "val_data_path": "val_dataloader.dataset.data_path",
    "relevance_min_rating": "train_dataloader.dataset.filters, a RatingFilter",
    "image_correspondence_min_rating": "train_dataloader.dataset.filters, a RatingFilter",
    "visual_dependency_min_rating": "train_dataloader.dataset.filters, a RatingFilter",
    "formatting_min_rating": "train_dataloader.dataset.filters, a RatingFilter",
    "max_images_per_example": "train_dataloader.dataset.filters, an ImageCountFilter with max_tiles",
    "max_images_per_knapsack": "train_dataloader.packing.max_tiles",
    "eval_interval": "EvaluateHook.interval, of custom_hooks",
    "eval_steps": "EvaluateHook.interval, of custom_hooks",
    "save_best": "EvaluateHook.save_best, of custom_hooks",
    "metric_for_best_model": "EvaluateHook.save_best, of custom_hooks",
    "lmms_eval_tasks": "AsyncEvaluateHook.command, of custom_hooks",
    "val_size": "val_dataloader.split, a share of the records",
    "num_epochs": "train_cfg.max_epochs",
    "num_train_epochs": "train_cfg.max_epochs",
    "total_steps": "train_cfg.max_updates",
    "warmup_ratio": "param_scheduler",
    "warmup_steps": "param_scheduler",
    "save_steps": "default_hooks.checkpoint.interval",
    "save_every": "default_hooks.checkpoint.interval",
    "save_total_limit": "default_hooks.checkpoint.max_keep_ckpts",
    "log_every": "default_hooks.logger.interval",
    "logging_steps": "default_hooks.logger.interval",
    "text_loss_weight": "loss_weights.text",
    "image_loss_weight": "loss_weights.image",
    "output_dir": "work_dir",
    "resume_from": "resume='CKPT'",
    "resume_from_checkpoint": "resume='CKPT'",
}
"""Names of settings in other trainers, and the path of each in this one."""

_SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")
_ENGINES = {"ddp": "fsdp:NO_SHARD", "fsdp2": "fsdp:FULL_SHARD", "fsdp1": "fsdp:FULL_SHARD", "zero": "deepspeed:zero2"}


def backend_hint(given: Any) -> str | None:
    """The ``--backend`` that ``zero2`` or ``full_shard`` probably means; None where it may be a user's own."""
    text = given.strip().lower() if isinstance(given, str) else ""
    if re.fullmatch(r"zero_?-?[123](_offload)?", text):
        return "deepspeed:" + re.sub(r"zero_?-?", "zero", text)
    if text.upper() in _SHARDING:
        return f"fsdp:{text.upper()}"
    return _ENGINES.get(text)


BACKEND_WORDS = "single, deepspeed[:zero1|zero2|zero3|...|FILE.json], fsdp[:FULL_SHARD|...]"


def backend_spec(text: str) -> dict[str, str]:
    """``single`` | ``deepspeed[:zero1|...|FILE.json]`` | ``fsdp[:FULL_SHARD|...]`` -> the config's ``backend``."""
    kind, _, detail = text.partition(":")
    if not detail and (meant := backend_hint(kind)):
        raise ConfigError(f"--backend {text}", allowed=BACKEND_WORDS, remedy=f"did you mean --backend {meant}?")
    option = {"deepspeed": "config", "fsdp": "sharding_strategy"}.get(kind)
    return {"type": kind} | ({option: detail} if option and detail else {})


def with_backend(overrides: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Overrides and ``--backend``, which comes first: ``backend.KEY`` of ``overrides`` is a setting of that engine.

    Raises ``ConfigError`` where an override contradicts it.
    """
    spec = backend_spec(text)
    for key in ("backend", *(f"backend.{name}" for name in spec)):
        wanted: Any = spec if key == "backend" else spec[key.removeprefix("backend.")]
        if key in overrides and overrides[key] != wanted:
            raise ConfigError(f"--backend {text} contradicts {key}={overrides[key]!r}", remedy="give one of the two")
    return {"backend": spec} | {key: value for key, value in overrides.items() if key != "backend"}


def key_paths(schema: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(last name, whole path) of every key of a schema below its top."""
    for key, inner in schema.items():
        if key == "val_dataloader":
            continue
        if prefix:
            yield key, f"{prefix}.{key}"
        if isinstance(inner, Mapping):
            yield from key_paths(inner, f"{prefix}.{key}" if prefix else key)


def hint(path: str, schema: Mapping[str, Any]) -> str | None:
    """What to do about an unknown key: another trainer's name, or a key that belongs to another section."""
    name = path.rpartition(".")[2]
    known = MMENGINE.get(path) or ANYWHERE.get(name)
    if known is not None:
        return known
    path_of = dict(reversed([*key_paths(schema)])) | ALIASES
    known = path_of.get(name)
    return f"write {known}" if known and known != path else None


def is_setting(name: str, schema: Mapping[str, Any]) -> bool:
    """Whether a name at the top of a file is a setting of a section, or what another trainer calls one."""
    return name in SETTINGS or hint(name, schema) is not None
