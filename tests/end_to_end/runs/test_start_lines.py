"""What a start prints: nothing of libraries in which there is nothing to do, and everything else of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.text_run import text_config, words

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.timeout(600)  # two processes, each of which imports all
def test_a_start_under_deepspeed_has_our_lines_alone(tmp_path: Path) -> None:
    """mmengine's hooks import bitsandbytes and DeepSpeed; ZeRO-3 calls renamed names of torch. None is compiled."""
    text_config(tmp_path, [{"text": words(4, k)} for k in range(4)])
    config = tmp_path / "config.py"
    config.write_text(config.read_text().replace("KeepBatches", "mmengine.EmptyCacheHook"))
    (baton := tmp_path / "built" / "deepspeed_shm_comm" / "lock").parent.mkdir(parents=True)
    baton.touch()
    env = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "built"), "PATH": str(tmp_path)}
    for tool, *options in (["plan.py", "--only", "--world-size", "2"], ["train.py"]):
        command = [sys.executable, f"tools/{tool}", str(config), "--backend", "deepspeed:zero3", *options]
        process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stderr
    assert [path for path in (tmp_path / "built").rglob("*") if path.is_file()] == [baton]
    lines = [*process.stdout.splitlines(), *process.stderr.splitlines()]
    ours = re.compile(r"\d\d:\d\d:\d\d (INFO|WARNING) ")
    assert [line for line in lines if not ours.match(line)] == [] and len(lines) > 3
