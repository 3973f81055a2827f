"""``tools/generate.py``: pictures and texts from a training run's checkpoint and from a published directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.support.golden_files import BAGEL
from tests.text_run import text_config, words
from tests.tiny import tiny_config
from tools.generate import main
from unigen_ds.data.text.tokenizers import WordTokenizer
from unigen_ds.families.bagel.inference import InterleaveInferencer
from unigen_ds.families.bagel.published import FILES
from unigen_ds.runner import Runner
from unigen_ds.runner.open.trained import open_inferencer

FAST = ["--num-timesteps", "3", "--device", "cpu"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Runner:
    average = [{"type": "EMAHook", "momentum": 0.5}]
    config = tiny_config(tmp_path_factory.mktemp("generate") / "run", digits, custom_hooks=average)
    runner = Runner.from_cfg(config, max_updates=2)
    runner.train()
    return runner


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    for name in FILES:
        shutil.copyfile(BAGEL / name, folder / name)
    WordTokenizer(words=["a", "red", "cat"]).save_pretrained(str(folder))
    return folder


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_weights_of_a_checkpoint_raw_and_averaged(run: Runner) -> None:
    path = Path(run.work_dir)
    raw, average = (open_inferencer(path, raw=raw).model.state_dict() for raw in (True, False))
    state = run.backend.model.state_dict()
    assert all(torch.equal(raw[name], tensor) for name, tensor in state.items())
    name = "language_model.model.layers.0.mlp.up_proj.weight"
    (folder,) = path.glob("iter_*/ema")
    tensors = {k: t for file in folder.glob("*.safetensors") for k, t in load_file(file).items()}
    (key,) = (key for key in tensors if f"|{name}|" in key or key == name)
    assert torch.equal(average[name].flatten(), tensors[key].flatten()) and not torch.equal(average[name], raw[name])


def test_a_file_of_prompts(run: Runner, tmp_path: Path, capsys: Any) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text("draw a three\n\ndraw a four\n")
    words = [str(run.work_dir), "--prompts", str(prompts), "--out", str(out), *FAST]
    assert main(words) == 0
    answers = [(row["prompt"], row["file"], row["seed"]) for row in rows(out)]
    assert answers == [("draw a three", "00000.png", 0), ("draw a four", "00001.png", 1)]
    first = (out / "00000.png").read_bytes()
    assert main([*words, "--seed", "5"]) == 0
    assert [row["file"] for row in rows(out)][2:] == ["00002.png", "00003.png"], "what is there stays"
    assert (out / "00000.png").read_bytes() == first != (out / "00002.png").read_bytes()
    with Image.open(out / "00003.png") as image:
        assert image.size == (8, 8) and image.mode == "L"
    prompts.write_text("\n \n")
    assert main(words) == 2 and f"there is no prompt in {prompts}" in capsys.readouterr().err


def test_a_contact_sheet_of_several_answers_to_several_prompts(run: Runner, tmp_path: Path) -> None:
    out, prompts = tmp_path / "out", tmp_path / "prompts.txt"
    prompts.write_text("draw a three\ndraw a four\n")
    words = [str(run.work_dir), "--prompts", str(prompts), "--samples", "2", "--out", str(out), *FAST]
    for options in (["--grid"], ["--grid", "--columns", "4"]):
        assert main([*words, *options]) == 0
    assert [(row["prompt"], row["seed"]) for row in rows(out)[:4]] == [
        ("draw a three", 0), ("draw a three", 1), ("draw a four", 2), ("draw a four", 3),
    ]  # fmt: skip
    (square, flat) = (Image.open(out / name) for name in ("grid-00000.png", "grid-00004.png"))
    assert square.width * 2 == flat.width and square.height == flat.height * 2
    drawing = Image.open(out / "00000.png")
    assert square.convert("L").getpixel((10 + 14, 10 + 14)) == drawing.getpixel((0, 0))


def test_answers_together_are_those_of_each_alone(run: Runner, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """Pictures within one of 255, also where memory is not enough for so many at once."""
    sizes: list[int] = []

    def complete(self: Any, requests: list[Any], **options: Any) -> Any:
        sizes.append(len(requests))
        if len(requests) > 3:
            raise torch.OutOfMemoryError("no memory is left")
        return original(self, requests, **options)

    original = InterleaveInferencer.complete
    monkeypatch.setattr(InterleaveInferencer, "complete", complete)
    (tmp_path / "prompts.txt").write_text("draw a three\ndraw a four\nthree\ndraw\ndraw a four\n")
    words = [str(run.work_dir), "--prompts", str(tmp_path / "prompts.txt"), *FAST, "--out"]
    for number, out in ((1, "alone"), (16, "together")):
        assert main([*words, str(tmp_path / out), "--batch-size", str(number)]) == 0
    assert sizes == [5, 2, 3] and "memory is not enough for 5 answers together" in capsys.readouterr().err
    assert rows(tmp_path / "alone") == rows(tmp_path / "together")
    for path in (tmp_path / "alone").glob("*.png"):
        one, other = (np.array(Image.open(each)).astype(int) for each in (path, tmp_path / "together" / path.name))
        assert np.abs(one - other).max() <= 1
    monkeypatch.setattr(InterleaveInferencer, "unified_generate", lambda *_, **__: torch.empty(10**15))
    assert main([*words, str(tmp_path / "none"), "--batch-size", "1"]) == 1
    assert "memory is not enough: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--temperature", "1", "--top-p", "0"], "top_p is 0.0"),
        (["--top-p", "0.5"], "temperature is 0"),
        (["--max-length", "0"], "--max-length is 0"),
        (["--batch-size", "0"], "--batch-size is 0"),
        (["--columns", "2"], "without --grid"),
        (["--understand", "--size", "8", "8"], "--size with --understand"),
        (["--device", "cuda:99"], "device 'cuda:99' cannot be used: "),
    ],
)
def test_bad_values_are_refused_before_the_model_is_opened(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "none"), "--prompt", "a", "--out", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_published_directory_draws_edits_and_answers(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([str(directory), "--prompt", "a cat", "--size", "32", "48", "--out", str(out), *FAST]) == 0
    with Image.open(out / "00000.png") as image:
        assert image.size == (48, 32) and image.mode == "RGB"
    edit = tmp_path / "edit.jsonl"
    edit.write_text(json.dumps({"prompt": "a red cat", "images": [str(out / "00000.png")]}) + "\n")
    assert main([str(directory), "--prompts", str(edit), "--think", "--max-length", "4", "--out", str(out), *FAST]) == 0
    with Image.open(out / "00001.png") as image:
        assert image.size[0] > image.size[1], "an edited picture has the shape of the one that was shown"
    words = ["--understand", "--max-new-tokens", "6", "--prompt", "a cat", "--image", str(out / "00001.png")]
    capsys.readouterr()
    assert main([str(directory), *words, "--out", str(out), *FAST]) == 0
    last = rows(out)[-1]
    assert last["file"] is None and last["text"] == capsys.readouterr().out.strip()
    assert sorted(path.name for path in out.iterdir()) == ["00000.png", "00001.png", "results.jsonl"]


def test_parts_of_a_file_are_those_of_the_python_interface(directory: Path, tmp_path: Path) -> None:
    """Texts and pictures in their order; without ``prompt`` where they are enough."""
    picture = tmp_path / "red.png"
    Image.new("RGB", (48, 32), "red").save(picture)
    parts = ["a", {"image": str(picture)}, "red cat"]
    records = [{"parts": parts, "prompt": "a red cat"}, {"parts": parts}, {"prompt": "a red cat"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    out = tmp_path / "out"
    files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(out), "--grid"]
    assert main([str(directory), *files, *FAST]) == 0
    inferencer = open_inferencer(directory, device="cpu")
    for number, prompt in enumerate(("a red cat", "")):
        result = inferencer.unified_generate(
            prompt, parts=["a", picture, "red cat"], seed=number, flow={"num_timesteps": 3}
        )
        with Image.open(out / f"0000{number}.png") as image:
            assert image.size == (96, 64) and image.tobytes() == result.images[0].tobytes()
    assert [row.get("given") for row in rows(out)] == [parts, parts, None]


# --- a model that goes on with a text -------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_models_positions(tmp_path: Path, capsys: Any) -> None:
    runner = Runner.from_cfg(text_config(tmp_path, [{"text": words(9)}] * 4), max_updates=1)
    runner.train()
    (decoder,) = runner.work_dir.glob("iter_*.pth")
    short = ["--out", str(tmp_path), "--device", "cpu"]
    assert main([str(decoder), "--prompt", words(70), *short]) == 1
    assert "the prompt has 71 tokens, and the model has 64 positions" in capsys.readouterr().err
    several = [word for n in (3, 9, 1, 60) for word in ("--prompt", words(n))]
    for options in ([], ["--temperature", "2", "--seed", "3"]):
        for number in ("1", "16"):
            out = ["--out", str(tmp_path / number), "--device", "cpu", "--batch-size", number, "--max-length", "9"]
            assert main([str(decoder), *several, *options, *out]) == 0
    assert rows(tmp_path / "1") == rows(tmp_path / "16") and len({row["text"] for row in rows(tmp_path / "16")}) > 4
    capsys.readouterr()
    assert main([str(decoder), "--prompt", words(60), "--temperature", "1", "--max-length", "2", *short]) == 0
    assert "no more than" not in capsys.readouterr().err
    for seed in range(8):  # until one does not end by itself
        assert main([str(decoder), "--prompt", words(61), "--temperature", "9", "--seed", str(seed), *short]) == 0
        if "the text ends after 3 tokens: the model has no more than 64 positions" in capsys.readouterr().err:
            return
    pytest.fail("a text that stopped at the last position was not reported")
