"""``tools/evaluate.py`` on a published directory of each format, with the losses that the checkpoint itself has."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import LlamaConfig, LlamaForCausalLM

from tests.data.support import talk, text, write_jsonl
from tests.support.golden_files import BAGEL
from tests.text_run import WORDS, words
from tools.evaluate import main
from unigen_ds.data.text.tokenizers import WordTokenizer
from unigen_ds.evaluation.provenance import read_results
from unigen_ds.families.bagel.published import FILES


def values(folder: Path, data: Path, out: Path, *more: str) -> dict[str, float]:
    assert main([str(folder), "--data", str(data), "--seq-length", "256", "--out", str(out), *more]) == 0
    return {name: value for result in read_results(out) for name, value in result.values.items()}


def test_a_directory_of_transformers(tmp_path: Path) -> None:
    """val/loss is transformers' own, over the targets of the answers; metrics have answers."""
    tokenizer = WordTokenizer(words=list(WORDS))
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 1, "max_position_embeddings": 64}  # fmt: skip
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ids)).eval()
    theirs.save_pretrained(tmp_path / "published")
    tokenizer.save_pretrained(str(tmp_path / "published"))
    spoken = words(5)
    data = write_jsonl(tmp_path / "data.jsonl", [{"text": spoken}, talk(text("user", "one"), text("assistant", "two"))])
    results = values(tmp_path / "published", data, tmp_path / "a.json", "--metrics", "Perplexity", "ExactMatch")
    assert {"val/loss", "val/loss/text", "perplexity", "exact_match"} <= set(results)

    alone = write_jsonl(tmp_path / "alone.jsonl", [{"text": spoken}])
    row = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(spoken), tokenizer.eos_id]])
    expected = theirs(row, labels=row).loss.item()
    assert values(tmp_path / "published", alone, tmp_path / "b.json")["val/loss"] == pytest.approx(expected, rel=1e-5)


def test_bagels_directory(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / "published").mkdir(exist_ok=True)
        shutil.copyfile(BAGEL / name, tmp_path / "published" / name)
    WordTokenizer(words=["a", "red", "cat"]).save_pretrained(str(tmp_path / "published"))
    Image.new("RGB", (64, 48), "red").save(tmp_path / "red.png")
    picture = {"role": "user", "type": "image", "image_path": "red.png"}
    drawing = {**picture, "role": "assistant"}
    records = [talk(text("user", "a red cat"), drawing), talk(picture, text("user", "a"), text("assistant", "red cat"))]
    data = write_jsonl(tmp_path / "data.jsonl", records)
    generation = ["--generation", "max_new_tokens=3", "flow.num_timesteps=2"]
    results = values(tmp_path / "published", data, tmp_path / "a.json", "--metrics", "ExactMatch", *generation)
    assert {"val/loss", "val/loss/text", "val/loss/image", "exact_match"} <= set(results)
    assert all(torch.isfinite(torch.tensor(value)) for value in results.values())
