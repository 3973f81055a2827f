"""A config with mistakes -> settings of all that is right in it, for the checks that do not depend on the mistakes.

The config is edited until it has no problem: a key is removed and has its default then, or a part that every config
must have is replaced. Each possible edit is tried: the first that solves a problem and reveals no other one is made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from unigen_ds.config.overrides import plain_values
from unigen_ds.runner.settings.custom_imports import import_custom
from unigen_ds.runner.settings.tree import Settings, problems_of

NOWHERE = "unreadable"
"""The path of the data set that replaces those of the config."""
_SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
_PARTS = {"llm": {**_SIZES, "num_key_value_heads": 1}, "vit": {**_SIZES, "num_hidden_layers": 1}}
"""Keys of ``model`` -> sizes on which no data depends."""
_LLM = {"model_type": "llama", "vocab_size": 8, **_PARTS["llm"], **_PARTS["vit"]}
_REPLACEMENTS: tuple[dict[str, Any], ...] = (
    {"optim_wrapper.optimizer": {"type": "AdamW", "lr": 1e-3}},
    {"train_cfg.max_updates": 1},
    {"train_dataloader.batch_size": 1},
    {"train_dataloader.dataset": {"type": "UnifiedGenerationDataset", "data_path": NOWHERE}},
    {"tokenizer": {"type": "WordTokenizer", "words": ["a"]}},
    {"model": {"type": "DecoderLM", "llm": _LLM}, "processor": {}, "loss_weights": {}, "lora": None},
)
"""Parts without which there are no settings, by their keys."""
_MISSING = "the config has no "


Edit = tuple[dict[str, Any], frozenset[str]]
"""The values after it, and the keys of parts that it replaces, or of lists of which it leaves out a member."""


def usable_settings(config: Mapping[str, Any]) -> tuple[Settings, frozenset[str], frozenset[str]] | None:
    """The settings, the sections that are not as the config has them, and the keys of parts that are replaced.

    None: no edits make the config usable.
    """
    values, replaced, replacements = plain_values(config), frozenset[str](), [*_REPLACEMENTS]
    try:
        import_custom(values)
    except Exception:  # of a user's own module; reported with the config
        values.pop("custom_imports")
    while problems := _problems(values):
        named = {*values}.intersection(re.findall(r"\w+", " ".join(problems)))
        edit = _best_edit(values, problems, named or {*values}, replacements)
        if edit is None:
            return None
        values, replaced = edit[0], replaced | edit[1]
        replacements = [each for each in replacements if not replaced.issuperset(each)]  # each of them once
    changed = frozenset(key for key in {*config, *values} if config.get(key) != values.get(key))
    return Settings.from_config(values), changed, replaced


def _problems(values: Mapping[str, Any]) -> set[str]:
    """Texts; each key that is missing is a problem of its own."""
    problems = set[str]()
    for error in problems_of(values):
        if error.problem.startswith(_MISSING):
            problems |= {_MISSING + key for key in error.problem.removeprefix(_MISSING).split(", ")}
        else:
            problems.add(str(error))
    return problems


def _best_edit(
    values: dict[str, Any], problems: set[str], sections: set[str], replacements: list[dict[str, Any]]
) -> Edit | None:
    """The first edit that solves a problem and reveals none, or else the one that reveals the fewest, missing keys
    last.
    """
    best, least = None, (0, 0)
    for edit in _edits(values, sections, replacements):
        remaining = _problems(edit[0])
        if remaining < problems:
            return edit
        revealed = remaining - problems
        number = (sum(problem.startswith(_MISSING) for problem in revealed), len(revealed))
        if not problems <= remaining and (best is None or number < least):
            best, least = edit, number
    return best


def _edits(values: dict[str, Any], sections: set[str], replacements: list[dict[str, Any]]) -> Iterator[Edit]:
    """The removal of each key and each member of a list in ``sections``, innermost first; then the replacements."""
    paths = [path for path in _paths(values) if path[0] in sections]
    for *outer, last in sorted(paths, key=len, reverse=True):
        edited = inner = plain_values(values)
        for step in outer:
            inner = inner[step]
        del inner[last]
        yield edited, frozenset([".".join(map(str, outer))] if isinstance(last, int) else ())
    model = values.get("model")
    for part, sizes in _PARTS.items():
        own = model.get(part) if isinstance(model, dict) else None
        if isinstance(model, dict) and isinstance(own, dict) and not sizes.items() <= own.items():
            yield {**values, "model": {**model, part: {**own, **sizes}}}, frozenset()
    for replacement in replacements:
        edited = dict(values)
        for dotted, value in replacement.items():
            section, _, key = dotted.partition(".")
            own = edited.get(section)
            edited[section] = {**(own if isinstance(own, dict) else {}), key: value} if key else value
        yield edited, frozenset(replacement)


def _paths(values: Any) -> Iterator[tuple[Any, ...]]:
    """The steps to each key except ``type``, and to each mapping in a list, the last first: the others keep their
    numbers when it is removed.
    """
    if isinstance(values, dict):
        members = [(key, value) for key, value in values.items() if key != "type"]
    elif isinstance(values, list):
        members = [pair for pair in reversed([*enumerate(values)]) if isinstance(pair[1], dict)]
    else:
        return
    for step, value in members:
        yield (step,)
        yield from ((step, *path) for path in _paths(value))
