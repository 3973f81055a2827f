"""A DeepSpeed JSON and our config, combined: ``"auto"`` is filled in, a contradiction is refused.

What our config owns (batch, accumulation, clipping, precision, optimizer, learning rate) may be left out of the JSON
or be ``"auto"``; where both set a value they must agree. Everything else of the JSON is passed to DeepSpeed as it is.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unigen_ds.config.paths import ds_configs_dir
from unigen_ds.core.errors import ConfigError, nearest
from unigen_ds.core.progress import Geometry
from unigen_ds.optim.optimizer import OptimizerConfig
from unigen_ds.system.dist import env_rank
from unigen_ds.system.log import logger

_AUTO = "auto"
TESTED_VERSION = "0.19.8"
ALLOWED_VERSIONS = ">=0.19.8,<0.20"
"""Versions of DeepSpeed: its private attributes change between releases. ``setup.py`` reads the line above."""


def load_ds_config(spec: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """A preset's name (``zero2``), a JSON file, or the mapping itself. Raises ``ConfigError``."""
    if isinstance(spec, Mapping):
        return copy.deepcopy({**spec})
    path = Path(spec)
    if path.suffix != ".json":
        presets = {p.stem: p for p in sorted(ds_configs_dir().glob("*.json"))}
        if str(spec) not in presets:
            raise ConfigError(
                f"DeepSpeed config {str(spec)!r} is neither a .json file nor a preset",
                remedy=nearest(str(spec), presets),
            )
        path = presets[str(spec)]
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"DeepSpeed config {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"DeepSpeed config {path} holds a {type(config).__name__}", allowed="a JSON object")
    return config


def stage_of(config: Mapping[str, Any]) -> int:
    """The ZeRO stage. Raises ``ConfigError`` for any but 1, 2, 3."""
    stage = (config.get("zero_optimization") or {}).get("stage")
    if stage not in (1, 2, 3):
        raise ConfigError(f"zero_optimization.stage is {stage!r}", allowed="1, 2 or 3", remedy="use a preset: zero2")
    return int(stage)


def offloads(config: Mapping[str, Any]) -> list[str]:
    """``offload_optimizer`` and ``offload_param`` as far as they name a device."""
    zero = config.get("zero_optimization") or {}
    return [k for k in ("offload_optimizer", "offload_param") if (zero.get(k) or {}).get("device", "none") != "none"]


OWNERS = {"scheduler": "param_scheduler", "optimizer": "optim_wrapper.optimizer"}
"""Sections that our config has under every engine, and its name for each."""
_ONLY_VALUES = (
    ("data_types", "buffer_dtype", "fp32", "the autoencoder would be rounded, under this engine alone"),
    ("torch_autocast", "enabled", False, "no other engine has it; optim_wrapper.precision is for all"),
    ("bf16", "check_grad_overflow", True, "one non-finite gradient would make all weights non-finite"),
)
"""Section, key, its one value besides ``"auto"``, and why."""


def check_ds_config(config: Mapping[str, Any]) -> None:
    """Refuse what cannot work, from the file alone. Raises ``ConfigError``."""
    for section in ("zero_optimization", "bf16", "fp16", "data_types", "torch_autocast"):
        if not isinstance(config.get(section), Mapping | None) and config[section] != _AUTO:
            raise ConfigError(f"the DeepSpeed config has {section} = {config[section]!r}", allowed="{...}")
    stage_of(config)
    for section, owner in OWNERS.items():
        value = config.get(section)
        values = [*(value.get("params") or {}).values()] if isinstance(value, Mapping) else [value or _AUTO]
        if set(values) != {_AUTO}:  # as Hugging Face's Trainer wants it; a type alone asks for its defaults
            raise ConfigError(
                f"the DeepSpeed config has a {section} ({value}), and so has ours ({owner})",
                remedy=f"delete {section!r} from the JSON: {owner} is used, under every engine",
            )
    for section, key, choice, why in _ONLY_VALUES:
        value = (config.get(section) or {}).get(key, _AUTO)
        if value not in (_AUTO, None, choice):
            problem = f"the DeepSpeed config has {section}.{key} = {value!r}: {why}"
            raise ConfigError(problem, allowed=repr(choice), remedy="delete it from the JSON")


