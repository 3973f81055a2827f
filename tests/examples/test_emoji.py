"""The emoji demo: its data is as stated, its classifier refuses wrong pictures, a run of it ends with its report."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from unigen_ds.core.errors import DataError
from unigen_ds.examples.emoji.catalogue import OBJECTS, PEOPLE, Variant, edits, variants
from unigen_ds.examples.emoji.dataset import LIMIT, EmojiClassifier, stored_picture, write_emoji
from unigen_ds.examples.emoji.model import CosineAutoencoder
from unigen_ds.examples.emoji.report_hook import GlyphAnswer, answers_of, samples, scores, tasks
from unigen_ds.families.base import family_of
from unigen_ds.inference.generated import to_picture
from unigen_ds.runner import Runner
from unigen_ds.runner.settings.tree import load_config
from unigen_ds.system.journals import read_lines

TINY: dict[str, Any] = {
    "model.llm.hidden_size": 32,
    "model.llm.intermediate_size": 32,
    "model.llm.num_hidden_layers": 1,
    "model.llm.num_attention_heads": 2,
    "model.llm.num_key_value_heads": 2,
    "model.vit.hidden_size": 16,
    "model.vit.intermediate_size": 16,
    "model.vit.num_attention_heads": 2,
    "train_dataloader.batch_size": 1,
    "train_dataloader.num_workers": 0,
    "train_dataloader.seq_length": 96,
    "train_cfg.max_updates": 3,
    "default_hooks.logger.interval": 1,
    "param_scheduler": [],
    "env.num_threads": 1,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_emoji(tmp_path_factory.mktemp("data") / "emoji")


@pytest.fixture(scope="module")
def classifier(root: Path) -> EmojiClassifier:
    return EmojiClassifier(root)


def tiny_config(work_dir: Path, root: Path, **overrides: Any) -> Any:
    """The shipped config in a tiny size; ``overrides`` are dotted paths with ``__`` instead of dots."""
    config = load_config("unified_emoji", {**TINY, "work_dir": str(work_dir)})
    for section in (config["train_dataloader"], config["val_dataloader"]):
        for dataset in section["dataset"]:
            dataset["root"] = str(root)
    evaluate, preview, report = config["custom_hooks"][1:]
    evaluate |= {"metrics": [{"type": "EmojiAccuracy", "root": str(root)}], "max_samples": 1, "max_batches": 1}
    evaluate["generation"]["flow"] |= {"num_timesteps": 2}
    preview |= {"interval": 2, "prompts": ["draw a hand"], "num_held_out": 1}
    for hook in (preview, report):
        hook["flow"] |= {"num_timesteps": 2, "text_scale": 1.0}
    for key, value in overrides.items():
        config.merge_from_dict({key.replace("__", "."): value})
    return config


def test_every_look_is_held_out_of_some_emoji_and_trained_with_many(root: Path) -> None:
    """And a held-out picture is in no training record, on neither side of an edit."""
    held_out, rest = variants(held_out=True), variants(held_out=False)
    assert len(variants()) == 240 and len(held_out) == len(OBJECTS) + len(PEOPLE) == 36
    assert {*held_out}.isdisjoint(rest) and Counter(v.emoji for v in held_out).most_common(1)[0][1] == 1
    for looks in (Counter(v.look for v in held_out if v.emoji in group) for group in (OBJECTS, PEOPLE)):
        assert max(looks.values()) - min(looks.values()) <= 1
    hidden = {variant.file for variant in held_out}
    words = {text for variant in held_out for text in (variant.request(), variant.caption())}
    for task in ("draw", "read", "edit"):
        training = [conversation(line) for line in lines(root, f"{task}_train")]
        assert training and hidden.isdisjoint(value for turns in training for value in turns)
        assert words.isdisjoint(value for turns in training for value in turns)
        validation = [conversation(line) for line in lines(root, f"{task}_val")]
        assert hidden == {turns[0 if task == "read" else -1] for turns in validation}
    assert len(lines(root, "edit_val")) == 72 and all(b.held_out and not a.held_out for a, b in edits(held_out=True))


def lines(root: Path, name: str) -> list[str]:
    return (root / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()


def conversation(line: str) -> list[str]:
    return [turn.get("content") or turn["image_path"] for turn in json.loads(line)["conversations"]]


def test_the_classifier_refuses_wrong_pictures(classifier: EmojiClassifier, root: Path) -> None:
    car, hand, umbrella = Variant("car", "blue"), Variant("hand", "medium"), Variant("umbrella")
    assert not classifier.right(stored_picture(root, Variant("fish", "blue")), car)
    other = stored_picture(root, Variant("car", "purple"))
    assert not classifier.right(other, car) and classifier.nearest(other) == Variant("car", "purple")
    assert not classifier.right(stored_picture(root, Variant("hand", "medium dark")), hand)
    near = stored_picture(root, Variant("umbrella", "purple"))
    assert classifier.error(near, umbrella) < LIMIT and not classifier.right(near, umbrella), "not the nearest"
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    for image in (Image.new("RGB", (32, 32), "white"), Image.fromarray(noise)):
        assert not any(classifier.right(image, variant) for variant in variants()[::9])
    assert classifier.error(Image.new("RGB", (32, 32), "white"), car) == pytest.approx(1.0)
    assert pass_rate(classifier, root, blocks=2) > 0.9 and pass_rate(classifier, root, blocks=4) < 0.2
    with pytest.raises(DataError, match="16 x 16"):
        classifier.nearest(Image.new("RGB", (16, 16)))


def pass_rate(classifier: EmojiClassifier, root: Path, *, blocks: int) -> float:
    """The share of true pictures that are still right in blocks of so many pixels."""

    def coarse(image: Image.Image) -> Image.Image:
        few = image.resize((32 // blocks, 32 // blocks), Image.Resampling.BOX)
        return few.resize((32, 32), Image.Resampling.NEAREST)

    return float(np.mean([classifier.right(coarse(stored_picture(root, v)), v) for v in variants()[::4]]))


def test_the_report_counts_right_and_wrong_ones(root: Path) -> None:
    """A model that draws every picture as it is, and one that returns the picture before the edit."""
    assert Counter(task.group for task in tasks()) == {
        "draw": 72, "draw_new": 36, "edit_new": 72, "read": 72, "read_new": 36
    }  # fmt: skip

    def answers(look: Any) -> list[GlyphAnswer]:
        values = [
            (task, look(task).caption() if task.group.startswith("read") else stored_picture(root, look(task)))
            for task in tasks()
        ]
        return answers_of(values, root)

    perfect, lazy = answers(lambda task: task.target), answers(lambda task: task.before or Variant(task.target.emoji))
    best, worst = scores(perfect), scores(lazy)
    assert all(best[f"{group}_accuracy"] == 1.0 for group in ("draw", "draw_new", "edit_new", "read", "read_new"))
    assert worst["edit_new_accuracy"] == worst["draw_new_accuracy"] == worst["read_new_accuracy"] == 0
    assert worst["draw_accuracy"] == 0.5
    assert red(samples(perfect, root, title="")) == 0 < red(samples(lazy, root, title=""))


def red(sheet: Image.Image) -> int:
    """Pixels of pure red: frames."""
    return int((np.asarray(sheet) == (255, 0, 0)).all(-1).sum())


@pytest.mark.slow
def test_a_run_ends_with_its_report(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained, evaluated and previewed by the shipped config; resumed from its middle it is the same run."""
    few = tasks()[::20]
    monkeypatch.setattr("unigen_ds.examples.emoji.report_hook.tasks", lambda: few)
    Runner.from_cfg(tiny_config(tmp_path / "whole", root)).train()
    results = json.loads((tmp_path / "whole" / "results.json").read_text())
    assert results["draw_new_accuracy"] == 0 and results["edit_new_number"] == 3 and str(LIMIT) in results["classifier"]
    assert results["flow"]["num_timesteps"] == 2
    for name in ("samples.png", "previews/2.png"):
        assert (tmp_path / "whole" / name).is_file(), name
    evaluations = [line for line in read_lines(tmp_path / "whole/metrics.jsonl") if line.get("event") == "evaluation"]
    assert evaluations[-1]["val/emoji_error"] >= 0 and {"val/loss/image/emoji_edit_val"} <= evaluations[-1].keys()

    Runner.from_cfg(tiny_config(tmp_path / "cut", root), max_updates=2).train()
    assert not (tmp_path / "cut" / "results.json").exists(), "a run that was stopped has nothing to report"
    Runner.from_cfg(tiny_config(tmp_path / "cut", root, resume=True)).train()
    assert json.loads((tmp_path / "cut" / "results.json").read_text()) == results
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def losses(work_dir: Path) -> list[float]:
    return [line["loss"] for line in read_lines(work_dir / "metrics.jsonl") if "loss" in line]


