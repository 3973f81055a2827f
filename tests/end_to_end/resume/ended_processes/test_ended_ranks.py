"""A rank that ends, however it does, is named in ``train.log`` of rank 0 with its error, and the others end soon."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest

from tests.data.support import write_jsonl
from tests.end_to_end.resume.ended_processes.test_launchers import TRAIN, torchrun
from tests.support.needs import slow
from tests.support.processes import ENVIRONMENT, ROOT, popen, ranks, together
from tests.text_run import CONFIG, WORDS, words
from unigen_ds.system.dist import free_port

HOOK = '''
import multiprocessing, os, signal, threading, time
from unigen_ds.system import dist
from unigen_ds.config.registry import HOOKS
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.hooks.base import Hook


@HOOKS.register_module()
class EndingHook(Hook):
    """``how``: ``WHEN RANK ACTION``."""

    def __init__(self, how: str, other: str = "") -> None:
        self.acts = [one.split() for one in (how, other) if one]
        self.act("built", dist.env_rank())

    def act(self, now, rank):
        for when, of, action in self.acts:
            if (when, int(of)) != (now, rank):
                continue
            if action == "raise":
                raise RuntimeError(f"rank {rank} fails alone")
            while action == "loop":
                pass
            if action == "lock":
                UnifiedGenerationDataset.sample = lambda *_, **__: [lock.acquire() for lock in [threading.Lock()] * 2]
                return
            if action == "worker":
                multiprocessing.active_children()[0].kill()
            else:
                os.kill(os.getpid(), getattr(signal, action))

    def before_run(self, run):
        self.act("start", dist.rank())

    def before_train_iter(self, run, index, batch):
        if run.progress.updates == 1:
            self.act("update", dist.rank())
'''


def write_command(
    folder: Path, how: str, other: str = "", *, timeout_s: float = 600.0, workers: int = 0, backend: str = "fsdp"
) -> list[str]:
    """The command that trains two ranks of which one acts so."""
    (folder / "ending_hook.py").write_text(HOOK, encoding="utf-8")
    data = write_jsonl(folder / "train.jsonl", [{"text": words(3 + i % 4, i)} for i in range(300)])
    text = CONFIG.format(words=list(WORDS), data=str(data), work_dir=str(folder / "run"))
    text += f"""
custom_imports = dict(imports=["ending_hook"])
custom_hooks = [dict(type="EndingHook", how={how!r}, other={other!r})]
backend = dict(type={backend!r})
env = dict(dist_timeout_s={timeout_s})
train_dataloader.update(num_workers={workers})
"""
    (folder / "config.py").write_text(text, encoding="utf-8")
    return [sys.executable, TRAIN, str(folder / "config.py")]


def log_of(folder: Path) -> str:
    path = folder / "run" / "train.log"
    return path.read_text(encoding="utf-8") if path.exists() else ""


@contextmanager
def start(command: list[str], *, world_size: int = 2, number: int = 2) -> Iterator[list[Popen[Any]]]:
    """The first ``number`` ranks; those that have not ended are killed."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    processes = [
        popen(command, cwd=ROOT, env={**ENVIRONMENT, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
              stdout=PIPE, stderr=PIPE, text=True)
        for rank in range(number)
    ]  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("built 1 raise", "rank 1 has ended: RuntimeError: rank 1 fails alone"),
        ("start 1 raise", "rank 1 has ended: RuntimeError: rank 1 fails alone"),
        ("update 1 raise", "rank 1 has ended: RuntimeError: rank 1 fails alone"),
        ("update 1 worker", r"rank 1 has ended: .*worker.*"),
        (
            "update 1 SIGKILL",
            r"rank 1 does not answer \(.*onnection.*\); rank 0 waits: update 2.*Remedy: .*out of memory",
        ),
    ],
    ids=["built-raise", "start-raise", "update-raise", "update-worker", "update-killed"],
)
def test_the_log_of_rank_0_has_the_rank_and_its_error(tmp_path: Path, how: str, message: str) -> None:
    """Without a launcher that would end the other."""
    first, second = ranks(write_command(tmp_path, how, workers=int("worker" in how)))
    assert first.status == 1 and second.status != 0, first.ending + second.ending
    assert len(re.findall(f"ERROR {message}", log_of(tmp_path))) == 1, first.ending + second.ending
    assert "Traceback" not in first.text
    if "raise" in how:
        assert "RuntimeError: rank 1 fails alone" in second.text


