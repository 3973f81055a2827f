"""``tools/plan.py`` from the command line's arguments to its table."""

from __future__ import annotations

import json
import os

import pytest

from tests.end_to_end.engines.jobs.users import write_mixed
from tests.tiny import tiny_config
from tools.plan import main
from unigen_ds.config.python_text import config_text

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    source = {"type": "UnifiedGenerationDataset", "data_path": str(write_mixed(folder))}
    settings = tiny_config(
        folder / "run", folder, train_dataloader__dataset=source, model__llm__num_hidden_layers=1,
        train_dataloader__batch_size=1, optim_wrapper__accumulative_counts=1,
        backend={"type": "fsdp", "sharding_strategy": "HYBRID_SHARD", "num_shard": 8},
    )  # fmt: skip
    path = folder / "config.py"
    path.write_text(config_text(settings), encoding="utf-8")
    return str(path)


def test_sixteen_processes_are_planned_on_one(config, capsys, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    before = dict(os.environ)
    status = main([config, "--cfg-options", "world_size=16", "--only", "--json", "--device-memory", "2.1GiB",
                   "--host-memory", "64GiB"])  # fmt: skip
    result = json.loads(capsys.readouterr().out)
    assert status == 0 and dict(os.environ) == before
    (engine,) = result["engines"]
    assert (engine["topology"]["dp_size"], engine["topology"]["num_shard"], engine["fits"]) == (16, 8, True)
    trace = engine["traced"]
    assert trace["masters"] < 4 * trace["trainable"] / 5, "rank 0 has one part in 8, and whole rows"
    assert engine["device"]["step"] == round(trace["device"]["step"] * 1.05) + 2 * 2**30
    assert engine["host"]["step"] == 4 * 2**30


def test_a_plan_that_does_not_fit_has_exit_status_1(config, capsys):
    status = main([config, "--backend", "single", "--only", "--device-memory", "1GiB"])
    table = capsys.readouterr().out
    assert status == 1 and "too large" in table and "single (config)" in table
    assert main([config, "--backend", "single", "--world-size", "2", "--only"]) == 2
    assert "was started with 2 processes" in capsys.readouterr().err
