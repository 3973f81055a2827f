"""Names in a config -> classes. One ``mmengine.registry.Registry`` per kind of object, plus a strict ``build``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from mmengine.registry import Registry

from unigen_ds.core.errors import ConfigError, nearest
from unigen_ds.core.hints import argument_hints, described, fits
from unigen_ds.core.log import logger

MODELS = Registry("unigen_model")
AUTOENCODERS = Registry("unigen_autoencoder")
TOKENIZERS = Registry("unigen_tokenizer")
DATASETS = Registry("unigen_dataset")
PACKERS = Registry("unigen_packer")
TRANSFORMS = Registry("unigen_transform")
CURVES = Registry("unigen_curve")
HOOKS = Registry("unigen_hook")
WRITERS = Registry("unigen_writer")
BACKENDS = Registry("unigen_backend")
REGISTRIES = (
    MODELS, AUTOENCODERS, TOKENIZERS, DATASETS, PACKERS, TRANSFORMS, CURVES, HOOKS, WRITERS, BACKENDS,
)  # fmt: skip
FOREIGN = ("mmengine", "xtuner")
"""Packages for whose classes ours of the same name stand: configs of theirs import them."""


def registered_name(kind: Any) -> str | None:
    """The name that stands for a class, or for ``'package.Class'``: its own or its counterpart's. None: it has none."""
    own = [name for registry in REGISTRIES for name, cls in registry.module_dict.items() if cls is kind]
    return own[0] if own else next((_last(kind) for r in REGISTRIES if counterpart(r, kind)), None)


def counterpart(registry: Registry, kind: Any) -> type | None:
    """The class here for one of mmengine's or xtuner's, or for ``'package.Class'`` of theirs or ours; else None."""
    text = kind if isinstance(kind, str) else getattr(kind, "__module__", "")
    known = text.split(".")[0] in (FOREIGN if isinstance(kind, type) else (*FOREIGN, "unigen_ds"))
    return registry.module_dict.get(_last(kind)) if known else None


def _last(kind: Any) -> str:
    return kind.rpartition(".")[2] if isinstance(kind, str) else getattr(kind, "__name__", "")


def resolve(registry: Registry, spec: Mapping[str, Any], *, where: str) -> tuple[type, dict[str, Any]]:
    """The class and the arguments of ``dict(type=..., **arguments)``.

    ``type`` is a registered name or a class. ``where`` is the config path shown in errors.
    Raises ``ConfigError`` for an unknown type, a missing type or an unknown argument, naming the nearest valid one.
    """
    if not isinstance(spec, Mapping) or "type" not in spec:
        raise ConfigError(f"{where} is {spec!r}", allowed="dict(type='...', ...)")
    arguments = {key: value for key, value in spec.items() if key != "type"}
    kind = spec["type"]
    cls = counterpart(registry, kind)
    if cls is not None:
        logger().info("%s: %s stands for the class of that name here", where, kind)
    elif isinstance(kind, str):
        cls = registry.module_dict.get(kind)
        if cls is None:
            raise ConfigError(f"{where}.type is {kind!r}", remedy=nearest(kind, registry.module_dict))
    elif callable(kind):
        cls = kind
    else:
        raise ConfigError(f"{where}.type is {kind!r}", allowed="a registered name or a class")
    check_arguments(cls, arguments, where=where)
    return cls, arguments


def check_arguments(cls: Any, arguments: Mapping[str, Any], *, where: str) -> None:
    """Raise ``ConfigError`` for an argument that ``cls`` does not have, or of another type than its hint says.

    Classes that take ``**kwargs`` accept all.
    """
    parameters = inspect.signature(cls).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for key in arguments:
            if key not in parameters:
                raise ConfigError(f"{where} has no key {key!r} ({cls.__name__})", remedy=nearest(key, parameters))
    hints = argument_hints(cls)
    for key, value in arguments.items():
        if key in hints and key in parameters and not fits(value, hints[key]) and value is not parameters[key].default:
            raise ConfigError(f"{where}.{key} is {value!r}", allowed=described(hints[key]))


def build(registry: Registry, spec: Mapping[str, Any], *, where: str, **extra: Any) -> Any:
    """Build ``spec`` with ``extra`` arguments that the config does not give. See ``resolve`` for errors."""
    cls, arguments = resolve(registry, spec, where=where)
    for key in arguments.keys() & extra.keys():
        raise ConfigError(f"{where}.{key} cannot be given here: it follows from the rest of the config")
    try:
        return cls(**arguments, **extra)
    except TypeError as error:
        if "argument" in str(error):
            raise ConfigError(f"{where} cannot be built: {error}") from error
        raise
