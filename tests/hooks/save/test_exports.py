"""``PushToHubHook`` in whole runs, with a real server: what arrives there, and that nothing of it can fail a run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hooks.save.test_best import config, log
from tests.support.hub_server import TOKEN, Hub, contents, hub_server
from tests.support.processes import together
from unigen_ds.core.errors import ConfigError
from unigen_ds.runner import Runner
from unigen_ds.runner.open.trained import open_model
from unigen_ds.system.dist import free_port

REPO = "owner/name"
VALUES = [5.0, 2.0, 4.0, 3.0]
"""The best one is after update 2."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with hub_server() as hub:
        hub.use(monkeypatch, tmp_path)
        yield hub


def push_run(folder: Path, *, max_updates: int | None = None, hooks: tuple[Any, ...] = (), **options: Any) -> Runner:
    pushes = {"type": "PushToHubHook", "repo": REPO, **options.pop("push", {})}
    runner = Runner.from_cfg(config(folder, VALUES, hooks=(pushes, *hooks), **options), max_updates=max_updates)
    runner.train()
    return runner


def assert_pushed(hub: Hub, work_dir: Path, checkpoint: Path, *, branch: str = "main") -> None:
    out = work_dir / "published" / checkpoint.name.removesuffix(".pth")
    assert len(contents(out)) > 2 and hub.files(REPO, branch) == contents(out)
    expected = open_model(checkpoint)[0].state_dict()
    state = open_model(out)[0].state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(expected[name], state[name]) for name in expected)


def test_the_best_model_is_pushed(hub: Hub, tmp_path: Path) -> None:
    run = push_run(tmp_path, push={"private": True})
    assert_pushed(hub, run.work_dir, run.work_dir / "iter_2.pth")
    assert hub.repositories[REPO].private
    assert f"Pushed to {hub.url}/{REPO}." in log(tmp_path)


def test_the_last_one_on_a_branch_and_a_resume_pushes_again(hub: Hub, tmp_path: Path) -> None:
    push = {"which": "last", "revision": "try/1"}
    run = push_run(tmp_path, push=push)
    assert_pushed(hub, run.work_dir, run.work_dir / "iter_4.pth", branch="try/1")
    assert hub.files(REPO) == {}
    push_run(tmp_path, push=push, resume=True)
    assert log(tmp_path).count("Pushed to") == 2


def test_after_a_stop_nothing_is_pushed_and_after_early_stopping_the_best(hub: Hub, tmp_path: Path) -> None:
    push_run(tmp_path / "stopped", max_updates=3)
    assert hub.requests == [] and not (tmp_path / "stopped" / "run" / "published").exists()
    assert f"Nothing is pushed to {REPO}: the training is not complete." in log(tmp_path / "stopped")
    early = {"type": "EarlyStoppingHook", "monitor": "val/loss", "patience": 1}
    run = push_run(tmp_path / "early", hooks=(early,))
    assert run.progress.updates == 3
    assert_pushed(hub, run.work_dir, run.work_dir / "iter_2.pth")


@pytest.mark.parametrize(("status", "token", "cause"), [(401, "", "hf auth login"), (None, TOKEN, "http://127.0.0.1:")])
def test_a_failure_is_a_line_in_the_log(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int | None, token: str, cause: str
) -> None:
    hub.status = status
    server = hub if status else Hub(url=f"http://127.0.0.1:{free_port()}")
    server.use(monkeypatch, tmp_path, token=token)
    run = push_run(tmp_path)
    out = run.work_dir / "published" / "iter_2"
    (line,) = [line for line in log(tmp_path).splitlines() if f"The model was not pushed to {REPO}" in line]
    assert cause in line and line.endswith(f"By hand: hf upload {REPO} {out}")
    assert run.finished and len(contents(out)) > 2
    assert ("this machine has no token" in log(tmp_path)) == (not token)


def test_a_failing_export_names_the_command_of_the_tool(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "published").write_text("a file where the folder would be")
    run = push_run(tmp_path, push={"dtype": "bf16", "raw": True, "private": True})
    tool = f"python tools/export.py {run.work_dir / 'iter_2.pth'} {run.work_dir / 'published' / 'iter_2'}"
    assert f"By hand: {tool} --dtype bf16 --raw --push-to-hub {REPO} --private" in log(tmp_path)
    assert run.finished and hub.requests == []


@pytest.mark.parametrize("name", ["name", "a/b/c", "owner/", "/name", "owner/na me", "owner/a..b", "owner/n.git", ""])
def test_a_name_that_cannot_be_one_is_refused_at_the_start(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"custom_hooks.*is no repository of the hub[^$]*OWNER/NAME"):
        push_run(tmp_path, push={"repo": name})
    assert not (tmp_path / "run").exists()


RANK = """
import os, sys, urllib.request
from tests.hooks.save.test_exports import two_ranks
from unigen_ds.system import dist
two_ranks(sys.argv[1])
if os.environ["RANK"] == "1":
    urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/left").read()
dist.shutdown()
"""


def two_ranks(folder: str) -> None:
    """The training of one of two processes."""
    push_run(Path(folder), backend={"type": "fsdp"}, launcher="pytorch")


def test_other_ranks_end_without_waiting_for_the_upload(tmp_path: Path) -> None:
    """The server creates the repository only when rank 1 has left the run."""
    with hub_server(wait=threading.Event()) as hub:
        port = str(free_port())
        shared = {**hub.environment(tmp_path / "home"), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = [{**shared, "RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": "2"} for r in range(2)]
        command = [sys.executable, "-c", RANK, str(tmp_path)]
        for process in together([command, command], ranks):
            assert process.status == 0, process.ending
        assert hub.waited, log(tmp_path)
        assert_pushed(hub, tmp_path / "run", tmp_path / "run" / "iter_2.pth")
