"""Hooks written for mmengine's Runner run here as they are, and see what mmengine's own Runner shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mmengine.hooks
import mmengine.runner
import pytest
import torch
from mmengine.model import BaseModel
from mmengine.registry import HOOKS as MMENGINE_HOOKS
from torch import nn
from torch.utils.data import DataLoader

from tests.text_run import KeepBatches, text_config, words
from unigen_ds.checkpoint import store
from unigen_ds.config.overrides import read as load_config_file
from unigen_ds.core.errors import ConfigError
from unigen_ds.hooks.mmengine import MMEngineHook
from unigen_ds.runner import Runner
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.system.journals import read_lines

RECORDS = [{"text": words(4, k)} for k in range(8)]


@MMENGINE_HOOKS.register_module(force=True)
class Recorder(mmengine.hooks.Hook):
    """Where it was called, and what the runner showed there."""

    calls: list[tuple[Any, ...]] = []  # noqa: RUF012 - a new one for each test
    outputs: list[dict[str, float]] = []  # noqa: RUF012

    def _record(self, point: str, runner: Any, *extra: Any) -> None:
        info = runner.message_hub.runtime_info
        hub = tuple(info.get(key) for key in ("iter", "epoch", "max_iters", "loop_stage"))
        self.calls.append((point, runner.iter, runner.epoch, runner.max_iters, runner.max_epochs, hub, *extra))

    def before_train(self, runner: Any) -> None:
        self._record("before_train", runner)

    def before_train_epoch(self, runner: Any) -> None:
        self._record("before_train_epoch", runner)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self._record("before_train_iter", runner, batch_idx, len(runner.optim_wrapper.get_lr()["lr"]))

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        last = self.end_of_epoch(runner.train_dataloader, batch_idx)
        self._record("after_train_iter", runner, batch_idx, last, self.is_last_train_iter(runner))
        self.outputs.append({key: float(value) for key, value in outputs.items()})

    def after_train_epoch(self, runner: Any) -> None:
        self._record("after_train_epoch", runner, self.is_last_train_epoch(runner))

    def after_train(self, runner: Any) -> None:
        self._record("after_train", runner)


class Toy(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Any, mode: str = "loss") -> dict[str, torch.Tensor]:
        return {"loss": self.weight * 1.0}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Recorder.calls, Recorder.outputs = [], []


def run(folder: Path, *hooks: dict[str, Any], **overrides: Any) -> Runner:
    folder.mkdir(exist_ok=True)
    config = text_config(folder, RECORDS, train_dataloader__packing=None, **overrides)
    config.custom_hooks = [dict(type="KeepBatches"), *hooks]
    runner = Runner.from_cfg(config)
    runner.train()
    return runner


def of_mmengine(folder: Path, *, train_cfg: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What the same hook sees in mmengine's own Runner: 8 records in batches of one."""
    Recorder.calls = []
    mmengine.runner.Runner(
        model=Toy(),
        work_dir=str(folder),
        train_dataloader=DataLoader([dict(inputs=k) for k in range(8)], batch_size=1),  # type: ignore[arg-type]
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        train_cfg=train_cfg,
        custom_hooks=[Recorder()],
        default_hooks=dict(checkpoint=None, logger=None),
        experiment_name=folder.name,
    ).train()
    return Recorder.calls


