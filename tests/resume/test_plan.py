"""Which checkpoint a run goes on from, and what may change on the way."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.support import flip_byte, make_manifest, save, save_chain
from tests.support.processes import ROOT, popen
from tests.tiny import TINY, tiny_config
from tools.train import main
from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.manifest import FILE_NAME
from unigen_ds.checkpoint.partial import LoadSettings
from unigen_ds.core.choices import AUTO
from unigen_ds.core.errors import CheckpointError, ConfigError, ResumeBlocked
from unigen_ds.hooks.evaluate.ema import ema_of
from unigen_ds.resume.finding import model_findings, refuse
from unigen_ds.resume.plan import ResumePlan, checkpoint_directory, plan_resume
from unigen_ds.runner import Runner
from unigen_ds.system.journals import read_lines

# ---- the table ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load_from", [False, True], ids=["fresh", "weights"])
def test_a_start_over_existing_checkpoints_is_refused(tmp_path, load_from):
    """Also with load_from: retention would delete the older run's checkpoints one by one. Also over a damaged one."""
    other = str(save(tmp_path / "other")) if load_from else None
    (save(tmp_path / "run") / FILE_NAME).unlink()
    with pytest.raises(ConfigError, match=r"already holds checkpoints \(iter_12\.pth\).*--resume.*--work-dir NEW"):
        plan_resume(tmp_path / "run", resume=False, load_from=other)


def test_resume_takes_the_newest(tmp_path):
    paths = save_chain(tmp_path, 24, 12)
    plan = plan_resume(tmp_path, resume=True, load_from=None)
    assert (plan.mode, plan.checkpoint) == ("resume", paths[1])
    assert plan.messages == (f"Auto resumed from the latest checkpoint {paths[1]}.",)


@pytest.mark.parametrize("resume", [True, AUTO])
def test_resume_with_none_usable_is_an_error_and_without_any_checkpoint_it_is_fresh(tmp_path, resume):
    def plan(load_from: str | None = None) -> ResumePlan:
        return plan_resume(run, resume=resume, load_from=load_from)

    run, other = tmp_path / "run", str(save(tmp_path / "other"))
    paths = save_chain(run, 12, 24)
    flip_byte(paths[1] / "model.safetensors")
    assert plan().checkpoint == paths[0]
    assert f"Not resumed from {paths[1]}: " in plan().messages[0] and "hash differs" in plan().messages[0]
    for path in paths:
        (path / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds 2 checkpoint\(s\) and none is usable.*optimizer.*never starts"):
        plan(other if resume == AUTO else None)
    for path in paths:
        shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="last_checkpoint names it, and it is not there"):
        plan()
    (run / store.HINT).unlink()
    assert plan().mode == "fresh"
    assert plan().messages == (f"No checkpoint found in {run}: training starts from scratch.",)


@pytest.mark.parametrize("key", ["resume", "load_from"])
def test_a_named_checkpoint_is_resumed_in_full(tmp_path, key):
    path = save(tmp_path / "other")
    options: dict[str, Any] = {"resume": True, "load_from": None, key: str(path)}
    plan = plan_resume(tmp_path / "run", **options)
    assert (plan.mode, plan.checkpoint) == ("resume", path) and plan.manifest is not None
    assert plan.messages == (f"Resumed from the checkpoint {path}.",)


def test_auto_begins_as_load_from_says_and_then_goes_on_with_its_own(tmp_path):
    """One command for a queue that restarts it: neither back to what ``load_from`` names, nor from scratch."""
    other = str(save(tmp_path / "other"))
    begin = plan_resume(tmp_path / "run", resume=AUTO, load_from=other, load_cfg=LoadSettings(allow=("missing",)))
    assert begin.mode == "weights" and begin.load_cfg.allow == ("missing",)
    assert len(begin.messages) == 1 and "No checkpoint found" in begin.messages[0]
    own = save(tmp_path / "run")
    again = plan_resume(tmp_path / "run", resume=AUTO, load_from=other, load_cfg=LoadSettings(allow=("missing",)))
    assert (again.mode, again.checkpoint) == ("resume", own)
    assert again.messages[0] == f"Auto resumed from the latest checkpoint {own}."
    assert "it is not read again" in again.messages[1]
    assert plan_resume(tmp_path / "none", resume=AUTO, load_from=None).mode == "fresh"


def test_two_names_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="both resume='a' and load_from='b'"):
        plan_resume(tmp_path, resume="a", load_from="b")


