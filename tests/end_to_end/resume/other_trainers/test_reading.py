"""A run reads its own checkpoints and other trainers' files: how often they are opened, and what does not fit."""

from __future__ import annotations

import functools
import json
import operator
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.checkpoint.test_store_damaged_folders import sign
from tests.text_run import counting_recipe
from tools.export import main as export
from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.layouts import safetensors as layout
from unigen_ds.checkpoint.manifest import FILE_NAME, Manifest
from unigen_ds.core.errors import CheckpointError
from unigen_ds.runner import Runner
from unigen_ds.runner.settings.tree import load_config
from unigen_ds.system.files import DIGESTS, file_digest


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return counting_recipe(tmp_path_factory.mktemp("reading"), 60)


def config(data: dict, work_dir: Path, **overrides: Any) -> Any:
    """A tiny DecoderLM with an average of its weights, for two updates; ``__`` stands for a dot."""
    options = {
        **data, "train_dataloader.batch_size": 2, "optim_wrapper.accumulative_counts": 1,
        "train_cfg": {"max_updates": 2}, "param_scheduler": [], "model.llm.tie_word_embeddings": True,
        "model.llm.hidden_size": 16, "model.llm.intermediate_size": 32,
        "custom_hooks": [{"type": "EMAHook", "momentum": 0.5}], "work_dir": str(work_dir),
    }  # fmt: skip
    return load_config("decoder_lm_90m", {**options, **{key.replace("__", "."): v for key, v in overrides.items()}})


@pytest.fixture(scope="module")
def short_run(data: dict, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    runner = Runner.from_cfg(config(data, tmp_path_factory.mktemp("trained") / "run"))
    runner.train()
    return runner


# ---- what does not fit ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chain(data: dict, tmp_path_factory: pytest.TempPathFactory) -> Path:
    saves = {"interval": 1, "by_epoch": False}
    cfg = config(data, tmp_path_factory.mktemp("chain") / "run", default_hooks__checkpoint=saves)
    Runner.from_cfg(cfg).train()
    return Path(cfg.work_dir)


def refusal(data: dict, checkpoint: Path, **changes: Any) -> str:
    """What a resume reports, after the manifest was made anew with the digests of the files as they are now."""
    state = json.loads((checkpoint / FILE_NAME).read_text())
    del state["digest"]
    for dotted_key, value in changes.items():
        *folders, key = dotted_key.split("__")
        functools.reduce(operator.getitem, folders, state)[key] = value
    for entry in state["files"]:
        path = checkpoint / entry["path"]
        entry |= {"size": path.stat().st_size, "digest": file_digest(path)}
    (checkpoint / FILE_NAME).write_bytes(sign(state))
    with pytest.raises(CheckpointError) as error:
        Runner.from_cfg(config(data, checkpoint.parent / "run", resume=str(checkpoint))).train()
    return str(error.value)


def test_files_of_another_update_are_refused_by_name(data: dict, chain: Path, tmp_path: Path) -> None:
    files = [path.relative_to(chain / "iter_1.pth") for path in (chain / "iter_1.pth").rglob("*")]
    files = [file for file in files if file.suffix == ".safetensors" or file.name == "hooks.json"]
    assert len(files) == 5
    for number, file in enumerate(files):
        checkpoint = Path(shutil.copytree(chain / "iter_2.pth", tmp_path / str(number) / "iter_2.pth"))
        shutil.copyfile(chain / "iter_1.pth" / file, checkpoint / file)
        text = refusal(data, checkpoint)
        assert f"{checkpoint / file} is of update 1, and manifest.json of update 2" in text


@pytest.mark.parametrize("wrong", [-1e-12, float("nan")])
def test_second_moments_that_no_optimizer_writes(data: dict, chain: Path, tmp_path: Path, wrong: float) -> None:
    checkpoint = Path(shutil.copytree(chain / "iter_2.pth", tmp_path / "iter_2.pth"))
    moments = load_file(checkpoint / "optimizer.safetensors")
    key = sorted(name for name in moments if name.startswith("exp_avg_sq|"))[3]
    moments[key][5] = wrong
    save_file(moments, checkpoint / "optimizer.safetensors")
    assert f"exp_avg_sq of {key.split('|')[1]} has negative values or NaN" in refusal(data, checkpoint)


# ---- how often a file is opened --------------------------------------------------------------------------------------


def test_a_resume_opens_each_file_once_however_many_tensors_it_has(
    data: dict, short_run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To open a file is to parse its header, which is as long as there are tensors. Each is hashed once, too."""
    header_paths: list[Path] = []
    digest_paths: list[Path] = []
    monkeypatch.setattr(store, "file_digest", lambda path: digest_paths.append(path) or file_digest(path))
    real = layout.safe_open
    monkeypatch.setattr(layout, "safe_open", lambda path, **how: header_paths.append(path) or real(path, **how))
    (checkpoint,) = short_run.work_dir.glob("*.pth")
    cfg = config(data, tmp_path / "run", resume=str(checkpoint), train_cfg__max_updates=3)
    runner = Runner.from_cfg(cfg)
    runner.train()
    names = sorted(path.relative_to(checkpoint).with_suffix("").as_posix() for path in header_paths)
    assert names == ["ema/rank00000", "model", "optimizer", "rng/rank00000"]
    assert sorted(path for path in digest_paths if path.is_relative_to(checkpoint)) == sorted(
        checkpoint / entry.path for entry in Manifest.read(checkpoint).files
    )
    assert len(list(runner.backend.model.parameters())) > 10, "each of which was read, and its moments and average"


# ---- sizes that no shape shows ---------------------------------------------------------------------------------------

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.mark.parametrize("of", ["checkpoint", "export", "export, stated by pretrained"])
def test_weights_of_another_number_of_heads_are_refused(data: dict, short_run: Runner, tmp_path: Path, of: str) -> None:
    """8 heads of 2 and 4 heads of 4 have the same shapes."""
    (source,) = short_run.work_dir.glob("*.pth")
    if of != "checkpoint":
        assert export([str(source), str(tmp_path / "export")]) == 0
        source = tmp_path / "export"

    def run(name: str, **options: Any) -> Runner:
        cfg = config(data, tmp_path / name, load_from=str(source), train_cfg__max_updates=1, **options)
        cfg.model.llm.update(HEADS)
        if "pretrained" in of:  # the config states no size at all
            cfg.model = {"type": "DecoderLM", "pretrained": str(tmp_path / "other")}
        return Runner.from_cfg(cfg)

    if "pretrained" in of:
        shutil.copytree(source, tmp_path / "other")
        values = json.loads((source / "config.json").read_text()) | {**HEADS, "head_dim": 2}
        (tmp_path / "other" / "config.json").write_text(json.dumps(values))
        (tmp_path / "other" / DIGESTS).unlink()
    message = r"num_attention_heads was 4 and is 8.*load_cfg\.allow=\['sizes'\]"
    with pytest.raises(CheckpointError, match=message):
        run("refused").train()
    run("allowed", load_cfg={"allow": ["sizes"]}).train()
    report = json.loads((tmp_path / "allowed" / "load_report.json").read_text())
    assert any("num_attention_heads was 4 and is 8" in line for line in report["sizes"]) and not report["reshaped"]
