"""diffusers' autoencoder in a unified model: its numbers, a whole run, and a checkpoint that needs no folder."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from tests.end_to_end.engines.pictures import write_drawings
from tests.end_to_end.runs.test_hub_names import cached
from tests.tiny import tiny_config
from tools.export import main as export
from unigen_ds.core.errors import ConfigError
from unigen_ds.models.diffusers_vae import DiffusersAutoencoder
from unigen_ds.models.vae import hold_as_buffers
from unigen_ds.runner import Runner
from unigen_ds.runner.open.trained import open_inferencer, open_model
from unigen_ds.system.journals import read_lines

diffusers = pytest.importorskip("diffusers")
SIZES: dict[str, Any] = {
    "in_channels": 3, "out_channels": 3, "block_out_channels": (8, 8), "layers_per_block": 1, "latent_channels": 4,
    "norm_num_groups": 4, "scaling_factor": 0.5, "shift_factor": 0.25, "sample_size": 16,
    "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
    "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
}  # fmt: skip
_TRANSFORM = {"type": "ImageTransform", "max_size": 16, "min_size": 8, "stride": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An autoencoder as diffusers writes it, inside of a pipeline's folder."""
    root = tmp_path_factory.mktemp("pipeline")
    torch.manual_seed(2)
    diffusers.AutoencoderKL(**SIZES).save_pretrained(root / "vae")
    return root


def test_its_numbers_are_diffusers_own(folder: Path) -> None:
    """Also as a model holds it, all weights as buffers."""
    theirs = diffusers.AutoencoderKL.from_pretrained(folder / "vae").eval()
    torch.manual_seed(0)
    images, noise = torch.rand(2, 3, 16, 8) * 2 - 1, torch.randn(2, 4, 8, 4)
    ours: Any = hold_as_buffers(DiffusersAutoencoder(path=str(folder)))
    assert (ours.latent_channels, ours.downsample) == (4, 2) and not [*ours.parameters()]
    with torch.no_grad():
        found = theirs.encode(images).latent_dist
        expected = 0.5 * (found.mean + found.std * noise - 0.25)
        latents = ours.encode(images, noise)
        torch.testing.assert_close(latents, expected)
        torch.testing.assert_close(ours.decode(latents), theirs.decode(latents / 0.5 + 0.25).sample)
    assert not [*ours.parameters()]


def test_a_name_on_the_hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the cache, offline; of a repository only its config and its own weights are asked for."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached(tmp_path / "cache", "maker/vae", folder / "vae")
    named, given = (DiffusersAutoencoder(path=path) for path in ("maker/vae", str(folder / "vae")))
    assert all(torch.equal(tensor, given.state_dict()[name]) for name, tensor in named.state_dict().items())
    with pytest.raises(ConfigError, match=r"model\.vae\.path 'maker/gone' is no folder here.*hf download maker/gone"):
        DiffusersAutoencoder(path="maker/gone")
    asked = list[Any]()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: asked.append(k) or str(folder))
    DiffusersAutoencoder(path="maker/pipeline")
    names = ["vae/config.json", "vae/diffusion_pytorch_model.safetensors", "flux1-dev.safetensors", "unet/config.json"]
    patterns = {key: asked[0][f"{key}_patterns"] for key in ("allow", "ignore")}
    assert [n for n in names if any(fnmatch(n, p) for p in patterns["allow"])] == names[:2] and not patterns["ignore"]


def config(folder: Path, work_dir: Path, data: Path, **overrides: Any) -> Any:
    changes: dict[str, Any] = {
        "model__vae": {"type": "DiffusersAutoencoder", "path": str(folder)},
        "model__vit__image_size": 16, "model__vit__num_channels": 3,
        "processor": {"vit_transform": _TRANSFORM, "vae_transform": _TRANSFORM},
        "train_dataloader__dataset": {"type": "UnifiedGenerationDataset", "data_path": str(data)},
        "backend": {"type": "single"}, **overrides,
    }  # fmt: skip
    return tiny_config(work_dir, data.parent, **changes)


def test_a_run_draws_with_it_and_its_checkpoint_needs_no_folder(folder: Path, tmp_path: Path) -> None:
    data = write_drawings(tmp_path / "drawings")
    Runner.from_cfg(config(folder, tmp_path / "run", data), max_updates=3).train()
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert len(lines) == 3 and any(line["loss/image"] for line in lines)
    assert export([str(tmp_path / "run"), str(tmp_path / "out"), "--raw"]) == 0
    hidden = folder.rename(tmp_path / "hidden")
    try:
        inferencer = open_inferencer(tmp_path / "run", raw=True)
        (drawn,) = inferencer.unified_generate("a", size=(8, 8)).images
        assert drawn.size == (8, 8)
        stored = json.loads((tmp_path / "out" / "unigen_ds.json").read_text())["vae"]
        assert stored["type"] == "DiffusersAutoencoder" and stored["config"]["latent_channels"] == 4
        again, _ = open_model(tmp_path / "out")
        for name, tensor in inferencer.model.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name
    finally:
        hidden.rename(folder)


def test_what_cannot_work_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="path and config"):
        DiffusersAutoencoder()
    with pytest.raises(ConfigError, match="no autoencoder of diffusers with safetensors"):
        DiffusersAutoencoder(path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"diffusers' AutoencoderTiny.*Allowed: AutoencoderKL"):
        DiffusersAutoencoder(config={"_class_name": "AutoencoderTiny"})
