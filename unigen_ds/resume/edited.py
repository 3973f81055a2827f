"""Edits of a config that no weight, curve or record shows: ``(stored config, config) -> words``, in plain values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from unigen_ds.core.json_values import member_names

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
    found = {**dict(_leaves(built, "model")), **dict(_leaves(config.get("model"), "model"))}
    found |= dict(_leaves(config.get("lora"), "lora"))
    # transformers 5 writes rope_theta into rope_parameters, transformers 4 beside the other sizes
    return {key.replace("rope_parameters.rope_theta", "rope_theta"): v for key, v in found.items() if _is_size(key)}


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
