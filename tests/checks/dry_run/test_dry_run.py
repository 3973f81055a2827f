"""``tools/train.py CONFIG --dry-run`` from the command line's arguments to its list."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.end_to_end.engines.jobs.pictures import write_talks
from tests.end_to_end.engines.jobs.users import write_mixed
from tests.families.tiny_transformers import write_language
from tests.tiny import tiny_config
from tools.train import main
from unigen_ds.checks.dry_run.batches import compare_ranks
from unigen_ds.checks.dry_run.known import FirstBatches
from unigen_ds.checks.dry_run.this_machine import slurm_results
from unigen_ds.config.python_text import config_text
from unigen_ds.system import machine
from unigen_ds.tracking.wandb import WandbVisBackend


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dry")
    write_mixed(folder)
    return folder


@pytest.fixture
def config(folder, tmp_path):
    def write(**changes):
        source = {"type": "UnifiedGenerationDataset", "data_path": str(folder / "digits" / "mixed.jsonl")}
        overrides = {
            "train_dataloader__dataset": source, "model__llm__num_hidden_layers": 1, "train_dataloader__batch_size": 2,
            "optim_wrapper__accumulative_counts": 2, **changes,
        }  # fmt: skip
        path = tmp_path / "config.py"
        path.write_text(config_text(tiny_config(tmp_path / "run", folder, **overrides)), encoding="utf-8")
        return str(path)

    return write


def files(folder: Path) -> dict[str, float]:
    return {str(path): path.stat().st_mtime for path in folder.rglob("*") if "__pycache__" not in path.parts}


def results(capsys) -> dict[str, list[tuple[str, str]]]:
    return by_check(capsys.readouterr().out)


def by_check(output: str) -> dict[str, list[tuple[str, str]]]:
    rows = json.loads(output)["results"]
    return {
        check: [(r["status"], r["text"]) for r in rows if r["check"] == check] for check in {r["check"] for r in rows}
    }


def test_a_config_without_problems(config, tmp_path, capsys):
    path, environment = config(), dict(os.environ)
    before = files(tmp_path)
    status = main([path, "--dry-run", "--json", "--batches", "2"])
    checks = results(capsys)
    assert status == 0, checks
    assert files(tmp_path) == before and not (tmp_path / "run").exists() and dict(os.environ) == environment
    assert {result for check in checks.values() for result, _ in check} <= {"ok", "not checked"}, checks


def test_a_warning_of_a_start_is_one_here(config, capsys):
    path = config(tokenizer={"type": "WordTokenizer", "words": ["circle"]})
    assert main([path, "--dry-run", "--json", "--batches", "2"]) == 0
    assert any(
        "words that the tokenizer does not have" in text for kind, text in results(capsys)["start"] if kind == "warning"
    )


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
        "unknown config key 'seq_len'",
        "hidden_size 33",
        "lr is 'fast'",
        "missing/one.jsonl",
        "is not a folder",
        "WANDB_API_KEY",
    )
    assert len(wrong) == len(parts) and all(part in line for part, line in zip(parts, wrong, strict=True)), text
    assert text.splitlines()[-1].startswith("6 problem(s), 0 warning(s), ")
    assert files(tmp_path) == before


LATER = {"engine", "hooks", "start", "model", "schedule", "batches", "collectives"}
WRONG = {
    "keys": ("train_dataloader.num_wrokers=3", "config", set()),
    "import": ("custom_imports=dict(imports=['not_there'])", "config", set()),
    "engine": ("train_dataloader.global_batch_size=5", "engine", {"hooks"}),
    "tokenizer": ("tokenizer.path=/no/such", "config", set()),
    "checkpoint": ("load_from=missing.pth", "paths", {"engine", "hooks"}),
    "curve": ("param_scheduler=[dict(type='LinearLR',by_epoch=True,end=0.5)]", "schedule", LATER - {"schedule"}),
}
"""What is wrong -> its option, the check that finds it, and the later checks that are made in spite of it."""


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_depend_on_a_problem_is_checked(config, capsys, what):
    option, check, later = WRONG[what]
    assert main([config(), "--dry-run", "--json", "--batches", "1", "--cfg-options", option]) == 1
    checks = results(capsys)
    assert check in {name for name, of in checks.items() if "problem" in dict(of)}, checks
    assert {name for name in LATER if "ok" in dict(checks[name])} == later, checks
    assert dict(checks["folders"])["ok"] and ("not checked" in dict(checks["batches"]) or "batches" in later), checks


def test_a_process_that_slurm_starts_without_its_launcher(config, capsys, monkeypatch):
    path = config()
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, value)
    main([path, "--dry-run", "--json", "--cfg-options", "load_from=missing.pth"])
    assert any(status == "problem" and "each would train alone" in text for status, text in results(capsys)["job"])


def test_the_variables_of_slurm():
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_GPUS_ON_NODE": "4", "SLURM_NTASKS_PER_NODE": "8"}
    results = [*slurm_results(job, launcher="slurm", world_size=16)]
    assert [result.status for result in results] == ["problem", "problem"] and "--world-size 8" in results[0].text
    fits = {**job, "SLURM_GPUS_ON_NODE": "8"}
    assert [one.status for one in slurm_results(fits, launcher="slurm", world_size=8)] == ["ok"]


SKIPPED = ["--skip", "start", "batches", "collectives"]


def test_a_config_for_several_processes_is_checked_for_as_many(config, capsys):
    """Also under SLURM, whose variables the launcher reads."""
    path = config(backend={"type": "fsdp", "sharding_strategy": "HYBRID_SHARD", "num_shard": 4})
    assert main([path, "--dry-run", "--json", "--world-size", "8", *SKIPPED]) == 0
    assert "2 per device x 8 process(es)" in results(capsys)["engine"][0][1]
    assert main([path, "--dry-run", "--json", "--cfg-options", "world_size=4", *SKIPPED]) == 0
    assert "2 per device x 4 process(es)" in results(capsys)["engine"][0][1]
    assert main([path, "--dry-run", "--json", "--world-size", "6", *SKIPPED]) == 1
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
    monkeypatch.setattr(machine, "installed_version", {"torch": "2.5.1", "transformers": "5.23.0"}.get)
    assert main(["unified_digits"]) == 2
    assert "torch 2.5.1 is installed. Allowed: torch >=2.6. Remedy: pip install 'torch>=2.6'" in capsys.readouterr().err


def test_options_that_belong_to_a_dry_run(capsys):
    with pytest.raises(SystemExit) as error:
        main(["unified_digits", "--world-size", "4"])
    assert main(["unified_digits", "--dry-run", "--skip", "everything"]) == 2
    assert error.value.code == 2 and "--world-size belongs to --dry-run" in capsys.readouterr().err


SHARDED = ["--dry-run", "--json", "--world-size", "3", "--batches", "1", "--backend", "fsdp:FULL_SHARD"]


@pytest.mark.slow
def test_ranks_with_and_without_images_call_the_same_collectives(config, tmp_path, capsys):
    path = config(train_dataloader__batch_size=1, optim_wrapper__accumulative_counts=1)
    before = files(tmp_path)
    status = main([path, *SHARDED])
    checks = results(capsys)
    ((state, text),) = checks["collectives"]
    assert (status, state) == (0, "ok") and "without vit_patches" in text, checks
    assert int(text.split("the same ")[1].split()[0]) == 11, text
    assert checks["batches"][0][1].startswith("3 micro-batches of 3 rank(s)")
    assert files(tmp_path) == before


@pytest.mark.slow
def test_an_engine_that_learns_the_order_of_modules_late(tmp_path, capsys):
    """A model of transformers runs its modules several times in the first update, and ZeRO-3 follows their order."""
    write_talks(tmp_path / "talks")
    write_language(tmp_path / "qwen3", "qwen3")
    changes = [
        f"model.pretrained={tmp_path / 'qwen3'}", f"tokenizer.path={tmp_path / 'qwen3'}", "val_dataloader=None",
        f"train_dataloader.dataset.data_path={tmp_path / 'talks' / 'texts.jsonl'}", "train_dataloader.seq_length=224",
        "train_dataloader.num_workers=0", "train_dataloader.dataset.index_workers=0",
    ]  # fmt: skip
    later = ["--batches", "8", "--cfg-options", *changes, f"work_dir={tmp_path / 'run'}"]
    status = main(["qwen_sft", "--dry-run", "--json", "--world-size", "2", "--backend", "deepspeed:zero3", *later])
    checks = results(capsys)
    problems = [text for lines in checks.values() for state, text in lines if state == "problem"]
    assert (status, problems, checks["collectives"][0][0]) == (0, [], "ok")


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
    checks = results(capsys)
    ((state, text),) = checks["collectives"]
    assert state == "problem" and "micro-batch 1: rank 0 (" in text, checks
    assert "both would wait for ever" in text and "Remedy: run every part" in text, text


def test_calls_are_compared_in_every_iteration():
    whole, texts = ("video",), ("video", "images")

    def batches(*of_ranks):
        return FirstBatches(1, [[*kinds] for kinds in of_ranks])

    gather, reduce = "all_gather(8 float32)", "reduce_scatter(8 float32)"
    same = {whole: [gather, reduce], texts: [gather, reduce]}
    assert compare_ranks(batches([whole], [texts]), same).status == "ok"
    other = {whole: [gather, reduce], texts: [reduce]}
    result = compare_ranks(batches([whole], [whole], [texts]), other)
    assert result.status == "problem" and "rank 0 (without video) and rank 2 (without video, images)" in result.text
    assert "call 1 of an update is all_gather(8 float32) on the one" in result.text
    result = compare_ranks(batches([whole, texts, whole], [whole, texts, texts]), other)
    assert result.status == "problem" and result.text.startswith("update 3, micro-batch 1: rank 0 ")
    result = compare_ranks(batches([texts], [texts]), other)
    assert result.status == "warning" and "no two ranks have both" in result.text
