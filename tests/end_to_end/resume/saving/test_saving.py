"""Saves of whole runs: on full disks, in folders that move, before a power cut. Through ``Runner`` and ``main``."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.support import tree
from tests.end_to_end.resume.ended_processes.test_launchers import written_config
from tests.support.processes import ranks
from tests.tiny import tiny_config
from tools.train import main
from unigen_ds.checkpoint import manifest as manifest_module
from unigen_ds.checkpoint import store
from unigen_ds.config.python_text import config_text
from unigen_ds.config.registry import HOOKS
from unigen_ds.core.errors import ConfigError, SaveError
from unigen_ds.examples.digits.dataset import write_digits
from unigen_ds.hooks.base import Hook
from unigen_ds.runner import Runner
from unigen_ds.system.dist import free_port
from unigen_ds.system.journals import read_lines

JOURNALS = ("metrics.jsonl", "ledger.jsonl", "skipped_samples.jsonl")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Digits of which every third image is damaged, so that samples are skipped in nearly every update."""
    root = write_digits(tmp_path_factory.mktemp("data") / "digits")
    for path in sorted(root.rglob("*.png"))[::3]:
        path.write_bytes(path.read_bytes()[:45])
    return root


def config(work_dir: Path, data: Path, **overrides: Any) -> Any:
    options: dict[str, Any] = dict(
        train_cfg={"max_updates": 6},
        train_dataloader__batch_size=2,
        train_dataloader__max_skipped_fraction=0.9,
        default_hooks__checkpoint__interval=2,
        default_hooks__checkpoint__by_epoch=False,
        model__llm__hidden_size=16,
    )
    return tiny_config(work_dir, data, **{**options, **overrides})


@HOOKS.register_module()
class AtUpdatesHook(Hook):
    """Calls ``actions[n]`` (a function's name) with the run before update n + 1 begins."""

    def __init__(self, *, actions: dict[str, str]) -> None:
        self.actions = actions

    def before_update(self, run) -> None:
        if (name := self.actions.get(str(run.progress.updates))) is not None:
            globals()[name](run)


def at(**actions: str) -> dict[str, Any]:
    """``at(_3="fill")``: after update 3, that function."""
    return {"type": "AtUpdatesHook", "actions": {number[1:]: name for number, name in actions.items()}}


# ---- what a save has on disk before the checkpoint exists -----------------------------------------------------------


