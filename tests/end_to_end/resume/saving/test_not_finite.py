"""A state that is not finite is kept apart and ends the run; fp16 looks for its loss scale without being stopped."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.resume.saving.not_finite_runs import SAVES, train_run
from tests.support.processes import ranks
from tests.text_run import count_up, write_jsonl
from unigen_ds.checkpoint import store
from unigen_ds.config.registry import HOOKS
from unigen_ds.core.batch import LossTerms
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.hooks.base import Hook
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.system.dist import free_port

LOUD = {**SAVES, "optim_wrapper__precision": "fp16", "loss_weights": {"text": 4096.0}, "train_cfg__max_updates": 18}
"""The gradient overflows at the first ten scales."""
ENGINES = ("fsdp", "deepspeed:zero1", "deepspeed:zero2", "deepspeed:zero3")


def spoil(what: str, update: int = 3, rank: int = 0) -> dict[str, Any]:
    hook = {"type": "SpoilHook", "what": what, "update": update, "rank": rank}
    return {**SAVES, "custom_hooks": [{"type": "EMAHook", "momentum": 0.1}, hook]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("not_finite")
    write_jsonl(folder / "train.jsonl", count_up(200))
    return folder


@pytest.fixture(scope="module")
def of_ranks(folder: Path) -> dict[str, list[dict[str, Any]]]:
    cases: dict[str, dict[str, Any]] = {}
    for engine in ENGINES:
        what = "weight" if engine in ("fsdp", "deepspeed:zero2") else "exp_avg"
        name, _, config = engine.partition(":")
        backend = {"type": name, "config": config} if config else {"type": name}
        cases[f"spoiled {engine}"] = {"backend": backend, **spoil(what, rank=1)}
        cases[f"fp16 {engine}"] = {"backend": backend, **LOUD}
    command = [sys.executable, "-m", "tests.end_to_end.resume.saving.not_finite_runs", str(folder)]
    processes = ranks([*command, json.dumps([(name, free_port(), changes) for name, changes in cases.items()])])
    lines = [[json.loads(line) for line in one.out.splitlines() if line.startswith('{"name"')] for one in processes]
    assert [len(each) for each in lines] == [len(cases)] * 2, processes[0].ending + processes[1].ending
    return {name: [next(line for line in each if line["name"] == name) for each in lines] for name in cases}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_each_rank_checks_what_it_writes_and_all_end_alike(of_ranks, engine):
    first, second = of_ranks[f"spoiled {engine}"]
    assert first["error"] == second["error"] and "after update 3 the state is not finite" in first["error"]
    assert first["checkpoints"] == ["iter_1.pth", "iter_2.pth", "not_finite_iter_3.pth"]
    assert first["hint"] == "iter_2.pth"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_fp16_finds_its_loss_scale_under_every_engine(of_ranks, engine):
    facts = of_ranks[f"fp16 {engine}"][0]
    assert facts["error"] is None and len(facts["applied"]) == 18
    assert facts["applied"][:6] == [False] * 6 and facts["applied"][-1] is True
    assert facts["scales"][:6] == [2.0**power for power in range(16, 10, -1)]


@pytest.mark.parametrize("what", ["weight", "exp_avg", "exp_avg_sq", "ema"])
def test_it_is_kept_apart_and_the_next_start_continues_from_the_last_good_one(folder, what, caplog):
    run = folder / what
    facts = train_run(run, **spoil(what))
    name = {"weight": "", "ema": "ema of "}.get(what, f"{what} of ")
    assert f"(NaN or infinite): {name}model.embed_tokens.weight; it is kept apart in {run}/not_finite" in facts["error"]
    assert (
        facts["checkpoints"] == ["iter_1.pth", "iter_2.pth", "not_finite_iter_3.pth"] and facts["hint"] == "iter_2.pth"
    )
    newest, rejects = store.newest(run)
    assert newest is not None and newest.path.name == "iter_2.pth" and not rejects
    for key, where in (("resume", run), ("load_from", folder / f"from_{what}")):
        with pytest.raises(CheckpointError, match=r"not_finite_iter_3\.pth has a state that is not finite"):
            train_run(where, **{**spoil(what), key: str(run / "not_finite_iter_3.pth")})
    again = train_run(run, **spoil(what, update=4), resume=True)
    assert "after update 4 the state is not finite" in again["error"]
    assert again["checkpoints"] == ["iter_2.pth", "iter_3.pth", "not_finite_iter_4.pth"], "the newest one alone is kept"
    assert train_run(run, **spoil(what, update=0), resume=True)["hint"] == "iter_6.pth"


def test_the_last_save_and_an_end_without_one_are_checked(folder):
    for name, more in (("last", SAVES), ("unsaved", {"default_hooks__checkpoint": None})):
        facts = train_run(folder / name, **{**spoil("weight", update=6), **more})
        assert "not finite" in facts["error"] and len(facts["applied"]) == 6


@HOOKS.register_module()
class NotFiniteLossHook(Hook):
    """From update 3 on the loss is NaN; the gradients are those of a finite one."""

    def before_train(self, run):
        def change(module: Any, inputs: Any, terms: LossTerms) -> LossTerms:
            late = run.progress.updates >= 2
            return LossTerms({name: value + (torch.nan if late else 0.0) for name, value in terms.sums.items()})

        run.backend.model.register_forward_hook(change)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_loss_that_is_not_finite_skips_the_update_and_stops_the_run(folder, precision):
    changes = {"train_cfg__max_updates": 12, "optim_wrapper__precision": precision, **SAVES}
    hooks = [{"type": "NotFiniteLossHook"}]
    facts = train_run(folder / f"loss_{precision}", custom_hooks=hooks, **changes)
    assert facts["error"].startswith("5 updates in a row had a loss or gradients that are not finite: updates 3 to 7, ")
    assert facts["applied"] == [True] * 2 + [False] * 4, "that of the last update is not logged"
    again = train_run(folder / f"loss_{precision}", custom_hooks=hooks, resume=True, **changes)
    assert "updates 7 to 11, " in again["error"], "it counts anew"


def test_the_first_loss_scale_is_set(folder):
    for name, scale, scales in (
        ("number", 8, [8.0] * 6),
        ("mapping", {"init_scale": 8, "growth_interval": 2}, [8.0, 8.0, 16.0, 16.0, 32.0, 32.0]),
    ):
        changes = {"optim_wrapper__precision": "fp16", "optim_wrapper__loss_scale": scale}
        assert train_run(folder / name, **changes)["scales"] == scales
    for scale, precision in ((100, "fp16"), ("static", "fp16"), (8, "bf16")):
        with pytest.raises(ConfigError, match=r"optim_wrapper\.loss_scale"):
            Settings.from_config(
                {"optim_wrapper": {"optimizer": {"lr": 1}, "precision": precision, "loss_scale": scale}}
            )
