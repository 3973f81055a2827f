"""The tree of settings: all problems in one message, mmengine's keys translated, seeds drawn once, origins."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import tiny_config
from tools.train import main
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.config.overrides import plain_values
from unigen_ds.config.registry import FAMILIES, MODELS
from unigen_ds.core.errors import ConfigError, ResumeBlocked
from unigen_ds.data.images.image_files import ImageTransform
from unigen_ds.families.bagel.family import Bagel
from unigen_ds.hooks.save.checkpoint import CheckpointHook
from unigen_ds.models.vae import FluxAutoencoder
from unigen_ds.runner import Runner
from unigen_ds.runner.settings.tree import Settings, load_config, load_settings
from unigen_ds.schedule.curves import LinearLR
from unigen_ds.system.log import NAME

XTUNER = """
log_level = "WARNING"
log_processor = dict(by_epoch=False, window_size=1)
default_scope = "mmengine"
runner_type = "FlexibleRunner"
env_cfg = dict(cudnn_benchmark=False, mp_cfg=dict(mp_start_method="fork"), dist_cfg=dict(backend="nccl", timeout=60))
train_cfg = dict(type="TrainLoop", by_epoch=True, max_epochs=2)
default_hooks = dict(param_scheduler=dict(type="ParamSchedulerHook"), sampler_seed=dict(type="DistSamplerSeedHook"))
randomness = dict(seed=None)
visualizer = dict(type="Visualizer", name="visualizer", vis_backends=[dict(type="LocalVisBackend")])
"""
WRAPPER = "optim_wrapper.update(type='AmpOptimWrapper', dtype='bfloat16', loss_scale='dynamic')\n"
SAMPLER = "train_dataloader.update(sampler=dict(type='DefaultSampler', shuffle={shuffle}))\n"


@pytest.fixture
def plain(tmp_path: Path, digits: Path) -> dict[str, Any]:
    config = tiny_config(tmp_path / "run", digits, train_dataloader__dataset__split="val")
    return json.loads(json.dumps(plain_values(config)))  # type: ignore[no-any-return]


def as_file(folder: Path, values: dict[str, Any], more: str = "") -> Path:
    path = folder / "config.py"
    path.write_text("".join(f"{key} = {value!r}\n" for key, value in values.items()) + more)
    return path


def test_every_problem_is_in_one_message_with_the_value_and_what_is_allowed(plain: dict[str, Any]) -> None:
    plain["train_dataloader"] |= {"seq_length": 0, "num_workers": -1, "overflow": "cut"}
    plain["train_dataloader"]["packing"] = {"type": "BestFitPacking", "window": "8"}
    plain["train_cfg"] = {"max_epochs": -1}
    plain["param_scheduler"] = [{"type": "LinearLR", "start_factor": 2}, {"type": "CosineAnnealinLR"}]
    plain["custom_hooks"] = [{"type": "EMAHook", "momentum": 2.0}]
    plain["processor"]["vit_transform"].pop("stride")
    plain["processor"]["text_dropout"] = 1.5
    plain["env"] = {"num_threads": 0, "matmul_precision": "hihg"}
    del plain["tokenizer"]
    with pytest.raises(ConfigError) as error:
        Settings.from_config(plain)
    lines = str(error.value).splitlines()
    for line in (
        "the config has no tokenizer",
        "train_dataloader.seq_length is 0. Allowed: a whole number of at least 1",
        "train_dataloader.num_workers is -1. Allowed: a whole number of at least 0",
        "train_dataloader.overflow is 'cut'. Allowed: 'split', 'truncate', 'skip', 'error'",
        "train_dataloader.packing.window is '8'. Allowed: a whole number",
        "train_cfg.max_epochs is -1. Allowed: a number above 0",
        "param_scheduler[0].start_factor is 2. Allowed: a number from 0 to 1",
        "param_scheduler[1].type is 'CosineAnnealinLR'. Remedy: did you mean 'CosineAnnealingLR'?",
        "custom_hooks[0].momentum is 2.0. Allowed: a number above 0 and below 1",
        "the config has no processor.vit_transform.stride (ImageTransform)",
        "processor.text_dropout is 1.5. Allowed: a number from 0 to 1",
        "env.num_threads is 0. Allowed: a whole number of at least 1",
        "env.matmul_precision is 'hihg'",
    ):
        assert sum(line in one for one in lines) == 1, line
    assert len(lines) == 14, lines


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("optim_wrapper.optimizer.betas", [0.9, 1.5], "Invalid beta parameter at index 1: 1.5"),
        ("backend", {"type": "deepspeed", "config": "zero5"}, "backend: DeepSpeed config 'zero5' is neither"),
        ("processor.vit_transform.min_size", 64, "processor.vit_transform: image transform of max_size"),
        ("custom_hooks", [{"type": "mmengine.NPUProfilerHook"}], "custom_hooks[0]: NPUProfilerHook cannot run here"),
    ],
)
def test_what_only_a_constructor_refuses_is_refused_before_the_training(
    plain: dict[str, Any], path: str, value: Any, message: str
) -> None:
    """Settings call no constructor; the start of the run does."""
    *parents, last = path.split(".")
    node = plain
    for key in parents:
        node = node[key]
    node[last] = value
    settings = Settings.from_config(plain)
    with pytest.raises(ConfigError) as error:
        Runner.from_cfg(settings)
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["param_scheduler[0].end=0.5", "param_scheduler.0.end=0.5"])
def test_an_override_as_print_config_shows_the_key(plain: dict[str, Any], tmp_path: Path, text: str) -> None:
    config = load_config(as_file(tmp_path, plain), [text, "default_hooks.continuity.on_mismatch=halt"])
    assert config.param_scheduler[0].end == 0.5
    assert Settings.from_config(config).default_hooks.continuity.arguments == {"on_mismatch": "halt"}
    override = "default_hooks.continuity=dict(on_mismatch='halt', tolerance=[1, 2.5][0])"
    with pytest.raises(ConfigError, match=r"default_hooks\.continuity is"):
        load_settings(as_file(tmp_path, plain), [override])  # a call of anything but dict is a text
    settings = load_settings(as_file(tmp_path, plain), [override.replace("[1, 2.5][0]", "0.5")])
    assert settings.default_hooks.continuity.arguments == {"on_mismatch": "halt", "tolerance": 0.5}
    with pytest.raises(ConfigError, match="did you mean 'continuity'"):
        load_settings(as_file(tmp_path, plain), ["default_hooks.continuty.on_mismatch=halt"])


def test_runtime_keys_of_xtuner_are_translated(plain: dict[str, Any], tmp_path: Path) -> None:
    """Each with a line in the log of the run."""
    for key in ("train_cfg", "default_hooks", "randomness"):
        plain.pop(key)
    path = as_file(tmp_path, plain, XTUNER + WRAPPER.replace("bfloat16", "float32") + SAMPLER.format(shuffle=True))
    settings = load_settings(path, {"env.log_level": "INFO"})
    assert settings.env.log_level == "INFO", "ours counts"
    assert settings.optim_wrapper.precision == "fp32" and settings.env.dist_timeout_s == 60
    assert settings.train_cfg.limits == [(2, "epoch")] and settings.randomness.seed is None
    assert main([str(path), "--max-updates", "1", "--cfg-options", "env.log_level='INFO'"]) == 0
    log = (tmp_path / "run" / "train.log").read_text()
    for line in (
        "log_level='WARNING' is left out: the config has env.log_level='INFO'", "log_processor=",
        "default_scope='mmengine'",
        "runner_type='FlexibleRunner'", "env_cfg.cudnn_benchmark=False", "env_cfg.mp_cfg=", "env_cfg.dist_cfg.backend=",
        "env_cfg.dist_cfg.timeout=60 is read as env.dist_timeout_s=60", "train_cfg.type='TrainLoop'",
        "train_cfg.by_epoch=True", "default_hooks.param_scheduler=", "default_hooks.sampler_seed=",
        "optim_wrapper.type='AmpOptimWrapper', optim_wrapper.dtype='float32' is left out: the config has",
        "train_dataloader.sampler=", "visualizer.type='Visualizer'",
        "visualizer.name='visualizer'", "visualizer.vis_backends: {'type': 'LocalVisBackend'} is left out",
    ):  # fmt: skip
        assert log.count(f"Config: {line}") == 1, line


@pytest.mark.parametrize(
    ("wrapper", "precision"),
    [
        ({"type": "OptimWrapper"}, "fp32"), ({"type": "AmpOptimWrapper"}, "fp16"), ({"dtype": "bfloat16"}, "bf16"),
        ({"type": "mmengine.optim.AmpOptimWrapper", "dtype": "float16"}, "fp16"),
        ({"type": "DeepSpeedOptimWrapper", "precision": "bf16"}, "bf16"),
    ],
)  # fmt: skip
def test_the_precision_of_an_optim_wrapper(plain: dict[str, Any], wrapper: dict[str, Any], precision: str) -> None:
    plain["optim_wrapper"].pop("precision")
    plain["optim_wrapper"] |= wrapper
    assert Settings.from_config(plain).optim_wrapper.precision == precision


def test_a_seed_of_none_is_drawn_recorded_and_used_by_a_resume(
    plain: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(NAME), "propagate", True)
    monkeypatch.setattr("unigen_ds.runner.start.stages.secrets.randbelow", lambda limit: 12345)
    plain["randomness"] = {"seed": None}
    first = Runner.from_cfg(plain, max_updates=1)
    first.train()
    [checkpoint] = (tmp_path / "run").glob("iter_*.pth")
    manifest = Manifest.read(checkpoint)
    assert manifest.config["randomness"] == {"seed": 12345} and manifest.loader["seed"] == 12345
    assert "this run draws 12345" in (tmp_path / "run" / "train.log").read_text()
    monkeypatch.setattr("unigen_ds.runner.start.stages.secrets.randbelow", lambda limit: 1 / 0)
    again = Runner.from_cfg({**plain, "resume": True}, max_updates=2)
    assert again.config["randomness"]["seed"] == 12345
    other = Runner.from_cfg({**plain, "work_dir": str(tmp_path / "b"), "randomness": {"seed": 12345}}, max_updates=1)
    other.train()
    weights, same = (dict(run.backend.model.state_dict()) for run in (first, other))
    assert all(torch.equal(tensor, same[name]) for name, tensor in weights.items())
    with pytest.raises(ResumeBlocked, match="the training data differs"):
        Runner.from_cfg({**plain, "resume": True, "randomness": {"seed": 1}}, max_updates=2)


def test_a_default_made_explicit_is_no_edit(plain: dict[str, Any], tmp_path: Path) -> None:
    """On a resume: neither of a section, nor of a component's argument; another value is one."""
    Runner.from_cfg(plain, max_updates=1).train()
    plain["optim_wrapper"]["paramwise_cfg"] = {"norm_decay_mult": 1, "groups": []}
    plain["optim_wrapper"]["optimizer"]["eps"] = 1e-8
    plain["processor"]["vit_dropout"] = 0
    plain["model"]["timestep_shift"] = 1.0
    plain["model"]["vit_max_patches_per_side"] = (
        plain["model"]["vit"]["image_size"] // plain["model"]["vit"]["patch_size"]
    )
    plain["optim_wrapper"]["optimizer"] |= {"fused": None, "foreach": None}
    plain["param_scheduler"][0]["end_factor"] = 1
    log = tmp_path / "run" / "train.log"
    length = len(log.read_text())
    Runner.from_cfg({**plain, "resume": True}, max_updates=1)
    assert "Checklist, " not in log.read_text()[length:]
    plain["optim_wrapper"]["optimizer"]["eps"] = 1e-7
    Runner.from_cfg({**plain, "resume": True}, max_updates=1)
    assert "optim_wrapper.optimizer.eps was 1e-08 and is 1e-07" in log.read_text()[length:]


