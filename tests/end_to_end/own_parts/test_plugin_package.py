"""A package of a user's own with the tools as processes: trained, killed, resumed in two processes, exported, asked.

``tests/end_to_end/engines/test_plugin.py`` has every engine.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.end_to_end.engines.jobs.users import write_rows
from tests.support.processes import ROOT, ranks, together
from unigen_ds.core.errors import ConfigError
from unigen_ds.runner import Runner
from unigen_ds.runner.settings.tree import load_config
from unigen_ds.system.journals import read_lines

CONFIG = "tests/plugin/config.py"
UPDATES, KILLED_AT = 6, 3
KILLER = """
import os, signal
from unigen_ds.config.registry import HOOKS
from unigen_ds.hooks.base import Hook

@HOOKS.register_module()
class KillerHook(Hook):
    def before_update(self, run):
        if run.progress.updates == 3:
            os.kill(os.getpid(), signal.SIGKILL)
"""
PROMPT = "[0.5, 1, -1]"


def tool(name: str, *arguments: object) -> list[str]:
    return [sys.executable, f"tools/{name}.py", *map(str, arguments)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that one process began and two have ended."""
    folder = tmp_path_factory.mktemp("plugin")
    write_rows(folder / "rows.txt")
    (folder / "killer.py").write_text(KILLER)
    base = ["--work-dir", folder / "run", "--max-updates", UPDATES, "--cfg-options"]
    options = [f"train_dataloader.dataset.path={folder / 'rows.txt'}"]
    killer = ["custom_imports={'imports':['tests.plugin','killer']}", "custom_hooks=[{'type':'KillerHook'}]"]
    alone = tool("train", CONFIG, *base, *options, "train_dataloader.batch_size=8", *killer)
    [process] = together([alone], [{"PYTHONPATH": f"{ROOT}:{folder}"}])
    assert process.status == -signal.SIGKILL, process.ending
    for rank in ranks(tool("train", CONFIG, "--resume", "--backend", "fsdp", *base, *options)):
        assert rank.status == 0, rank.ending
    return folder


def test_it_continues_after_the_last_checkpoint(folder: Path) -> None:
    lines = list(read_lines(folder / "run" / "metrics.jsonl"))
    assert [line["update"] for line in lines if "loss" in line] == list(range(1, UPDATES + 1))
    log = (folder / "run" / "train.log").read_text(encoding="utf-8")
    assert "losses are the recorded ones (label " in log


def test_the_tools_export_and_ask_it_with_permission_alone(folder: Path) -> None:
    refusal, export, generation = together(
        [
            tool("generate", folder / "run", "--prompt", PROMPT, "--out", folder / "refused"),
            tool("export", folder / "run", folder / "exported", "--allow-custom-imports"),
            tool("generate", folder / "run", "--prompt", PROMPT, "--out", folder / "asked", "--allow-custom-imports"),
        ],
        [{}, {}, {}],
    )
    assert refusal.status == 2 and "imports tests.plugin" in refusal.text and export.status == 0, export.ending
    [again] = together(
        [tool("generate", folder / "exported", "--prompt", PROMPT, "--out", folder / "again", "--config", CONFIG)], [{}]
    )
    texts = [json.loads((folder / name / "results.jsonl").read_text())["text"] for name in ("asked", "again")]
    assert again.status == generation.status == 0 and texts[0] == texts[1] and texts[0] in generation.out


def test_a_name_that_is_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in_use.py").write_text(KILLER.replace("KillerHook", "EMAHook"))
    monkeypatch.syspath_prepend(str(tmp_path))
    options = {"custom_imports": {"imports": ["tests.plugin", "in_use"]}, "work_dir": str(tmp_path)}
    with pytest.raises(ConfigError, match="'in_use' registers a name that is in use: EMAHook is already registered"):
        Runner.from_cfg(load_config(CONFIG, options))
