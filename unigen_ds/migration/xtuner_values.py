"""What the translations of a config's sections share: values, and what is left of them in a comment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unigen_ds.migration.draft import Draft
from unigen_ds.migration.static_config import Computed, Reference

MASKS = "masks and boxes are no data here: a family of your own trains them (docs/extending.md)"
TEMPLATE = "the model's own chat template is used; tokenizer.chat_template replaces it"
OWN_PROCESSOR = "the model's own image processor is used, as its directory states it"
NOT_CARRIED_OVER: dict[str, str] = {
    "tokenizer": "the tokenizer of the config is used",
    "image_processor": OWN_PROCESSOR,
    "dataset_map_fn": "the layout of the records is recognised: docs/data.md",
    "template_map_fn": TEMPLATE,
    "pad_image_to_square": OWN_PROCESSOR,
    "prompt_template": TEMPLATE,
    "remove_unused_columns": "columns that no layout has are not read",
    "shuffle_before_pack": "the order follows from randomness.seed",
    "use_varlen_attn": "packed documents never see each other",
}
"""Arguments of data sets, and of models, that have no counterpart -> what replaces them."""


def shown(path: str, value: Any) -> str:
    """``model.llm = dict(type=..., ...)``, shortened."""
    found = f"{path} = {_short(value)}"
    return found if len(found) <= 200 else f"{found[:197]}..."


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"dict({', '.join(f'{key}={_short(inside)}' for key, inside in value.items())})"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_short, value))}]"
    return str(value) if isinstance(value, (Reference, Computed)) else repr(value)


def leaves(value: Any, path: str = "") -> Any:
    """(dotted path, value) of everything that is no section."""
    if isinstance(value, Mapping) and value:
        for key, inside in value.items():
            yield from leaves(inside, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and any(isinstance(inside, (Mapping, Computed)) for inside in value):
        for index, inside in enumerate(value):
            yield from leaves(inside, f"{path}.{index}")
    else:
        yield path, value


def drop(draft: Draft, path: str, why: str) -> Any:
    """Remove a value, with a comment. Returns it."""
    value = draft.get(path)
    if value is not None:
        draft.leave(shown(path, value), why)
    return draft.remove(path)


def is_ours(value: Any) -> bool:
    """Whether a ``type`` is a class of this package."""
    return isinstance(value, Reference) and value.startswith("unigen_ds.")


def last_name(value: Any) -> str:
    """``transformers.AutoTokenizer.from_pretrained`` -> ``AutoTokenizer``; of a text the last part of its path."""
    found = str(value).removesuffix(".from_pretrained").removesuffix(".from_config")
    return found.rpartition(".")[2]


def pretrained_name(section: Any) -> str | None:
    """The directory or name that a section loads from."""
    given = section.get("pretrained_model_name_or_path") if isinstance(section, Mapping) else None
    return given if isinstance(given, str) else None