def fill(config: Mapping[str, Any], *, geometry: Geometry, optimizer: OptimizerConfig) -> dict[str, Any]:
    """The config DeepSpeed gets. Raises ``ConfigError`` naming both values of a contradiction."""
    check_ds_config(config)
    ds_config = {k: v for k, v in copy.deepcopy({**config}).items() if k not in ("scheduler", "optimizer")}
    ours: dict[str, tuple[Any, str]] = {
        "train_micro_batch_size_per_gpu": (geometry.batch_size, "train_dataloader.batch_size"),
        "gradient_accumulation_steps": (geometry.accumulative_counts, "optim_wrapper.accumulative_counts"),
        "train_batch_size": (geometry.global_batch_size, "batch_size x accumulative_counts x processes"),
        "gradient_clipping": (optimizer.max_norm or 0.0, "optim_wrapper.clip_grad.max_norm"),
    }
    for key, (value, where) in ours.items():
        ds_config[key] = _agree_on(ds_config.get(key, _AUTO), value, key, where)
    for precision in ("bf16", "fp16"):
        section = dict(ds_config.get(precision) or {})
        is_on = optimizer.precision == precision
        section["enabled"] = _agree_on(
            section.get("enabled", _AUTO), is_on, f"{precision}.enabled", "optim_wrapper.precision"
        )
        ds_config[precision] = {k: v for k, v in section.items() if v != _AUTO}
    if optimizer.precision == "fp16":  # halve the loss scale at the first overflow, as every engine does; theirs is 2
        ds_config["fp16"].setdefault("hysteresis", 1)
        scale, interval = (optimizer.loss_scale.get(key) for key in ("scale", "growth_interval"))
        power = None if scale is None else round(math.log2(scale))
        for key, value, where in (
            ("initial_scale_power", power, f"log2 of optim_wrapper.loss_scale.init_scale, {scale}"),
            ("loss_scale_window", interval, "optim_wrapper.loss_scale.growth_interval"),
        ):
            if value is not None:
                ds_config["fp16"][key] = _agree_on(ds_config["fp16"].get(key, _AUTO), value, f"fp16.{key}", where)
    if optimizer.precision != "fp32":  # gradients are summed and reduced in fp32, as under every engine
        ds_config["data_types"] = {**(ds_config.get("data_types") or {}), "grad_accum_dtype": "fp32"}
        ds_config.setdefault("communication_data_type", "fp32")
    ds_config["zero_allow_untested_optimizer"] = True
    ds_config.setdefault("zero_force_ds_cpu_optimizer", False)
    ds_config.setdefault("steps_per_print", 10**12)
    return _without_auto(ds_config)


def check_by_deepspeed(ds_config: Mapping[str, Any]) -> None:
    """Have DeepSpeed read what ``fill`` returned: ``ConfigError`` for what it refuses, a warning for unknown keys."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
    from pydantic import ValidationError  # what DeepSpeed checks with

    # DeepSpeed's engine reads the last two, not its config
    reads = {"train_batch_size", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"}

    class KeyRecorder(dict[str, Any]):
        def __contains__(self, key: object) -> bool:
            reads.add(str(key))
            return super().__contains__(key)

        def get(self, key: str, default: Any = None) -> Any:
            reads.add(key)
            return super().get(key, default)

    try:
        DeepSpeedConfig(KeyRecorder({key: value for key, value in ds_config.items() if key != "train_batch_size"}))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc']))} is {one['input']!r}: {one['msg']}" for one in error.errors()]
        raise ConfigError(f"DeepSpeed refuses its config, {error.title}: " + "; ".join(problems)) from error
    except (DeepSpeedConfigError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"DeepSpeed refuses its config: {error}") from error
    for key in sorted(ds_config.keys() - reads) if env_rank() == 0 else ():
        logger().warning("DeepSpeed does not use %r of its config: %s", key, nearest(key, reads))


def _agree_on(value: Any, ours: Any, key: str, where: str) -> Any:
    if value not in (_AUTO, None) and value != ours:
        raise ConfigError(
            f"the DeepSpeed config has {key} = {value!r}, ours has {where} = {ours!r}",
            remedy=f'make them equal, or write {key!r}: "auto"',
        )
    return ours


def _without_auto(value: Any) -> Any:
    """Leave out every remaining ``"auto"``: DeepSpeed then uses its own default."""
    if isinstance(value, Mapping):
        return {k: _without_auto(v) for k, v in value.items() if v != _AUTO}
    return value
