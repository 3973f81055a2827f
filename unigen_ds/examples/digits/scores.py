"""Scores of a model on the digits: does it draw the requested digit, and read the digit in an image?

A classifier that is independent of the model reads the drawn digits: a support vector machine trained on the 1,500 real
training images (scikit-learn's own example setting, about 99 % on the 297 held-out images). Captions must match word
for word.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from unigen_ds.core.errors import ConfigError
from unigen_ds.evaluation.sheet import Cell, contact_sheet
from unigen_ds.examples.digits.dataset import TRAIN_SIZE, WORDS, caption, draw_prompt, read_split
from unigen_ds.families.bagel.flow_settings import FlowSettings
from unigen_ds.families.bagel.processor import UnifiedProcessor
from unigen_ds.families.bagel.sampler import draw, read

DRAWN_PER_DIGIT = 20
_SHOWN, _SIDE = 10, 40


@dataclass(frozen=True)
class Scores:
    """Results and the pictures that they are of."""

    results: dict[str, Any]
    drawn: np.ndarray
    """[200, 8, 8] in 0..1, twenty of each digit in order."""
    requested: np.ndarray
    """[200] the digit of each prompt."""
    classified: np.ndarray
    """[200] the digit that the classifier read."""


def to_unit(images: Tensor) -> np.ndarray:
    """[-1, 1] -> 0..1 in the 17 grey levels of the real scans: no finer than what they can show."""
    unit = (images.detach().float().cpu().clamp(-1, 1) + 1) / 2
    return (unit * 16).round().div(16).numpy()


def evaluate(model: Any, processor: UnifiedProcessor, root: Path, *, flow: FlowSettings, seed: int) -> Scores:
    """Draw 20 of each digit, caption the 297 held-out images, score both. The model is in eval mode, on its device."""
    train_images, train_labels = read_split(root, "train")
    held_images, held_labels = read_split(root, "val")
    classifier = train_classifier(train_images, train_labels)
    requested = np.repeat(np.arange(10), DRAWN_PER_DIGIT)
    pictures = draw(
        model,
        processor,
        [draw_prompt(d) for d in requested.tolist()],
        size=train_images.shape[1:],
        flow=flow,
        seed=seed,
    )
    drawings = to_unit(torch.stack(pictures)[:, 0])
    classified = classifier.predict(drawings.reshape(len(drawings), -1))
    texts = read(model, processor, [_picture(image) for image in held_images])
    right = [text == caption(digit) for text, digit in zip(texts, held_labels.tolist(), strict=True)]
    results = {
        "prompt_accuracy": float((classified == requested).mean()),
        "caption_accuracy": float(np.mean(right)),
        "judge_accuracy": float(classifier.score(held_images.reshape(len(held_images), -1), held_labels)),
        "drawn": len(requested),
        "captioned": len(right),
        "judge": f"sklearn SVC(gamma=0.256) on {TRAIN_SIZE} real images",
        "guidance": flow.text_scale,
        "flow_steps": flow.num_timesteps - 1,
        "nearest_training_distance": _novelty(drawings, train_images),
    }
    return Scores(results, drawings, requested, classified)


def train_classifier(images: np.ndarray, labels: np.ndarray) -> Any:
    """A support vector machine on pixels in 0..1; gamma is scikit-learn's example value 0.001 for pixels in 0..16."""
    try:
        from sklearn.svm import SVC
    except ImportError as error:
        raise ConfigError(
            "the classifier of the digits needs scikit-learn", remedy="pip install 'unigen_ds[demo]'"
        ) from error
    return SVC(gamma=0.001 * 16**2).fit(images.reshape(len(images), -1), labels)


def _novelty(drawings: np.ndarray, real: np.ndarray) -> dict[str, float]:
    """Mean distance to the nearest training image, of the drawn and, for scale, of real ones to other real ones.

    About equal: new digits. Near zero for the drawn: copies.
    """
    flat_drawn, flat_real = drawings.reshape(len(drawings), -1), real.reshape(len(real), -1)

    def distances(a: np.ndarray) -> np.ndarray:
        squared = (a**2).sum(1)[:, None] + (flat_real**2).sum(1)[None] - 2 * a @ flat_real.T
        return np.sqrt(np.maximum(squared, 0))

    among_real = distances(flat_real)
    np.fill_diagonal(among_real, np.inf)
    return {"drawn": float(distances(flat_drawn).min(1).mean()), "real": float(among_real.min(1).mean())}


def sample_sheet(scores: Scores, root: Path) -> Image.Image:
    """Ten drawings of each digit, each beside a real scan of it. Red frame: classified as another digit."""
    images, labels = read_split(root, "train")
    cells = []
    for digit, word in enumerate(WORDS):
        pairs = zip(np.flatnonzero(scores.requested == digit), images[labels == digit], strict=False)
        for number, scan in [*pairs][:_SHOWN]:
            wrong = bool(scores.classified[number] != digit)
            cells.append(Cell([_picture(scores.drawn[number]), _picture(scan)], word, wrong))
    results = scores.results
    title = (
        f"Drawn by the model (the classifier agrees on {results['prompt_accuracy']:.1%}), and a real scan. Of"
        f" {results['captioned']} held-out scans {results['caption_accuracy']:.1%} are read correctly."
    )
    return contact_sheet(cells, columns=_SHOWN, title=title, side=_SIDE)


def _picture(image: np.ndarray) -> Image.Image:
    return Image.fromarray((image * 255).round().astype(np.uint8))
