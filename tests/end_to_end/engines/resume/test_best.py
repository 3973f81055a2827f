"""The best checkpoint over resumes under other engines, and ``tools/evaluate.py`` on the checkpoints of each."""

from __future__ import annotations

import json

import pytest

from tests.end_to_end.engines.jobs.feature_cases import BEST_CHAIN
from tests.end_to_end.engines.launch import want
from tools.evaluate import main
from unigen_ds.checkpoint.best_record import BEST_FILE, best_of
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.system.journals import read_lines

runs = want("best")
pytestmark = pytest.mark.timeout(3600)


def evaluations() -> dict[int, float]:
    lines = read_lines(runs().outcome("best").folder / "metrics.jsonl")
    return {line["update"]: line["val/loss"] for line in lines if line.get("event") == "evaluation"}


def test_the_best_checkpoint_outlives_two_changes_of_the_engine():
    work_dir, values = runs().outcome("best").folder, evaluations()
    assert sorted(values) == list(range(1, BEST_CHAIN[-1][2] + 1))
    path, best = best_of(work_dir)
    assert (best.updates, best.value) == max(values.items(), key=lambda item: item[1])
    assert best.updates <= BEST_CHAIN[0][2], "not a best one of the last engine alone"
    assert (work_dir / BEST_FILE).read_text().strip() == str(path)
    updates = {
        Manifest.read(one).progress.updates: Manifest.read(one).topology["engine"] for one in work_dir.glob("*.pth")
    }
    assert updates == {best.updates: "deepspeed", BEST_CHAIN[-1][2]: "single"}
    assert Manifest.read(path).metrics["val/loss"] == best.value


@pytest.mark.parametrize("which", ["best", "last"])
def test_the_tool_has_the_hooks_value(which, tmp_path):
    work_dir = runs().outcome("best").folder
    path, best = best_of(work_dir)
    assert main([str(path if which == "best" else work_dir), "--out", str(tmp_path / "out.json")]) == 0
    [result] = json.loads((tmp_path / "out.json").read_text())["results"]
    update = best.updates if which == "best" else BEST_CHAIN[-1][2]
    assert result["values"]["val/loss"] == pytest.approx(evaluations()[update], rel=1e-6)
    assert f"(update {update})" in result["provenance"]["checkpoint"]
