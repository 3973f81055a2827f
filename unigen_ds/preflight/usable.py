"""A config with mistakes -> settings of all that is right in it, for the checks that do not depend on the mistakes."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from unigen_ds.core.errors import ConfigError, UnknownKey
from unigen_ds.runner.settings import Settings, problems_of

_PATH = re.compile(r"[A-Za-z_]\w*(?:\.\w+|\[\d+\])*")
_STAND_INS: dict[str, dict[str, Any]] = {
    "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 1e-3}},
    "train_cfg": {"max_updates": 1},
    "backend": {"type": "single"},
}
_LLM = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
"""Of ``model.llm``, of which no data depends on any size."""
_ALWAYS_OWN = ("model", "train_dataloader", "custom_imports")
"""Sections without which nothing that depends on a config can be checked."""


def usable_settings(given: Mapping[str, Any]) -> tuple[Settings | None, frozenset[str]]:
    """Settings in which each wrong key has its default, and a section that is wrong as a whole is replaced or left out;
    None: that is impossible. And the names of the sections that are not as ``given``.
    """
    left, changed = copy.deepcopy(dict(given)), set[str]()
    for remove in (_remove_keys, _remove_keys, _remove_sections):
        errors = problems_of(left)
        if not errors:
            break
        for error in errors:
            if steps := _steps(error):
                changed.add(steps[0])
                remove(left, steps, error.problem)
    try:
        return Settings.from_config(left), frozenset(changed)
    except ConfigError:
        return None, frozenset(changed)


def _steps(error: ConfigError) -> list[str]:
    """The keys that lead to what an error is about, as far as it names them."""
    if isinstance(error, UnknownKey):
        return error.path.split(".")
    paths = (re.findall(r"\w+", found) for found in _PATH.findall(error.problem))
    return next((steps for steps in paths if steps[0] in Settings.model_fields), [])


def _remove_keys(config: dict[str, Any], steps: list[str], problem: str) -> None:
    """The key, or of a section the keys that the problem names."""
    inner: Any = config
    for step in steps[:-1]:
        inner = inner.get(step) if isinstance(inner, dict) else _element(inner, step)
    section: Any = inner.get(steps[-1]) if isinstance(inner, dict) else None
    named = set(section) & set(re.findall(r"\w+", problem)) if isinstance(section, dict) else set[str]()
    for key in named:
        section.pop(key)
    if isinstance(inner, dict) and not named and (len(steps) > 1 or steps[0] not in Settings.model_fields):
        inner.pop(steps[-1], None)


def _element(inner: Any, step: str) -> Any:
    is_there = isinstance(inner, (list, tuple)) and step.isdigit() and int(step) < len(inner)
    return inner[int(step)] if is_there else None


def _remove_sections(config: dict[str, Any], steps: list[str], problem: str) -> None:
    section = steps[0]
    if section in _STAND_INS:
        config[section] = copy.deepcopy(_STAND_INS[section])
    elif steps[:2] == ["model", "llm"] and isinstance(config["model"].get("llm"), dict):
        config["model"]["llm"] |= _LLM
    elif section not in _ALWAYS_OWN:
        config.pop(section, None)
