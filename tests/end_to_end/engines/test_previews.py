"""What a model says and draws while it is trained, under every engine: what its checkpoint does in one process.

That training stays bit-equal is asserted in ``test_resume.py``: of each pair of runs one makes previews.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.end_to_end.engines.jobs import cases, model_cases
from tests.end_to_end.engines.jobs.cases import FAILS_AT, PREVIEWS, RESUME_UPDATES
from tests.end_to_end.engines.launch import want
from unigen_ds.families.bagel.flow_settings import flow_for
from unigen_ds.runner.open.trained import open_inferencer

runs = want("resume", "models", "decoder")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NAMES = [f"resume/{engine}@2-fp32/straight" for engine in cases.PREVIEWING]
MODELS = [job.name for job in model_cases.models(full=False) if not job.name.endswith("/single@1")]
DECODERS = [job.name for job in cases.decoder(full=False)]


def rows(folder: Path, update: int) -> list[dict[str, Any]]:
    return json.loads((folder / "previews" / f"{update}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_a_preview_shows_what_the_checkpoint_draws_and_writes(name: str, tmp_path: Path) -> None:
    """With the average of the weights; a picture that cannot be read is shown as such, and is a warning."""
    run = runs().outcome(name)
    inferencer = open_inferencer(run.checkpoints[-1])
    settings, data = PREVIEWS["digits"], str(runs().out / "data")
    flow = flow_for(inferencer.model, settings["flow"])
    previews = rows(run.folder, RESUME_UPDATES)
    prompts = [p if isinstance(p, dict) else {"prompt": p} for p in settings["prompts"]]
    sheet = np.asarray(Image.open(run.folder / "previews" / f"{RESUME_UPDATES}.png").convert("L"), dtype=int)
    for number, (row, prompt) in enumerate(zip(previews, prompts, strict=False)):
        images = [path.replace("{data}", data) for path in prompt.get("images", [])]
        assert (row["prompt"], row["seed"], row["images"]) == (prompt.get("prompt", ""), number, images)
        if "mixed.jsonl" in "".join(images):
            assert "mixed.jsonl" in row["error"] and not row["text"]
            continue
        drawing = {"size": settings["size"], "flow": flow}
        how = {"understand": True} if prompt.get("understand") else drawing
        alone = inferencer.unified_generate(
            prompt.get("prompt", ""), images=images, seed=number, max_length=settings["max_new_tokens"], **how
        )
        assert row["text"] == alone.text and not row["error"]
        for image in alone.images:
            assert shown_in(sheet, np.asarray(image, dtype=int)), number
    held_out = previews[len(prompts) :]
    assert [row["record"] for row in held_out] == ["mixed:0", "mixed:1", "mixed:8", "mixed:9"]
    assert [row["reference"] for row in held_out[:2]] == ["zero", "seven nine one three five seven"]


def shown_in(sheet: np.ndarray, image: np.ndarray, *, side: int = 224) -> bool:
    """Whether the enlarged picture is somewhere in the sheet, up to rounding of 8 bits."""
    scale = side // max(image.shape)
    points = sheet[scale // 2 :, scale // 2 :]
    height, width = image.shape
    windows = np.lib.stride_tricks.sliding_window_view(points, ((height - 1) * scale + 1, (width - 1) * scale + 1))
    return bool((np.abs(windows[..., ::scale, ::scale] - image) <= 1).all((-1, -2)).any())


@pytest.mark.parametrize("name", NAMES)
def test_a_failure_on_one_rank_is_a_warning_with_its_reason(name: str) -> None:
    """All ranks go on, and the next preview is there."""
    folder = runs().outcome(name).folder
    numbers = sorted(int(path.stem) for path in (folder / "previews").glob("*.png"))
    assert numbers == [RESUME_UPDATES]
    log = (folder / "train.log").read_text(encoding="utf-8")
    assert f"No preview at update {FAILS_AT}: rank 1: RuntimeError: on purpose." in log
    assert f"1 of 10 previews at update {RESUME_UPDATES} failed; the first: " in log and "mixed.jsonl" in log


@pytest.mark.parametrize("name", MODELS)
def test_answers_to_records_are_those_of_one_process(name: str) -> None:
    run, single = runs().outcome(name), runs().outcome(name.partition("/")[0] + "/single@1")
    parts = [json.loads(path.read_text()) for path in sorted(run.folder.glob("answers_*.json"))]
    (alone,) = [json.loads(path.read_text()) for path in single.folder.glob("answers_*.json")]
    assert len(parts) == int(name.partition("@")[2])
    for kind, one in alone.items():
        together = sorted((row for part in parts for row in part[kind]["rows"]), key=lambda row: row[0])
        expected = sorted(one["rows"], key=lambda row: row[0])
        assert len(expected) == one["asked"] == 3
        assert all((part[kind]["asked"], part[kind]["left_out"]) == (3, one["left_out"]) for part in parts)
        for row, other in zip(together, expected, strict=True):
            assert row[0] == other[0] and row[2:] == other[2:]
            if kind == "text":
                assert row[1] == other[1]
            else:
                difference = np.abs(np.array(row[1]) - np.array(other[1]))
                assert difference.max() <= 2 and np.array(row[1]).shape == np.array(row[2]).shape


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_continues_the_same_texts(name: str) -> None:
    run, single = runs().outcome(name), runs().outcome("decoder/single@1")
    previews = rows(run.folder, cases.DECODER_UPDATES)
    assert [row["prompt"] for row in previews] == PREVIEWS["words"]["prompts"] and any(row["text"] for row in previews)
    assert previews == rows(single.folder, cases.DECODER_UPDATES)