def test_the_autoencoder_keeps_what_makes_an_emoji(classifier: EmojiClassifier, root: Path) -> None:
    vae, right, errors = CosineAutoencoder(), [], []
    for variant in variants():
        pixels = to_tensor(stored_picture(root, variant))
        output = vae.decode(vae.encode(pixels[None], torch.zeros(())))[0]
        errors.append(float((output.clamp(-1, 1) - pixels).square().mean()) / 4)
        right.append(classifier.right(to_picture(output), variant))
    assert np.mean(-10 * np.log10(errors)) >= 26 and np.mean(right) == 1.0


def to_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image, dtype=np.float32) / 127.5 - 1).permute(2, 0, 1).contiguous()


def test_the_model_predicts_pictures(root: Path, tmp_path: Path) -> None:
    """From the true picture its velocity is the true one, at any time that counts as itself."""
    runner = Runner.from_cfg(tiny_config(tmp_path, root))
    model = runner.backend.model
    clean, noise, t = torch.randn(5, 48), torch.randn(5, 48), torch.tensor([0.05, 0.2, 0.5, 0.9, 1.0])
    with torch.no_grad():
        model.llm2vae.weight.zero_()
        model.llm2vae.bias.copy_(clean[0])
    noisy = (1 - t)[:, None] * clean[:1] + t[:, None] * noise
    velocity = model.velocity_of(torch.randn(5, 32), noisy, t)
    assert torch.allclose(velocity, noise - clean[0], atol=1e-4)
    family = family_of(type(model))
    assert family is not None and family.published == () and family.model is type(model)
