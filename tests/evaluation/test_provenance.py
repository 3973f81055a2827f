"""Two evaluations: unlike numbers are refused with the reason, like ones are compared."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from unigen_ds.core.errors import DataError
from unigen_ds.evaluation.metrics import evaluated
from unigen_ds.evaluation.metrics.text_metrics import BLEU, ExactMatch
from unigen_ds.evaluation.provenance import Result, compare_files, read_results, unlike, write_results

REFERENCES = [f"the {n} cats sat on {n % 7} mats" for n in range(60)]


def bleu(share_right: float, *, checkpoint: str = "a", references: list[str] = REFERENCES, **arguments: Any) -> Result:
    """A share of the predictions is right, the others have one wrong word."""
    metric = BLEU(**arguments.pop("settings", {}))
    right = round(share_right * len(references))
    predictions = [one if n < right else one.replace("sat", "were") for n, one in enumerate(references)]
    metric.update(predictions, references, [f"{n:02}" for n in range(len(references))])
    return evaluated(metric, checkpoint=checkpoint, **arguments)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"settings": {"lowercase": True}}, r'settings is .*"lowercase": false.* and .*"lowercase": true'),
        ({"references": REFERENCES[:50]}, "num_samples is 60 and 50"),
        ({"references": [one.replace("cats", "dogs") for one in REFERENCES]}, "samples is .* and "),
        ({"made_by": {"temperature": "1.0"}}, "generation/temperature is not recorded and 1.0"),
    ],
)
def test_unlike_values_are_refused_with_the_reason(other: dict[str, Any], reason: str) -> None:
    assert re.search(reason, "; ".join(unlike(bleu(0.5), bleu(0.5, **other)))) and not unlike(bleu(0.5), bleu(0.9))


def test_files_are_compared_metric_by_metric(tmp_path: Path) -> None:
    metric = ExactMatch()
    metric.update(["a"], ["a"], ["0"])
    exact = evaluated(metric, checkpoint="x")
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    write_results(a, [bleu(0.5), exact])
    write_results(b, [bleu(0.9)])
    pairs, refusals = compare_files(a, b)
    assert pairs == {"bleu": (bleu(0.5).values["bleu"], bleu(0.9).values["bleu"])}
    assert refusals == [f"exact_match is not in {b}"]
    write_results(b, [bleu(0.9, settings={"max_order": 2}), exact])
    pairs, refusals = compare_files(a, b)
    assert pairs == {"exact_match": (1.0, 1.0)} and "settings" in refusals[0] and "evaluate both" in refusals[0]


def test_results_are_read_back_as_they_were_and_wrong_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    result = dataclasses.replace(bleu(0.5), values={"bleu": math.nan})
    write_results(path, [result])
    (read,) = read_results(path)
    assert math.isnan(read.values["bleu"])
    assert read.provenance == result.provenance and "NaN" not in path.read_text(encoding="utf-8")
    plain = json.loads(path.read_text(encoding="utf-8"))
    for content in ("{", {"format": 2, "results": []}, {"format": 1, "results": [3]},
                   {**plain, "results": [{**plain["results"][0], "provenance": {}}]},
                   {**plain, "results": [{**plain["results"][0], "values": {"x": "1"}}]}):  # fmt: skip
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        with pytest.raises(DataError, match=r"results.json (is no file of results|has results without metric)"):
            read_results(path)
    with pytest.raises(DataError, match="is no file of results"):
        read_results(tmp_path / "missing.json")
