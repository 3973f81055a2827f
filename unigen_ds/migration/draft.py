"""A config in the making: values, where each comes from, and what could not be carried over. Written as Python text."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from unigen_ds.config.overrides import plain_values, read
from unigen_ds.config.python_text import is_name, python_text
from unigen_ds.core.errors import ConfigError
from unigen_ds.migration.commands import Command, Setting

_WIDTH = 110
SECTIONS = (
    "custom_imports", "model", "lora", "base", "tokenizer", "processor", "train_dataloader", "val_dataloader",
    "optim_wrapper", "loss_weights", "param_scheduler", "train_cfg", "backend", "default_hooks", "custom_hooks",
    "visualizer", "randomness", "env", "load_from", "load_cfg", "resume", "on_batch_change", "on_data_change",
    "work_dir", "checkpoint_dir", "launcher", "world_size",
)  # fmt: skip
"""Keys at the top of a config, in the order in which they are written."""
Kind = Callable[[Any], Any]
"""Text -> value. Raises ``Unusable``."""
Table = Mapping[str, tuple[Kind, tuple[str, ...]]]
"""Path of a config -> kind, and the other trainer's names of it."""


def recipe(name: str) -> dict[str, Any]:
    """Return the sections of a shipped config."""
    return {key: plain_values(value) for key, value in read(name).items() if key in SECTIONS}


class Unusable(ValueError):
    """A value without a counterpart; the text is the reason."""


def text(value: Any) -> str:
    """A text, as it is."""
    if value is True or isinstance(value, (list, Mapping)):
        raise Unusable("it has no single value")
    return str(value)


def number(value: Any) -> float | int:
    """A number; a whole one without a point."""
    try:
        result = float("nan" if isinstance(value, bool) else value)
    except (TypeError, ValueError):
        result = float("nan")
    if result != result:
        raise Unusable(f"{value!r} is no number")
    digits = str(value).lower()
    return int(result) if result.is_integer() and "." not in digits and "e" not in digits else result


def whole(value: Any) -> int:
    """A whole number."""
    result = number(value)
    if not float(result).is_integer():
        raise Unusable(f"{value!r} is no whole number")
    return int(result)


def boolean(value: Any) -> bool:
    """``"True"``, ``yes``, ``1``, and a flag without a value."""
    word = str(value).strip().lower()
    if word not in ("true", "1", "yes", "on", "false", "0", "no", "off", "none", ""):
        raise Unusable(f"{value!r} is neither True nor False")
    return word in ("true", "1", "yes", "on")


