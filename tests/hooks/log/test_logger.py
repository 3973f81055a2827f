"""``metrics.jsonl``: the fields of a line, when it is written, the sum over ranks, lines that a resume invalidates."""

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as td

from tests.hooks.tiny_run import TinyRun
from tests.support.processes import ROOT, popen, together
from unigen_ds.hooks.base import Hook
from unigen_ds.hooks.log.journal import LedgerHook
from unigen_ds.hooks.log.logger import LoggerHook, global_losses
from unigen_ds.hooks.log.timer import IterTimerHook
from unigen_ds.system.journals import read_lines


def lines(run: TinyRun) -> list[dict[str, Any]]:
    return read_lines(run.work_dir / "metrics.jsonl")


def test_first_interval_and_last_updates_are_logged(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, [LoggerHook(interval=5)])  # 5 iterations = 10 sequences: crossed at 12, 20, 32
    run.start()
    for _ in range(9):
        run.update()
    run.finish()
    assert [line["update"] for line in lines(run)] == [1, 3, 5, 8, 9]
    assert lines(run)[0]["time/update"] is None, "there is no timer"
    run.call("after_train")
    assert len(lines(run)) == 5, "not twice at the end"


def test_what_a_line_holds(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, [IterTimerHook(), LoggerHook(interval=2)])
    run.start()
    run.update()
    run.update(applied=False)
    run.finish()
    line = lines(run)[1]
    assert (line["update"], line["iteration"], line["epoch"]) == (2, 4, 0.2)
    assert (line["sequences"], line["samples"], line["tokens"]) == (8, 8, 200)
    assert (line["loss/text"], line["loss/image"], line["loss"]) == (2.0, 0.5, 2.25)
    assert (line["lr"], line["lr/connector"]) == (0.1, 0.2) and "lr/base" not in line
    assert line["grad_norm"] is None and line["applied"] is False
    assert line["time/update"] > 0 and line["time/data"] == 0 and line["tokens_per_second"] > 0
    assert 10 < line["memory"] < 100_000


def test_a_term_without_targets_is_null_and_not_in_the_total(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    losses = global_losses(run.update(image=0.0, image_count=0.0))
    assert losses == {"loss": 2.0, "loss/image": None, "loss/text": 2.0}


def sum_over_ranks(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    td.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    own = Path(folder) / str(rank)
    own.mkdir()
    run = TinyRun(own, [LoggerHook(interval=2), LedgerHook()])
    run.start()
    run.update(text=1.5 + 3.0 * rank, image=2.0 * rank)
    run.finish()
    td.destroy_process_group()


def test_losses_are_summed_over_ranks_and_rank_0_alone_writes(tmp_path: Path) -> None:
    code = (
        "import sys; from tests.hooks.log.test_logger import sum_over_ranks as run; run(int(sys.argv[1]), sys.argv[2])"
    )
    commands = [[sys.executable, "-c", code, str(rank), str(tmp_path)] for rank in range(2)]
    for process in together(commands, [{}, {}]):
        assert process.status == 0, process.ending
    (line,) = read_lines(tmp_path / "0" / "metrics.jsonl")
    assert (line["loss/text"], line["loss/image"], line["loss"]) == (2.0, 0.5, 2.25)
    assert len(read_lines(tmp_path / "0" / "ledger.jsonl")) == 1
    assert not list((tmp_path / "1").glob("*.jsonl"))


def hooks() -> list[Hook]:
    return [LoggerHook(interval=2), LedgerHook()]


def test_a_fresh_start_in_a_used_folder_invalidates_all_lines(tmp_path: Path) -> None:
    for text in (3.0, 9.0):
        run = TinyRun(tmp_path, hooks())
        run.start()
        run.update(text=text)
        run.finish()
    assert [line["loss/text"] for line in lines(run)] == [3.0]
    assert len(read_lines(tmp_path / "ledger.jsonl")) == 1


def test_the_ledger_has_every_update(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, hooks())
    run.start()
    for applied in (True, False, True):
        run.update(applied=applied)
    ledger = read_lines(tmp_path / "ledger.jsonl")  # before the end: each line is on disk immediately
    assert ledger[1] == {
        "update": 2, "sequences": [4, 8], "digest": "digest-4", "samples": 4, "skipped": 1, "applied": False,
    }  # fmt: skip
    assert [line["update"] for line in ledger] == [1, 2, 3]
    run.finish()


@pytest.mark.parametrize("columns", [250, 80])
def test_a_terminal_gets_a_live_line_and_warnings_above_it(columns: int, tmp_path: Path) -> None:
    """A narrow one a short line; the file gets the whole line in any case, and no bar."""
    script = (
        "import sys; from pathlib import Path; from tests.hooks.tiny_run import TinyRun\n"
        "from unigen_ds.system import log; from unigen_ds.hooks.log.logger import LoggerHook\n"
        "from unigen_ds.hooks.log.timer import IterTimerHook\n"
        f"log.setup(rank=0, log_file=Path({str(tmp_path / 'train.log')!r}))\n"
        f"run = TinyRun(Path({str(tmp_path)!r}), [IterTimerHook(), LoggerHook(interval=2)])\n"
        "run.start(); run.update(); log.logger().warning('a warning'); run.update(); run.finish()\n"
        "log.logger().info('after')\n"
    )
    main, terminal = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    process = popen(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, stderr=terminal, stdout=subprocess.DEVNULL
    )
    os.close(terminal)
    output = b""
    try:
        while chunk := os.read(main, 65536):
            output += chunk
    except OSError:  # a pseudo-terminal reports the closed other end this way
        pass
    assert process.wait(timeout=60) == 0
    text = output.decode()
    whole = ["loss/text 2", "iteration 4"]
    assert all(part in text for part in ("10.0 %", "update 2  ", "loss 2.25  ", *(whole if columns > 80 else [])))
    assert "…" not in text and ("iteration" in text) == (columns > 80)
    lines = (tmp_path / "train.log").read_text(encoding="utf-8").splitlines()
    assert [line.count("iteration") for line in lines] == [1, 0, 1, 0] and all(part in lines[2] for part in whole)
    assert not [line for line in lines if "10.0 %" in line]
    assert text.index("a warning") < text.index("update 2")
    assert "after" in text
