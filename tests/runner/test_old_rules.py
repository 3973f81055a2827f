"""A checkpoint of before the data rules had versions: written by commit 7bcac6f, resumed with its rules, to the bit.

``old_rules/`` holds its config, data and checkpoint of update 2 (relative paths: run in a folder of its own), and of
each update of the whole run the ledger's digest, a digest of the batch (ids, targets, places) and the loss.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.text_run import trained
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core.batch import PackedBatch
from unigen_ds.core.errors import CheckpointError, ResumeBlocked
from unigen_ds.core.metrics import read_lines
from unigen_ds.data.rules import CURRENT, DataRules
from unigen_ds.runner import Runner
from unigen_ds.runner.settings import load_config

STORED = Path(__file__).parent / "old_rules"
EXPECTED = json.loads((STORED / "expected.json").read_text(encoding="utf-8"))["updates"]
WARNINGS = (
    "WARNING Checklist, data.rules.overflow: version 0 -> version 0, as the checkpoint; version 1 would change 10"
    " records",
    "WARNING Checklist, data.rules.special_tokens: version 0 -> version 0, as the checkpoint; version 1 would change 4"
    " records",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("config.py", "train.jsonl"):
        shutil.copy(STORED / name, tmp_path)
    shutil.unpack_archive(STORED / "checkpoint.zip", tmp_path / "run" / "iter_2.pth")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(**overrides: Any) -> Any:
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_config("config.py", {"resume": True, "custom_hooks": [{"type": "KeepBatches"}], **dotted})


def digest(batch: PackedBatch) -> str:
    found = hashlib.blake2b(digest_size=8)
    for name in ("text_ids", "text_index", "text_target_ids", "text_target_index", "position_ids", "document_ids"):
        found.update(getattr(batch, name).numpy().tobytes())
    return found.hexdigest()


def rules(folder: Path, name: str) -> dict[str, int]:
    return Manifest.read(folder / "run" / name).loader["facts"]["rules"]


def test_an_old_checkpoint_keeps_its_rules_to_the_bit(folder: Path) -> None:
    _, kept = trained(config())
    later = EXPECTED[2:]
    assert [digest(batch) for batch in kept.batches] == [update["batch"] for update in later]
    ledger = [line["digest"] for line in read_lines(folder / "run" / "ledger.jsonl") if "digest" in line]
    assert ledger == [update["ledger"] for update in later]
    losses = [line["loss"] for line in read_lines(folder / "run" / "metrics.jsonl") if "loss" in line]
    assert losses == pytest.approx([update["loss"] for update in later], rel=1e-5)
    log = (folder / "run" / "train.log").read_text(encoding="utf-8")
    assert all(log.count(line) == 1 for line in WARNINGS) and log.count("data.rules.") == 2
    assert rules(folder, "iter_19.pth") == {name: 0 for name in CURRENT.state_dict()}, "the run keeps them"


def test_restart_adopts_the_current_rules(folder: Path) -> None:
    runner, kept = trained(config(on_data_change="restart", train_cfg__max_epochs=1))
    log = (folder / "run" / "train.log").read_text(encoding="utf-8")
    assert "data.rules." not in log.replace("the data rule", "") and "the data rule overflow had version 0" in log
    assert any(sample.count(":") == 3 for sample in kept.ids)
    assert rules(folder, f"iter_{runner.progress.iteration(runner.geometry)}.pth") == CURRENT.state_dict()


def test_a_config_that_sets_overflow_asks_for_the_current_rule(folder: Path) -> None:
    with pytest.raises(ResumeBlocked, match=r"overflow was that of version 0.*and is text: split"):
        Runner.from_cfg(config(train_dataloader__overflow="split"))


def test_without_an_affected_record_nothing_is_warned_of(folder: Path) -> None:
    """The identity of data that no rule touches is that of before: 7bcac6f gives this one for these records."""
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps({"text": "one two three"}) + "\n" for _ in range(9)), encoding="utf-8")
    trained(config(resume=False, work_dir="fresh"))
    path = folder / "fresh" / "iter_3.pth"
    manifest = Manifest.read(path)
    facts = manifest.loader["facts"]
    assert {key: facts.pop(key) for key in ("rules", "overflow", "units")}["rules"] == CURRENT.state_dict()
    assert (manifest.loader["fingerprint"], facts["digests"], facts["records"]) == (
        "c45e75a2f2a79b3bfa97b45a05eb4296",
        ["0f349d9b8dcc7cfbfdcb051c10a6fa51"],
        ["6cacca055fad63f5a3a27d5485930200"],
    )
    (path / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")  # as an old run's: without versions
    (folder / "fresh" / "train.log").unlink()
    trained(config(work_dir="fresh", train_cfg__max_epochs=4))
    log = (folder / "fresh" / "train.log").read_text(encoding="utf-8")
    assert "data.rules." not in log and "update 4 " in log


def test_a_checkpoint_of_newer_rules_is_refused() -> None:
    with pytest.raises(CheckpointError, match="version 9 of the data rule 'overflow'"):
        DataRules.stored({"rules": {"overflow": 9}})
