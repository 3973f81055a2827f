"""Names in a config -> classes -> objects. One ``mmengine.registry.Registry`` for each kind of object."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from mmengine.config import ConfigDict
from mmengine.registry import HOOKS as MMENGINE_HOOKS
from mmengine.registry import Registry

from unigen_ds.config.values import argument_hints, describe_hint, fits, format_value, nested_section
from unigen_ds.core.choices import BACKEND_WORDS
from unigen_ds.core.errors import ConfigError, DataError, UnknownKey, nearest, raise_any
from unigen_ds.system.log import notice

_Function = TypeVar("_Function", bound=Callable[..., Any])

MODELS = Registry("unigen_model")
FAMILIES = Registry("unigen_family")
AUTOENCODERS = Registry("unigen_autoencoder")
TOKENIZERS = Registry("unigen_tokenizer")
DATASETS = Registry("unigen_dataset")
SOURCES = Registry("unigen_source")
PACKERS = Registry("unigen_packer")
TRANSFORMS = Registry("unigen_transform")
FILTERS = Registry("unigen_filter")
CURVES = Registry("unigen_curve")
HOOKS = Registry("unigen_hook")
WRITERS = Registry("unigen_writer")
BACKENDS = Registry("unigen_backend")
OPTIMIZERS = Registry("unigen_optimizer")
LAYOUTS = Registry("unigen_layout")
METRICS = Registry("unigen_metric")
RESUME_CHECKS = Registry("unigen_resume_check")
DRY_RUN_CHECKS = Registry("unigen_dry_run_check")
FOREIGN_STATES = Registry("unigen_foreign_state")
REGISTRIES = (
    MODELS, FAMILIES, AUTOENCODERS, TOKENIZERS, DATASETS, PACKERS, TRANSFORMS, CURVES, HOOKS, WRITERS, BACKENDS,
    OPTIMIZERS, LAYOUTS, METRICS, SOURCES, FILTERS, RESUME_CHECKS, DRY_RUN_CHECKS, FOREIGN_STATES,
)  # fmt: skip
_METHODS: dict[Registry, tuple[str, ...]] = {
    MODELS: ("forward",), AUTOENCODERS: ("encode",), TOKENIZERS: ("encode", "decode"), DATASETS: ("lengths", "sample"),
    SOURCES: ("scan", "use", "read"), FILTERS: ("keeps",), PACKERS: ("plan",), CURVES: ("place", "evaluate"),
    HOOKS: ("after_update", "load_shards"), WRITERS: ("open", "write", "close"), BACKENDS: ("prepare", "load_tensors"),
    OPTIMIZERS: ("step", "add_param_group"), METRICS: ("update", "compute"),
}  # fmt: skip
"""Methods that a class of each kind has, checked before anything of it is called."""
_INSTEAD = {
    TOKENIZERS: "write dict(type='PretrainedTokenizer', path='DIR'), or ChatTokenizer for a VLM",
    DATASETS: "dict(type='DatasetAdapter', dataset=dict(type=...)) wraps a map-style data set",
}
"""What to write in place of a class of another library."""
FOREIGN = ("mmengine", "xtuner")
"""Packages whose classes are replaced by ours of the same name: their configs import them."""


def registered_name(kind: Any) -> str | None:
    """The registered name of a class or of ``'package.Class'``: its own or its counterpart's. None: it has none."""
    own = [name for registry in REGISTRIES for name, cls in registry.module_dict.items() if cls is kind]
    return own[0] if own else next((class_name(kind) for r in REGISTRIES if counterpart(r, kind)), None)


def counterpart(registry: Registry, kind: Any) -> type | None:
    """The class here for one of mmengine's or xtuner's, or for ``'package.Class'`` of theirs or ours; else None."""
    text = kind if isinstance(kind, str) else getattr(kind, "__module__", "")
    in_scope = text.split(".")[0] in (FOREIGN if isinstance(kind, type) else (*FOREIGN, "unigen_ds"))
    return registry.module_dict.get(class_name(kind)) if in_scope else None


def class_name(kind: Any) -> str:
    """Return the name of a class without its module; ``kind``: the class, or its name."""
    return str(getattr(kind, "__name__", kind)).rpartition(".")[2]


