"""Every component of a config against its registry: all that is wrong, before anything of any of them is called.

In: a config. Out: errors, for one message. A component inside the arguments of another is checked by that other, except
for the autoencoder of a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from mmengine.registry import Registry

from unigen_ds.core.errors import ConfigError
from unigen_ds.core.hints import fits
from unigen_ds.core.registry import (
    AUTOENCODERS,
    BACKENDS,
    CURVES,
    DATASETS,
    HOOKS,
    MODELS,
    PACKERS,
    TOKENIZERS,
    TRANSFORMS,
    WRITERS,
    argument_problems,
    component_problems,
    find,
)
from unigen_ds.families.base import Family
from unigen_ds.runner.build import DEFAULT_HOOKS, build_family, import_custom

REQUIRED = ("model", "train_dataloader", "optim_wrapper", "train_cfg")
"""Besides a tokenizer, where the family of the model needs one."""

_CHANNELS = {"RGB": 3, "L": 1}
Found = tuple[Registry, Any, str]


def problems(config: Mapping[str, Any]) -> list[ConfigError]:
    """An error for each section that is missing, and for everything that is wrong with a component."""
    errors: list[ConfigError] = []
    try:
        import_custom(config)
    except ConfigError as error:
        errors.append(error)
    found = _family(config)
    needed = [*REQUIRED[:1], *["tokenizer"] * (found is None or found.needs_tokenizer), *REQUIRED[1:]]
    missing = [key for key in needed if config.get(key) is None]
    if missing:
        problem = f"the config has no {', '.join(missing)}"
        errors.insert(0, ConfigError(problem, remedy="see docs/configs.md for the shape"))
    if len(errors) > bool(missing):
        return errors
    for registry, spec, where in _components(config):
        errors += component_problems(registry, spec, where=where)
    if found is not None:
        errors += _of_family(config, found)
    whole = isinstance(config.get("model"), Mapping) and isinstance(config.get("backend"), Mapping | None)
    return errors or (_misfit(config) if whole else [])


def _family(config: Mapping[str, Any]) -> Family | None:
    """That of ``model.type``; None where it names no model."""
    try:
        return build_family(config) if isinstance(config.get("model"), Mapping) else None
    except ConfigError:
        return None


_FIXED = ("tokenizer", "seed", "rules")
"""Arguments of a processor that no config sets in its section."""


def _of_family(config: Mapping[str, Any], family: Family) -> list[ConfigError]:
    """What is wrong with ``processor`` and ``loss_weights``, whose keys are the family's."""
    processor, weights = config.get("processor"), config.get("loss_weights")
    errors: list[ConfigError] = []
    if isinstance(processor, Mapping):
        errors += [
            ConfigError(f"processor.{key} cannot be set", remedy="delete it") for key in _FIXED if key in processor
        ]
        errors += argument_problems(family.processor_arguments(), processor, where="processor")
    for term, weight in weights.items() if isinstance(weights, Mapping) else ():
        if term not in family.terms:
            hint = {"allowed": ", ".join(family.terms), "remedy": f"{family.model.__name__} has no other loss terms"}
            errors.append(ConfigError(f"loss_weights.{term} is the weight of no loss term", **hint))
        elif not fits(weight, float) or not 0 <= weight < math.inf:
            errors.append(ConfigError(f"loss_weights.{term} is {weight!r}", allowed="a number of at least 0"))
    return errors


def _misfit(config: Mapping[str, Any]) -> list[ConfigError]:
    """What the engine asks of a model that this one does not have, and images of other channels than it takes."""
    spec = config.get("backend") or {"type": "single"}
    engine, model = find(BACKENDS, spec, where="backend"), find(MODELS, config["model"], where="model")
    errors = [
        ConfigError(
            f"model.type is {model.__name__}, which has no {method}(), and backend {spec['type']!r} needs it",
            remedy=advice,
        )
        for method, advice in getattr(engine, "model_needs", {}).items()
        if not hasattr(model, method)
    ]
    for part, key in (("vae", "channels"), ("vit", "num_channels")):
        transform, section = _get(config.get("processor"), f"{part}_transform"), _get(config["model"], part)
        given = section.get(key, 3) if isinstance(section, Mapping) else None
        mode = _get(transform, "mode") or "RGB"
        made = _CHANNELS.get(mode) if _get(transform, "type") == "ImageTransform" else None
        if isinstance(given, int) and made is not None and given != made:
            other = next((name for name, number in _CHANNELS.items() if number == given), None)
            grey = f"processor.{part}_transform.mode={other!r} converts the images, or " if other else ""
            problem = f"model.{part}.{key} is {given}, and processor.{part}_transform makes {made} (mode={mode!r})"
            errors.append(ConfigError(problem, remedy=f"{grey}model.{part}.{key}={made} keeps them as they are"))
    return errors


def _components(config: Mapping[str, Any]) -> Iterator[Found]:
    """Every component, its registry, and where it is. What is no mapping is an error of the section's."""
    model = config.get("model")
    yield from _one(MODELS, model, "model")
    yield from _one(AUTOENCODERS, _get(model, "vae"), "model.vae", typed=True)
    yield from _one(TOKENIZERS, config.get("tokenizer"), "tokenizer")
    yield from _one(BACKENDS, config.get("backend"), "backend")
    processor, loader = config.get("processor"), config.get("train_dataloader")
    for key in ("vit_transform", "vae_transform"):
        yield from _one(TRANSFORMS, _get(processor, key), f"processor.{key}")
    yield from _many(TRANSFORMS, _get(processor, "vit_augment"), "processor.vit_augment")
    yield from _one(PACKERS, _get(loader, "packing"), "train_dataloader.packing")
    datasets = _get(loader, "dataset")
    if isinstance(datasets, Mapping):
        datasets = [datasets]
    yield from _many(DATASETS, datasets, "train_dataloader.dataset")
    curves = config.get("param_scheduler")
    for registry, spec, where in _many(CURVES, [curves] if isinstance(curves, Mapping) else curves, "param_scheduler"):
        if not isinstance(_get(spec, "type"), type):  # a class of any package stands for the curve of its name
            yield registry, spec, where
    for name, default in DEFAULT_HOOKS.items():
        if isinstance(spec := _get(config.get("default_hooks"), name), Mapping):
            yield HOOKS, {"type": default, **spec}, f"default_hooks.{name}"
    yield from _many(HOOKS, config.get("custom_hooks"), "custom_hooks")
    yield from _many(WRITERS, _get(config.get("visualizer"), "vis_backends"), "visualizer.vis_backends")


def _get(section: Any, key: str) -> Any:
    return section.get(key) if isinstance(section, Mapping) else None


def _one(registry: Registry, spec: Any, where: str, *, typed: bool = False) -> Iterator[Found]:
    if isinstance(spec, Mapping) and not (typed and "type" not in spec):
        yield registry, spec, where


def _many(registry: Registry, specs: Any, where: str) -> Iterator[Found]:
    if isinstance(specs, (list, tuple)):
        yield from ((registry, spec, f"{where}[{number}]") for number, spec in enumerate(specs))
