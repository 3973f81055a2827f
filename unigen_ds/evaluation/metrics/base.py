"""The base of all metrics. In: predictions and references of the samples of one process. Out: named numbers.

A metric keeps one *row* for each sample: its sufficient statistics (BLEU: counts of n-grams; ROUGE: scores; FID: two
feature vectors). Rows of several processes are joined and ordered by the samples' keys, so a value does not depend on
the number of processes, on their shares or on the sizes of the batches. The trade-off: FID keeps two vectors for each
sample (16 KiB at 2,048 features in float32) where sums would be smaller, and its value depends on the features alone.

``LocalModel``: a model that scores, a user's local folder, read by transformers without executing anything.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from unigen_ds.config.hub import folder_of
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.evaluation.provenance import Result
from unigen_ds.system import dist
from unigen_ds.system.files import file_digest
from unigen_ds.system.journals import sample_digest
from unigen_ds.system.log import logger
from unigen_ds.system.machine import installed_version

EXTRA = "'unigen_ds[metrics]'"
NOT_USED = "none"
"""The text of a provenance for what a metric does not have."""


class Metric:
    """Scores predictions against references. A metric of your own overrides ``rows`` and, where a value is not the mean
    of one number for each sample, ``values``; one of texts may override ``row`` instead of ``rows``.

    The life cycle; every rank does the same, only numbers of samples may differ::

        metric.check()                                       # before the run: is everything installed?
        for batch in share_of_this_rank:
            metric.update(predictions, references, keys)     # not collective
        evaluated(metric, checkpoint="iter_9.pth")           # collective: the same result on every rank
        metric.reset()

    ``rows`` is called on every rank, ``values`` on rank 0 alone.
    """

    name = ""
    """The name of the value, or what the names of all its values begin with."""
    predicts = "text"
    """What a prediction is: ``text``, ``image``, ``text and image`` (a pair), ``loss`` (the mean of texts, in nats)."""
    compares = "text"
    """What a reference is: ``text`` (or several), ``image``, ``prompt``, ``nothing``."""
    library: str | None = None
    """The distribution that computes the value; its version is in the provenance."""
    definition = 1
    """The version of a metric that this package computes: another number means that values changed."""
    local: LocalModel | None = None
    """The model that scores, where it is a user's folder."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.reset()

    def reset(self) -> None:
        """Forget all samples: key, row and digest of the reference of each."""
        self.samples: list[tuple[str, Any, str]] = []

    def check(self) -> None:
        """Raise ``ConfigError`` for what is not installed. Called before a run."""
        if self.library is not None:
            require_version(self.library)
        if self.local is not None:
            self.local.check()

    def update(self, predictions: Sequence[Any], references: Sequence[Any], keys: Sequence[str]) -> None:
        """Add samples. ``keys``: the id of each, once over all ranks. Not collective; no samples are allowed. Raises
        ``DataError`` for different numbers, and for what is neither text nor image as the metric needs it."""
        if not len(predictions) == len(references) == len(keys):
            numbers = f"{len(predictions)} predictions, {len(references)} references, {len(keys)} keys"
            raise DataError(f"{self.name} got {numbers}", allowed="one reference and one key for each prediction")
        rows = self.rows(predictions, references, keys) if keys else ()
        self.samples += zip(map(str, keys), rows, map(_digest, references), strict=True)

    def rows(self, predictions: Sequence[Any], references: Sequence[Any], keys: Sequence[str]) -> Sequence[Any]:
        """A row for each sample: numbers, an array, or whatever ``compute`` reads. Called on every rank."""
        return [self.row(one, several) for one, several in text_pairs(predictions, references, keys)]

    def row(self, prediction: str, references: Sequence[str]) -> Any:
        """The row of one sample, of a metric of texts: its numbers; by default the texts, for ``compute``."""
        return prediction, references

    def compute(self, rows: Sequence[Any]) -> dict[str, float]:
        """The values from the rows of all samples, at least one. Rank 0."""
        return self.values(np.asarray(rows, dtype=np.float64).reshape(len(rows), -1))

    def values(self, table: np.ndarray) -> dict[str, float]:
        """Name -> value from the rows as a table: float64, shape (samples, columns). Rank 0."""
        return {self.name: float(table.mean())}

    @property
    def provenance(self) -> dict[str, str]:
        """Where a value comes from: two values are alike where all of it is equal. Rank 0. ``metric``, ``version``,
        ``settings`` (JSON), ``resize``, ``precision``, ``seed`` and ``model`` (name and hash of the model that scores)
        always exist; where a metric has no such thing, they are ``none``.
        """
        own = f"unigen_ds definition {self.definition}"
        return {
            "metric": self.name,
            "version": f"{self.library} {require_version(self.library)}" if self.library else own,
            "settings": json.dumps(self.settings, sort_keys=True, default=str),
            "precision": "float64",
            **dict.fromkeys(("resize", "seed", "model"), NOT_USED),
            **self.details(),
        }

    def details(self) -> dict[str, str]:
        """What this metric adds to the provenance, or replaces in it."""
        return {} if self.local is None else self.local.details()


