"""Conversations about images with given lengths: the data of a packing benchmark, without a download.

In: (tokens, images) of each sample. Out: a JSONL, images and a tokenizer, read by the project's own data code.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.data.records.records import Turn
from unigen_ds.data.text.tokenizers import ChatTokenizer
from unigen_ds.families.nanovlm.processor import VLMProcessor

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} {{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
PICTURES = 8


def make_tokenizer(folder: Path, *, num_words: int) -> ChatTokenizer:
    """One token per word: ``w0``, ``w1``, ..."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<unk>", "user", "assistant", *(f"w{i}" for i in range(num_words))]
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>")
    fast.save_pretrained(folder)
    return ChatTokenizer(path=str(folder), chat_template=TEMPLATE)


def write_conversations(
    folder: Path, samples: Sequence[tuple[int, int]], processor: VLMProcessor, *, num_words: int, tile: int
) -> UnifiedGenerationDataset:
    """One question and answer per sample, with exactly this number of tokens if its images leave enough for words; each
    image has one tile. Half of the words are the assistant's.
    """
    draw, pixels = random.Random(0), np.random.default_rng(0)
    for number in range(PICTURES):
        picture = pixels.integers(0, 256, (tile, tile, 3), dtype=np.uint8)
        Image.fromarray(picture).save(folder / f"{number}.png")

    def turns(images: int, num_words_of: tuple[int, int]) -> list[tuple[str, str, str]]:
        question, answer = (" ".join(f"w{draw.randrange(num_words)}" for _ in range(n)) for n in num_words_of)
        pictures = [("user", "image", f"{draw.randrange(PICTURES)}.png") for _ in range(images)]
        return [*pictures, ("user", "text", question), ("assistant", "text", answer)]

    def record(tokens: int, images: int) -> dict[str, list[dict[str, str]]]:
        shortest = [Turn(r, k, str(folder / v) if k == "image" else v) for r, k, v in turns(images, (1, 1))]  # type: ignore[arg-type]
        words = max(2, tokens - processor.plan(shortest).num_tokens + 2)
        return {
            "conversations": [
                {"role": role, "type": kind, "image_path" if kind == "image" else "content": value}
                for role, kind, value in turns(images, (words - words // 2, words // 2))
            ]
        }

    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(record(*sample)) + "\n" for sample in samples), encoding="utf-8")
    return UnifiedGenerationDataset(path, processor)