@pytest.mark.parametrize(
    "options", [{"resume": True}, {"resume": True, "load_from": "a"}, {"resume": "a"}, {"resume": AUTO}, {}]
)
def test_a_resume_is_exact(tmp_path, options):
    """And without ``load_from`` there is nothing to load."""
    with pytest.raises(ConfigError, match=r"load_cfg is set, but .*load_cfg=null"):
        plan_resume(
            tmp_path, **{"resume": False, "load_from": None, **options}, load_cfg=LoadSettings(allow=("missing",))
        )


# ---- names of a checkpoint ------------------------------------------------------------------------------------------


def test_a_file_inside_and_relative_paths_and_links_mean_the_directory(tmp_path, monkeypatch):
    path = save(tmp_path / "work_dirs" / "run")
    (tmp_path / "link").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    inside = [str(path / name) for name in ("model.safetensors", "manifest.json", "ema/rank00000.safetensors", "ema")]
    relative = ("work_dirs/run/iter_12.pth", "./work_dirs/../link/", "work_dirs/run/iter_12.pth/hooks.json")
    for place in (str(path), *inside, *relative):
        assert checkpoint_directory(place) == path, place


@pytest.mark.parametrize("key", ["resume", "load_from"])
def test_the_folder_of_a_run_means_its_newest_valid_checkpoint(tmp_path, key):
    paths = save_chain(tmp_path / "other", 12, 24, 36)
    (paths[2] / FILE_NAME).unlink()
    options = {"resume": False, "load_from": None, key: str(tmp_path / "other")}
    plan = plan_resume(tmp_path / "run", **options)
    assert (plan.mode, plan.checkpoint) == ("resume" if key == "resume" else "weights", paths[1])
    assert plan.messages[0].startswith(f"Not resumed from {paths[2]}: ")
    assert plan.messages[1] == f"{tmp_path / 'other'} is the folder of a run: iter_24.pth is its newest."
    for path in paths[:2]:
        flip_byte(path / "model.safetensors")
    with pytest.raises(CheckpointError, match="none is usable"):
        plan_resume(tmp_path / "run", **options)


# ---- another model, another optimizer -------------------------------------------------------------------------------


def rows(**changes: Any) -> list[dict[str, Any]]:
    return [{**row, **changes} if row["name"] == "weight" else row for row in make_manifest().parameters]


CONFIG = make_manifest().config


def check_model(*, parameters: list[dict[str, Any]], config: dict[str, Any]) -> None:
    refuse(model_findings(make_manifest(), parameters=parameters, config=config))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (rows(shape=[6, 4]), r"weight was \[4, 6\] and is \[6, 4\]"),  # as many elements: no engine would notice
        (rows(name="gain"), "gain is new; weight is gone"),
        (rows(trainable=False), "weight is frozen now"),
    ],
)
def test_another_model_is_refused(parameters, message):
    with pytest.raises(ResumeBlocked, match=message):
        check_model(parameters=parameters, config=CONFIG)
    check_model(parameters=rows(), config=CONFIG)
    check_model(parameters=rows(group="other"), config=CONFIG)


def test_another_optimizer_is_refused():
    with pytest.raises(ResumeBlocked, match="was: AdamW; now: SGD"):
        check_model(parameters=rows(), config={"optim_wrapper": {"optimizer": {"type": "SGD"}}})
    as_class = {"optim_wrapper": {"optimizer": {"type": str(torch.optim.AdamW), "lr": 5.0}}}
    check_model(parameters=rows(), config=as_class)


# ---- real runs ------------------------------------------------------------------------------------------------------

BATCH = {"train_dataloader.batch_size": 4, "optim_wrapper.accumulative_counts": 3}
OPTIONS: dict[str, Any] = {
    **BATCH,
    "default_hooks.checkpoint.max_keep_ckpts": -1,
    "custom_hooks": [{"type": "EMAHook", "momentum": 0.1}],
    "train_cfg.max_epochs": 2,
}


@dataclass(frozen=True)
class Bench:
    """A straight run of 14 updates, and another that stopped after 4 (``short``)."""

    folder: Path
    digits: Path

    def train(self, name: str, *, updates: int, **options: Any) -> Runner:
        overrides = {key.replace("__", "."): value for key, value in options.items()}
        config = tiny_config(self.folder / name, self.digits, **{**OPTIONS, **overrides})
        runner = Runner.from_cfg(config, max_updates=updates)
        runner.train()
        return runner

    def lines(self, name: str, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
        return read_lines(self.folder / name / file)

    def command(self, name: str, *flags: str, **options: Any) -> int:
        overrides = {key.replace("__", "."): value for key, value in options.items()}
        values = {**TINY, **OPTIONS, "train_dataloader.dataset.root": str(self.digits), **overrides}
        pairs = [f"{key}={value if isinstance(value, str) else repr(value)}" for key, value in values.items()]
        arguments = ["unified_digits", "--work-dir", str(self.folder / name), "--max-updates", "6", *flags]
        return main([*arguments, "--cfg-options", *pairs])


@pytest.fixture(scope="module")
def bench(tmp_path_factory, digits) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("resume"), digits)
    bench.train("straight", updates=14)
    bench.train("short", updates=4)
    return bench


