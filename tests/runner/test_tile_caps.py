"""Tiles of a VLM: each shipped recipe caps them at 4 a sample and 18 a sequence; a former run keeps its own setting.

``old_vlm/`` holds a config without caps, its checkpoint of update 2, and of each update of the whole run the digest of
the batch and the loss, written by commit 40f7463 (before filters and recipes existed).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.data.chat_support import character_tokenizer
from tests.data.support import image, picture, talk, text, write_jsonl
from tests.runner.test_old_rules import digest
from tests.text_run import KeepBatches, trained
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core.choices import SHIPPED
from unigen_ds.core.errors import ResumeBlocked
from unigen_ds.core.metrics import read_lines
from unigen_ds.runner import Runner
from unigen_ds.runner.settings import load_config

STORED = Path(__file__).parent / "old_vlm"
SAMPLE, SEQUENCE = 4, 18
RECORDS, EVERY = 60, 6
"""Every sixth record has an image of four tiles and the global one; the others have one tile."""
LARGE = RECORDS // EVERY


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data and tokenizer, as the stored run had them; the present folder."""
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path) -> None:
    character_tokenizer().save_pretrained(folder / "tokenizer")
    for name, side in (("small", 14), ("large", 32)):
        picture(folder / f"{name}.png", side, side, seed=side)
    names = ["large" if i % EVERY == 0 else "small" for i in range(RECORDS)]
    records = [talk(image("user", f"{name}.png"), text("user", "?"), text("assistant", name)) for name in names]
    write_jsonl(folder / "train.jsonl", records)


def tiles(kept: KeepBatches) -> list[int]:
    """Of each sequence: one is a micro-batch."""
    return [len(batch.vit_lengths) for batch in kept.batches]


def numbers(kept: KeepBatches) -> set[int]:
    return {int(sample.split(":")[1]) for sample in kept.ids}


def recipes() -> list[str]:
    """The shipped configs of a VLM."""
    names = SHIPPED.replace(" or ", ", ").split(", ")
    return [name for name in names if load_config(name)["model"]["type"] == "VLM"]


def test_every_recipe_caps_tiles_and_counts_what_exceeds(folder: Path) -> None:
    assert "nanovlm_460m" in recipes()
    small = load_config(STORED / "config.py")
    for name in recipes():
        made = load_config(name, {"work_dir": str(folder / name), "train_cfg.max_updates": 6})
        for key in ("model", "tokenizer", "processor", "backend", "optim_wrapper", "param_scheduler"):
            made[key] = small.get(key, [])
        made["val_dataloader"] = None
        loader = made["train_dataloader"]
        loader |= {"batch_size": 1, "num_workers": 0, "seq_length": small["train_dataloader"]["seq_length"]}
        loader["dataset"] |= {"data_path": "train.jsonl", "index_workers": 0}
        made["custom_hooks"] = [{"type": "KeepBatches"}]
        _, kept = trained(made)
        assert max(tiles(kept)) == SEQUENCE, "as many as may be: the samples have one each"
        assert not any(number % EVERY == 0 for number in numbers(kept)), "their images have 5 tiles"
        log = (folder / name / "train.log").read_text(encoding="utf-8")
        assert f"filters remove {LARGE} of {RECORDS} records" in log and f"ImageCountFilter {LARGE}" in log


def config(**overrides: Any) -> Any:
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_config("config.py", {"resume": True, "custom_hooks": [{"type": "KeepBatches"}], **dotted})


@pytest.fixture
def old(folder: Path) -> Path:
    shutil.copy(STORED / "config.py", folder)
    shutil.unpack_archive(STORED / "checkpoint.zip", folder / "run" / "iter_2.pth")
    return folder


def test_a_former_run_without_the_caps_keeps_its_setting(old: Path) -> None:
    _, kept = trained(config())
    later = json.loads((STORED / "expected.json").read_text(encoding="utf-8"))["updates"][2:]
    assert [digest(batch) for batch in kept.batches] == [update["batch"] for update in later]
    losses = [line["loss"] for line in read_lines(old / "run" / "metrics.jsonl") if "loss" in line]
    assert losses == pytest.approx([update["loss"] for update in later], rel=1e-5)
    assert max(tiles(kept)) > SEQUENCE and any(number % EVERY == 0 for number in numbers(kept))
    log = (old / "run" / "train.log").read_text(encoding="utf-8")
    assert "Checklist: " in log and "Checklist, data" not in log and "filters remove" not in log
    facts = Manifest.read(old / "run" / "iter_6.pth").loader["facts"]
    assert facts["packing"] == "WindowPacking-1/64/None" and "filters" not in facts


def test_caps_that_a_former_run_is_given_are_changed_data_with_numbers(old: Path) -> None:
    caps = {"train_dataloader__packing__max_tiles": SEQUENCE}
    caps["train_dataloader__dataset__filters"] = [{"type": "ImageCountFilter", "max_tiles": SAMPLE}]
    with pytest.raises(ResumeBlocked) as caught:
        Runner.from_cfg(config(**caps))
    message = str(caught.value)
    assert f"the packing was WindowPacking-1/64/None and is WindowPacking-1/64/{SEQUENCE}" in message
    assert f"the filters of train were none and are ImageCountFilter(max_tiles={SAMPLE})" in message
    assert f"train had {RECORDS} records and has {RECORDS - LARGE}" in message
