"""The name of a run from a template, and a folder for each run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_config
from tools.resume import main as inspect
from unigen_ds.checkpoint import store
from unigen_ds.core.errors import ConfigError, ResumeBlocked
from unigen_ds.core.progress import Geometry
from unigen_ds.runner import Runner
from unigen_ds.runner.settings.naming import name_from_template
from unigen_ds.runner.settings.tree import Settings


def test_fields_of_a_template(tmp_path: Path, digits: Path) -> None:
    """nanoVLM's own name: ``tests/end_to_end/models/test_vlm_run.py``."""
    groups = [{"pattern": "vit", "name": "vision", "lr": 5e-5}, {"pattern": "llm", "name": "language", "lr": 5e-5}]
    changes = {"optim_wrapper__paramwise_cfg": {"groups": groups}, "optim_wrapper__optimizer__lr": 0.00512}
    settings = Settings.from_config(tiny_config(tmp_path, digits, **changes))
    assert name_from_template("{group_lrs}", settings, Geometry(2)) == "vision_5e-05-language_5e-05-0.00512"
    with pytest.raises(ConfigError, match=r"visualizer\.run_name has size\. Allowed: fields model"):
        name_from_template("{size}", settings, Geometry(2), date="")


def test_a_folder_for_each_run_that_a_resume_finds_again(tmp_path: Path, digits: Path) -> None:
    def train(updates: int, **settings: Any) -> Path:
        options = {"visualizer": {"run_name": "{model}_{seed}_{date}"}, "train_dataloader__batch_size": 4, **settings}
        config = tiny_config(tmp_path / "{run_name}", digits, train_dataloader__packing=None, **options)
        runner = Runner.from_cfg(config, max_updates=updates)
        assert runner.train().updates == updates
        return runner.work_dir

    first = train(1)
    assert re.fullmatch(r"UnifiedModel_42_\d{4}-\d{6}", first.name) and (first / "metrics.jsonl").exists()
    assert train(2, resume="auto") == first
    other = train(1, randomness__seed=1, resume="auto")
    assert other.name.startswith("UnifiedModel_1_")
    assert {path.name for path in tmp_path.iterdir()} == {first.name, other.name}


def config_of_size(folder: Path, digits: Path, *, template: str, batch_size: int = 4, **settings: Any) -> Any:
    options = {"visualizer": {"run_name": template}, "train_dataloader__batch_size": batch_size, **settings}
    return tiny_config(
        folder / "{run_name}", digits, train_dataloader__packing=None, on_batch_change="keep-lr", **options
    )


TEMPLATE = "{model}_bs{batch_size:03d}_lr{lr}_{seed}"


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    Runner.from_cfg(config_of_size(folder, digits, template=TEMPLATE), max_updates=1).train()
    return folder


def copy_run(first_run: Path, folder: Path) -> Path:
    shutil.copytree(first_run, folder, dirs_exist_ok=True)
    (run_folder,) = folder.iterdir()
    return run_folder


def test_a_doubtful_resume_is_refused_with_the_commands(first_run: Path, digits: Path, tmp_path: Path) -> None:
    first = copy_run(first_run, tmp_path)
    (checkpoint,) = (one.path for one in store.list_checkpoints(first))
    rate = config_of_size(tmp_path, digits, template=TEMPLATE, resume="auto", optim_wrapper__optimizer__lr=0.25)
    with pytest.raises(ResumeBlocked, match=r"no run is named UnifiedModel_bs004_lr0.25_42") as error:
        Runner.from_cfg(rate)
    assert f"--resume {checkpoint} or --resume --work-dir {first}" in str(error.value)
    second = tmp_path / first.name.replace("bs004", "bs002")
    shutil.copytree(first, second)
    with pytest.raises(ResumeBlocked, match="2 of this template") as error:
        Runner.from_cfg(config_of_size(tmp_path, digits, template=TEMPLATE, batch_size=8, resume=True))
    assert str(first) in str(error.value) and str(second) in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} == {first.name, second.name}
    another = config_of_size(tmp_path, digits, template=TEMPLATE, resume=True, randomness__seed=1)
    assert Runner.from_cfg(another).work_dir == tmp_path / (first.name.removesuffix("42") + "1")
    by_name = config_of_size(tmp_path, digits, template=TEMPLATE, batch_size=8, resume=str(second / checkpoint.name))
    assert Runner.from_cfg(by_name, max_updates=1).work_dir == second


def test_the_inspection_finds_the_same_folder(
    first_run: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = copy_run(first_run, tmp_path)
    config_of_size(tmp_path, digits, template=TEMPLATE).dump(str(tmp_path / "config.py"))
    assert inspect([str(tmp_path / "config.py")]) == 0
    assert str(first) in capsys.readouterr().out
    options = ["--cfg-options", "optim_wrapper.optimizer.lr=0.25"]
    assert inspect([str(tmp_path / "config.py"), *options]) == 3
    assert f"--work-dir {first}" in capsys.readouterr().err
    shutil.rmtree(first)
    assert inspect([str(tmp_path / "config.py")]) == 1
    assert "contains no checkpoint (work_dir is" in capsys.readouterr().err


def test_a_folder_needs_a_template(tmp_path: Path, digits: Path) -> None:
    with pytest.raises(ConfigError, match=r"visualizer.run_name is not given.*visualizer=dict\(run_name='\{model\}"):
        Runner.from_cfg(tiny_config(tmp_path / "{run_name}", digits))