class Disk:
    """Which bytes of which file were flushed, as of every rename of a checkpoint."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flushed: dict[str, int] = {}
        self.at_commit: list[tuple[list[Path], dict[str, int], dict[str, str]]] = []
        fsync, rename = os.fsync, os.replace

        def counted_fsync(descriptor: int) -> None:
            fsync(descriptor)
            self.flushed[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size

        def watched_rename(source: Any, target: Any) -> None:
            if store.is_checkpoint_name(Path(target).name):
                journals = {name: Path(target).with_name(name) for name in JOURNALS}
                texts = {name: path.read_text() for name, path in journals.items() if path.exists()}
                self.at_commit.append(([Path(source), *Path(source).rglob("*")], dict(self.flushed), texts))
            rename(source, target)

        monkeypatch.setattr(os, "fsync", counted_fsync)
        monkeypatch.setattr(os, "replace", watched_rename)


def test_a_checkpoint_never_outlives_its_log_lines(tmp_path, data, monkeypatch):
    """A power cut after the commit takes no line of the journals, no file of the checkpoint, and no folder."""
    disk = Disk(monkeypatch)
    work_dir = tmp_path / "new" / "run"
    ema = dict(type="EMAHook", momentum=0.1)
    settings = config(
        work_dir, data, train_cfg={"max_updates": 5}, default_hooks__logger__interval=1000, custom_hooks=[ema]
    )
    Runner.from_cfg(settings).train()
    assert [len(stage_paths) > 5 for stage_paths, _, _ in disk.at_commit] == [True] * 3
    for stage_paths, flushes, texts in disk.at_commit:
        assert set(texts) >= set(JOURNALS[:2])
        for name, text in texts.items():
            assert flushes[str(work_dir / name)] == len(text.encode()), name
        for path in (*stage_paths, work_dir, work_dir.parent, work_dir.parent.parent):
            assert str(path) in flushes, path
    assert set(disk.at_commit[-1][2]) == set(JOURNALS)
    updates = [json.loads(line)["update"] for line in disk.at_commit[-1][2]["metrics.jsonl"].splitlines()]
    assert updates == [1, 5], "the line of the last update is there before the last checkpoint"


@HOOKS.register_module(force=True)
class StatefulHook(Hook):
    """Has a state, which is a tensor from the update ``since`` on."""

    name = "stateful"

    def __init__(self, since: int) -> None:
        self.since, self.updates = since, 0

    def after_update(self, run, result) -> None:
        self.updates = run.progress.updates

    def state_dict(self):
        return {"best": torch.ones(1) if self.updates >= self.since else 1.0}


def test_a_state_that_is_not_json_is_refused_at_the_start_and_in_the_dry_run(tmp_path, data, capsys):
    settings = config(tmp_path, data, custom_hooks=[dict(type="StatefulHook", since=0)])
    problem = "the state of the hook 'stateful' cannot be stored as JSON: Object of type Tensor is not"
    with pytest.raises(ConfigError, match=problem):
        Runner.from_cfg(settings).train()
    assert not read_lines(tmp_path / "metrics.jsonl") and not store.list_checkpoints(tmp_path)
    (tmp_path / "given.py").write_text(config_text(settings.to_dict()))
    assert main([str(tmp_path / "given.py"), "--dry-run", "--batches", "1"]) == 1
    assert problem in capsys.readouterr().out


def test_a_state_that_is_not_json_later_fails_the_save_with_the_hooks_name(tmp_path, data, capsys):
    settings = config(tmp_path, data, train_cfg={"max_updates": 4}, custom_hooks=[dict(type="StatefulHook", since=3)])
    with pytest.raises(SaveError, match="hook 'stateful' cannot be stored") as error:
        Runner.from_cfg(settings).train()
    assert "free disk space" not in str(error.value) and "x.tolist()" in str(error.value)
    assert [one.path.name for one in store.list_checkpoints(tmp_path)] == ["iter_2.pth"]


# ---- what a resume reports ------------------------------------------------------------------------------------------


def test_a_newest_checkpoint_that_is_gone_and_other_code_are_warnings(tmp_path, data, capsys, monkeypatch):
    def resume(*names: str) -> str:
        """The last start's log, after these were deleted."""
        for name in names:
            path = tmp_path / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        before = len(log.read_text(encoding="utf-8"))
        Runner.from_cfg(config(tmp_path, data, resume=True), max_updates=6).train()
        return log.read_text(encoding="utf-8")[before:]

    log = tmp_path / "train.log"
    Runner.from_cfg(config(tmp_path, data)).train()
    (tmp_path / "given.py").write_text(config_text(config(tmp_path, data, resume=True).to_dict()))
    shutil.rmtree(tmp_path / "iter_6.pth")
    rest = "2 updates after update 4, which metrics.jsonl has, are trained again."
    warning = f"Not resumed from {tmp_path / 'iter_6.pth'}: last_checkpoint names it, and it is not there; {rest}"
    assert main([str(tmp_path / "given.py"), "--dry-run", "--batches", "1"]) == 0
    assert warning in capsys.readouterr().out
    assert f"WARNING {warning}" in resume()
    assert "Not resumed" not in (text := resume()) and "are trained again" not in text and "source" not in text
    monkeypatch.setattr(manifest_module, "source_digest", lambda: "0123456789abcdef")
    text = resume("iter_6.pth", "last_checkpoint")
    assert f"WARNING Not resumed from a newer checkpoint: none was completed, or it is gone; {rest}" in text
    assert re.search(r"WARNING Checklist, versions: unigen_ds source \w{16} -> unigen_ds source 0123456789abcdef", text)
    text = resume("iter_2.pth", "iter_4.pth", "iter_6.pth", "last_checkpoint")
    assert "none was completed, or it is gone; 6 updates after update 0, which" in text


# ---- a full disk ----------------------------------------------------------------------------------------------------


def fill(run) -> None:
    status = os.statvfs(run.work_dir)
    (run.work_dir.parent / "ballast").write_bytes(b"x" * (status.f_bavail * status.f_frsize))


def free(run) -> None:
    (run.work_dir.parent / "ballast").unlink()


def terminate(run) -> None:
    fill(run)
    os.kill(os.getpid(), signal.SIGTERM)


