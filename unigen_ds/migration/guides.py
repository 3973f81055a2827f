"""A guide's name and what its user has -> the text of a config, checked: ``migrate``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unigen_ds.core.choices import GUIDES
from unigen_ds.core.errors import ConfigError, UnknownKey, nearest, raise_any
from unigen_ds.migration import bagel_flags, decoder_flags, nanovlm_flags, xtuner_config
from unigen_ds.migration.commands import Command, read_command, start_command
from unigen_ds.migration.draft import Draft
from unigen_ds.migration.xtuner_values import shown

_READERS: dict[str, Callable[[Command], Draft]] = {
    "unified_fsdp": bagel_flags.exported_variables,
    "unified_generation": bagel_flags.flags,
    "decoder_fsdp": decoder_flags.yaml_file,
    "xtuner": xtuner_config.config_file,
    "nanovlm": nanovlm_flags.train_flags,
}
assert {*_READERS} == {*GUIDES}
Problems = Callable[[dict[str, Any]], list[ConfigError]]
_MOST_ROUNDS = 200
_STRANGE = re.compile(r"([\w.\[\]]+)\.type is ")
"""An error about the class of a component."""


@dataclass(frozen=True)
class Migrated:
    """A config, and how much of what was given it has."""

    text: str
    values: Mapping[str, Any]
    left: Sequence[tuple[str, str]]
    """What was given and is a comment only, and why."""
    notes: Sequence[str]
    num_given: int


def migrate(guide: str, words: Sequence[str], *, problems: Problems, name: str = "CONFIG") -> Migrated:
    """Translate ``words``, a command line or one file, of the trainer that a guide describes.

    Args:
        guide: one of ``GUIDES``.
        words: as ``commands.read_command`` accepts them.
        problems: what is wrong with a config: unknown keys are removed, with a comment; the rest is raised.
        name: of the config in its own start command.

    Raises ``ConfigError`` for an unknown guide, an unreadable file, and values that no config may have.
    """
    if guide not in _READERS:
        raise ConfigError(f"no guide is called {guide!r}", remedy=nearest(guide, GUIDES))
    command = read_command(words)
    draft = _READERS[guide](command)
    _settle(draft, problems)
    start = start_command(command, name)
    return Migrated(
        draft.text(start=start), draft.values, draft.left, draft.notes, max(draft.num_given, len(draft.left))
    )


def _for_any_processes(values: dict[str, Any]) -> dict[str, Any]:
    """Without the number of shards, which a start compares with its own number of processes."""
    backend = values.get("backend")
    return (
        {**values, "backend": {**backend, "num_shard": None}}
        if isinstance(backend, dict) and "num_shard" in backend
        else values
    )


def _without(draft: Draft, path: str, found: Sequence[ConfigError]) -> bool:
    """Remove a component of a class that is not known here. False for one that was not given."""
    dotted = re.sub(r"\[(\d+)\]", r".\1", path)
    if draft.get(dotted) is None or dotted in ("model", "tokenizer"):
        return False
    why = next(str(error) for error in found if error.problem.startswith(path))
    draft.leave(shown(path, draft.get(dotted)), why)
    draft.remove(dotted)
    return True


def _settle(draft: Draft, problems: Problems) -> None:
    """Remove every key that no section and no component has, with a comment."""
    for _ in range(_MOST_ROUNDS):
        found = problems(_for_any_processes(draft.values))
        unknown = [error for error in found if isinstance(error, UnknownKey)]
        strange = [match[1] for error in found if (match := _STRANGE.match(error.problem))]
        if not unknown and not strange:
            raise_any(found)
            return
        if not unknown and not _without(draft, strange[0], found):
            raise_any(found)
        for error in unknown:
            path = re.sub(r"\[(\d+)\]", r".\1", error.path)
            value = draft.get(path)
            draft.remove(path)
            draft.leave(shown(error.path, value), error.hint or "there is no such key here")
