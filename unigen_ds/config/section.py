"""Typed settings: a config's mapping -> one frozen tree of sections, or all that is wrong with it.

A ``Section`` is a pydantic model. Its fields alone have a key's default, unit, limits and description; the
class is beside the code that uses it (``data/settings.py``, ``optim/settings.py``, ...), and
``runner/settings/tree.py`` combines them. A field of type ``Component`` is ``dict(type=..., **arguments)``: the class
is looked up in the registry of the field's ``Of``, and the arguments are checked by the annotations of its constructor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin

from mmengine.registry import Registry
from pydantic import BaseModel, BeforeValidator, ValidationError, model_validator
from pydantic import ConfigDict as ModelConfig
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, core_schema
from typing_extensions import Self

from unigen_ds.config.registry import Component as Component
from unigen_ds.config.registry import argument_defaults as argument_defaults
from unigen_ds.config.registry import component_problems, find
from unigen_ds.config.translation import hint
from unigen_ds.config.values import argument_hints, as_tuple, describe_hint, nested_section
from unigen_ds.core.errors import ConfigError, UnknownKey, raise_any


@dataclass(frozen=True)
class Of:
    """Metadata of a ``Component`` field: where its class is looked up."""

    registry: Registry
    default: type | None = None
    """The class where the config has no ``type``."""
    from_run: tuple[str, ...] = ()
    """Arguments that the run sets: a config cannot."""
    rest_from: str | None = None
    """Where this component is an argument of another, what ``Section.rest_from`` is."""
    many: bool = False
    """Whether an argument of a component is a list of components."""
    rewrite: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    """A config's mapping -> the one that is meant; None: it is the same."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        schema = core_schema.no_info_plain_validator_function(self._component)
        return core_schema.nullable_schema(schema) if type(None) in get_args(source) else schema

    def _component(self, config: Any) -> Component:
        if isinstance(config, Component):
            return config
        if self.problems(config, where=""):
            raise PydanticCustomError("component", "not a component", {"of": self})
        spec = self._validate(config)
        cls, kind = find(self.registry, spec, where=""), spec["type"] if "type" in config else None
        arguments = {key: value for key, value in spec.items() if key != "type"}
        return Component(cls, arguments, kind, registry=self.registry, from_run=self.from_run)

    def _validate(self, config: Any) -> Any:
        if not isinstance(config, Mapping):
            return config
        spec = {"type": self.default, **config} if self.default else config
        return spec if self.rewrite is None else self.rewrite(spec)

    def problems(self, config: Any, *, where: str) -> list[ConfigError]:
        """What is wrong with ``dict(type=..., **arguments)``."""
        spec = self._validate(config)
        if isinstance(spec, Mapping) and (both := sorted(set(self.from_run) & set(spec))):
            problem = f"{where}.{both[0]} cannot be given here: it follows from the rest of the config"
            return [ConfigError(problem, remedy="leave it out")]
        return component_problems(self.registry, spec, where=where, from_run=self.from_run)

    def complete(self, config: Any) -> Any:
        """See ``Section.complete``."""
        spec = self._validate(config.spec if isinstance(config, Component) else config)
        try:
            cls = find(self.registry, spec, where="")
        except ConfigError:
            return config
        config = {key: value for key, value in spec.items() if key != "type"}
        defaults = {key: value for key, value in argument_defaults(cls).items() if key not in self.from_run}
        values = {"type": Component(cls).name, **defaults, **config}
        for key, annotation in argument_hints(cls).items():
            if key in values and (part := nested_section(annotation)) is not None:
                elsewhere = bool(config.get(part.rest_from))
                values[key] = part.argument_completed(values[key], elsewhere=elsewhere)
        return values

    def argument_problems(self, config: Any, *, where: str, elsewhere: bool) -> list[ConfigError]:
        """What is wrong with an argument; ``elsewhere``: another argument (``rest_from``) has what is left out."""
        if self.many:
            each = enumerate(one_or_many(config))
            return [problem for i, one in each for problem in self.problems(one, where=f"{where}[{i}]")]
        if elsewhere and "type" not in (config or {}):
            return []
        if config is None:
            return [ConfigError(f"{where} is not given", allowed="dict(type='...', ...)")] if self.rest_from else []
        return self.problems(config, where=where)

    def argument_completed(self, config: Any, *, elsewhere: bool) -> Any:
        """An argument with every default that does not depend on a file."""
        if self.many:
            return [self.complete(one) for one in one_or_many(config)]
        return config if config is None or elsewhere else self.complete(config)


