"""``metrics.jsonl``: the fields of a line, when it is written, the sum over ranks, lines that a resume invalidates."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td

from tests.hooks.tiny_run import TinyRun
from tests.support.processes import together
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
