"""A family of a user's own, from its config: its records, batch and loss terms, trained, stopped and resumed."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.own_parts.own_family import PointBatch, Regression, Regressor
from tools.export import main as export
from tools.generate import main as generate
from tools.train import main as train
from unigen_ds.core.batch import LossTerms
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.runner import Runner
from unigen_ds.runner.settings.tree import load_config
from unigen_ds.system import log
from unigen_ds.system.journals import read_lines

CONFIG = """
custom_imports = dict(imports=["tests.end_to_end.own_parts.own_family"])
model = dict(type="Regressor", num_features=3)
processor = dict(jitter=0.01)
train_dataloader = dict(batch_size=6, dataset=dict(type="Waves"))
optim_wrapper = dict(optimizer=dict(type="AdamW", lr=2e-2), accumulative_counts=2)
loss_weights = dict(value=0.5)
train_cfg = dict(max_epochs=40)
backend = dict(type="single")
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=-1))
work_dir = {work_dir!r}
"""


def config(work_dir: Path, **overrides: Any) -> Any:
    path = work_dir.with_suffix(".py")
    path.write_text(CONFIG.format(work_dir=str(work_dir)), encoding="utf-8")
    return load_config(path, {key.replace("__", "."): value for key, value in overrides.items()})


def lines(work_dir: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(work_dir / "metrics.jsonl") if "loss" in line]


def losses(work_dir: Path) -> dict[int, tuple[float, float]]:
    return {line["update"]: (line["loss/value"], line["loss/class"]) for line in lines(work_dir)}


class Keep(Hook):
    """Batches and results."""

    def __init__(self) -> None:
        self.batches: list[PointBatch] = []
        self.results: list[UpdateResult] = []

    def before_train_iter(self, run: Run, index: int, batch: Any) -> None:
        self.batches.append(batch)

    def after_update(self, run: Run, result: UpdateResult) -> None:
        self.results.append(result)


def test_it_learns_and_goes_on_to_the_bit_where_it_was_stopped(tmp_path: Path) -> None:
    Runner.from_cfg(config(tmp_path / "straight")).train()
    straight = losses(tmp_path / "straight")
    assert max(straight) == 120
    for term in (0, 1):
        first, last = ([straight[update][term] for update in range(start, start + 12)] for start in (1, 109))
        assert sum(last) < 0.5 * sum(first)
    changes = {"train_dataloader__num_workers": 1}  # the batch travels between processes
    Runner.from_cfg(config(tmp_path / "cut", **changes), max_updates=7).train()
    Runner.from_cfg(config(tmp_path / "cut", resume=True, **changes), max_updates=20).train()
    assert losses(tmp_path / "cut") == {update: loss for update, loss in straight.items() if update <= 20}


def test_each_term_is_a_mean_over_its_own_targets(tmp_path: Path) -> None:
    """The loss of the first update, by hand, from the batches and the initial weights."""
    changes = {"custom_hooks": [{"type": Keep}], "processor__jitter": 0.0}
    runner = Runner.from_cfg(config(tmp_path / "run", **changes), max_updates=1)
    keep = next(hook for hook in runner.hooks if isinstance(hook, Keep))
    start = Regressor(num_features=3)
    start.load_state_dict({name: tensor.clone() for name, tensor in runner.backend.model.state_dict().items()})
    runner.train()
    with torch.no_grad():
        sums = [start(batch).sums for batch in keep.batches]
    targets = [batch.target_counts() for batch in keep.batches]
    value = sum(s["value"] for s in sums) / sum(t["value"] for t in targets)
    kind = sum(s["class"] for s in sums) / sum(t["class"] for t in targets)
    (line,) = lines(tmp_path / "run")
    assert line["loss/value"] == pytest.approx(float(value)) and line["loss/class"] == pytest.approx(float(kind))
    assert line["loss"] == pytest.approx(float(0.5 * value + kind)), "the weight of one term; 1 of the other"
    assert keep.results[0].counts == {"value": 12.0, "class": sum(t["class"] for t in targets)}
    assert keep.results[0].counts["class"] < 12, "some classes are not known"


def test_a_sample_that_cannot_be_loaded_is_skipped_and_counted(tmp_path: Path) -> None:
    changes = {"train_dataloader__dataset__outlier": True, "train_dataloader__max_skipped_fraction": 1.0}
    changes["custom_hooks"] = [{"type": Keep}]
    runner = Runner.from_cfg(config(tmp_path / "run", **changes), max_updates=3)
    runner.train()
    keep = next(hook for hook in runner.hooks if isinstance(hook, Keep))
    (skipped,) = [each for batch in keep.batches for each in batch.skipped]
    assert skipped["sample"] == "waves:7:0" and skipped["why"] == "an outlier"
    assert sum(result.counts["value"] for result in keep.results) == 35
    assert sum(result.tokens for result in keep.results) == 36, "a padded row fills its sequence"


def test_its_settings_are_checked(tmp_path: Path) -> None:
    wrong = {"loss_weights__kind": 1.0, "processor__jiter": 0.1, "processor__seed": 3}
    with pytest.raises(ConfigError) as caught:
        Runner.from_cfg(config(tmp_path / "run", **wrong))
    expected = (
        "loss_weights.kind is the weight of no loss term. Allowed: value, class",
        "processor.jiter: did you mean 'jitter'",
        "processor.seed cannot be set",
    )
    for part in expected:
        assert part in str(caught.value), part
    with pytest.raises(ConfigError, match=r"loss_weights\.class is -1"):
        Runner.from_cfg(config(tmp_path / "run", loss_weights__class=-1))


def test_other_families_still_need_a_tokenizer_and_a_term_of_another_family_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config that several kinds of models share has weights that some of them do not use."""
    monkeypatch.setattr(logging.getLogger("unigen_ds"), "propagate", True)
    monkeypatch.setattr(log, "_shown", set())
    vlm = {"model": {"type": "VLM"}, "processor": {}, "loss_weights": {"image": 1.0}}
    with caplog.at_level(logging.INFO, logger="unigen_ds"), pytest.raises(ConfigError) as caught:
        Runner.from_cfg(config(tmp_path / "run", **vlm))
    assert "the config has no tokenizer" in str(caught.value) and "loss_weights" not in str(caught.value)
    assert "loss_weights.image has no effect: VLM has no such loss term." in caplog.messages


