"""One changed bit in any file that a tool reads: the tool names the file, and leaves no output."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.support import flip_byte, tree
from tests.end_to_end.engines.launch import want
from tests.end_to_end.resume.other_trainers.test_reading import (
    config,
    data,  # noqa: F401 - a fixture
)
from tests.support.processes import ROOT, run
from tools.evaluate import main as evaluate
from tools.export import main as export
from tools.generate import main as generate
from tools.zero_to_fp32 import main as merge
from unigen_ds.checkpoint.layouts.safetensors import open_reader
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.config.hub import HubRepo
from unigen_ds.core.errors import CheckpointError
from unigen_ds.runner import Runner
from unigen_ds.system.files import DIGESTS

pytestmark = pytest.mark.timeout(900)
runs = want("layouts")
NOT_READ = ("optimizer.safetensors", "rng/")
Main = Callable[[list[str]], int]


@pytest.fixture(scope="module")
def origin(data: dict, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A checkpoint with an average and a tokenizer, of the layout of ``single``."""
    runner = Runner.from_cfg(config(data, tmp_path_factory.mktemp("trained") / "run"))
    runner.train()
    (checkpoint,) = runner.work_dir.glob("*.pth")
    return checkpoint


def flips(folder: Path) -> Iterator[str]:
    """The name of each file but ``digests.json``, while one bit of it differs: at the begin, inside, at the end."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != DIGESTS):
        content = path.read_bytes()
        for at, bit in ((0, 1), (len(content) // 3, 2), (len(content) // 2, 1), (len(content) - 1, 4)):
            bad = bytearray(content)
            bad[at] ^= bit
            path.write_bytes(bad)
            yield path.relative_to(folder).as_posix()
        path.write_bytes(content)


def of_tools(source: Path, data: dict, out: Path) -> dict[str, tuple[Main, list[str]]]:  # noqa: F811
    """Every tool that reads weights."""
    records = ["--data", data["train_dataloader.dataset.data_path"], "--max-batches", "1"]
    return {
        "export": (export, [str(source), str(out)]),
        "generate": (generate, [str(source), "--prompt", "three", "--out", str(out), "--max-length", "2"]),
        "evaluate": (evaluate, [str(source), *records, "--out", str(out / "values.json")]),
        "merge": (merge, [str(source), str(out)]),
    }


def test_of_a_checkpoint(
    data: dict, origin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]  # noqa: F811
) -> None:  # fmt: skip
    checkpoint, out = Path(shutil.copytree(origin, tmp_path / "iter_2.pth")), tmp_path / "out"
    tools = of_tools(checkpoint, data, out)
    number = 0
    for name in flips(checkpoint):
        for tool, (main, words) in tools.items() if not name.startswith(NOT_READ) else ():
            assert main(words) == 1, (tool, name)
            assert name in capsys.readouterr().err and not any(out.glob("*")), (tool, name)
            shutil.rmtree(out, ignore_errors=True)  # generate.py makes it before it reads
            number += 1
    assert number > 100
    flip_byte(checkpoint / "model.safetensors")
    line = [sys.executable, str(ROOT / "tools" / "zero_to_fp32.py"), str(checkpoint), str(out)]
    process = run(line, cwd=tmp_path, text=True)
    assert process.returncode == 1 and "model.safetensors has changed since" in process.stderr and not out.exists()


def test_what_a_tool_does_not_read_may_be_damaged(origin: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(origin, tmp_path / "iter_2.pth"))
    assert merge([str(checkpoint), str(tmp_path / "whole")]) == 0
    for path in [*checkpoint.rglob("rng/*"), checkpoint / "optimizer.safetensors"]:
        flip_byte(path)
    assert merge([str(checkpoint), str(tmp_path / "other")]) == 0
    assert tree(tmp_path / "whole") == tree(tmp_path / "other")


@pytest.mark.parametrize("name", ["zero2@2-fp32", "zero3@2-bf16", "FULL_SHARD@2-fp32"])
def test_of_every_layout(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = runs().outcome(f"layouts/{name}").checkpoints[-1]
    checkpoint, out = Path(shutil.copytree(source, tmp_path / source.name)), tmp_path / "out"
    for file in flips(checkpoint):
        if not file.startswith(NOT_READ):
            assert merge([str(checkpoint), str(out)]) == 1, file
            assert file in capsys.readouterr().err and not out.exists(), file
    manifest = Manifest.read(source)
    reader = open_reader(source, manifest)
    tensors = {path.name for path in source.iterdir() if path.suffix in (".pt", ".distcp")}
    assert reader.stamps.keys() == tensors and {read() for read in reader.stamps.values()} == {manifest.stamp}
    manifest.progress = replace(manifest.progress, updates=3)
    with pytest.raises(CheckpointError, match=f"{min(tensors)} is of update 2, and manifest.json of update 3"):
        open_reader(source, manifest)


def test_of_an_export(
    data: dict, origin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]  # noqa: F811
) -> None:  # fmt: skip
    """Published directories and merged files, by every reader; without ``digests.json`` they are as those of others."""
    folder, bins, out = tmp_path / "folder", tmp_path / "merged", tmp_path / "out"
    assert export([str(origin), str(folder)]) == 0 and merge([str(origin), str(bins)]) == 0
    tools = of_tools(folder, data, out)
    start: dict[str, Any] = {"model": {"type": "DecoderLM", "pretrained": str(folder)}}
    for file in flips(folder):
        for tool in ("generate", "evaluate"):
            main, words = tools[tool]
            assert main(words) == 1, (tool, file)
            assert file in capsys.readouterr().err
            shutil.rmtree(out, ignore_errors=True)
        with pytest.raises(CheckpointError, match=f"{file} has changed since"):
            HubRepo("owner/name").upload(folder)
    for file, options, readers in (
        (folder / "model.safetensors", start, ()),
        (bins / "pytorch_model.bin", {"load_from": str(bins)}, (merge, export)),
    ):
        flip_byte(file)
        for reader in readers:
            assert reader([str(file.parent), str(out)]) == 1 and f"{file.name} has changed" in capsys.readouterr().err
        with pytest.raises(CheckpointError, match=f"{file.name} has changed since"):
            Runner.from_cfg(config(data, tmp_path / "run", **options)).train()
        (file.parent / DIGESTS).unlink()
        Runner.from_cfg(config(data, tmp_path / f"of {file.parent.name}", **options)).train()
