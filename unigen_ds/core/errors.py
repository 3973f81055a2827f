"""Errors a user can act on: each says what was given, what is allowed, and the remedy.

``assert`` is for our own bugs; everything a user, a file or a machine can cause raises one of these.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UnigenError(Exception):
    """Base of all errors of the project. ``exit_status`` is what the command line tools return."""

    exit_status = 1

    def __init__(self, problem: str, *, allowed: str | None = None, remedy: str | None = None) -> None:
        parts = [problem, allowed and f"Allowed: {allowed}", remedy and f"Remedy: {remedy}"]
        super().__init__(" ".join(_sentence(part) for part in parts if part))
        self.problem, self.allowed, self.remedy = problem, allowed, remedy


def _sentence(text: str) -> str:
    return text if text.endswith("?") else text.rstrip(". ") + "."


class ConfigError(UnigenError, ValueError):
    """A config key, a flag, or a combination of them cannot work."""

    exit_status = 2


class DataError(UnigenError, ValueError):
    """A record or an image is not what its format promises; names file, line and field."""


class CheckpointError(UnigenError, RuntimeError):
    """A checkpoint is missing, incomplete, damaged, or does not fit."""


class ResumeBlocked(CheckpointError):
    """The run may not go on as asked; nothing was changed. The command line tools exit with 3."""

    exit_status = 3


class TrainingError(UnigenError, RuntimeError):
    """Training cannot go on: too many non-finite updates, or too many unreadable samples."""


def nearest(given: str, valid: Iterable[str]) -> str:
    """Return ``"did you mean 'x'?"`` for the closest valid key, or the sorted list of keys when none is close."""
    names = sorted(str(name) for name in valid)
    close = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else "valid: " + ", ".join(names)