def find(registry: Registry, spec: Mapping[str, Any], *, where: str) -> type:
    """The class of ``dict(type=..., ...)``. Raises ``ConfigError`` at ``where``: unknown, missing, or another kind."""
    if not isinstance(spec, Mapping) or "type" not in spec:
        raise ConfigError(f"{where} is {spec!r}", allowed="dict(type='...', ...)")
    kind = spec["type"]
    cls = counterpart(registry, kind)
    if cls is None and registry is CURVES and isinstance(kind, type) and kind.__name__ in CURVES.module_dict:
        cls = CURVES.module_dict[kind.__name__]  # a scheduler of torch means the curve of its name
    if cls is None and isinstance(kind, str):
        cls = registry.module_dict.get(kind)
        if cls is None:
            # hooks written for mmengine register themselves in its registry
            of_mmengine = MMENGINE_HOOKS.module_dict if registry is HOOKS else {}
            own = [name for name, one in of_mmengine.items() if not _path(one).startswith("mmengine.")]
            choices = f"--backend {BACKEND_WORDS}" if registry is BACKENDS else None
            remedy = nearest(kind, [*registry.module_dict, *own])
            raise ConfigError(f"{where}.type is {kind!r}", allowed=choices, remedy=remedy)
    cls, remedy = cls or kind, _INSTEAD.get(registry, "docs/extending/index.md has what a class of each kind defines")
    if not isinstance(cls, type):
        what = f"the function {_path(cls)}, which is not called" if callable(cls) else repr(cls)
        raise ConfigError(f"{where}.type is {what}", allowed="a registered name or a class", remedy=remedy)
    missing = [name for name in _METHODS.get(registry, ()) if not hasattr(cls, name)]
    if missing:
        raise ConfigError(f"{where}.type is {_path(cls)}, which has no {', '.join(missing)}", remedy=remedy)
    return cls


def _path(kind: Any) -> str:
    return f"{getattr(kind, '__module__', '?')}.{getattr(kind, '__qualname__', kind)}"


@dataclass(frozen=True)
class Component:
    """``dict(type=..., **arguments)``: checked, not yet built."""

    cls: type
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The arguments in the config; defaults are the constructor's."""
    kind: Any = None
    """``type`` as the config has it; None: the default of its field."""
    where: str = ""
    """Its dotted path in the config."""
    registry: Registry | None = field(default=None, repr=False, compare=False)
    from_run: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """Arguments that the run sets."""

    @property
    def name(self) -> str:
        """The name that a config uses for the class."""
        return registered_name(self.cls) or f"{self.cls.__module__}.{self.cls.__qualname__}"

    def get(self, argument: str, default: Any = None) -> Any:
        """The argument as given, else the constructor's default, else ``default``."""
        return {**argument_defaults(self.cls), **self.arguments}.get(argument, default)

    @property
    def spec(self) -> dict[str, Any]:
        """``dict(type=..., **arguments)``: a copy."""
        return {"type": self.cls if self.kind is None else self.kind, **_attributes(self.arguments)}

    def build(self, **extra: Any) -> Any:
        """An object, with ``extra`` arguments that no config sets. A user's errors have the path in the config."""
        if self.registry is not None:
            _log_counterpart(self.registry, self.kind, self.where)
        try:
            return self.cls(**_attributes(self.arguments), **extra)
        except (ConfigError, DataError) as error:
            raise error.at(self.where) if self.where else error  # noqa: B904 - the same error
        except TypeError as error:
            if "argument" in str(error):
                raise ConfigError(f"{self.where} cannot be built: {error}") from error
            raise


