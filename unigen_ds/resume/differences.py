"""What differs between a checkpoint and the run that would continue it: the model, the optimizer, and edits of a config
that no weight, curve or record shows. Pure functions of plain values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core.json_values import member_names
from unigen_ds.core.shards import Shape, misfit
from unigen_ds.resume.finding import Finding, shown

BUILT = "built"
"""Key of a stored config: what the config left to ``pretrained`` and to defaults, as the model was built."""
_SIZES = (
    "model.llm.", "model.vit.", "model.vae.", "model.pixel_shuffle_factor", "model.latent_patch_size",
    "lora.r", "lora.alpha", "lora.use_", "lora.quantize",
)  # fmt: skip
_NOT_SIZES = ("dropout", "initializer_range", "max_position_embeddings")
_IN_SHAPES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "image_size", "patch_size", "num_channels",
    "channels", "base_channels", "channel_multipliers", "num_blocks", "latent_channels", "latent_patch_size",
    "pixel_shuffle_factor", "r", "use_dora", "tie_word_embeddings", "layer_types", "max_window_layers",
)  # fmt: skip
"""Sizes that the names and shapes of the weights show."""
_SECTIONS = ("model", "lora", "processor", "loss_weights", "optim_wrapper", "custom_hooks")
_ELSEWHERE = (
    "model.activation_checkpointing", "model.compile", "model.freeze", "model.quantize", "model.pretrained",
    "model.copy_init_moe", "optim_wrapper.accumulative_counts", "optim_wrapper.precision",
    "optim_wrapper.optimizer.type", "custom_hooks[EvaluateHook]",
)  # fmt: skip
"""Keys that change no number, or that another finding reports, as it does every learning rate."""


def other_sizes(stored: Mapping[str, Any], config: Mapping[str, Any], *, hidden: bool = False) -> list[str]:
    """Sizes of the model that both state, differently. Some leave every shape as it was (the number of heads).

    ``hidden``: only those. Where weights alone are loaded, names and shapes are compared with what ``load_cfg`` allows.
    """
    was, now = _sizes(stored), _sizes(config)
    return [
        f"{key} was {was[key]!r} and is {value!r}"
        for key, value in now.items()
        if was.get(key, value) != value and not (hidden and key.rpartition(".")[2] in _IN_SHAPES)
    ]


def other_model(stored: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Of a model of another kind: this explains all other differences, so it is the first."""
    was, now = ((side.get("model") or {}).get("type") for side in (stored, config))
    return [f"model.type was {was!r} and is {now!r}"] if None not in (was, now) and was != now else []


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> size: as given; where nothing is given, as the model was built."""
    built = (config.get(BUILT) or {}).get("model")
    sizes = {**dict(_leaves(built, "model")), **dict(_leaves(config.get("model"), "model"))}
    sizes |= dict(_leaves(config.get("lora"), "lora"))
    # transformers 5 writes rope_theta into rope_parameters, transformers 4 beside the other sizes
    return {key.replace("rope_parameters.rope_theta", "rope_theta"): v for key, v in sizes.items() if _is_size(key)}


def edited_settings(stored: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Everything else that changes what is learned."""
    was, now = (
        {key: value for section in _SECTIONS for key, value in _leaves(side.get(section), section)}
        for side in (stored, config)
    )
    built = dict(_leaves((stored.get(BUILT) or {}).get("model"), "model"))
    was = {**{key: built[key] for key in now.keys() & built.keys()}, **was}  # a default that is made explicit
    passed = {*filter(_is_size, was.keys() & now.keys()), *_ELSEWHERE}
    return [
        f"{key} was {_shown(was, key)} and is {_shown(now, key)}"
        for key in dict.fromkeys((*was, *now))
        if _other(was.get(key), now.get(key))
        and not key.endswith(".lr")
        and not any(key == one or re.sub(r"[:#][^]]*", "", key).startswith(one + ".") for one in passed)
    ]


def _is_size(key: str) -> bool:
    return key.startswith(_SIZES) and not key.endswith(_NOT_SIZES)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all that is no section. A component in a list is named by ``member_names``."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}")
    elif isinstance(value, (list, tuple)) and any(isinstance(inner, Mapping) for inner in value):
        for name, inner in zip(member_names(value), value, strict=True):
            yield from _leaves(inner, f"{path}[{name}]")
    elif value is not None:
        yield path, list(value) if isinstance(value, tuple) else value


