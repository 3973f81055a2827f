"""What evaluation, the best checkpoint and early stopping refuse when a run begins, and what they log once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.text_run import log, talks, text_config
from tools.evaluate import main
from unigen_ds.config.registry import METRICS, MODELS
from unigen_ds.core.errors import ConfigError, ResumeBlocked
from unigen_ds.evaluation.metrics import evaluated
from unigen_ds.evaluation.metrics.text_metrics import BLEU
from unigen_ds.runner import Runner
from unigen_ds.runner.settings.tree import Settings

RECORDS = talks(24)
OWN_VALIDATION = {"split": 0.3, "batch_size": 4}
SPLIT_LINE = "set val_dataloader.split back to 0.3 \\(seed 1\\); restore the data"


@MODELS.register_module(force=True)
class MeanColour(nn.Module):
    """(n, 3, height, width) -> (n, 3)."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.as_tensor(images).mean((2, 3))


def evaluating(**arguments: Any) -> dict[str, Any]:
    return {"type": "EvaluateHook", "interval": 1, "unit": "update", **arguments}


def config(folder: Path, *hooks: dict[str, Any], records: list[Any] = RECORDS, **overrides: Any) -> Any:
    options = {"train_cfg": {"max_updates": 2}, "val_dataloader": OWN_VALIDATION, "custom_hooks": [*hooks]}
    return text_config(folder, records, **{**options, **overrides})


FID = {"type": "FID", "extractor": {"type": "MeanColour"}}
EARLY = {"type": "EarlyStoppingHook", "rule": "less"}
REFUSED: list[tuple[list[dict[str, Any]], str]] = [
    ([evaluating(save_best="val/quality")], "cannot be inferred from its name.*add rule='less' or rule='greater'"),
    ([evaluating(save_best="val/vqa_acc", metrics=["BLUE"])], r"metrics\[0\].type is 'BLUE'.*BLEU"),
    ([evaluating(metrics=[{"type": "FID", "extractor": "inception.pth"}])],
     r"'inception.pth' is no folder with safetensors.*a folder with a published model"),
    ([evaluating(save_best="loss")], r"save_best is 'loss', which.*Allowed: val/loss, val/loss/text"),
    ([evaluating(save_best="val/los", rule="less")], "did you mean 'val/loss'"),
    ([evaluating(save_best="val/loss/image")], "EvaluateHook.save_best is 'val/loss/image'"),
    ([evaluating(save_best="val/bleu")], "save_best is 'val/bleu', which no evaluation"),
    ([evaluating(), {**EARLY, "monitor": "val/lo"}], "EarlyStoppingHook.monitor is 'val/lo', which no evaluation"),
    ([evaluating(), {"type": "mmengine.EarlyStoppingHook", "monitor": "val/loss"}],
     r"EarlyStoppingHook.monitor is 'val/loss'.*Allowed: loss, loss/text"),
    ([evaluating(), evaluating(metrics=[{"type": "ExactMatch"}])],
     "hooks named twice: evaluate"),
    ([evaluating(metrics=[FID])], r"EvaluateHook.metrics\[0\]: FID needs pictures .*and TextInferencer.*Allowed: text"),
]  # fmt: skip


@pytest.mark.parametrize(("hooks", "message"), REFUSED)
def test_refused_before_the_first_update(tmp_path: Path, hooks: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Runner.from_cfg(config(tmp_path, *hooks)).train()
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or '"update": 1' not in log(tmp_path)


@pytest.mark.parametrize("kind", ["EarlyStoppingHook", "mmengine.EarlyStoppingHook"])
def test_early_stopping_needs_validation_data(tmp_path: Path, kind: str) -> None:
    hook = {"type": kind, "monitor": "val/loss"}
    with pytest.raises(ConfigError, match=r"has an EarlyStoppingHook, and there is no val_dataloader.*split=0\.02"):
        Settings.from_config(config(tmp_path, hook, val_dataloader=None))
    assert Settings.from_config(config(tmp_path, hook)).val_dataloader is not None


@pytest.mark.parametrize(
    "hooks",
    [
        [evaluating(save_best="val/loss/text/nothing")],
        [evaluating(), {**EARLY, "monitor": "val/loss/text/nothing"}],
        [evaluating(metrics=[{"type": "ExactMatch"}], save_best="val/exact_match_2")],
    ],
)
def test_what_only_an_evaluation_shows_ends_the_run(tmp_path: Path, hooks: list[dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match=r"which the evaluation does not have.*Allowed: .*val/loss"):
        Runner.from_cfg(config(tmp_path, *hooks)).train()


def test_bleu_of_short_answers_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    metric = BLEU()
    for _ in range(2):
        metric.reset()
        metric.update(["a b", "a b c", "a b c d"], ["a b", "a b c", "a b c d"], ["0", "1", "2"])
        evaluated(metric, checkpoint="")
    lines = {record.getMessage() for record in caplog.records if "BLEU" in record.getMessage()}
    assert len(lines) == 1 and next(iter(lines)).startswith("BLEU: 2 of 3 answers have fewer than 4 words")


def test_a_split_that_changes_on_a_resume(tmp_path: Path) -> None:
    """The first remedy undoes it; where it is wanted, the log has how much was trained on before."""
    Runner.from_cfg(config(tmp_path, val_dataloader=None)).train()
    with pytest.raises(ResumeBlocked, match=r"leave val_dataloader\.split out, as before"):
        Runner.from_cfg(config(tmp_path, resume=True))
    more = {"resume": True, "on_data_change": "restart", "train_cfg": {"max_updates": 3}}
    Runner.from_cfg(config(tmp_path, **more)).train()
    assert "the 2 updates (2 samples) before this split may have trained on records" in log(tmp_path)
    with pytest.raises(ResumeBlocked, match=SPLIT_LINE):
        Runner.from_cfg(config(tmp_path, resume=True, val_dataloader={**OWN_VALIDATION, "split": 0.1}))
    Runner.from_cfg(config(tmp_path, **more, val_dataloader={**OWN_VALIDATION, "split": 0.1}))
    assert log(tmp_path).count("may have trained on records") == 1, "a smaller share holds out no other records"


MODULE = "own_length_metric"
SOURCE = """
from unigen_ds.config.registry import METRICS
from unigen_ds.evaluation.metrics import Metric


@METRICS.register_module()
class OwnLength(Metric):
    name = "own_length"

    def rows(self, predictions, references, keys):
        return [[len(one.split())] for one in predictions]

    def values(self, table):
        return {self.name: float(table.mean())}
"""


def test_a_metric_of_the_checkpoints_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the log states which weights were evaluated."""
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    hooks = [evaluating(metrics=[{"type": "OwnLength"}], save_best="val/own_length", rule="less")]
    hooks.append({"type": "EMAHook", "momentum": 0.3})
    Runner.from_cfg(config(tmp_path, *hooks, custom_imports={"imports": [MODULE]})).train()
    monkeypatch.delitem(sys.modules, MODULE)
    monkeypatch.delitem(METRICS.module_dict, "OwnLength")
    command = [str(tmp_path / "run"), "--metrics", "OwnLength"]
    assert main(command) == 2 and "--allow-custom-imports" in capsys.readouterr().err
    assert MODULE not in sys.modules
    assert main([*command, "--allow-custom-imports"]) == 0
    output = capsys.readouterr()
    assert "own_length  " in output.out
    assert "Evaluated: the weights themselves; --ema evaluates their average" in output.out + output.err
