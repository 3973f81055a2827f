"""A whole config in the style of xtuner and F-LMM trains under ZeRO-2, goes on, and its backbones stay frozen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.end_to_end.engines.launch import tensors
from tests.end_to_end.resume.ended_processes.test_launchers import TRAIN
from tests.support import processes
from tests.support.processes import ENVIRONMENT, ROOT, ranks
from unigen_ds.checkpoint import store
from unigen_ds.runner.settings.tree import load_config
from unigen_ds.system.journals import read_lines

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).with_name("frozen_backbones.py")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> tuple[Path, list[str]]:
    """The work dir after four updates and, resumed, two more; what the two starts printed."""
    folder, outputs = tmp_path_factory.mktemp("flmm") / "run", []
    for updates in (4, 6):
        arguments = [str(CONFIG), "--work-dir", str(folder), "--resume", "--max-updates", str(updates)]
        arguments += ["--cfg-options", f"train_dataloader.dataset.root={digits}"]
        processes = ranks([sys.executable, TRAIN, *arguments], LOCAL_WORLD_SIZE="2")
        assert [one.status for one in processes] == [0, 0], processes[0].ending + processes[1].ending
        outputs.append(processes[0].text + processes[1].text)
    return folder, outputs


def test_frozen_backbones_under_zero_2(run: tuple[Path, list[str]]) -> None:
    folder, outputs = run
    assert "checkpoint_hook.CheckpointHook'> is read as the class of that name in unigen_ds" in outputs[0]
    assert [line["update"] for line in read_lines(folder / "metrics.jsonl") if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert "Auto resumed from the latest checkpoint" in outputs[1]
    states = [tensors(c.path) for c in store.list_checkpoints(folder)]
    early, late = states[0], states[-1]
    masters = {name for kind, name in late if kind == "master"}
    same = {name for name in masters if torch.equal(early["master", name], late["master", name])}
    frozen = {name for name in masters if name.startswith(("language_model.", "vit_model.")) or "pos_embed" in name}
    assert same == frozen and len(masters - frozen) >= 6
    assert {name for kind, name in late if kind == "exp_avg"} == masters - frozen


def test_the_config_is_copied_to_the_work_dir(run: tuple[Path, list[str]]) -> None:
    """With what the command line changed, and the run goes on from it; the log beside it was appended to."""
    folder, _ = run
    copy, original = load_config(folder / "config.py"), load_config(CONFIG)
    assert copy.work_dir == str(folder) and "digits" in copy.train_dataloader.dataset.root
    assert {key: copy[key] for key in ("tokenizer", "processor", "train_cfg", "optim_wrapper", "randomness")} == {
        key: original[key] for key in ("tokenizer", "processor", "train_cfg", "optim_wrapper", "randomness")
    }
    assert copy.default_hooks.checkpoint.type == "CheckpointHook", "not mmengine's class"
    command = [sys.executable, str(ROOT / "tools" / "resume.py"), str(folder / "config.py"), "--world-size", "2"]
    process = processes.run(command, text=True, cwd=ROOT, env=ENVIRONMENT)
    assert process.returncode == 0, process.stdout + process.stderr
    log = (folder / "train.log").read_text()
    assert log.count("Auto resumed from the latest checkpoint") == 1 and len(log) > 500
