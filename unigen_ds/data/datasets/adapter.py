"""A user's own map-style data set (pre-tokenised ids, ready tensors) with the interface of ``PlannedDataset``.

In: items with ids, labels and images, and ``lengths()`` where the data set has it. Out: samples, counts and digests, so
order, packing, resume and ledger work for it too. Without ``lengths()`` a start reads every item once.
"""

from __future__ import annotations

import hashlib
import pkgutil
import random
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor

from unigen_ds.config.registry import DATASETS, check_arguments, checked
from unigen_ds.core.errors import ConfigError, DataError, UnigenError, suggestion
from unigen_ds.data.cache.array_cache import fingerprint
from unigen_ds.data.datasets.dataset import ScannedDataset
from unigen_ds.data.records.unusable import NUM_LISTED, BadRecord, OnRecordError, unusable_error
from unigen_ds.data.samples.processor import ConversationProcessor
from unigen_ds.data.samples.sample import IGNORED, Array, Counts, Sample, Split, count, record_digest
from unigen_ds.data.samples.splits import ImageKind, TextSplit, TokenSplit
from unigen_ds.system.seeding import derive_seed


@DATASETS.register_module()
class DatasetAdapter(ScannedDataset):
    """A user's map-style data set of ``dict(input_ids, attention_mask, labels, padded_images)``.

    ``labels`` follow the Hugging Face convention: aligned with ``input_ids``, -100 ignored, shifted here. Positions
    where ``attention_mask`` is 0 are dropped. ``padded_images``: None, [C, H, W] or [n, C, H, W], floating point
    from -1 (black) to 1 (white). Other keys are refused. The data set's own random numbers are keyed by (index, pass),
    so they depend on no worker.

    Items with several images may have ``image_roles``, one for each: ``'target'`` is drawn, after the text;
    ``'condition'`` (seen by the vision tower) and ``'edited'`` (encoded by the VAE) are before it.

    At a start each process reads every item once, for its length. A data set with ``lengths()`` is not read: for each
    item the number of tokens, or ``(tokens, [(height, width), ...])`` with its images, or ``(height, width, role)``; a
    resume sees that its content changed by its ``fingerprint``, a text.

    Args:
        dataset: the object, or ``dict(type='module.Class', ...)``: a class or its path, and its arguments.
        processor: has the patch sizes and the image ids.
        images: ``generate``: each image is a target after the text; ``understand``: a condition before it.
        weight: relative share of the samples in a mixture; all sources (of a group) have one, or none has.
        group: its group of `train_dataloader.groups`.
        num_used_data: only the first records are used, so many of them; None: all.
        name: first part of a sample id; None: the class's name.
        on_record_error: ``'error'``: malformed items stop the start, with a list of the first. ``'skip'``: every item
            is read, also with ``lengths()``; malformed ones are left out, counted, and listed in ``left_out.jsonl``;
            more than ``max_skipped_fraction`` are refused.
    """

    @checked()
    def __init__(
        self,
        dataset: Any,
        processor: ConversationProcessor,
        *,
        images: Literal["generate", "understand"] = "generate",
        weight: float | None = None,
        group: str | None = None,
        num_used_data: Annotated[int, Ge(1)] | None = None,
        name: str | None = None,
        on_record_error: OnRecordError = "error",
    ) -> None:
        self.on_record_error, self._bad = on_record_error, list[BadRecord]()
        self.dataset = _make(dataset) if isinstance(dataset, Mapping) else dataset
        is_map = hasattr(self.dataset, "__len__") and hasattr(self.dataset, "__getitem__")
        if not is_map or isinstance(self.dataset, (str, bytes)):
            raise ConfigError(
                f"DatasetAdapter.dataset is {self.dataset!r}",
                allowed="a map-style data set: an object, or dict(type='module.Class', ...)",
                remedy=f"dataset=dict(type={self.dataset!r})" if isinstance(self.dataset, str) else None,
            )
        self.processor, self.images, self.weight = processor, images, weight
        self.group, self.num_used_data = group, num_used_data
        self.name = name or type(self.dataset).__name__
        if not len(self.dataset):
            raise DataError(f"{self.name}: the data set has no item (its __len__ is 0)")
        self.unk_id = getattr(processor.tokenizer, "unk_id", None)
        self._has_lengths = on_record_error == "error" and callable(getattr(self.dataset, "lengths", None))

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def fingerprint(self) -> str:
        """``ScannedDataset``'s; a data set with ``lengths()`` has one of them and of its own ``fingerprint``."""
        own = getattr(self.dataset, "fingerprint", None)
        return fingerprint(super().fingerprint, own) if self._has_lengths else super().fingerprint

    def content_digests(self) -> Array:
        """``ScannedDataset``'s. Of a data set with ``lengths()`` every item is read for it."""
        return self._read_all()[1] if self._has_lengths else super().content_digests()

    @cached_property
    def _scan(self) -> tuple[Counts, Array, str]:
        if self._has_lengths:
            return self._of_lengths()
        self._bad.clear()
        counts, records, digest = self._read_all()
        if self._bad and self.on_record_error == "error":
            raise unusable_error(self._bad, self.name, len(self))
        if not counts.targets.any():
            problem = (
                f"{self.name}: none of its {len(self):,} items has a target: labels are -100, and no image is drawn"
            )
            raise DataError(problem, allowed="labels aligned with input_ids; the first one is not used")
        return counts, records, digest

    def _sample_or_none(self, index: int) -> Sample:
        try:
            return self.sample(index)
        except DataError as error:
            self._bad.append(BadRecord(index, self.name, index, None, str(error)))
            if self.on_record_error == "error" and len(self._bad) == NUM_LISTED:  # to read the others may take hours
                raise unusable_error(self._bad, f"{self.name}, of which no more is read", index + 1) from error
            return Sample(())

    def unusable(self) -> Sequence[BadRecord]:
        if self.on_record_error == "error":
            return ()
        _ = self._scan
        return self._bad

    def _of_lengths(self) -> tuple[Counts, Array, str]:
        """``_scan`` of the data set's own ``lengths()``. Every token but the first counts as a target."""
        lengths, rows = self.dataset.lengths(), []
        if len(lengths) != len(self):
            requirement = f"one for each of {len(self)} items"
            raise DataError(f"{self.name}.lengths() has {len(lengths)} values", allowed=requirement)
        for i, value in enumerate(lengths):
            where = f"{self.name}.lengths()[{i}]"
            tokens, images = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value, ())
            if isinstance(tokens, bool) or not isinstance(tokens, (int, np.integer)) or tokens < 0:
                raise DataError(f"{where} is {value!r}", allowed="tokens, or (tokens, [(height, width, role), ...])")
            # of the ids only the number is known
            text = TextSplit(range(int(tokens)), loss=True, begins=False, following=IGNORED)  # type: ignore[arg-type]
            splits: list[Split] = [text]
            for height, width, *role in images:
                kind = self._kind(role[0] if role else None, where)
                channels = self.processor.vit_channels if kind == "vit" else self.processor.vae_channels
                blank = torch.empty((channels, int(height), int(width)), device="meta")
                splits.append(self.processor.ready_image(blank, kind, where))
            rows.append(count(Sample(tuple(splits))))
        records = np.asarray([record_digest(b"", row) for row in rows], dtype=np.int64)
        digest = hashlib.blake2b(records.astype("<i8").tobytes(), digest_size=16).hexdigest()
        return Counts.of(rows), records, digest

    def _kind(self, role: Any, where: str) -> ImageKind:
        """How an image of a role is encoded; ``role`` None: by the argument ``images``."""
        if role is None:
            return "noise" if self.images == "generate" else "vit"
        if not isinstance(role, str) or role not in _ROLES:
            raise DataError(f"{where} is {role!r}", allowed=", ".join(map(repr, _ROLES)))
        return _ROLES[role]

    def sample(self, index: int, *, pass_number: int = 0) -> Sample:
        """The item as splits. Raises ``DataError`` naming data set, index and field where it is malformed."""
        where = f"{self.name}[{index}]"
        item = self._item(index, pass_number, where)
        tokens = _token_split(item, where, getattr(self.processor, "vocab_size", None))
        tensors, roles = _images(item, where), item.get("image_roles")
        if roles is not None and (not isinstance(roles, (list, tuple)) or len(roles) != len(tensors)):
            requirement = f"a list of {len(tensors)}, one for each image"
            raise DataError(f"{where}.image_roles is {roles!r}", allowed=requirement)
        images = []
        for i, tensor in enumerate(tensors):
            kind = self._kind(roles[i] if roles else None, f"{where}.image_roles[{i}]")
            images.append(self.processor.ready_image(tensor, kind, f"{where}.padded_images[{i}]"))
        before, after = ([one for one in images if one.drawn is is_drawn] for is_drawn in (False, True))
        is_document = not tensors and all(label >= 0 for label in tokens.labels[:-1])
        return Sample((*before, tokens, *after), plain=is_document)

    def _item(self, index: int, pass_number: int, where: str) -> Mapping[str, Any]:
        """Return what the data set has. Raises ``DataError`` where that fails, or is no dict of known keys."""
        try:
            with _keyed_random(derive_seed("adapter", index, pass_number)):
                item = self.dataset[index]
        except (UnigenError, MemoryError):
            raise
        except Exception as error:  # foreign code raises anything
            last = traceback.extract_tb(error.__traceback__)[-1]
            line = f"{Path(last.filename).name}, line {last.lineno}"
            raise DataError(f"{where} cannot be read: {type(error).__name__}: {error} ({line})") from error
        if not isinstance(item, Mapping):
            raise DataError(f"{where} is of type {type(item).__name__}", allowed="a dict with input_ids and labels")
        unknown = [str(key) for key in item if key not in _KEYS]
        if "token_type_ids" in unknown and not np.any(np.asarray(item["token_type_ids"])):
            unknown.remove("token_type_ids")  # zeros, as tokenizers of transformers return them, say nothing
        if unknown:
            raise DataError(
                f"{where} has the key {unknown[0]!r}, which is not used",
                allowed=f"{', '.join(_KEYS)}; token_type_ids where all are 0",
                remedy=suggestion(unknown[0], _KEYS) or "leave it out",
            )
        return item


