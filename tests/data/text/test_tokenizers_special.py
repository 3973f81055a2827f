"""Texts that spell special tokens are ordinary text; all others, and every template, are encoded as before."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.data.support import image, picture, talk, text
from tests.data.text.chat_support import character_tokenizer
from unigen_ds.core.errors import DataError
from unigen_ds.data.records.records import parse_record
from unigen_ds.data.samples.splits import TokenSplit
from unigen_ds.data.text.tokenizers import ChatTokenizer, PretrainedTokenizer, WordTokenizer
from unigen_ds.families.nanovlm.processor import VLMProcessor

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|image|>", "<|global_image|>", "<row_1_col_1>")
PIECES = [
    "a", "the ", " cat", "\n", "\n\n", "  ", "é", "日本", "<", ">", "|", "<|", "im_end", "|>", "user\n", "’s",
    "1234", "\t",
]  # fmt: skip


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE like GPT-2's and Qwen2's, whose merges include spaces, line ends and brackets."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    inner.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    corpus = ["user\nthe cat<|x|>\n assistant\n the cat's 1234 im_end|> <|im_ \n\n  a"] * 30
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)  # type: ignore[call-arg]
    inner.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=TEMPLATE, eos_token="<|im_end|>")
    folder = tmp_path_factory.mktemp("bpe")
    fast.save_pretrained(folder)
    return folder


def processor(folder: Path) -> VLMProcessor:
    return VLMProcessor(ChatTokenizer(path=str(folder)), tile_size=16, vit_patch_size=4, pixel_shuffle_factor=2)


def random_text(random: random.Random, *, special: bool) -> str:
    pieces = [*PIECES, *SPECIAL * 2] if special else PIECES
    return "".join(random.choice(pieces) for _ in range(random.randrange(1, 12)))


def ids_of(sample: Any) -> list[int]:
    return [i for split in sample.splits for i in split.ids]


def turns(*contents: str) -> Any:
    roles = ("user", "assistant")
    return parse_record(talk(*(text(roles[k % 2], content) for k, content in enumerate(contents))), "here")


def test_ids_of_ordinary_texts_are_those_of_the_template(bpe: Path) -> None:
    chat_processor, draw, crossing = processor(bpe), random.Random(1), 0
    chat = chat_processor.tokenizer.chat
    for _ in range(300):
        contents = [random_text(draw, special=False) for _ in range(draw.randrange(1, 5))]
        if any(map(chat_processor.tokenizer.special.is_spelled_in, contents)):  # "<|" + "im_end" + "|>"
            continue
        sample = chat_processor.plan(turns(*contents))
        messages = [{"role": ("user", "assistant")[k % 2], "content": c} for k, c in enumerate(contents)]
        expected = chat.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert ids_of(sample) == expected
        parts = [chat.encode(c, add_special_tokens=False) for c in ("user\n", contents[0])]
        crossing += parts[0] + parts[1] != expected[1 : 1 + len(parts[0]) + len(parts[1])]
    assert crossing > 20, "the comparison must contain merges of characters of template and text"


def test_a_forged_turn_is_ordinary_text(bpe: Path) -> None:
    chat_processor, draw, count = processor(bpe), random.Random(2), 0
    tokenizer, chat = chat_processor.tokenizer, chat_processor.tokenizer.chat
    control = set(chat.convert_tokens_to_ids(list(SPECIAL)))
    for _ in range(300):
        contents = [random_text(draw, special=True) for _ in range(draw.randrange(1, 5))]
        sample = chat_processor.plan(turns(*contents))
        ids = ids_of(sample)
        spelled = any(map(tokenizer.special.is_spelled_in, contents))
        count += spelled
        begin, end = ids.count(tokenizer.bos_id), ids.count(tokenizer.eos_id)
        assert begin == end == len(contents) == sum(i in control for i in ids) / 2, contents
        expected = "".join(
            f"<|im_start|>{('user', 'assistant')[k % 2]}\n{c}<|im_end|>\n" for k, c in enumerate(contents)
        )
        assert chat.decode(ids) == expected
        answers = "".join(f"{c}<|im_end|>\n" for c in contents[1::2])
        assert chat.decode([i for s in sample.splits for i in s.labels if i >= 0]).endswith(answers[-1:])
        assert [i for s in sample.splits for i in s.labels].count(tokenizer.eos_id) == len(contents) // 2
        for content in contents:
            alone = tokenizer.encode(content)
            assert control.isdisjoint(alone) and chat.decode(alone) == content
    assert count > 150


def test_texts_in_a_batch_are_those_one_by_one(bpe: Path) -> None:
    tokenizer, draw = PretrainedTokenizer(path=str(bpe)), random.Random(3)
    texts = [random_text(draw, special=k % 3 == 0) for k in range(60)]
    assert tokenizer.encode_texts(texts) == [tokenizer.encode(one) for one in texts]
    assert tokenizer.encode_texts([]) == []


def test_words_and_tokens_that_are_not_marked_special(tmp_path: Path) -> None:
    """The spelling as a word of the vocabulary, or as an added token that is not special, changes nothing."""
    words = WordTokenizer(words=["a", "b"])
    assert words.eos_id not in words.encode("a <|im_end|> b") and words.encode("a b") == words.encode_unprotected("a b")
    assert words.eos_id in words.encode_unprotected("a <|im_end|> b")
    plain = character_tokenizer()
    plain.add_tokens(["<stop>"])
    plain.save_pretrained(tmp_path)
    stop = PretrainedTokenizer(path=str(tmp_path), eos="<stop>")
    ids = stop.encode("go<stop>on")
    assert stop.eos_id not in ids and len(ids) == 10


def test_an_image_remains_an_image_next_to_a_forged_one(tmp_path: Path) -> None:
    character_tokenizer().save_pretrained(tmp_path)
    picture(tmp_path / "a.png", 10, 10)
    chat_processor = processor(tmp_path)
    record = talk(image("user", "a.png"), text("user", "<|image|><|image|>"), text("assistant", "x<|im_end|>"))
    sample = chat_processor.plan(parse_record(record, "here", image_root=tmp_path))
    assert ids_of(sample).count(chat_processor.tokenizer.image_id) == chat_processor.tokens_per_tile
    assert "<|image|><|image|>" in chat_processor.tokenizer.chat.decode(ids_of(sample))
    labels = [i for s in sample.splits if isinstance(s, TokenSplit) for i in s.labels if i >= 0]
    assert chat_processor.tokenizer.chat.decode(labels) == "x<|im_end|><|im_end|>\n"
    assert labels.count(chat_processor.tokenizer.eos_id) == 1


def llava(value: str, images: Any) -> dict[str, Any]:
    record = {"conversations": [{"from": "human", "value": value}, {"from": "gpt", "value": "yes <image>"}]}
    return record if images is None else {**record, "image": images}


def test_llavas_placeholders_are_images() -> None:
    def turns_of(record: Any) -> list[tuple[str, str, str]]:
        return [(turn.role, turn.kind, turn.value) for turn in parse_record(json.loads(json.dumps(record)), "w")]

    answer = ("assistant", "text", "yes <image>")
    assert turns_of(llava("<image>\nWhat?", "1.png")) == [("user", "image", "1.png"), ("user", "text", "What?"), answer]
    two = [
        ("user", kind, value) for kind, value in (("image", "1.png"), ("text", "or"), ("image", "2.png"), ("text", "?"))
    ]
    assert turns_of(llava("<image>or<image>\n?", ["1.png", "2.png"])) == [*two, answer]
    assert turns_of(llava("What?", None)) == [("user", "text", "What?"), answer]
    for record, numbers in ((llava("<image>", ["1.png", "2.png"]), "1 images and the record has 2"),
                            (llava("<image><image>", "1.png"), "2 images and the record has 1"),
                            (llava("?", "1.png"), "0 images and the record has 1")):  # fmt: skip
        with pytest.raises(DataError, match=f"w: the human turns ask for {numbers}"):
            parse_record(record, "w")
    with pytest.raises(DataError, match=r"w: conversations\[0\]\.from is 'robot'"):
        parse_record({"conversations": [{"from": "robot", "value": "x"}]}, "w")
    with pytest.raises(DataError, match="w: image is 3"):
        parse_record(llava("<image>", 3), "w")
