"""``tools/init.py``: from a model and a file to a config that trains; what it cannot decide it asks for by name."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.data.support import image, picture, talk, text, write_jsonl
from tests.data.text.chat_support import write_nanovlm
from tests.end_to_end.models.test_vlm_run import losses
from tests.families.tiny_transformers import write_images, write_language
from tests.published_run import write_bagel
from tests.support.needs import slow
from tools.init import main
from tools.train import main as train
from unigen_ds.checks.dry_run.known import Hardware
from unigen_ds.checks.first_config import first_config
from unigen_ds.checks.memory.planned import GIB
from unigen_ds.runner.settings.tree import load_config

CHATS = [talk(text("user", f"is it {a}"), text("assistant", f"{a} {b}")) for a in "abcdef" for b in "ghijklm"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("init")
    write_inputs(root)
    return root


def write_inputs(root: Path) -> None:
    """A tiny model of each kind, and data for each task."""
    write_language(root / "random", "qwen3")
    for name, write in {"qwen3": write_language, "llava": write_images}.items():
        write(root / name, name)
        change_a_norm(root / name / "model.safetensors")
    write_bagel(root / "bagel")
    write_nanovlm(root / "nanovlm")
    write_jsonl(root / "chats.jsonl", CHATS)
    for i in range(40):
        picture(root / "pictures" / f"{i}.png", 32, 16, seed=i)
        (root / "pictures" / f"{i}.txt").write_text("draw a handwritten one", encoding="utf-8")
        picture(root / "asked" / f"{i}.png", 32, 16, seed=i)
    questions = [talk(image("user", f"{i}.png"), text("user", "what"), text("assistant", "red")) for i in range(40)]
    write_jsonl(root / "asked" / "asked.jsonl", questions)
    (root / "books").mkdir()
    for i in range(3):
        (root / "books" / f"{i}.txt").write_text("what colour is it? " * 40, encoding="utf-8")
    registry = {"talks": "chats.jsonl", "shown": {"data_path": "pictures", "captions": "understand"}, "broken": 3}
    (root / "data_registry.json").write_text(json.dumps(registry), encoding="utf-8")


def change_a_norm(path: Path) -> None:
    """As training does."""
    weights = load_file(path)
    next(tensor for tensor in weights.values() if tensor.ndim == 1)[0] += 0.1
    save_file(weights, path, {"format": "pt"})


@pytest.fixture(autouse=True)
def _in_the_folder(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)


def init(model: str, data: str, out: Path, *options: str) -> int:
    return main(["--model", model, "--data", data, "--out", str(out), *options])


CASES: dict[str, tuple[str, str, tuple[str, ...], dict[str, Any]]] = {
    "chat": ("qwen3", "chats.jsonl", (), {"model.type": "CausalLM", "val_dataloader.split": 0.1}),
    "documents": ("qwen3", "books", (), {"val_dataloader": None, "train_cfg.max_epochs": 10}),
    "adapters": ("qwen3", "talks", ("--lora", "--epochs", "2"), {"lora.r": 16, "optim_wrapper.optimizer.lr": 1e-4}),
    "questions": ("llava", "asked/asked.jsonl", ("--lr", "0.002"), {"model.freeze": ["vision_tower"]}),
    "captions": ("nanovlm", "pictures", (), {"train_dataloader.dataset.captions": "understand"}),
    "drawing": ("bagel", "pictures", ("--task", "draw"), {"loss_weights.image": 1.0, "processor.text_dropout": 0.1}),
}  # fmt: skip


@pytest.mark.parametrize("name", ["chat", *slow(*(name for name in CASES if name != "chat"))])
def test_a_config_of_thirty_lines_trains(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The last line of the output is the command that starts it; it learns, and what was decided has its reason."""
    model, data, options, expected = CASES[name]
    out = tmp_path / "my.py"
    assert init(model, data, out, "--work-dir", str(tmp_path / "run"), *options) == 0
    output = capsys.readouterr().out
    body = out.read_text(encoding="utf-8").splitlines()
    assert len(body) <= 30
    assert all(len(line) <= 120 or str(tmp_path) in line or "chat_template" in line for line in body)
    config = load_config(out)
    for key, value in expected.items():
        node: Any = config
        for step in key.split("."):
            node = None if node is None else node.get(step)
        assert node == value, key
    for decision in ("model", "data", "trained", "seq_length", "validation", "epochs", "update", "lr", "batch"):
        assert any(line.split("  ")[0] == decision for line in output.splitlines()), decision
    last = output.splitlines()[-1]
    command = shlex.split(last.removeprefix("Start: "))
    assert last.startswith("Start: ") and command[0] == "python" and command[-1] == str(out)
    hooks = [hook["type"] for hook in config.custom_hooks]
    assert hooks == {"documents": [], "drawing": ["EvaluateHook", "EMAHook", "PreviewHook"]}.get(name, ["EvaluateHook"])
    assert train([*command[2:], "--max-updates", "2"]) == 0
    assert len(losses(tmp_path / "run")) == 2


