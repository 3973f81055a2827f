"""Adapters on a frozen base: training, checkpoints without the base, resume."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.text_run import WORDS, text_config, words
from tools.evaluate import main as evaluate
from tools.export import main as export
from tools.generate import main as generate
from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.base_files import find_base
from unigen_ds.checkpoint.convert import merge
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core.errors import CheckpointError, ConfigError, ResumeBlocked
from unigen_ds.data.text.tokenizers import WordTokenizer
from unigen_ds.families.decoder_lm.family import DecoderLM, TransformersDirectory
from unigen_ds.models.quantized import QuantizedLinear
from unigen_ds.runner import Runner
from unigen_ds.runner.open.trained import export_checkpoint, open_model
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.system.journals import read_lines

PeftModel = pytest.importorskip("peft").PeftModel
LLM = {
    "model_type": "llama", "vocab_size": 20, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
RECORDS = [{"text": words(3 + i % 9, i)} for i in range(60)]
LORA = {"r": 4, "alpha": 8, "target_modules": [r"self_attn\.(q|v)_proj", "down_proj"]}
QLORA = {**LORA, "quantize": "nf4"}
DORA = {**LORA, "use_dora": True, "dropout": 0.1}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("lora") / "base"
    torch.manual_seed(3)
    tokenizer = WordTokenizer(words=WORDS)
    options = {"source": None, "dtype": torch.float32, "max_shard_size": "5GB"}
    TransformersDirectory().write(DecoderLM(llm=LLM), SimpleNamespace(tokenizer=tokenizer), out, **options)  # type: ignore[arg-type]
    return out


def config(folder: Path, source: Path, **overrides: Any) -> Any:
    folder.mkdir(exist_ok=True)
    model = {"model": {"type": "DecoderLM", "pretrained": str(source)}, "lora": LORA}
    ema = [{"type": "EMAHook", "momentum": 0.1}]
    saves = {"default_hooks__checkpoint__interval": 4, "default_hooks__checkpoint__unit": "update"}
    return text_config(folder, RECORDS, **{
        **model, "custom_hooks": ema, "default_hooks__logger__interval": 1, "optim_wrapper__optimizer__lr": 2e-2,
        "train_dataloader__batch_size": 2, **saves, **overrides,
    })  # fmt: skip


def lines(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(folder / "run" / "metrics.jsonl") if "loss" in line]


@pytest.mark.parametrize("lora", [QLORA, DORA], ids=["qlora", "dora"])
def test_checkpoints_hold_adapters_alone_and_a_resume_is_exact(
    tmp_path: Path, base: Path, lora: dict[str, Any]
) -> None:
    overrides = {"lora": {**LORA, **lora}}
    with warnings.catch_warnings():  # peft does not know the packed layers
        warnings.simplefilter("error", UserWarning)
        Runner.from_cfg(config(tmp_path / "whole", base, **overrides), max_updates=8).train()
    Runner.from_cfg(config(tmp_path / "twice", base, **overrides), max_updates=4).train()
    Runner.from_cfg(config(tmp_path / "twice", base, **overrides, resume=True), max_updates=8).train()
    whole, twice = lines(tmp_path / "whole"), lines(tmp_path / "twice")
    assert [line["loss"] for line in whole] == [line["loss"] for line in twice] and len(whole) == 8
    assert whole[-1]["loss"] < whole[0]["loss"]
    for file in ("model.safetensors", "ema/rank00000.safetensors", "optimizer.safetensors"):
        first, second = (load_file(tmp_path / name / "run" / "iter_8.pth" / file) for name in ("whole", "twice"))
        assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
        assert first and all(".lora_" in key for key in first)
    model = open_model(tmp_path / "twice" / "run")[0].eval()
    packed = {name for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
    assert len(packed) == (2 * 7 if lora is QLORA else 0)
    export_checkpoint(tmp_path / "whole" / "run", tmp_path / "merged", merge=True, dtype=torch.float32)
    merged_model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(logits(merged_model), logits(model), atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """A work dir with a copy of the base, whose run's own base is gone."""
    folder = tmp_path_factory.mktemp("run")
    shutil.copytree(base, folder / "own")
    saving = {"default_hooks__checkpoint__save_base": True, "default_hooks__checkpoint__max_keep_ckpts": 1}
    Runner.from_cfg(config(folder, folder / "own", lora=DORA, **saving), max_updates=8).train()
    assert [checkpoint.path.name for checkpoint in store.list_checkpoints(folder / "run")] == ["iter_8.pth"]
    shutil.rmtree(folder / "own")
    return folder / "run"


