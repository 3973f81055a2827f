"""The demo's own model, tokenizer and family: ``UnifiedModel`` that predicts the clean picture, not the velocity.

Noise needs all numbers of a patch, a picture few of them. Li and He ("Back to Basics: Let Denoising Generative Models
Denoise", 2025) therefore let the network predict the picture and compute the velocity from it.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from unigen_ds.config.registry import FAMILIES, MODELS, TOKENIZERS
from unigen_ds.data.text.tokenizers import WordTokenizer
from unigen_ds.examples.emoji.catalogue import vocabulary
from unigen_ds.families.bagel.family import Bagel
from unigen_ds.families.bagel.model import UnifiedModel
from unigen_ds.families.base import PublishedFormat

_LEAST_T = 0.05


@MODELS.register_module()
class EmojiModel(UnifiedModel):
    """``x_t = (1 - t) x_0 + t e``, so the velocity ``e - x_0`` is ``(x_t - x_0) / t``; ``t`` counts as 0.05 at least,
    which bounds the weight of the last steps.
    """

    def velocity_of(self, hidden_MD: Tensor, noisy_MC: Tensor, t_M: Tensor) -> Tensor:
        clean_MC = self.llm2vae(hidden_MD)
        return (noisy_MC - clean_MC) / t_M.clamp(min=_LEAST_T)[:, None].to(clean_MC.dtype)


@FAMILIES.register_module()
class EmojiFamily(Bagel):
    """Trained, resumed, merged and asked as ``Bagel``; not exported, because BAGEL's directory is of a model that
    predicts the velocity.
    """

    model = EmojiModel
    published: ClassVar[tuple[PublishedFormat, ...]] = ()


@TOKENIZERS.register_module()
class EmojiTokenizer(WordTokenizer):
    """A ``WordTokenizer`` with every word of the prompts and answers of ``EmojiDataset``."""

    def __init__(self) -> None:
        super().__init__(words=vocabulary())
