"""A DeepSpeed JSON and our config made one: presets load, "auto" is filled, every contradiction names both values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny import tiny_config
from unigen_ds.backends.deepspeed.deepspeed import DeepSpeedBackend
from unigen_ds.backends.deepspeed.deepspeed_config import fill, load_ds_config, offloads, stage_of
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.progress import Geometry
from unigen_ds.optim.optimizer import OptimizerConfig
from unigen_ds.runner import Runner

GEOMETRY = Geometry(batch_size=3, accumulative_counts=2, dp_size=4)
PRESETS = {
    "zero1": (1, []),
    "zero2": (2, []),
    "zero2_offload": (2, ["offload_optimizer"]),
    "zero3": (3, []),
    "zero3_offload": (3, ["offload_optimizer", "offload_param"]),
}


def fill_config(config: Any, *, precision: str = "fp32", max_norm: float | None = 0.5) -> dict[str, Any]:
    optimizer = OptimizerConfig(precision=precision, max_norm=max_norm)
    return fill(load_ds_config(config), geometry=GEOMETRY, optimizer=optimizer)


def autos(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [auto for inner in value.values() for auto in autos(inner)]
    return [value] if value == "auto" else []


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_load_and_every_auto_is_filled(preset):
    config = load_ds_config(preset)
    assert (stage_of(config), offloads(config)) == PRESETS[preset]
    assert autos(config)
    ours = fill_config(preset)
    assert autos(ours) == []
    assert ours["train_micro_batch_size_per_gpu"] == 3
    assert ours["gradient_accumulation_steps"] == 2
    assert ours["train_batch_size"] == 24
    assert ours["gradient_clipping"] == 0.5
    assert ours["bf16"]["enabled"] is False and ours["fp16"]["enabled"] is False
    assert ours["zero_optimization"]["stage"] == PRESETS[preset][0]


def test_precision_and_absent_clipping_are_filled():
    ours = fill_config("zero2", precision="bf16", max_norm=None)
    assert ours["bf16"]["enabled"] is True and ours["fp16"]["enabled"] is False
    assert ours["gradient_clipping"] == 0.0
    assert ours["data_types"]["grad_accum_dtype"] == "fp32"
    assert ours["communication_data_type"] == "fp32"


def test_fp16_halves_its_loss_scale_at_the_first_overflow_unless_told_otherwise():
    """As every engine here does: DeepSpeed's own default waits for a second."""
    assert fill_config("zero2", precision="fp16")["fp16"] == {"enabled": True, "hysteresis": 1}
    own = {"zero_optimization": {"stage": 2}, "fp16": {"enabled": "auto", "hysteresis": 3}}
    assert fill_config(own, precision="fp16")["fp16"]["hysteresis"] == 3


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"gradient_accumulation_steps": 4}, ("gradient_accumulation_steps", "4", "accumulative_counts", "2")),
        ({"train_batch_size": 99}, ("train_batch_size", "99", "24")),
        ({"bf16": {"enabled": True}}, ("bf16.enabled", "True", "precision", "False")),
        ({"scheduler": {"type": "WarmupLR"}}, ("scheduler", "WarmupLR", "param_scheduler")),
        ({"optimizer": {"type": "Lamb"}}, ("optimizer", "Lamb", "optim_wrapper.optimizer")),
        ({"bf16": {"check_grad_overflow": False}}, ("check_grad_overflow", "all weights non-finite")),
        ({"data_types": {"buffer_dtype": "bf16"}}, ("buffer_dtype", "bf16", "fp32")),
        ({"torch_autocast": {"enabled": True}}, ("torch_autocast", "optim_wrapper.precision")),
        ({"zero_optimization": {"stage": 0}}, ("stage", "0", "1, 2 or 3")),
    ],
)
def test_a_contradiction_names_both_values(extra, words):
    config = {"zero_optimization": {"stage": 2}, **extra}
    with pytest.raises(ConfigError) as error:
        DeepSpeedBackend(config=config).check(
            geometry=GEOMETRY, optimizer_cfg=OptimizerConfig(precision="fp32", max_norm=0.5)
        )
    for word in words:
        assert word in str(error.value), (word, str(error.value))


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'zero2_offload'"):
        DeepSpeedBackend(config="zero2_ofload")


