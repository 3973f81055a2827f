"""What the checks of a dry run know: the command line, and what earlier checks have built from the config."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from unigen_ds.backends.base import Backend
from unigen_ds.core.errors import ConfigError, UnknownKey
from unigen_ds.core.progress import Geometry
from unigen_ds.resume.plan import ResumePlan
from unigen_ds.runner.settings.tree import Settings, problems_of
from unigen_ds.runner.start.begin import Start
from unigen_ds.system.variables import WrongNumber

if TYPE_CHECKING:
    from unigen_ds.checks.dry_run.first_batches import FirstBatches
    from unigen_ds.checks.dry_run.result import Hardware
    from unigen_ds.checks.memory.traced import Traced


class Unknown(Exception):
    """A check needs what an earlier one could not build: it is reported as not checked."""


@dataclass(frozen=True)
class Asked:
    """The command line."""

    config: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    resume_auto: bool = False
    world_size: int | None = None
    per_node: int | None = None
    num_batches: int = 100
    device_memory: int | None = None
    """Bytes."""
    peak_tflops: float | None = None
    mfu: float = 0.4
    skip: Sequence[str] = ()
    """Names of checks that are left out."""


@dataclass
class Known:
    """Filled in by the checks, in their order. What is missing is asked for with ``need``."""

    asked: Asked
    wrong_numbers: Sequence[WrongNumber] = ()
    """Variables of the launcher that are no numbers: as if they were not set."""
    given: dict[str, Any] = field(default_factory=dict)
    """The config as plain values, with its mistakes: for what can be checked nevertheless."""
    hardware: Hardware | None = None
    world_size: int = 1
    per_node: int = 1
    settings: Settings | None = None
    """Of a config with mistakes those of the rest."""
    changed: frozenset[str] = frozenset()
    """Sections that are not as the config has them, since something in them is wrong."""
    replaced: frozenset[str] = frozenset()
    """Those of them that have nothing, or not all, of what the config should have: data cannot be planned with them."""
    backend: Backend | None = None
    geometry: Geometry | None = None
    loaded: Geometry | None = None
    """By which ``start`` divides the data: ``geometry``, or the batch size alone."""
    plan: ResumePlan | None = None
    start: Start | None = None
    model: nn.Module | None = None
    """On the meta device."""
    batches: FirstBatches | None = None
    traced: Traced | None = None
    paths: Sequence[str] = ()
    """Those that are reported to be missing."""
    problems: set[str] = field(default_factory=set)
    """Texts of those that are listed."""

    def need(self, name: str) -> Any:
        """The value ``name``. Raises ``Unknown`` where no check could build it."""
        value = getattr(self, name)
        if value is None:
            raise Unknown(_NAMES[name])
        return value

    def section(self, *sections: str) -> Settings:
        """``settings``. Raises ``Unknown`` where something in one of these sections is wrong."""
        settings: Settings = self.need("settings")
        if wrong := self.changed.intersection(sections):
            raise Unknown(f"{', '.join(sorted(wrong))} without problems")
        return settings


_NAMES = {
    "settings": "a config without problems",
    "backend": "an engine that can be used",
    "geometry": "an engine that can be used",
    "loaded": "data without problems",
    "plan": "a start without problems",
    "start": "data and, on a resume, a checkpoint without problems",
    "model": "a model that can be built",
    "batches": "the first micro-batches",
    "traced": "a traced update",
    "hardware": "the devices of this machine",
}
"""What a user calls each value."""


# A config with mistakes -> settings of all that is right in it, for the checks that do not depend on the mistakes.

NOWHERE = "unreadable"
"""The path of a data set that is used instead of those of the config."""
_PATH = re.compile(r"[A-Za-z_]\w*(?:\.\w+|\[\d+\])*")
_SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
_PARTS = {"llm": {**_SIZES, "num_key_value_heads": 1}, "vit": {**_SIZES, "num_hidden_layers": 1}}
"""Keys of ``model`` -> sizes on which no data depends."""
_STAND_INS: dict[str, dict[str, Any]] = {
    "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 1e-3}},
    "train_cfg": {"max_updates": 1},
    "backend": {"type": "single"},
    "model": {"type": "DecoderLM", "llm": {"model_type": "llama", "vocab_size": 8, **_PARTS["vit"], **_PARTS["llm"]}},
    "tokenizer": {"type": "WordTokenizer", "words": ["a"]},
    "train_dataloader": {"dataset": {"type": "UnifiedGenerationDataset", "data_path": NOWHERE}, "batch_size": 1},
}
"""Sections without which there are no settings."""


def usable_settings(given: Mapping[str, Any]) -> tuple[Settings | None, frozenset[str], frozenset[str]]:
    """Settings in which each wrong key has its default, and a section that is wrong as a whole is replaced or left out;
    None: that is impossible. The names of the sections that are not as ``given``, and of those that were replaced.
    """
    left, changed, replaced = copy.deepcopy(dict(given)), set[str](), set[str]()
    for remove in (_remove_keys, _remove_keys, *[_remove_sections] * 4):
        for error in reversed(problems_of(left)):  # the last of a list first: the others keep their numbers
            if steps := _steps(error):
                changed.add(steps[0])
                if remove(left, steps, error.problem):
                    replaced.add(steps[0])
    try:
        return Settings.from_config(left), frozenset(changed), frozenset(replaced)
    except ConfigError:
        return None, frozenset(changed), frozenset(replaced)


def _steps(error: ConfigError) -> list[str]:
    """The keys that lead to what an error is about, as far as it names them."""
    if isinstance(error, UnknownKey):
        return error.path.split(".")
    paths = (re.findall(r"\w+", found) for found in _PATH.findall(error.problem))
    return next((steps for steps in paths if steps[0] in Settings.model_fields), [])


def _remove_keys(config: dict[str, Any], steps: list[str], problem: str) -> bool:
    """The key, or of a section the keys that the problem names; nothing is replaced."""
    inner: Any = config
    for step in steps[:-1]:
        inner = inner.get(step) if isinstance(inner, dict) else _element(inner, step)
    section: Any = inner.get(steps[-1]) if isinstance(inner, dict) else None
    named = set(section) & set(re.findall(r"\w+", problem)) if isinstance(section, dict) else set[str]()
    for key in named:
        section.pop(key)
    if isinstance(inner, dict) and not named and (len(steps) > 1 or steps[0] not in Settings.model_fields):
        inner.pop(steps[-1], None)
    return False


def _element(inner: Any, step: str) -> Any:
    is_there = isinstance(inner, (list, tuple)) and step.isdigit() and int(step) < len(inner)
    return inner[int(step)] if is_there else None


def _remove_sections(config: dict[str, Any], steps: list[str], problem: str) -> bool:
    """Whether a replacement is there now, or a data set is missing."""
    section, part, number = (*steps, "", "")[:3]
    given = config.get(section)
    inner = given.get(part) if isinstance(given, dict) else None
    if section == "model" and part in _PARTS and isinstance(inner, dict) and not _PARTS[part].items() <= inner.items():
        inner |= _PARTS[part]
        return False
    if section == "train_dataloader" and isinstance(inner, list) and len(inner) > 1 and number.isdigit():
        inner.pop(int(number))
    elif section in _STAND_INS:
        own = given if isinstance(given, dict) else {}
        merged = copy.deepcopy({**own, **_STAND_INS[section]})
        config[section] = merged if merged != given else copy.deepcopy(_STAND_INS[section])
    else:
        config.pop(section, None)
        return False
    return True
