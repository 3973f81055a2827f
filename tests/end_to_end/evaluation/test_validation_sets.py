"""Several sets of validation data by name: their losses and metrics, the best checkpoint and early stopping by one."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.data.support import write_jsonl
from tests.end_to_end.evaluation.test_metrics import evaluating, records, text_run
from tests.end_to_end.evaluation.test_validation import KillOnce, training  # noqa: F401 - registers it
from tests.support.processes import ROOT, run
from tests.text_run import evaluations
from tools.evaluate import main as evaluate
from tools.train import main as train
from unigen_ds.checkpoint.best_record import best_of
from unigen_ds.core.errors import ConfigError
from unigen_ds.evaluation.provenance import read_results
from unigen_ds.report.page import write_report
from unigen_ds.report.reading import read_work_dir
from unigen_ds.runner import Runner
from unigen_ds.runner.settings.tree import Settings, load_config

METRICS = ("BLEU", "ExactMatch")


def sets(folder: Path) -> dict[str, Any]:
    """A share of the training records, and a file of its own."""
    folder.mkdir(exist_ok=True)
    far = write_jsonl(folder / "far.jsonl", records(11)[3:])
    dataset = {"type": "UnifiedGenerationDataset", "data_path": str(far)}
    far_section = {"dataset": dataset, "batch_size": 2, "metrics": ["exact_match"]}
    return {"near": {"split": 0.3, "batch_size": 3, "metrics": ["BLEU"]}, "far": far_section}


def run_of(folder: Path, *hooks: Any, best: str = "val/far/loss", **options: Any) -> Runner:
    often = {"default_hooks__checkpoint": {"interval": 2, "by_epoch": False}, "val_dataloader": sets(folder)}
    return text_run(folder, evaluating(*METRICS, save_best=best), *hooks, **{"updates": 6, **often, **options})


def test_each_set_has_its_values_and_a_killed_run_those_of_one_that_was_not(tmp_path: Path) -> None:
    straight, in_two = tmp_path / "straight", tmp_path / "killed"
    run_of(straight).train()
    lines = evaluations(straight)
    names = {key for line in lines for key in line if key.startswith("val/")}
    losses = {f"val/{one}/{key}" for one in ("near", "far") for key in ("loss", "loss/text")}
    assert losses | {"val/near/bleu", "val/far/exact_match"} <= names
    assert not names & {"val/loss", "val/near/exact_match", "val/far/bleu"}
    alone = tmp_path / "alone"
    text_run(alone, evaluating("BLEU", save_best="auto"), updates=6, val_dataloader=sets(alone)["near"]).train()
    near = [{key.replace("near/", ""): line[key] for key in line if key.startswith("val/near/loss")} for line in lines]
    assert near == [{k: v for k, v in line.items() if k.startswith("val/loss")} for line in evaluations(alone)]
    _, best = best_of(alone / "run") or (None, None)
    assert best is not None and best.metric == "val/loss"
    assert training(alone) == training(straight), "no set changes the training"

    body = f"from {__name__} import *; run_of(Path({str(in_two)!r}), {{'type': 'KillOnce', 'at_update': 5}}).train()"
    process = run([sys.executable, "-c", body], cwd=ROOT, text=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    run_of(in_two, resume=True).train()
    assert evaluations(in_two) == lines and training(in_two) == training(straight)
    _, best = best_of(in_two / "run") or (None, None)
    assert best is not None and best.metric == "val/far/loss"
    assert best.value == min(line["val/far/loss"] for line in lines)

    results = {one.provenance["metric"]: one for one in read_results(in_two / "run" / "evaluations" / "6.json")}
    assert [*results] == ["val/near/loss", "near/bleu", "val/far/loss", "far/exact_match"]
    assert results["near/bleu"].values == {"near/bleu": lines[-1]["val/near/bleu"]}
    read = read_work_dir(in_two / "run")
    assert {key for one in read.evaluations for key in one.values} == names and read.validation_loss == "val/near/loss"
    write_report([in_two / "run"], tmp_path / "report.html")
    assert "val/far/loss" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_tool_has_the_values_of_the_hook(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(tmp_path, updates=2).train()
    out = tmp_path / "out.json"
    assert evaluate([str(tmp_path / "run"), "--metrics", *METRICS, "--out", str(out)]) == 0
    values = {name: value for one in read_results(out) for name, value in one.values.items()}
    expected = {name: value for name, value in evaluations(tmp_path)[-1].items() if name.startswith("val/")}
    assert {name if name.startswith("val/") else f"val/{name}": value for name, value in values.items()} == expected
    assert evaluate(["--compare", str(out), str(out)]) == 0
    capsys.readouterr()
    assert evaluate([str(tmp_path / "run"), "--data", str(tmp_path / "far.jsonl"), "--batch-size", "2"]) == 0
    by_name = dict(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("val/"))
    assert float(by_name["val/loss"]) == expected["val/far/loss"]


def test_patience_and_auto(tmp_path: Path) -> None:
    stopping = {"type": "EarlyStoppingHook", "monitor": "val/far/loss", "patience": 1, "min_delta": 100.0}
    run_of(tmp_path, stopping, best="auto").train()
    assert [line["update"] for line in evaluations(tmp_path)] == [2, 4]
    _, best = best_of(tmp_path / "run") or (None, None)
    assert best is not None and best.metric == "val/near/loss"


@pytest.mark.parametrize(
    "name, metrics, words",
    [
        ("val/fra/loss", METRICS, "val/far/loss"),
        ("val/loss", METRICS, "val/near/loss"),
        ("val/far/bleu", METRICS, "val/near/bleu"),
        ("val/far/loss", ["BLEU"], "far.metrics has 'exact_match'. Allowed: BLEU, bleu"),
        ("val/far/loss", [*METRICS, "ROUGE"], "ROUGE, which no set"),
    ],
)
def test_a_name_that_no_set_has_is_refused(tmp_path: Path, name: str, metrics: Any, words: str) -> None:
    hook = evaluating(*metrics, save_best=name)
    with pytest.raises(ConfigError, match=words):
        text_run(tmp_path, hook, val_dataloader=sets(tmp_path)).train()


def test_overrides_and_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.py"
    run_of(tmp_path, updates=2).train()
    path.write_text((tmp_path / "run" / "iter_2.pth" / "config.py").read_text(encoding="utf-8"), encoding="utf-8")
    config = load_config(path, {"val_dataloader.far.seq_length": 16, "val_dataloader.near": None})
    (name, section), = Settings.from_config(config).val_dataloader.sets.items()  # type: ignore[union-attr]  # fmt: skip
    assert (name, section.seq_length, section.batch_size) == ("far", 16, 2)
    with pytest.raises(ConfigError, match="did you mean 'seq_length'"):
        Settings.from_config(load_config(path, ["val_dataloader.far.seq_lenght=16"]))
    dry_run = [str(path), "--dry-run", "--work-dir", str(tmp_path / "new")]
    assert train(dry_run) == 0
    (number,) = (i for i, hook in enumerate(config["custom_hooks"]) if hook["type"] == "EvaluateHook")
    assert train([*dry_run, "--cfg-options", f"custom_hooks.{number}.save_best=val/near/exact_match"]) != 0
    assert "which no evaluation of this run has" in "".join(capsys.readouterr())
    missing = [f"val_dataloader.far.dataset.data_path={tmp_path / 'gone.jsonl'}"]
    assert train([*dry_run, "--cfg-options", *missing]) != 0
    assert "gone.jsonl" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "section, words",
    [
        ({"a": {"split": 0.1}, "batch_size": 4}, "beside keys of one section"),
        ({"a": {"split": 0.1}, "b": {"split": 0.2}}, "several sets of val_dataloader have a split"),
        ({"a": {"split": 0.1, "batch_sizes": 4}}, "did you mean 'batch_size'"),
        ({"a": {"batch_size": 4}}, "neither dataset nor split"),
        ({"loss": {"split": 0.1}}, "a set 'loss'"),
        ({"a": {"b": {"split": 0.1}}}, "a set 'a'"),
    ],
)
def test_wrong_sections(tmp_path: Path, section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        text_run(tmp_path, val_dataloader=section)
