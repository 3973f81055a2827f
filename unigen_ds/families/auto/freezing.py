"""Parameters that are not trained, by patterns of their names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from unigen_ds.core.errors import ConfigError


def freeze_by_name(model: nn.Module, patterns: Sequence[str]) -> None:
    """Parameters that a pattern matches anywhere in their names get no gradient; of tied ones any name counts.

    Raises ``ConfigError`` for a pattern that cannot be read or matches nothing, and where nothing remains.
    """
    named = [*model.named_parameters(remove_duplicate=False)]
    for number, pattern in enumerate(patterns):
        where = f"model.freeze[{number}]"
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"{where} {pattern!r} is no regular expression: {error}") from error
        found = [parameter for name, parameter in named if compiled.search(name)]
        if not found:
            parts = dict.fromkeys(".".join(name.split(".")[:2]) for name, _ in named)
            raise ConfigError(f"{where} {pattern!r} matches no parameter", allowed=f"a part of {', '.join(parts)}")
        for parameter in found:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for _, parameter in named):
        raise ConfigError(f"model.freeze {[*patterns]} leaves nothing to train")