@pytest.mark.parametrize(("text", "word"), [('{"zero_optimization": {"stage": 2}', "cannot be read"), ("[1]", "list")])
def test_a_broken_file_is_named(tmp_path, text, word):
    path = tmp_path / "mine.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=word) as error:
        DeepSpeedBackend(config=str(path))
    assert "mine.json" in str(error.value)


def test_a_file_of_the_users_is_read(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"zero_optimization": {"stage": 3, "offload_param": {"device": "none"}}}', encoding="utf-8")
    backend = DeepSpeedBackend(config=str(path))
    assert backend.stage == 3 and offloads(load_ds_config(path)) == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"stage": 2, "reduce_bucket_size": "x"}, "DeepSpeedZeroConfig: reduce_bucket_size is 'x'"),
        ({"stage": 2, "reduce_bucket_sise": 5}, "reduce_bucket_sise is 5: Extra inputs are not permitted"),
        ({"stage": 3, "offload_optimizer": {"device": "tpu"}}, "offload_optimizer.device is 'tpu': Input should be"),
        ([2], "zero_optimization = [2]"),
    ],
)
def test_what_deepspeed_would_refuse_is_refused_before_processes_join(config, message):
    with pytest.raises(ConfigError) as error:
        DeepSpeedBackend(config={"zero_optimization": config}).check(geometry=GEOMETRY, optimizer_cfg=OptimizerConfig())
    assert message in str(error.value)


def test_a_key_that_deepspeed_passes_over_is_named(caplog):
    config = {"zero_optimization": {"stage": 2}, "gradient_cliping": 1.0}
    with caplog.at_level("WARNING"):
        DeepSpeedBackend(config=config).check(geometry=GEOMETRY, optimizer_cfg=OptimizerConfig())
    assert "does not use 'gradient_cliping' of its config: did you mean 'gradient_clipping'?" in caplog.text


def test_every_preset_is_read_whole(caplog):
    with caplog.at_level("WARNING"):
        for preset in PRESETS:
            DeepSpeedBackend(config=preset).check(geometry=GEOMETRY, optimizer_cfg=OptimizerConfig())
    assert not caplog.text


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_fp16_is_refused_where_deepspeed_cannot_compute_in_it(tmp_path, monkeypatch, stage):
    """Before processes join; DeepSpeed itself raises only when it builds its engine."""
    from deepspeed.accelerator import get_accelerator

    if torch.cuda.is_available():
        pytest.skip("a CUDA device computes in fp16")
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: False)  # a CPU may have the instructions
    config = tiny_config(tmp_path / "run", tmp_path / "digits", backend=dict(type="deepspeed", config=stage),
                         optim_wrapper__precision="fp16")  # fmt: skip
    with pytest.raises(ConfigError, match=r"precision is 'fp16', which DeepSpeed .* Remedy: .* fsdp and single"):
        Runner.from_cfg(config)
    assert not (tmp_path / "run").exists()


HUGGING_FACE = {
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def test_a_json_in_hugging_faces_habit_is_accepted():
    """Its optimizer and scheduler give no value: every one is "auto"."""
    DeepSpeedBackend(config=HUGGING_FACE).check(geometry=GEOMETRY, optimizer_cfg=OptimizerConfig())
    assert not {"optimizer", "scheduler"} & fill_config(HUGGING_FACE).keys()


def test_one_value_of_its_own_is_a_contradiction():
    for section, key in (("optimizer", "lr"), ("scheduler", "warmup_num_steps")):
        options = {**HUGGING_FACE[section]["params"], key: 1}
        with pytest.raises(ConfigError, match=f"has a {section}"):
            fill_config({**HUGGING_FACE, section: {**HUGGING_FACE[section], "params": options}})