def _attributes(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A copy whose mappings are mmengine's, whose keys are attributes as well: constructors were always given those."""
    return dict(ConfigDict(copy.deepcopy(dict(arguments))).items())


def argument_defaults(cls: Any) -> dict[str, Any]:
    """Argument -> default of a constructor, of those that have one."""
    return {name: p.default for name, p in _parameters(cls).items() if p.default is not p.empty}


def resolve(registry: Registry, spec: Mapping[str, Any], *, where: str) -> tuple[type, dict[str, Any]]:
    """The class and the arguments. Raises ``ConfigError`` as ``find`` does, and one for all wrong arguments."""
    cls = find(registry, spec, where=where)
    _log_counterpart(registry, spec["type"], where)
    arguments = {key: value for key, value in spec.items() if key != "type"}
    check_arguments(cls, arguments, where=where)
    return cls, arguments


def _log_counterpart(registry: Registry, kind: Any, where: str) -> None:
    if counterpart(registry, kind) is not None:
        notice(f"{where}: {kind} is read as the class of that name in unigen_ds")


def build(registry: Registry, spec: Mapping[str, Any], *, where: str, **extra: Any) -> Any:
    """Build ``spec`` with ``extra`` arguments that the config does not set. See ``resolve`` for errors."""
    cls, arguments = resolve(registry, spec, where=where)
    for key in arguments.keys() & extra.keys():
        raise ConfigError(f"{where}.{key} cannot be given here: it follows from the rest of the config")
    return Component(cls, arguments, where=where).build(**extra)


def component_problems(
    registry: Registry, spec: Mapping[str, Any], *, where: str, from_run: Collection[str] = ()
) -> list[ConfigError]:
    """What is wrong with a component, without calling anything of it. ``from_run``: arguments that the run sets."""
    try:
        cls = find(registry, spec, where=where)
    except ConfigError as error:
        return [error]
    arguments = {key: value for key, value in spec.items() if key != "type"}
    errors = argument_problems(cls, arguments, where=where, from_run=from_run)
    singles = [p for p in _parameters(cls).values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    missing = [f"{where}.{p.name}" for p in singles if p.default is p.empty and p.name not in {*arguments, *from_run}]
    return errors + ([ConfigError(f"the config has no {', '.join(missing)} ({cls.__name__})")] if missing else [])


def check_arguments(cls: Any, arguments: Mapping[str, Any], *, where: str, from_run: Collection[str] = ()) -> None:
    """Raise ``ConfigError`` for what ``argument_problems`` finds."""
    raise_any(argument_problems(cls, arguments, where=where, from_run=from_run))


def argument_problems(
    cls: Any, arguments: Mapping[str, Any], *, where: str, from_run: Collection[str] = ()
) -> list[ConfigError]:
    """An error for each unknown or mistyped argument; ``from_run`` ones, which no config sets, are not suggested."""
    parameters = _parameters(cls)
    errors: list[ConfigError] = []
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        valid = [name for name in parameters if name not in from_run]
        for key in arguments:
            if key not in parameters:
                problem = f"{where} has no key {key!r} ({cls.__name__})"
                errors.append(UnknownKey(key, section=where, valid=valid, problem=problem))
    hints = {key: hint for key, hint in argument_hints(cls).items() if key in parameters}
    for key, hint in {**{key: hints[key] for key in arguments if key in hints}, **hints}.items():
        value, part = arguments.get(key, parameters[key].default), nested_section(hint)
        many = isinstance(value, (list, tuple)) and getattr(part, "many", False)
        if part is not None and (value is None or isinstance(value, Mapping) or many):
            elsewhere = bool(arguments.get(part.rest_from))
            errors += part.argument_problems(value, where=f"{where}.{key}", elsewhere=elsewhere)
        elif key in arguments and value is not parameters[key].default and (part or not fits(value, hint)):
            choices = (
                "a list of dict(type='...', ...), or one of them" if hasattr(part, "many") else describe_hint(hint)
            )
            errors.append(ConfigError(f"{where}.{key} is {format_value(value)}", allowed=choices))
    return errors


def _parameters(cls: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(cls).parameters
    except (TypeError, ValueError):  # of a class without a signature
        return {}


def checked(where: str | None = None) -> Callable[[_Function], _Function]:
    """Decorator of a component's method: a direct call raises ``ConfigError``, too, for what no config can have.

    ``where``: how the paths in errors begin; None: with the name of the class.
    """

    def decorate(init: _Function) -> _Function:
        names = [*inspect.signature(init).parameters][1:]

        @functools.wraps(init)
        def checking(self: Any, *args: Any, **kwargs: Any) -> Any:
            values = dict(zip(names, args, strict=False)) | kwargs
            check_arguments(init, values, where=where or type(self).__name__, from_run=("self",))
            return init(self, *args, **kwargs)

        return cast(_Function, checking)

    return decorate
