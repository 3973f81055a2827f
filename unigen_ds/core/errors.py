"""Errors a user can act on: what was given, what is allowed, the remedy. ``assert`` is for our own bugs."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable, Sequence
from typing import Any


class UnigenError(Exception):
    """Base of all errors of the project. ``exit_status`` is what the command line tools return."""

    exit_status = 1
    everywhere = False
    """Whether all ranks raise it with the same text: then rank 0 alone reports it."""

    def __init__(self, problem: str, *, allowed: str | None = None, remedy: str | None = None) -> None:
        problem, allowed, remedy = _printable(problem), allowed and _printable(allowed), remedy and _printable(remedy)
        parts = [problem, allowed and f"Allowed: {allowed}", remedy and f"Remedy: {remedy}"]
        super().__init__(" ".join(part if part.endswith("?") else part.rstrip(". ") + "." for part in parts if part))
        self.problem, self.allowed, self.remedy = problem, allowed, remedy


def _printable(text: str) -> str:
    """Make a text writable to a log: names of files, and texts of JSON, may have half of a character."""
    return text.encode("utf-8", "backslashreplace").decode()


class ConfigError(UnigenError, ValueError):
    """A config key, a flag, or a combination of them cannot work."""

    exit_status = 2
    parts: Sequence[ConfigError] = ()
    """The errors that this one combines."""

    def at(self, where: str) -> ConfigError:
        """The same error, with the path in the config where it does not name it."""
        if self.problem.startswith(where):
            return self
        return ConfigError(f"{where}: {self.problem}", allowed=self.allowed, remedy=self.remedy)


class DataError(UnigenError, ValueError):
    """A record or an image does not follow its format; names file, line and field."""

    def at(self, where: str) -> DataError:
        """The same error, with the path in the config of what could not be read."""
        return type(self)(f"{where}: {self.problem}", allowed=self.allowed, remedy=self.remedy)


class CheckpointError(UnigenError, RuntimeError):
    """A checkpoint is missing, incomplete, damaged, or does not fit."""


class ResumeBlocked(CheckpointError):
    """The run cannot continue as requested; nothing was changed. The command line tools exit with 3."""

    exit_status = 3


class UploadError(UnigenError, RuntimeError):
    """A model could not be uploaded; the folder that was to be uploaded is complete and kept."""


class SaveError(CheckpointError):
    """A checkpoint could not be written; nothing of it is left. All ranks raise it. A periodic save that fails is
    logged, and training continues; the last save of a run, and that on a signal, end the run with exit status 4.
    """

    exit_status = 4
    everywhere = True


class TrainingError(UnigenError, RuntimeError):
    """Training cannot continue: too many non-finite updates, or too many unreadable samples."""


class UnknownKey(ConfigError):
    """A key that its section does not have.

    ``section``: as shown (``optim_wrapper.clip_grad``); empty for the top of the config. ``valid``: its keys. ``hint``:
    what to do about this key; None: the nearest valid one is suggested, or all are listed.
    """

    def __init__(
        self, key: str, *, section: str, valid: Iterable[str], hint: str | None = None, problem: str | None = None
    ) -> None:
        self.path = f"{section}.{key}" if section else key
        self.hint = hint or suggestion(key, valid)
        super().__init__(problem or f"unknown config key {self.path!r}", remedy=self.hint or nearest(key, valid))


def short_text(error: BaseException) -> str:
    """The kind of an unexpected error, the first line of its text, and where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first} ({last.filename}:{last.lineno})"


def short_value(value: Any) -> str:
    """The first 57 characters of a value, for a message about it."""
    try:
        text = repr(value)
    except RecursionError:  # JSON may be nested as deeply as Python can follow it, and this is called further down
        text = f"a {type(value).__name__}, nested too deeply to be shown"
    return text if len(text) <= 60 else text[:57] + "..."


def raise_any(errors: Sequence[ConfigError]) -> None:
    """Raise one error for all of ``errors``, a line for each, where there are any."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        error = ConfigError(f"{len(errors)} problems in the config:\n  " + "\n  ".join(map(str, errors)))
        error.parts = errors
        raise error from errors[0].__cause__


def close(name: str, valid: Iterable[str], *, cutoff: float = 0.7) -> str | None:
    """The one of ``valid`` that ``name`` is probably meant to be, whatever the case of its letters."""
    names = {name.lower(): name for name in sorted(map(str, valid), reverse=True)}
    matches = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=cutoff)
    return names[matches[0]] if matches else None


def suggestion(name: str, valid: Iterable[str]) -> str | None:
    """``"did you mean 'x'?"`` where a valid name is close; for an error that lists what is allowed."""
    near = close(name, valid)
    return f"did you mean '{near}'?" if near else None


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return ``"did you mean 'x'?"`` for a valid name that is close, or the sorted list of names when none is."""
    names = sorted(map(str, valid))
    return suggestion(name, names) or ("valid: " + ", ".join(names) if names else "leave it out: no key is valid there")