def one_or_many(value: Any) -> Any:
    """What may be left out, one mapping, or a list of them, as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, (Mapping, Component)) else as_tuple(value)


AS_LIST = BeforeValidator(one_or_many)
"""Metadata of a field that is a tuple: a config may have a list, one member alone, or None for none."""


class Section(BaseModel):
    """One mapping of a config, as typed values. Frozen; validated strictly; an unknown key is an error."""

    model_config = ModelConfig(frozen=True, strict=True, extra="forbid", arbitrary_types_allowed=True)
    rest_from: ClassVar[str | None] = None
    """Another argument (``pretrained``) that, where it is given, has the keys that are left out here."""

    @model_validator(mode="before")
    @classmethod
    def _left_out(cls, config: Any) -> Any:
        """None is a section whose keys are all left out. A name that begins with an underscore is the user's own."""
        if config is None:
            return {}
        return without_own(config) if isinstance(config, Mapping) else config

    @classmethod
    def parse(cls, config: Any, *, where: str = "") -> Self:
        """Raises one ``ConfigError`` for all that is wrong."""
        section, errors = cls.try_parse(config, where=where)
        raise_any(errors)
        assert section is not None
        return section

    @classmethod
    def try_parse(cls, config: Any, *, where: str = "", missing: bool = True) -> tuple[Self | None, list[ConfigError]]:
        """The section, or an error for each problem. ``missing``: whether a required key that is left out is one."""
        try:
            section = cls.model_validate(config)
        except ValidationError as error:
            problems = [one for one in error.errors() if missing or one["type"] != "missing"]
            return None, _translate_errors(cls, config, problems, where)
        for component, path in _components(section, where):
            object.__setattr__(component, "where", path)  # just created, and not yet used elsewhere
        return section, []

    @classmethod
    def with_defaults(cls, config: Mapping[str, Any] | None, *, where: str) -> dict[str, Any]:
        """Every key with its value, or the default. Raises one ``ConfigError`` for all that is wrong."""
        cls.parse(config, where=where)
        values: dict[str, Any] = cls.complete(without_own(config or {}))
        return values

    @classmethod
    def argument_problems(cls, config: Any, *, where: str, elsewhere: bool) -> list[ConfigError]:
        if config is None and (elsewhere or cls.rest_from is None):
            return []
        return cls.try_parse(config, where=where, missing=not elsewhere)[1]

    @classmethod
    def argument_completed(cls, config: Any, *, elsewhere: bool) -> Any:
        return config if elsewhere or (config is None and cls.rest_from is None) else cls.complete(config)

    @classmethod
    def is_several(cls, config: Any) -> bool:
        """Whether a config's value is a mapping of names to sections of this kind, where it may be one."""
        return False

    def items(self) -> Iterator[tuple[str, Any]]:
        """Every key with its value; of several sections every name with its section."""
        for name in type(self).model_fields:
            yield name, getattr(self, name)

    @classmethod
    def complete(cls, config: Any) -> Any:
        """A config's plain values with the defaults of left-out keys, unchecked: it may be of another version."""
        if isinstance(config, Section):  # a default
            config = dict(config.items())
        if not isinstance(config, Mapping | None):
            return config
        if config is not None and cls.is_several(config):
            return {name: None if one is None else cls.complete(one) for name, one in config.items()}
        values = dict(config or {})
        for name, info in cls.model_fields.items():
            part, many = part_of(info.annotation, info.metadata)
            default = None if info.is_required() else info.get_default(call_default_factory=True)
            value = values.get(name, default)
            if isinstance(part, Of) and many:
                value = [part.complete(one) for one in one_or_many(value)]
            elif isinstance(part, Of):
                value = part.complete({} if value is None and name not in values and part.default else value)
            elif part is not None and not many and (value is not None or type(None) not in get_args(info.annotation)):
                value = part.complete(value)
            values[name] = value
        return values