def logits(model: Any) -> Tensor:
    """Of transformers' model, of peft's around it, or of ours."""
    ids = torch.tensor([[2, 7, 1, 9, 12, 3]])
    with torch.no_grad():
        if isinstance(model, DecoderLM):
            return model.lm_head(model.model(ids, use_cache=False, attend=CAUSAL).last_hidden_state)
        return model(ids).logits


def CAUSAL(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)


def test_exports_have_the_logits_of_the_trained_model(run: Path, base: Path, tmp_path: Path) -> None:
    """Merged, and as adapters that peft puts on transformers' own model; both are the average of the weights."""
    model, before = open_model(run)[0].eval(), open_model(base)[0].eval()
    assert (logits(model) - logits(before)).abs().max() > 0.05
    assert export([str(run), str(tmp_path / "adapters")]) == 0
    assert {path.name for path in (tmp_path / "adapters").iterdir()} >= {"adapter_config.json", "tokenizer.json"}
    adapter_config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (adapter_config["r"], adapter_config["lora_alpha"], adapter_config["use_dora"]) == (4, 8, True), (
        "as configured: peft scales by it"
    )
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapters").eval()
    torch.testing.assert_close(logits(theirs), logits(model), atol=1e-5, rtol=1e-5)
    with pytest.raises(CheckpointError, match=r"holds adapters in peft's form.*export\.py CKPT OUT --merge"):
        open_model(tmp_path / "adapters")
    assert export([str(run), str(tmp_path / "merged"), "--merge", "--base", str(base)]) == 0
    merged_model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(logits(merged_model), logits(model), atol=1e-5, rtol=1e-5)
    again = open_model(tmp_path / "merged", config=config(tmp_path / "again", base, lora=DORA))[0].eval()
    assert torch.equal(logits(again), logits(open_model(tmp_path / "merged")[0].eval())), (
        "lora of the config is not used"
    )
    raw = open_model(run, raw=True)[0].eval()
    assert (logits(raw) - logits(model)).abs().max() > 1e-3


