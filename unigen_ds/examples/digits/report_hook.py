"""A report at the end of the digits run: does the model draw the requested digit, and read the digit in an image?

A classifier that is independent of the model reads the drawn digits: a support vector machine trained on the 1,500 real
training images (scikit-learn's example setting, about 99 % on the 297 held-out images). Captions must match exactly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge
from PIL import Image

from unigen_ds.config.registry import HOOKS, checked
from unigen_ds.evaluation.sheet import Cell, contact_sheet
from unigen_ds.evaluation.validation import evaluating
from unigen_ds.examples.demo import ReportHook
from unigen_ds.examples.digits.dataset import TRAIN_SIZE, WORDS, DigitsDataset, caption, draw_prompt, read_split
from unigen_ds.families.bagel.flow_settings import FlowSettings
from unigen_ds.families.bagel.inference import InterleaveInferencer
from unigen_ds.families.bagel.processor import UnifiedProcessor
from unigen_ds.families.bagel.sampler import read_texts
from unigen_ds.hooks.base import Run
from unigen_ds.hooks.evaluate.ema import average_of
from unigen_ds.inference.prompts import Prompt
from unigen_ds.system import dist
from unigen_ds.system.seeding import derive_seed

_OF_DIGIT = 20
_COLUMNS = 10


@HOOKS.register_module()
class DigitsReportHook(ReportHook):
    """Runs once the training is complete (a run that was only stopped has nothing to report), with the EMA weights.

    Args:
        num_timesteps: times of the sampler, one more than its steps.
        text_scale: guidance towards the prompt; 1 is none.
        seed: of the first noise of each drawing.
    """

    name = "digits_report"
    dataset = DigitsDataset

    @checked()
    def __init__(self, *, num_timesteps: Annotated[int, Ge(2)] = 26, text_scale: float = 2.0, seed: int = 0) -> None:
        self.flow = FlowSettings(num_timesteps=num_timesteps, text_scale=text_scale)
        self.seed = seed

    def measure(self, run: Run, root: Path) -> tuple[dict[str, Any], Image.Image, str] | None:
        with average_of(run), evaluating(run.backend):
            results, sheet = evaluate_digits(run.backend.model, run.processor, root, flow=self.flow, seed=self.seed)
        summary = (
            f"Of {results['drawn']} drawn digits the classifier reads {results['prompt_accuracy']:.1%} as requested (of"
            f" real ones it reads {results['judge_accuracy']:.1%} correctly); {results['caption_accuracy']:.1%} of"
            f" {results['captioned']} held-out images read correctly."
        )
        return (results, sheet, summary) if dist.is_main() else None


def evaluate_digits(
    model: Any, processor: UnifiedProcessor, root: Path, *, flow: FlowSettings, seed: int
) -> tuple[dict[str, Any], Image.Image]:
    """Draw 20 of each digit and read the held-out images. A red frame in the sheet: classified as another digit."""
    train_images, train_labels = read_split(root, "train")
    held_images, held_labels = read_split(root, "val")
    classifier = train_classifier(train_images, train_labels)
    digits = np.repeat(np.arange(10), _OF_DIGIT)
    inferencer, height_width = InterleaveInferencer(model, processor), train_images.shape[1:]
    prompts = [Prompt(draw_prompt(digit)) for digit in digits.tolist()]
    requests: list[Any] = [
        inferencer.request(each, seed=derive_seed(seed, i), size=height_width) for i, each in enumerate(prompts)
    ]
    replies = inferencer.complete(requests, max_new_tokens=1, flow=flow, together=True)
    # 8 bits -> 0..1 in the 17 grey levels of the real scans: no finer than what they can show
    drawings = (np.stack([np.asarray(one.images[0]) for one in replies]) / 255 * 16).round() / 16
    predictions = classifier.predict(drawings.reshape(len(drawings), -1))
    texts = read_texts(model, processor, [_picture(image) for image in held_images])
    right = [text == caption(digit) for text, digit in zip(texts, held_labels.tolist(), strict=True)]
    results = {
        "prompt_accuracy": float((predictions == digits).mean()),
        "caption_accuracy": float(np.mean(right)),
        "judge_accuracy": float(classifier.score(held_images.reshape(len(held_images), -1), held_labels)),
        "drawn": len(digits),
        "captioned": len(right),
        "judge": f"sklearn SVC(gamma=0.256) on {TRAIN_SIZE} real images",
        "guidance": flow.text_scale,
        "flow_steps": flow.num_timesteps - 1,
    }
    cells = []
    for digit, word in enumerate(WORDS):
        scans = train_images[train_labels == digit]
        for number, scan in zip(np.flatnonzero(digits == digit)[:_COLUMNS], scans, strict=False):
            cells.append(Cell([_picture(drawings[number]), _picture(scan)], word, bool(predictions[number] != digit)))
    title = f"Drawn by the model (the classifier agrees on {results['prompt_accuracy']:.1%}), and a real scan."
    title += f" Of {results['captioned']} held-out scans {results['caption_accuracy']:.1%} are read correctly."
    return results, contact_sheet(cells, columns=_COLUMNS, title=title, side=40)


def train_classifier(images: np.ndarray, labels: np.ndarray) -> Any:
    """A support vector machine on pixels in 0..1; gamma is scikit-learn's example value 0.001 for pixels in 0..16."""
    from sklearn.svm import SVC  # ``DigitsDataset`` needs the package, too

    return SVC(gamma=0.001 * 16**2).fit(images.reshape(len(images), -1), labels)


def _picture(image: np.ndarray) -> Image.Image:
    return Image.fromarray((image * 255).round().astype(np.uint8))
