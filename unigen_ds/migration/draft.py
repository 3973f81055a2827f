"""A config in the making: values, where each comes from, and what could not be carried over. Written as Python text."""

from __future__ import annotations

import keyword
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unigen_ds.core.config import plain_values, read
from unigen_ds.core.errors import ConfigError
from unigen_ds.migration.commands import Command, Given, GivenByName

_WIDTH = 110
SECTIONS = (
    "custom_imports", "model", "lora", "base", "tokenizer", "processor", "train_dataloader", "val_dataloader",
    "optim_wrapper", "loss_weights", "param_scheduler", "train_cfg", "backend", "default_hooks", "custom_hooks",
    "visualizer", "randomness", "env", "load_from", "load_cfg", "resume", "on_batch_change", "on_data_change",
    "work_dir", "checkpoint_dir", "launcher", "world_size",
)  # fmt: skip
"""Keys at the top of a config, in the order in which they are written."""
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off", "none", "")


def recipe(name: str) -> dict[str, Any]:
    """The sections of a shipped config."""
    return {key: plain_values(value) for key, value in read(name).items() if key in SECTIONS}


def continue_from(draft: Draft, path: str, *, of: Given) -> None:
    """Set ``resume`` for a checkpoint of this project's or DeepSpeed's that is here, else ``load_from``."""
    folder = Path(path).expanduser()
    known = any((folder / name).is_file() for name in ("manifest.json", "latest")) or any(folder.glob("*_states.pt"))
    draft.set("resume" if known else "load_from", path, of=of)
    if not known:
        draft.notes.append(
            "Only the weights of that checkpoint are read, and the training starts at 0. One of DeepSpeed's or this"
            f" project's continues in full: resume={path!r} instead."
        )


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
        found = float(value) if not isinstance(value, bool) else float("nan")
    except (TypeError, ValueError):
        found = float("nan")
    if found != found:
        raise Unusable(f"{value!r} is no number" + ("; the variable is set elsewhere" if "$" in str(value) else ""))
    as_text = str(value).lower()
    return int(found) if found.is_integer() and "." not in as_text and "e" not in as_text else found


def whole(value: Any) -> int:
    """A whole number."""
    found = number(value)
    if not float(found).is_integer():
        raise Unusable(f"{value!r} is no whole number")
    return int(found)


def boolean(value: Any) -> bool:
    """``"True"``, ``yes``, ``1``, and a flag without a value."""
    given = str(value).strip().lower()
    if given not in (*_TRUE, *_FALSE):
        raise Unusable(f"{value!r} is neither True nor False")
    return given in _TRUE