@pytest.mark.slow
def test_on_several_devices_it_is_sharded_and_started_by_torchrun(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned without a device, as many processes as there are devices."""

    def devices() -> Hardware:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        return Hardware(2, "a device", memory=80 * GIB)

    monkeypatch.setattr(first_config, "find_and_hide_devices", devices)
    out = tmp_path / "my.py"
    assert init("qwen3", "chats.jsonl", out) == 0
    config, output = load_config(out), capsys.readouterr().out
    assert config.backend == {"type": "fsdp", "sharding_strategy": "FULL_SHARD"}
    assert config.optim_wrapper.precision == "bf16" and config.train_dataloader.seq_length == 256, "its positions"
    assert "Start: torchrun --nproc_per_node 2 " in output and "2 sequence(s)" in output


def test_random_weights_get_more_and_smaller_updates_and_a_larger_rate(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are recognised by their norms, which are as they were made."""
    write_jsonl(tmp_path / "many.jsonl", CHATS * 40)
    for model, of_update, num_epochs, rate in (("random", 1, 10, 2e-3), ("qwen3", 4, 3, 1e-3)):
        assert init(model, str(tmp_path / "many.jsonl"), tmp_path / "my.py", "--force") == 0
        config, output = load_config(tmp_path / "my.py"), capsys.readouterr().out
        assert ("weights are random" in output) == (model == "random")
        assert config.train_dataloader.batch_size * config.optim_wrapper.accumulative_counts == of_update
        assert config.train_cfg.max_epochs == num_epochs and config.optim_wrapper.optimizer.lr == rate


REFUSED: dict[str, tuple[str, str, tuple[str, ...], str]] = {
    "a misspelt file": ("qwen3", "chat.jsonl", (), "did you mean 'chats.jsonl'"),
    "a misspelt name": ("qwen3", "talk", (), "has the names talks, shown, broken.*did you mean 'talks'"),
    "a wrong entry": ("qwen3", "broken", (), "broken is 3.*Allowed: a path, or an object with data_path"),
    "a misspelt model": ("qwen", "chats.jsonl", (), "there is no such folder.*did you mean 'qwen3'"),
    "a model that only reads": ("bert", "chats.jsonl", (), "its config.json has model_type 'bert'.*Allowed"),
    "a checkpoint": ("run", "chats.jsonl", (), r"it is a checkpoint.*tools/export.py run OUT"),
    "a model without a chat template": ("base", "chats.jsonl", (), "base has no chat template.*Instruct"),
    "either way": ("bagel", "pictures", (), "40 of 40 records are an image with a text.*--task draw.*--task caption"),
    "images for a model of texts": ("qwen3", "asked/asked.jsonl", (), "40 of 40 records of .* have an image.*CausalLM"),
    "drawing by a model that reads": ("llava", "pictures", ("--task", "draw"), "40 of 40 .* cannot draw.*BAGEL"),
    "another task": ("qwen3", "chats.jsonl", ("--task", "edit"), "no record of it, of 42.*Allowed: 42 chat"),
    "no layout": ("qwen3", "pairs.jsonl", (), "the keys of the record: query, reply.*data_registry.json"),
    "no epoch": ("qwen3", "chats.jsonl", ("--epochs", "0"), "--epochs 0.*a number above 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_decide_it_asks_for_by_name(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    model, data, options, message = REFUSED[name]
    if not (root / "base").exists():
        write_language(root / "base", "qwen3", template="")
        write_jsonl(root / "pairs.jsonl", [{"query": "a", "reply": "b"}])
        for file, content in {
            "bert/config.json": '{"model_type": "bert", "architectures": ["BertModel"]}',
            "run/last_checkpoint": "run/iter_1.pth",
        }.items():
            (root / file).parent.mkdir()
            (root / file).write_text(content, encoding="utf-8")
    assert init(model, data, tmp_path / "my.py", *options) in (1, 2)
    error = capsys.readouterr().err
    assert re.search(message, error.splitlines()[-1]), error
    assert not (tmp_path / "my.py").exists()


def test_a_file_that_exists_is_replaced_by_force_alone(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my.py"
    out.write_text("mine", encoding="utf-8")
    assert init("qwen3", "chats.jsonl", out) == 2
    assert "my.py exists. Remedy: another name, or --force" in capsys.readouterr().err and out.read_text() == "mine"
    assert init("qwen3", "nothing", out, "--force") == 2 and out.read_text() == "mine"
    assert init("qwen3", "chats.jsonl", tmp_path / "my.txt") == 2
