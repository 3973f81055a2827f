"""The same losses on validation data under every engine and number of processes, and the same training afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from tests.end_to_end.engines.jobs.feature_cases import (
    EVALUATED_BY_FOUR,
    EVALUATED_ENGINES,
    EVALUATED_METRICS,
    EVALUATED_UPDATES,
    metric_interval,
)
from tests.end_to_end.engines.launch import METRICS, Outcome, relative, unequal, want
from unigen_ds.evaluation.provenance import read_results
from unigen_ds.system.journals import read_lines

runs = want("evaluated")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
BOUND = 1e-6
"""Relative, of means in fp32."""


def values(run: Outcome) -> list[dict[str, Any]]:
    return [line for line in read_lines(run.folder / "metrics.jsonl") if line.get("event") == "evaluation"]


@pytest.fixture(scope="module")
def single() -> dict[str, Any]:
    return values(runs().outcome("evaluated/single@1"))[0]


@pytest.mark.parametrize(("engine", "world"), [*EVALUATED_ENGINES, *EVALUATED_BY_FOUR])
def test_the_values_are_those_of_one_process(engine: str, world: int, single: dict[str, Any]) -> None:
    """At the same weights; the average equals them before the first update."""
    first = values(runs().outcome(f"evaluated/{engine}@{world}"))[0]
    assert first.keys() == single.keys() and first["update"] == single["update"] == 0
    assert {key: v for key, v in first.items() if key != "event" and relative(v, single[key]) > BOUND} == {}


@pytest.mark.parametrize(("engine", "world"), [("single", 1), *EVALUATED_ENGINES, *EVALUATED_BY_FOUR])
def test_metrics_are_computed_and_one_that_fails_on_one_rank_is_left_out(
    engine: str, world: int, single: dict[str, Any]
) -> None:
    """Before the training and at their interval; the run goes on. Their files have the values of the lines."""
    run = runs().outcome(f"evaluated/{engine}@{world}")
    lines = values(run)
    updates = [line["update"] for line in lines if "val/bleu" in line]
    assert updates == ([0, EVALUATED_UPDATES] if world == 2 and metric_interval(engine) == EVALUATED_UPDATES else [0])
    assert 0 < single["val/exact_match"] < 1 and 0 < single["val/bleu"] < 100
    for line in (line for line in lines if line["update"] in updates):
        assert {f"val/{name}" for name in EVALUATED_METRICS} < line.keys() and "val/fails" not in line
        losses, *results = read_results(run.folder / "evaluations" / f"{line['update']}.json")
        assert losses.values == {key: value for key, value in line.items() if key.startswith("val/loss")}
        by_metric = {f"val/{name}": value for one in results for name, value in one.values.items()}
        assert by_metric == {f"val/{name}": line[f"val/{name}"] for name in EVALUATED_METRICS}
    words = f"The metric fails has no value this time: rank {world - 1}: BrokenPipeError: on purpose"
    assert (run.folder / "train.log").read_text(encoding="utf-8").count(words) == len(updates)


def test_each_source_has_a_value(single: dict[str, Any]) -> None:
    sources = {f"val/loss/{term}/{name}" for term, name in (("text", "held"), ("text", "few"), ("image", "held"))}
    assert sources < single.keys() and "val/loss/image/few" not in single


@pytest.mark.parametrize(("engine", "world"), EVALUATED_ENGINES)
def test_training_notices_no_evaluation(engine: str, world: int) -> None:
    """Dropout, moments, average, generators: every bit."""
    run, other = (runs().outcome(f"evaluated/{engine}@{world}{end}") for end in ("", "/without"))
    assert [line["update"] for line in values(run)] == list(range(EVALUATED_UPDATES + 1))
    assert len(run.lines) == len(other.lines) == EVALUATED_UPDATES
    for a, b in zip(run.lines, other.lines, strict=True):
        assert [a[key] for key in METRICS] == [b[key] for key in METRICS]
    assert unequal(run.final, other.final) == []
    states = [sorted((one.checkpoints[-1] / "rng").iterdir()) for one in (run, other)]
    assert [path.read_bytes() for path in states[0]] == [path.read_bytes() for path in states[1]]
