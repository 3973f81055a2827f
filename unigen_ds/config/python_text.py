"""A config's values -> Python text, in mmengine's style, which can be read back alone: ``config_text``."""

from __future__ import annotations

from collections.abc import Mapping
from keyword import iskeyword
from math import isfinite
from types import FunctionType
from typing import Any

from unigen_ds.config.registry import FOREIGN, REGISTRIES, registered_name

_ALWAYS_IMPORTED = ("unigen_ds", "torch", "__main__", *FOREIGN)


def config_text(config: Mapping[str, Any]) -> str:
    """The config as Python text: a registered class by its name and ``custom_imports``, any other by an import."""
    custom = config.get("custom_imports") or {}
    names = custom.get("imports") or []
    modules = [names] if isinstance(names, str) else [*names]
    missing: list[str] = []
    imports: list[str] = []

    def add_import(kind: Any, name: str) -> str:
        module = getattr(kind, "__module__", "__main__")
        if not any(f"{module}.".startswith(f"{one}.") for one in (*_ALWAYS_IMPORTED, *modules, *missing)):
            missing.append(module)
        return name

    def write_value(value: Any, key: Any = None) -> Any:
        if isinstance(value, Mapping):
            return {inner: write_value(value[inner], inner) for inner in value}
        if isinstance(value, (list, tuple)):
            return type(value)(map(write_value, value))
        name = registered_name(value) if isinstance(value, type) or key == "type" else None
        if isinstance(value, type) and name is not None:
            return add_import(value, name)
        if isinstance(value, type) and value.__module__ != "__main__" and "." not in value.__qualname__:
            imports.append(f"from {value.__module__} import {value.__name__}\n")
            return value
        if isinstance(value, (type, FunctionType)):
            return f"{value.__module__}.{value.__qualname__}"
        if key == "type" and isinstance(value, str):
            kinds = [registry.module_dict[value] for registry in REGISTRIES if value in registry.module_dict]
            return add_import(kinds[0], value) if kinds else name or value
        return value

    values = write_value(config)
    if missing:
        values["custom_imports"] = {**custom, "imports": [*modules, *missing]}
    return "".join([*dict.fromkeys(imports), *(f"{key} = {python_text(value)}\n" for key, value in values.items())])


def python_text(value: Any, indent: str = "", *, width: int = 100) -> str:
    """A plain value or a class as Python has it: ``dict(key=...)``, or ``{'key': ...}`` where a key is no name."""
    inside = indent + "    "
    if isinstance(value, Mapping):
        names = all(isinstance(key, str) and key.isidentifier() and not iskeyword(key) for key in value)
        texts = {key: python_text(inner, inside, width=width) for key, inner in value.items()}
        items = [f"{key}={text}" if names else f"{key!r}: {text}" for key, text in texts.items()]
        start, end = ("dict(", ")") if names else ("{", "}")
    elif isinstance(value, (list, tuple)):
        items = [python_text(inner, inside, width=width) for inner in value]
        start, end = ("[", "]") if isinstance(value, list) else ("(", ",)" if len(value) == 1 else ")")
    elif isinstance(value, type):  # the text imports it
        return value.__name__
    else:
        return f"float({str(value)!r})" if isinstance(value, float) and not isfinite(value) else repr(value)
    line = start + ", ".join(items) + end
    if len(indent + line) < width and "\n" not in line:
        return line
    return start + "".join(f"\n{inside}{item}," for item in items) + f"\n{indent}{end[-1]}"
