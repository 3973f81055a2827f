"""``tools/export.py --push-to-hub``: what arrives at a real server, and what is kept and reported where that fails."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hooks.save.test_best import config
from tests.support.hub_server import READ_ONLY, TOKEN, Hub, Repository, contents, hub_server
from tests.support.processes import together
from tools.export import main
from unigen_ds.runner import Runner
from unigen_ds.system.dist import free_port

REPO = "owner/name"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    Runner.from_cfg(config(folder, [2.0, 3.0])).train()
    return folder / "run" / "iter_2.pth"


def test_as_a_process(checkpoint: Path, tmp_path: Path) -> None:
    """Weights as a large file, to a private repository; and without a token, with the command that is then named."""
    tool = [sys.executable, "tools/export.py", str(checkpoint)]
    with hub_server(lfs=(".safetensors",)) as hub:
        first, other = tmp_path / "done", tmp_path / "kept"
        good, bad = together(
            [
                [*tool, str(first), "--push-to-hub", REPO, "--private"],
                [*tool, str(other), "--push-to-hub", "owner/other"],
            ],
            [hub.environment(tmp_path / "home"), hub.environment(tmp_path / "home", token=None)],
        )
        assert good.status == 0, good.ending
        assert good.out.splitlines() == [str(first), f"{hub.url}/{REPO}"]
        assert len(contents(first)) > 2 and hub.files(REPO) == contents(first) and hub.repositories[REPO].private
        assert list(hub.objects.values()) == [(first / "model.safetensors").read_bytes()]
        assert hub.repositories[REPO].messages == ["Upload done"]
        line = bad.err.strip().splitlines()[-1]
        assert bad.status == 1 and "Traceback" not in bad.err and bad.out.splitlines() == [str(other)], bad.ending
        assert (
            line.startswith(f"error: {other} is complete, but was not uploaded to owner/other: ")
            and "hf auth login" in line
        )
        assert line.endswith(f"hf upload owner/other {other}.")
        assert list(hub.repositories) == [REPO]
        again = [sys.executable, "-m", "huggingface_hub.cli.hf", "upload", "owner/other", str(other)]
        (process,) = together([again], [hub.environment(tmp_path / "home")])
        assert process.status == 0, process.ending
        assert hub.files("owner/other") == contents(other) == contents(first)


def test_a_repository_that_exists_and_a_branch_that_does_not(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--push-to-hub", REPO, "--revision", "bf16", "--dtype", "bf16"]
    with hub_server(repositories={REPO: Repository()}) as hub:
        hub.use(monkeypatch, tmp_path)
        assert main([str(checkpoint), str(tmp_path / "out"), *flags]) == 0
        assert len(contents(tmp_path / "out")) > 2 and hub.files(REPO, "bf16") == contents(tmp_path / "out")
        assert hub.files(REPO) == {} and not hub.repositories[REPO].private


@pytest.mark.parametrize(
    ("settings", "token", "flags", "cause"),
    [
        ({}, "hf_wrong", ["--revision", "x"], "its token must be valid"),
        ({}, READ_ONLY, [], "allowed to write there"),
        ({"status": 500}, TOKEN, [], "500"),
        ({"url": "nowhere"}, TOKEN, [], "http://127.0.0.1:"),
        ({"repositories": {REPO: Repository()}}, TOKEN, ["--private"], "exists already and is public"),
    ],
)
def test_a_failing_upload_keeps_the_folder_and_says_how_to_repeat_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    settings: dict[str, Any], token: str, flags: list[str], cause: str,
) -> None:  # fmt: skip
    out = tmp_path / "out"
    with hub_server(**{k: v for k, v in settings.items() if k != "url"}) as hub:
        server = Hub(url=f"http://127.0.0.1:{free_port()}") if "url" in settings else hub
        server.use(monkeypatch, tmp_path, token=token)
        assert main([str(checkpoint), str(out), "--push-to-hub", REPO, *flags]) == 1
        output = capsys.readouterr()
        line = output.err.strip().splitlines()[-1]
        assert line.startswith(f"error: {out} is complete, but was not uploaded") and cause in line
        assert line.endswith(" ".join(["hf", "upload", REPO, str(out), *flags]) + ".")
        assert output.out.splitlines() == [str(out)] and len(contents(out)) > 2
        assert not any(repository.branches["main"] for repository in hub.repositories.values())
