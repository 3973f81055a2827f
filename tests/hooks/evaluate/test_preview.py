"""``PreviewHook`` in real runs of one process: what it shows, what it leaves alone, how it fails, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image

from tests.data.support import picture, talk, text, write_jsonl
from tests.text_run import text_config
from tests.text_run import words as spoken
from tests.tiny import tiny_config
from unigen_ds.config.registry import WRITERS
from unigen_ds.core.errors import ConfigError
from unigen_ds.hooks.evaluate.preview import PreviewHook
from unigen_ds.runner import Runner
from unigen_ds.runner.open.trained import open_inferencer
from unigen_ds.tracking.writer import Writer

FLOW = {"num_timesteps": 3}
EMA = {"type": "EMAHook", "momentum": 0.01}


@WRITERS.register_module(force=True)
class KeepPictures(Writer):
    """A writer that shows pictures."""

    pictures: ClassVar[dict[int, tuple[str, Image.Image]]] = {}

    def open(self, **_: Any) -> None: ...
    def write(self, record: Any, *, update: int) -> None: ...
    def close(self) -> None: ...
    def image(self, name: str, picture: Image.Image, *, update: int) -> None:
        self.pictures[update] = (name, picture)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts to write, pictures to draw and to read."""
    folder = tmp_path_factory.mktemp("data")
    picture(folder / "seen.png", 8, 8, seed=1)
    texts = [talk(text("user", f"this is {word}"), text("assistant", word)) for word in ("zero", "one", "two", "three")]
    draws = [{"text_prompt": "draw a handwritten four", "image_path": "seen.png"}] * 4
    write_jsonl(folder / "train.jsonl", [*texts, *draws] * 4)
    return folder


def preview(data: Path, **arguments: Any) -> dict[str, Any]:
    return {
        "type": "PreviewHook", "interval": 2, "prompts": ["draw a three", reading(data / "seen.png")],
        "num_held_out": 1, "held_out": source(data), "flow": FLOW, "max_new_tokens": 5, **arguments,
    }  # fmt: skip


def reading(*images: object) -> dict[str, Any]:
    return {"images": [*map(str, images)], "understand": True}


def source(data: Path) -> dict[str, Any]:
    return {"type": "UnifiedGenerationDataset", "data_path": str(data / "train.jsonl")}


def train(data: Path, work_dir: Path, *hooks: dict[str, Any], updates: int = 4, **overrides: Any) -> Runner:
    config = tiny_config(
        work_dir, data, train_dataloader__dataset=source(data), train_dataloader__batch_size=4,
        model__llm__dropout=0.2, custom_hooks=[EMA, *hooks], **overrides,
    )  # fmt: skip
    runner = Runner.from_cfg(config, max_updates=updates)
    runner.train()
    return runner


@pytest.fixture(scope="module")
def preview_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """A run with previews after updates 2 and 4, and two writers."""
    writers = [{"type": "KeepPictures"}, {"type": "TensorboardVisBackend"}]
    folder = tmp_path_factory.mktemp("shown") / "run"
    return train(data, folder, preview(data), visualizer={"vis_backends": writers})


def rows(runner: Runner, update: int) -> list[dict[str, Any]]:
    return json.loads((runner.work_dir / "previews" / f"{update}.json").read_text(encoding="utf-8"))


def test_it_shows_what_the_average_of_the_weights_makes(preview_run: Runner, data: Path) -> None:
    average, raw = (open_inferencer(preview_run.work_dir, raw=raw) for raw in (False, True))
    previews = rows(preview_run, 4)
    options = {"understand": True, "images": [data / "seen.png"], "max_length": 5, "seed": 1}
    assert previews[1]["text"] == average.unified_generate("", **options).text
    assert [row["prompt"] for row in previews] == ["draw a three", "", "this is zero", "draw a handwritten four"]
    assert previews[2]["reference"] == "zero" and previews[3]["reference"] == str(data / "seen.png")
    assert "reference_shown" not in previews[3] and "pictures" not in previews[3]
    sheet = np.asarray(Image.open(preview_run.work_dir / "previews" / "4.png").convert("L"))
    drawings = [
        np.asarray(each.unified_generate("draw a three", flow=settings(each), seed=0).images[0])
        for each in (average, raw)
    ]
    head = sheet[32:256, 10:234]  # below the title, the first cell's picture
    assert (head[14::28, 14::28] == drawings[0]).all() and not (drawings[0] == drawings[1]).all()


def settings(inferencer: Any) -> Any:
    from unigen_ds.families.bagel.flow_settings import flow_for

    return flow_for(inferencer.model, FLOW)


