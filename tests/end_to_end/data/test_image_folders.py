"""Data files in different folders with images of equal names: a path starts at the folder of its own file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.data.support import write_jsonl
from tests.text_run import KeepBatches, run_config
from tests.tiny import tiny_config
from unigen_ds.core.errors import DataError
from unigen_ds.runner import Runner

GREY = {"a": 0, "b": 255}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, grey in GREY.items():
        records = [{"text_prompt": f"draw a {word}", "image_path": f"{word}.png"} for word in ("one", "two", "three")]
        write_jsonl(tmp_path / name / "part.jsonl", records)
        for word in ("one", "two", "three"):
            Image.new("L", (8, 8), grey).save(tmp_path / name / f"{word}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(folder: Path, **overrides: Any) -> Any:
    dataset = {"data_path": ["a/part.jsonl", "b/part.jsonl"], **overrides.pop("dataset", {})}
    overrides = {"train_cfg__max_updates": 1, **overrides}
    return tiny_config(
        folder / overrides.pop("run", "run"), folder,
        train_dataloader__dataset={"type": "UnifiedGenerationDataset", **dataset},
        custom_hooks=[{"type": "KeepBatches"}], default_hooks__checkpoint__interval=1,
        train_dataloader__batch_size=1, train_dataloader__seq_length=160, **overrides,
    )  # fmt: skip


def identity(runner: Runner) -> str:
    return str(runner._parts.start.data.stream.identity["fingerprint"])


def greys(hook: KeepBatches) -> list[float]:
    """Of every drawn image, from -1 (black) to 1, the dark ones first."""
    return sorted(float(one.mean()) for batch in hook.batches for one in batch.vae_images)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_path_starts_at_the_folder_of_its_own_file(folder: Path, streaming: bool) -> None:
    runner, hook = run_config(config(folder, dataset={"streaming": streaming}))
    assert greys(hook) == pytest.approx([-1.0] * 3 + [1.0] * 3)
    other = Runner.from_cfg(config(folder, dataset={"streaming": streaming, "image_root": "a"}, run="other"))
    assert identity(other) != identity(runner), "these are other data"


def test_an_image_that_is_not_beside_its_file_is_named(folder: Path, capsys: Any) -> None:
    (folder / "b" / "one.png").unlink()
    write_jsonl(folder / "b" / "part.jsonl", [{"text_prompt": "draw", "image_path": n} for n in ("one.png", "no.png")])
    (folder / "a").rename(folder / "c")
    write_jsonl(folder / "c" / "part.jsonl", [{"text_prompt": "draw", "image_path": "gone.png"}])
    with pytest.raises(DataError, match="none of its 3 images can be read") as error:
        Runner.from_cfg(config(folder, dataset={"data_path": ["c/part.jsonl", "b/part.jsonl"]}))
    lines = str(error.value).splitlines()
    assert "b/one.png" in lines[2] and "b/no.png" in lines[3]
