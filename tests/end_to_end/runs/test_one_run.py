"""One real run from files of the test's own, through ``tools/train.py``: what it reads, logs, keeps and resumes.

The config is YAML; the data are the shipped example records (JSON) beside plain texts (JSONL), mixed by weight, packed,
cut into two micro-batches an update. The run is stopped after 6 of 12 updates and resumed with a loader process; a
second one is never stopped. Expected numbers come from mmengine, torch and the records, not from the package.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file

from tests.data.support import picture
from tools.inspect_data import main as inspect_data
from tools.train import main as train
from unigen_ds.runner import Runner
from unigen_ds.runner.settings.tree import load_config
from unigen_ds.runner.start.parts import build_parts
from unigen_ds.system.journals import read_lines

ROOT = Path(__file__).resolve().parents[3]
UPDATES, STOP, LR = 12, 6, 4e-3
WEIGHTS = {"text": 2.0, "image": 0.5}
PICTURES = ("red_circle", "red_square", "blue_square")


def settings(folder: Path) -> dict[str, Any]:
    attention = {"num_attention_heads": 2, "intermediate_size": 32, "hidden_size": 16}
    transform = {"type": "ImageTransform", "max_size": 8, "min_size": 8}
    examples = json.loads((ROOT / "docs" / "sample_data_format.json").read_text())
    text = " ".join(turn["content"] for r in examples for turn in r.get("conversations", ()) if "content" in turn)
    text += " a red circle on white ground. The same, as a record of its own. word"
    return {
        "model": {
            "type": "UnifiedModel",
            "llm": {**attention, "num_hidden_layers": 2, "num_key_value_heads": 1, "dropout": 0.1},
            "vit": {**attention, "num_hidden_layers": 1, "image_size": 8, "patch_size": 4, "num_channels": 3},
            "vae": {"type": "PixelAutoencoder", "channels": 3},
            "latent_patch_size": 2,
            "max_latent_size": 4,
        },
        "tokenizer": {"type": "WordTokenizer", "words": sorted(set(text.split()))},
        "processor": {
            "vit_transform": {**transform, "stride": 4},
            "vae_transform": {**transform, "stride": 2},
            "text_dropout": 0.2,
            "vit_dropout": 0.2,
        },
        "train_dataloader": {
            "batch_size": 2,
            "seq_length": 256,
            "packing": {"type": "BestFitPacking", "window": 64, "max_tiles": 12},
            "dataset": [
                {"type": "UnifiedGenerationDataset", "data_path": str(folder / "talks.json"), "weight": 2.0},
                {"type": "UnifiedGenerationDataset", "data_path": str(folder / "texts.jsonl"), "weight": 1.0,
                 "name": "texts"},
            ],
        },
        "optim_wrapper": {
            "optimizer": {"type": "AdamW", "lr": LR, "betas": [0.9, 0.95], "weight_decay": 0.1},
            "accumulative_counts": 2,
            "clip_grad": {"max_norm": 0.7},
        },
        "loss_weights": WEIGHTS,
        "param_scheduler": [
            {"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "begin": 0, "end": 6},
            {"type": "CosineAnnealingLR", "eta_min": 0.0, "by_epoch": False, "begin": 6, "end": 2 * UPDATES},
        ],
        "train_cfg": {"max_updates": UPDATES},
        "default_hooks": {
            "logger": {"interval": 1},
            "checkpoint": {"by_epoch": False, "interval": 4, "max_keep_ckpts": 2},
        },
        "custom_hooks": [{"type": "EMAHook", "momentum": 0.1}],
        "visualizer": {"vis_backends": [{"type": "TensorboardVisBackend"}]},
        "randomness": {"seed": 3},
        "env": {"num_threads": 1, "peak_tflops": 0.5},
    }  # fmt: skip


@dataclass(frozen=True)
class OneRun:
    folder: Path
    in_two: Path
    straight: Path

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.in_two / "metrics.jsonl") if "loss" in line]

    @cached_property
    def log(self) -> str:
        return (self.in_two / "train.log").read_text(encoding="utf-8")

    @property
    def newest(self) -> Path:
        return self.in_two / (self.in_two / "last_checkpoint").read_text().strip()

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return json.loads((self.newest / "manifest.json").read_text())


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> OneRun:
    folder = tmp_path_factory.mktemp("one_run")
    for seed, name in enumerate(PICTURES):
        picture(folder / "images" / f"{name}.png", 8, 8, seed=seed)
    examples = json.loads((ROOT / "docs" / "sample_data_format.json").read_text())
    (folder / "talks.json").write_text(json.dumps(examples * 12))
    texts = [{"text": " ".join(["word"] * (3 + i % 20))} for i in range(60)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in texts))
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump(settings(folder)))
    in_two, straight = folder / "stopped", folder / "straight"
    assert train([str(path), "--work-dir", str(in_two), "--max-updates", str(STOP)]) == 0
    more = ["--resume", "--cfg-options", "train_dataloader.num_workers=1"]
    assert train([str(path), "--work-dir", str(in_two), *more]) == 0
    assert train([str(path), "--work-dir", str(straight)]) == 0
    return OneRun(folder, in_two, straight)


# --- what is logged -----------------------------------------------------------------------------------------------


def test_the_effective_batch_is_logged(case: OneRun) -> None:
    assert "2 per device x 1 process(es) x 2 accumulated = 4 sequences per update" in case.log


def test_a_line_holds_update_and_iteration_and_the_weighted_sum(case: OneRun) -> None:
    assert [line["update"] for line in case.lines] == list(range(1, UPDATES + 1))
    for line in case.lines:
        assert line["iteration"] == 2 * line["update"] and line["sequences"] == 4 * line["update"]
        total = sum(weight * (line[f"loss/{term}"] or 0.0) for term, weight in WEIGHTS.items())
        assert line["loss"] == pytest.approx(total, rel=1e-6) and line["grad_norm"] > 0 and line["applied"]
    assert f"update {UPDATES}  iteration {2 * UPDATES}  epoch" in case.log, "and so does the console"


def test_times_rates_and_mfu_agree_with_each_other(case: OneRun) -> None:
    first, last = case.lines[0], case.lines[STOP - 1]
    for line in (first, last):
        assert 0 < line["time/data"] < line["time/update"]
        assert line["mfu"] == pytest.approx(line["tflops"] / 0.5) and line["memory"] > 0
    tokens = last["tokens"] / STOP  # the window holds all updates of the process
    assert last["tokens_per_second"] == pytest.approx(tokens / last["time/update"], rel=1e-6)
    samples = last["samples"] / STOP
    assert last["samples_per_second"] == pytest.approx(samples / last["time/update"], rel=1e-6)


# --- what is kept -------------------------------------------------------------------------------------------------


def test_the_newest_checkpoints_are_kept_and_named(case: OneRun) -> None:
    names = sorted(path.name for path in case.in_two.glob("*.pth"))
    assert names == ["iter_20.pth", "iter_24.pth"] and case.newest.name == "iter_24.pth"
    assert (case.in_two / "config.py").is_file() and load_config(case.in_two / "config.py")["loss_weights"] == WEIGHTS


def test_a_checkpoint_holds_the_whole_state(case: OneRun) -> None:
    manifest = case.manifest
    assert manifest["progress"]["updates"] == UPDATES and manifest["iteration"] == 2 * UPDATES
    assert manifest["geometry"] == {"batch_size": 2, "accumulative_counts": 2, "dp_size": 1}
    assert len(manifest["schedule"]["curves"]) == 2 and manifest["loader"]["cursor"]["sequences"] == 4 * UPDATES
    names = {row["name"] for row in manifest["parameters"]}
    weights = load_file(case.newest / "model.safetensors")
    assert names <= set(weights)
    with safe_open(case.newest / "optimizer.safetensors", framework="pt") as stream:
        kinds = {tuple(key.split("|")[:2]) for key in stream.keys()}  # noqa: SIM118 - a safetensors handle
    trainable = {row["name"] for row in manifest["parameters"] if row["trainable"]}
    assert {(kind, name) for kind in ("exp_avg", "exp_avg_sq", "step") for name in trainable} <= kinds
    averages = load_file(next((case.newest / "ema").glob("*.safetensors")))
    assert {key.split("|")[1] for key in averages} == trainable


# --- the same training --------------------------------------------------------------------------------------------


def test_stopped_and_resumed_is_the_run_that_was_never_stopped(case: OneRun) -> None:
    straight = [line for line in read_lines(case.straight / "metrics.jsonl") if "loss" in line]
    for key in ("loss", "loss/text", "loss/image", "grad_norm", "lr", "sequences", "samples", "tokens", "epoch"):
        assert [line[key] for line in case.lines] == [line[key] for line in straight], key
    for file in ("model.safetensors", "optimizer.safetensors", "ema/rank00000.safetensors"):
        one, two = (load_file(folder / "iter_24.pth" / file) for folder in (case.in_two, case.straight))
        assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one), file
    assert "Auto resumed from the latest checkpoint" in case.log
    assert "Continuity: the last update's losses are the recorded ones" in case.log


def test_the_ledger_agrees_and_the_sources_have_their_shares(case: OneRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_data([str(case.folder / "own.yaml"), "--ledger", str(case.in_two / "ledger.jsonl")]) == 0
    assert f"{UPDATES} updates" in capsys.readouterr().out
    facts = case.manifest["loader"]["facts"]
    assert facts["names"] == ["talks", "texts"] and facts["sizes"] == [96, 60] and facts["weights"] == [2.0, 1.0]


def test_an_update_is_that_of_a_loop_written_by_hand(case: OneRun, tmp_path: Path) -> None:
    """Same batches, same initial weights: sums of the terms over the update's own targets, clipped, AdamW."""
    config = load_config(case.folder / "own.yaml", {"model.llm.dropout": 0.0, "work_dir": str(tmp_path / "run")})
    runner = Runner.from_cfg(config, max_updates=3)
    runner.train()
    state = dict(runner.backend.model.state_dict())
    rates = [line["lr"] for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "loss" in line]

    other = load_config(case.folder / "own.yaml", {"model.llm.dropout": 0.0, "work_dir": str(tmp_path / "hand")})
    parts = build_parts(other, max_updates=3)
    model, batches = parts.backend.model, iter(parts.loader)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    for rate in rates:
        update = [micro_batch.batch for micro_batch in next(batches)]
        counts = {term: sum(batch.target_counts()[term] for batch in update) for term in WEIGHTS}
        assert len(update) == 2 and all(counts.values())
        for batch in update:
            sums = model(batch).sums
            sum(weight * sums[term] / counts[term] for term, weight in WEIGHTS.items()).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.7)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    parts.loader.close()
    for name, parameter in model.named_parameters():
        # softmax ignores what all keys share: the true gradient of this bias is 0, and AdamW amplifies its rounding
        noise = name.startswith("vit_model.") and name.endswith("k_proj.bias")
        assert torch.allclose(state[name], parameter, rtol=1e-5, atol=sum(rates) if noise else 1e-7), name


# --- what goes wrong ----------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_passed_over_and_named(case: OneRun, tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(case.in_two, tmp_path / "damaged"))
    weights = folder / "iter_24.pth" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100] ^= 1
    weights.write_bytes(content)
    command = [str(case.folder / "own.yaml"), "--work-dir", str(folder), "--resume"]
    assert train(command) == 0
    log = (folder / "train.log").read_text()[len(case.log) :]
    assert "iter_24.pth" in log and "has changed since it was written" in log
    assert f"Auto resumed from the latest checkpoint {folder / 'iter_20.pth'}" in log
    lines = [line for line in read_lines(folder / "metrics.jsonl") if "loss" in line]
    assert [line["loss"] for line in lines] == [line["loss"] for line in case.lines] and math.isfinite(
        lines[-1]["loss"]
    )
