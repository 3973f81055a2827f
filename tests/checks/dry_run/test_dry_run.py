"""``tools/train.py CONFIG --dry-run`` from the command line's arguments to its list."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.end_to_end.engines.pictures import write_talks
from tests.end_to_end.engines.users import write_mixed
from tests.families.tiny_transformers import write_language
from tests.processes import ranks
from tests.tiny import tiny_config
from tools.train import main
from unigen_ds.checkpoint.home import WorkDirLock
from unigen_ds.checks.dry_run import first_batches, resources
from unigen_ds.checks.dry_run.collectives import Call, compare
from unigen_ds.checks.dry_run.first_batches import FirstBatches, Kind, MadeBatch
from unigen_ds.checks.dry_run.resources import num_kept, num_saves, seconds_of_update
from unigen_ds.checks.dry_run.this_machine import launcher_results, slurm_results
from unigen_ds.config.python_text import config_text
from unigen_ds.config.registry import HOOKS
from unigen_ds.core.progress import Geometry, Ruler
from unigen_ds.hooks.base import Hook
from unigen_ds.hooks.save.checkpoint import CheckpointHook
from unigen_ds.system import machine
from unigen_ds.tracking.wandb import WandbVisBackend


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("dry")
    write_mixed(found)
    return found


@pytest.fixture
def config(folder, tmp_path):
    """Writes a config, and returns its path."""

    def write(**changed):
        source = {"type": "UnifiedGenerationDataset", "data_path": str(folder / "digits" / "mixed.jsonl")}
        overrides = {
            "train_dataloader__dataset": source, "model__llm__num_hidden_layers": 1, "train_dataloader__batch_size": 2,
            "optim_wrapper__accumulative_counts": 2, **changed,
        }  # fmt: skip
        path = tmp_path / "config.py"
        path.write_text(config_text(tiny_config(tmp_path / "run", folder, **overrides)), encoding="utf-8")
        return str(path)

    return write


def files(folder: Path) -> dict[str, float]:
    return {str(path): path.stat().st_mtime for path in folder.rglob("*") if "__pycache__" not in path.parts}


def results(capsys) -> dict[str, list[tuple[str, str]]]:
    return by_check(capsys.readouterr().out)


def by_check(printed: str) -> dict[str, list[tuple[str, str]]]:
    found = json.loads(printed)["results"]
    return {
        check: [(r["status"], r["text"]) for r in found if r["check"] == check] for check in {r["check"] for r in found}
    }


def test_a_config_without_problems(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(first_batches, "SHOWN_EVERY_S", 0.0)
    path, environment = config(), dict(os.environ)
    before = files(tmp_path)
    status = main([path, "--dry-run", "--json", "--batches", "2", "--skip", "memory"])
    printed = capsys.readouterr()
    found = by_check(printed.out)
    assert "1 of 2 micro-batches are made (--batches makes fewer)" in printed.err
    assert status == 0, found
    assert files(tmp_path) == before and not (tmp_path / "run").exists()
    assert dict(os.environ) == environment
    assert {result for check in found.values() for result, _ in check} <= {"ok", "not checked"}, found


def test_a_config_with_many_mistakes_has_a_problem_for_each(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    path = config(visualizer={"vis_backends": [{"type": "WandbVisBackend"}]})
    (tmp_path / "file").write_text("")
    before = files(tmp_path)
    changes = [
        "train_dataloader.dataset.data_path=missing/one.jsonl", "model.llm.hidden_size=33",
        "optim_wrapper.optimizer.lr='fast'", f"work_dir={tmp_path / 'file' / 'run'}", "seq_len=3",
    ]  # fmt: skip
    assert main([path, "--dry-run", "--world-size", "2", "--cfg-options", *changes]) == 1
    text = capsys.readouterr().out
    wrong = [line for line in text.splitlines() if line.startswith("problem")]
    parts = (
        "hidden_size 33",
        "lr is 'fast'",
        "no key 'seq_len'",
        "missing/one.jsonl",
        "is not a folder",
        "was started with 2 processes",
        "WANDB_API_KEY",
    )
    assert len(wrong) == len(parts) and all(part in line for part, line in zip(parts, wrong, strict=True)), text
    assert text.splitlines()[-1].startswith("7 problem(s), 0 warning(s), ")
    assert files(tmp_path) == before


@HOOKS.register_module()
class NeverBuiltHook(Hook):
    """Its constructor fails."""

    def __init__(self, number: int = 0) -> None:
        raise RuntimeError(f"no licence {number}")


WRONG = {
    "keys": (
        ["train_dataloader.num_wrokers=3", "optim_wrapper.optimizer.lr='fast'"],
        {"config": 2},
        {"engine", "collectives", "time"},
    ),
    "hooks": (
        ["custom_hooks=[dict(type='NeverBuiltHook', number=1), dict(type='NeverBuiltHook', number=2)]"],
        {"hooks": 2},
        set(),
    ),
    "misspelt hook": (["custom_hooks=[dict(type='PreviewHok')]"], {"config": 1}, {"hooks"}),
    "model": (["model.llm.hidden_size=33"], {"config": 1}, {"model", "collectives", "time"}),
    "import": (["custom_imports=dict(imports=['not_there'])"], {"config": 1}, set()),
    "engine": (["train_dataloader.global_batch_size=5"], {"engine": 1}, {"collectives", "time"}),
    "checkpoint": (["load_from=missing.pth"], {"paths": 1}, set()),
    "training": (["train_cfg=dict(max_updatse=3)", "val_dataloader=dict(split=2)"], {"config": 2}, {"time"}),
}
"""What is wrong -> its options, problems by check, and the checks that cannot be made then."""


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_depend_on_a_problem_is_checked(config, capsys, what):
    options, problems, unchecked = WRONG[what]
    own = ["--batches", "1", "--skip", "memory", "--peak-tflops", "1"]
    assert main([config(), "--dry-run", "--json", *own, "--cfg-options", *options]) == 1
    found = results(capsys)
    wrong = {check: sum(status == "problem" for status, _ in of) for check, of in found.items()}
    assert {check: number for check, number in wrong.items() if number} == problems, found
    later = ("engine", "tokenizer", "hooks", "start", "model", "batches", "collectives", "time")
    assert {check for check in later if "ok" not in {status for status, _ in found[check]}} - {*problems} == unchecked
    assert any(" records of 1 data set(s)" in text for status, text in found["start"] if status == "ok"), found
    assert any(" micro-batches of 1 rank" in text for _, text in found["batches"]), found


SOURCE = "type='UnifiedGenerationDataset'"
NO_DATA = {"engine", "tokenizer", "hooks", "model"}
INCOMPLETE = {
    "no path": ([f"train_dataloader.dataset=dict({SOURCE})"], {"config": 1}, NO_DATA),
    "one of two": (
        [f"train_dataloader.dataset=[dict({SOURCE}), dict({SOURCE}, data_path='BROKEN')]"],
        {"config": 1, "start": 1},
        NO_DATA,
    ),
    "no tokenizer, broken records": (
        ["tokenizer=None", "train_dataloader.dataset.data_path='BROKEN'"],
        {"config": 1, "start": 1},
        {"engine", "tokenizer", "hooks"},
    ),
    "two": (
        ["model.vit.patch_size='x'", f"train_dataloader.dataset=dict({SOURCE})", "load_from=missing.pth"],
        {"config": 2, "paths": 1},
        {"engine", "tokenizer", "hooks"},
    ),
}
"""What is missing -> its options, problems by check, and the checks that can be made nevertheless."""


@pytest.mark.parametrize("what", INCOMPLETE)
def test_what_does_not_depend_on_a_missing_part_is_checked(config, tmp_path, capsys, what):
    options, problems, made = INCOMPLETE[what]
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"conversations": [\n', encoding="utf-8")
    options = [option.replace("BROKEN", str(broken)) for option in options]
    assert main([config(), "--dry-run", "--json", "--cfg-options", *options]) == 1
    found = results(capsys)
    wrong = {check: sum(status == "problem" for status, _ in of) for check, of in found.items()}
    assert {check: number for check, number in wrong.items() if number} == problems, found
    later = ("engine", "tokenizer", "hooks", "start", "model", "batches", "collectives", "time")
    assert {check for check in later if "ok" in {status for status, _ in found[check]}} == made
    assert any(status == "not checked" and "without problems" in text for status, text in found["start"]), found


def test_a_resume_by_a_config_with_a_mistake(config, capsys):
    """The checkpoint and the data are checked; the checklist compares a whole config."""
    path, later = config(), ["--skip", "model", "memory", "collectives", "--batches", "1"]
    assert main([path, "--max-updates", "1"]) == 0
    capsys.readouterr()
    options = ["--cfg-options", "custom_hooks=[dict(type='PreviewHok')]", "train_dataloader.num_wrokers=3"]
    assert main([path, "--resume", "--dry-run", "--json", *later, *options]) == 1
    found = results(capsys)
    assert len(found["config"]) == 2 and not any(status == "problem" for status, _ in found["start"]), found
    texts = [text for status, text in found["start"] if status == "ok"]
    assert any("iter_2" in text for text in texts) and any(" records of 1 data set(s)" in text for text in texts), found
    needed = "the checklist of the resume: needs custom_hooks, train_dataloader without problems"
    assert ("not checked", needed) in found["start"] and found["batches"][0][0] == "ok", found


def test_a_folder_in_which_another_process_trains(config, tmp_path, capsys):
    path, run = config(), tmp_path / "run"
    run.mkdir()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        lock = WorkDirLock(run)
        os.write(writing, b"1")
        signal.pause()
        os._exit(bool(lock))
    os.read(reading, 1)
    before = files(tmp_path)
    try:
        status = main([path, "--dry-run", "--json", "--cfg-options", "load_from=missing.pth"])
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    found = results(capsys)
    assert status == 1 and any(f"process {child}" in text for _, text in found["folders"]), found
    assert [text for status, text in found["paths"] if status == "problem"], found
    assert files(tmp_path) == before


def test_a_process_that_slurm_starts_without_its_launcher(config, capsys, monkeypatch):
    path = config()
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, value)
    main([path, "--dry-run", "--json", "--cfg-options", "load_from=missing.pth"])
    assert any(status == "problem" and "each would train alone" in text for status, text in results(capsys)["job"])


def test_a_launched_job_lists_what_other_machines_lack(config, tmp_path):
    """Two processes; the second one cannot write its work dir."""
    path = config()
    (tmp_path / "file").write_text("")
    before = files(tmp_path)
    skipped = ["--skip", "collectives", "memory", "--batches", "1"]
    code = (
        "import os, sys; from tools.train import main;"
        f" folder = ['run', 'file/run'][int(os.environ['RANK'])]; sys.exit(main([{path!r}, '--dry-run',"
        f" '--backend', 'fsdp:FULL_SHARD', '--work-dir', {str(tmp_path)!r} + '/' + folder, *{skipped!r}]))"
    )
    first, second = ranks([sys.executable, "-c", code])
    assert (first.status, second.status) == (1, 0), first.err
    (wrong,) = (line for line in first.out.splitlines() if line.startswith("problem"))
    assert "rank 1 on " in wrong and "is not a folder" in wrong and second.out == ""
    assert "2 process(es), launcher 'none'" in first.out and "2 micro-batches of 2 rank(s)" not in first.out
    assert files(tmp_path) == before


def test_the_variables_of_slurm():
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_GPUS_ON_NODE": "4", "SLURM_NTASKS_PER_NODE": "8"}
    found = [*slurm_results(job, launcher="slurm", world_size=16)]
    assert [result.status for result in found] == ["problem", "problem"] and "--world-size 8" in found[0].text
    fits = {**job, "SLURM_GPUS_ON_NODE": "8"}
    assert [one.status for one in slurm_results(fits, launcher="slurm", world_size=8)] == ["ok"]


def test_the_variables_of_a_launcher():
    started = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    statuses = {
        "ok": started,
        "problem": {**started, "RANK": "2"},
        "warning": {**started, "WORLD_SIZE": "4"},
    }
    for status, env in statuses.items():
        assert status in [one.status for one in launcher_results(env, launcher="pytorch", world_size=2)], env
    incomplete = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    assert "MASTER_ADDR, MASTER_PORT" in next(launcher_results(incomplete, launcher="none", world_size=2)).text


LATER = ["--skip", "start", "batches", "memory", "collectives"]


def test_a_config_for_several_processes_is_checked_for_as_many(config, capsys):
    """Also under SLURM, whose variables the launcher reads."""
    path = config(backend={"type": "fsdp", "sharding_strategy": "HYBRID_SHARD", "num_shard": 4})
    assert main([path, "--dry-run", "--json", "--world-size", "8", *LATER]) == 0
    assert "2 per device x 8 process(es)" in results(capsys)["engine"][0][1]
    assert main([path, "--dry-run", "--json", "--cfg-options", "world_size=4", *LATER]) == 0
    assert "2 per device x 4 process(es)" in results(capsys)["engine"][0][1]
    assert main([path, "--dry-run", "--json", "--world-size", "6", *LATER]) == 1
    assert "num_shard is 4 and there are 6 process(es)" in results(capsys)["engine"][0][1]


def test_the_login_of_wandb(monkeypatch, tmp_path):
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    (error,) = WandbVisBackend().lacks()
    assert "api.wandb.ai" in str(error) and "wandb login" in str(error)
    assert WandbVisBackend(init_kwargs={"mode": "offline"}).lacks() == []
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password 1\n", encoding="utf-8")
    assert WandbVisBackend().lacks() == []
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert "wandb.example.org" in str(WandbVisBackend().lacks()[0])
    monkeypatch.setenv("WANDB_API_KEY", "1")
    assert WandbVisBackend().lacks() == []


def test_a_version_that_is_not_allowed(monkeypatch, capsys):
    monkeypatch.setattr(machine, "installed", {"torch": "2.5.1", "transformers": "5.23.0"}.get)
    assert main(["unified_digits"]) == 2
    assert "torch 2.5.1 is installed. Allowed: torch >=2.6. Remedy: pip install 'torch>=2.6'" in capsys.readouterr().err


def test_options_that_belong_to_a_dry_run(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["unified_digits", "--world-size", "4"])
    assert main(["unified_digits", "--dry-run", "--skip", "everything"]) == 2
    assert ended.value.code == 2 and "--world-size belongs to --dry-run" in capsys.readouterr().err
    for given in (["--device-memory", "0"], ["--device-memory", "80"], ["--mfu", "0"], ["--device-memory=-5GiB"]):
        with pytest.raises(SystemExit):
            main(["unigen_digits", "--dry-run", *given])
        assert f"argument {given[0].partition('=')[0]}: " in capsys.readouterr().err


SHARDED = ["--dry-run", "--json", "--world-size", "3", "--batches", "1", "--backend", "fsdp:FULL_SHARD",
           "--skip", "memory"]  # fmt: skip


def test_ranks_with_and_without_images_call_the_same_collectives(config, tmp_path, capsys):
    path = config(train_dataloader__batch_size=1, optim_wrapper__accumulative_counts=1)
    before = files(tmp_path)
    status = main([path, *SHARDED])
    found = results(capsys)
    ((state, text),) = found["collectives"]
    assert (status, state) == (0, "ok") and "without vit_patches" in text, found
    assert int(text.split("the same ")[1].split()[0]) == 11, text
    counted, balance = (text for _, text in found["batches"])
    assert counted.startswith("3 micro-batches of 3 rank(s)") and "\nrank 2: " in counted
    assert "in 1 of 1 iterations the ranks have different kinds" in balance
    assert files(tmp_path) == before


def test_an_engine_that_learns_the_order_of_modules_late(tmp_path, capsys):
    """A model of transformers runs its modules several times in the first update, and ZeRO-3 follows their order."""
    write_talks(tmp_path / "talks")
    write_language(tmp_path / "qwen3", "qwen3")
    changes = [
        f"model.pretrained={tmp_path / 'qwen3'}", f"tokenizer.path={tmp_path / 'qwen3'}", "val_dataloader=None",
        f"train_dataloader.dataset.data_path={tmp_path / 'talks' / 'texts.jsonl'}", "train_dataloader.seq_length=224",
        "train_dataloader.num_workers=0", "train_dataloader.dataset.index_workers=0",
    ]  # fmt: skip
    later = ["--batches", "8", "--skip", "memory", "--cfg-options", *changes, f"work_dir={tmp_path / 'run'}"]
    status = main(["qwen_sft", "--dry-run", "--json", "--world-size", "2", "--backend", "deepspeed:zero3", *later])
    found = results(capsys)
    problems = [text for lines in found.values() for state, text in lines if state == "problem"]
    assert (status, problems, found["collectives"][0][0]) == (0, [], "ok")


def test_a_part_that_only_some_micro_batches_use_is_a_problem(tmp_path, capsys):
    rows = "".join(f"[{i}, 1, 2, 3, {'1' if i < 4 else 'null'}]\n" for i in range(16))
    (tmp_path / "rows.txt").write_text(rows, encoding="utf-8")
    path = tmp_path / "config.py"
    path.write_text(
        f"""
