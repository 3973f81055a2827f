"""Every key of a config with its value and where it comes from: ``tools/train.py CONFIG --print-config``.

A value comes from the command line, from the config and its bases, from a key of mmengine or xtuner that was
translated, or it is a default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unigen_ds.config.overrides import ConfigValues, override_path
from unigen_ds.runner.settings.tree import Settings

Leaf = tuple[str | int, ...]


def config_lines(settings: Settings, config: ConfigValues) -> list[str]:
    """A line for each key: ``key = value  # origin``."""
    translated = {change.path for change in config.changes}
    overridden = [override_path(key) for key in config.overrides]
    rows = []
    for leaf, value in leaves(settings.plain()):
        steps, names = [str(step) for step in leaf], [step for step in leaf if isinstance(step, str)]
        if any(path in (steps[: len(path)], names[: len(path)]) for path in overridden):
            origin = "command line"
        elif dotted_name(leaf) in translated:
            origin = "translated"
        else:
            origin = "config" if _is_in(settings.given, leaf) else "default"
        rows.append((f"{dotted_name(leaf)} = {value!r}", origin))
    width = min(max(len(text) for text, _ in rows), 72)
    return [*(f"# {change}" for change in config.changes), *(f"{text:<{width}}  # {origin}" for text, origin in rows)]


def dotted_name(leaf: Leaf) -> str:
    """``('param_scheduler', 0, 'end')`` -> ``param_scheduler[0].end``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in leaf).removeprefix(".")


def leaves(value: Any, leaf: Leaf = ()) -> Iterator[tuple[Leaf, Any]]:
    """Every value that is no section. A list of plain values is one value."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*leaf, key))
    elif isinstance(value, (list, tuple)) and any(isinstance(inner, Mapping) for inner in value):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*leaf, index))
    else:
        yield leaf, value


def _is_in(values: Any, leaf: Leaf) -> bool:
    """Whether there is a value at ``leaf``; a single member counts as a list of one."""
    for step in leaf:
        if isinstance(step, int):
            members = values if isinstance(values, (list, tuple)) else [values]
            if step >= len(members):
                return False
            values = members[step]
        elif isinstance(values, Mapping) and step in values:
            values = values[step]
        else:
            return False
    return True