def test_a_file_of_prompts_with_parts(data: Path, tmp_path: Path) -> None:
    """As of ``tools/generate.py --prompts``; where a model cannot read them, that is an error at the start."""
    picture = str(data / "seen.png")
    parts = ["this is one", {"image": picture}, "this is"]
    rows_of_file = [{"parts": parts, "prompt": "zero"}, {"prompt": "draw a three"}]
    path = write_jsonl(tmp_path / "prompts.jsonl", rows_of_file)
    hook = {"type": "PreviewHook", "interval": 1, "prompts": str(path), "flow": FLOW, "use_ema": False}
    run = train(data, tmp_path / "run", hook, updates=1)
    first, second = rows(run, 1)
    assert first["prompt"] == "this is one\nthis is\nzero" and first["images"] == [picture] and not first["error"]
    assert second["prompt"] == "draw a three" and not second["error"]
    for prompts, message in (
        ([{"parts": [3]}], "parts is"),
        ([{"parts": [{"image": "gone.png"}]}], "there is no picture"),
        ("draw a three", "a list, or a .txt or .jsonl file of prompts"),
    ):
        with pytest.raises(ConfigError, match=message):
            train(data, tmp_path / "refused", {**hook, "prompts": prompts}, updates=1)
    texts = text_config(
        tmp_path / "texts", [{"text": spoken(4)}], custom_hooks=[{**hook, "flow": None, "prompts": [{"parts": ["a"]}]}]
    )
    with pytest.raises(ConfigError, match=r"has parts, which .* cannot read"):
        Runner.from_cfg(texts, max_updates=1).train()


def test_writers_get_the_sheet(preview_run: Runner) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sheets = {n: np.asarray(Image.open(preview_run.work_dir / "previews" / f"{n}.png")) for n in (2, 4)}
    assert {update: name for update, (name, _) in KeepPictures.pictures.items()} == {2: "preview", 4: "preview"}
    assert all((np.asarray(KeepPictures.pictures[n][1]) == sheets[n]).all() for n in sheets)
    events = EventAccumulator(str(preview_run.work_dir / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    images = events.Images("preview")
    assert [(event.step, event.height, event.width) for event in images] == [(n, *sheets[n].shape[:2]) for n in (2, 4)]


def test_what_a_resume_goes_back_from_is_moved_away(data: Path, tmp_path: Path) -> None:
    saves = {"default_hooks__checkpoint__interval": 2, "default_hooks__checkpoint__by_epoch": False}
    train(data, tmp_path / "run", preview(data), updates=4, **saves)
    first = (tmp_path / "run/previews/4.png").read_bytes()
    runner = train(data, tmp_path / "run", preview(data), updates=4, resume=str(tmp_path / "run/iter_2.pth"), **saves)
    names = {
        path.relative_to(tmp_path / "run/previews").as_posix() for path in (tmp_path / "run/previews").rglob("*.png")
    }
    assert names == {"2.png", "4.png", "abandoned/4.png"} and runner.progress.updates == 4
    assert (tmp_path / "run/previews/4.png").read_bytes() == first, "the same seeds, the same pictures"


def test_what_cannot_be_made_is_a_warning(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken picture, an error that no one expects, and a folder that cannot be written."""
    (tmp_path / "broken.png").write_text("no picture")
    prompts = ["draw a three", {"prompt": "a", "images": [str(tmp_path / "broken.png")]}, reading(data / "seen.png")]
    hook = preview(data, prompts=prompts, num_held_out=0)
    runner = train(data, tmp_path / "one", hook, updates=2)
    assert [bool(row["error"]) for row in rows(runner, 2)] == [False, True, False]
    assert f"1 of 3 previews at update 2 failed; the first: image {tmp_path}/broken.png" in log(runner)
    (tmp_path / "two").mkdir()
    (tmp_path / "two/previews").write_text("not a folder")
    assert "The preview of update 2 was not written: " in log(train(data, tmp_path / "two", preview(data), updates=2))

    def fails(*_: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(PreviewHook, "_make", fails)
    runner = train(data, tmp_path / "three", preview(data), updates=2)
    assert "No preview at update 2: rank 0: RuntimeError: on purpose." in log(runner)
    assert runner.progress.updates == 2 and not (runner.work_dir / "previews").exists()


def log(runner: Runner) -> str:
    return (runner.work_dir / "train.log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": [], "num_held_out": 0}, "nothing to show"),
        ({"interval": 0}, "PreviewHook.interval|interval is 0"),
        ({"flow": {"steps": 3}}, "flow has no key 'steps'"),
        ({"prompts": [{"text": "a"}]}, r"prompts\[0\] has no key 'text'"),
        ({"held_out": None}, "val_dataloader"),
        ({"prompts": [reading("gone.png", "/nowhere/x.png")]}, "no picture /.*/gone.png, /nowhere/x.png.*relative to"),
        ({"held_out": {"type": "UnifiedGenerationDataset"}}, "data_path"),
    ],
)
def test_refused_at_the_start(data: Path, tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(data, tmp_path / "run", preview(data, **arguments), updates=1)
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_model_of_texts_is_shown_no_pictures(data: Path, tmp_path: Path) -> None:
    hook = {"type": "PreviewHook", "prompts": [{"images": [str(data / "seen.png")]}]}
    with pytest.raises(ConfigError, match="PreviewHook has images, and this model reads texts alone"):
        Runner.from_cfg(text_config(tmp_path, [{"text": spoken(9)}] * 4, custom_hooks=[hook])).train()
    assert not (tmp_path / "run/metrics.jsonl").exists()