def copy(bench: Bench, name: str) -> Path:
    return Path(shutil.copytree(bench.folder / "short", bench.folder / name))


def test_the_same_effective_batch_in_another_geometry_is_the_same_training(bench):
    """4 x 3 -> 2 x 6 -> 12 x 1 -> 4 x 3. Iteration 12 becomes 48 and then 12 again: the last committed one is taken."""
    copy(bench, "geometry")
    for updates, batch_size, accumulation in ((8, 2, 6), (12, 12, 1), (14, 4, 3)):
        bench.train(
            "geometry",
            updates=updates,
            resume=True,
            train_dataloader__batch_size=batch_size,
            optim_wrapper__accumulative_counts=accumulation,
        )
    names = [checkpoint.path.name for checkpoint in store.list_checkpoints(bench.folder / "geometry")]
    assert names == ["iter_12.pth", "iter_48.pth", "iter_12_2.pth", "iter_42.pth"]
    straight, other = bench.lines("straight"), bench.lines("geometry")
    assert [line["update"] for line in other] == list(range(1, 15))
    for one, two in zip(straight, other, strict=True):
        for key in ("sequences", "samples", "tokens", "epoch", "lr"):
            assert one[key] == two[key], (one["update"], key)
        for key in ("loss", "loss/text", "loss/image", "grad_norm"):
            assert two[key] == pytest.approx(one[key], rel=1e-5), (one["update"], key)
    for key in ("update", "sequences", "digest", "samples"):
        ledgers = [[line[key] for line in bench.lines(name, "ledger.jsonl")] for name in ("straight", "geometry")]
        assert ledgers[0] == ledgers[1], key
    assert bench.lines("geometry", "ledger.jsonl")[-1]["sequences"] == [156, 168]


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file but the text log, which tells of the refusal, and the lock."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.suffix != ".log" and p.name != ".lock"]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def test_what_may_change(bench):
    name = "allowed"
    copy(bench, name)
    status = bench.command(
        name, "--resume", train_cfg__max_epochs=3, optim_wrapper__optimizer__lr=1e-3,
        default_hooks__checkpoint__interval=1, default_hooks__logger__interval=2,
    )  # fmt: skip
    assert status == 0 and bench.lines(name)[-1]["update"] == 6
    assert bench.lines(name)[-1]["lr"] != bench.lines("straight")[5]["lr"]


def test_a_fresh_start_over_checkpoints_exits_2(bench, capsys):
    before = files_of(bench.folder / "short")
    assert bench.command("short") == 2
    assert bench.command("short", "--load-from", str(bench.folder / "straight")) == 2
    assert files_of(bench.folder / "short") == before


def test_a_second_process_in_the_folder_is_refused(bench):
    """It would void the first one's metrics and sweep its unfinished save."""
    folder = copy(bench, "busy")
    staging = folder / "iter_24.pth.tmp-2"
    staging.mkdir()
    hold = "import sys; from unigen_ds.checkpoint.home import WorkDirLock as L; from pathlib import Path\n"
    hold += "lock = L(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", hold, str(folder)]
    with popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        before = files_of(folder)
        assert bench.command("busy", "--resume") == 2
        assert f"another process trains in {folder} (process {other.pid} on " in (folder / "train.log").read_text()
        assert files_of(folder) == before and staging.is_dir()
        other.communicate()
    assert bench.command("busy", "--resume") == 0
    assert not staging.exists()


def test_load_from_takes_weights_only(bench):
    start = bench.folder / "short" / "iter_12.pth"
    runner = bench.train("weights", updates=0, load_from=str(start))
    assert runner.progress.updates == runner.progress.sequences == 0
    source = load_file(start / "model.safetensors")
    own = dict(runner.backend.model.state_dict())
    assert set(own) == set(source) and all(torch.equal(own[name], source[name]) for name in own)
    assert not runner.backend._optimizer.state  # type: ignore[attr-defined]
    average = ema_of(runner)
    assert average is not None and average.average.num_updates == 0
    assert all(torch.equal(shard.data, source[shard.name].reshape(-1)) for shard in average.average.shards)
    bench.train("weights", updates=2, load_from=str(start))
    lines = bench.lines("weights")
    assert [line["update"] for line in lines] == [1, 2]
    assert lines[0]["sequences"] == 12 and lines[0]["lr"] == bench.lines("straight")[0]["lr"]
    assert lines[0]["loss"] < bench.lines("straight")[0]["loss"]  # trained weights, the first data