@pytest.mark.parametrize("limit", [{"max_epochs": 2}, {"max_iters": 11}])
def test_a_hook_sees_what_mmengines_own_runner_shows(tmp_path: Path, limit: dict[str, int]) -> None:
    by_epoch = "max_epochs" in limit
    expected = of_mmengine(tmp_path / "mm", train_cfg=dict(by_epoch=by_epoch, **limit))
    Recorder.calls = []
    run(tmp_path / "here", dict(type=Recorder), train_cfg=limit)

    def comparable(calls: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        # an iteration loop has one epoch there, which never ends; ours are passes over the data
        rest = [s for s in calls if by_epoch or not s[0].endswith("_epoch")]
        return rest if by_epoch else [(s[0], s[1], s[3], s[5][0], s[5][2:], *s[6:]) for s in rest]

    assert comparable(Recorder.calls) == comparable(expected)
    assert {call[0] for call in comparable(expected)} >= {"before_train", "before_train_iter", "after_train"}


def test_a_run_with_hooks_of_mmengine_trains_the_same(tmp_path: Path) -> None:
    hooks = [
        dict(type="mmengine.IterTimerHook"),
        dict(type="mmengine.hooks.EmptyCacheHook", after_iter=True),
        dict(type=mmengine.hooks.RuntimeInfoHook),
        dict(type="mmengine.LoggerHook", interval=2),
    ]
    plain = run(tmp_path / "plain", train_cfg=dict(max_epochs=1))
    other = run(tmp_path / "other", *hooks, train_cfg=dict(max_epochs=1))
    for (name, a), (_, b) in zip(
        plain.backend.model.named_parameters(), other.backend.model.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name
    own_hooks = [hook for hook in other.hooks if isinstance(hook, MMEngineHook)]
    assert own_hooks[0].cls is mmengine.hooks.RuntimeInfoHook, "VERY_HIGH runs first"
    view = own_hooks[0].view
    assert view is not None and all(hook.view is view for hook in own_hooks)
    for key in ("train/loss", "train/lr", "train/time", "train/data_time"):
        assert view.message_hub.get_scalar(key).current() > 0, key
    assert len(view.message_hub.get_scalar("train/loss").data[0]) == 8
    rows = [json.loads(line) for line in next(Path(view.log_dir).glob("vis_data/scalars.json")).open()]
    assert [line["step"] for line in rows] == [2, 4, 6, 8] and all(line["loss"] > 0 for line in rows)
    text = (tmp_path / "other" / "run" / "train.log").read_text()
    assert "Epoch(train) [1][2/8]" in text and "eta:" in text, "mmengine's own lines"


def test_mmengines_early_stopping_reads_the_validation(tmp_path: Path) -> None:
    """No value is better by 100: it stops after the first evaluation and ``patience`` others, with a checkpoint."""
    stopping = dict(type="mmengine.EarlyStoppingHook", monitor="loss", rule="less", min_delta=100.0, patience=2)
    runner = with_validation(tmp_path, stopping, train_cfg=dict(max_updates=8))
    assert runner.progress.updates == 3 and not runner.finished
    assert len(store.list_checkpoints(tmp_path / "run")) == 1


class Remembers(mmengine.hooks.Hook):
    """What it adds to a checkpoint is there after a resume."""

    content: Any = None

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"iter": checkpoint["meta"]["iter"]}
        checkpoint["weights"] = torch.zeros(3)

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        type(self).content = checkpoint["mine"]
        assert "state_dict" not in checkpoint


def test_what_a_hook_stores_is_there_after_a_resume(tmp_path: Path) -> None:
    hook = dict(type=Remembers)
    run(tmp_path, hook, train_cfg=dict(max_updates=3))
    log = (tmp_path / "run" / "train.log").read_text()
    assert "'weights' to the checkpoint, a Tensor, which is not stored" in log
    run(tmp_path, hook, train_cfg=dict(max_updates=5), resume=True)
    assert Remembers.content == {"iter": 3}


class Asks(mmengine.hooks.Hook):
    def before_train(self, runner: Any) -> None:
        assert not hasattr(runner, "load_checkpoint") and not hasattr(runner, "val_loop")
        with pytest.raises(AttributeError, match=r"uses runner\.val_dataloader, which .* not in this run"):
            len(runner.val_dataloader)
        runner.load_checkpoint("here")


def test_what_cannot_exist_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"Asks\.before_train uses runner\.load_checkpoint, which does not") as error:
        run(tmp_path, dict(type=Asks))
    names = str(error.value).partition("Allowed: ")[2].partition(". Remedy: the engine steps, the config loads")[0]
    assert {"iter", "message_hub", "visualizer", "optim_wrapper", "train_loop", "log_processor", "param_schedulers",
            "save_checkpoint", "val_dataloader"} <= {*names.split(", ")}  # fmt: skip


class Changes(mmengine.hooks.Hook):
    """Changes the model's parameters at one point."""

    def __init__(self, point: str, what: str) -> None:
        def change(runner: Any, *arguments: Any, **options: Any) -> None:
            module = next(m for m in runner.model.modules() if isinstance(m, nn.Linear))
            if what == "freezes":
                module.weight.requires_grad_(False)
            elif what == "replaces":
                module.weight = nn.Parameter(module.weight.detach().clone())
            else:
                runner.model.more = nn.Linear(2, 2)

        setattr(self, point, change)


@pytest.mark.parametrize(
    ("point", "what", "names"),
    [("before_run", "adds", r"more\.weight, more\.bias"), ("after_train_iter", "freezes", r"\S*weight")],
)
def test_a_hook_that_changes_what_is_trained_is_refused(tmp_path: Path, point: str, what: str, names: str) -> None:
    message = f"{point} freezes, adds, removes or replaces {names}, after the engine was built"
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, dict(type=Changes, point=point, what=what))
    assert not list(tmp_path.glob("*.pth")), "no checkpoint of weights that were moved without a gradient"


def with_validation(folder: Path, *hooks: dict[str, Any], **overrides: Any) -> Runner:
    """Three batches of validation data, evaluated after each update."""
    folder.mkdir(exist_ok=True)
    (folder / "held.jsonl").write_text('{"text": "one two three four"}\n' * 5)
    source = {"type": "UnifiedGenerationDataset", "data_path": str(folder / "held.jsonl")}
    evaluate = dict(type="EvaluateHook", interval=1, unit="update")
    validation = {"dataset": source, "batch_size": 2}
    return run(
        folder, evaluate, *hooks, **{"val_dataloader": validation, "train_cfg": dict(max_updates=3), **overrides}
    )


