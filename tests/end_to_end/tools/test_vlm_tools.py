"""``tools/generate.py`` and ``tools/export.py`` of a vision-language model: a run's checkpoint, nanoVLM's directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.support import picture
from tests.data.text.chat_support import write_nanovlm
from tests.end_to_end.models.test_vlm_run import config, data  # noqa: F401 - a fixture
from tools.export import main as export
from tools.generate import main as generate
from unigen_ds.core.errors import ConfigError
from unigen_ds.inference.answers import PackedInferencer
from unigen_ds.runner import Runner
from unigen_ds.runner.open.trained import open_inferencer, open_model
from unigen_ds.system.files import DIGESTS

FAST = ["--max-length", "6", "--device", "cpu"]


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runner:  # noqa: F811
    """It has learned the pictures' names; the average, which lags behind, has not."""
    average = [{"type": "EMAHook", "momentum": 0.01}]
    runner = Runner.from_cfg(config(data, tmp_path_factory.mktemp("vlm") / "run", custom_hooks=average))
    runner.train()
    return runner


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_nanovlm(tmp_path_factory.mktemp("published"))


def answer_of(model: Path, out: Path, *words: str) -> str:
    assert generate([str(model), *words, "--out", str(out), *FAST]) == 0
    row = json.loads((out / "results.jsonl").read_text().splitlines()[-1])
    assert row["file"] is None
    return row["text"]


def test_it_answers_with_the_weights_or_their_average(run: Runner, data: Path, tmp_path: Path) -> None:  # noqa: F811
    question = ["--prompt", "?", "--image", str(data / "red.png")]
    inferencer = PackedInferencer(open_model(run.work_dir)[0], run.processor)
    average = inferencer.unified_generate("?", images=data / "red.png", max_length=6).text
    assert answer_of(run.work_dir, tmp_path, *question, "--raw") == "red" != average
    assert answer_of(run.work_dir, tmp_path, *question) == average
    assert answer_of(run.work_dir, tmp_path, *question, "--raw", "--dtype", "bf16", "--understand") == "red"
    inferencer = open_inferencer(run.work_dir, raw=True)
    red = Image.open(data / "red.png")
    for image in (str(data / "red.png"), red, np.asarray(red.convert("RGB")), [red.convert("CMYK").convert("RGB")]):
        assert inferencer.unified_generate("?", images=image, max_length=6).text == "red"
    with pytest.raises(ConfigError, match="parts: this model answers in text"):
        inferencer.unified_generate("?", parts=["a", red])
    with pytest.raises(ConfigError, match="did you mean 'images'"):
        inferencer.unified_generate("?", image=red)


def test_a_directory_of_nanovlms_first_version_is_refused(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its models know no image token; of a later version that lacks a newer key the default is used."""
    shutil.copytree(directory, tmp_path / "old")
    values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for lacking, status in ((("resize_to_max_side_len",), 0), (("lm_chat_template", "max_img_size"), 1)):
        rest = {key: value for key, value in values.items() if key not in lacking}
        (tmp_path / "old" / "config.json").write_text(json.dumps(rest), encoding="utf-8")
        assert generate([str(tmp_path / "old"), "--prompt", "?", "--out", str(tmp_path / "out"), *FAST]) == status
    error = capsys.readouterr().err
    assert (
        "lacks lm_chat_template, max_img_size: it is of nanoVLM's first version" in error and "nanoVLM-230M-8k" in error
    )


def test_answers_are_drawn_by_temperature_top_p_and_seed(directory: Path, tmp_path: Path) -> None:
    """The same for a seed, others for other seeds; so few likely tokens that one is left: the greedy answer."""
    shortest = ["--prompt", "?", "--out", str(tmp_path / "out"), *FAST]
    warm = [*shortest, "--temperature", "3", "--samples", "4"]
    for options in (shortest, warm, warm, [*warm, "--seed", "1"], [*warm, "--top-p", "1e-6"]):
        assert generate([str(directory), *options]) == 0
    texts = [json.loads(line)["text"] for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    greedy, first, again, later, narrow = texts[:1], texts[1:5], texts[5:9], texts[9:13], texts[13:]
    assert first == again and len({*first, *greedy}) > 2
    assert later[:3] == first[1:], "answer i has the seed --seed + i"
    assert narrow == greedy * 4


def test_a_published_directory_answers_and_goes_out_as_it_came_in(directory: Path, tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 70, 50, seed=1)
    assert answer_of(directory, tmp_path, "--prompt", "?", "--image", str(tmp_path / "a.png"))
    assert export([str(directory), str(tmp_path / "out"), "--source", str(directory)]) == 0
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    out = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.name != DIGESTS}
    assert out == files
