"""``--backend single | deepspeed[:zero1|...|FILE.json] | fsdp[:FULL_SHARD|...]`` -> the config's ``backend``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unigen_ds.core.errors import ConfigError

BACKEND_WORDS = "single, deepspeed[:zero1|zero2|zero3|...|FILE.json], fsdp[:FULL_SHARD|...]"


def backend_spec(text: str) -> dict[str, str]:
    """``deepspeed:zero1`` -> ``{"type": "deepspeed", "config": "zero1"}``."""
    kind, _, detail = text.partition(":")
    option = {"deepspeed": "config", "fsdp": "sharding_strategy"}.get(kind)
    return {"type": kind} | ({option: detail} if option and detail else {})


def with_backend(overrides: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Overrides and ``--backend``, which comes first: ``backend.KEY`` of ``overrides`` is a setting of that engine.

    Raises ``ConfigError`` where an override contradicts it.
    """
    spec = backend_spec(text)
    for key in ("backend", *(f"backend.{name}" for name in spec)):
        wanted: Any = spec if key == "backend" else spec[key.removeprefix("backend.")]
        if key in overrides and overrides[key] != wanted:
            raise ConfigError(f"--backend {text} contradicts {key}={overrides[key]!r}", remedy="give one of the two")
    return {"backend": spec} | {key: value for key, value in overrides.items() if key != "backend"}