def test_a_stored_config_of_unknown_content_is_completed_without_an_error() -> None:
    strange = {"model": {"type": "<class 'gone.Model'>"}, "was_once": 1, "train_cfg": None, "custom_hooks": "no list"}
    config = Settings.complete(strange)
    assert config["model"] == strange["model"] and config["was_once"] == 1
    assert config["optim_wrapper"]["paramwise_cfg"]["norm_decay_mult"] == 1.0


def test_every_key_with_its_value_and_where_it_comes_from(
    tmp_path: Path, plain: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    as_file(tmp_path, plain).rename(tmp_path / "first.py")
    (tmp_path / "second.py").write_text("_base_ = './first.py'\nrandomness = dict(seed=3)\n")
    child = tmp_path / "child.py"
    child.write_text("_base_ = './second.py'\nlog_level = 'ERROR'\ntrain_dataloader = dict(seq_length=81)\n")
    options = ["--cfg-options", "optim_wrapper.optimizer.lr=0.5", "param_scheduler.0.start_factor=0.5", "--seed", "9"]
    assert main([str(child), "--print-config", *options, "--work-dir", str(tmp_path / "run")]) == 0
    note, *rows = capsys.readouterr().out.splitlines()
    assert note == "# Config: log_level='ERROR' is read as env.log_level='ERROR'."
    lines = {line.split(" = ")[0]: line.split(" = ", 1)[1] for line in rows}
    table = {key: [part.strip() for part in text.rsplit("  # ", 1)] for key, text in lines.items()}
    assert table["train_dataloader.seq_length"] == ["81", "config"]
    assert table["train_dataloader.batch_size"] == ["12", "config"]
    assert table["env.log_level"] == ["'ERROR'", "translated"]
    assert table["randomness.seed"] == ["9", "command line"]
    assert table["optim_wrapper.optimizer.lr"] == ["0.5", "command line"]
    assert table["param_scheduler[0].start_factor"] == ["0.5", "command line"]
    assert table["param_scheduler[0].end_factor"] == ["1.0", "default"]
    assert table["train_dataloader.prefetch_factor"] == ["2", "default"]
    assert "default_hooks.logger.writers" not in table and len(table) > 100
    assert main([str(tmp_path / "second.py"), "--print-config", "--work-dir", str(tmp_path / "run")]) == 0
    assert "randomness.seed = 3" in capsys.readouterr().out
    assert not (tmp_path / "run").exists(), "nothing was trained"


@pytest.mark.parametrize(
    ("model", "messages"),
    [
        ({"type": "VLM", "llm": {"num_attention_heads": 7}}, ["model.llm: hidden_size 960, num_attention_heads 7"]),
        ({"type": "VLM", "vit": {"layers": 1}, "pixel_shuffle_factor": 0},
         ["unknown config key 'model.vit.layers'", "model.pixel_shuffle_factor is 0"]),
        ({"type": "VLM", "pretrained": "D", "llm": {"rope_theta": -1}}, ["model.llm.rope_theta is -1"]),
        ({"type": "DecoderLM", "dropout": 1}, ["model.dropout is 1"]),
        ({"type": "UnifiedModel"},
         ["the config has no model.llm.hidden_size, ", "no model.vit.hidden_size, ", "model.vae is not given"]),
        ({"type": "UnifiedModel", "pretrained": "D", "llm": {"dropout": 1}, "vae": {"scale_factor": 0.5}},
         ["model.llm.dropout is 1. Allowed: a number of at least 0 and below 1"]),
    ],
)  # fmt: skip
def test_sizes_of_every_family(plain: dict[str, Any], model: dict[str, Any], messages: list[str]) -> None:
    """What ``pretrained`` has may be left out, and is not missing."""
    plain |= {"model": model, "processor": {}}
    with pytest.raises(ConfigError) as error:
        Settings.from_config(plain)
    text = str(error.value)
    assert all(message in text for message in messages), text
    assert len(text.splitlines()) == (1 if len(messages) == 1 else len(messages) + 1), text


@MODELS.register_module(force=True)
class AnnotatedAlone(torch.nn.Module):
    """A user's own model, without a section."""

    def __init__(self, llm: dict[str, int], width: int = 4) -> None:
        super().__init__()

    def forward(self, batch: Any) -> None: ...


@FAMILIES.register_module(force=True)
class OfAnnotatedAlone(Bagel):
    model = AnnotatedAlone
    published = ()


@MODELS.register_module(force=True)
class WithoutFamily(torch.nn.Module):
    """A user's own model of which no family knows how its batches are made."""

    def forward(self, batch: Any) -> None: ...


def test_a_model_that_no_family_has_is_refused(plain: dict[str, Any]) -> None:
    """It would be given the batches of another kind of model."""
    with pytest.raises(ConfigError) as error:
        Runner.from_cfg({**plain, "model": {"type": "WithoutFamily"}, "processor": {}})
    text = str(error.value)
    for words in ("model.type is 'WithoutFamily', and no registered family has this model", "DecoderLM", "UnifiedModel",
                  "VLM, or a subclass of one", "custom_imports", "docs/extending/model.md"):  # fmt: skip
        assert words in text, text


def test_a_users_own_model_is_checked_by_its_annotations(plain: dict[str, Any]) -> None:
    plain |= {"model": {"type": "AnnotatedAlone", "llm": {"any": 3}}, "processor": {}}
    assert Settings.from_config(plain).model.arguments == {"llm": {"any": 3}}
    plain["model"] |= {"llm": {"any": "3"}, "width": "4", "vit": {}}
    with pytest.raises(ConfigError) as error:
        Settings.from_config(plain)
    text = str(error.value)
    for words in (
        "model.llm is {'any': '3'}",
        "model.width is '4'",
        "model has no key 'vit' (AnnotatedAlone). Remedy: valid: llm, width",
    ):
        assert words in text, text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: CheckpointHook(0), "CheckpointHook.interval is 0. Allowed: a number above 0, or -1"),
        (lambda: ImageTransform(8, 8, 0), "ImageTransform.stride is 0. Allowed: a whole number of at least 1"),
        (lambda: ImageTransform(8, 16, 4), "min_size and stride of at most max_size"),
        (lambda: FluxAutoencoder(base_channels=48), "multiples of 32"),
        (lambda: LinearLR(start_factor=2), "LinearLR.start_factor is 2. Allowed: a number from 0 to 1"),
    ],
)
def test_a_direct_call_with_a_wrong_value_raises_the_same_error(call: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        call()
    assert message in str(error.value)
    assert CheckpointHook(-1.0, max_keep_ckpts=-1).interval == -1 and CheckpointHook(0.5).interval == 0.5
