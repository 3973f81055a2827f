"""A guide's name and what its user has -> the text of a config, checked: ``migrate``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unigen_ds.core.choices import GUIDES
from unigen_ds.core.errors import ConfigError, UnknownKey, nearest, raise_any
from unigen_ds.migration import bagel_flags, decoder_flags, nanovlm_flags, xtuner_config
from unigen_ds.migration.commands import Command, read_command
from unigen_ds.migration.draft import Draft, assignment

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
_CLASS = re.compile(r"([\w.\[\]]+)\.type is ")
"""An error about the class of a component."""


def migrate(guide: str, words: Sequence[str], *, problems: Problems) -> Draft:
    """Translate ``words``, a command line or one file, of the trainer that a guide describes.

    Args:
        guide: one of ``GUIDES``.
        words: as ``commands.read_command`` accepts them.
        problems: what is wrong with a config: unknown keys are removed, with a comment; the rest is raised.

    Raises ``ConfigError`` for an unknown guide, an unreadable file, and values that no config may have.
    """
    if guide not in _READERS:
        raise ConfigError(f"no guide is called {guide!r}", remedy=nearest(guide, GUIDES))
    draft = _READERS[guide](read_command(words))
    _remove_unknown(draft, problems)
    draft.num_settings = max(draft.num_settings, len(draft.omissions))
    return draft


def _remove_unknown(draft: Draft, problems: Problems) -> None:
    """Remove every key that no section and no component has, and each component of an unknown class, with a comment."""
    for _ in range(_MOST_ROUNDS):
        errors = problems(_checked_values(draft.values))
        unknown = [error for error in errors if isinstance(error, UnknownKey)]
        classes = [(match[1], error) for error in errors if (match := _CLASS.match(error.problem))]
        classes = [one for one in classes if one[0] not in ("model", "tokenizer") and draft.get(_steps(one[0]))]
        removals = [(error.path, error.hint or "there is no such key here") for error in unknown]
        for path, why in removals or [(path, str(error)) for path, error in classes[:1]]:
            draft.omit(assignment(path, draft.get(_steps(path))), why)
            draft.remove(_steps(path))
        if not unknown and not classes:
            raise_any(errors)
            return


def _steps(path: str) -> str:
    return re.sub(r"\[(\d+)\]", r".\1", path)


def _checked_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without the number of shards, which a start compares with its own number of processes."""
    backend = values.get("backend")
    if not isinstance(backend, dict) or "num_shard" not in backend:
        return dict(values)
    return {**values, "backend": {**backend, "num_shard": None}}
