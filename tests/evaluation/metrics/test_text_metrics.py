"""Metrics of text equal the values of their libraries; what is missing is named with what to install."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sacrebleu
import torchmetrics
from rouge_score.rouge_scorer import RougeScorer

from tests.evaluation import tiny_models
from tests.support.needs import JAVA
from unigen_ds.config.registry import METRICS
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.evaluation.metrics import Metric, build_metrics, evaluated
from unigen_ds.evaluation.metrics.text_metrics import BLEU, METEOR, ROUGE, BERTScore, ExactMatch

PREDICTIONS = ["the cat sat on the mat", "A dog is in the picture.", "", "Der Käfer läuft über die Straße\nund zurück"]
REFERENCES = [
    ["a cat sat on a mat", "the kitten sat on the mat"],
    ["The dog is in a red picture!", "There is a dog"],
    ["nothing at all", "not a word"],
    ["Der Käfer rennt über eine Straße\nund läuft zurück", "Ein Käfer ||| läuft  zurück"],
]


def score(metric: Metric, predictions: list, references: list) -> dict[str, float]:
    """In two updates, the later samples first: the order of updates does not matter."""
    keys = [f"sample {n}" for n in range(len(predictions))]
    for part in (slice(2, None), slice(0, 2)):
        metric.update(predictions[part], references[part], keys[part])
    return dict(evaluated(metric, checkpoint="").values)


@pytest.mark.parametrize(
    "arguments", [{}, {"tokenize": "intl", "lowercase": True, "max_order": 2, "smoothing": "add-k"}]
)
def test_bleu_is_sacrebleus(arguments: dict) -> None:
    values = score(BLEU(**arguments), PREDICTIONS, REFERENCES)
    names = {"max_order": "max_ngram_order", "smoothing": "smooth_method"}
    library = sacrebleu.BLEU(**{names.get(key, key): value for key, value in arguments.items()})
    expected = library.corpus_score(PREDICTIONS, [list(column) for column in zip(*REFERENCES, strict=True)])
    assert values == {"bleu": pytest.approx(expected.score, rel=0, abs=1e-12)} and expected.score > 1


@pytest.mark.parametrize("stemmer", [False, True])
def test_rouge_is_rouge_scores_and_splits_at_newlines(stemmer: bool) -> None:
    values = score(ROUGE(use_stemmer=stemmer), PREDICTIONS, REFERENCES)
    scorer = RougeScorer(list(values), use_stemmer=stemmer)
    for kind, value in values.items():
        each = [scorer.score_multi(r, p)[kind].fmeasure for p, r in zip(PREDICTIONS, REFERENCES, strict=True)]
        assert value == pytest.approx(sum(each) / len(each), rel=0, abs=1e-12)
    assert list(values) == ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    swap = score(ROUGE(), ["two lines\none line"], ["one line\ntwo lines"])
    assert swap["rougeLsum"] == 1 > swap["rougeL"], "lines are compared one by one, whatever their order"


@pytest.mark.slow
@JAVA
def test_meteor_is_that_of_pycocoevalcap() -> None:
    from pycocoevalcap.meteor.meteor import Meteor

    texts = [*PREDICTIONS[:3], "Two |||  beetles run", "the end"]
    references = [*REFERENCES[:3], ["two beetles ran"], ["the end"]]
    metric = METEOR()
    values = score(metric, texts, references)
    ids = range(len(texts))
    expected, each = Meteor().compute_score({n: references[n] for n in ids}, {n: [texts[n]] for n in ids})
    assert values == {"meteor": expected} and each[4] == 1
    assert metric.provenance["version"].startswith("pycocoevalcap ")
    java = metric._java
    metric.reset()
    assert score(metric, texts, references) == values and metric._java is java, "started once"
    java.meteor_p.kill()
    java.meteor_p.wait()
    metric.reset()
    assert score(metric, [*texts[:4], "the\nend"], references) == values and metric._java is not java, "started again"


def test_meteor_names_what_to_install_and_how_java_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}")
    with pytest.raises(ConfigError, match=r"metrics\[0\].*METEOR needs Java.*default-jre-headless"):
        build_metrics([{"type": "METEOR"}])
    java = tmp_path / "java"
    for script, problem in (
        ("echo 'Could not reserve enough space' >&2", "Could not reserve enough space.*2 GiB.*starts it again"),
        ("for n in 1 2 3 4; do read line; echo 1; done; exit 143", "status 143"),  # it ends before the score
    ):
        java.write_text(f"#!/bin/sh\n{script}\n")
        java.chmod(0o755)
        with pytest.raises(ConfigError, match=f"program ended: {problem}"):
            score(METEOR(), PREDICTIONS, REFERENCES)


@pytest.mark.parametrize("layer", [None, 1])
def test_bertscore_is_torchmetrics_with_a_local_model(tmp_path: Path, layer: int | None) -> None:
    from torchmetrics.functional.text import bert_score

    folder = str(tiny_models.bert(tmp_path / "tiny"))
    predictions, references = PREDICTIONS[:2], REFERENCES[:2]
    metric = BERTScore(path=folder, layer=layer)
    result = score(metric, predictions, references)
    expected = bert_score(predictions, references, model_name_or_path=folder, num_layers=layer, max_length=16)
    for kind, values in expected.items():
        assert result[f"bertscore_{kind}"] == pytest.approx(float(values.double().mean()), rel=1e-6)
    assert 0 < result["bertscore_f1"] < 1 and "tiny " in metric.provenance["model"]


@pytest.mark.parametrize("make", [tiny_models.bert, tiny_models.roberta])
def test_bertscore_counts_empty_texts_as_zero_and_names_truncated_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], Path]
) -> None:
    metric = BERTScore(path=str(make(tmp_path)))
    with caplog.at_level(logging.WARNING):
        result = score(metric, ["a cat", " ", "the " * 40], ["a cat", "a dog", "the " * 40])
    assert result["bertscore_f1"] == pytest.approx(2 / 3, rel=1e-6)
    assert "1 of 1 pairs have an empty text" in caplog.text or "1 of 2 pairs have an empty text" in caplog.text
    assert "texts are longer than 16 tokens" in caplog.text


def test_bertscore_refuses_what_is_no_local_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics\[0\].*'roberta-large/x' is no folder here.*hf download"):
        build_metrics([{"type": "BERTScore", "path": "roberta-large/x"}])
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"no folder with safetensors.*pickled weights are not read"):
        build_metrics([{"type": "BERTScore", "path": str(tmp_path)}])
    folder = str(tiny_models.bert(tmp_path / "tiny"))
    with pytest.raises(ConfigError, match=r"layer is 9.*1 to 2"):
        score(BERTScore(path=folder, layer=9), ["a"], ["a"])


def test_exact_match_is_torchmetrics_squad() -> None:
    answers = ["The Eiffel tower!", "42", "a  red cat", "blue"]
    references = [["Eiffel Tower"], ["forty-two", "42"], ["red cat"], ["green"]]
    squad = torchmetrics.text.SQuAD()
    squad.update(
        [{"prediction_text": text, "id": str(n)} for n, text in enumerate(answers)],
        [{"answers": {"answer_start": [0] * len(one), "text": one}, "id": str(n)} for n, one in enumerate(references)],
    )
    value = score(ExactMatch(normalize="squad"), answers, references)["exact_match"]
    assert value * 100 == pytest.approx(float(squad.compute()["exact_match"]), rel=0, abs=1e-12) and value == 0.75
    assert score(ExactMatch(), answers, references) == {"exact_match": 0.25}


def test_wrong_input_is_named() -> None:
    with pytest.raises(DataError, match=r"bleu has no predictions.*at least one sample"):
        evaluated(BLEU(), checkpoint="")
    with pytest.raises(DataError, match="bleu got 2 predictions, 1 references, 2 keys"):
        BLEU().update(["a", "b"], ["a"], ["0", "1"])
    for prediction, reference, problem in (
        (3, "a", r"'7': the prediction is int.*a text"), ("a", [], "'7': the reference is empty"),
        ("a", ["b", None], "'7': the reference is NoneType"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=problem):
            BLEU().update([prediction], [reference], ["7"])
    metric = BLEU()
    metric.update(["a", "b"], ["a", "b"], ["0", "1"])
    metric.update(["a"], ["a"], ["1"])
    with pytest.raises(DataError, match="bleu: 1 keys were added more than once, first '1'"):
        evaluated(metric, checkpoint="")


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ConfigError, match=r"BLEU needs the package sacrebleu.*pip install 'unigen_ds\[metrics\]'"):
        score(BLEU(), ["a"], ["a"])
    monkeypatch.setattr(BLEU, "library", "no-such-package")
    with pytest.raises(ConfigError, match=r"metrics\[0\].*no-such-package is not installed.*unigen_ds\[metrics\]"):
        build_metrics([{"type": "BLEU"}])


def test_the_metric_of_the_documentation_works(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "extending" / "parts.md").read_text(encoding="utf-8")
    (code,) = [block for block in page.split("```python\n")[1:] if "class MeanLength" in block]
    monkeypatch.setattr(METRICS, "_module_dict", dict(METRICS.module_dict))
    exec(code.split("```")[0], {"__name__": "own"})
    (metric,) = build_metrics([{"type": "MeanLength"}])
    assert score(metric, ["a b c", "a", "b c"], ["", "", ""]) == {"mean_length": 2}
    assert metric.provenance["version"] == "unigen_ds definition 1"