class Draft:
    """The config that is made of ``given``, which ``take`` and ``carry`` remove one by one."""

    def __init__(self, values: Mapping[str, Any], command: Command, *, what: str) -> None:
        self.values: dict[str, Any] = dict(values)
        self.what = what
        self.command = command
        self.given = GivenByName(command.given)
        self.comments: dict[str, str] = {}
        """Dotted path -> what it was made of."""
        self.left: list[tuple[str, str]] = []
        """What was given and is not in the config, and why."""
        self.notes: list[str] = []
        """What the reader should know or fill in."""
        helpers = sum(one.name in command.helpers for one in command.given)
        self.num_given = len(command.given) - helpers + len(command.other) + len(command.launch) + len(command.files)
        for one in self.given.repeated:
            if one.name not in command.helpers:
                self.leave(one.shown, "it is given again later")
        for shown, why in command.other:
            self.leave(shown, why)

    # ---- values of the config ---------------------------------------------------------------------------------------

    def get(self, path: str) -> Any:
        """The value at a dotted path; None where there is none."""
        node: Any = self.values
        for step in path.split("."):
            if isinstance(node, list) and step.isdigit() and int(step) < len(node):
                node = node[int(step)]
            else:
                node = node.get(step) if isinstance(node, Mapping) else None
        return node

    def set(self, path: str, value: Any, *, of: Given | str | None = None) -> None:
        """Set a value; ``of``: what it is made of. A different value that something else was made of is kept."""
        shown = of.shown if isinstance(of, Given) else of
        if shown and path in self.comments and self.get(path) != value:
            self.leave(shown, f"{path} is already that of {self.comments[path]}")
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
        if shown:
            self.comments[path] = shown

    def remove(self, path: str) -> Any:
        """Remove a value. Returns it."""
        above, _, last = path.rpartition(".")
        node = self.get(above) if above else self.values
        if isinstance(node, list):
            return node.pop(int(last))
        return node.pop(last, None) if isinstance(node, dict) else None

    # ---- what was given ---------------------------------------------------------------------------------------------

    def leave(self, shown: str, why: str) -> None:
        """It is not carried over."""
        self.left.append((shown, why))

    def take(self, *names: str, kind: Callable[[Any], Any] = text) -> tuple[Any, Given | None]:
        """(value, what was given) under the first of these names that was given, which is then done; else (None, None).
        A value that ``kind`` cannot read is left out, with the reason.
        """
        for name in names:
            one = self.given.pop(name, None)
            if one is None:
                continue
            try:
                return kind(one.value), one
            except Unusable as error:
                self.leave(one.shown, str(error))
        return None, None

    def carry(self, path: str, *names: str, kind: Callable[[Any], Any] = text) -> Any:
        """Set ``path`` to what was given under each of these names. Returns the value there."""
        for name in names:
            value, one = self.take(name, kind=kind)
            if one is not None:
                self.set(path, value, of=one)
        return self.get(path)

    def finish(self, why: Mapping[str, str]) -> None:
        """Whatever was not taken is not carried over; ``why``: name -> reason."""
        for one in [*self.given.values()]:
            del self.given[one.name]
            if one.name in self.command.helpers:  # its value is where it is used
                continue
            self.leave(one.shown, why.get(one.name, "this project has no setting of that name: docs/migrating.md"))
        for name in self.command.files:
            self.leave(name, "it is an argument without a name, whose meaning is not known")

    # ---- text -------------------------------------------------------------------------------------------------------

    def text(self, *, start: str) -> str:
        """The whole file. ``start``: the command that trains with it."""
        notes = [
            f"{_quoted(self.what)}, translated by tools/migrate.py. Train with it:",
            "",
            f"    {_quoted(start)}",
            "",
        ]
        notes += _wrapped("Values without a comment were not given: they are those of the guide or of this project.")
        notes += [line for note in self.notes for line in _wrapped(f"* {_quoted(note)}", following="  ")]
        lines = ['"""' + notes[0], *notes[1:], '"""', ""]
        if self.left:
            lines += [f"# NOT CARRIED OVER ({len(self.left)}):"]
            for shown, why in self.left:
                lines += _wrapped(f"# {_plain(shown)}", following="#   ")
                lines += _wrapped(f"#     {_plain(why)}", following="#     ")
            lines += [""]
        for key in sorted(self.values, key=lambda key: SECTIONS.index(key) if key in SECTIONS else len(SECTIONS)):
            lines += self._lines(f"{key} = ", self.values[key], key, 0, end="")
        return "\n".join(lines) + "\n"

    def _lines(self, name: str, value: Any, path: str, depth: int, *, end: str) -> list[str]:
        indent, comment = "    " * depth, self.comments.get(path)
        after = f"  # {_plain(comment)}" if comment else ""
        line = f"{indent}{name}{_literal(value)}{end}"
        inner = any(other.startswith(f"{path}.") for other in self.comments)
        if not inner and (len(line) <= _WIDTH or not isinstance(value, (dict, list)) or not value):
            return [line + after]
        if isinstance(value, dict):
            opening, closing = ("dict(", ")") if all(map(_is_name, value)) else ("{", "}")
            parts = [(f"{key}=" if opening != "{" else f"{key!r}: ", inside, key) for key, inside in value.items()]
        else:
            opening, closing = "[", "]"
            parts = [("", inside, index) for index, inside in enumerate(value)]
        lines = [f"{indent}{name}{opening}{after}"]
        for label, inside, key in parts:
            lines += self._lines(label, inside, f"{path}.{key}", depth + 1, end=",")
        return [*lines, f"{indent}{closing}{end}"]


def _is_name(key: Any) -> bool:
    return isinstance(key, str) and key.isidentifier() and not keyword.iskeyword(key)


def _literal(value: Any) -> str:
    """Python that makes the value."""
    if isinstance(value, Mapping):
        if all(map(_is_name, value)):
            return f"dict({', '.join(f'{key}={_literal(inside)}' for key, inside in value.items())})"
        return f"{{{', '.join(f'{key!r}: {_literal(inside)}' for key, inside in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, str):
        return repr(str(value))
    if value is None or isinstance(value, (bool, int)):
        return repr(value)
    if isinstance(value, float):
        return repr(value) if abs(value) != float("inf") and value == value else f"float({str(value)!r})"
    raise ConfigError(f"a value of the config is {value!r}", allowed="texts, numbers, lists and dicts")


def _plain(given: str) -> str:
    """One line."""
    return " ".join(given.split()).encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


def _quoted(given: str) -> str:
    """The same in a docstring."""
    return _plain(given).replace("\\", "\\\\").replace('"""', "'''")


def _wrapped(line: str, *, following: str = "") -> list[str]:
    return textwrap.wrap(line, _WIDTH, subsequent_indent=following, break_long_words=False, break_on_hyphens=False)
