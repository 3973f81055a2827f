"""The sections ``tokenizer``, ``processor`` and ``loss_weights``, which depend on the family of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from unigen_ds.config.registry import MODELS, argument_problems, find
from unigen_ds.config.section import Of, one_or_many
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.data.images.augment import CHANGES, transform_problems
from unigen_ds.data.settings import Transform
from unigen_ds.families.base import families, family_of
from unigen_ds.families.directories import published_format
from unigen_ds.system.log import notice

PROCESSOR_KEYS = (
    "vit_transform", "vae_transform", "augment", "vit_augment", "text_dropout", "vit_dropout", "vae_dropout",
    "ce_reweight", "max_image_size", "resize_to_max_side_len",
)  # fmt: skip
"""Keys of ``processor`` of the families of this package."""


def check_kind(kind: type, folder: Path) -> None:
    """Raise ``ConfigError`` where ``model.pretrained`` is the published directory of another family."""
    formats = family_of(kind).published
    directory_format = published_format(folder) if formats and folder.is_dir() else None
    if directory_format is None or any(one.recognises(folder) for one in formats):
        return
    try:
        remedy = f"model.type={directory_format.config(folder)['model']['type']!r}"
    except (CheckpointError, ConfigError):
        remedy = "another folder"
    raise ConfigError(
        f"model.pretrained is {str(folder)!r}: {directory_format.name}, and not for model.type {kind.__name__!r}",
        allowed=", ".join(one.name for one in formats),
        remedy=remedy,
    )


def family_problems(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """What is wrong with ``tokenizer``, ``processor`` and ``loss_weights``, which depend on the model's family."""
    try:
        kind = find(MODELS, config.get("model") or {}, where="")
    except ConfigError:
        return  # reported with the model
    try:
        family = family_of(kind)
    except ConfigError as error:
        yield error
        return
    if family.needs_tokenizer and config.get("tokenizer") is None:
        yield ConfigError("the config has no tokenizer", remedy="docs/configs/tokenizer.md describes each")
    processor, weights = config.get("processor"), config.get("loss_weights")
    if isinstance(processor, Mapping):
        from_run = ("tokenizer", "seed", *getattr(kind, "fixes_of_processor", ()))
        yield from (
            ConfigError(f"processor.{key} cannot be set", remedy="delete it") for key in from_run if key in processor
        )
        section = {**processor, **{key: [processor[key]] for key in CHANGES if isinstance(processor.get(key), Mapping)}}
        yield from argument_problems(family.processor_arguments(), section, where="processor", from_run=from_run)
        yield from _of_transforms(processor)
    others = {term for other in families() for term in other.terms}
    for term in weights if isinstance(weights, Mapping) else ():
        if term not in family.terms and term in others:  # a config that several kinds of models share
            notice(f"loss_weights.{term} has no effect: {family.model.__name__} has no such loss term.")
        elif term not in family.terms:
            yield ConfigError(f"loss_weights.{term} is the weight of no loss term", allowed=", ".join(family.terms))


def _of_transforms(processor: Mapping[str, Any]) -> Iterator[ConfigError]:
    of: Of = get_args(Transform)[1]
    transforms: list[tuple[str, Any]] = [(key, processor.get(key)) for key in ("vit_transform", "vae_transform")]
    for key in CHANGES:
        members = one_or_many(processor.get(key))
        transforms += [(f"{key}[{i}]", spec) for i, spec in enumerate(members if isinstance(members, tuple) else ())]
    for key, spec in transforms:
        where, changes = f"processor.{key}", key.endswith("]")
        if changes or isinstance(spec, Mapping):
            yield from of.problems(spec, where=where) or transform_problems(
                find(of.registry, spec, where=where), where, changes=changes
            )