_KEYS = ("input_ids", "attention_mask", "labels", "padded_images", "image_roles")
_LARGEST = 16.0
"""Largest absolute value of a pixel: with published means and deviations it is below 5."""
_ROLES: dict[str, ImageKind] = {"target": "noise", "condition": "vit", "edited": "vae"}
"""Role of an image of a user's own data set -> how the image is encoded."""


def _make(spec: Mapping[str, Any]) -> Any:
    kind = spec.get("type")
    try:
        kind = pkgutil.resolve_name(kind) if isinstance(kind, str) else kind
    except (ImportError, AttributeError, ValueError) as error:
        problem = f"DatasetAdapter.dataset.type {kind!r} cannot be imported: {error}"
        raise ConfigError(problem, allowed="'my.module.name'") from error
    if not callable(kind):
        raise ConfigError(f"DatasetAdapter.dataset.type is {kind!r}", allowed="a class or 'module.Class'")
    arguments = {key: value for key, value in spec.items() if key != "type"}
    check_arguments(kind, arguments, where="DatasetAdapter.dataset")
    return kind(**arguments)


@contextmanager
def _keyed_random(seed: int) -> Iterator[None]:
    """Foreign code inside draws from generators seeded here; the generators outside are not changed."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _token_split(item: Mapping[str, Any], where: str, vocab_size: int | None) -> TokenSplit:
    """``vocab_size``: ids that the model has; None: not known. Raises ``DataError`` for the first id that it lacks."""
    ids = _numbers(item, "input_ids", where)
    labels = _numbers(item, "labels", where)
    mask = _numbers(item, "attention_mask", where) if item.get("attention_mask") is not None else [1] * len(ids)
    if not len(ids) == len(labels) == len(mask):
        sizes = f"{len(ids)}, {len(labels)} and {len(mask)} positions"
        raise DataError(f"{where}: input_ids, labels and attention_mask have {sizes}", allowed="the same length")
    indices = [i for i, flag in enumerate(mask) if flag]
    for name, values, positions, lowest in (("input_ids", ids, indices, 0), ("labels", labels, indices[1:], None)):
        for i in positions:
            if (lowest is not None and values[i] < lowest) or (vocab_size is not None and values[i] >= vocab_size):
                choices = "0 or more" if vocab_size is None else f"0 to {vocab_size - 1:,}, the ids of the model"
                choices += ", and -100" * (lowest is None)
                raise DataError(f"{where}.{name}[{i}] is {values[i]}", allowed=choices)
    targets = [labels[i] for i in indices[1:]] + [-100] * bool(indices)
    return TokenSplit(tuple(ids[i] for i in indices), tuple(label if label >= 0 else -100 for label in targets))


def _numbers(item: Mapping[str, Any], key: str, where: str) -> list[int]:
    value = item.get(key)
    if isinstance(value, (Tensor, np.ndarray)):
        value = value.tolist()
    if isinstance(value, Sequence) and len(value) == 1 and isinstance(value[0], (list, tuple)):
        value = value[0]  # [1, T], as tokenizers return it
    if not isinstance(value, Sequence) or not all(isinstance(v, (int, float)) for v in value):
        kind = "missing" if value is None else type(value).__name__
        raise DataError(f"{where}.{key} is {kind}", allowed="[T] numbers")
    if fractions := [i for i, v in enumerate(value) if isinstance(v, float) and not v.is_integer()]:
        raise DataError(f"{where}.{key}[{fractions[0]}] is {value[fractions[0]]}", allowed="whole numbers")
    return [int(v) for v in value]


def _images(item: Mapping[str, Any], where: str) -> Sequence[Tensor]:
    """Those of an item. Raises ``DataError`` for what is no image, or has values that no normalised image has."""
    images = item.get("padded_images")
    if isinstance(images, Tensor) and images.ndim in (3, 4):
        images = [images] if images.ndim == 3 else [*images]
    several = isinstance(images, (list, tuple, NoneType))
    if not several or not all(isinstance(one, Tensor) and one.ndim == 3 for one in images or ()):
        choices = "None, [C, H, W], [n, C, H, W] or a list of [C, H, W]"
        raise DataError(f"{where}.padded_images is {type(images).__name__}", allowed=choices)
    for i, image in enumerate(images or ()):
        wrong = "" if image.is_floating_point() else f"of {image.dtype}"
        if not wrong and image.numel() and float(image.abs().max()) > _LARGEST:  # not a number: NanGuardHook counts it
            wrong = f"with values from {float(image.min()):g} to {float(image.max()):g}"
        if wrong:
            raise DataError(
                f"{where}.padded_images[{i}] is a tensor {wrong}",
                allowed="floating point values from -1 (black) to 1 (white)",
                remedy="of pixels from 0 to 255: pixels.float() / 127.5 - 1",
            )
    return images or ()