def test_lines_that_could_not_be_written_are_written_later(small_disk, tmp_path, data, capsys):
    """From update 3 to 40 nothing can be written: one warning a file, and every line at its place in the end."""
    options = dict(train_cfg={"max_updates": 42}, default_hooks__checkpoint__interval=8)
    Runner.from_cfg(config(tmp_path / "straight", data, **options)).train()
    full = small_disk / "run"
    capsys.readouterr()
    Runner.from_cfg(config(full, data, **options, custom_hooks=[at(_3="fill", _40="free")])).train()
    output = capsys.readouterr().err
    assert output.count("metrics.jsonl cannot be written") == 1
    failures = [line for line in output.splitlines() if " ERROR " in line]
    assert [re.search(r"iter_\d+", line)[0] for line in failures] == [f"iter_{n}" for n in (8, 16, 24, 32, 40)]  # type: ignore[index]
    assert all("Training continues without this checkpoint." in line and " are free" in line for line in failures)
    assert all(re.search(r"run/\w+\.jsonl'", line) for line in failures[1:]), "a save first writes the pending lines"
    assert output.count("train.log cannot be written") == 1 and "Traceback" not in output
    for name in JOURNALS:
        same = [
            [{k: v for k, v in line.items() if not k.startswith(("time/", "tokens_", "samples_", "tflops", "memory"))}
             for line in read_lines(folder / name)]
            for folder in (tmp_path / "straight", full)
        ]  # fmt: skip
        assert same[0] == same[1] and len(same[0]) > 1, name
    assert [line["update"] for line in read_lines(full / "metrics.jsonl")] == list(range(1, 43))
    assert [checkpoint.path.name for checkpoint in store.list_checkpoints(full)] == ["iter_42.pth"]
    assert not list(full.glob("*.tmp-*"))
    assert (
        tree(full / "iter_42.pth")["model.safetensors"]
        == tree(tmp_path / "straight" / "iter_42.pth")["model.safetensors"]
    )


@pytest.mark.parametrize("action", ["fill", "terminate"])
def test_the_last_save_and_that_on_a_signal_end_with_status_4(small_disk, data, tmp_path, action, capsys):
    before = signal.getsignal(signal.SIGTERM)
    path = written_config(tmp_path, data, train_cfg={"max_updates": 3}, custom_imports={"imports": [__name__]},
                          custom_hooks=[at(_1=action)])  # fmt: skip
    try:
        status = main([path, "--work-dir", str(small_disk / "run")])
    finally:
        signal.signal(signal.SIGTERM, before)
    output = capsys.readouterr().err
    assert status == SaveError.exit_status == 4
    assert re.search(r"could not write checkpoint \S+/run/iter_\d\.pth: .*it needs .* bytes are free", output)
    assert "Traceback" not in output and not list((small_disk / "run").glob("*.pth*"))


TRAIN = """
import os, sys
from tools.train import main
config, disk, port, backend = sys.argv[1:]
arguments = [config, "--backend", backend, "--launcher", "pytorch", "--work-dir"]
if backend == "fsdp":
    print(main([*arguments, f"{disk}/first"]), flush=True)
    if os.environ["RANK"] == "0":
        os.unlink(f"{disk}/ballast")
    os.environ["MASTER_PORT"] = port
sys.argv[1:] = [*arguments, f"{disk}/second"]
main()
"""


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed:zero2"])
def test_two_processes_end_with_status_4(small_disk, data, tmp_path, backend):
    """``main``, and as a command; DeepSpeed, which keeps its process groups, as a command alone. One error in all."""
    calls = 1 if backend == "fsdp" else 0
    path = written_config(tmp_path, data, train_cfg={"max_updates": 2}, custom_imports={"imports": [__name__]},
                          custom_hooks=[at(_0="fill_once")])  # fmt: skip
    processes = ranks([sys.executable, "-c", TRAIN, path, str(small_disk), str(free_port()), backend])
    assert [(one.out.splitlines().count("4"), one.status) for one in processes] == [(calls, 4)] * 2, processes
    assert [one.err.count("could not write checkpoint") for one in processes] == [calls + 1, 0], processes
    assert not list(small_disk.glob("*/*.pth*"))


def fill_once(run) -> None:
    if int(os.environ.get("RANK", "0")) == 0 and not (run.work_dir.parent / "ballast").exists():
        fill(run)


# ---- a work dir that moves ------------------------------------------------------------------------------------------


def move(run) -> None:
    run.work_dir.rename(run.work_dir.with_name("elsewhere"))


def move_back(run) -> None:
    run.work_dir.with_name("elsewhere").rename(run.work_dir)


def test_a_work_dir_that_is_moved_and_moved_back(tmp_path, data, capsys):
    """The save in between fails, and makes no second folder; the next one succeeds, and no line is missing."""
    run = tmp_path / "run"
    Runner.from_cfg(config(run, data, custom_hooks=[at(_1="move", _3="move_back")])).train()
    assert [checkpoint.path.name for checkpoint in store.list_checkpoints(run)] == ["iter_4.pth", "iter_6.pth"]
    assert [line["update"] for line in read_lines(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    output = capsys.readouterr().err
    assert output.count("was moved or deleted during the run") == 1 and "Remedy: move it back" in output