def _other(was: Any, now: Any) -> bool:
    """1 and 1.0 are the same; 1 and True are not."""
    return was != now or (isinstance(was, bool) != isinstance(now, bool))


def _shown(leaves: Mapping[str, Any], key: str) -> str:
    return repr(leaves[key]) if key in leaves else "not given"


def model_findings(
    manifest: Manifest, *, parameters: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> list[Finding]:
    """The findings on model and optimizer, by parameter names: computed again for the real model once it is built."""
    number = f"{len(manifest.parameters)} parameters"
    other = other_sizes(manifest.config, config) + _other_packing(manifest.config, config)
    if shapes := other_shapes(manifest.parameters, parameters):
        other += [*_other_layers(manifest.config, config), *shapes]
    if other:
        other = other_model(manifest.config, config) + other
    frozen = _other_training(manifest, parameters)
    kinds = optimizer_type(manifest.config), optimizer_type(config)
    groups = _groups(manifest.parameters), _groups(parameters)
    findings = [
        Finding("model.structure", "ok", number, "the same names and shapes"),
        Finding("model.trainable", "ok", number, "the same ones are trained"),
        Finding("optimizer.type", "ok", kinds[0], kinds[1]),
        Finding("optimizer.groups", "ok", groups[0], groups[1]),
    ]
    for index, differences in enumerate((other, frozen)):
        if differences:
            findings[index] = replace(
                findings[index],
                status="block",
                now=shown(differences),
                why="the model differs from that of the checkpoint",
                remedy="set model back; --load-from CKPT starts another training from the weights, if they fit",
            )
    if kinds[0] != kinds[1]:
        findings[2] = replace(
            findings[2],
            status="block",
            why="the optimizer is another one, which cannot use the stored state",
            remedy=f"set optim_wrapper.optimizer.type back to {kinds[0]}, or start anew with --load-from CKPT",
        )
    if groups[0] != groups[1]:
        why = "moments follow the parameters by name into the new groups"
        findings[3] = replace(findings[3], status="warn", why=why)
    return findings


def _other_training(manifest: Manifest, parameters: Sequence[Mapping[str, Any]]) -> list[str]:
    trained = {row["name"]: row["trainable"] for row in parameters}
    return [
        f"{row['name']} {'is frozen now' if row['trainable'] else 'was frozen and is trained'}"
        for row in manifest.parameters
        if trained.get(row["name"], row["trainable"]) != row["trainable"]
    ]


def _other_packing(stored: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Parts whose weights are packed in another way. (Packed or not, that is another set of parameters.)"""
    was, now = ((c.get("model") or {}).get("quantize") or {} for c in (stored, config))
    return [f"{part} was {was[part]} and is {now[part]}" for part in was if now.get(part, was[part]) != was[part]]


def _other_layers(stored: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """The patterns that choose other layers for adapters; other ones may choose the same."""
    was, now = ((c.get("lora") or {}).get("target_modules") for c in (stored, config))
    same = was == now or None in (was, now) or [*_listed(was)] == [*_listed(now)]
    return [] if same else [f"lora.target_modules was {was!r} and is {now!r}"]


def _listed(patterns: Any) -> Sequence[str]:
    return [patterns] if isinstance(patterns, str) else patterns


def _groups(parameters: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(sorted({str(row["group"]) for row in parameters if row["group"]}))


def other_shapes(stored: Sequence[Mapping[str, Any]], parameters: Sequence[Mapping[str, Any]]) -> list[str]:
    """Parameters that are new, gone or reshaped, in words."""
    differences = misfit(_shapes(stored), _shapes(parameters))
    words = [f"{name} is new" for name in differences.missing] + [f"{name} is gone" for name in differences.unexpected]
    return words + [f"{name} was {[*was]} and is {[*now]}" for name, (was, now) in differences.reshaped.items()]


def _shapes(rows: Sequence[Mapping[str, Any]]) -> dict[str, Shape]:
    return {row["name"]: tuple(row["shape"]) for row in rows}


def optimizer_type(config: Mapping[str, Any]) -> str:
    """``AdamW``, also where the config had the class and its text was stored."""
    kind = str(((config.get("optim_wrapper") or {}).get("optimizer") or {}).get("type", "AdamW"))
    return kind.removeprefix("<class '").removesuffix("'>").rpartition(".")[2]
