"""Ids that are made of known words are those of the whole text, for every way to divide texts that is accepted."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from unigen_ds.data import word_memo
from unigen_ds.data.tokenizers import PretrainedTokenizer, WordTokenizer
from unigen_ds.data.word_memo import WordMemo, divides_at_spaces

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
STEPS: dict[str, Any] = {
    "GPT-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "SmolLM": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    **{
        name: pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), BYTES])
        for name, pattern in zip(("Qwen2", "Llama 3"), word_memo._PATTERNS, strict=True)
    },
}
CORPUS = ["the cat's 1234 dogs, don't (run) to the end.\n\n  a  b \t é x-y HTTP://a.b/c?d=e"] * 20
PIECES = ["the", "cat's", "don't", "(run)", "1234", "12", "a", "x-y", ".", "...", "'s", "I'LL", "é", "\n", "", "\t",
          "日本", "<stop>", "end.\n", "a\u00a0b", "\x1c", "http://a.b"]  # fmt: skip


def made(folder: Path, steps: Any, *, normalizer: Any = None, added: tuple[Any, ...] = ()) -> PretrainedTokenizer:
    """A BPE whose merges join words, spaces and marks wherever ``steps`` allow it."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = steps
    inner.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)  # type: ignore[call-arg]
    inner.train_from_iterator(CORPUS, trainer)
    inner.add_tokens(list(added))
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(str(folder))
    return PretrainedTokenizer(path=str(folder))


def random_text(draw: random.Random) -> str:
    return draw.choice(["", " ", "\n", ""]) + " ".join(draw.choices(PIECES, k=draw.randint(0, 8)))


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["as it is", "NFC"])
def test_ids_are_those_of_the_whole_text(tmp_path: Path, name: str, normalizer: Any) -> None:
    tokenizer = made(tmp_path, STEPS[name], normalizer=normalizer, added=("<stop>",))
    assert tokenizer._words is not None
    draw = random.Random(7)
    for _ in range(40):
        texts = [random_text(draw) for _ in range(20)]
        expected = tokenizer._all_ids(texts)
        assert tokenizer.encode_texts_unprotected(texts) == expected
        assert tokenizer.encode_texts_unprotected(texts) == expected, "known now"


def test_known_words_are_not_tokenized_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = WordTokenizer(words=["zero", "one"])
    expected = words.encode_texts(["one zero", "zero", "what one"])
    assert words._words is not None
    given: list[str] = []
    encode = words._words._encode
    monkeypatch.setattr(words._words, "_encode", lambda texts: (given.extend(texts), encode(texts))[1])
    assert words.encode_texts(["one zero", "zero", "what one"]) == expected and not given
    assert words.encode_texts(["one  zero", "one\nzero", "zero é"]) == [
        expected[0],
        expected[0],
        words._all_ids(["zero é"])[0],
    ]
    assert given == ["one  zero", "one\nzero", "zero é"], "as a whole"


def test_words_are_forgotten_before_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_memo, "_MOST_WORDS", 5)
    memo = WordMemo(lambda texts: [[len(text)] for text in texts])
    draw = random.Random(1)
    for _ in range(50):
        texts = [" ".join("x" * draw.randint(1, 50) for _ in range(draw.randint(1, 9))) for _ in range(3)]
        for text, ids in zip(texts, memo.encode(texts), strict=True):
            first, *later = text.split(" ")
            assert ids in ([len(text)], [len(first), *(len(word) + 1 for word in later)])
        assert max(len(memo._first), len(memo._later)) <= 5
        assert all(len(word) <= word_memo._LONGEST for word in (*memo._first, *memo._later))


def test_a_copy_begins_without_words() -> None:
    words = WordTokenizer(words=["zero", "one"])
    ids = words.encode("one zero")
    for other in (copy.deepcopy(words), pickle.loads(pickle.dumps(words))):
        assert not other._words._later and other.encode("one zero") == ids
    assert words._words is not None and words._words._later


def test_tokenizers_that_join_words_are_left_alone(tmp_path: Path) -> None:
    """Each of them has a text whose ids are not those of its words, or would have with other merges."""
    joined = made(tmp_path / "joined", BYTES)
    text = "the end. the end."
    pieces = [text.split(" ")[0], *(f" {word}" for word in text.split(" ")[1:])]
    assert joined._all_ids([text])[0] != [i for ids in joined._all_ids(pieces) for i in ids]
    for backend in (
        joined._tokenizer.backend_tokenizer,
        *(made(tmp_path / f"{i}", *one)._tokenizer.backend_tokenizer for i, one in enumerate(
            [(pre_tokenizers.ByteLevel(add_prefix_space=True),), (pre_tokenizers.Metaspace(),),
             (pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\w+\s?"), "isolated"), BYTES]),)])),
    ):  # fmt: skip
        assert not divides_at_spaces(backend)
    gpt2 = STEPS["GPT-2"]
    lower = made(tmp_path / "lower", gpt2)._tokenizer.backend_tokenizer
    assert divides_at_spaces(lower)
    lower.normalizer = normalizers.Lowercase()
    assert not divides_at_spaces(lower)
    lower.normalizer = None
    lower.model.dropout = 0.5
    assert not divides_at_spaces(lower)
    for token in (AddedToken("the end"), AddedToken("<x>", lstrip=True), AddedToken("<y>", rstrip=True)):
        one = made(tmp_path / str(token.content).strip("<>"), gpt2, added=(token,))
        assert one._words is None
