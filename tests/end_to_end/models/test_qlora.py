"""Adapters on a published BAGEL directory, in fp32 and on packed weights: checkpoints, and what an export is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.published_run import config_on_bagel, write_bagel
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.families.bagel.model import UnifiedModel
from unigen_ds.families.bagel.published import FILES, WEIGHTS
from unigen_ds.runner import Runner
from unigen_ds.runner.open.trained import export_checkpoint, open_model
from unigen_ds.system import log

pytest.importorskip("bitsandbytes")
PeftModel = pytest.importorskip("peft").PeftModel
LORA = {"r": 4, "alpha": 16, "target_modules": [r"language_model.*(q|o)_proj", r"vit_model.*fc1", "connector"]}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bagel(tmp_path_factory.mktemp("source"))


def train(folder: Path, source: Path, **more: Any) -> Runner:
    config = config_on_bagel(folder / "run", source.parent / "digits", source, optim_wrapper__optimizer__lr=0.02)
    config.model |= more
    config.lora, config.param_scheduler = LORA, []
    runner = Runner.from_cfg(config, max_updates=2)
    runner.train()
    return runner


def hidden(runner: Runner, model: Any) -> Tensor:
    batch = next(iter(runner._parts.loader_at(runner.geometry, runner._parts.start.cursor)))[0].batch
    noise = torch.linspace(-1, 1, batch.flow_noise.numel()).view(batch.flow_noise.shape)
    with torch.no_grad():
        states, _ = model.eval().hidden_states(batch, noise, torch.full(batch.timesteps.shape, 0.5))
    return states


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.slow
def test_peft_puts_the_adapters_on_our_own_model(tmp_path: Path, source: Path) -> None:
    run = train(tmp_path, source)
    checkpoint = tmp_path / "run" / "iter_2.pth"
    tensors = load_file(checkpoint / "model.safetensors")
    assert tensors and all(".lora_" in name for name in tensors)  # the autoencoder's buffers are in the base's files
    model = open_model(checkpoint)[0]
    export_checkpoint(checkpoint, tmp_path / "adapters")
    theirs = PeftModel.from_pretrained(open_model(source)[0], str(tmp_path / "adapters"))
    expected = hidden(run, model)
    assert distance(hidden(run, theirs.base_model.model), expected) < 1e-6
    assert distance(hidden(run, open_model(source)[0]), expected) > 0.01


def test_on_packed_weights(tmp_path: Path, source: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """QLoRA: merged into the unpacked weights, in bf16, within the tolerance that is logged."""
    packed: Any = {"freeze": ["vae", "vit", "llm"], "quantize": {"llm": "nf4", "vit": "int8"}}
    run, checkpoint = train(tmp_path, source, **packed), tmp_path / "run" / "iter_2.pth"
    assert all(".lora_" in name for name in load_file(checkpoint / "model.safetensors"))
    record = Manifest.read(checkpoint).base
    assert record is not None and {entry.path for entry in record.files} == set(FILES)
    model = open_model(checkpoint)[0]
    with caplog.at_level("INFO", logger=log.logger().name):
        monkeypatch.setattr(log.logger(), "propagate", True)
        export_checkpoint(checkpoint, tmp_path / "merged", merge=True)
    match = re.search(r"at most ([\d.e-]+) of itself, .* by ([\d.e-]+) \(relative L2\)", caplog.text)
    assert match is not None and float(match[1]) == pytest.approx(2**-8, rel=0.05) and float(match[2]) < 2**-8
    weights = load_file(tmp_path / "merged" / WEIGHTS)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    expected = hidden(run, model)
    assert distance(hidden(run, open_model(tmp_path / "merged")[0]), expected) < 0.02
    plain = UnifiedModel(pretrained=str(source))
    assert distance(hidden(run, plain), expected) > 0.02  # it is the packed base that was merged into
    export_checkpoint(checkpoint, tmp_path / "exact", merge=True, dtype=torch.float32)
    assert distance(hidden(run, open_model(tmp_path / "exact")[0]), expected) < 1e-5
