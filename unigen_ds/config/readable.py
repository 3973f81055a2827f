"""A config's values before it is checked, as far as they can be read: for what is needed before the check."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from unigen_ds.config import overrides as files
from unigen_ds.config.translation import translate
from unigen_ds.core.errors import ConfigError


def given_values(name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The config's values with the overrides, whatever is wrong with them; empty where there is no such file."""
    try:
        config = files.read(name)
    except ConfigError:
        return {}
    files.as_in_the_file(config, overrides)
    given: dict[str, Any] = files.plain_values(config)
    with suppress(Exception):  # reported by ``load_config``
        translate(given)
    return given


def given_world_size(given: Mapping[str, Any]) -> int:
    """``world_size`` of the config; 1 where it has none, or one that is refused later."""
    wanted = given.get("world_size")
    return wanted if isinstance(wanted, int) and wanted > 0 else 1
