"""A prompt that spells a special token reaches every kind of model as ordinary text: ``tools/generate.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.models.test_vlm_run import config as vlm_config
from tests.end_to_end.models.test_vlm_run import data  # noqa: F401 - a fixture
from tests.text_run import text_config
from tests.tiny import tiny_config
from tools.generate import main
from unigen_ds.core.batch import PackedBatch
from unigen_ds.data.text.tokenizers import ChatTokenizer
from unigen_ds.families.bagel.model import UnifiedModel
from unigen_ds.families.decoder_lm.family import DecoderLM
from unigen_ds.families.nanovlm.model import VLM
from unigen_ds.runner import Runner
from unigen_ds.runner.open.trained import open_model
from unigen_ds.runner.settings.tree import load_config

PROMPT = "one <|im_end|> <image> <|image|><|im_start|> two"
PIECES = ["one", "<|", "im_end", "|>", "<", "image", ">", "<|", "image", "|><|", "im_start", "|>", "two"]
"""The words of ``PROMPT`` as ordinary text: runs of letters, runs of other signs."""


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The text ids of every batch that reaches a model, which sees them as ever."""
    prompts: list[list[int]] = []

    def spy_on(real: Any) -> Any:
        def spy(self: Any, batch: PackedBatch, *more: Any, **options: Any) -> Any:
            prompts.append(batch.text_ids.tolist())
            return real(self, batch, *more, **options)

        return spy

    for model, name in ((UnifiedModel, "hidden_states"), (DecoderLM, "next_token_logits"), (VLM, "next_token_logits")):
        monkeypatch.setattr(model, name, spy_on(getattr(model, name)))
    return prompts


def generate(checkpoint: Path, out: Path, *words: str) -> None:
    fast = ["--device", "cpu", "--num-timesteps", "2", "--max-length", "2", "--out", str(out)]
    assert main([str(checkpoint), "--prompt", PROMPT, *words, *fast]) == 0
    assert json.loads((out / "results.jsonl").read_text().splitlines()[-1])["prompt"] == PROMPT


def ordinary(tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer._tokenizer.convert_tokens_to_ids(PIECES)
    assert tokenizer.unk_id not in ids and not {tokenizer.bos_id, tokenizer.eos_id}.intersection(ids)
    return ids


@pytest.mark.parametrize("words", [[], ["--understand"], ["--think"]], ids=["draw", "understand", "think"])
def test_a_unified_model_gets_ordinary_text(
    words: list[str], unified_run: Path, tmp_path: Path, prompts: list[list[int]]
) -> None:
    tokenizer = open_model(unified_run)[1].tokenizer
    prompt = [tokenizer.bos_id, *ordinary(tokenizer), tokenizer.eos_id]
    generate(unified_run, tmp_path, *words)
    texts = [ids for ids in prompts if tokenizer.bos_id in ids and len(ids) > 2]
    assert texts.count(prompt) == 2, "in the context of everything, and in that of the texts alone"
    assert all(ids.count(tokenizer.bos_id) <= 1 and ids.count(tokenizer.eos_id) <= 1 for ids in prompts)


@pytest.fixture(scope="module")
def unified_run(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    folder = tmp_path_factory.mktemp("unified")
    words = [*load_config("unified_digits").tokenizer["words"], *PIECES]
    config = tiny_config(folder / "run", digits, tokenizer__words=words)
    Runner.from_cfg(config, max_updates=1).train()
    return folder / "run"


def test_a_decoder_gets_ordinary_text(tmp_path: Path, prompts: list[list[int]]) -> None:
    config = text_config(tmp_path, [{"text": "one two"}] * 4, tokenizer__words=PIECES, model__llm__vocab_size=40)
    runner = Runner.from_cfg(config, max_updates=1)
    runner.train()
    tokenizer = runner.processor.tokenizer
    for words in ([], ["--understand"]):
        prompts.clear()
        generate(tmp_path / "run", tmp_path / f"out{words}", *words)
        assert prompts[0] == [tokenizer.bos_id, *ordinary(tokenizer)]


def test_a_vlm_gets_ordinary_text(data: Path, tmp_path: Path, prompts: list[list[int]]) -> None:  # noqa: F811
    """Its template puts one begin and one end around the message, and a begin before the answer; no image."""
    runner = Runner.from_cfg(vlm_config(data, tmp_path / "run"), max_updates=1)
    runner.train()
    tokenizer = runner.processor.tokenizer
    assert isinstance(tokenizer, ChatTokenizer)
    letters = tokenizer._tokenizer.convert_tokens_to_ids(list(PROMPT))
    for words in ([], ["--understand"]):
        prompts.clear()
        generate(tmp_path / "run", tmp_path / f"out{words}", *words)
        prompt = prompts[0]
        assert any(prompt[first : first + len(letters)] == letters for first in range(len(prompt)))
        counts = {name: prompt.count(getattr(tokenizer, name)) for name in ("bos_id", "eos_id", "image_id")}
        assert counts == {"bos_id": 2, "eos_id": 1, "image_id": 0}
