"""Train from a published directory, export, and what is exported loads: every way in and out in one run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.published_run import config_on_bagel, write_bagel
from tools.export import main
from unigen_ds.families.bagel.published import FILES
from unigen_ds.runner import Runner
from unigen_ds.runner.open.trained import open_model
from unigen_ds.system.files import DIGESTS


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bagel(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def run(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Two updates on digits, enlarged for the vision tower and the autoencoder."""
    folder = tmp_path_factory.mktemp("run")
    config = config_on_bagel(folder / "run", folder / "digits", source, default_hooks__checkpoint__interval=2)
    runner = Runner.from_cfg(config, max_updates=2)
    runner.train()
    return runner


def test_training_moves_all_but_the_autoencoder_and_the_tables(run: Runner, source: Path) -> None:
    state = run.backend.model.state_dict()
    for name, tensor in load_file(source / FILES[3]).items():
        assert torch.equal(state[f"vae.{name}"], tensor), name
    before = load_file(source / FILES[2])
    still = {name for name, tensor in before.items() if torch.equal(state[name], tensor)}
    assert {"latent_pos_embed.pos_embed", "vit_pos_embed.pos_embed"} <= still
    prefix = "language_model.model.layers.0.mlp"
    assert not any(name.startswith((f"{prefix}.", f"{prefix}_moe_gen.", "vae2llm", "connector")) for name in still)


def test_what_is_exported_loads(run: Runner, source: Path, tmp_path: Path) -> None:
    assert main([str(run.work_dir), str(tmp_path / "out"), "--source", str(source)]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {*(path.name for path in source.iterdir()), "unigen_ds.json", DIGESTS}
    for name in ("tokenizer.json", *FILES[:2], FILES[3]):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    model, _ = open_model(tmp_path / "out")
    for name, tensor in run.backend.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
