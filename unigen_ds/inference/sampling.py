"""How tokens are chosen, as plain numbers. No torch: ``--help`` and a wrong argument do not wait for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from unigen_ds.core.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """The likeliest token each time, or one drawn at random. Raises ``ConfigError`` for other values."""

    temperature: float = 0.0
    """Logits are divided by it; 0 chooses the likeliest token."""
    top_p: float = 1.0
    """Only the likeliest tokens are drawn, as many as have this probability together; 1: all.

    Source: nucleus sampling (Holtzman et al., 2020, https://arxiv.org/abs/1904.09751).
    """

    def __post_init__(self) -> None:
        if not (0.0 <= self.temperature < math.inf):
            raise ConfigError(
                f"temperature is {self.temperature}", allowed="a number of at least 0; 0 chooses the likeliest token"
            )
        if not (0.0 < self.top_p <= 1.0):
            raise ConfigError(f"top_p is {self.top_p}", allowed="more than 0, at most 1; 1 leaves out no token")
        if self.top_p < 1.0 and self.temperature == 0.0:
            raise ConfigError(
                f"top_p is {self.top_p} and temperature is 0, which chooses the likeliest token",
                remedy="a temperature above 0, or leave top_p out",
            )
