"""Training configs: mmengine's ``Config`` (text style, ``_base_``, YAML) with strict keys.

mmengine's own ``merge_from_dict`` creates whatever key it is given, so a mistyped override is silently ignored
there; here an unknown key, in the file or in ``--cfg-options``, is an error that names the nearest valid one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from mmengine.config import Config, ConfigDict

from unigen_ds.core.errors import ConfigError, nearest
from unigen_ds.core.hints import described, fits
from unigen_ds.core.registry import registered_name

SHIPPED = Path(__file__).resolve().parent.parent / "configs"

SETTINGS = (
    "batch_size", "accumulative_counts", "max_epochs", "max_iters", "max_updates", "max_tokens", "save_steps",
    "save_total_limit", "lr", "betas", "weight_decay", "max_norm", "warmup_ratio", "seq_length", "max_length",
    "dataloader_num_workers", "data_path", "precision", "optim_type", "log_every",
)  # fmt: skip
"""Top-level helper names, xtuner style. They have an effect only where the config itself uses them."""

_COMPONENT = Mapping | None  # dict(type=...): its arguments are checked against the class when it is built
_COMPONENTS = Mapping | Sequence[Mapping] | None
_DATALOADER = {
    "batch_size": int | None, "global_batch_size": int | None, "num_workers": int, "drop_last": bool,
    "seq_length": int, "packing": _COMPONENT, "dataset": _COMPONENTS, "prefetch_factor": int | None,
    "pin_memory": bool, "max_skipped_fraction": float, "timeout": float,
}  # fmt: skip
SCHEMA: dict[str, Any] = {
    "model": _COMPONENT,
    "tokenizer": _COMPONENT,
    "processor": {
        "vit_transform": _COMPONENT, "vae_transform": _COMPONENT, "vit_augment": Sequence[Mapping],
        "text_dropout": float, "vit_dropout": float, "vae_dropout": float, "timestep": str, "ce_reweight": bool,
        "max_image_size": int | None, "resize_to_max_side_len": bool,
    },
    "train_dataloader": _DATALOADER,
    "val_dataloader": _DATALOADER,
    "optim_wrapper": {
        "optimizer": _COMPONENT, "accumulative_counts": int, "precision": str,
        "clip_grad": {"max_norm": float | None},
        "paramwise_cfg": {
            "groups": Sequence[Mapping] | None, "norm_decay_mult": float, "bias_decay_mult": float
        },
    },
    "loss_weights": {"text": float, "image": float},
    "param_scheduler": _COMPONENTS,
    "train_cfg": {
        "max_epochs": float | None, "max_iters": int | None, "max_updates": int | None, "max_tokens": float | None
    },
    "backend": _COMPONENT,
    "default_hooks": {
        name: _COMPONENT for name in ("timer", "nan_guard", "logger", "checkpoint", "signals", "continuity")
    },
    "custom_hooks": Sequence[Mapping] | None,
    "visualizer": {"vis_backends": Sequence[Mapping] | None},
    "randomness": {"seed": int},
    "env": {"dist_timeout_s": float, "num_threads": int | None, "peak_tflops": float | None},
    "load_from": str | None,
    "load_cfg": {"revise_keys": Sequence, "allow": Sequence[str], "resize_vocab": bool | str},
    "resume": bool | str | None,
    "assume": str | None,
    "on_batch_change": str,
    "on_data_change": str,
    "work_dir": str | None,
    "launcher": str,
    "custom_imports": _COMPONENTS,
}  # fmt: skip
"""Valid keys, two floors deep: a section, or the type of a value."""

MMENGINE: dict[str, str] = {
    "strategy": "backend=dict(type='deepspeed', config='zero2')",
    "env_cfg": "delete it; env.dist_timeout_s, env.num_threads and launcher are what there is of it",
    "default_scope": "delete it, there is one registry for each kind of thing",
    "log_level": "delete it, default_hooks.logger.interval says how often a line is written",
    "log_processor": "delete it, default_hooks.logger.interval says how often a line is written",
    "auto_scale_lr": "delete it, on_batch_change='linear' or 'sqrt' scales the learning rate",
    "optim_wrapper.type": "delete it, optim_wrapper.precision is 'fp32', 'bf16' or 'fp16'",
    "optim_wrapper.dtype": "optim_wrapper.precision='bf16' or 'fp16'",
    "optim_wrapper.loss_scale": "delete it, that of fp16 is dynamic",
    "optim_wrapper.clip_grad.error_if_nonfinite": "delete it, NanGuardHook skips and counts such updates",
    "optim_wrapper.clip_grad.norm_type": "delete it, the norm is the L2 norm of all gradients",
    "train_cfg.type": "delete it, there is one loop",
    "train_cfg.by_epoch": "delete it, max_epochs or max_iters says it",
    "train_dataloader.sampler": "delete it, the order follows from randomness.seed alone",
    "train_dataloader.shuffle": "delete it, the order follows from randomness.seed alone",
    "train_dataloader.collate_fn": "delete it, the model's processor does it",
    "train_dataloader.persistent_workers": "delete it, workers live as long as the run",
    "default_hooks.param_scheduler": "delete it, param_scheduler acts by itself",
    "default_hooks.sampler_seed": "delete it, the order follows from randomness.seed alone",
    "default_hooks.runtime_info": "delete it, the logger sees everything",
    "randomness.deterministic": "delete it, a run is deterministic as far as its kernels are",
    "randomness.diff_rank_seed": "delete it, every sample has a seed of its own",
}
"""Keys of mmengine and xtuner configs that are not keys here, and what to do about them."""


def config_path(name: str | Path) -> Path:
    """A path that exists, or the shipped config of that name."""
    path = Path(name)
    if path.suffix in (".py", ".yaml", ".yml", ".json") and path.exists():
        return path.resolve()
    shipped = {p.stem: p for p in sorted(SHIPPED.glob("*.py"))}
    if str(name) in shipped:
        return shipped[str(name)]
    raise ConfigError(
        f"config {str(name)!r} is neither a file nor a shipped config",
        allowed="a .py, .yaml or .json file, or one of " + ", ".join(shipped),
    )


def load_config(name: str | Path, overrides: Iterable[str] | Mapping[str, Any] = ()) -> Config:
    """Read a config, check its keys, apply overrides (``K=V`` texts of ``--cfg-options`` or a mapping of dotted paths).

    Raises ``ConfigError`` for a missing or broken file, an unknown key, or an override of a path that does not exist.
    """
    path = config_path(name)
    try:
        config = _read(path)
    except Exception as error:  # a config is the user's code: whatever it raises, say where
        raise ConfigError(f"config {path} cannot be read: {type(error).__name__}: {error}") from error
    if config.get("work_dir") is None:
        config["work_dir"] = str(Path("work_dirs") / path.stem)
    given = dict(overrides) if isinstance(overrides, Mapping) else dict(map(parse_override, overrides))
    for dotted, value in given.items():
        _apply(config, dotted, value)
    check_keys(config)
    return config


def _read(path: Path) -> Config:
    try:
        config = Config.fromfile(str(path))
    except RuntimeError as error:
        if str(error):
            raise
        # mmengine takes a file with imports for one of its lazy style, where calling what is imported raises a bare
        # RuntimeError; such a file is ordinary Python.
        config = Config.fromfile(str(path), lazy_import=False)
    # Names that a config imports or defines as functions are means, not settings.
    settings = config.to_dict()  # mmengine leaves out what a config of the lazy style imported
    for name in [*config]:
        if name not in settings or isinstance(settings[name], (type, FunctionType)):
            config.pop(name)
    for section in (config.get("model") or {}, (config.get("optim_wrapper") or {}).get("optimizer") or {}):
        kind = section.get("type")
        if isinstance(kind, type):  # by name, as checkpoints and comparisons have it
            torchs = kind.__module__.startswith("torch.optim")
            section["type"] = kind.__name__ if torchs else registered_name(kind) or kind
    return config


def parse_override(text: str) -> tuple[str, Any]:
    """``'a.b=3'`` -> ``('a.b', 3)``; the value is a Python literal, ``true``/``false``/``null``, else a string."""
    dotted, separator, raw = text.partition("=")
    if not separator or not dotted.strip():
        raise ConfigError(f"override {text!r}", allowed="KEY=VALUE, as in optim_wrapper.optimizer.lr=1e-4")
    words = {"true": True, "false": False, "null": None, "none": None}
    if raw.lower() in words:
        return dotted.strip(), words[raw.lower()]
    try:
        return dotted.strip(), ast.literal_eval(raw)
    except (ValueError, SyntaxError):
        return dotted.strip(), raw


_NODES: Any = (Mapping, Config)  # mmengine's Config behaves like a mapping but is none


def _apply(config: Any, dotted: str, value: Any) -> None:
    path: list[str] = []
    node: Any = config
    schema: Any = SCHEMA
    *parents, last = dotted.split(".")
    if not parents and last in SETTINGS:
        raise ConfigError(
            f"override {dotted!r} would have no effect: the config read this helper while it was loaded",
            remedy=f"override what {last!r} was used for, as in train_dataloader.batch_size or train_cfg.max_epochs",
        )
    for key in parents:
        schema = schema.get(key) if isinstance(schema, Mapping) else None
        if isinstance(node, _NODES) and node.get(key) is None and isinstance(schema, Mapping):
            node[key] = ConfigDict()  # a section with known keys that is left out, or None
        node = _step(node, key, path, dotted)
        path.append(key)
    if isinstance(node, list):
        node[_list_index(node, last, dotted)] = value
        return
    if not isinstance(node, _NODES):
        raise ConfigError(f"override {dotted!r}: {'.'.join(path)} is {node!r} and has no keys")
    known = set(node) | set(schema if isinstance(schema, Mapping) else ())
    is_component = "type" in node  # its own arguments are checked when it is built
    if last not in known and not is_component:
        raise ConfigError(f"override {dotted!r}: no key {last!r} there", remedy=nearest(last, known))
    node[last] = value


def _step(node: Any, key: str, path: list[str], dotted: str) -> Any:
    if isinstance(node, list):
        return node[_list_index(node, key, dotted)]
    if not isinstance(node, _NODES) or key not in node:
        valid = node if isinstance(node, _NODES) else ()
        raise ConfigError(f"override {dotted!r}: no key {key!r} in {'.'.join(path) or 'the config'}",
                          remedy=nearest(key, valid))  # fmt: skip
    return node[key]


def _list_index(node: list[Any], key: str, dotted: str) -> int:
    if not key.isdigit() or int(key) >= len(node):
        raise ConfigError(f"override {dotted!r}: {key!r} is no place in a list of {len(node)}")
    return int(key)


def check_keys(config: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` naming every unknown key, or the first value of a wrong type.

    A name that begins with an underscore is the user's own. A section may be None: all its keys are left out.
    """
    unknown: dict[str, str] = {}
    for key, value in config.items():
        if key.startswith("_") or key in SETTINGS:
            continue
        if key in SCHEMA:
            unknown |= _unknown_below(value, SCHEMA[key], key)
        else:
            guess = nearest(key, (*SCHEMA, *SETTINGS)) + " (a helper variable of your own may begin with '_')"
            unknown[key] = MMENGINE.get(key, guess)
    if unknown:
        what = "unknown config key" + "s" * (len(unknown) > 1)
        raise ConfigError(
            f"{what} " + ", ".join(map(repr, unknown)),
            remedy="; ".join(f"{key}: {said}" if len(unknown) > 1 else said for key, said in unknown.items()),
        )


def _unknown_below(value: Any, schema: Any, where: str) -> dict[str, str]:
    """Unknown keys in a section, and what to do about each."""
    unknown: dict[str, str] = {}
    if not isinstance(schema, Mapping):
        if not fits(value, schema):
            raise ConfigError(f"{where} is {value!r}", allowed=described(schema))
        return unknown
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"{where} is {value!r}", allowed=f"dict({', '.join(f'{key}=' for key in schema)})")
    for key, inner in (value or {}).items():
        path = f"{where}.{key}"
        if key in schema:
            unknown |= _unknown_below(inner, schema[key], path)
        else:
            unknown[path] = MMENGINE.get(path, nearest(key, schema))
    return unknown


def backend_spec(text: str) -> dict[str, str]:
    """``single`` | ``deepspeed[:zero1|...|FILE.json]`` | ``fsdp[:FULL_SHARD|...]`` -> the config's ``backend``."""
    kind, _, detail = text.partition(":")
    option = {"deepspeed": "config", "fsdp": "sharding_strategy"}.get(kind)
    return {"type": kind} | ({option: detail} if option and detail else {})
