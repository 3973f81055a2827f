"""Metrics of pictures: equal to independent implementations and closed forms; wrong pictures are named."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchmetrics.functional.multimodal import clip_score
from torchmetrics.image.fid import FrechetInceptionDistance, _compute_fid
from transformers import AutoModel, AutoProcessor

from tests.evaluation import tiny_models
from tests.evaluation.tiny_models import Convolution, noise, plain
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.evaluation.metrics import Metric, build_metrics, evaluated
from unigen_ds.evaluation.metrics.picture_metrics import (
    FID,
    CLIPScore,
    MultimodalConsistency,
    as_tensor,
    frechet_distance_of_samples,
)

MADE, REAL = noise(40, seed=1), noise(40, seed=2, bright=200)
PROMPTS = ["a red picture", "the cat sat on the mat", "blue", "a picture of a dog in the picture"]


def score_of(metric: Metric, predictions: list[Any], references: list[Any]) -> dict[str, float]:
    """The value over samples."""
    metric.update(predictions, references, [f"{n:04}" for n in range(len(predictions))])
    return dict(evaluated(metric, checkpoint="").values)


def tensors(images: list[Image.Image]) -> torch.Tensor:
    return torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images])


def expected_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """From the covariances, as torchmetrics computes it."""
    return float(_compute_fid(a.mean(0), a.T.cov(), b.mean(0), b.T.cov()))


@pytest.mark.parametrize("samples", [(9, 7), (40, 30), (9, 30)])
def test_frechet_distance_is_that_of_the_covariances(samples: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 12, generator=generator, dtype=torch.float64) * scale
            for n, scale in zip(samples, (1.0, 2.0), strict=True))  # fmt: skip
    assert frechet_distance_of_samples(a, b) == pytest.approx(expected_distance(a, b), rel=1e-7)
    assert frechet_distance_of_samples(a, a + 1.0) == pytest.approx(12.0, rel=1e-9)


def test_fid_is_torchmetrics_with_the_same_features(caplog: pytest.LogCaptureFixture) -> None:
    library = FrechetInceptionDistance(feature=Convolution().double(), normalize=False)
    library.inception.forward = lambda images: Convolution()(images)  # type: ignore[method-assign]
    with torch.no_grad():
        library.update(tensors(MADE), real=False)
        library.update(tensors(REAL), real=True)
    expected = {"fid_convolution": pytest.approx(float(library.compute()), rel=1e-6)}
    with caplog.at_level(logging.WARNING):
        assert score_of(FID(extractor=Convolution()), MADE, REAL) == expected
        assert not caplog.text
        score_of(FID(extractor=Convolution()), MADE[:5], REAL[:5])
    assert "fid_convolution: 5 samples are fewer than the 6 dimensions" in caplog.text
    with pytest.raises(DataError, match=r"1 sample.*at least 2"):
        score_of(FID(extractor=Convolution()), MADE[:1], REAL[:1])


def test_extractors_have_a_name_a_hash_and_an_antialiased_resize(tmp_path: Path) -> None:
    folder = str(tiny_models.clip(tmp_path / "Tiny-CLIP"))
    by_folder, by_name = FID(extractor=folder), FID(extractor=Convolution(), name="mine", resize=6)
    assert (by_folder.name, by_name.name) == ("fid_tiny-clip", "fid_mine")
    model, processor = AutoModel.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    features = [
        model.get_image_features(**processor(images=images, return_tensors="pt")).pooler_output.detach().double()
        for images in (MADE, REAL)
    ]
    assert score_of(by_folder, MADE, REAL)["fid_tiny-clip"] == pytest.approx(expected_distance(*features), rel=1e-6)
    assert by_folder.provenance["resize"].startswith("bicubic, antialiased")
    assert "6 x 6" in by_name.provenance["resize"] and by_name.provenance["model"].startswith("mine ")
    other = Convolution()
    with torch.no_grad():
        other.layer.bias[0] += 1
    other_model = FID(extractor=other, name="mine", resize=6).provenance["model"]
    assert other_model != by_name.provenance["model"] == FID(extractor=Convolution(), name="mine").provenance["model"]
    with pytest.raises(ConfigError, match=r"FID.resize is 3.*the folder's processor"):
        FID(extractor=folder, resize=3)
    with pytest.raises(ConfigError, match=r"FID.extractor is 5.*a folder"):
        FID(extractor=5)
    with pytest.raises(ConfigError, match=r"fid_convolution twice.*a name each"):
        build_metrics([FID(extractor=Convolution()), FID(extractor=Convolution(), resize=5)])
    bands = np.asarray(MADE[0].resize((5, 5), Image.Resampling.BICUBIC), dtype=np.float32)
    assert np.abs(as_tensor(MADE[:1], 5)[0].permute(1, 2, 0).numpy() - bands).max() <= 1.5, "as Pillow, not rounded"


def test_wrong_pictures_are_named() -> None:
    metric = FID(extractor=Convolution())
    with pytest.raises(DataError, match=r"'0001': the prediction is an image of mode L.*RGB.*convert"):
        metric.update([MADE[0], MADE[1].convert("L")], REAL[:2], ["0000", "0001"])
    with pytest.raises(DataError, match=r"'0000': the reference is ndarray.*PIL"):
        metric.update(MADE[:1], [np.zeros((3, 3, 3))], ["0000"])
    with pytest.raises(DataError, match=r"2 sizes: 9 x 12, 12 x 12.*resize"):
        metric.update([MADE[0], MADE[1].resize((9, 12))], REAL[:2], ["0000", "0001"])
    flat = FID(extractor=lambda images: images.mean(), name="flat")
    with pytest.raises(ConfigError, match=r"fid_flat: the extractor returned \(\) for 2 images.*\(2, dimensions\)"):
        flat.update(MADE[:2], REAL[:2], ["0000", "0001"])


def test_clip_score_is_torchmetrics(tmp_path: Path) -> None:
    folder = str(tiny_models.clip(tmp_path / "clip"))
    model, processor = AutoModel.from_pretrained(folder), AutoProcessor.from_pretrained(folder)

    def wrap() -> Any:  # torchmetrics expects the tensors that transformers 4 returned
        features = {
            name: lambda *args, name=name: getattr(model, name)(*args).pooler_output
            for name in ("get_image_features", "get_text_features")
        }
        return SimpleNamespace(to=lambda _: SimpleNamespace(config=model.config, **features)), processor

    images = noise(4, size=16)
    expected = float(clip_score(list(tensors(images)), PROMPTS, wrap))
    values = score_of(CLIPScore(path=folder), images, PROMPTS)
    assert values == {"clip_score": pytest.approx(expected, rel=1e-6)} and expected > 0


def test_clip_score_of_siglip_by_the_formula(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = str(tiny_models.siglip(tmp_path / "siglip"))
    model, processor = AutoModel.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    images, prompts = noise(4, size=30), [*PROMPTS[:3], "the " * 30]
    tokens = processor(text=prompts, padding="max_length", max_length=16, truncation=True, return_tensors="pt")
    texts = model.get_text_features(**tokens).pooler_output.detach().double()
    features = model.get_image_features(**processor(images=images, return_tensors="pt")).pooler_output.detach().double()
    cosines = torch.nn.functional.cosine_similarity(features, texts)
    metric = CLIPScore(path=folder)
    with caplog.at_level(logging.WARNING):
        value = score_of(metric, images, prompts)["clip_score"]
    table = np.array([row for _, row, _ in metric.samples])
    assert table[:, 0] == pytest.approx(cosines.numpy(), rel=1e-5, abs=1e-6)
    assert value == pytest.approx(max(100 * float(table.mean()), 0), rel=1e-12)
    assert "1 of 4 texts are longer than 16 tokens" in caplog.text


def test_consistency_and_clip_score_order_cases_with_a_known_order(tmp_path: Path) -> None:
    """All texts name the colour of their picture; half of them do; none does."""
    folder = str(tiny_models.clip(tmp_path / "colours", steps=60))
    names = [*tiny_models.COLOURS] * 2
    wrong = names[1:] + names[:1]
    values = []
    for correct in (8, 4, 0):
        pairs = [(f"a {names[n] if n < correct else wrong[n]} picture", plain(names[n])) for n in range(8)]
        texts, images = zip(*pairs, strict=True)
        values.append({
            **score_of(MultimodalConsistency(path=folder), pairs, [None] * 8),
            **score_of(CLIPScore(path=folder), list(images), list(texts)),
        })  # fmt: skip
    score = [one["multimodal_consistency"] for one in values]
    assert score[0] > score[1] + 0.1 > score[2] + 0.2 and score[2] >= 0 and score[0] <= 2.5
    assert [one["multimodal_consistency_r_precision"] for one in values] == [1, 0.5, 0]
    assert values[0]["clip_score"] > values[2]["clip_score"] + 10
    metric = MultimodalConsistency(path=folder)
    with pytest.raises(DataError, match=r"'0': the prediction is str.*\(text, picture\)"):
        metric.update(["a red picture"], [None], ["0"])
    with pytest.raises(DataError, match="'0': the generated text is Image"):
        metric.update([(plain("red"), "red")], [None], ["0"])
