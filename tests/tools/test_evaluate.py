"""``tools/evaluate.py``: the evaluation hook's values, for checkpoints, merged weights and published directories."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.data.support import write_jsonl
from tests.data.text.chat_support import write_nanovlm
from tests.support.processes import ranks
from tests.text_run import evaluations, text_config, words
from tools import evaluate as tool
from tools.evaluate import main
from unigen_ds.checkpoint.convert import merge
from unigen_ds.config.registry import METRICS
from unigen_ds.evaluation.jobs.evaluation_job import read_result
from unigen_ds.evaluation.jobs.lmms_eval import TASKS
from unigen_ds.evaluation.metrics import Metric
from unigen_ds.evaluation.provenance import read_results
from unigen_ds.runner import Runner

TURNS = (("user", 3), ("assistant", 5))


def records(first: int, number: int) -> list[Any]:
    return [
        {"conversations": [{"role": role, "type": "text", "content": words(2 + (k + n) % 4, k)} for role, n in TURNS]}
        for k in range(first, first + number)
    ]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on 40 records of which some are evaluated; the value of the last update's evaluation is in its log."""
    folder = tmp_path_factory.mktemp("evaluate")
    Runner.from_cfg(config(folder)).train()
    return folder


def config(folder: Path, **overrides: Any) -> Any:
    options: dict[str, Any] = {
        "train_cfg": {"max_updates": 6},
        "val_dataloader": {"split": 0.3, "batch_size": 3},
        "custom_hooks": [{"type": "EvaluateHook", "interval": 3, "unit": "update"},
                         {"type": "EMAHook", "momentum": 0.3}],
        "default_hooks__checkpoint": {"interval": 3, "by_epoch": False},
    }  # fmt: skip
    return text_config(folder, records(0, 40), **{**options, **overrides})


def values(capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    lines = capsys.readouterr().out.splitlines()
    return {name: float(value) for name, value in (line.split() for line in lines if line.startswith("val/"))}


@pytest.mark.parametrize("update", [3, 6])
def test_the_values_are_the_hooks_to_the_last_bit(run_dir, capsys, update):
    assert main([str(run_dir / "run" / f"iter_{update}.pth")]) == 0
    results = values(capsys)
    (line,) = (line for line in evaluations(run_dir) if line["update"] == update)
    assert results == {name: value for name, value in line.items() if name.startswith("val/")}
    assert {"val/loss", "val/loss/text"} <= set(results)


def test_several_processes_share_the_data(run_dir, capsys):
    run = str(run_dir / "run" / "iter_6.pth")
    one, two = ranks([sys.executable, tool.__file__, run, "--out", str(run_dir / "two.json")])
    assert one.status == two.status == 0, one.ending + two.ending
    assert main([run, "--out", str(run_dir / "one.json")]) == 0
    first, second = (json.loads((run_dir / name).read_text())["results"][0] for name in ("one.json", "two.json"))
    assert second["values"] == pytest.approx(first["values"], rel=1e-6)
    assert second["provenance"] == first["provenance"] and int(first["provenance"]["num_samples"]) > 3
    assert not any(line.startswith("val/") for line in two.out.splitlines())


def test_merged_weights(run_dir, capsys, tmp_path):
    merge(run_dir / "run" / "iter_6.pth", tmp_path / "merged")
    assert main([str(tmp_path / "merged"), "--config", str(run_dir / "config.py")]) == 2
    assert "--data FILE" in capsys.readouterr().err
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records(5, 9)))
    options = ["--config", str(run_dir / "config.py"), "--data", str(tmp_path / "other.jsonl"), "--batch-size", "3"]
    assert main([str(tmp_path / "merged"), *options]) == 0
    results = values(capsys)
    assert main([str(run_dir / "run" / "iter_6.pth"), *options[2:]]) == 0
    assert results == values(capsys)
    assert main([str(tmp_path / "merged"), *options, "--ema"]) == 2
    assert "has no average" in capsys.readouterr().err
    assert main([str(tmp_path / "merged")]) == 1 and "does not contain its config. " in capsys.readouterr().err
    (tmp_path / "merged" / "config.json").write_text('{"model": {"type": "OfAnotherProcess"}}')
    assert main([str(tmp_path / "merged")]) == 1
    error = capsys.readouterr().err
    assert "not one that a registered family recognises" in error and "--config CONFIG" in error


