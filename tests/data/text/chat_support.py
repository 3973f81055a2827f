"""A tiny tokenizer with a chat template: the characters and the special tokens of the golden conversations."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from tests.support.golden_files import NANOVLM, read_json

META, CONFIG = read_json(NANOVLM / "golden.json"), read_json(NANOVLM / "config.json")
PIECE = re.compile(r"<[^<>\s]+>|[\s\S]")


def golden_text(text: str) -> list[str]:
    """Tokens of a text that are separated by one space; a space can be a token itself."""
    return re.findall(rf"({PIECE.pattern})(?: |$)", text)


def character_tokenizer(template: str = CONFIG["lm_chat_template"]) -> PreTrainedTokenizerFast:
    """One id per character, with the ids of the golden samples; tokens in angle brackets are one id."""
    vocabulary = {
        token: i
        for sample in META["samples"]
        for token, i in zip(golden_text(sample["text"]), sample["input_ids"], strict=True)
    }
    extra = CONFIG["vlm_extra_tokens"].values()
    vocabulary |= {token: META["image_token_id"] + i for i, token in enumerate(extra)}
    free = sorted(set(range(CONFIG["lm_base_vocab_size"])) - set(vocabulary.values()))
    others = [character for character in map(chr, (10, *range(32, 127))) if character not in vocabulary]
    vocabulary |= dict(zip(others, free, strict=False))
    inner = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")  # type: ignore[assignment]
    inner.decoder = Fuse()  # type: ignore[assignment]
    inner.add_special_tokens([AddedToken(t, special=True) for t in vocabulary if len(t) > 1])
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template, eos_token="<|im_end|>")


def write_nanovlm(folder: Path, template: str = CONFIG["lm_chat_template"]) -> Path:
    """The golden model as a published directory."""
    character_tokenizer(template).save_pretrained(folder)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(NANOVLM / name, folder / name)
    return folder
