"""A user's module with one of each kind that a config can name, loaded by ``custom_imports`` alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unigen_ds import (
    BACKENDS,
    CURVES,
    LAYOUTS,
    PACKERS,
    WRITERS,
    Curve,
    Point,
    SafetensorsReader,
    SingleBackend,
    StateFiles,
)

LAYOUT = "registered_layout"
OPENED: list[str] = []
"""Folders of the checkpoints that ``RegisteredReader`` has read."""


@LAYOUTS.register_module(name=LAYOUT)
class RegisteredReader(SafetensorsReader):
    def __init__(self, directory: Path, **options: Any) -> None:
        OPENED.append(directory.name)
        super().__init__(directory, **options)


@BACKENDS.register_module()
class RegisteredBackend(SingleBackend):
    """``single`` with a layout of its own."""

    def topology(self) -> dict[str, Any]:
        return {**super().topology(), "engine": "registered"}

    def state_files(self) -> StateFiles:
        return replace(super().state_files(), layout=LAYOUT)


@PACKERS.register_module()
class RegisteredPairs:
    """Two samples that follow each other are one sequence, where both fit."""

    window, fingerprint = 16, "RegisteredPairs"

    def plan(self, lengths: Sequence[int], tiles: Sequence[int], seq_length: int, key: int) -> list[list[int]]:
        groups: list[list[int]] = []
        for position, length in enumerate(lengths):
            last = groups[-1] if groups else []
            if len(last) == 1 and lengths[last[0]] + length <= seq_length:
                last.append(position)
            else:
                groups.append([position])
        return groups


@CURVES.register_module()
@dataclass(frozen=True, kw_only=True)
class RegisteredThird(Curve):
    @property
    def needs_end(self) -> bool:
        return False

    @staticmethod
    def evaluate(point: Point, arguments: Mapping[str, Any]) -> float:
        return point.given * 3.0 ** -(point.since / point.step)


@WRITERS.register_module()
class RegisteredWriter:
    """Every update in a file of its own."""

    def open(self, *, work_dir: Path, config: Mapping[str, Any], run_id: str | None, updates: int) -> str | None:
        self.folder = work_dir / "registered"
        self.folder.mkdir(exist_ok=True)
        return "an id"

    def write(self, record: Mapping[str, Any], *, update: int) -> None:
        (self.folder / str(update)).write_text(str(record.get("loss")))

    def close(self) -> None:
        (self.folder / "closed").touch()
