"""Values against type hints, by pydantic's strict rules: those of a section's fields and of a component's arguments.

Strict: ``True`` is no number, ``'2'`` is no whole number, NaN is no number. Accepted beyond that: a list where a hint
has a tuple (JSON and YAML have no tuples), and a whole number where it has float. A hint of a class that is not a plain
value accepts everything.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, Predicate
from pydantic import AllowInfNan, BaseModel, BeforeValidator, ConfigDict, InstanceOf, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

_WORDS = {
    int: "a whole number", float: "a number", bool: "True or False", str: "a text", Path: "a path",
    Mapping: "dict(...)", dict: "dict(...)", type(None): "None",
}  # fmt: skip
_subscript: Any = operator.getitem
_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)


class Choices(str):
    """Metadata of a field: what is allowed, in words, where its hint does not state it."""


def as_tuple(value: Any) -> Any:
    """A list as a tuple; everything else as it is."""
    return tuple(value) if isinstance(value, list) else value


Rule = Predicate
"""Metadata of a hint: a function of the value that is true where it is allowed. With ``Choices``."""
Number = Annotated[float, Rule(lambda value: not math.isnan(value))]
"""A number of a section; a whole one is one, too."""
Share = Annotated[float, Ge(0), Le(1)]
_TIME = re.compile("".join(rf"(?:(\d+(?:\.\d+)?){unit})?" for unit in "dhms"))


def time_seconds(value: float | str) -> float:
    """Seconds of a ``Time``; 0 where a text is none."""
    if not isinstance(value, str):
        return value
    match = _TIME.fullmatch(value)
    parts = match.groups("0") if match else ()
    return sum(float(part) * unit for part, unit in zip(parts, (86400, 3600, 60, 1), strict=False))


Time = Annotated[
    float | str,
    Rule(lambda value: 0 < time_seconds(value) < math.inf),
    Choices("days, hours, minutes and seconds as in '1d2h', '3h50m', '90m' or '45s', or seconds: a number above 0"),
]
NotNegative = Annotated[float, Ge(0), AllowInfNan(False)]


def strict(hint: Any) -> Any:
    """A hint as pydantic is to check it."""
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        metadata = [one for one in inner[1:] if not _is_model(one)]  # a section is ``nested_section``
        return _subscript(Annotated, (strict(inner[0]), *metadata)) if metadata else strict(inner[0])
    if origin in (Union, types.UnionType):
        return Union[tuple(strict(one) for one in inner)]  # noqa: UP007
    if origin is float:
        return Number
    if origin is Path:
        return InstanceOf[Path]
    if origin in (int, bool, str, type(None)) or origin is Literal:
        return hint
    if origin is tuple and inner and inner[1:] != (...,):
        return Annotated[_subscript(tuple, tuple(strict(one) for one in inner)), BeforeValidator(as_tuple)]
    if origin in (Sequence, list, tuple):
        return Annotated[_subscript(tuple, (strict(inner[0]) if inner else Any, ...)), BeforeValidator(as_tuple)]
    if origin in (Mapping, dict):
        return _subscript(dict, tuple(strict(one) for one in inner) or (Any, Any))
    return hint if isinstance(origin, type) and issubclass(origin, BaseModel) else Any


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(hint) if _is_model(hint) else TypeAdapter(strict(hint), config=_STRICT)
    except Exception:  # a hint that pydantic does not support: it accepts everything
        return TypeAdapter(Any)


def _is_model(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseModel)


def fits(value: Any, hint: Any) -> bool:
    """Whether ``value`` is one that the hint allows."""
    try:
        _adapter(hint).validate_python(value)
    except ValidationError:
        return False
    return True


def format_value(value: Any) -> str:
    """A value as an error names it; an array or a tensor by its type and shape alone."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a {type(value).__name__} of {value.dtype} with shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)) and any(hasattr(one, "shape") for one in value):
        return f"[{', '.join(map(format_value, value))}]"
    return repr(value)


def describe_hint(hint: Any, metadata: Sequence[Any] = ()) -> str:
    """A hint in words: ``int | None`` with a limit is "a whole number of at least 1, or None"."""
    choices = [one for one in metadata if isinstance(one, Choices)]
    if choices:
        return str(choices[0])
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        return describe_hint(inner[0], (*inner[1:], *metadata))
    if origin in (Union, types.UnionType):
        return " or ".join(describe_hint(one, () if one is type(None) else metadata) for one in inner)
    if origin is Literal:
        return ", ".join(map(repr, inner))
    if origin is tuple and inner and inner[1:] != (...,):
        kinds = dict.fromkeys(describe_hint(one) for one in inner)
        return f"a list of {len(inner)}, each {next(iter(kinds))}" if len(kinds) == 1 else f"a list of {len(inner)}"
    if origin in (Sequence, list, tuple):
        return f"a list, each {describe_hint(inner[0])}" if inner and inner[0] is not Any else "a list"
    if _is_model(origin):
        return f"dict({', '.join(f'{name}=' for name in origin.model_fields)})"
    return _WORDS.get(origin, getattr(origin, "__name__", str(origin))) + _limits(metadata)


def _limits(metadata: Sequence[Any]) -> str:
    # ``Field(ge=1)`` holds its limits one level deeper
    flat = [inner for one in metadata for inner in (one.metadata if isinstance(one, FieldInfo) else [one])]
    low = next((one for one in flat if isinstance(one, (Ge, Gt))), None)
    high = next((one for one in flat if isinstance(one, (Le, Lt))), None)
    if isinstance(low, Ge) and isinstance(high, Le):
        return f" from {low.ge} to {high.le}"
    words = [f" of at least {low.ge}"] if isinstance(low, Ge) else [f" above {low.gt}"] if low else []
    if high is not None:
        words.append(f" of at most {high.le}" if isinstance(high, Le) else f" below {high.lt}")
    return " and".join(words)


def nested_section(hint: Any) -> Any:
    """The section or ``Of`` in an argument's hint, whose ``argument_*`` check a mapping; None: it has none."""
    origin, inner = get_origin(hint), get_args(hint)
    options = inner if origin is Annotated or origin in (Union, types.UnionType) else (hint,)
    return next((one for one in options if hasattr(one, "argument_problems")), None)


def argument_hints(cls: Any) -> dict[str, Any]:
    """The hints of a class's or function's arguments, with their metadata; none where they cannot be read."""
    try:
        if dataclasses.is_dataclass(cls) and "__init__" in vars(cls):  # each field in the module that declares it
            return typing.get_type_hints(cls, include_extras=True)
        function = cls.__init__ if isinstance(cls, type) else cls  # type: ignore[misc]
        return typing.get_type_hints(function, include_extras=True)
    except Exception:  # a name that only a type checker imports, or anything else in a user's annotations
        return {}
