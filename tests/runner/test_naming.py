"""The name of a run from a template, and a folder for each run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_config
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.progress import Geometry
from unigen_ds.examples.digits.dataset import write_digits
from unigen_ds.runner import Runner
from unigen_ds.runner.naming import NANOVLM, filled
from unigen_ds.runner.settings import Settings


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("data") / "digits")


@dataclass
class Part:
    name: str
    arguments: dict[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        return self.arguments.get(key, default)


def test_nanovlms_name(tmp_path: Path, digits: Path) -> None:
    groups = [{"pattern": "vit", "name": "vision", "lr": 5e-5}, {"pattern": "llm", "name": "language", "lr": 5e-5}]
    config = tiny_config(
        tmp_path,
        digits,
        optim_wrapper__paramwise_cfg={"groups": groups},
        optim_wrapper__optimizer__lr=0.00512,
        train_cfg={"_delete_": True, "max_updates": 40000},
    )
    settings = Settings.from_config(config)
    weights = {"vit": "google/siglip2-base-patch16-512", "llm": "HuggingFaceTB/SmolLM2-360M-Instruct"}
    model: Any = Part("VLM", {"pretrained": weights})
    settings = settings.model_copy(update={"model": model, "processor": {"max_image_size": 2048}})
    found = filled(NANOVLM, settings, Geometry(2, 8, 8), date="1229-143022")
    assert found == (
        "nanoVLM_siglip2-base-patch16-512_2048_mp4_SmolLM2-360M-Instruct_8xGPU_bs128_40000"
        "_lr_vision_5e-05-language_5e-05-0.00512_1229-143022"
    )
    with pytest.raises(ConfigError, match=r"visualizer\.run_name has size\. Allowed: fields model"):
        filled("{size}", settings, Geometry(2), date="")


def test_a_folder_for_each_run_that_a_resume_finds_again(tmp_path: Path, digits: Path) -> None:
    def train(updates: int, **settings: Any) -> Path:
        given = {"visualizer": {"run_name": "{model}_{seed}_{date}"}, "train_dataloader__batch_size": 4, **settings}
        config = tiny_config(tmp_path / "{run_name}", digits, train_dataloader__packing=None, **given)
        runner = Runner.from_cfg(config, max_updates=updates)
        assert runner.train().updates == updates
        return runner.work_dir

    first = train(1)
    assert re.fullmatch(r"UnifiedModel_42_\d{4}-\d{6}", first.name) and (first / "metrics.jsonl").exists()
    assert train(2, resume="auto") == first
    other = train(1, randomness__seed=1, resume="auto")
    assert other.name.startswith("UnifiedModel_1_")
    assert {path.name for path in tmp_path.iterdir()} == {first.name, other.name}