def test_metrics_beside_the_loss(run_dir, capsys, tmp_path):
    """Perplexity is that of the loss, also of several processes; all are compared."""
    run, files = run_dir / "run", [tmp_path / "a.json", tmp_path / "b.json"]
    metrics = ["--metrics", "Perplexity", '{"type": "ExactMatch"}']
    assert main([str(run / "iter_6.pth"), *metrics, "--out", str(files[0])]) == 0
    output = capsys.readouterr().out
    results = dict(line.split("  ") for line in output.splitlines() if "  " in line)
    assert float(results["perplexity"]) == pytest.approx(math.exp(float(results["val/loss/text"])), rel=1e-6)
    assert 0 <= float(results["exact_match"]) <= 1
    command = [sys.executable, tool.__file__, str(run / "iter_3.pth"), *metrics, "--out", str(files[1])]
    assert [one.status for one in ranks(command)] == [0, 0]
    assert main(["--compare", *map(str, files)]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["val/loss", "val/loss/text", "val/loss/text/train"]
    assert [line.split(":")[0] for line in lines] == [*names, "perplexity", "exact_match"]
    losses, perplexity, _ = (result.values for result in read_results(files[1]))
    assert perplexity["perplexity"] == pytest.approx(math.exp(losses["val/loss/text"]), rel=1e-6)
    for wrong, message in (("BLUE", "BLEU"), ("{", "is no JSON")):
        assert main([str(run), "--metrics", wrong]) == 2 and message in capsys.readouterr().err


@METRICS.register_module(force=True)
class Broken(Metric):
    name = "broken"

    def rows(self, predictions: Any, references: Any, keys: Any) -> Any:
        raise RuntimeError(f"no score for {len(keys)} samples")


def test_a_metric_that_fails_loses_no_other_value(run_dir, capsys, tmp_path):
    metrics = ["--metrics", "Perplexity", "Broken", '{"type": "ExactMatch"}']
    assert main([str(run_dir / "run"), *metrics, "--out", str(tmp_path / "a.json")]) == 1
    output = capsys.readouterr()
    assert "error: the metric broken has no value: rank 0: RuntimeError: no score for" in output.err
    assert [line.split("  ")[0] for line in output.out.splitlines()][-2:] == ["perplexity", "exact_match"]
    names = [result.provenance["metric"] for result in read_results(tmp_path / "a.json")]
    assert names == ["val/loss", "perplexity", "exact_match"]


def test_how_the_model_answers_is_the_hooks_generation(run_dir, capsys, tmp_path):
    """The same names, the same answers, and recorded with the value."""
    out = tmp_path / "a.json"
    options = {"max_new_tokens": 3, "temperature": 0.7, "seed": 5}
    texts = [f"{key}={value}" for key, value in options.items()]
    arguments = ["--metrics", "ROUGE", "--generation", *texts, "--max-samples", "4", "--out", str(out)]
    assert main([str(run_dir / "run" / "iter_3.pth"), *arguments]) == 0
    rouge = read_results(out)[1]
    assert rouge.provenance["num_samples"] == "4"
    assert {key: rouge.provenance[f"generation/{key}"] for key in options} == {k: str(v) for k, v in options.items()}
    hook = {"type": "EvaluateHook", "interval": 3, "unit": "update", "metrics": [{"type": "ROUGE"}],
            "max_samples": 4, "generation": options}  # fmt: skip
    Runner.from_cfg(config(tmp_path, custom_hooks=[hook, {"type": "EMAHook", "momentum": 0.3}])).train()
    folder = tmp_path / "run" / "evaluations"
    assert read_results(folder / "3.json")[1].values == rouge.values
    assert main([str(tmp_path / "run" / "iter_3.pth"), *arguments]) == 0
    assert read_results(out)[1].values == rouge.values
    capsys.readouterr()
    assert main(["--compare", str(folder / "3.json"), str(out)]) == 0, "losses and metrics"
    lines = capsys.readouterr().out.splitlines()
    names = [line.partition(":")[0] for line in lines]
    assert {"val/loss", "val/loss/text", "rouge1"} <= {*names} and all(
        line.endswith(", difference +0") for line in lines
    )
    assert main(["--compare", str(folder / "3.json"), str(folder / "6.json")]) == 0
    for wrong, message in (
        ("max_new_token=3", "did you mean 'max_new_tokens'"),
        ("flow.steps=3", "steps"),
        ("temperature=-1", "temperature"),
        ("temperature", "KEY=VALUE"),
        ("a.b=3", "generation has no key 'a'"),
    ):
        assert main([str(run_dir / "run"), "--generation", wrong]) == 2
        assert message in capsys.readouterr().err


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_nanovlm(tmp_path / "published")


def test_a_published_directory(directory, capsys, tmp_path):
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    picture = {"role": "user", "type": "image", "image_path": str(tmp_path / "red.png")}
    turns = [{"role": role, "type": "text", "content": text} for role, text in (("user", "?"), ("assistant", "red"))]
    record = {"conversations": [picture, *turns]}
    (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n")
    assert main([str(directory)]) == 2 and "--data FILE" in capsys.readouterr().err
    assert main([str(directory), "--data", str(tmp_path / "data.jsonl"), "--seq-length", "128"]) == 0
    assert values(capsys)["val/loss/text"] > 0


def test_tasks_of_lmms_eval(directory, capsys, tmp_path, monkeypatch):
    """With an imitation of the package: what it reads is logged by ``AsyncEvaluateHook``."""
    assert main([str(directory), "--lmms-tasks"]) == 2 and "pip install lmms-eval" in capsys.readouterr().err
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "lmms_imitation"))
    out = tmp_path / "step_7.json"
    assert main([str(directory), "--lmms-tasks", "--step", "7", "--limit", "1", "--out", str(out)]) == 0
    numbers, texts = read_result(out, update=7)
    assert len(TASKS) == 9 == texts and {f"{task}/samples" for task in TASKS} <= set(numbers)
    assert main([str(directory), "--lmms-tasks", "mme,mmstar"]) == 0
    assert [line.split("/")[0] for line in capsys.readouterr().out.splitlines() if "samples" in line][-2:] == [
        "mme",
        "mmstar",
    ]


def test_records_that_the_filters_of_the_training_leave_out_are_counted(tmp_path, capsys):
    """And ``num_used_data`` is that of the training's file alone."""
    source = {"type": "UnifiedGenerationDataset", "data_path": str(tmp_path / "train.jsonl"), "num_used_data": 9,
              "filters": [{"type": "MostCharacters", "most": 20}]}  # fmt: skip
    Runner.from_cfg(text_config(
        tmp_path, [{"text": words(2 + k % 3)} for k in range(20)], train_dataloader__dataset=source
    ), max_updates=1).train()  # fmt: skip
    held_out = write_jsonl(tmp_path / "held_out.jsonl", [{"text": words(2 + k)} for k in range(12)])
    assert main([str(tmp_path / "run"), "--data", str(held_out)]) == 0
    assert "Validation, held_out: filters remove 9 of 12 records" in capsys.readouterr().err