def test_generation_and_evaluation_open_the_base(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--prompt", "three four", "--max-length", "3", "--device", "cpu", "--out", str(tmp_path / "out")]
    assert generate([str(run), *common]) == 0
    data = ["--data", str(run.parent / "train.jsonl"), "--max-batches", "1"]
    assert evaluate([str(run), *data]) == 0 and "val/loss" in capsys.readouterr().out


def test_another_base_is_refused_by_name(run: Path, base: Path, tmp_path: Path, capsys: Any) -> None:
    other, weights = tmp_path / "other", "model.safetensors"
    shutil.copytree(base, other)
    whole = (other / weights).read_bytes()
    (other / weights).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert export([str(run), str(tmp_path / "out"), "--base", str(other)]) == 1
    assert f"{other / weights} has another content" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"other.*/model\.safetensors has another content.*--base DIR"):
        Runner.from_cfg(config(run.parent, base, lora=DORA, resume=True, base=str(other)))
    (other / weights).write_bytes(whole)
    (other / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        find_base(Manifest.read(run / "iter_8.pth").base, folder=str(other), checkpoint=None)
    runner = Runner.from_cfg(config(run.parent, tmp_path / "gone", lora=DORA, resume=True), max_updates=9)
    assert runner.train().updates == 9  # with the copy in the work dir
    manifest = Manifest.read(run / "iter_9.pth")
    assert manifest.format_version == 3 and manifest.base is not None
    assert manifest.base.path == str(run / "base")
    assert {entry.path for entry in manifest.base.files} == {"config.json", "model.safetensors"}
    with pytest.raises(CheckpointError, match=r"holds adapters.*export\.py --merge"):
        merge(run, tmp_path / "plain")
    with pytest.raises(ConfigError, match="no effect"):
        open_model(base, base=str(other))


def test_the_record_of_a_base_is_found_from_any_folder(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--base`` was relative; the next resume begins elsewhere."""
    shutil.copytree(base, tmp_path / "moved")
    Runner.from_cfg(config(tmp_path / "a", base), max_updates=1).train()
    monkeypatch.chdir(tmp_path)
    Runner.from_cfg(config(tmp_path / "a", base, resume=True, base="moved"), max_updates=2).train()
    record = Manifest.read(tmp_path / "a" / "run" / "iter_2.pth").base
    assert record is not None and record.path == str(tmp_path / "moved")


def test_what_cannot_be_adapted_is_refused(tmp_path: Path, base: Path) -> None:
    with pytest.raises(ConfigError, match=r"'qq_proj' matches no linear layer.*model\.layers\.N\.self_attn\.q_proj"):
        Runner.from_cfg(config(tmp_path / "a", base, lora={**LORA, "target_modules": ["v_proj", "qq_proj"]}))
    with pytest.raises(ConfigError, match=r"is no regular expression"):
        Settings.from_config(config(tmp_path / "b", base, lora={**LORA, "target_modules": "("}))
    with pytest.raises(ConfigError, match=r"lora\.rank"):
        Settings.from_config(config(tmp_path / "c", base, lora={**LORA, "rank": 3}))
    Runner.from_cfg(config(tmp_path / "d", base, lora=None), max_updates=1).train()
    full = str(tmp_path / "d" / "run" / "iter_1.pth")
    assert Manifest.read(Path(full)).format_version == 2
    with pytest.raises(ConfigError, match=r"which has no adapters, and lora is set.*export\.py"):
        Runner.from_cfg(config(tmp_path / "e", base, load_from=full), max_updates=1).train()
    saving = {"default_hooks__checkpoint__save_base": True}
    with pytest.raises(ConfigError, match=r"save_base=True, and this run has no adapters"):
        Runner.from_cfg(config(tmp_path / "f", base, lora=None, **saving), max_updates=1).train()


def test_adapters_are_where_another_training_begins(tmp_path: Path, base: Path, run: Path) -> None:
    """``load_from``: their weights, from zero. Fresh ones change nothing. On a resume another strength is refused."""
    path = str(run / store.list_checkpoints(run)[-1].path.name)
    low = {"optim_wrapper__precision": "bf16"}
    Runner.from_cfg(config(tmp_path / "a", base, lora=DORA, load_from=path, **low), max_updates=1).train()
    fresh = Runner.from_cfg(config(tmp_path / "b", base, lora=DORA), max_updates=1)
    fresh.train()
    assert lines(tmp_path / "a")[0]["loss"] < 0.97 * lines(tmp_path / "b")[0]["loss"]
    Runner.from_cfg(config(tmp_path / "c", base, lora=None), max_updates=1).train()
    assert lines(tmp_path / "b")[0]["loss"] == pytest.approx(lines(tmp_path / "c")[0]["loss"], rel=1e-6)
    with pytest.raises(ResumeBlocked, match=r"lora\.alpha was 8.* and is 9"):
        Runner.from_cfg(config(tmp_path / "a", base, lora={**DORA, "alpha": 9}, resume=True))
    with pytest.raises(ResumeBlocked, match=r"now: lora\.target_modules was \[.* and is 'v_proj'; "):
        Runner.from_cfg(config(tmp_path / "a", base, lora={**DORA, "target_modules": "v_proj"}, resume=True))


def test_the_base_is_held_in_the_compute_precision_alone(tmp_path: Path, base: Path) -> None:
    backend = Runner.from_cfg(config(tmp_path, base, optim_wrapper__precision="bf16"))._parts.backend
    assert {shard.data.dtype for shard in backend.frozen_shards()} == {torch.bfloat16}
    assert {shard.data.dtype for shard in backend.master_shards()} == {torch.float32}
