"""Every metric has the same value and provenance on 1, 2 and 4 ranks with uneven shares."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.evaluation import tiny_models
from tests.support import processes
from unigen_ds.evaluation.provenance import REQUIRED_KEYS
from unigen_ds.system.dist import free_port

pytestmark = pytest.mark.slow

NAMES = {
    "bleu", "rouge1", "rouge2", "rougeL", "rougeLsum", "bertscore_precision", "bertscore_recall",
    "bertscore_f1", "exact_match", "fid_convolution",
    "clip_score", "multimodal_consistency", "multimodal_consistency_r_precision",
}  # fmt: skip


@pytest.fixture(scope="module")
def by_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One launch of four processes for all metrics."""
    folder = tmp_path_factory.mktemp("models")
    tiny_models.bert(folder / "bert")
    tiny_models.clip(folder / "clip")
    command = [sys.executable, "-m", "tests.evaluation.metrics.metric_ranks", str(folder), str(free_port())]
    endings = processes.ranks(command, world_size=4)
    assert all(one.status == 0 for one in endings), "\n".join(one.ending for one in endings)
    (line,) = [line for line in endings[0].out.splitlines() if line.startswith("RESULTS ")]
    return dict(json.loads(line.removeprefix("RESULTS ")))


def test_every_metric_is_the_same_on_1_2_and_4_ranks(by_run: dict[str, dict[str, Any]]) -> None:
    alone = by_run["1 ranks, batch size 1"]
    assert {name for name in alone if not name.startswith("result of ")} == NAMES
    for world_size in (2, 4):
        assert by_run[f"{world_size} ranks, batch size 1"] == alone, "in every bit"
        in_batches = by_run[f"{world_size} ranks, batch size 16"]
        assert {name: alone[name] for name in NAMES} == pytest.approx(in_batches, rel=1e-6)


def test_every_value_has_its_provenance(by_run: dict[str, dict[str, Any]]) -> None:
    results = {name: one for name, one in by_run["4 ranks, batch size 1"].items() if name.startswith("result of ")}
    assert len(results) == 7
    for one in results.values():
        assert set(REQUIRED_KEYS) <= set(one["provenance"]) and all(one["provenance"][name] for name in REQUIRED_KEYS)
        assert one["provenance"]["num_samples"] == "23" and one["provenance"]["checkpoint"] == "iter_8.pth"
    bleu = results["result of bleu"]["provenance"]
    assert bleu["seed"] == "none" and bleu["version"].startswith("sacrebleu 2")
    assert json.loads(bleu["settings"])["tokenize"] == "13a"
