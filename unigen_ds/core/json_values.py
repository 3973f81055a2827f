"""Any value of a config or a record as JSON has it: the one walk over mappings and lists; and an object in a file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unigen_ds.core.errors import CheckpointError

Leaf = tuple[str | int, ...]
STAMP = "unigen_ds_save"
"""Key or kind of the text in each checkpoint file that names the save that wrote it (``Manifest.stamp``)."""


def as_text(value: Any) -> Any:
    """A value that JSON does not have, by its text without an address: how a manifest keeps a config."""
    plain = value is None or isinstance(value, (bool, int, float, str))
    return value if plain else re.sub(r" at 0x[0-9a-f]+", "", str(value))


def by_name(value: Any) -> Any:
    """The same, but classes and functions by their name: how a dashboard shows a config."""
    return getattr(value, "__name__", None) or as_text(value)


def json_values(value: Any, leaf: Callable[[Any], Any] = as_text) -> Any:
    """``value`` with mappings as dicts with text keys, sequences as lists, and ``leaf(x)`` for everything else."""
    if isinstance(value, Mapping):
        return {k if isinstance(k, str) else json.dumps(k): json_values(inner, leaf) for k, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(inner, leaf) for inner in value]
    return leaf(value)


def member_names(members: Sequence[Any]) -> list[str]:
    """``[name]`` of members where lists are compared: type and name of a component, else the index; numbered again."""
    names: list[str] = []
    for index, member in enumerate(members):
        parts = [member.get("type"), member.get("name")] if isinstance(member, Mapping) else []
        name = ":".join(str(part) for part in parts if part) or str(index)
        again = sum(one.strip("[]").partition("#")[0] == name for one in names)
        names.append(f"[{name}#{again + 1}]" if again else f"[{name}]")
    return names


def leaves(value: Any, leaf: Leaf = (), *, names: bool = False) -> Iterator[tuple[Leaf, Any]]:
    """Every value that is no section; a list of plain values is one. Other members by index, or by ``member_names``."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*leaf, key), names=names)
    elif isinstance(value, (list, tuple)) and any(isinstance(inner, Mapping) for inner in value):
        steps: Iterable[str | int] = member_names(value) if names else range(len(value))
        for step, inner in zip(steps, value, strict=True):
            yield from leaves(inner, (*leaf, step), names=names)
    else:
        yield leaf, value


def dotted_name(leaf: Leaf) -> str:
    """``('param_scheduler', 0, 'end')`` -> ``param_scheduler[0].end``."""
    steps = (f"[{step}]" if isinstance(step, int) else step for step in leaf)
    return "".join(step if step.startswith("[") else f".{step}" for step in steps).removeprefix(".")


def stored_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file beside weights; {} for another value. Raises ``CheckpointError`` for a damaged one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    return value if isinstance(value, dict) else {}
