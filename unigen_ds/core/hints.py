"""Values of a config against type hints: those of its keys, and those of the arguments of what it names."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

_WORDS = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("True or False", "True or False"),
    str: ("a text", "texts"),
    Path: ("a path", "paths"),
    Mapping: ("dict(...)", "dict(...)"),
    type(None): ("None", "None"),
}


def fits(value: Any, hint: Any) -> bool:
    """Whether ``value`` is what a hint of plain values says; a hint of other classes fits everything.

    A whole number is a number; True, False and NaN are none. A tuple is a list.
    """
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return any(value == one and type(value) is type(one) for one in inner)
    if origin in (int, float):
        number = isinstance(value, int if origin is int else (int, float)) and not isinstance(value, bool)
        return number and not math.isnan(value)
    if origin in (bool, str, Path, type(None)):
        return isinstance(value, origin)
    if origin in (Sequence, list, tuple):
        every = inner[0] if inner and (origin is not tuple or inner[1:] == (...,)) else Any
        return isinstance(value, (list, tuple)) and all(fits(one, every) for one in value)
    if origin in (Mapping, dict):
        return isinstance(value, Mapping)
    return True


def described(hint: Any) -> str:
    """A hint in words: ``int | None`` is "a whole number or None"."""
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(described(one) for one in inner)
    if origin is Literal:
        return ", ".join(map(repr, inner))
    if origin in (Sequence, list, tuple):
        every = get_origin(inner[0]) or inner[0] if inner else None
        return f"a list of {_WORDS[every][1]}" if every in _WORDS else "a list"
    return _WORDS[origin][0] if origin in _WORDS else getattr(origin, "__name__", str(origin))


def argument_hints(cls: Any) -> dict[str, Any]:
    """The hints of a class's or function's arguments; none where they cannot be read."""
    try:
        return typing.get_type_hints(cls.__init__ if isinstance(cls, type) else cls)  # type: ignore[misc]
    except Exception:  # a name that only a type checker imports, or anything else in somebody's annotations
        return {}
