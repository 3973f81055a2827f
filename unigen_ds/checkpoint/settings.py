"""``load_cfg`` of a config: what may differ between a checkpoint and the model that loads its weights."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from unigen_ds.config.section import LISTED, Section
from unigen_ds.config.values import Allowed, as_tuple
from unigen_ds.core.errors import ConfigError

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
