"""Every metric has the same value and provenance on 1, 2 and 4 ranks with uneven shares."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests import processes
from tests.evaluation import tiny_models
from unigen_ds.evaluation.provenance import REQUIRED
from unigen_ds.system.dist import free_port

pytestmark = pytest.mark.slow

NAMES = {
    "bleu", "rouge1", "rouge2", "rougeL", "rougeLsum", "bertscore_precision", "bertscore_recall",
    "bertscore_f1", "exact_match", "fid_convolution",
    "clip_score", "multimodal_consistency", "multimodal_consistency_r_precision",
}  # fmt: skip


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One launch of four processes for all metrics."""
    folder = tmp_path_factory.mktemp("models")
    tiny_models.bert(folder / "bert")
    tiny_models.clip(folder / "clip")
    command = [sys.executable, "-m", "tests.evaluation.metrics.metric_ranks", str(folder), str(free_port())]
    ended = processes.ranks(command, world_size=4)
    assert all(one.status == 0 for one in ended), "\n".join(one.ending for one in ended)
    (line,) = [line for line in ended[0].out.splitlines() if line.startswith("RESULTS ")]
    return dict(json.loads(line.removeprefix("RESULTS ")))


def test_every_metric_is_the_same_on_1_2_and_4_ranks(seen: dict[str, dict[str, Any]]) -> None:
    alone = seen["1 ranks, batch size 1"]
    assert {name for name in alone if not name.startswith("result of ")} == NAMES
    for world_size in (2, 4):
        assert seen[f"{world_size} ranks, batch size 1"] == alone, "in every bit"
        batched = seen[f"{world_size} ranks, batch size 16"]
        assert {name: alone[name] for name in NAMES} == pytest.approx(batched, rel=1e-6)


def test_every_value_has_its_provenance(seen: dict[str, dict[str, Any]]) -> None:
    results = {name: one for name, one in seen["4 ranks, batch size 1"].items() if name.startswith("result of ")}
    assert len(results) == 7
    for one in results.values():
        assert set(REQUIRED) <= set(one["provenance"]) and all(one["provenance"][name] for name in REQUIRED)
        assert one["provenance"]["num_samples"] == "23" and one["provenance"]["checkpoint"] == "iter_8.pth"
    bleu = results["result of bleu"]["provenance"]
    assert bleu["seed"] == "none" and bleu["version"].startswith("sacrebleu 2")
    assert json.loads(bleu["settings"])["tokenize"] == "13a"
