"""What a start prints: a short and complete account of the run; nothing of libraries in which there is nothing to do,
and everything else of them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.needs import slow
from tests.support.processes import ENVIRONMENT, run
from tests.text_run import text_config, words
from tools import train

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


TOOL = str(ROOT / "tools" / "train.py")
LINE = re.compile(r"\d\d:\d\d:\d\d INFO ")
STATED = ("unigen_ds 1.", "Output: ", "Data, ", "Effective batch: ", "Model: ", "Engine: ", "Memory: ", "Schedule: ")
MOST_LINES = 25
LAUNCHER = ["", "*" * 41, "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid "
            "your system being overloaded, please further tune the variable for optimal performance in your "
            "application as needed. ", "*" * 41]  # fmt: skip
"""What torchrun itself prints before the processes begin."""
CASES = [
    ("unified_digits", 1, "single"),
    *slow(
        ("unified_digits", 2, "fsdp"),
        ("unified_digits", 2, "deepspeed:zero2"),
        ("unified_emoji", 1, "single"),
        ("unified_emoji", 2, "fsdp"),
    ),
]


@pytest.mark.parametrize("config, processes, backend", CASES)
def test_a_start_is_readable(config: str, processes: int, backend: str, tmp_path: Path) -> None:
    """All output until the line of update 1, whoever wrote it; the last line has the command that comes next."""
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)] if processes > 1 else []
    command = [sys.executable, *launcher, TOOL, config, "--backend", backend, "--work-dir", str(tmp_path / "run"),
               "--max-updates", "1"]  # fmt: skip
    env = {name: value for name, value in ENVIRONMENT.items() if name != "OMP_NUM_THREADS"}
    start = run if (config, processes) == ("unified_digits", 1) else subprocess.run
    how: dict[str, Any] = {} if start is run else {"capture_output": True}
    result = start(command, cwd=tmp_path, env=env, text=True, **how)
    lines = [*result.stdout.splitlines(), *result.stderr.splitlines()]
    assert result.returncode == 0, lines
    first = next(number for number, line in enumerate(lines) if " update 1  " in line)
    assert first < MOST_LINES and [line for line in lines if not LINE.match(line)] in ([], LAUNCHER), lines
    assert [words for words in STATED if not any(words in line for line in lines[:first])] == []
    folder, _, following = lines[-1].partition(" Next: ")
    assert f"Everything is in {tmp_path / 'run'}: iter_1.pth (newest checkpoint), " in folder
    program, _, rest = following.partition("; ")[0].partition(f" {TOOL} ")
    assert program == (f"torchrun --nproc_per_node {processes}" if processes > 1 else "python")
    arguments = train.parser().parse_args(shlex.split(rest))
    assert (arguments.resume, arguments.backend, arguments.max_updates) == ("auto", backend, None)
