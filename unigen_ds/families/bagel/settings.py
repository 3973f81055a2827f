"""``model.llm`` of a ``UnifiedModel``."""

from __future__ import annotations

from pydantic import Field, model_validator
from typing_extensions import Self

from unigen_ds.core.errors import ConfigError
from unigen_ds.core.values import Number
from unigen_ds.models.settings import LanguageSizes


class UnifiedSizes(LanguageSizes):
    """Under Qwen2's names."""

    vocab_size: int | None = Field(
        default=None, ge=1, description="rows of the embedding; None: the tokenizer's, which is also the least"
    )
    rms_norm_eps: Number = Field(default=1e-6, gt=0, description="epsilon of the norms")
    rope_theta: Number = Field(default=1_000_000.0, gt=0, description="base of the rotary positions")
    dropout: Number = Field(default=0.0, ge=0, lt=1, description="on both residual branches of each layer")

    @model_validator(mode="after")
    def _positions_fit(self) -> Self:
        if self.hidden_size % 4:
            raise ConfigError(
                f"model.llm.hidden_size is {self.hidden_size}", allowed="a multiple of 4, for positions in images"
            )
        return self
