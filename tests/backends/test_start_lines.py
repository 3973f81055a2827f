"""What a start prints: nothing of libraries in which there is nothing to do, and everything else of them."""

from __future__ import annotations

import importlib
import logging
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.text_run import text_config, words
from unigen_ds.backends.deepspeed_op import NAME, load_shared_memory_op
from unigen_ds.core.log import hide_known

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(600)  # DeepSpeed's operator may have to be compiled
def test_a_start_under_deepspeed_has_our_lines_alone(tmp_path: Path) -> None:
    """mmengine's hooks import bitsandbytes and DeepSpeed; ZeRO-3 calls names that torch has renamed."""
    text_config(tmp_path, [{"text": words(4, k)} for k in range(4)])
    config = tmp_path / "config.py"
    config.write_text(config.read_text().replace("KeepBatches", "mmengine.EmptyCacheHook"))
    command = [sys.executable, "tools/train.py", str(config), "--backend", "deepspeed:zero3"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    lines = [*found.stdout.splitlines(), *found.stderr.splitlines()]
    ours = re.compile(r"\d\d:\d\d:\d\d (INFO|WARNING) ")
    assert [line for line in lines if not ours.match(line)] == [] and len(lines) > 3


def test_other_lines_of_the_libraries_are_shown(caplog: pytest.LogCaptureFixture) -> None:
    renamed = "`torch.distributed.{}` is deprecated. Please use another."
    with warnings.catch_warnings(record=True) as found:
        warnings.resetwarnings()
        hide_known()
        for category, name, module in (
            (FutureWarning, "reduce_scatter_tensor", "torch.distributed.c10d_logger"),  # hidden
            (FutureWarning, "all_gather_into_tensor", "my.own"),
            (UserWarning, "all_gather_into_tensor", "torch.distributed.c10d_logger"),
            (FutureWarning, "all_reduce_coalesced", "torch.distributed.c10d_logger"),
        ):
            warnings.warn_explicit(renamed.format(name), category, "f.py", 1, module=module)
    assert [(one.category, str(one.message)) for one in found] == [
        (FutureWarning, renamed.format("all_gather_into_tensor")),
        (UserWarning, renamed.format("all_gather_into_tensor")),
        (FutureWarning, renamed.format("all_reduce_coalesced")),
    ]
    known = "Setting accelerator to CPU. If you have GPU"
    log = logging.getLogger("DeepSpeed")
    log.addHandler(caplog.handler)  # DeepSpeed's own logger does not pass records on
    try:
        for level, text in ((logging.WARNING, known), (logging.ERROR, known), (logging.WARNING, "another")):
            log.log(level, text)
    finally:
        log.removeHandler(caplog.handler)
    assert {(record.levelname, record.getMessage()) for record in caplog.records} == {
        ("ERROR", known),
        ("WARNING", "another"),
    }


def test_a_compilation_is_logged_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And before the wait for a lock that another process holds, so that rank 0 shows it, whoever compiles."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    caplog.set_level(logging.INFO, "unigen_ds")
    monkeypatch.setattr(logging.getLogger("unigen_ds"), "propagate", True)
    deepspeed_comm = importlib.import_module("deepspeed.comm.torch")
    logged: list[list[str]] = []

    def build() -> str:
        logged.append([record.getMessage() for record in caplog.records])
        (tmp_path / NAME / "built.so").touch()
        return "operator"

    line = f"once, up to two minutes; it is kept in TORCH_EXTENSIONS_DIR={tmp_path}."
    for _ in range(2):
        monkeypatch.setattr(deepspeed_comm, "build_shm_op", build)
        load_shared_memory_op()
    assert [len(lines) for lines in logged] == [1, 1] and line in logged[0][0]
    assert deepspeed_comm.build_shm_op() == "operator", "DeepSpeed builds and prints no second time"
