"""A shipped recipe of a decoder language model, made small, through the whole house: documents in, text out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.text_run import WORDS, counting_recipe
from tools.export import main as export
from tools.generate import main as generate
from unigen_ds.core.errors import ConfigError
from unigen_ds.data.text.tokenizers import WordTokenizer
from unigen_ds.families.decoder_lm.family import DecoderLM
from unigen_ds.runner import Runner
from unigen_ds.runner.open.trained import open_inferencer
from unigen_ds.runner.settings.tree import ModelSettings, load_config
from unigen_ds.runner.start.build import build_model, build_processor
from unigen_ds.system.journals import read_lines


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """``decoder_lm_90m`` with its own curve and packing, learning to count in bf16."""
    folder = tmp_path_factory.mktemp("decoder")
    overrides = {
        **counting_recipe(folder, 240), "train_dataloader.batch_size": 4, "optim_wrapper.accumulative_counts": 2,
        "optim_wrapper.optimizer.lr": 1e-2, "param_scheduler.0.end": 2000, "param_scheduler.1.begin": 2000,
        "param_scheduler.1.end": 25000, "train_cfg.max_tokens": 25000, "work_dir": str(folder / "run"),
    }  # fmt: skip
    runner = Runner.from_cfg(load_config("decoder_lm_90m", overrides))
    runner.train()
    return runner


def test_the_recipe_learns_to_count(run: Runner) -> None:
    lines = [line for line in read_lines(run.work_dir / "metrics.jsonl") if "loss/text" in line]
    assert lines[0]["loss/text"] > 2.5 and lines[-1]["loss/text"] < 0.6
    rates = [line["lr"][0] if isinstance(line["lr"], list) else line["lr"] for line in lines]
    assert lines[-1]["tokens"] >= 25000 and len(set(map(str, rates))) == len(rates)


def test_it_goes_on_with_a_text(run: Runner, tmp_path: Path) -> None:
    arguments = ["--prompt", "three four five", "--max-length", "4", "--device", "cpu", "--out", str(tmp_path)]
    assert generate([str(run.work_dir), *arguments]) == 0
    row = json.loads((tmp_path / "results.jsonl").read_text())
    assert row["text"].startswith("six seven eight nine") and row["file"] is None


def test_as_transformers_does_from_the_export(run: Runner, tmp_path: Path) -> None:
    assert export([str(run.work_dir), str(tmp_path / "out")]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    inferencer = open_inferencer(run.work_dir)
    begin = [theirs.generation_config.bos_token_id, *tokenizer.encode("nine zero")]
    with torch.no_grad():
        expected = theirs.generate(torch.tensor([begin]), max_new_tokens=12, do_sample=False)[0, len(begin) :].tolist()
    text = tokenizer.decode(expected, skip_special_tokens=True)
    assert text and inferencer.unified_generate("nine zero", max_length=12).text == text
    texts = [inferencer.unified_generate("nine zero", temperature=5.0, seed=seed).text for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2] and max(len(text.split()) for text in texts) <= 46
    with pytest.raises(ConfigError, match="images, size: this model continues a text"):
        inferencer.unified_generate("one", images=["x.png"], size=(8, 8))
    with pytest.raises(ConfigError, match="did you mean 'temperature'"):
        inferencer.unified_generate("one", temprature=1.0)
    with pytest.raises(ConfigError, match=r"max_length is 0\. Allowed: a whole number of at least 1"):
        inferencer.unified_generate("one", max_length=0)


def test_the_export_may_be_trained_on(run: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its files come from the source; as ``pretrained`` it gives the same weights."""
    assert export([str(run.work_dir), str(tmp_path / "first"), "--dtype", "bf16"]) == 0
    (tmp_path / "first" / "README.md").write_text("of the source")
    arguments = [str(run.work_dir), str(tmp_path / "again"), "--source", str(tmp_path / "first")]
    assert export(arguments) == 0
    names = {path.name for path in (tmp_path / "again").iterdir()}
    assert names == {path.name for path in (tmp_path / "first").iterdir()} and "README.md" in names
    model = DecoderLM(pretrained=str(tmp_path / "again"))
    masters = {shard.name: shard.data for shard in run.backend.master_shards()}
    assert all(torch.equal(tensor.flatten(), masters[name]) for name, tensor in model.named_parameters())
    assert export(arguments) == 2 and "exists" in capsys.readouterr().err
    settings = {**run._parts.plain_config, "model": {"type": "DecoderLM", "pretrained": str(tmp_path / "again")}}
    WordTokenizer(words=[*WORDS, *"abcdef"]).save_pretrained(str(tmp_path / "tokenizer"))
    settings["tokenizer"] = {**settings["tokenizer"], "path": str(tmp_path / "tokenizer")}
    processor = build_processor(ModelSettings.of(settings), seed=0)
    with pytest.raises(ConfigError, match=r"vocabulary has 20 rows.*at least 22.*or vocab_size=22 in model\.llm"):
        build_model(ModelSettings.of(settings), processor, seed=0)
    settings["model"]["llm"] = {"vocab_size": 22}
    assert build_model(ModelSettings.of(settings), processor, seed=0).vocab_size == 22
