"""``tools/zero_to_fp32.py``: DeepSpeed's command line, and what it says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint import plain_deepspeed
from tests.checkpoint.support import make_backend, save
from tests.support.processes import ROOT, run
from tools.zero_to_fp32 import main
from unigen_ds.system.files import DIGESTS

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def zero2() -> Path:
    return plain_deepspeed.checkpoints() / "zero2"


def test_as_a_script_it_does_what_deepspeeds_does(zero2, tmp_path):
    """The same words give the same files with the same bits."""
    words = [str(zero2), "{}", "--max_shard_size", "3KB", "-t", f"global_step{plain_deepspeed.STEPS}"]
    for name, command in (("ours", [str(ROOT / "tools" / "zero_to_fp32.py")]),
                          ("theirs", ["-m", "deepspeed.utils.zero_to_fp32"])):  # fmt: skip
        line = [sys.executable, *command, *(word.format(tmp_path / name) for word in words)]
        environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
        process = run(line, cwd=tmp_path, text=True, env=environment)
        assert process.returncode == 0, process.stderr
        if name == "ours":
            assert "12 tensors, 2,028 elements" in process.stdout
            assert str(tmp_path / "ours" / "pytorch_model.bin.index.json") in process.stdout
    ours, theirs = (tmp_path / name for name in ("ours", "theirs"))
    names = sorted(path.name for path in theirs.iterdir())
    assert sorted(path.name for path in ours.iterdir() if path.name != DIGESTS) == names and len(names) > 2
    assert (ours / "pytorch_model.bin.index.json").read_text() == (theirs / "pytorch_model.bin.index.json").read_text()
    for name in names:
        if name.endswith(".bin"):
            a, b = (torch.load(folder / name, weights_only=True) for folder in (ours, theirs))
            assert list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("spelling", ["-", "_"])
def test_both_spellings(zero2, tmp_path, spelling):
    flags = [flag.replace("-", spelling) for flag in ("safe-serialization", "exclude-frozen-parameters")]
    assert main([str(zero2), str(tmp_path / "out"), *(f"--{flag}" for flag in flags)]) == 0
    assert not any(name.startswith("frozen.") for name in load_file(tmp_path / "out" / "model.safetensors"))


def test_of_a_work_dir_the_newest(tmp_path):
    save(tmp_path, "iter_12.pth", backend=make_backend(updates=1))
    newest = make_backend(updates=3)
    path = save(tmp_path, "iter_24.pth", backend=newest)
    (tmp_path / "last_checkpoint").write_text(str(path))
    assert main([str(tmp_path), str(tmp_path / "out"), "--ema", "--dtype", "bf16"]) == 0
    state = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    for shard in newest.master_shards():
        assert torch.equal(state[shard.name].flatten(), shard.data.cpu().bfloat16())
