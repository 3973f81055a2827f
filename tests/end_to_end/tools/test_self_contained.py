"""The tools without the folders that the training began with: what an export needs is in the checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.data.text.chat_support import write_nanovlm
from tests.end_to_end.models.test_vlm_run import config as vlm_config
from tests.end_to_end.models.test_vlm_run import data as pictures  # noqa: F401 - a fixture
from tests.end_to_end.resume.other_trainers.test_reading import config as text_config
from tests.end_to_end.resume.other_trainers.test_reading import data  # noqa: F401 - a fixture
from tests.published_run import config_on_bagel, write_bagel
from tests.tiny import tiny_config
from tools.export import main as export
from tools.generate import main as generate
from unigen_ds.runner import Runner
from unigen_ds.runner.open.trained import open_inferencer, open_model

FAST = ["--num-timesteps", "3", "--device", "cpu", "--max-length", "3"]


def fine_tuned(folder: Path) -> Any:
    """A config of BAGEL's kind that names its folder for sizes, weights and the tokenizer, with a shift of its own."""
    source = write_bagel(folder / "source")
    cfg = config_on_bagel(folder / "run", folder / "digits", source, default_hooks__checkpoint__interval=1)
    cfg.model["timestep_shift"] = 2.5
    return cfg


def decoder(folder: Path, data: dict) -> Any:  # noqa: F811
    first = text_config(data, folder / "first")
    Runner.from_cfg(first).train()
    assert export([str(folder / "first"), str(folder / "source")]) == 0
    shutil.rmtree(folder / "first")
    cfg = text_config(data, folder / "run")
    cfg.model = {"type": "DecoderLM", "pretrained": str(folder / "source")}
    cfg.tokenizer.path = str(folder / "source")
    return cfg


def vlm(folder: Path, pictures: Path) -> Any:  # noqa: F811
    source = write_nanovlm(folder / "source")
    cfg = vlm_config(pictures, folder / "run")
    cfg.model = {"type": "VLM", "pretrained": str(source)}
    cfg.tokenizer = {**cfg.tokenizer, "path": str(source)}
    values = json.loads((source / "config.json").read_text())
    cfg.processor = {"max_image_size": values["max_img_size"]}
    cfg.train_cfg = {"max_updates": 1}
    return cfg


@pytest.mark.parametrize("kind", ["fine_tuned", "decoder", "vlm"])
def test_without_its_source_a_checkpoint_is_exported_loaded_and_used(
    kind: str, data: dict, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]  # noqa: F811
) -> None:  # fmt: skip
    arguments = {"fine_tuned": (tmp_path,), "decoder": (tmp_path, data), "vlm": (tmp_path, pictures)}[kind]
    runner = Runner.from_cfg(globals()[kind](*arguments), max_updates=1)
    runner.train()
    shutil.rmtree(tmp_path / "source")
    out = tmp_path / "out"
    assert export([str(runner.work_dir), str(out), "--raw"]) == 0, capsys.readouterr().err
    for path in out.rglob("*"):
        assert path.is_dir() or str(tmp_path).encode() not in path.read_bytes(), f"{path.name} has an absolute path"
    new_place = out.rename(tmp_path / "moved")
    for place in (runner.work_dir, new_place):
        words = ["--prompt", "red" if kind == "vlm" else "three", "--out", str(tmp_path / "made"), *FAST]
        assert generate([str(place), *words]) == 0, capsys.readouterr().err
    if kind == "decoder":
        from transformers import AutoModelForCausalLM

        state = AutoModelForCausalLM.from_pretrained(new_place).state_dict()
    else:
        state = open_model(new_place)[0].state_dict()
    for name, tensor in runner.backend.model.state_dict().items():
        assert torch.equal(state[name].to(tensor.dtype), tensor), name


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Runner:
    """Trained from nothing, on pixels, with a shift."""
    folder = tmp_path_factory.mktemp("scratch")
    cfg = tiny_config(folder / "run", digits, model__timestep_shift=2.0)
    runner = Runner.from_cfg(cfg, max_updates=1)
    runner.train()
    return runner


@pytest.fixture(scope="module")
def export_folder(scratch: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "out"
    assert export([str(scratch.work_dir), str(out)]) == 0
    return out


def test_a_model_on_pixels_is_exported_and_loaded(
    scratch: Runner, export_folder: Path, digits: Path, tmp_path: Path
) -> None:
    """It draws the same picture, and may be trained further."""
    assert not (export_folder / "ae.safetensors").exists()
    assert set(load_file(export_folder / "ema.safetensors")) == set(scratch.backend.model.state_dict())
    drawings = [
        open_inferencer(place).unified_generate("draw a three", seed=1).images[0].tobytes()
        for place in (scratch.work_dir, export_folder)
    ]
    assert drawings[0] == drawings[1] and len(set(drawings[0])) > 2
    cfg = tiny_config(tmp_path / "run", digits)
    cfg.model = {"type": "UnifiedModel", "pretrained": str(export_folder)}
    cfg.tokenizer = {"type": "PretrainedTokenizer", "path": str(export_folder)}
    Runner.from_cfg(cfg, max_updates=1).train()


def test_the_shift_of_the_sampler_and_its_origin(
    scratch: Runner, export_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the training, for a checkpoint and for its export; BAGEL's for its directory; as given before all."""
    directory = str(write_bagel(tmp_path / "bagel"))
    cases = [
        (str(scratch.work_dir), [], "timestep_shift 2.0"),
        (str(export_folder), [], "timestep_shift 2.0"),
        (directory, ["--size", "32", "32"], "timestep_shift 3.0"),
        (directory, ["--size", "32", "32", "--timestep-shift", "1.5"], "timestep_shift 1.5"),
    ]
    for place, words, message in cases:
        assert generate([place, "--prompt", "draw a three", "--out", str(tmp_path / "made"), *FAST, *words]) == 0
        assert message in capsys.readouterr().err
