"""A config in the making: values, where each comes from, and what could not be carried over. Written as Python text."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from unigen_ds.config.overrides import plain_values, read
from unigen_ds.config.python_text import python_text
from unigen_ds.core.errors import ConfigError
from unigen_ds.migration.commands import Command

_WIDTH = 110
SECTIONS = (
    "custom_imports", "model", "lora", "base", "tokenizer", "processor", "train_dataloader", "val_dataloader",
    "optim_wrapper", "loss_weights", "param_scheduler", "train_cfg", "backend", "default_hooks", "custom_hooks",
    "visualizer", "randomness", "env", "load_from", "load_cfg", "resume", "on_batch_change", "on_data_change",
    "work_dir", "checkpoint_dir", "launcher", "world_size",
)  # fmt: skip
"""Keys at the top of a config, in the order in which they are written."""
Kind = Callable[[Any], Any]
"""What the other trainer has -> a value of the config. Raises ``ValueError`` with the reason."""
Table = Mapping[str, tuple[Kind, tuple[str, ...]]]
"""Path of a config -> kind, and the other trainer's names of it."""


def recipe(name: str) -> dict[str, Any]:
    """Return the sections of a shipped config."""
    return {key: plain_values(value) for key, value in read(name).items() if key in SECTIONS}


def text(value: Any) -> str:
    """A text, as it is."""
    if value is True or isinstance(value, (list, Mapping)):
        raise ValueError("it has no single value")
    return str(value)


def number(value: Any) -> float | int:
    """A number; a whole one without a point."""
    try:
        return int(value) if re.fullmatch(r"[-+]?\d+", str(value)) else float(text(value))
    except ValueError:
        raise ValueError(f"{value!r} is no number") from None


def whole(value: Any) -> int:
    """A whole number."""
    result = number(value)
    if not float(result).is_integer():
        raise ValueError(f"{value!r} is no whole number")
    return int(result)


def boolean(value: Any) -> bool:
    """``"True"``, ``yes``, ``1``, and a flag without a value."""
    word = str(value).strip().lower()
    if word not in ("true", "1", "yes", "on", "false", "0", "no", "off", "none", ""):
        raise ValueError(f"{value!r} is neither True nor False")
    return word in ("true", "1", "yes", "on")


