"""Two evaluations: unlike numbers are refused with the reason, like ones have a difference with an interval."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.evaluation.metrics import evaluated
from unigen_ds.evaluation.metrics.text_metrics import BLEU, ExactMatch
from unigen_ds.evaluation.provenance import NO_DRAWS, Result, compare, compare_files, read_results, write_results

REFERENCES = [f"the {n} cats sat on {n % 7} mats" for n in range(60)]


def bleu(share_right: float, *, checkpoint: str = "a", references: list[str] = REFERENCES, **arguments: Any) -> Result:
    """A share of the predictions is right, the others have one wrong word."""
    metric = BLEU(**arguments.pop("settings", {}))
    right = round(share_right * len(references))
    made = [one if n < right else one.replace("sat", "were") for n, one in enumerate(references)]
    metric.update(made, references, [f"{n:02}" for n in range(len(references))])
    return evaluated(metric, checkpoint=checkpoint, **arguments)


def test_like_values_have_a_difference_with_an_interval() -> None:
    a, b = bleu(0.5, checkpoint="iter_4.pth"), bleu(0.9, checkpoint="iter_8.pth")
    (found,) = compare(a, b)
    assert found.difference == b.values["bleu"] - a.values["bleu"] > 0
    assert found.low is not None and found.high is not None and 0 < found.low < found.difference < found.high
    assert f"difference {found.difference:+.6g} (95 % interval {found.low:+.6g}" in str(found)
    (same,) = compare(a, bleu(0.5))
    assert (same.difference, same.low, same.high) == (0, 0, 0), "the draws are paired"


def test_the_interval_is_that_of_the_paired_bootstrap() -> None:
    """Against an own computation: the quantiles of the mean differences of redrawn samples."""
    right = [np.arange(60) % 3 > 0, np.arange(60) % 4 > 0]
    results = []
    for one in right:
        metric = ExactMatch()
        metric.update(["yes" if ok else "no" for ok in one], ["yes"] * 60, [f"{n:02}" for n in range(60)])
        results.append(evaluated(metric, checkpoint="x", resamples=4000, seed=5))
    (found,) = compare(*results)
    drawn = np.random.default_rng(0).integers(0, 60, (20000, 60))
    differences = (right[1].astype(float) - right[0])[drawn].mean(1)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(differences, (0.025, 0.975))), abs=0.02)


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
    with pytest.raises(ConfigError, match=rf"bleu cannot be compared: .*{reason}.*evaluate both"):
        compare(bleu(0.5), bleu(0.5, **other))


def test_without_equal_draws_there_is_no_interval_and_the_reason_is_stated() -> None:
    (none,) = compare(bleu(0.5, resamples=0), bleu(0.6))
    assert none.low is None and none.difference > 0 and "no interval: EvaluateHook draws no samples again" in str(none)
    a = bleu(0.5, resamples=0)
    a = dataclasses.replace(a, provenance={**a.provenance, "resampling": f"{NO_DRAWS}the model returns no values"})
    assert "(no interval: the model returns no values)" in str(compare(a, a)[0])
    (other,) = compare(bleu(0.5, seed=1), bleu(0.6, seed=2))
    assert other.low is None and "1000 draws, seed 1 and 1000 draws, seed 2" in str(other)


def test_files_are_compared_metric_by_metric(tmp_path: Path) -> None:
    metric = ExactMatch()
    metric.update(["a"], ["a"], ["0"])
    exact = evaluated(metric, checkpoint="x")
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    write_results(a, [bleu(0.5), exact])
    write_results(b, [bleu(0.9)])
    differences, refusals = compare_files(a, b)
    assert [one.name for one in differences] == ["bleu"] and refusals == [f"exact_match is not in {b}"]
    write_results(b, [bleu(0.9, settings={"max_order": 2}), exact])
    differences, refusals = compare_files(a, b)
    assert [one.name for one in differences] == ["exact_match"] and "settings" in refusals[0]


def test_results_are_read_back_as_they_were_and_wrong_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    result = dataclasses.replace(bleu(0.5, resamples=3), values={"bleu": math.nan})
    write_results(path, [result])
    (read,) = read_results(path)
    assert math.isnan(read.values["bleu"]) and read.replicates == result.replicates
    assert read.provenance == result.provenance and "NaN" not in path.read_text(encoding="utf-8")
    plain = json.loads(path.read_text(encoding="utf-8"))
    for broken in ("{", {"format": 2, "results": []}, {"format": 1, "results": [3]},
                   {**plain, "results": [{**plain["results"][0], "provenance": {}}]},
                   {**plain, "results": [{**plain["results"][0], "values": {"x": "1"}}]}):  # fmt: skip
        path.write_text(broken if isinstance(broken, str) else json.dumps(broken), encoding="utf-8")
        with pytest.raises(DataError, match=r"results.json (is no file of results|has results without metric)"):
            read_results(path)
    with pytest.raises(DataError, match="is no file of results"):
        read_results(tmp_path / "missing.json")
