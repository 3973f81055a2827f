"""Training configs: mmengine's ``Config`` (text style, ``_base_``, YAML, JSON) with strict keys.

mmengine's own ``merge_from_dict`` creates whatever key it is given, so a mistyped override is silently ignored
there; here an unknown key, in the file or in ``--cfg-options``, is an error that names the nearest valid one. All of a
config's problems are one error. A Python file may have helper variables at its top: they are gone when it is loaded.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from mmengine.config import Config, ConfigDict

from unigen_ds.core.config_file import read_file, unread_names
from unigen_ds.core.config_hints import SETTINGS, backend_hint, hint, is_setting
from unigen_ds.core.errors import ConfigError, UnknownKey, close, nearest, raise_any
from unigen_ds.core.hints import described, fits
from unigen_ds.core.log import notice
from unigen_ds.core.paths import expand_paths
from unigen_ds.core.registry import registered_name

PACKAGE = Path(__file__).resolve().parent.parent


class OfFamily(dict[str, Any]):
    """Keys of a section that a family of models may add to: ``runner/components.py`` checks the others."""


_COMPONENT = Mapping | None  # dict(type=...): its arguments are checked against the class when it is built
_COMPONENTS = Mapping | Sequence[Mapping] | None
_DATALOADER = {
    "batch_size": int | None, "global_batch_size": int | None, "num_workers": int, "drop_last": bool,
    "seq_length": int, "packing": _COMPONENT, "dataset": _COMPONENTS, "prefetch_factor": int | None,
    "pin_memory": bool, "overflow": str | None, "max_skipped_fraction": float, "timeout": float,
}  # fmt: skip
SCHEMA: dict[str, Any] = {
    "model": _COMPONENT,
    "tokenizer": _COMPONENT,
    "processor": OfFamily({
        "vit_transform": _COMPONENT, "vae_transform": _COMPONENT, "vit_augment": Sequence[Mapping],
        "text_dropout": float, "vit_dropout": float, "vae_dropout": float, "timestep": str, "ce_reweight": bool,
        "max_image_size": int | None, "resize_to_max_side_len": bool,
    }),
    "train_dataloader": _DATALOADER,
    "val_dataloader": _DATALOADER,
    "optim_wrapper": {
        "optimizer": _COMPONENT, "accumulative_counts": int, "precision": str,
        "clip_grad": {"max_norm": float | None},
        "paramwise_cfg": {
            "groups": Sequence[Mapping] | None, "norm_decay_mult": float, "bias_decay_mult": float
        },
    },
    "loss_weights": OfFamily({"text": float, "image": float}),
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
    "env": {
        "dist_timeout_s": float, "num_threads": int | None, "peak_tflops": float | None,
        "matmul_precision": str | None, "deterministic": bool | None, "cuda_allocator": str | None,
    },
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


def config_path(name: str | Path) -> Path:
    """A path that exists, or the shipped config of that name: in ``configs/``, of the package or of one inside it."""
    path = Path(name)
    if path.suffix in (".py", ".yaml", ".yml", ".json") and path.exists():
        return path.resolve()
    shipped = {p.stem: p for p in sorted(PACKAGE.glob("**/configs/*.py"), key=lambda p: p.stem)}
    if str(name) in shipped:
        return shipped[str(name)]
    if path.parts[-3:-1] == ("unigen_ds", "configs") and path.stem in shipped:  # where all were in earlier versions
        notice(f"{name} is now {shipped[path.stem]}; its name alone, {path.stem}, is found anywhere.")
        return shipped[path.stem]
    raise ConfigError(
        f"config {str(name)!r} is neither a file nor a shipped config",
        allowed="a .py, .yaml or .json file, or one of " + ", ".join(shipped),
    )


Check = Callable[[Mapping[str, Any]], Sequence[ConfigError]]


def load_config(
    name: str | Path, overrides: Iterable[str] | Mapping[str, Any] = (), *, also: Check | None = None
) -> Config:
    """Read a config, check its keys, apply overrides (``K=V`` texts of ``--cfg-options`` or a mapping of dotted paths).

    ``also`` finds further problems, which are reported in the same error. Raises ``ConfigError`` for a missing or
    broken file, an unknown key, or an override of a path that does not exist.
    """
    path = config_path(name)
    config = _without_means(read_file(path))
    if config.get("work_dir") is None:
        config["work_dir"] = str(Path("work_dirs") / path.stem)
    given = dict(overrides) if isinstance(overrides, Mapping) else dict(map(parse_override, overrides))
    errors: list[ConfigError] = []
    for dotted, value in given.items():
        try:
            _apply(config, dotted, value)
        except ConfigError as error:
            errors.append(error)
    errors += key_problems(config)
    raise_any([*errors, *(also(config) if also else ())])
    for key in [*config]:
        if key not in SCHEMA and not key.startswith("_"):
            config.pop(key)  # a helper variable: the file has read it
    expand_paths(config)
    return config


def _without_means(config: Config) -> Config:
    """Without names that a config imports or defines as functions, which are means, not settings."""
    settings = config.to_dict()  # mmengine leaves out what a config of the lazy style imported
    for name in [*config]:
        if name not in settings or isinstance(settings[name], (type, FunctionType)):
            config.pop(name)
    for section in (config.get("model"), _inside(config.get("optim_wrapper"), "optimizer")):
        kind = _inside(section, "type")
        if isinstance(kind, type):  # by name, as checkpoints and comparisons have it
            torchs = kind.__module__.startswith("torch.optim")
            section["type"] = kind.__name__ if torchs else registered_name(kind) or kind
    return config


def _inside(section: Any, key: str) -> Any:
    return section.get(key) if isinstance(section, Mapping) else None


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
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: thousands of brackets
        return dotted.strip(), raw


_NODES: Any = (Mapping, Config)  # mmengine's Config behaves like a mapping but is none


def _apply(config: Any, dotted: str, value: Any) -> None:
    path: list[str] = []
    node: Any = config
    schema: Any = SCHEMA
    *parents, last = dotted.split(".")
    if not parents and last not in SCHEMA and (last in SETTINGS or (last in config and not last.startswith("_"))):
        raise ConfigError(
            f"override {dotted!r} would have no effect: the config read this helper while it was loaded",
            remedy=hint(last, SCHEMA) or f"override the key that {last!r} was used for",
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
    is_component = "type" in node or isinstance(schema, OfFamily)  # its own arguments are checked when it is built
    if last not in known and not is_component:
        problem = f"override {dotted!r}: no key {last!r} there"
        advice, section = hint(dotted, SCHEMA), ".".join(parents)
        raise UnknownKey(last, section=section, valid=known if parents else SCHEMA, hint=advice, problem=problem)
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
    """Raise ``ConfigError`` for what ``key_problems`` finds."""
    raise_any(key_problems(config))


def key_problems(config: Mapping[str, Any]) -> list[ConfigError]:
    """An error for every unknown key and every value of a wrong type.

    A name that begins with an underscore is the user's own. A section may be None: all its keys are left out.
    """
    errors: list[ConfigError] = []
    for key, value in config.items():
        if key in SCHEMA:
            errors += _problems_below(value, SCHEMA[key], key)
    others = [str(key) for key in config if key not in SCHEMA and not str(key).startswith("_")]
    return errors + _top_problems(config, others)


def _top_problems(config: Any, names: Sequence[str]) -> list[ConfigError]:
    """Names at the top that are no section. In a Python file only those that nothing reads and that mean something."""
    path = Path(getattr(config, "filename", None) or "")
    if not names or path.suffix != ".py" or not path.is_file():
        return [UnknownKey(name, section="", valid=SCHEMA, hint=hint(name, SCHEMA)) for name in names]
    errors: list[ConfigError] = []
    for name in sorted(unread_names(path) & {*names}, key=names.index):
        meant = close(name, SCHEMA, cutoff=0.8)
        if is_setting(name, SCHEMA):
            problem = f"{name!r} at the top of the config has no effect"
            advice = "nothing reads it there; " + (hint(name, SCHEMA) or "use it in the file, or delete it")
            errors.append(UnknownKey(name, section="", valid=SCHEMA, hint=advice, problem=problem))
        elif meant:
            advice = f"did you mean '{meant}'? A helper variable of your own may begin with '_'"
            errors.append(UnknownKey(name, section="", valid=SCHEMA, hint=advice))
    return errors


def _problems_below(value: Any, schema: Any, where: str) -> list[ConfigError]:
    """The same for a section."""
    if not isinstance(schema, Mapping):
        meant = backend_hint(value) if where == "backend" else None
        remedy = f"write backend={backend_spec(meant)!r}" if meant else None
        wrong = ConfigError(f"{where} is {value!r}", allowed=described(schema), remedy=remedy)
        return [] if fits(value, schema) else [wrong]
    if not isinstance(value, Mapping | None):
        return [ConfigError(f"{where} is {value!r}", allowed=f"dict({', '.join(f'{key}=' for key in schema)})")]
    errors: list[ConfigError] = []
    for key, inner in (value or {}).items():
        path = f"{where}.{key}"
        if key in schema:
            errors += _problems_below(inner, schema[key], path)
        elif not isinstance(schema, OfFamily):
            errors.append(UnknownKey(str(key), section=where, valid=schema, hint=hint(path, SCHEMA)))
    return errors


BACKEND_WORDS = "single, deepspeed[:zero1|zero2|zero3|...|FILE.json], fsdp[:FULL_SHARD|...]"


def backend_spec(text: str) -> dict[str, str]:
    """``single`` | ``deepspeed[:zero1|...|FILE.json]`` | ``fsdp[:FULL_SHARD|...]`` -> the config's ``backend``."""
    kind, _, detail = text.partition(":")
    if not detail and (meant := backend_hint(kind)):
        raise ConfigError(f"--backend {text}", allowed=BACKEND_WORDS, remedy=f"did you mean --backend {meant}?")
    option = {"deepspeed": "config", "fsdp": "sharding_strategy"}.get(kind)
    return {"type": kind} | ({option: detail} if option and detail else {})
