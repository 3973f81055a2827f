"""Config files: mmengine's ``Config`` (text style, ``_base_``, YAML, JSON), overrides, and names that nothing reads.

mmengine's own ``merge_from_dict`` creates whatever key it is given, so a mistyped override is silently ignored
there; here the sections refuse such a key and name the nearest valid one. A Python file may have helper
variables of any name at its top; a setting there that nothing reads is an error.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

from mmengine.config import Config, ConfigDict

from unigen_ds.config.file import read_file, shipped_configs, unread_names
from unigen_ds.config.registry import registered_name
from unigen_ds.config.translation import Change, hint, translate
from unigen_ds.core.errors import ConfigError, UnknownKey, close, suggestion


@dataclass(frozen=True)
class ConfigValues:
    """A config file with its overrides, translated, and not yet checked."""

    values: dict[str, Any]
    """Plain values, with what no section has."""
    problems: list[ConfigError]
    """Problems of names and overrides, which are reported together with those of the sections."""
    changes: list[Change]
    """Keys of mmengine that were translated."""
    overrides: Mapping[str, Any]
    path: Path
    text: str


def stated_world_size(values: Mapping[str, Any]) -> int:
    """``world_size`` of a config that is not yet checked; 1 where it has none, or one that is refused later."""
    number = values.get("world_size")
    return number if isinstance(number, int) and number > 0 else 1


def config_path(name: str | Path) -> Path:
    """A path that exists, or the shipped config of that name, in the ``configs/`` of a family or an example."""
    path = Path(name)
    if path.suffix in (".py", ".yaml", ".yml", ".json") and path.exists():
        return path.resolve()
    configs = shipped_configs()
    if str(name) in configs:
        return configs[str(name)]
    what = f"has the suffix {path.suffix!r}" if path.is_file() else "is neither a file nor a shipped config"
    raise ConfigError(
        f"config {str(name)!r} {what}",
        allowed="a .py, .yaml or .json file, or one of " + ", ".join(configs),
        remedy=suggestion(path.stem, configs),
    )


def read(name: str | Path) -> Config:
    """The file with its bases, as it is, and a work dir. Raises ``ConfigError`` for a missing or broken file."""
    path = config_path(name)
    try:
        config = _without_means(read_file(path))
    except ImportError as error:  # of a name that mmengine imports when it is first used
        raise ConfigError(f"config {path} cannot be read: {error}") from error
    if config.get("work_dir") is None:
        config["work_dir"] = str(Path("work_dirs") / path.stem)
    return config


def read_values(
    name: str | Path, overrides: Iterable[str] | Mapping[str, Any], schema: Mapping[str, Any]
) -> ConfigValues:
    """Read, override and translate a config. ``schema``: its keys as nested mappings. Raises ``ConfigError``."""
    config = read(name)
    pairs = dict(overrides) if isinstance(overrides, Mapping) else dict(map(parse_override, overrides))
    problems = apply_overrides(config, pairs)
    values = plain_values(config)
    changes = translate(values)
    problems += top_problems(values, schema, file=config.filename, overrides=pairs)
    own = {key for key in values if key not in schema and not key.startswith("_")}  # the file has read these helpers
    values = {key: value for key, value in values.items() if key not in own}
    return ConfigValues(values, problems, changes, pairs, Path(config.filename), config.text)


def plain_values(config: Any) -> Any:
    """A config, or a part of it, as plain dicts, lists and tuples: a copy."""
    if isinstance(config, _NODES):
        return {key: plain_values(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return type(config)(map(plain_values, config))
    return config


def _without_means(config: Config) -> Config:
    """Without imported names and functions of a config, which are helpers, not settings."""
    settings = config.to_dict()  # mmengine leaves out what a config of the lazy style imported
    for name in [*config]:
        if name not in settings or isinstance(settings[name], (type, FunctionType)):
            config.pop(name)
    optim_wrapper = config.get("optim_wrapper")
    optimizer: Any = optim_wrapper.get("optimizer") if isinstance(optim_wrapper, Mapping) else None
    for section in (config.get("model"), optimizer):
        kind = section.get("type") if isinstance(section, Mapping) else None
        if isinstance(kind, type):  # by name, as checkpoints and comparisons have it
            torchs = kind.__module__.startswith("torch.optim")
            section["type"] = kind.__name__ if torchs else registered_name(kind) or kind
    return config


def parse_override(text: str) -> tuple[str, Any]:
    """``'a.b=3'`` -> ``('a.b', 3)``; the value is a Python literal, ``true``/``false``/``null``, else a string."""
    key, separator, raw = text.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"override {text!r}", allowed="KEY=VALUE, as in optim_wrapper.optimizer.lr=1e-4")
    words = {"true": True, "false": False, "null": None, "none": None}
    if raw.lower() in words:
        return key.strip(), words[raw.lower()]
    try:
        return key.strip(), _literal(ast.parse(raw.strip(), mode="eval").body)
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: thousands of brackets
        return key.strip(), raw


def override_path(key: str) -> list[str]:
    """The steps of an override's key; a list's member is ``.0`` or, as ``--print-config`` shows it, ``[0]``."""
    return re.sub(r"\[(\d+)\]", r".\1", key).split(".")


def _literal(node: ast.expr) -> Any:
    """A literal, in which ``dict(a=1)`` is one, too. Raises ``ValueError`` for anything else."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        if any(keyword.arg is None for keyword in node.keywords):
            raise ValueError("dict(**...)")
        return {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}
    if isinstance(node, (ast.List, ast.Tuple)):
        members = map(_literal, node.elts)
        return [*members] if isinstance(node, ast.List) else (*members,)
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {_literal(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    return ast.literal_eval(node)


_NODES: Any = (Mapping, Config)  # mmengine's Config behaves like a mapping but is none


def apply_overrides(config: Config, overrides: Mapping[str, Any]) -> list[ConfigError]:
    """Set each value at its path, in place. Missing sections are added: they are checked with the others."""
    errors: list[ConfigError] = []
    for key, value in overrides.items():
        try:
            _set(config, override_path(key), without_delete(value), key)
        except ConfigError as error:
            errors.append(error)
    return errors


def without_delete(value: Any) -> Any:
    """An override's value without mmengine's ``_delete_=True``: it replaces what the config has anyway."""
    if type(value) in (list, tuple):
        return type(value)(map(without_delete, value))
    if not isinstance(value, dict):
        return value
    return {key: without_delete(one) for key, one in value.items() if (key, one) != ("_delete_", True)}


def _set(config: Config, path: Sequence[str], value: Any, name: str) -> None:
    node: Any = config
    for number, key in enumerate(path):
        last = number == len(path) - 1
        if isinstance(node, list):
            if not key.isdigit() or int(key) >= len(node):
                raise ConfigError(f"override {name!r}: {key!r} is not an index of a list of {len(node)}")
            step: Any = int(key)
        elif isinstance(node, _NODES):
            step = key
            if not last and node.get(key) is None:
                node[key] = ConfigDict()
        else:
            raise ConfigError(f"override {name!r}: {'.'.join(path[:number])} is {node!r} and has no keys")
        if last:
            node[step] = value
        node = node[step]


def top_problems(
    config: Iterable[str], schema: Mapping[str, Any], *, file: str | None = None, overrides: Collection[str] = ()
) -> list[ConfigError]:
    """Names at the top that nothing reads; in a Python file only those like a key, and those of ``overrides``."""
    own = {override_path(key)[0] for key in overrides}
    names = [str(key) for key in config if key not in schema and (not str(key).startswith("_") or key in own)]
    path = Path(file or "")
    unread = unread_names(path) if names and path.is_file() else {*names}
    errors: list[ConfigError] = []
    for name in names:
        meant = hint(name, schema) or (f"did you mean '{near}'?" if (near := close(name, schema, cutoff=0.8)) else None)
        if name in own or (name in unread and (meant or path.suffix != ".py")):
            errors.append(UnknownKey(name, section="", valid=schema, hint=meant))
    return errors


def overrides_of(arguments: Any, *, checkpoint: str | None = None) -> dict[str, Any]:
    """Changes of a config by a tool's command line; a ``checkpoint`` to resume from, whatever the config names."""
    overrides = dict(map(parse_override, arguments.cfg_options))
    if checkpoint is not None:
        overrides |= {"resume": checkpoint, "load_from": None, "load_cfg": None}
    if arguments.backend is not None:
        overrides = with_backend(overrides, arguments.backend)
    names = ("work_dir", "checkpoint_dir", "load_from", "base", "launcher", "on_batch_change", "on_data_change",
             "skip_sequences")  # fmt: skip
    values = {name: getattr(arguments, name, None) for name in names}
    return overrides | {name: value for name, value in values.items() if value is not None}


def backend_spec(text: str) -> dict[str, str]:
    """``deepspeed:zero1`` -> ``{"type": "deepspeed", "config": "zero1"}``."""
    kind, _, detail = text.partition(":")
    option = {"deepspeed": "config", "fsdp": "sharding_strategy"}.get(kind)
    return {"type": kind} | ({option: detail} if option and detail else {})


def with_backend(overrides: Mapping[str, Any], text: str) -> dict[str, Any]:
    """``overrides`` after ``--backend``, whose settings they are. Raises ``ConfigError`` for a contradiction."""
    spec = backend_spec(text)
    for key, value in {"backend": spec, **{f"backend.{name}": value for name, value in spec.items()}}.items():
        if overrides.get(key, value) != value:
            raise ConfigError(f"--backend {text} contradicts {key}={overrides[key]!r}", remedy="give one of the two")
    return {"backend": spec} | {key: value for key, value in overrides.items() if key != "backend"}
