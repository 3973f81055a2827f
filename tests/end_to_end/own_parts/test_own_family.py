"""A family of a user's own, from its config: its records, batch and loss terms. ``tests/plugin`` has its code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.engines.jobs.users import write_rows
from tests.plugin.data import RowsBatch
from tests.plugin.family import Rows, RowsNetwork
from tests.support.processes import ROOT
from tests.text_run import KeepBatches
from tools.export import main as export
from tools.generate import main as generate
from tools.train import main as train
from unigen_ds import FAMILIES, MODELS, Family
from unigen_ds.core.batch import LossTerms
from unigen_ds.core.errors import ConfigError
from unigen_ds.runner import Runner
from unigen_ds.runner.settings.tree import load_config
from unigen_ds.system.journals import read_lines

CONFIG = ROOT / "tests" / "plugin" / "config.py"


@MODELS.register_module(force=True)
class SilentNetwork(RowsNetwork):
    """One that is neither published nor asked."""


@FAMILIES.register_module(force=True)
class SilentRows(Rows):
    model, published, inferencer = SilentNetwork, (), Family.inferencer


def config(work_dir: Path, **overrides: Any) -> Any:
    write_rows(work_dir.with_name("rows.txt"))
    options = {"work_dir": str(work_dir), "train_dataloader.dataset.path": str(work_dir.with_name("rows.txt"))}
    return load_config(CONFIG, {**options, **{key.replace("__", "."): value for key, value in overrides.items()}})


def lines(work_dir: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(work_dir / "metrics.jsonl") if "loss" in line]


def test_each_term_is_a_mean_over_its_own_targets(tmp_path: Path) -> None:
    """The loss of the first update, by hand, from the batches and the initial weights."""
    runner = Runner.from_cfg(config(tmp_path / "run", custom_hooks=[{"type": "KeepBatches"}]), max_updates=1)
    start = RowsNetwork(num_inputs=3)
    start.load_state_dict({name: tensor.clone() for name, tensor in runner.backend.model.state_dict().items()})
    runner.train()
    keep = next(hook for hook in runner.hooks if isinstance(hook, KeepBatches))
    with torch.no_grad():
        sums = [start(batch).sums for batch in keep.batches]
    targets = [batch.target_counts() for batch in keep.batches]
    value, label = (float(sum(s[term] for s in sums) / sum(t[term] for t in targets)) for term in ("value", "label"))
    (line,) = lines(tmp_path / "run")
    assert line["loss/value"] == pytest.approx(value) and line["loss/label"] == pytest.approx(label)
    assert line["loss"] == pytest.approx(value + 0.5 * label), "the weight of one term; 1 of the other"
    assert sum(t["value"] for t in targets) < 8, "some values are not known"


def test_without_a_published_form_or_inference_the_tools_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Runner.from_cfg(config(tmp_path / "run", model__type="SilentNetwork"), max_updates=1).train()
    assert export([str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "SilentNetwork has no published form" in capsys.readouterr().err
    assert generate([str(tmp_path / "run"), "--prompt", "x", "--out", str(tmp_path / "drawn")]) == 2
    assert "SilentNetwork has no inference" in capsys.readouterr().err
    (checkpoint,) = (tmp_path / "run").glob("iter_*.pth")
    tensors = load_file(checkpoint / "model.safetensors")
    assert torch.isfinite(tensors["layers.0.1.running_var"]).all()


ONE, THREE = {"value": 1.0}, {"value": 1.0, "label": 1.0, "more": 1.0}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"counts": ONE}, "'label' is in Family.terms and not in RowsBatch.target_counts()"),
        ({"counts": THREE}, "'more' is in RowsBatch.target_counts() and not in Family.terms"),
        ({"sums": ONE}, "'label' is in Family.terms and not in LossTerms.sums"),
        ({"sums": THREE}, "'more' is in LossTerms.sums and not in Family.terms"),
        ({"terms": ("value",)}, "'label' is in RowsBatch.target_counts() and not in Family.terms"),
    ],
)
def test_a_term_that_is_not_everywhere_is_refused_at_the_first_micro_batch_and_in_the_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: Any, problem: str
) -> None:
    if "terms" in change:
        monkeypatch.setattr(Rows, "terms", change["terms"])
    if "counts" in change:
        monkeypatch.setattr(RowsBatch, "target_counts", lambda batch: change["counts"])
    if "sums" in change:
        monkeypatch.setattr(RowsNetwork, "forward", lambda model, batch: LossTerms(
            {term: model.predict(batch.inputs).sum() for term in change["sums"]}))  # fmt: skip
    settings = config(tmp_path / "run", loss_weights={"_delete_": True})
    with pytest.raises(ConfigError, match=re.escape(problem)):
        Runner.from_cfg(settings).train()
    assert not list((tmp_path / "run").glob("*.pth")) and not lines(tmp_path / "run")
    options = [f"train_dataloader.dataset.path={tmp_path / 'rows.txt'}", f"work_dir={tmp_path / 'dry'}"]
    options += ["loss_weights={'_delete_':True}"]
    assert train([str(CONFIG), "--dry-run", "--cfg-options", *options]) == 1
    assert problem.replace("RowsBatch", "Batch") in capsys.readouterr().out
