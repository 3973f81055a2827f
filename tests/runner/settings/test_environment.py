"""``env`` of a config, the check of bf16, what a vision tower keeps, and generators of another device: real runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as td
from PIL import Image, PngImagePlugin

from tests.tiny import tiny_config
from unigen_ds.core.errors import ConfigError
from unigen_ds.data.images.image_files import image_header
from unigen_ds.data.index import index as index_module
from unigen_ds.runner import Runner
from unigen_ds.runner.settings import environment
from unigen_ds.system import dist
from unigen_ds.system.journals import read_lines
from unigen_ds.system.machine import TOKENIZER_THREADS
from unigen_ds.system.seeding import rng_state, set_rng_state

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


@pytest.fixture
def torch_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put back what a run sets for its whole process."""
    for name in (ALLOCATOR, "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "x")  # so that it is put back as it was
        monkeypatch.delenv(name)
    old = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(old[0])
    torch.backends.cudnn.allow_tf32 = old[1]
    torch.use_deterministic_algorithms(False)


def train(tmp_path: Path, updates: int = 1, **overrides: Any) -> Runner:
    runner = Runner.from_cfg(tiny_config(tmp_path / "run", tmp_path / "data", **overrides), max_updates=updates)
    runner.train()
    return runner


def test_settings_of_torch(tmp_path: Path, torch_settings: None) -> None:
    env = {"matmul_precision": "high", "deterministic": True, "cuda_allocator": "expandable_segments:True"}
    train(tmp_path, env=env)
    assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.allow_tf32
    assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ[ALLOCATOR] == "expandable_segments:True"
    train(tmp_path / "again", env={"matmul_precision": "highest", "deterministic": False})
    assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cudnn.allow_tf32
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_environment_has_the_last_word(
    tmp_path: Path, torch_settings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    monkeypatch.setattr(environment.logger(), "warning", lambda text, *values: texts.append(text % values))
    monkeypatch.setenv(ALLOCATOR, "max_split_size_mb:64")
    train(tmp_path, env={"cuda_allocator": "expandable_segments:True"})
    assert os.environ[ALLOCATOR] == "max_split_size_mb:64"
    assert any("max_split_size_mb:64 of the environment is used, not env.cuda_allocator" in text for text in texts)


def test_defaults_that_a_users_value_overrides(
    tmp_path: Path, torch_settings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the allocator and of tokenizers, in the process and where records are planned."""
    values: list[str | None] = []
    count = index_module.count
    monkeypatch.setattr(
        index_module, "count", lambda *a, **k: (values.append(os.environ.get(TOKENIZER_THREADS)), count(*a, **k))[1]
    )
    monkeypatch.setenv(TOKENIZER_THREADS, "x")
    monkeypatch.delenv(TOKENIZER_THREADS)
    train(tmp_path)
    assert (os.environ[ALLOCATOR], os.environ[TOKENIZER_THREADS]) == ("expandable_segments:True", "false")
    monkeypatch.setenv(TOKENIZER_THREADS, "true")
    monkeypatch.delenv(ALLOCATOR)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    train(tmp_path / "again")
    assert os.environ[TOKENIZER_THREADS] == "true" and ALLOCATOR not in os.environ
    assert {*values} == {"false", "true"}


def test_the_texts_of_a_png_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PIL alone refuses more than 1 MiB in one; a user's own number holds."""
    note = PngImagePlugin.PngInfo()
    note.add_text("comment", "a" * (3 << 20), zip=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png", pnginfo=note)
    assert image_header(tmp_path / "a.png").size == (8, 8)
    monkeypatch.setattr(PngImagePlugin, "MAX_TEXT_CHUNK", 2 << 20)
    assert "too large" in image_header(tmp_path / "a.png").error


def test_a_generator_of_another_device(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    old_state = {**rng_state(), "cuda": torch.zeros(16, dtype=torch.uint8)}
    numbers = torch.rand(3)
    set_rng_state(old_state)
    assert torch.equal(torch.rand(3), numbers) and "is of a run on CUDA" in caplog.text
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    for number in (1, 1, 2):  # the device's generator follows the stored one, so ranks and updates differ
        state = {key: value for key, value in old_state.items() if key != "cuda"}
        set_rng_state({**state, "torch": torch.Generator().manual_seed(number).get_state()})
    assert seeds[0] == seeds[1] != seeds[2] and "is of a run on a CPU" in caplog.text


def test_after_an_error_a_group_with_nccl_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(td, "is_initialized", lambda: True)
    monkeypatch.setattr(td, "destroy_process_group", lambda: calls.append("destroyed"))
    monkeypatch.setattr(td, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    dist.shutdown(after_error=True)
    assert not calls
    dist.shutdown()
    monkeypatch.setattr(td, "get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    dist.shutdown(after_error=True)
    assert calls == ["destroyed", "destroyed"]


def test_the_device_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(td, "init_process_group", lambda *arguments, **options: None)
    monkeypatch.setenv("WORLD_SIZE", "4")
    for local_rank, count in ((3, 4), (3, 1)):  # a scheduler may let each process see its own device alone
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        dist.init()
    assert devices == [3, 0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="LOCAL_RANK is 3 and there are 2 CUDA devices"):
        dist.init()


@pytest.mark.gpu
def test_losses_on_the_device_are_those_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real update of the tiny model on a GPU; FlexAttention there, scaled dot-product attention here."""
    train(tmp_path / "cuda", updates=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    train(tmp_path / "cpu", updates=2)
    device, cpu = (
        [line["loss"] for line in read_lines(tmp_path / name / "run" / "metrics.jsonl") if "loss" in line]
        for name in ("cuda", "cpu")
    )
    assert device == pytest.approx(cpu, rel=1e-3) and len(cpu) == 2
