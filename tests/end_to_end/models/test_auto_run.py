"""Models of transformers through the whole package: trained, stopped, resumed, asked, evaluated, exported."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from tests.data.support import image, talk, text, write_jsonl
from tests.end_to_end.engines.launch import tensors, unequal
from tests.end_to_end.models.test_vlm_run import losses
from tests.families.tiny_transformers import IMAGE, write, write_images, write_language
from tests.support.golden_files import BAGEL, NANOVLM
from tests.support.needs import slow
from tools.evaluate import main as evaluate
from tools.export import main as export
from tools.generate import main as generate
from tools.zero_to_fp32 import main as merge
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.data.batches.loader import pack_documents
from unigen_ds.data.records.records import Turn
from unigen_ds.runner import Runner
from unigen_ds.runner.open.trained import open_inferencer, open_model
from unigen_ds.runner.settings.tree import load_config

COLOURS = {"red": (230, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 230)}
CONFIG = """
model = dict(type={type!r}, pretrained={folder!r})
tokenizer = dict(type="ModelTokenizer", path={folder!r})
train_dataloader = dict(batch_size=2, seq_length=96, packing=dict(type="BestFitPacking", window=32),
                        dataset=dict(type="UnifiedGenerationDataset", data_path={data!r}))
val_dataloader = dict(dataset=dict(type="UnifiedGenerationDataset", data_path={data!r}))
optim_wrapper = dict(optimizer=dict(type="AdamW", lr=4e-3), accumulative_counts=2)
train_cfg = dict(max_epochs=40)
backend = dict(type="single")
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=-1))
custom_hooks = [dict(type="EMAHook", momentum=0.5), dict(type="EvaluateHook", interval=1000)]
randomness = dict(seed=1)
work_dir = {work_dir!r}
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model and one that reads images, with conversations for each; some of the latter without an image."""
    root = tmp_path_factory.mktemp("auto")
    write_language(root / "qwen3", "qwen3")
    write_images(root / "llava", "llava")
    words = [("is it a", "red"), ("is it b", "blue"), ("what", "green"), ("what colour", "grey")]
    talks = [talk(text("user", q), text("assistant", a), text("user", "a"), text("assistant", "b")) for q, a in words]
    write_jsonl(root / "qwen3.jsonl", talks * 6)
    for name, colour in COLOURS.items():
        Image.new("RGB", (16, 20), colour).save(root / f"{name}.png")
    pictures = [talk(image("user", f"{n}.png"), text("user", "what colour"), text("assistant", n)) for n in COLOURS]
    write_jsonl(root / "llava.jsonl", [*pictures, talk(text("user", "what"), text("assistant", "a"))] * 6)
    return root


def config(data: Path, kind: str, work_dir: Path, **overrides: Any) -> Any:
    path = work_dir.with_suffix(".py")
    type_, talks = ("ImageTextToText", "llava") if kind in IMAGE else ("CausalLM", "qwen3")
    paths = {"folder": str(data / kind), "data": str(data / f"{talks}.jsonl"), "work_dir": str(work_dir)}
    path.write_text(CONFIG.format(type=type_, **paths), encoding="utf-8")
    return load_config(path, {key.replace("__", "."): value for key, value in overrides.items()})


@pytest.fixture(scope="module")
def folders(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("finished")
    for kind in ("qwen3", "llava"):
        Runner.from_cfg(config(data, kind, root / kind)).train()
    return {kind: root / kind for kind in ("qwen3", "llava")}


@pytest.mark.parametrize("kind", ["qwen3", "llava"])
def test_it_learns_and_goes_on_to_the_bit_where_it_was_stopped(
    data: Path, folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """With a loader process; its images travel between processes."""
    straight = losses(folders[kind])
    assert straight[max(straight)] < 0.02 * straight[1]  # colours that are not seen leave a tenth
    changes = {"train_dataloader__num_workers": 1}
    Runner.from_cfg(config(data, kind, tmp_path / "run", **changes), max_updates=3).train()
    Runner.from_cfg(config(data, kind, tmp_path / "run", resume=True, **changes), max_updates=6).train()
    assert losses(tmp_path / "run") == {update: loss for update, loss in straight.items() if update <= 6}


@pytest.mark.parametrize("kind", ["mistral", *slow("gemma3", "qwen2_5_vl"), "smolvlm"])
def test_further_models_resume_to_the_bit_and_are_merged_and_exported(data: Path, tmp_path: Path, kind: str) -> None:
    """Weights, moments and averages too; transformers computes the same logits with what is written."""
    write(tmp_path, [kind])
    options = {"model__pretrained": str(tmp_path / kind), "tokenizer__path": str(tmp_path / kind)}
    straight, in_two = tmp_path / "straight", tmp_path / "stopped"
    Runner.from_cfg(config(data, kind, straight, **options), max_updates=3).train()
    Runner.from_cfg(config(data, kind, in_two, **options), max_updates=2).train()
    Runner.from_cfg(config(data, kind, in_two, resume=True, **options), max_updates=3).train()
    assert losses(in_two) == losses(straight) and len(losses(straight)) == 3
    assert unequal(*(tensors(work_dir / "iter_6.pth") for work_dir in (straight, in_two))) == []
    assert merge([str(in_two), str(tmp_path / "merged")]) == 0
    assert export([str(in_two), str(tmp_path / "out"), "--raw"]) == 0
    theirs = auto_model(kind).from_pretrained(tmp_path / "out").eval()
    state = torch.load(tmp_path / "merged" / "pytorch_model.bin", weights_only=True)
    assert unequal(*({("", k): v for k, v in each.items()} for each in (state, theirs.state_dict()))) == []
    compare_logits(in_two, theirs, data / "red.png" if kind in IMAGE else None)


def auto_model(kind: str) -> Any:
    return AutoModelForImageTextToText if kind in IMAGE else AutoModelForCausalLM


def compare_logits(work_dir: Path, theirs: Any, picture: Path | None) -> None:
    """Of transformers' model and of a run's, for one conversation."""
    model, processor = open_model(work_dir, raw=True)
    turns = [Turn("user", "text", "what colour"), Turn("assistant", "text", "red")]
    if picture is not None:
        turns.insert(0, Turn("user", "image", str(picture)))
    batch: Any = pack_documents([[s.load(processor, None) for s in processor.plan(turns).splits]], processor)
    parameters = inspect.signature(type(theirs).forward).parameters
    types = {name: batch.host["token_types"][None] for name in ("mm_token_type_ids", "token_type_ids") if picture}
    inputs = {name: value for name, value in {**batch.image_inputs, **types}.items() if name in parameters}
    with torch.no_grad():
        expected = theirs(input_ids=batch.text_ids[None], **inputs).logits[0]
        torch.testing.assert_close(model.eval().logits(batch)[: len(expected)], expected, rtol=1e-5, atol=1e-5)


def test_the_checkpoint_needs_no_other_folder(data: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """It answers without the directory that the training began with."""
    for kind in ("qwen3", "llava"):
        shutil.copytree(data / kind, tmp_path / kind)
        Runner.from_cfg(config(data, kind, tmp_path / f"{kind}-run"), max_updates=2).train()
    hidden = {kind: (data / kind).rename(tmp_path / f"hidden-{kind}") for kind in ("qwen3", "llava")}
    try:
        assert open_inferencer(tmp_path / "qwen3-run").unified_generate("what", max_length=3).text is not None
        inferencer = open_inferencer(tmp_path / "llava-run")
        assert inferencer.unified_generate("what", images=[str(data / "red.png")], max_length=3).text is not None
    finally:
        for kind, path in hidden.items():
            path.rename(data / kind)


def test_it_answers(data: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """By the tool, from the work dir: what it has learned, up to the token that ends a turn."""
    options = ["--device", "cpu", "--out", str(tmp_path), "--max-length", "8"]
    for name in COLOURS:
        question = ["--prompt", "what colour", "--image", str(data / f"{name}.png")]
        assert generate([str(folders["llava"]), *question, *options]) == 0
    assert generate([str(folders["qwen3"]), "--prompt", "is it b", *options]) == 0
    rows = [json.loads(line)["text"].strip() for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert rows == [*COLOURS, "blue"]


def test_cached_and_whole_passes_write_the_same(data: Path, folders: dict[str, Path]) -> None:
    """``in_step``, as under an engine that shards: each pass is a whole one; an image token is never written."""
    inferencer = open_inferencer(folders["llava"])
    token = inferencer.processor.tokenizer.chat.convert_tokens_to_ids("<image>")
    inferencer.model.lm_head.register_forward_hook(
        lambda head, inputs, out: out.index_add(-1, torch.tensor([token]), torch.full((*out.shape[:-1], 1), 50.0))
    )
    question = {"images": [str(data / "red.png")], "max_length": 12, "temperature": 1.0, "seed": 4}
    text = inferencer.unified_generate("what colour is it", **question).text
    inferencer.model.in_step = True
    assert inferencer.unified_generate("what colour is it", **question).text == text and text


def test_it_is_evaluated(folders: dict[str, Path], tmp_path: Path) -> None:
    """An answer is compared with the record's up to the end of the turn, which is not the tokenizer's end token."""
    for kind in ("qwen3", "llava"):
        out = tmp_path / f"{kind}.json"
        options = ["--metrics", "ExactMatch", "--generation", "max_new_tokens=6", "--out", str(out)]
        assert evaluate([str(folders[kind]), *options]) == 0
        loss, matches = json.loads(out.read_text())["results"]
        assert loss["values"]["val/loss"] < 0.1 and [*matches["values"].values()] == [1.0], kind


@pytest.mark.parametrize("kind", ["qwen3", "llava"])
def test_transformers_loads_what_is_exported(data: Path, folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """Equal logits, by transformers alone; and the export begins another training."""
    assert export([str(folders[kind]), str(tmp_path / "out"), "--raw"]) == 0
    theirs = auto_model(kind).from_pretrained(tmp_path / "out").eval()
    compare_logits(folders[kind], theirs, data / "red.png" if kind in IMAGE else None)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= names
    assert theirs.generation_config.eos_token_id == [3, 5]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model, processor = open_model(folders[kind], raw=True)
    assert tokenizer.chat_template == processor.tokenizer.chat.chat_template
    again, _ = open_model(tmp_path / "out")
    assert type(again) is type(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    Runner.from_cfg(
        config(data, kind, tmp_path / "next", model__pretrained=str(tmp_path / "out")), max_updates=1
    ).train()
    first = losses(tmp_path / "next")[1]
    assert first < 0.5 * losses(folders[kind])[1]


def test_from_the_config_alone(data: Path, tmp_path: Path) -> None:
    """Initial weights are transformers' own; the same for the same seed."""
    first = []
    for name in ("a", "b"):
        settings = config(data, "qwen3", tmp_path / name)
        llm = {"model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 96, "head_dim": 8}
        settings["model"] = {"type": "CausalLM", "config": {**llm, "intermediate_size": 24, "num_attention_heads": 2,
                                                         "num_key_value_heads": 1}}  # fmt: skip
        Runner.from_cfg(settings, max_updates=1).train()
        first.append(losses(tmp_path / name)[1])
    assert first[0] == first[1]


def test_refusals(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model has no key 'pretraind' \(CausalLM\)"):
        Runner.from_cfg(config(data, "qwen3", tmp_path / "a", model__pretraind="x"))
    with pytest.raises(ConfigError, match="Allowed: ModelTokenizer"):
        words = {"type": "WordTokenizer", "words": ["a"]}
        Runner.from_cfg(config(data, "qwen3", tmp_path / "b", tokenizer=words))
    with pytest.raises(ConfigError, match=r"vocabulary has 60 rows.*the tokenizer"):
        settings = config(data, "qwen3", tmp_path / "c")
        write_language(tmp_path / "small", "qwen3", vocab_size=60)
        settings["model"]["pretrained"] = str(tmp_path / "small")
        Runner.from_cfg(settings)


@pytest.mark.parametrize(
    ("kind", "changes", "match"),
    [
        ("qwen3", {"model__config": {"hidden_sizes": 64}}, r"model\.config\.hidden_sizes'.*did you mean 'hidden_size'"),
        ("llava", {"model__config": {"hidden_size": 64}}, "unknown config key .model.config.hidden_size"),
        ("llava", {"model__config": {"text_config": {"hiden_size": 64}}}, r"'model\.config\.text_config\.hiden_size'."),
        ("qwen3", {"model__config": {"num_hidden_layers": 3}}, r"^model\.config: .*num_hidden_layers` \(3\)"),
        ("qwen3", {"model__config": {"intermediate_size": 64}},
         r"qwen3 does not fit the model: reshaped: .*leave sizes out"),
        ("qwen3", {"model__config": {"tie_word_embeddings": False}},
         r"missing: lm_head\.weight"),
        ("qwen3", {"model__pretrained": "{data}/llava"}, r"AutoModelForImageTextToText, and .*model\.type='Image"),
        ("qwen3", {"model__pretrained": str(BAGEL)}, r"BAGEL's directory, and not for .*model\.type='UnifiedModel'"),
        ("llava", {"model__pretrained": str(NANOVLM)}, r"nanoVLM's directory, and not for .*model\.type='VLM'"),
        ("qwen3", {"model__pretrained": "{data}"}, r"config\.json cannot be read"),
        ("llava", {"tokenizer__path": "{data}/qwen3"}, r"qwen3' has no image processor.*Allowed"),
        ("qwen3", {"model__freeze": ["nothing"]}, r"'nothing' matches no parameter\. Allowed: .*lm_head\.weight\.$"),
    ],
)  # fmt: skip
def test_what_contradicts_the_files_is_named_by_its_key(
    data: Path, tmp_path: Path, kind: str, changes: dict[str, Any], match: str
) -> None:
    """Keys that transformers would keep without using them, sizes of others, and directories of other models."""
    options = {key: v.format(data=data) if isinstance(v, str) else v for key, v in changes.items()}
    with pytest.raises((ConfigError, CheckpointError), match=match):
        Runner.from_cfg(config(data, kind, tmp_path / "run", **options))


def test_checkpoints_that_transformers_loads_directly(data: Path, tmp_path: Path) -> None:
    """Written beside each checkpoint, and deleted with it; a failure does not end the run."""
    hooks = [{"type": "SavePretrainedHook", "raw": True}]
    saves: dict[str, Any] = {"default_hooks__checkpoint": {"interval": 2, "by_epoch": False, "max_keep_ckpts": 1}}
    saves["checkpoint_dir"] = str(tmp_path / "saved")
    settings = config(data, "qwen3", tmp_path / "run", custom_hooks=hooks, **saves)
    folder = tmp_path / "saved" / "pretrained"
    (folder / "qwen3-8b").mkdir(parents=True)  # a user's own
    Runner.from_cfg(settings, max_updates=3).train()
    mine, last = sorted(folder.iterdir(), reverse=True)
    assert mine.name == "qwen3-8b"
    (checkpoint,) = (path for path in (tmp_path / "saved").glob("iter_*.pth"))
    assert last.name == checkpoint.stem == "iter_6"
    model, _ = open_model(checkpoint, raw=True)
    theirs = AutoModelForCausalLM.from_pretrained(last)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    shutil.rmtree(folder)
    folder.write_text("in the way")
    again = config(data, "qwen3", tmp_path / "run", custom_hooks=hooks, resume=True, **saves)
    Runner.from_cfg(again, max_updates=4).train()
    assert "The checkpoint itself is complete." in (tmp_path / "run" / "train.log").read_text()
    assert losses(tmp_path / "run").keys() == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("name", "kind"), [("qwen_sft", "qwen3"), ("llava_zero2", "llava"), ("frozen_vlm_zero2", "llava")]
)
def test_the_recipes_train(data: Path, tmp_path: Path, name: str, kind: str) -> None:
    """With their own precision, curve and packing, from a tiny directory."""
    changes = {
        "model.pretrained": str(data / kind),
        "tokenizer.path": str(data / kind),
        "train_dataloader.batch_size": 1,
        "train_dataloader.num_workers": 0,
        "optim_wrapper.accumulative_counts": 2,
        "train_dataloader.dataset.data_path": str(data / f"{kind}.jsonl"),
        "train_dataloader.dataset.index_workers": 0,
        "val_dataloader.split": 0.3,
        "backend": {"type": "single"},
        "work_dir": str(tmp_path / "run"),
        "train_dataloader.seq_length": 64,
        "default_hooks.logger.interval": 1,
    }
    settings = load_config(name, changes)
    assert settings["model"]["activation_checkpointing"], "7 B parameters, or sequences of 4,096 tokens"
    Runner.from_cfg(settings, max_updates=2).train()
    assert [*losses(tmp_path / "run")] == [1, 2]
