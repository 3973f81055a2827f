"""Metrics of ``EvaluateHook`` through ``Runner.from_cfg(...).train()``: what they are, when, and what if they fail."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from tests.data.support import picture, talk, text, write_jsonl
from tests.end_to_end.evaluation.test_validation import assert_same_training, training
from tests.end_to_end.models.test_vlm_run import config as vlm_config
from tests.end_to_end.models.test_vlm_run import data as vlm_data  # noqa: F401 - a fixture
from tests.end_to_end.own_parts.test_own_family import config as regression_config
from tests.text_run import evaluations, log, text_config
from tests.text_run import words as spoken
from tests.tiny import tiny_config
from unigen_ds.checkpoint.best_record import best_of
from unigen_ds.config.registry import HOOKS, METRICS, MODELS
from unigen_ds.core.errors import ConfigError
from unigen_ds.evaluation.generation import Answer, Answering, answers
from unigen_ds.evaluation.metrics.picture_metrics import frechet_distance_of_samples
from unigen_ds.evaluation.metrics.text_metrics import ExactMatch
from unigen_ds.evaluation.provenance import read_results
from unigen_ds.hooks.base import Hook, Run
from unigen_ds.report.reading import read_work_dir
from unigen_ds.runner import Runner

WORDS = ("zero", "one", "two", "three")


@METRICS.register_module(force=True)
class Breaks(ExactMatch):
    """Fails at the second computation, as a program does that ends."""

    name = "breaks"
    calls = 0

    def values(self, table: np.ndarray) -> dict[str, float]:
        type(self).calls += 1
        if self.calls == 2:
            raise BrokenPipeError("the program ended")
        return {self.name: float(torch.rand(()))}


@MODELS.register_module(force=True)
class TinyExtractor(nn.Module):
    """Two features of a picture; its weights are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2, 1) + 0.5)

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1) / 255.0
        return torch.stack([flat.mean(1), flat.std(1)], 1) * self.weight[:, 0]


