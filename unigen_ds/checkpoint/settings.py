"""``load_cfg`` of a config: what may differ between a checkpoint and the model that loads its weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from unigen_ds.config.section import LISTED, Section
from unigen_ds.config.values import Allowed, as_tuple
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.shards import Shape

VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
"""Ends of the names of tensors that have a row for each token."""
Pair = Annotated[tuple[str, str], BeforeValidator(as_tuple)]
Difference = Literal["missing", "unexpected", "reshaped", "sizes"]


class LoadSettings(Section):
    """With ``load_from`` alone. By default nothing may differ."""

    revise_keys: Annotated[
        tuple[Pair, ...], LISTED, Allowed(r"[(regex, replacement), ...], as in [(r'^module\.', '')]")
    ] = Field(
        default=(),
        description="`[(regex, replacement), ...]`, applied to the stored names in order, as in mmengine:"
        " `[(r'^module\\.', '')]`",
    )
    allow: Annotated[tuple[Difference, ...], LISTED, Allowed("a list of missing, unexpected, reshaped, sizes")] = Field(
        default=(),
        description="what may differ: a list of `'missing'`, `'unexpected'`, `'reshaped'`, `'sizes'`. Such tensors of"
        " the model keep their initial values, such ones of the checkpoint are left there; without it each is an error."
        " [checkpoints.md](checkpoints.md#weights-for-another-model)",
    )
    resize_vocab: bool | Literal["shrink"] = Field(
        default=False,
        description="True: `*embed_tokens.weight` and `*lm_head.weight` may have more rows than the checkpoint's;"
        " `'shrink'`: fewer, too",
    )

    @field_validator("revise_keys")
    @classmethod
    def _compiles(cls, pairs: Any) -> Any:
        for pattern, _ in pairs:
            try:
                re.compile(pattern)
            except re.error as error:
                allowed = r"[(regex, replacement), ...], as in [(r'^module\.', '')]"
                raise ConfigError(f"load_cfg.revise_keys: {error}", allowed=allowed) from error
        return pairs

    def revised(self, name: str) -> str:
        """The name after every replacement, in order."""
        for pattern, replacement in self.revise_keys:
            try:
                name = re.sub(pattern, replacement, name)
            except (re.error, IndexError) as error:
                raise ConfigError(f"load_cfg.revise_keys: {replacement!r} for {pattern!r}: {error}") from error
        return name

    def resizes(self, names: Sequence[str], stored: Shape, shape: Shape) -> bool:
        """Whether a tensor of these names may be loaded with more rows, or with fewer."""
        same_rows = len(stored) == len(shape) > 1 and stored[1:] == shape[1:]
        allowed = self.resize_vocab == "shrink" or (self.resize_vocab and stored[0] <= shape[0])
        return same_rows and bool(allowed) and any(name.endswith(VOCABULARY) for name in names)