def test_weights_of_another_model_are_refused_by_name(bench, capsys):
    start = bench.folder / "short" / "iter_12.pth"
    assert bench.command("misfit", "--load-from", str(start), model__llm__hidden_size=16) == 1
    last = (bench.folder / "misfit" / "train.log").read_text().splitlines()[-1]
    assert "does not fit the model" in last and ", 32] and is [" in last
    assert "load_cfg.revise_keys" in last and "load_cfg.resize_vocab" in last and "load_cfg.allow=['reshaped']" in last
    assert not list((bench.folder / "misfit").glob("iter_*"))


def test_a_checkpoint_named_on_the_command_line_wins_over_the_configs_load_from(bench):
    start = str(bench.folder / "short" / "iter_12.pth")
    assert bench.command("named", "--resume", start, load_from="nowhere", load_cfg__allow=["missing"]) == 0
    assert f"Resumed from the checkpoint {start}." in (bench.folder / "named" / "train.log").read_text()


def test_a_larger_model_takes_what_is_allowed_and_says_what_it_leaves(bench):
    start = bench.folder / "short" / "iter_12.pth"
    larger = {"model__llm__num_hidden_layers": 3, "load_cfg__allow": ["missing"]}
    larger["load_cfg__revise_keys"] = [(r"layers\.1\.", "layers.2.")]
    assert bench.command("larger", "--load-from", str(start), **larger) == 0
    log = (bench.folder / "larger" / "train.log").read_text()
    report = json.loads((bench.folder / "larger" / "load_report.json").read_text())
    missing = report["missing"]
    assert all(name.startswith("language_model.model.layers.1.") for name in missing) and len(missing) > 8
    assert f"WARNING Weights: {len(missing)} missing in the checkpoint: {missing[0]}; " in log
    assert f"and {len(missing) - 8} more." in log and " under another name: language_model.model.layers.1." in log
    own = dict(bench.train("larger_too", updates=0, load_from=str(start), **larger).backend.model.state_dict())
    ours = {source: name for name, source in report["renamed"].items()}
    for name, tensor in load_file(start / "model.safetensors").items():
        assert torch.equal(own[ours.get(name, name)], tensor), name
    assert bench.command("larger", "--resume", **larger, load_from=str(start)) == 0  # the command that began it
    log = (bench.folder / "larger" / "train.log").read_text()
    assert f"load_from {start} is where this run began: it is not read again." in log
    assert log.count("Auto resumed from the latest checkpoint") == 1 and log.count("Loaded weights only") == 1
    assert bench.command("larger", "--resume", model__llm__num_hidden_layers=3) == 0


def test_going_back_leaves_the_later_ones_and_does_not_return_to_them(bench):
    """Resume a named earlier checkpoint in the same folder, die before the next save, and resume without a name."""
    name = "back"
    copy(bench, name)
    bench.train(name, updates=8, resume=True)
    first = bench.folder / name / "iter_12.pth"
    bench.train(name, updates=4, resume=str(first))  # nothing left to do: ends before any save
    assert bench.lines(name)[-1]["update"] == 4  # what lies beyond is void
    runner = bench.train(name, updates=6, resume=True)
    assert runner.progress.updates == 6
    checkpoint, _ = store.newest(bench.folder / name)
    assert checkpoint is not None and checkpoint.path.name == "iter_18.pth" and checkpoint.manifest is not None
    assert checkpoint.manifest.parent == "iter_12.pth"
    losses = [[line["loss"] for line in bench.lines(n)[:6]] for n in ("straight", name)]
    assert losses[0] == losses[1]


def test_going_on_in_another_folder_survives_a_kill_before_the_first_save(bench):
    start = bench.folder / "short" / "iter_12.pth"
    bench.train("elsewhere", updates=4, resume=str(start))  # ends before any save
    assert not store.list_checkpoints(bench.folder / "elsewhere")
    runner = bench.train("elsewhere", updates=6, resume=True)
    assert runner.progress.updates == 6 and runner.progress.sequences == 72
    manifest = store.list_checkpoints(bench.folder / "elsewhere")[0].manifest
    assert manifest is not None and manifest.parent == str(start)
    assert bench.lines("elsewhere")[-1]["loss"] == bench.lines("straight")[5]["loss"]
