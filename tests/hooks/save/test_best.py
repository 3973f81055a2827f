"""The best checkpoint and early stopping, in whole runs: found, kept over retention and resumes, and shown."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.data.support import write_jsonl
from tests.text_run import talks, text_config
from tools.checkpoints import main
from unigen_ds.checkpoint import saver
from unigen_ds.checkpoint.best_record import BEST_FILE, best_of
from unigen_ds.config.registry import HOOKS
from unigen_ds.core.errors import ConfigError, SaveError
from unigen_ds.evaluation.metrics.text_metrics import ExactMatch
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.hooks.save.best import BestHook, rule_of
from unigen_ds.runner import Runner


@HOOKS.register_module(force=True)
class ScriptedEvaluation(Hook):
    """Instead of ``EvaluateHook``: an evaluation after each update, whose value is ``values[update]``."""

    name = "evaluate"

    def __init__(self, *, values: list[Any]) -> None:
        self.values = [float(value) for value in values]

    def after_update(self, run: Run, result: UpdateResult) -> None:
        value = self.values[run.progress.updates - 1]
        self.metrics = {"val/loss": value, "val/accuracy": value, "val/bleu": 0.5}
        for hook in run.hooks:
            hook.after_val(run, self.metrics)

    def before_save_checkpoint(self, run: Run, metrics: dict[str, float]) -> None:
        metrics |= self.metrics


def config(folder: Path, values: list[Any], *, hooks: tuple[dict[str, Any], ...] = (), **overrides: Any) -> Any:
    """As many updates as ``values``, which the evaluations return; a checkpoint every two."""
    best = {"metric": overrides.pop("save_best", "val/loss")}
    folder.mkdir(exist_ok=True)
    options = {
        "train_cfg": {"max_updates": len(values)},
        "default_hooks__checkpoint": {"interval": 2, "by_epoch": False, "max_keep_ckpts": 1},
        "custom_hooks": [{"type": "ScriptedEvaluation", "values": values}, {"type": BestHook, **best}, *hooks],
    }
    return text_config(folder, talks(40), **{**options, **overrides})


def run(folder: Path, values: list[Any], **overrides: Any) -> Runner:
    runner = Runner.from_cfg(config(folder, values, **overrides))
    runner.train()
    return runner


def checkpoints(work_dir: Path) -> list[str]:
    return sorted(path.name for path in work_dir.glob("*.pth"))


def log(folder: Path) -> str:
    return (folder / "run" / "train.log").read_text(encoding="utf-8")


def lines(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    return dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())


VALUES = [5.0, 4.0, 2.0, 3.0, 3.0, 3.5, 3.0, 3.0]


def test_the_best_one_is_saved_at_its_update_and_kept(tmp_path, capsys):
    """Also with ``max_keep_ckpts=1``, and over a resume whose evaluations find no better one."""
    work_dir = tmp_path / "run"
    run(tmp_path, VALUES[:6])
    assert checkpoints(work_dir) == ["iter_3.pth", "iter_6.pth"]
    assert (work_dir / BEST_FILE).read_text() == f"{work_dir / 'iter_3.pth'}\n"
    run(tmp_path, VALUES, resume=True)
    assert checkpoints(work_dir) == ["iter_3.pth", "iter_8.pth"]
    capsys.readouterr()
    assert main(["best", str(work_dir)]) == 0
    output = lines(capsys)
    assert output == {"best": str(work_dir / "iter_3.pth"), "metric": "val/loss (less is better)", "value": "2.0",
                     "update": "3"}  # fmt: skip
    assert main(["list", str(work_dir)]) == 0
    rows = {row.split()[0]: row for row in capsys.readouterr().out.splitlines()}
    assert rows["iter_3.pth"].endswith("best: val/loss 2") and "best" not in rows["iter_8.pth"]


def test_a_better_one_replaces_it(tmp_path):
    run(tmp_path, [5.0, 4.0, 2.0, 3.0, 1.0, 3.0])
    assert checkpoints(tmp_path / "run") == ["iter_5.pth", "iter_6.pth"]
    assert best_of(tmp_path / "run")[0].name == "iter_5.pth"


def test_never_two_saves_at_one_update(tmp_path, monkeypatch):
    """Update 2 is a regular save, better, and update 4 all of these and the last."""
    names, real = [], saver.save
    monkeypatch.setattr(
        saver, "save", lambda work_dir, name, **options: names.append(name) or real(work_dir, name, **options)
    )
    run(tmp_path, [5.0, 4.0, 6.0, 3.0])
    assert names == ["iter_1.pth", "iter_2.pth", "iter_4.pth"]


def test_a_save_that_fails_leaves_the_former_best(tmp_path, monkeypatch):
    real = saver.save

    def save(work_dir: Path, name: str, **options: Any) -> Path:
        if name == "iter_5.pth":
            raise SaveError("the disk is full")
        return real(work_dir, name, **options)

    monkeypatch.setattr(saver, "save", save)
    run(tmp_path, [5.0, 4.0, 2.0, 3.0, 1.0, 3.0, 3.0, 3.0])
    assert checkpoints(tmp_path / "run") == ["iter_3.pth", "iter_8.pth"]
    path, best = best_of(tmp_path / "run")
    assert (path.name, best.value, best.updates) == ("iter_3.pth", 2.0, 3)
    assert "1 at update 5, was not saved" in log(tmp_path) and "iter_3.pth stays the best checkpoint" in log(tmp_path)


def test_a_resume_from_an_earlier_checkpoint_has_the_best_up_to_there(tmp_path):
    work_dir = tmp_path / "run"
    run(tmp_path, [5.0, 4.0, 3.5, 6.0, 1.0, 6.0], default_hooks__checkpoint__max_keep_ckpts=-1)
    run(tmp_path, [5.0, 4.0, 3.5, 6.0, 9.0, 9.0, 9.0], resume=str(work_dir / "iter_4.pth"))
    assert best_of(work_dir)[0].name == "iter_3.pth" and "iter_3.pth" in checkpoints(work_dir)
    assert (work_dir / BEST_FILE).read_text().strip().endswith("iter_3.pth")


def test_a_resume_into_another_folder_refers_to_it(tmp_path):
    run(tmp_path, VALUES[:6])
    run(tmp_path, VALUES, resume=str(tmp_path / "run" / "iter_6.pth"), work_dir=str(tmp_path / "other"))
    assert best_of(tmp_path / "other")[0] == tmp_path / "run" / "iter_3.pth"
    assert checkpoints(tmp_path / "other") == ["iter_8.pth"]


def test_a_best_one_that_was_deleted_is_named_and_found_anew(tmp_path, capsys):
    run(tmp_path, VALUES[:6])
    shutil.rmtree(tmp_path / "run" / "iter_3.pth")
    assert main(["best", str(tmp_path / "run")]) == 1 and "is not there" in capsys.readouterr().err
    run(tmp_path, VALUES, resume=True)
    assert "iter_3.pth (val/loss 2 at update 3) is not the best checkpoint any more" in log(tmp_path)
    assert best_of(tmp_path / "run")[1].updates == 7


def test_the_greatest_is_the_best_where_that_is_the_rule(tmp_path):
    run(tmp_path, [0.1, 0.5, 0.3, 0.4], save_best="val/accuracy")
    folder, best = best_of(tmp_path / "run")
    assert (folder.name, best.rule, best.value, best.updates) == ("iter_2.pth", "greater", 0.5, 2)


def test_nan_never_is_the_best(tmp_path):
    run(tmp_path, ["nan", 4.0, "nan", "-inf"])
    assert best_of(tmp_path / "run")[1].updates == 2
    assert "val/loss is nan at update 1" in log(tmp_path)


def test_a_name_that_the_evaluation_lacks_is_refused_at_the_first(tmp_path):
    with pytest.raises(ConfigError, match=r"val/bleu2.*Allowed: val/accuracy, val/bleu, val/loss"):
        run(tmp_path, VALUES, save_best="val/bleu2")
    assert checkpoints(tmp_path / "run") == ["iter_1.pth"], "no work is lost"
    with pytest.raises(ConfigError, match=r"EarlyStoppingHook.monitor is 'val/los'"):
        run(tmp_path / "b", VALUES, hooks=({"type": "EarlyStoppingHook", "monitor": "val/los", "rule": "less"},))


def test_without_a_hook_that_saves_it_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="without a CheckpointHook"):
        run(tmp_path, VALUES, default_hooks__checkpoint=None)


MMENGINE = {"acc": "greater", "coco/bbox_mAP": "greater", "mIoU": "greater", "accuracy/top1": "greater",
            "loss": "less", "my_loss": "less"}  # fmt: skip
OURS = {"val/loss": "less", "val/loss/text/accounts.jsonl": "less", "val/bleu": "greater", "val/fid/inception": "less",
        "val/rouge/rougeL": "greater", "val/perplexity": "less", "val/exact_match": "greater"}  # fmt: skip


@pytest.mark.parametrize("name, rule", [*MMENGINE.items(), *OURS.items()])
def test_the_rule_follows_from_the_name(name, rule):
    assert rule_of(name) == rule
    if name in MMENGINE:
        from mmengine.hooks import EarlyStoppingHook

        assert EarlyStoppingHook(monitor=name).rule == rule


def early(**arguments: Any) -> tuple[dict[str, Any]]:
    return ({"type": "EarlyStoppingHook", "monitor": "val/loss", **arguments},)


def test_early_stopping_ends_with_a_save_and_a_resume_says_why(tmp_path):
    work_dir, hooks = tmp_path / "run", early(patience=2)
    runner = run(tmp_path, VALUES, hooks=hooks)
    assert runner.progress.updates == 5 and "iter_5.pth" in checkpoints(work_dir)
    assert "has not improved for 2 evaluations (patience 2); the best value is 2.0" in log(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in work_dir.rglob("*.safetensors")}
    again = run(tmp_path, VALUES, hooks=hooks, resume=True)
    assert again.progress.updates == 5 and "was stopped early and is not trained further" in log(tmp_path)
    assert before == {path: path.stat().st_mtime_ns for path in work_dir.rglob("*.safetensors")}
    assert run(tmp_path, VALUES, hooks=early(patience=4), resume=True).progress.updates == 7


def test_its_count_is_in_the_checkpoint(tmp_path):
    """Two evaluations before the kill and one after it: as without the kill."""
    runner = Runner.from_cfg(config(tmp_path, VALUES, hooks=early(patience=2)), max_updates=4)
    runner.train()
    state = json.loads((tmp_path / "run" / "iter_4.pth" / "hooks.json").read_text())["early_stopping"]
    assert (state["best"], state["waited"]) == (2.0, 1)
    assert run(tmp_path, VALUES, hooks=early(patience=2), resume=True).progress.updates == 5


@pytest.mark.parametrize(
    "arguments, values, updates",
    [
        ({"patience": 2, "min_delta": 0.5}, [5.0, 4.8, 4.6, 4.0], 3),
        ({"stopping_threshold": 3.0}, [5.0, 3.0, 2.9, 1.0], 3),
        ({}, [5.0, "nan", 3.0], 2),
        ({"check_finite": False, "patience": 9}, [5.0, "nan", 3.0], 3),
        ({"monitor": "val/bleu", "patience": 2}, [5.0, 4.0, 3.0, 2.0], 3),
    ],
)
def test_when_it_ends(tmp_path, arguments, values, updates):
    assert run(tmp_path, values, hooks=early(**arguments)).progress.updates == updates


def evaluate_run(folder: Path, *, num_held_out: int = 3, monitor: str = "val/loss", **overrides: Any) -> int:
    """Updates after a run whose evaluations never are better than the first one by ``min_delta``."""
    folder.mkdir(exist_ok=True)
    data = write_jsonl(folder / f"held{num_held_out}.jsonl", talks(num_held_out, answer=2))
    source = {"type": "UnifiedGenerationDataset", "data_path": str(data), "name": "held"}
    evaluate = {"type": "EvaluateHook", "interval": 1, "unit": "update", "save_best": monitor, "rule": "less",
                "metrics": ["ExactMatch"], "generation": {"max_new_tokens": 1}}  # fmt: skip
    stop = {"type": "EarlyStoppingHook", "monitor": monitor, "rule": "less", "patience": 2, "min_delta": 100.0}
    settings = {"val_dataloader": {"dataset": source, "batch_size": 2}, "custom_hooks": [evaluate, stop], **overrides}
    return run(folder, VALUES, **settings).progress.updates


@pytest.mark.parametrize(
    ("monitor", "changes", "why"),
    [
        ("val/loss", {}, ""),
        ("val/loss", {"num_held_out": 4}, "num_samples is 3 and 4"),
        ("val/loss", {"loss_weights": {"text": 0.5}}, "settings is {"),
        ("val/exact_match", {"definition": 2}, "version is unigen_ds definition 1 and unigen_ds definition 2"),
    ],
)
def test_a_best_value_of_another_evaluation_starts_anew(tmp_path, monkeypatch, monitor, changes, why):
    """Other validation data, weights of the loss or version of the metric: neither the best nor the patience counts."""
    assert evaluate_run(tmp_path, monitor=monitor) == 3
    if "definition" in changes:
        monkeypatch.setattr(ExactMatch, "definition", changes.pop("definition"))
    assert evaluate_run(tmp_path, monitor=monitor, resume=True, **changes) == (6 if why else 3)
    warning = f"is not the best checkpoint any more: its value cannot be compared with those of this run: {why}"
    assert (warning in log(tmp_path)) == bool(why)
    assert ("EarlyStoppingHook starts anew: of the best value before, its value cannot" in log(tmp_path)) == bool(why)
    assert (best_of(tmp_path / "run")[1].updates > 3) == bool(why)
