"""The index of an FSDP save of more ranks than a test has: computed, and read back by PyTorch and by us."""

from __future__ import annotations

import json
from functools import partial

import torch
from pytest import raises
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from unigen_ds.backends.fsdp.fsdp import TensorTable, _write
from unigen_ds.checkpoint.layouts.dcp import DCPReader
from unigen_ds.core.errors import CheckpointError
from unigen_ds.system.outputs import Output, write_output

WHOLE = {
    "master|large": torch.randn(100, 8), "exp_avg|large": torch.randn(100, 8), "master|odd": torch.randn(17, 3),
    "buffer|number": torch.tensor([5]), "master|of a replica": torch.arange(5, dtype=torch.bfloat16),
}  # fmt: skip
OWNERS = {"buffer|number": range(1), "master|of a replica": range(7, 14)}
TABLE = TensorTable({key: (whole.shape, whole.dtype, OWNERS.get(key, range(7))) for key, whole in WHOLE.items()})


def test_the_index_names_every_row_or_the_rank_that_wrote_others(tmp_path, monkeypatch):
    monkeypatch.delattr("torch.distributed.checkpoint.filesystem.CURRENT_DCP_VERSION", raising=False)  # as torch 2.8
    reports = []
    for rank in range(14):  # their rows are those of ``torch.chunk``
        chunks = {key: (WHOLE[key].chunk(7), OWNERS.get(key, range(7)).index(rank)) for key in TABLE.keys(rank)}
        own = [parts[at] if at < len(parts) else parts[0][:0] for parts, at in chunks.values()]
        name = f"__{rank}_0.distcp"
        reports.append([write_output(tmp_path, Output(name, 0, partial(_write, name, own)))[2]])
    reports = json.loads(json.dumps(reports))  # by which an asynchronous save passes them
    write_output(tmp_path, *TABLE.index(reports))
    dcp_to_torch_save(str(tmp_path), str(tmp_path / "whole.pt"))
    theirs, reader = torch.load(tmp_path / "whole.pt"), DCPReader(tmp_path)
    for key, tensor in WHOLE.items():
        kind, _, name = key.partition("|")
        assert reader.numel(kind, name) == tensor.numel() and torch.equal(theirs[key], tensor)
        for start in (0, tensor.numel() // 3):  # in the middle of a part
            assert torch.equal(reader.read(kind, name, start, tensor.numel()), tensor.flatten()[start:]), key
    reports[5][0][1] += 64
    with raises(CheckpointError, match=r"rank 5 has written [\d,]+ bytes, and [\d,]+ follow"):
        TABLE.index(reports)
