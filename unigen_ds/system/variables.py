"""Environment variables: set for a while, and those of a launcher that must be numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from unigen_ds.core.errors import ConfigError

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "SLURM_PROCID", "SLURM_LOCALID")


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Inside, these variables have these values; after it, those of before, whatever was done to them inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


class WrongNumber(ConfigError):
    """A variable that is no number."""

    def __init__(self, variable: str, value: str) -> None:
        super().__init__(
            f"the environment variable {variable} is {value!r}",
            allowed="a whole number",
            remedy="the launcher sets it; without one: unset it",
        )
        self.variable = variable


def wrong_numbers(env: Mapping[str, str]) -> list[WrongNumber]:
    """An error for each variable of a launcher that is no whole number."""
    return [WrongNumber(name, env[name]) for name in _NUMBERS if name in env and not env[name].isdecimal()]
