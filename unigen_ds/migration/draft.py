"""A config in the making: values, and what could not be carried over with the reason. Written as Python text."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unigen_ds.config.file import read_file
from unigen_ds.config.overrides import plain_values, read
from unigen_ds.config.python_text import python_text
from unigen_ds.migration.commands import MAPPINGS, Command, settings_of

SECTIONS = (
    "custom_imports", "model", "lora", "base", "tokenizer", "processor", "train_dataloader", "val_dataloader",
    "optim_wrapper", "loss_weights", "param_scheduler", "train_cfg", "backend", "default_hooks", "custom_hooks",
    "visualizer", "randomness", "env", "load_from", "load_cfg", "resume", "on_batch_change", "on_data_change",
    "skip_sequences", "work_dir", "checkpoint_dir", "launcher", "world_size",
)  # fmt: skip
"""Keys at the top of a config, in the order in which they are written."""
_Kind = Callable[[Any], Any]
"""What the other trainer has -> a value of the config. Raises ``ValueError`` with the reason."""
Table = Mapping[str, tuple[_Kind, tuple[str, ...]]]
"""Path of a config -> kind, and the other trainer's names of it."""


def recipe(name: str) -> dict[str, Any]:
    """Return the sections of a shipped config."""
    return {key: plain_values(value) for key, value in read(name).items() if key in SECTIONS}


def text(value: Any) -> str:
    if value is True or isinstance(value, (list, Mapping)):
        raise ValueError("it has no single value")
    return str(value)


def number(value: Any) -> float | int:
    """A number; a whole one without a point."""
    return int(value) if re.fullmatch(r"[-+]?\d+", str(value)) else float(text(value))


def whole_number(value: Any) -> int:
    if not float(number(value)).is_integer():
        raise ValueError(f"{value!r} is no whole number")
    return int(number(value))


def boolean(value: Any) -> bool:
    """``"True"``, ``yes``, ``1``, and a flag without a value."""
    word = str(value).strip().lower()
    if word not in ("true", "1", "yes", "on", "false", "0", "no", "off", "none", ""):
        raise ValueError(f"{value!r} is neither True nor False")
    return word in ("true", "1", "yes", "on")


class Draft:
    """The config that is made of a command's settings, which ``take`` and ``carry`` remove one by one."""

    def __init__(self, values: Mapping[str, Any], command: Command, *, what: str) -> None:
        for name in [name for name in command.files if name.endswith(MAPPINGS)]:
            command.files.remove(name)
            command.settings[:0] = settings_of(read_file(Path(name)).to_dict())  # what the command states comes later
        self.values: dict[str, Any] = dict(values)
        self.what, self.command = what, command
        self.settings = {setting.name: setting for setting in command.settings}
        self.sources = {setting.name: setting.source for setting in command.settings}
        """Name of a setting -> how the user wrote it."""
        self.omissions: list[tuple[str, str]] = [*command.others]
        """What the other trainer had and the config does not have, and why."""
        self.notes: list[str] = []
        """What the reader should know or fill in."""
        for setting in command.settings:
            if setting is not self.settings[setting.name]:
                self.omit(setting.source, "it is given again later")

    def parent(self, path: str) -> tuple[Any, Any]:
        """The mapping or list that has the value at a dotted path, which is made where there is none, and its key."""
        node: Any = self.values
        *above, last = path.split(".")
        for step in above:
            key: Any = int(step) if isinstance(node, list) else step
            if isinstance(node, dict) and not isinstance(node.get(key), (dict, list)):
                node[key] = {}
            node = node[key]
        return node, int(last) if isinstance(node, list) else last

    def get(self, path: str) -> Any:
        """Return the value at a dotted path; None where there is none."""
        node: Any = self.values
        for step in path.split("."):
            if isinstance(node, list):
                node = node[int(step)]
                continue
            node = node.get(step) if isinstance(node, Mapping) else None
        return node

    def set(self, path: str, value: Any) -> None:
        node, key = self.parent(path)
        node[key] = value

    def drop(self, path: str, why: str) -> None:
        """Remove a value of the config, if there is one; a comment states the reason."""
        if self.get(path) is not None:
            node, key = self.parent(path)
            self.omit(assignment(path, node.pop(key)), why)

    def omit(self, source: str, why: str) -> None:
        """Do not carry it over; a comment states the reason."""
        self.omissions.append((source, why))

    def take(self, name: str, kind: _Kind = text) -> Any:
        """Remove a setting; returns its value, or None. One that ``kind`` cannot read is omitted, with the reason."""
        setting = self.settings.pop(name, None)
        if setting is None or setting.value is None:
            return None
        try:
            return kind(setting.value)
        except ValueError as error:
            self.omit(setting.source, str(error))
            return None

    def carry(self, path: str, *names: str, kind: _Kind = text) -> bool:
        """Set ``path`` to the value of the first of these settings that there is. Returns whether there is one."""
        values = {name: value for name in names if (value := self.take(name, kind)) is not None}
        for position, (name, value) in enumerate(values.items()):
            if position == 0:
                self.set(path, value)
            elif value != self.get(path):
                self.omit(self.sources[name], f"{path} is already that of {self.sources[next(iter(values))]}")
        return bool(values)

    def carry_all(self, table: Table) -> None:
        for path, (kind, names) in table.items():
            self.carry(path, *names, kind=kind)

    def continue_from(self, path: str) -> None:
        """Read the weights of a checkpoint of the other trainer's."""
        self.set("load_from", path)
        self.notes.append(
            "Only the weights of that checkpoint are read, and the training starts at 0. One of DeepSpeed's or"
            f" this project's continues in full: resume={path!r} instead."
        )

    def finish(self, why: Mapping[str, str]) -> Draft:
        """Omit whatever was not taken; ``why``: name -> reason."""
        for setting in self.settings.values():
            reason = why.get(setting.name, "this project has no setting of that name: docs/migrating/index.md")
            self.omit(setting.source, reason)
        for name in self.command.files:
            self.omit(name, "it is an argument without a name, whose meaning is not known")
        return self

    def text(self, *, start: str) -> str:
        """Return the whole file. ``start``: the command that trains with it."""

        def quote(line: str) -> str:
            return _plain(line).replace("\\", "\\\\").replace('"""', "'''")

        def wrap(line: str, following: str) -> list[str]:
            return textwrap.wrap(line, 110, subsequent_indent=following, break_long_words=False, break_on_hyphens=False)

        title = f'"""{quote(self.what)}, translated by tools/migrate.py. Train with it:'
        lines = [title, "", f"    {quote(start)}", ""]
        lines += [line for note in self.notes for line in wrap(f"* {quote(note)}", "  ")]
        lines += ['"""', ""]
        if self.omissions:
            lines += [f"# NOT CARRIED OVER ({len(self.omissions)}):"]
            for source, why in self.omissions:
                lines += wrap(f"# {_plain(source)}", "#   ")
                lines += wrap(f"#     {_plain(why)}", "#     ")
            lines += [""]
        for key in sorted(self.values, key=lambda key: SECTIONS.index(key) if key in SECTIONS else len(SECTIONS)):
            lines.append(f"{key} = {python_text(self.values[key])}")
        return "\n".join(lines) + "\n"


def assignment(path: str, value: Any) -> str:
    """Return ``model.llm = dict(type=..., ...)``, shortened."""
    line = f"{path} = {python_text(value, width=sys.maxsize)}"
    return line if len(line) <= 200 else f"{line[:197]}..."


def _plain(line: str) -> str:
    return " ".join(line.split()).encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