def without_own(config: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """A config's mapping without a user's own names, which begin with an underscore."""
    return {key: value for key, value in config.items() if not str(key).startswith("_")}


def _components(value: Any, path: str) -> Iterator[tuple[Component, str]]:
    if isinstance(value, Component):
        yield value, path
    elif isinstance(value, Section):
        for name, inner in value.items():
            yield from _components(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, tuple):
        for index, inner in enumerate(value):
            yield from _components(inner, f"{path}[{index}]")


# ---- what a field is ------------------------------------------------------------------------------------------------


def part_of(hint: Any, metadata: Sequence[Any] = ()) -> tuple[type[Section] | Of | None, bool]:
    """The section or the ``Of`` in the annotation of a field, and whether the field is a list or mapping of them."""
    if (of := next((one for one in metadata if isinstance(one, Of)), None)) is not None:
        return of, False
    if isinstance(hint, type) and issubclass(hint, Section):
        return hint, False
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return part_of(inner[0], inner[1:])
    parts = (part_of(one) for one in inner)
    part, many = next((one for one in parts if one[0] is not None), (None, False))
    return part, many or (part is not None and origin not in (Union, UnionType))


def section_of(info: FieldInfo) -> type[Section] | None:
    """The section that a field is, also where it may be None."""
    part, many = part_of(info.annotation, info.metadata)
    return part if isinstance(part, type) and not many else None


def keys(section: type[Section]) -> dict[str, Any]:
    """The keys of a section: those below it where a key is a section itself, else None."""
    names = dict[str, Any].fromkeys(section.model_fields)
    for name, info in section.model_fields.items():
        if (inner := section_of(info)) and inner.model_config.get("extra") == "forbid":
            names[name] = keys(inner)
    return names


# ---- errors ---------------------------------------------------------------------------------------------------------


def _translate_errors(cls: type[Section], config: Any, problems: Sequence[Any], where: str) -> list[ConfigError]:
    """Pydantic's errors as ours, in the order of the config; a value that fails in several ways only once."""
    by_path: dict[tuple[str, str], ConfigError] = {}
    missing: list[str] = []
    members = {one["loc"][:-1] for one in problems if one["loc"] and isinstance(one["loc"][-1], int)}
    for one in problems:
        if one["type"] == "too_short" and one["loc"] in members:
            continue  # it has a member, whose own problem is reported
        for path, problem in _explain(cls, config, one, where=where):
            if one["type"] == "missing":
                missing.append(problem)
            else:
                by_path.setdefault((path, str(problem)), problem)
    errors = list(by_path.values())
    if missing:
        remedy = "docs/configs/index.md describes every key"
        errors.insert(0, ConfigError(f"the config has no {', '.join(missing)}", remedy=remedy))
    return errors


def _explain(root: type[Section], config: Any, one: Any, *, where: str) -> Iterator[tuple[str, Any]]:
    """(path, problem) of one of pydantic's errors; of a missing key its path instead of a problem."""
    section, path, value = root, where, config
    info: FieldInfo | None = None
    hints: tuple[Any, Any] | None = None
    for number, step in enumerate(one["loc"], 1):
        part, many = (section, False) if info is None else part_of(info.annotation, info.metadata)
        if many and part is not None:  # a list or a mapping
            value = one_or_many(value)[step] if isinstance(step, int) else value[step]
            path = f"{path}[{step}]" if isinstance(step, int) else f"{path}.{step}"
            if isinstance(part, Of):
                break
            section, info = part, None
            continue
        if not isinstance(part, type):
            if info is not None and get_origin(info.annotation) is Mapping and step in value:  # a value of a mapping
                hints = (get_args(info.annotation)[1], ())
                value, path = value[step], f"{path}.{step}"
            break
        section, below = part, f"{path}.{step}" if path else str(step)
        if section.is_several(value):
            info, path, value = None, below, value[step]
            continue
        if step not in section.model_fields:
            if one["type"] == "extra_forbidden":
                advice = hint(below, keys(section if where else root))
                yield below, UnknownKey(str(step), section=path, valid=section.model_fields, hint=advice)
                return
            break
        info, path = section.model_fields[str(step)], below
        if one["type"] == "missing" and number == len(one["loc"]):
            yield path, path
            return
        value = value.get(step) if isinstance(value, Mapping) else value
    cause = (one.get("ctx") or {}).get("error")
    if one["type"] == "component":
        yield from ((path, problem) for problem in one["ctx"]["of"].problems(value, where=path))
    elif isinstance(cause, ConfigError):
        yield from ((path, problem) for problem in cause.parts or [cause])
    else:
        hints = hints or ((info.annotation, info.metadata) if info is not None else (section, ()))
        yield path, ConfigError(f"{path or 'the config'} is {value!r}", allowed=describe_hint(*hints))