def evaluated(metric: Metric, *, checkpoint: str, made_by: Mapping[str, str] | None = None) -> Result:
    """The values over all ranks with their provenance, equal on every rank. Collective.

    Args:
        metric: with the samples of this rank.
        checkpoint: what made the predictions; the only part of a provenance that may differ in a comparison.
        made_by: how they were made, where it can differ (sampling seed, temperature, EMA): ``generation/<name>``.

    Raises ``DataError`` where there is no sample, and for a key that occurs twice: the sample would count twice.
    """
    parts = dist.gather_to_main(metric.samples)

    def result() -> Result:
        samples = sorted((one for part in parts or () for one in part), key=lambda one: one[0])
        if not samples:
            raise DataError(f"{metric.name} has no predictions", remedy="evaluate at least one sample")
        twice = [key for key, number in Counter(key for key, _, _ in samples).items() if number > 1]
        if twice:
            raise DataError(
                f"{metric.name}: {len(twice)} keys were added more than once, first {twice[0]!r}",
                allowed="every key once, over all processes",
            )
        provenance = {
            **metric.provenance,
            "num_samples": str(len(samples)),
            "samples": sample_digest(f"{key} {digest}" for key, _, digest in samples),
            "checkpoint": checkpoint,
            **{f"generation/{name}": str(value) for name, value in (made_by or {}).items()},
        }
        return Result(metric.compute([row for _, row, _ in samples]), provenance)

    return dist.on_main(result)


def require_version(distribution: str) -> str:
    """Its version. Raises ``ConfigError`` with the extra to install."""
    if (number := installed_version(distribution)) is None:
        raise ConfigError(f"the package {distribution} is not installed", remedy=f"pip install {EXTRA}")
    return number


def check_text(value: Any, *, what: str, key: str) -> str:
    """A text as it is. Raises ``DataError`` for anything else."""
    if not isinstance(value, str):
        raise DataError(f"sample {key!r}: {what} is {type(value).__name__}", allowed="a text")
    return value


def text_pairs(
    predictions: Sequence[Any], references: Sequence[Any], keys: Sequence[str]
) -> list[tuple[str, list[str]]]:
    """The prediction and the references of each sample. Raises ``DataError`` where one is no text, or has none."""
    pairs = []
    for prediction, reference, key in zip(predictions, references, keys, strict=True):
        several = reference if isinstance(reference, (list, tuple)) else [reference]
        if not several:
            raise DataError(f"sample {key!r}: the reference is empty", allowed="a text, or a list of at least one")
        answers = [check_text(one, what="the reference", key=key) for one in several]
        pairs.append((check_text(prediction, what="the prediction", key=key), answers))
    return pairs


def pictures(values: Sequence[Any], keys: Sequence[str], *, what: str) -> list[Image.Image]:
    """The values as they are. Raises ``DataError`` for any that is no picture in RGB: others are not converted."""
    for value, key in zip(values, keys, strict=True):
        if not isinstance(value, Image.Image) or value.mode != "RGB":
            kind = f"an image of mode {value.mode}" if isinstance(value, Image.Image) else type(value).__name__
            raise DataError(
                f"sample {key!r}: {what} is {kind}",
                allowed="a PIL image in RGB",
                remedy="convert it where it is made: image.convert('RGB')",
            )
    return list(values)


def _digest(reference: Any) -> str:
    """Return a digest of a reference, so that values against other references are unlike."""
    digest = blake2b(digest_size=8)
    if isinstance(reference, Image.Image):
        digest.update(f"{reference.mode} {reference.size}".encode())
        digest.update(reference.tobytes())
    else:
        digest.update(json.dumps(reference, sort_keys=True, default=str).encode())
    return digest.hexdigest()