class Draft:
    """The config that is made of a command's settings, which ``take`` and ``carry`` remove one by one."""

    def __init__(self, values: Mapping[str, Any], command: Command, *, what: str) -> None:
        self.values: dict[str, Any] = dict(values)
        self.what = what
        self.command = command
        self.settings: dict[str, Setting] = {}
        self.comments: dict[str, str] = {}
        """Dotted path -> what it was made of."""
        self.omissions: list[tuple[str, str]] = [*command.others]
        """What the other trainer had and the config does not have, and why."""
        self.notes: list[str] = []
        """What the reader should know or fill in."""
        self.num_settings = len(command.settings) + len(command.others) + len(command.launch) + len(command.files)
        for setting in command.settings:
            if setting.name in self.settings:
                self.omit(self.settings[setting.name].source, "it is given again later")
            self.settings[setting.name] = setting

    # ---- values of the config ---------------------------------------------------------------------------------------

    def get(self, path: str) -> Any:
        """Return the value at a dotted path; None where there is none."""
        node: Any = self.values
        for step in path.split("."):
            if isinstance(node, list) and step.isdigit() and int(step) < len(node):
                node = node[int(step)]
            else:
                node = node.get(step) if isinstance(node, Mapping) else None
        return node

    def set(self, path: str, value: Any, *, of: Setting | str | None = None) -> None:
        """Set a value; ``of``: what it is made of. A different value that something else was made of is kept."""
        source = of.source if isinstance(of, Setting) else of
        if source and path in self.comments and self.get(path) != value:
            self.omit(source, f"{path} is already that of {self.comments[path]}")
            return
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
        if source:
            self.comments[path] = source

    def remove(self, path: str) -> Any:
        """Remove a value. Returns it."""
        above, _, last = path.rpartition(".")
        node = self.get(above) if above else self.values
        if isinstance(node, list):
            return node.pop(int(last))
        return node.pop(last, None) if isinstance(node, dict) else None

    # ---- settings of the other trainer ------------------------------------------------------------------------------

    def omit(self, source: str, why: str) -> None:
        """Do not carry it over; a comment states the reason."""
        self.omissions.append((source, why))

    def drop(self, path: str, why: str) -> None:
        """Remove a value of the config; a comment states the reason."""
        value = self.remove(path)
        if value is not None:
            self.omit(assignment(path, value), why)

    def take(self, *names: str, kind: Kind = text) -> tuple[Any, Setting | None]:
        """Remove the first of these settings that there is. Returns (value, setting), or (None, None) without one.
        A value that ``kind`` cannot read is omitted, with the reason.
        """
        for name in names:
            setting = self.settings.pop(name, None)
            if setting is None:
                continue
            try:
                return kind(setting.value), setting
            except Unusable as error:
                self.omit(setting.source, str(error))
        return None, None

    def carry(self, path: str, *names: str, kind: Kind = text) -> Any:
        """Set ``path`` to the value of each of these settings. Returns the value there."""
        for name in names:
            value, setting = self.take(name, kind=kind)
            if setting is not None:
                self.set(path, value, of=setting)
        return self.get(path)

    def carry_all(self, table: Table) -> None:
        """Carry each row of a table over."""
        for path, (kind, names) in table.items():
            self.carry(path, *names, kind=kind)

    def continue_from(self, path: str, *, of: Setting) -> None:
        """Set ``resume`` for a checkpoint of this project's or DeepSpeed's that is here, else ``load_from``."""
        folder = Path(path).expanduser()
        known = any((folder / name).is_file() for name in ("manifest.json", "latest"))
        known = known or any(folder.glob("*_states.pt"))
        self.set("resume" if known else "load_from", path, of=of)
        if not known:
            self.notes.append(
                "Only the weights of that checkpoint are read, and the training starts at 0. One of DeepSpeed's or"
                f" this project's continues in full: resume={path!r} instead."
            )

    def finish(self, why: Mapping[str, str]) -> None:
        """Omit whatever was not taken; ``why``: name -> reason."""
        for setting in self.settings.values():
            reason = why.get(setting.name, "this project has no setting of that name: docs/migrating.md")
            self.omit(setting.source, reason)
        for name in self.command.files:
            self.omit(name, "it is an argument without a name, whose meaning is not known")

    # ---- text -------------------------------------------------------------------------------------------------------

    def text(self, *, start: str) -> str:
        """Return the whole file. ``start``: the command that trains with it."""
        notes = [f"{_quoted(self.what)}, translated by tools/migrate.py. Train with it:", "", f"    {_quoted(start)}"]
        notes += ["", *_wrapped("Values without a comment are those of the guide or of this project.")]
        notes += [line for note in self.notes for line in _wrapped(f"* {_quoted(note)}", following="  ")]
        lines = ['"""' + notes[0], *notes[1:], '"""', ""]
        if self.omissions:
            lines += [f"# NOT CARRIED OVER ({len(self.omissions)}):"]
            for source, why in self.omissions:
                lines += _wrapped(f"# {_plain(source)}", following="#   ")
                lines += _wrapped(f"#     {_plain(why)}", following="#     ")
            lines += [""]
        for path, value in leaves(self.values):
            if not isinstance(value, (str, float, int, list, tuple, dict, NoneType)):
                raise ConfigError(f"{path} of the config is {value!r}", allowed="texts, numbers, lists and dicts")
        for key in sorted(self.values, key=lambda key: SECTIONS.index(key) if key in SECTIONS else len(SECTIONS)):
            lines += self._lines(f"{key} = ", self.values[key], key, 0, end="")
        return "\n".join(lines) + "\n"

    def _lines(self, name: str, value: Any, path: str, depth: int, *, end: str) -> list[str]:
        indent, comment = "    " * depth, self.comments.get(path)
        after = f"  # {_plain(comment)}" if comment else ""
        line = f"{indent}{name}{_one_line(value)}{end}"
        inner = any(other.startswith(f"{path}.") for other in self.comments)
        if not inner and (len(line) <= _WIDTH or not isinstance(value, (dict, list)) or not value):
            return [line + after]
        if isinstance(value, dict):
            opening, closing = ("dict(", ")") if all(map(is_name, value)) else ("{", "}")
            parts = [(f"{key}=" if opening != "{" else f"{key!r}: ", inside, key) for key, inside in value.items()]
        else:
            opening, closing = "[]" if isinstance(value, list) else "()"
            parts = [("", inside, index) for index, inside in enumerate(value)]
        lines = [f"{indent}{name}{opening}{after}"]
        for label, inside, key in parts:
            lines += self._lines(label, inside, f"{path}.{key}", depth + 1, end=",")
        return [*lines, f"{indent}{closing}{end}"]


def leaves(value: Any, path: str = "") -> Any:
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
    line = f"{path} = {_one_line(value)}"
    return line if len(line) <= 200 else f"{line[:197]}..."


def _one_line(value: Any) -> str:
    return python_text(value, width=sys.maxsize)


def _plain(line: str) -> str:
    """One line."""
    return " ".join(line.split()).encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


def _quoted(line: str) -> str:
    """The same in a docstring."""
    return _plain(line).replace("\\", "\\\\").replace('"""', "'''")


def _wrapped(line: str, *, following: str = "") -> list[str]:
    return textwrap.wrap(line, _WIDTH, subsequent_indent=following, break_long_words=False, break_on_hyphens=False)
