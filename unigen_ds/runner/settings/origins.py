"""Every key of a config with its value and where it comes from: ``tools/train.py CONFIG --print-config``.

A value comes from the command line, from a file, from one of its bases (also where the file repeats the value of its
base), or it is a default. A key of mmengine or xtuner is shown as what it was translated to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unigen_ds.config.file import bases_of, read_file
from unigen_ds.config.overrides import ConfigValues, override_path, plain_values
from unigen_ds.runner.settings.tree import Settings

_MISSING = object()
Leaf = tuple[str | int, ...]


@dataclass(frozen=True)
class Layer:
    """A config file, read with its bases."""

    path: Path
    values: Mapping[str, Any]
    bases: Sequence[Layer]

    @classmethod
    def read(cls, path: Path) -> Layer:
        return cls(path, plain_values(read_file(path)), [cls.read(base) for base in bases_of(path)])

    def origin(self, leaf: Leaf, value: Any, *, top: bool = True) -> str | None:
        """The file that sets a key to this value; None where no file does."""
        own = _at(self.values, leaf)
        if own != value and getattr(own, "__name__", _MISSING) != value:
            return None
        below = next((found for base in self.bases if (found := base.origin(leaf, value, top=False))), None)
        return below or (self.path.name if top else f"base {self.path.name}")


def config_lines(settings: Settings, config: ConfigValues) -> list[str]:
    """A line for each key: ``key = value  # origin``."""
    layer, translations = Layer.read(config.path), {change.path for change in config.changes}
    rows = []
    for leaf, value in _leaves(settings.plain()):
        stated = _at(settings.given, leaf)
        if stated is not _MISSING and _is_overridden(leaf, config.overrides):
            origin = "command line"
        else:
            default = "translated" if dotted_name(leaf) in translations else "default"
            origin = (stated is not _MISSING and layer.origin(leaf, stated)) or default
        rows.append((f"{dotted_name(leaf)} = {value!r}", origin))
    width = min(max(len(text) for text, _ in rows), 72)
    return [*(f"# {change}" for change in config.changes), *(f"{text:<{width}}  # {origin}" for text, origin in rows)]


def dotted_name(leaf: Leaf) -> str:
    """``('param_scheduler', 0, 'end')`` -> ``param_scheduler[0].end``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in leaf).removeprefix(".")


def _leaves(value: Any, leaf: Leaf = ()) -> Iterator[tuple[Leaf, Any]]:
    """Every value that is no section. A list of plain values is one value."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*leaf, key))
    elif isinstance(value, (list, tuple)) and any(isinstance(inner, Mapping) for inner in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*leaf, index))
    else:
        yield leaf, value


def _at(values: Any, leaf: Leaf) -> Any:
    """The value at ``leaf``; a single member counts as a list of one."""
    for step in leaf:
        if isinstance(step, int) and isinstance(values, Mapping):
            if step:
                return _MISSING
        elif isinstance(step, int):
            if not isinstance(values, (list, tuple)) or step >= len(values):
                return _MISSING
            values = values[step]
        elif isinstance(values, Mapping) and step in values:
            values = values[step]
        else:
            return _MISSING
    return values


def _is_overridden(leaf: Leaf, overrides: Collection[str]) -> bool:
    steps = [str(step) for step in leaf]
    alone = [step for step, one in zip(steps, leaf, strict=True) if not isinstance(one, int)]
    return any(
        given == path[: len(given)] for given in (override_path(key) for key in overrides) for path in (steps, alone)
    )