@HOOKS.register_module(force=True)
class KeepAnswers(Hook):
    """The values of each evaluation, and the model's answers at that update, asked for here."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.values: dict[int, Mapping[str, float]] = {}
        self.answers: dict[int, list[Answer]] = {}

    def after_val(self, run: Run, metrics: Mapping[str, float]) -> None:
        self.values[run.progress.updates] = dict(metrics)
        options = {"wanted": "text", "max_samples": None, **self.options}
        kind, most = options.pop("wanted"), options.pop("max_samples")
        result = answers(run.backend, run.validation._sets[0].data, kind, Answering(**options), max_samples=most)
        self.answers[run.progress.updates] = list(result.mine)


def kept_of(run: Runner) -> KeepAnswers:
    return next(hook for hook in run.hooks if isinstance(hook, KeepAnswers))


def evaluating(*metrics: Any, **arguments: Any) -> dict[str, Any]:
    """``metrics``: names and components, as a config may have both."""
    more = {"generation": {"max_new_tokens": 5}} if metrics else {}
    return {"type": "EvaluateHook", "interval": 2, "unit": "update", "metrics": [*metrics], **more, **arguments}


def records(number: int = 40) -> list[Any]:
    questions = [f"this is {WORDS[i % 4]} {spoken(i % 3, i)}" for i in range(number)]
    return [talk(text("user", one), text("assistant", spoken(3 + i % 3, i % 2))) for i, one in enumerate(questions)]


def text_run(
    folder: Path, *hooks: Any, data: list[Any] | None = None, updates: int = 4, stops: int | None = None, **options: Any
) -> Runner:
    """``stops``: the update after which it pauses."""
    settings = {
        "val_dataloader": {"split": 0.3, "batch_size": 3}, "train_cfg": {"max_updates": updates},
        "default_hooks__logger__interval": 1, "train_dataloader__seq_length": 32,
        "optim_wrapper__optimizer__lr": 2e-2, **options,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    config = text_config(folder, data or records(), custom_hooks=list(hooks), **settings)
    return Runner.from_cfg(config, max_updates=stops)


# --- what they are ----------------------------------------------------------------------------------------------------


def by_hand(answers: list[Answer]) -> dict[str, float]:
    import sacrebleu

    predictions, references = [one.prediction for one in answers], [one.reference for one in answers]
    same = [float(a == b) for a, b in zip(predictions, references, strict=True)]
    return {
        "val/bleu": sacrebleu.corpus_bleu(predictions, [references]).score,
        "val/exact_match": sum(same) / len(same),
    }


def test_values_of_texts_are_those_of_the_models_answers(tmp_path: Path) -> None:
    """And their files have where they come from; the losses are as without metrics."""
    hook = evaluating("BLEU", "ExactMatch", "Perplexity", save_best="val/bleu")
    keep = {"type": "KeepAnswers", "max_new_tokens": 5}
    run = text_run(tmp_path, hook, keep, updates=8)
    run.train()
    recorder = kept_of(run)
    assert sorted(recorder.values) == [2, 4, 6, 8]
    bleus = set()
    for update, values in recorder.values.items():
        expected = {**by_hand(recorder.answers[update]), "val/perplexity": math.exp(values["val/loss/text"])}
        assert {name: values[name] for name in expected} == pytest.approx(expected, rel=1e-12)
        bleus |= {values["val/bleu"], values["val/exact_match"]}
        line = next(line for line in evaluations(tmp_path) if line["update"] == update)
        assert {key: line[key] for key in values} == values
        losses, *results = read_results(tmp_path / "run" / "evaluations" / f"{update}.json")
        assert losses.values == {key: value for key, value in line.items() if key.startswith("val/loss")}
        assert {f"val/{k}": v for one in results for k, v in one.values.items()} == {k: values[k] for k in expected}
        number = str(len(recorder.answers[update]))
        assert all(one.provenance["num_samples"] == number for one in results if one.provenance["metric"] == "bleu")
        assert all(one.provenance["checkpoint"].endswith(f"run (update {update})") for one in results)
        assert results[0].provenance["generation/max_new_tokens"] == "5"
    assert len(bleus) > 2, "the answers change while the model learns"
    best = max(recorder.values.values(), key=lambda values: values["val/bleu"])
    assert best_of(tmp_path / "run")[1].value == best["val/bleu"]
    text_run(tmp_path / "losses", evaluating(), updates=8).train()
    plain = [{k: v for k, v in line.items() if "loss" in k} for line in evaluations(tmp_path / "losses")]
    assert [{k: v for k, v in line.items() if "loss" in k} for line in evaluations(tmp_path)] == plain


def test_a_vision_language_model(vlm_data: Path, tmp_path: Path) -> None:  # noqa: F811
    keep = {"type": "KeepAnswers", "max_new_tokens": 3, "max_samples": 4}
    hook = evaluating("ExactMatch", "BLEU", max_samples=4, generation={"max_new_tokens": 3})
    loader = {"split": 0.4, "batch_size": 3}
    run = Runner.from_cfg(vlm_config(vlm_data, tmp_path / "run", val_dataloader=loader, custom_hooks=[hook, keep],
                                     train_cfg={"max_updates": 2}))  # fmt: skip
    run.train()
    values, answers = kept_of(run).values[2], kept_of(run).answers[2]
    assert len(answers) == 4
    for name, value in by_hand(answers).items():
        assert values[name] == pytest.approx(value, rel=1e-12)
    (_, result, *_) = read_results(tmp_path / "run" / "evaluations" / "2.json")
    assert result.provenance["num_samples"] == "4"


@pytest.fixture(scope="module")
def draws(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draws")
    for seed in range(6):
        picture(folder / f"{seed}.png", 8, 8, seed=seed)
    drawings = [{"text_prompt": f"draw a {WORDS[i % 4]}", "image_path": f"{i % 6}.png"} for i in range(12)]
    write_jsonl(folder / "train.jsonl", [*records(8), *drawings])
    return folder


def image_run(draws: Path, work_dir: Path, *hooks: Any, **options: Any) -> Runner:
    source = {"type": "UnifiedGenerationDataset", "data_path": str(draws / "train.jsonl")}
    config = tiny_config(
        work_dir, draws, train_dataloader__dataset=source, train_dataloader__batch_size=2, model__llm__dropout=0.2,
        train_cfg={"max_updates": 2}, **{"val_dataloader": {"dataset": source, "batch_size": 2}, **options},
        custom_hooks=[{"type": "EMAHook", "momentum": 0.1}, *hooks],
    )  # fmt: skip
    return Runner.from_cfg(config)


FLOW = {"num_timesteps": 3}
EXTRACTOR = {"extractor": {"type": "TinyExtractor"}}


def test_values_of_pictures_are_those_of_the_models_and_training_notices_nothing(draws: Path, tmp_path: Path) -> None:
    """FID of a passed extractor whose weights are drawn, a metric that draws itself, and dropout."""
    options = {"generation": {"flow": FLOW}, "max_samples": 7}
    metrics = [{"type": "FID", **EXTRACTOR}, "Breaks", "Perplexity"]
    Breaks.calls = -100
    keep = {"type": "KeepAnswers", "wanted": "image", "max_samples": 7, "flow": FLOW}
    run = image_run(draws, tmp_path / "with" / "run", evaluating(*metrics, interval=1, **options), keep)
    run.train()
    values, answers = kept_of(run).values[2], kept_of(run).answers[2]
    torch.manual_seed(0)
    extractor = TinyExtractor()
    sides = [[one.prediction for one in answers], [one.reference for one in answers]]
    with torch.no_grad():
        ours, real = (extractor(torch.stack([pixels(one) for one in side])).double() for side in sides)
    assert len(ours) == 7
    assert values["val/fid_tinyextractor"] == pytest.approx(frechet_distance_of_samples(ours, real), rel=1e-6)
    assert "val/breaks" in values and "val/perplexity" in values
    image_run(draws, tmp_path / "without" / "run", val_dataloader=None).train()
    assert_same_training(tmp_path / "without", tmp_path / "with")


def pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(image.convert("RGB"), dtype=np.float32)).permute(2, 0, 1)


# --- when -------------------------------------------------------------------------------------------------------------


def test_metrics_have_an_interval_of_their_own_also_after_a_resume(tmp_path: Path) -> None:
    hook = evaluating("ExactMatch", interval=2, metric_interval=3, at_start=True)
    saves = {"default_hooks__checkpoint": {"interval": 2, "by_epoch": False}}
    for name, stops in (("straight", (9,)), ("resumed", (2, 7, 9))):
        for i, updates in enumerate(stops):
            folder = tmp_path / name
            options = {"train_cfg": {"max_updates": 9}, "resume": i > 0, **saves}
            text_run(folder, hook, stops=updates, **options).train()
        lines = {line["update"]: line for line in evaluations(tmp_path / name)}
        at = {key: [n for n, line in lines.items() if key in line] for key in ("val/exact_match", "val/loss")}
        assert at == {"val/exact_match": [0, 4, 6, 9], "val/loss": [0, 2, 4, 6, 8, 9]}
    assert evaluations(tmp_path / "straight") == evaluations(tmp_path / "resumed")


def test_results_of_updates_that_the_run_went_back_from_are_set_aside(tmp_path: Path) -> None:
    """And the report has each value once, with where it comes from."""
    saves = {"default_hooks__checkpoint": {"interval": 2, "by_epoch": False}}
    hook = evaluating("ExactMatch")
    text_run(tmp_path, hook, updates=4, **saves).train()
    (tmp_path / "run" / "evaluations" / "9.json").write_bytes(
        (tmp_path / "run" / "evaluations" / "4.json").read_bytes()
    )
    text_run(tmp_path, hook, updates=4, **saves, resume=str(tmp_path / "run" / "iter_2.pth")).train()
    files = {path.relative_to(tmp_path / "run" / "evaluations").as_posix()
             for path in (tmp_path / "run" / "evaluations").rglob("*.json")}  # fmt: skip
    assert files == {"2.json", "4.json", "abandoned/4.json", "abandoned/9.json"}
    read = read_work_dir(tmp_path / "run")
    pairs = [(one.update, one.provenance.get("metric")) for one in read.evaluations if "val/exact_match" in one.values]
    assert pairs == [(2, "exact_match"), (4, "exact_match")] and not read.problems


# --- what cannot be computed ------------------------------------------------------------------------------------------


def test_a_metric_that_fails_is_a_warning_and_the_run_goes_on(tmp_path: Path) -> None:
    Breaks.calls = 0
    text_run(tmp_path, evaluating("Breaks", "ExactMatch"), updates=6).train()
    pairs = [("val/breaks" in line, "val/exact_match" in line) for line in evaluations(tmp_path)]
    assert pairs == [(True, True), (False, True), (True, True)] and len(training(tmp_path)) == 6
    assert "The metric breaks has no value this time: BrokenPipeError: the program ended" in log(tmp_path)
    results = read_results(tmp_path / "run" / "evaluations" / "4.json")
    assert [one.provenance["metric"] for one in results] == ["val/loss", "exact_match"]


def test_answers_that_cannot_be_generated_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from unigen_ds.inference import answers

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(answers, "continue_prompts", fails)
    text_run(tmp_path, evaluating("ExactMatch", "Perplexity"), updates=2).train()
    (line,) = evaluations(tmp_path)
    assert "val/exact_match" not in line and line["val/perplexity"] > 1
    assert "The metric exact_match has no value this time: no text could be generated" in log(tmp_path)
    assert "RuntimeError: on purpose" in log(tmp_path)


def test_records_that_are_left_out_are_counted(tmp_path: Path) -> None:
    rows = [record for pair in zip(records(20), [{"text": "two three"}] * 20, strict=True) for record in pair]
    run = text_run(tmp_path, evaluating("ExactMatch", "ROUGE"), data=rows, updates=4)
    run.train()
    (draws_,) = run.validation._sets[0].data.draws()
    plain = sum(draw.index % 2 for draw in draws_)
    why = "without such an answer, or without a prompt before it"
    line = f"{plain} validation records are left out, {why}; {len(draws_) - plain} are answered"
    assert plain and log(tmp_path).count(f"Metrics of texts (exact_match, rouge): {line}") == 2, "at each evaluation"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"metrics": [{"type": "BLEU"}, {"type": "BLEU"}]}, "bleu twice"),
        ({"metrics": [{"type": "BLEU"}], "generation": {"steps": 3}}, "generation has no key 'steps'"),
        ({"metrics": [{"type": "BLEU"}], "generation": {"top_p": 0.5}}, "temperature is 0"),
        ({"max_samples": 3}, "no effect without metrics"),
        ({"interval": 0}, r"EvaluateHook\.interval is"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        text_run(tmp_path, {**evaluating(), **arguments})


def test_a_family_without_inference_is_refused_at_the_start(tmp_path: Path) -> None:
    loader = {"split": 0.3, "batch_size": 2}
    hook = evaluating("ExactMatch")
    with pytest.raises(ConfigError, match=r"exact_match.*has no inference"):
        changes = {"model__type": "SilentNetwork", "custom_hooks": [hook], "val_dataloader": loader}
        Runner.from_cfg(regression_config(tmp_path / "run", **changes)).train()
