"""Tiles of a VLM: each shipped recipe caps them at 4 a sample and 18 a sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.support import image, picture, talk, text, write_jsonl
from tests.data.text.chat_support import character_tokenizer
from tests.end_to_end.models.test_vlm_run import config
from tests.text_run import KeepBatches, run_config
from unigen_ds.core.choices import SHIPPED_NAMES
from unigen_ds.core.errors import ResumeBlocked
from unigen_ds.runner import Runner
from unigen_ds.runner.settings.tree import load_config

SAMPLE, SEQUENCE = 4, 18
RECORDS, EVERY = 60, 6
"""Every sixth record has an image of four tiles and the global one; the others have one tile."""
LARGE = RECORDS // EVERY


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


def tiles(hook: KeepBatches) -> list[int]:
    """Of each sequence: one is a micro-batch."""
    return [len(batch.vit_lengths) for batch in hook.batches]


def numbers(hook: KeepBatches) -> set[int]:
    return {int(sample.split(":")[1]) for sample in hook.ids}


def recipes() -> list[str]:
    names = SHIPPED_NAMES.replace(" or ", ", ").split(", ")
    return [name for name in names if load_config(name)["model"]["type"] == "VLM"]


def test_every_recipe_caps_tiles_and_counts_what_exceeds(folder: Path) -> None:
    assert "nanovlm_460m" in recipes()
    tiny = small()
    for name in recipes():
        settings = load_config(name, {"work_dir": str(folder / name), "train_cfg.max_updates": 6})
        for key in ("model", "tokenizer", "processor", "backend", "optim_wrapper", "param_scheduler"):
            settings[key] = tiny.get(key, [])
        settings["val_dataloader"] = None
        loader = settings["train_dataloader"]
        loader |= {"batch_size": 1, "num_workers": 0, "seq_length": tiny["train_dataloader"]["seq_length"]}
        loader["dataset"] |= {"data_path": "train.jsonl", "index_workers": 0}
        settings["custom_hooks"] = [{"type": "KeepBatches"}]
        _, hook = run_config(settings)
        assert max(tiles(hook)) == SEQUENCE, "as many as may be: the samples have one each"
        assert not any(number % EVERY == 0 for number in numbers(hook)), "their images have 5 tiles"
        log = (folder / name / "train.log").read_text(encoding="utf-8")
        assert f"filters remove {LARGE} of {RECORDS} records" in log and f"ImageCountFilter {LARGE}" in log


def small(**overrides: Any) -> Any:
    loader = {"batch_size": 1, "seq_length": 1600, "packing": {"type": "BestFitPacking", "window": 64}}
    options = {f"train_dataloader__{key}": value for key, value in loader.items()}
    saves = {"default_hooks__checkpoint": {"interval": 1, "by_epoch": False}}
    return config(Path.cwd(), Path.cwd() / "run", **{**options, **saves, **overrides})


def test_caps_that_a_run_is_given_later_are_changed_data_with_numbers(folder: Path) -> None:
    Runner.from_cfg(small(), max_updates=1).train()
    caps = {"train_dataloader__packing__max_tiles": SEQUENCE}
    caps["train_dataloader__dataset__filters"] = [{"type": "ImageCountFilter", "max_tiles": SAMPLE}]
    with pytest.raises(ResumeBlocked) as error:
        Runner.from_cfg(small(resume=True, **caps))
    message = str(error.value)
    assert f"the packing was FastPacking-1/64/None and is FastPacking-1/64/{SEQUENCE}" in message
    assert f"the filters of train were none and are ImageCountFilter(max_tiles={SAMPLE})" in message
    assert f"train had {RECORDS} records and has {RECORDS - LARGE}" in message