class ReadsAndSaves(mmengine.hooks.Hook):
    """What many hooks of users do: save where a metric asks for it, and log the learning rate."""

    priority = "VERY_LOW"
    lr: list[list[float]] = []  # noqa: RUF012 - a new one for each test

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        [scheduler] = runner.param_schedulers
        self.lr.append(scheduler.get_last_value())
        with pytest.raises(AttributeError, match=r"param_schedulers\[0\]\.step, which .*the engine steps"):
            scheduler.step()

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        assert len(runner.val_dataloader) == 3 and len(runner.val_dataloader.dataset) == 5
        if runner.iter == 2:
            runner.save_checkpoint(runner.work_dir, filename="best.pth")


def test_a_hook_reads_the_learning_rate_and_asks_for_a_checkpoint(tmp_path: Path) -> None:
    ReadsAndSaves.lr = []
    with_validation(tmp_path, dict(type=ReadsAndSaves), train_cfg=dict(max_updates=4),
                    default_hooks__logger={"interval": 1})  # fmt: skip
    updates = [one.manifest.progress.updates for one in store.list_checkpoints(tmp_path / "run") if one.manifest]
    assert sorted(updates) == [2, 4], "at the update of the evaluation, once, and at the end"
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    rates = [line["lr"] for line in lines if "lr" in line]
    assert [values[0] for values in ReadsAndSaves.lr] == pytest.approx(rates) and len(rates) == 4
    text = (tmp_path / "run" / "train.log").read_text()
    assert text.count("calls runner.save_checkpoint: the checkpoint is saved after the update by default_hooks") == 1


def test_a_checkpoint_that_nothing_saves_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"default_hooks\.checkpoint=None saves nothing.*interval=-1"):
        with_validation(tmp_path, dict(type=ReadsAndSaves), default_hooks__checkpoint=None)


WORK = {"IterTimerHook": {}, "RuntimeInfoHook": {}, "LoggerHook": {"interval": 1},
        "EmptyCacheHook": {"after_iter": True},
        "EarlyStoppingHook": {"monitor": "loss", "rule": "less"},
        "ProfilerHook": {"by_epoch": False}}  # fmt: skip
OURS = ("CheckpointHook", "EMAHook")
REFUSED = {"ParamSchedulerHook": "param_scheduler acts", "DistSamplerSeedHook": "order of the data",
           "SyncBuffersHook": "buffers", "PrepareTTAHook": "tools/evaluate|no test loop",
           "NaiveVisualizationHook": "PreviewHook", "NPUProfilerHook": "mmengine.ProfilerHook"}  # fmt: skip


def test_every_hook_of_mmengine_works_or_is_refused(tmp_path: Path) -> None:
    """In a run with evaluations; a hook that a later version of mmengine adds must be in one of the lists."""
    assert {*mmengine.hooks.__all__} == {"Hook", *WORK, *OURS, *REFUSED}
    runner = with_validation(tmp_path, *(dict(type=f"mmengine.{name}", **options) for name, options in WORK.items()))
    assert runner.progress.updates == 3
    text = (tmp_path / "run" / "train.log").read_text()
    assert text.count("(val)") == 3 and "[3/3]" in text, "mmengine's own line of each evaluation"
    config = text_config(tmp_path, RECORDS)
    config.work_dir = str(tmp_path / "refused")
    for name, why in REFUSED.items():
        config.custom_hooks = [dict(type=f"mmengine.{name}")]
        with pytest.raises(ConfigError, match=why):
            Runner.from_cfg(config)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (dict(type=mmengine.hooks.EmptyCacheHook, after_itr=True), "no key 'after_itr'.*after_iter"),
        (dict(type=Recorder, priority="FIRST"), "priority 'FIRST'.*0 to 100"),
        (dict(type="mmengine.NoSuchHook"), "NoSuchHook"),
    ],
)
def test_refused_with_the_config(tmp_path: Path, spec: dict[str, Any], message: str) -> None:
    config = text_config(tmp_path, RECORDS)
    config.custom_hooks = [spec]
    with pytest.raises(ConfigError, match=message):
        Runner.from_cfg(config)


def test_a_bare_name_is_ours_and_default_hooks_stay_ours(tmp_path: Path) -> None:
    config = text_config(tmp_path, RECORDS)
    config.custom_hooks = [dict(type="EMAHook"), dict(type="KeepBatches")]
    config.default_hooks = dict(logger=dict(type=mmengine.hooks.LoggerHook), timer=dict(type="mmengine.IterTimerHook"))
    settings = Settings.from_config(config)
    assert [c.cls.__module__ for c in settings.custom_hooks] == ["unigen_ds.hooks.evaluate.ema", KeepBatches.__module__]
    assert settings.default_hooks.logger.cls.__module__ == "unigen_ds.hooks.log.logger"


def test_the_config_of_the_docs(tmp_path: Path) -> None:
    config = text_config(tmp_path, RECORDS, train_dataloader__packing=None)
    own = load_config_file(Path(__file__).with_name("mmengine_hooks_config.py"))
    config.custom_hooks, config.custom_imports = own["custom_hooks"], own["custom_imports"]
    Runner.from_cfg(config).train()
    log = (tmp_path / "run" / "train.log").read_text()
    assert "MyHook: iteration 4 of 8" in log and "MyOtherHook: 8 iterations" in log
