"""The words of the emoji demo."""

from __future__ import annotations

from unigen_ds.config.registry import TOKENIZERS
from unigen_ds.data.text.tokenizers import WordTokenizer
from unigen_ds.examples.emoji.catalogue import vocabulary


@TOKENIZERS.register_module()
class EmojiTokenizer(WordTokenizer):
    """A ``WordTokenizer`` with every word of the prompts and answers of ``EmojiDataset``."""

    def __init__(self) -> None:
        super().__init__(words=vocabulary())