@pytest.mark.slow
def test_torchrun_prints_the_cause(tmp_path: Path) -> None:
    process = torchrun(*write_command(tmp_path, "update 1 raise")[2:])
    _, _, of_torchrun = process.text.partition("FAILED")
    assert "rank 1 fails alone" in of_torchrun and process.status == 1, process.ending
    assert "To enable traceback" not in of_torchrun and "ERROR rank 1 has ended: Runtime" in log_of(tmp_path)


@pytest.mark.parametrize(
    ("how", "backend", "behind", "place"),
    [
        ("update 1 SIGSTOP", "fsdp", "does not answer", None),
        *slow(
            (
                "update 1 loop",
                "deepspeed",
                "does not continue",
                "update 2, hook:EndingHook, .*ending_hook.py:.* in act",
            ),
            ("update 0 lock", "fsdp", "does not continue", "update 3, data, .*ending_hook.py:.* in <listcomp>"),
        ),
    ],
    ids=["stopped-fsdp", "loop-zero2", "lock-of-rank-0-fsdp"],
)
def test_a_stall_ends_at_the_timeout_with_who_is_behind_and_the_stacks(
    tmp_path: Path, how: str, backend: str, behind: str, place: str | None
) -> None:
    """A process that is stopped, an endless loop in a hook, a lock in a data set that is never released."""
    rank, timeout_s, hang = int(how.split()[1]), 10.0, tmp_path / "run" / "hang"
    command = write_command(tmp_path, how, timeout_s=timeout_s, backend=backend)
    with start(command) as processes:
        assert processes[1 - rank].wait(timeout=120) == 1
        ended_at = time.time()
        if place is not None:  # it ends by itself, without a launcher
            assert processes[rank].wait(timeout=30) == 1
        else:
            assert processes[rank].poll() is None
            processes[rank].kill()
        texts = [process.communicate()[1] for process in processes]
        message = f"rank {rank} {behind}" + r" \(.*([Tt]imed out|timeout).*\)" + (f": {place}" if place else "")
        waits = f"; rank {1 - rank} waits: update [23], .* in all_"
        assert re.search(f"ERROR .*{message}.*{waits}", log_of(tmp_path) + texts[1 - rank]), texts
        assert re.search(f"WARNING .*No progress: rank {rank} {behind}", log_of(tmp_path) + texts[1 - rank])
    files = {int(file.stem[-1]): file for file in hang.iterdir()}
    assert set(files) == ({1 - rank} if place is None else {0, 1})
    for number, file in files.items():
        text = file.read_text(encoding="utf-8")
        assert f"rank: {number}\n" in text and "samples: train:" in text and "in train_update\n" in text
        assert ended_at - file.stat().st_mtime < 0.1 * timeout_s + 15, "it ends within a few seconds after the timeout"
    if place is not None:
        assert "ending_hook.py" in files[rank].read_text(encoding="utf-8")


def test_a_rank_that_was_not_started_is_named_at_the_timeout(tmp_path: Path) -> None:
    with start(write_command(tmp_path, "never 0 raise", timeout_s=2.0), number=1) as (first,):
        assert first.wait(timeout=120) == 1
        assert "ERROR rank 1 is not here 2 s after this process" in log_of(tmp_path), first.communicate()[1]


def test_a_rank_without_a_package_is_named(tmp_path: Path) -> None:
    """It is found before anything large is imported."""
    command = write_command(tmp_path, "never 0 raise")
    other = f"""
import sys
from tools import train
train.machine.REQUIREMENTS["torch"] = ">=99"
sys.exit(train.main({command[2:]}))
"""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    environments = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    first, second = together([command, [sys.executable, "-c", other]], environments)
    assert (first.status, second.status) == (2, 2), first.ending + second.ending
    assert re.search(r"ERROR rank 1 has ended: torch \S+ is installed", log_of(tmp_path)), first.ending
    assert "error: torch" in second.text


def test_the_end_of_rank_0_is_reported_by_the_others(tmp_path: Path) -> None:
    first, second = ranks(write_command(tmp_path, "update 0 SIGKILL"))
    assert (first.status, second.status) == (-signal.SIGKILL, 1), first.ending + second.ending
    assert "[rank 1] rank 0 has ended" in second.text and "Traceback" not in second.text, second.ending