class Draft:
    """The config that is made of a command's settings, which ``take`` and ``carry`` remove one by one."""

    def __init__(self, values: Mapping[str, Any], command: Command, *, what: str) -> None:
        command.read_files()
        self.values: dict[str, Any] = dict(values)
        self.what, self.command = what, command
        self.settings = {setting.name: setting for setting in command.settings}
        self.sources = {setting.name: setting.source for setting in command.settings}
        self.origins: dict[str, str] = {}
        """Dotted path -> what it was made of."""
        self.omissions: list[tuple[str, str]] = [*command.others]
        """What the other trainer had and the config does not have, and why."""
        self.notes: list[str] = []
        """What the reader should know or fill in."""
        for setting in command.settings:
            if setting is not self.settings[setting.name]:
                self.omit(setting.source, "it is given again later")
        self.num_settings = len(command.settings) + len(command.others) + len(command.launch) + len(command.files)

    def get(self, path: str) -> Any:
        """Return the value at a dotted path; None where there is none."""
        node: Any = self.values
        for step in path.split("."):
            if isinstance(node, list) and step.isdigit() and int(step) < len(node):
                node = node[int(step)]
            else:
                node = node.get(step) if isinstance(node, Mapping) else None
        return node

    def set(self, path: str, value: Any, *names: str) -> None:
        """Set a value; ``names``: the settings that it is made of."""
        *above, last = path.split(".")
        node: Any = self.values
        for step in above:
            if isinstance(node, list):
                node = node[int(step)]
                continue
            if not isinstance(node.get(step), (dict, list)):
                node[step] = {}
            node = node[step]
        node[int(last) if isinstance(node, list) else last] = value
        if source := ", ".join(self.sources[name] for name in names if name in self.sources):
            self.origins[path] = source

    def remove(self, path: str) -> Any:
        """Remove a value. Returns it."""
        above, _, last = path.rpartition(".")
        node = self.get(above) if above else self.values
        if isinstance(node, list):
            return node.pop(int(last))
        return node.pop(last, None) if isinstance(node, dict) else None

    def omit(self, source: str, why: str) -> None:
        """Do not carry it over; a comment states the reason."""
        self.omissions.append((source, why))

    def drop(self, path: str, why: str) -> None:
        """Remove a value of the config; a comment states the reason."""
        value = self.remove(path)
        if value is not None:
            self.omit(assignment(path, value), why)

    def take(self, name: str, kind: Kind = text) -> Any:
        """Remove a setting. Returns its value, or None without one. A value that ``kind`` cannot read is omitted, with
        the reason.
        """
        setting = self.settings.pop(name, None)
        if setting is None or setting.value is None:
            return None
        try:
            return kind(setting.value)
        except ValueError as error:
            self.omit(setting.source, str(error))
            return None

    def carry(self, path: str, *names: str, kind: Kind = text) -> Any:
        """Set ``path`` to the value of the first of these settings that there is. Returns the value there."""
        for name in names:
            value = self.take(name, kind)
            if value is None:
                continue
            if path in self.origins and self.get(path) != value:
                self.omit(self.sources[name], f"{path} is already that of {self.origins[path]}")
            else:
                self.set(path, value, name)
        return self.get(path)

    def carry_all(self, table: Table) -> None:
        """Carry each row of a table over."""
        for path, (kind, names) in table.items():
            self.carry(path, *names, kind=kind)

    def continue_from(self, path: str, name: str) -> None:
        """Set ``resume`` for a checkpoint of this project's or DeepSpeed's that is here, else ``load_from``."""
        folder = Path(path).expanduser()
        is_known = any((folder / file).is_file() for file in ("manifest.json", "latest"))
        is_known = is_known or any(folder.glob("*_states.pt"))
        self.set("resume" if is_known else "load_from", path, name)
        if not is_known:
            self.notes.append(
                "Only the weights of that checkpoint are read, and the training starts at 0. One of DeepSpeed's or"
                f" this project's continues in full: resume={path!r} instead."
            )

    def finish(self, why: Mapping[str, str]) -> Draft:
        """Omit whatever was not taken; ``why``: name -> reason."""
        for setting in self.settings.values():
            reason = why.get(setting.name, "this project has no setting of that name: docs/migrating.md")
            self.omit(setting.source, reason)
        for name in self.command.files:
            self.omit(name, "it is an argument without a name, whose meaning is not known")
        return self

    def text(self, *, start: str) -> str:
        """Return the whole file. ``start``: the command that trains with it."""
        notes = [
            f"{_quote(self.what)}, translated by tools/migrate.py. Train with it:",
            "",
            f"    {_quote(start)}",
            "",
        ]
        notes += [line for note in self.notes for line in _wrap(f"* {_quote(note)}", following="  ")]
        lines = ['"""' + notes[0], *notes[1:], '"""', ""]
        if self.omissions:
            lines += [f"# NOT CARRIED OVER ({len(self.omissions)}):"]
            for source, why in self.omissions:
                lines += _wrap(f"# {_plain(source)}", following="#   ")
                lines += _wrap(f"#     {_plain(why)}", following="#     ")
            lines += [""]
        if self.origins:
            lines += ["# CARRIED OVER; every other value is that of the guide or of this project:"]
            for path, source in self.origins.items():
                lines += _wrap(f"#     {_plain(source)}: {path}", following="#         ")
            lines += [""]
        for path, value in leaves(self.values):
            if not isinstance(value, (str, float, int, list, tuple, dict, NoneType)):
                raise ConfigError(f"{path} of the config is {value!r}", allowed="texts, numbers, lists and dicts")
        for key in sorted(self.values, key=lambda key: SECTIONS.index(key) if key in SECTIONS else len(SECTIONS)):
            lines.append(f"{key} = {python_text(self.values[key])}")
        return "\n".join(lines) + "\n"


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of everything that is no section."""
    if isinstance(value, Mapping) and value:
        for key, inside in value.items():
            yield from leaves(inside, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and any(isinstance(inside, (Mapping, list, tuple)) for inside in value):
        for index, inside in enumerate(value):
            yield from leaves(inside, f"{path}.{index}")
    else:
        yield path, value


def assignment(path: str, value: Any) -> str:
    """Return ``model.llm = dict(type=..., ...)``, shortened."""
    line = f"{path} = {python_text(value, width=sys.maxsize)}"
    return line if len(line) <= 200 else f"{line[:197]}..."


def _plain(line: str) -> str:
    """One line."""
    return " ".join(line.split()).encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


def _quote(line: str) -> str:
    """The same in a docstring."""
    return _plain(line).replace("\\", "\\\\").replace('"""', "'''")


def _wrap(line: str, *, following: str = "") -> list[str]:
    return textwrap.wrap(line, _WIDTH, subsequent_indent=following, break_long_words=False, break_on_hyphens=False)