custom_imports = dict(imports=["tests.plugin", "tests.checks.dry_run.skipping"])
model = dict(type="SkippingNetwork", num_inputs=3)
train_dataloader = dict(batch_size=2, dataset=dict(type="RowsFile", path={str(tmp_path / "rows.txt")!r}))
optim_wrapper = dict(optimizer=dict(type="AdamW", lr=1e-3))
train_cfg = dict(max_epochs=1)
""",
        encoding="utf-8",
    )
    options = ["--batches", "4", "--world-size", "2", "--cfg-options", f"work_dir={tmp_path / 'run'}"]
    assert main([str(path), *SHARDED, *options]) == 1
    found = results(capsys)
    ((state, text),) = found["collectives"]
    assert state == "problem" and "micro-batch 1: rank 0 (" in text, found
    assert "both would wait for ever" in text and "in layers.1" in text and "Remedy: run every part" in text, text


def batches(*kinds, before=()):
    """Those of ranks with these kinds in one iteration, after iterations in which all ranks have one of ``before``."""
    made = [[MadeBatch(one, 1, 8, 0, {}, 0.0) for one in (*before, kind)] for kind in kinds]
    return FirstBatches(Geometry(1, 1, len(kinds)), made)


def test_calls_are_compared_in_every_iteration():
    whole, texts = Kind(("video",), ("text",)), Kind(("video", "images"), ("text",))
    gather, reduce = Call("all_gather(8 float32)", "vision"), Call("reduce_scatter(8 float32)", "")
    same = {whole: [[gather, reduce]], texts: [[gather, reduce], [gather, reduce]]}
    assert compare(batches(whole, texts), same).status == "ok"
    other = {whole: [[gather, reduce]], texts: [[reduce]]}
    found = compare(batches(whole, whole, texts), other)
    assert found.status == "problem" and "rank 0 (with all parts) and rank 2 (without images)" in found.text
    assert "call 1 of an update is all_gather(8 float32) in vision on the one" in found.text
    found = compare(batches(whole, texts, before=[whole, texts]), other)
    assert found.status == "problem" and found.text.startswith("update 3, micro-batch 1: rank 0 ")
    found = compare(batches(texts, texts), other)
    assert found.status == "warning" and "no two ranks have both" in found.text
    uneven = {texts: [[gather], [gather, gather]]}
    assert compare(batches(texts), uneven).text.startswith("micro-batches of one kind (with all parts)")
    found = compare(batches(whole, Kind(("video",), ("text", "image"))), same)
    assert found.status == "problem" and "target_counts()" in found.text


def test_memory_disk_and_time(config, capsys, monkeypatch):
    hook = {"interval": 1, "max_keep_ckpts": 2}
    path = config(default_hooks__checkpoint=hook, optim_wrapper__accumulative_counts=1)
    monkeypatch.setattr(resources, "free_bytes", lambda folder: 1000)
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_JOB_END_TIME": "1"}.items():
        monkeypatch.setenv(name, value)
    options = ["--batches", "4", "--device-memory", "1GiB", "--peak-tflops", "1e-6", "--mfu", "50%"]
    assert main([path, "--dry-run", "--json", *options]) == 1
    found = results(capsys)
    (memory,) = (text for status, text in found["memory"] if status == "problem")
    assert re.search(r"it has 1\.0 GiB, [\d.]+ \w+ too few", memory) and "activation_checkpointing" in memory, found
    (disk,) = (text for status, text in found["disk"] if status == "problem")
    assert "(max_keep_ckpts=2)" in disk and "1000 B are free" in disk, found
    assert [status for status, _ in found["time"]] == ["ok", "ok", "warning"], found
    assert "at 50% of 1e-06 TFLOPS" in found["time"][1][1] and "SLURM ends the job" in found["time"][2][1], found


def test_the_time_of_an_update_is_that_of_the_rank_with_most_to_compute():
    kind = Kind((), ("text",))
    costs = [[4.0, 2.0, 1.0, 1.0], [1.0, 1.0, 5.0, 5.0]]  # two updates of two micro-batches
    made = [[MadeBatch(kind, 1, 8, 0, {}, cost) for cost in rank] for rank in costs]
    found = FirstBatches(Geometry(1, 2, 2), made)
    assert seconds_of_update(found, peak_tflops=1e-12, mfu=0.5) == (6 + 10) / 2 / 0.5
    assert seconds_of_update(batches(kind), peak_tflops=1.0, mfu=0.5) is None


def test_how_many_checkpoints_a_run_keeps():
    ruler = Ruler(Geometry(2, 2, 1), 100)
    assert num_saves(CheckpointHook(), ruler, 400) == 1
    assert num_saves(CheckpointHook(1), ruler, 400) == 4
    assert num_saves(CheckpointHook(15, by_epoch=False), ruler, 400) == 14
    assert num_kept(CheckpointHook(1), saves=4, have=0) == 4
    assert num_kept(CheckpointHook(1, max_keep_ckpts=2), saves=4, have=0) == 3
    assert num_kept(CheckpointHook(1, max_keep_ckpts=2), saves=4, have=2) == 1


def test_a_problem_that_two_checks_find_is_listed_once(config, capsys, tmp_path):
    tokenizer = {
        "type": "PretrainedTokenizer",
        "path": str(tmp_path / "no_such_tokenizer"),
    }  # a name is asked of the hub
    path = config()
    changes = [f"tokenizer={tokenizer}", "train_dataloader.num_workers=0"]
    assert main([path, "--dry-run", "--json", "--cfg-options", *changes]) == 1
    found = results(capsys)
    wrong = [(check, text) for check, each in found.items() for status, text in each if status == "problem"]
    assert [check for check, _ in wrong] == ["paths"] and "no_such_tokenizer" in wrong[0][1], wrong


def test_a_warm_up_shorter_than_an_update_warns_of_its_largest_factor(config, tmp_path, capsys):
    """nanoVLM's formula: 0.03 of 7 updates warm up, so the first one trains at 1 / 0.21 of the configured rate."""
    line = "WarmupCosineLR trains at up to 4.76 times the configured learning rate"
    curve = {"param_scheduler": [{"type": "WarmupCosineLR"}], "optim_wrapper__optimizer__lr": 1e-3}
    for updates, warns in ((7, True), (100, False)):
        path = config(**curve, train_cfg={"max_updates": updates})
        assert main([path, "--dry-run", "--json", "--skip", "memory", "--batches", "1"]) == 0
        assert any(status == "warning" and line in text for status, text in results(capsys)["start"]) == warns
    assert main([config(**curve, train_cfg={"max_updates": 7}), "--max-updates", "1"]) == 0
    log, metrics = (tmp_path / "run" / name for name in ("train.log", "metrics.jsonl"))
    assert log.read_text(encoding="utf-8").count(f"WARNING {line}") == 1
    first = json.loads(metrics.read_text(encoding="utf-8").splitlines()[0])
    assert first["lr"] == pytest.approx(1e-3 / 0.21)