BATCH_SIZE = 16
"""Texts or pictures that a model reads at a time; it changes rounding only."""


class LocalModel:
    """A model of transformers in float32 and what prepares its inputs, loaded at the first use. ``path``: its folder,
    or its name on the hub. ``where``: names it in errors."""

    def __init__(self, path: str, *, where: str) -> None:
        self._path, self.where = path, where

    @cached_property
    def folder(self) -> Path:
        """Where its files are. Raises ``ConfigError`` for a name of the hub that cannot be loaded."""
        return folder_of(self._path, where=self.where)

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def check(self) -> None:
        """Raise ``ConfigError`` where the folder is not there, or has no safetensors."""
        if not any(self.folder.glob("*.safetensors")):
            raise ConfigError(
                f"{self.where}: {str(self.folder)!r} is no folder with safetensors",
                allowed="a folder with a published model, or a name on the hub: organisation/name",
                remedy=f"a relative path begins at {Path.cwd()}; save_pretrained saves a model so: pickled weights are"
                " not read",
            )

    def details(self) -> dict[str, str]:
        """Return name and hash of config, weights, tokenizer and processor, for the provenance."""
        self.check()
        digest = blake2b(digest_size=16)
        for path in sorted(self.folder.iterdir()):
            if path.suffix in (".json", ".safetensors", ".txt", ".model") and path.is_file():  # no pickled one
                digest.update(f"{path.name} {file_digest(path)}\n".encode())
        return {"model": f"{self.name} {digest.hexdigest()}", "precision": "model float32, mean float64"}

    def resize(self) -> str:
        """How its processor resizes pictures, in words; Pillow's resizing is antialiased."""
        images = self.image_processor
        size, crop = (dict(getattr(images, name, None) or {}) for name in ("size", "crop_size"))
        filter_name = Image.Resampling(int(getattr(images, "resample", 3))).name.lower()
        cropping = f", crop {crop}" if getattr(images, "do_center_crop", False) else ""
        return f"{filter_name}, antialiased, {size}{cropping}"

    @cached_property
    def model(self) -> Any:
        return self._load("AutoModel", use_safetensors=True, dtype=torch.float32).eval().to(device())

    @cached_property
    def tokenizer(self) -> Any:
        return self._load("AutoTokenizer")

    @cached_property
    def processor(self) -> Any:
        """The processor of texts and images, or of images alone."""
        return self._load("AutoProcessor")

    def warn_of_truncated(self, tokenizer: Any, texts: Collection[str], limit: int) -> None:
        """A warning where some of the texts have more than ``limit`` tokens."""
        long = sum(len(tokenizer(text)["input_ids"]) > limit for text in texts)
        if long:
            logger().warning("%s: %d of %d texts are longer than %d tokens and are truncated",
                             self.where, long, len(texts), limit)  # fmt: skip

    @property
    def image_processor(self) -> Any:
        return getattr(self.processor, "image_processor", None) or self.processor

    def _load(self, kind: str, **arguments: Any) -> Any:
        """Load the folder by a class of transformers. Raises ``ConfigError``."""
        import transformers

        self.check()
        try:
            with torch.random.fork_rng(devices=[]):
                return getattr(transformers, kind).from_pretrained(str(self.folder), local_files_only=True, **arguments)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ConfigError(f"{self.where}: {kind} cannot read {self.folder}: {error}") from error


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """No gradients, no autocast, and float32 as float32: TF32 would change features by a thousandth."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with (
            torch.inference_mode(),
            torch.random.fork_rng(devices=[]),  # a loader of torch draws a seed
            torch.autocast(device().type, enabled=False),
            torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def vectors_of(values: Sequence[Any], compute: Callable[[list[Any]], torch.Tensor]) -> np.ndarray:
    """``compute`` of ``BATCH_SIZE`` values at a time, ``exact_arithmetic``: shape (values, dimensions)."""
    with exact_arithmetic():
        parts = [compute(list(values[n : n + BATCH_SIZE])) for n in range(0, len(values), BATCH_SIZE)]
        return torch.cat(parts).cpu().numpy()


def pool(output: Any) -> Any:
    """The vectors of a model's output: a tensor, or what transformers 5 returns around it; None where it has none."""
    return output if isinstance(output, torch.Tensor) else getattr(output, "pooler_output", None)
