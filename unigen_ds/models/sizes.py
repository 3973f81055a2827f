"""Sizes in a config's ``model.llm`` and ``model.vit``: what is wrong with them is reported before anything is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from unigen_ds.core.errors import ConfigError, nearest
from unigen_ds.core.values import fits

_NUMBERS = ("rms_norm_eps", "layer_norm_eps", "rope_theta")
_SWITCHES = ("tie_word_embeddings",)


def check_sizes(part: str, sizes: Mapping[str, Any], *, known: Iterable[str]) -> None:
    """Raise ``ConfigError`` for a missing or unknown key, a value that is no size, or heads that do not fit.

    ``sizes`` has every default filled in. All are positive whole numbers, except for the layers (0 is one, too), the
    epsilons and ``rope_theta`` (positive numbers), ``dropout`` and ``tie_word_embeddings``.
    """
    known = sorted(known)
    where = f"model.{part}"
    unknown = [key for key in sizes if key not in known]
    if unknown:
        raise ConfigError(f"{where}: unknown {', '.join(unknown)}", remedy=nearest(unknown[0], known))
    missing = [key for key in known if key not in sizes]
    if missing:
        raise ConfigError(f"{where}: {', '.join(missing)} not given", allowed=", ".join(known))
    for key, value in sizes.items():
        if key in _SWITCHES:
            valid, allowed = isinstance(value, bool), "True, False"
        elif key == "dropout":
            valid, allowed = fits(value, float) and 0 <= value < 1, "a number from 0 to below 1"
        elif key in _NUMBERS:
            valid, allowed = fits(value, float) and value > 0, "a number above 0"
        else:
            least = 0 if key == "num_hidden_layers" else 1
            valid, allowed = fits(value, int) and value >= least, f"a whole number of at least {least}"
        if not valid:
            raise ConfigError(f"{where}.{key} is {value!r}", allowed=allowed)
    width, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    kv_heads = sizes.get("num_key_value_heads", heads)
    if width % heads or heads % kv_heads:
        raise ConfigError(
            f"{where}: hidden_size {width}, num_attention_heads {heads}, num_key_value_heads {kv_heads}",
            allowed="hidden_size a multiple of the heads, the heads a multiple of the key/value heads",
        )
    if part == "llm" and width // heads % 2:
        raise ConfigError(
            f"{where}: hidden_size {width} over {heads} heads is {width // heads} each",
            allowed="an even number: rotary positions turn pairs",
        )