def test_without_a_published_form_or_inference_the_tools_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Runner.from_cfg(config(tmp_path / "run"), max_updates=1).train()
    assert export([str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "Regressor has no published form" in capsys.readouterr().err
    assert generate([str(tmp_path / "run"), "--prompt", "x", "--out", str(tmp_path / "drawn")]) == 2
    assert "Regressor has no inference" in capsys.readouterr().err
    (checkpoint,) = (tmp_path / "run").glob("iter_*.pth")
    stored = load_file(checkpoint / "model.safetensors")
    assert "body.1.running_mean" in stored and torch.isfinite(stored["body.1.running_var"]).all()


def test_targets_of_its_own_are_counted(tmp_path: Path) -> None:
    """No sequence fits a row of two units: all targets are lost, which a start refuses."""
    loader = {"overflow": "truncate", "seq_length": 1, "dataset__units": 2}
    changes = {f"train_dataloader__{key}": value for key, value in loader.items()}
    with pytest.raises(DataError, match="all 66 targets are lost"):
        Runner.from_cfg(config(tmp_path / "run", **changes))


ONE, THREE = {"value": 1.0}, {"value": 1.0, "class": 1.0, "more": 1.0}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"counts": ONE}, "'class' is in Family.terms and not in PointBatch.target_counts()"),
        ({"counts": THREE}, "'more' is in PointBatch.target_counts() and not in Family.terms"),
        ({"sums": ONE}, "'class' is in Family.terms and not in LossTerms.sums"),
        ({"sums": THREE}, "'more' is in LossTerms.sums and not in Family.terms"),
        ({"terms": ("value",)}, "'class' is in PointBatch.target_counts() and not in Family.terms"),
    ],
)
def test_a_term_that_is_not_everywhere_is_refused_at_the_first_micro_batch_and_in_the_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], changed: Any, problem: str
) -> None:
    if "terms" in changed:
        monkeypatch.setattr(Regression, "terms", changed["terms"])
    if "counts" in changed:
        monkeypatch.setattr(PointBatch, "target_counts", lambda batch: changed["counts"])
    if "sums" in changed:
        monkeypatch.setattr(Regressor, "forward", lambda model, batch: LossTerms(
            {term: model.heads(model.body(batch.x)).sum() for term in changed["sums"]}))  # fmt: skip
    given = config(tmp_path / "run", loss_weights={})
    with pytest.raises(ConfigError, match=re.escape(problem)):
        Runner.from_cfg(given).train()
    assert not list((tmp_path / "run").glob("*.pth")) and not lines(tmp_path / "run")
    assert train([str(tmp_path / "run.py"), "--dry-run", "--cfg-options", "loss_weights={}"]) == 1
    assert problem.replace("PointBatch", "Batch") in capsys.readouterr().out
