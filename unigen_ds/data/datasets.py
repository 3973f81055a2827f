"""Map-style data sets that plan before they decode: ``lengths()`` of all records at once, ``sample(index)`` for one.

``UnifiedGenerationDataset`` reads records of any format (``sources``) through their index. ``DatasetAdapter`` adds to a
user's own map-style data set (pre-tokenised ids, ready tensors) the same interface, so that order, packing, resume and
ledger work for it too; its cost is one pass over the data set at the start, for the lengths.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor

from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.core.registry import DATASETS, FILTERS, build, check_arguments, checked
from unigen_ds.core.seeding import derive_seed
from unigen_ds.core.settings import Of, one_or_many
from unigen_ds.data.array_cache import SUFFIX, cached, fingerprint, launch, left_by_others, shared_by_node
from unigen_ds.data.counts import COLUMNS, Array, Counts, count, record_digest
from unigen_ds.data.filters import RecordFilter
from unigen_ds.data.index import Index, prefix_digest
from unigen_ds.data.planning import learnt
from unigen_ds.data.processor import ConversationProcessor
from unigen_ds.data.records import Captions, Layout, Turn
from unigen_ds.data.samples import Sample, Split, Tally
from unigen_ds.data.sources.base import FoundRecord
from unigen_ds.data.sources.find import default_name, open_source
from unigen_ds.data.splits import ImageKind, TokenSplit
from unigen_ds.data.streamed import StreamedShards, Streaming, stream_shards
from unigen_ds.data.token_cache import TokenCache

_SHOWN = 5


class PlannedDataset(Protocol):
    """The interface of a source that the stream and the collating code use."""

    name: str
    """The first part of a sample id."""
    weight: float | None
    """Relative share of the samples; None: every record once an epoch. A source may also have ``group`` and
    ``num_used_data``, as ``UnifiedGenerationDataset``."""
    cache_folder: Path | None
    """Where plans may be cached."""

    def __len__(self) -> int: ...
    def lengths(self) -> tuple[Array, Array]:
        """(tokens, tiles) of every record, untruncated."""
        ...

    def counts(self) -> Counts: ...
    def sample(self, index: int, *, pass_number: int = 0) -> Sample: ...
    @property
    def fingerprint(self) -> str:
        """Changes whenever a record, its byte range or its length may change. Contains no path: data may be moved."""
        ...

    def prefix_digest(self, number: int) -> str:
        """Of the first ``number`` records: the same for every data set that begins with them, whatever comes after."""
        ...


@DATASETS.register_module()
class UnifiedGenerationDataset:
    """Conversations, documents and images with texts, from files of any format; ``docs/data.md`` shows all of them.

    Args:
        data_path: a file, a folder, a pattern (``data/part-*.parquet``), or a list of files of one format; with
            ``format='huggingface'`` also a name of the hub.
        processor: plans a conversation.
        image_root: folder of relative image paths; None: that of the data file, or the folder itself.
        weight: relative share of the samples in a mixture; all sources (of a group) have one, or none has.
        group: its group of `train_dataloader.groups`.
        num_used_data: only the first records are used, so many of them; None: all.
        name: first part of a sample id; None: the file's stem.
        cache_dir: folder for the index, and for unpacked copies, where ``.unigen_index/`` beside the data cannot be
            written.
        index_workers: processes that build the index, once.
        cache_tokens: keep the ids of all texts beside the index, 4 bytes a token: a text is tokenized once, not in each
            epoch.
        format: name of the format, or ``dict(type=name, ...)`` with settings of its own; None: by suffix or content.
        columns: names of the records' keys -> those of a layout: ``{'prompt': 'text_prompt'}``.
        captions: what an image with a text teaches: ``'generate'`` (text, then the image) or ``'understand'`` (image,
            then the text); None: ``'generate'``, and in JSON ``{image, text}`` is a document.
        filters: list of components: filters that leave records out, counted.
        streaming: read shard after shard, each through a local copy, without reading all of the data first;
            ``data_path`` may then have urls, and names of the hub. ``dict(...)`` has its settings (``docs/data.md``).
        on_error: ``'skip'``: if it cannot be opened or indexed, the run continues without it, with a warning.
    """

    def __init__(
        self,
        data_path: str | Path | Sequence[str | Path],
        processor: ConversationProcessor,
        *,
        image_root: str | Path | None = None,
        weight: float | None = None,
        group: str | None = None,
        num_used_data: Annotated[int, Ge(1)] | None = None,
        name: str | None = None,
        cache_dir: str | Path | None = None,
        index_workers: int = 0,
        cache_tokens: bool = False,
        format: str | Mapping[str, Any] | None = None,
        columns: Mapping[str, str] | None = None,
        captions: Captions | None = None,
        filters: Annotated[Any, Of(FILTERS, trial=True, many=True)] = (),
        streaming: bool | Mapping[str, Any] = False,
        on_error: Literal["raise", "skip"] = "raise",
    ) -> None:
        self.filters: tuple[RecordFilter, ...] = tuple(
            build(FILTERS, one, where=f"filters[{i}]") if isinstance(one, Mapping) else one
            for i, one in enumerate(one_or_many(filters))
        )
        cache = Path(cache_dir) if cache_dir is not None else None
        self.processor, self.weight, self.name = processor, weight, name or default_name(data_path)
        self.group, self.num_used_data = group, num_used_data
        columns_of = tuple((columns or {}).items())
        ratings = tuple(rating for one in self.filters for rating in one.ratings)
        self.shards: StreamedShards | None = None
        if streaming is not False:
            self._not_streamed(cache_tokens=cache_tokens)
            self.name = name or self.name.partition("{")[0].rstrip("-_.") or "data"
            self.shards = stream_shards(
                data_path,
                processor,
                format=format,
                cache_dir=cache,
                layout=Layout(None, captions, columns_of, ratings),
                image_root=None if image_root is None else Path(image_root),
                num_workers=index_workers,
                settings=Streaming.parse(None if streaming is True else streaming, where="streaming"),
                facts=[fact for one in self.filters for fact in (one.settings, one.code)],
            )
            self.index = self.shards.index(0)
            self.path = self.index.source.path
            self.image_root = self.index.source.root if image_root is None else Path(image_root)
        else:
            source = open_source(data_path, format=format, cache_dir=cache)
            self.path = source.origin
            self.image_root = source.root if image_root is None else Path(image_root)
            self.index = Index.build(
                source,
                processor,
                image_root=self.image_root,
                cache_dir=cache,
                num_workers=index_workers,
                layout=Layout(None, captions or source.captions, columns_of, ratings),
            )
        self.cache_folder = self.index.folder
        self.tokens = TokenCache.build(self.index, processor, num_workers=index_workers) if cache_tokens else None

    def _not_streamed(self, *, cache_tokens: bool) -> None:
        """Raise ``ConfigError`` for what needs all records of the data."""
        if self.num_used_data is not None:
            raise ConfigError(
                f"{self.name} has streaming and num_used_data={self.num_used_data}",
                remedy="a list of fewer shards as data_path, or no streaming",
            )
        if cache_tokens:
            raise ConfigError(f"{self.name} has streaming and cache_tokens=True", remedy="one of the two")

    def __len__(self) -> int:
        """Of a streamed data set: the records of its first shard, as of ``lengths`` and ``counts``."""
        return len(self.index)

    def lengths(self) -> tuple[Array, Array]:
        return self.index.counts.tokens, self.index.counts.tiles

    def num_tokens(self, index: int) -> int:
        """Tokens of a record, untruncated, wherever it is."""
        found, position = self._found(index)
        return int(found.counts.tokens[position])

    def counts(self) -> Counts:
        return self.index.counts

    def sample(self, index: int, *, pass_number: int = 0) -> Sample:
        """The record as splits; reads the record and the files of its images, and decodes nothing."""
        entry = self._entry(index)
        turns = learnt(entry.record, entry.where, self.index.layout)
        if self.tokens is not None:
            return self.processor.plan_with(turns, entry.where, self.tokens.of(index), keep_images=True)
        return self.processor.plan(turns, entry.where, keep_images=True)

    def turns(self, index: int) -> list[Turn]:
        """The record as its file has it, for showing it."""
        entry = self._entry(index)
        return learnt(entry.record, entry.where, self.index.layout)

    def _entry(self, index: int) -> FoundRecord:
        found, position = self._found(index)
        return found.read(position, self.processor.rules)

    def _found(self, index: int) -> tuple[Index, int]:
        """The index that has a record, and its position there."""
        return (self.index, index) if self.shards is None else self.shards.find(index)

    @property
    def fingerprint(self) -> str:
        return self.index.digest if self.shards is None else self.shards.fingerprint

    def prefix_digest(self, number: int) -> str:
        streamed = () if self.shards is None else (self.shards.fingerprint,)
        return self.index.prefix_digest(number, self.processor.fingerprint, *streamed)

    def content_digests(self) -> Array:
        """[N] of each record's values, whatever the order of its keys and its white space. Cached with the index."""
        if self.shards is not None:
            raise ConfigError(
                f"{self.name} is streamed, and val_dataloader.split needs all its records",
                remedy="a dataset of its own for val_dataloader",
            )
        return self.index.content_digests()


class ScannedDataset:
    """A source that is read once at the start, for its lengths: the base of data sets that make their own samples.

    A subclass has ``__len__`` and ``sample``, and sets ``name`` and ``weight``. A sample is the same whenever it is
    made, except for what depends on ``pass_number``, and its length never depends on that. The ``repr`` of a sample is
    its identity, so a split has its content as tuples or as a digest: that of a long array leaves numbers out.
    """

    name: str
    weight: float | None = None
    cache_folder: Path | None = None
    unk_id: int | None = None
    """The tokenizer's id of unknown words, if it has one."""

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__}.__len__")

    def sample(self, index: int, *, pass_number: int = 0) -> Sample:
        """As of ``PlannedDataset``."""
        raise NotImplementedError(f"{type(self).__name__}.sample")

    @cached_property
    def _scanned(self) -> tuple[Counts, Array, str]:
        """Counts, the digest of each record, and that of all."""
        return self._read_all()

    def _read_all(self) -> tuple[Counts, Array, str]:
        """``_scanned`` of every sample."""
        rows, records, digest = [], [], hashlib.blake2b(digest_size=16)
        for index in range(len(self)):
            sample = self.sample(index)
            text = repr(sample).encode()
            rows.append(count(sample, unk_id=self.unk_id))
            records.append(record_digest(text, rows[-1]))
            digest.update(text)
        return Counts.of(rows), np.asarray(records, dtype=np.int64), digest.hexdigest()

    def counts(self) -> Counts:
        return self._scanned[0]

    def lengths(self) -> tuple[Array, Array]:
        return self.counts().tokens, self.counts().tiles

    @property
    def fingerprint(self) -> str:
        """Of the ``repr`` of every sample: of ids, labels and image sizes; pixels are not read."""
        return fingerprint(len(self), self._scanned[2])

    def prefix_digest(self, number: int) -> str:
        return prefix_digest(self._scanned[1], number)

    def content_digests(self) -> Array:
        """[N] of the ``repr`` of each sample, and of its counts."""
        return self._scanned[1]


@DATASETS.register_module()
class DatasetAdapter(ScannedDataset):
    """A user's map-style data set of ``dict(input_ids, attention_mask, labels, padded_images)``.

    ``labels`` follow the Hugging Face convention: aligned with ``input_ids``, -100 ignored, shifted here. Positions
    where ``attention_mask`` is 0 are dropped. ``padded_images``: None, [C, H, W] or [n, C, H, W] in [-1, 1]. The data
    set's own random numbers are keyed by (index, pass), so they depend on no worker.

    Items with several images may have ``image_roles``, one for each: ``'target'`` is drawn, after the text;
    ``'condition'`` (seen by the vision tower) and ``'edited'`` (encoded by the VAE) are before it.

    A start reads every item once, on one process of a node, for its length. A data set with ``lengths()`` is not read:
    for each item the number of tokens, or ``(tokens, [(height, width), ...])`` with its images, or
    ``(height, width, role)``. One with ``fingerprint``, a text that changes with its content, is read once for all
    starts.

    Args:
        dataset: the object, or ``dict(type='module.Class', ...)``: a class or its path, and its arguments.
        processor: has the patch sizes and the image ids.
        images: ``generate``: each image is a target after the text; ``understand``: a condition before it.
        weight: relative share of the samples in a mixture; all sources (of a group) have one, or none has.
        group: its group of `train_dataloader.groups`.
        num_used_data: only the first records are used, so many of them; None: all.
        name: first part of a sample id; None: the class's name.
        cache_dir: folder for what was read of a data set with ``fingerprint``, and for plans; None: nothing is kept.
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
        cache_dir: str | Path | None = None,
    ) -> None:
        self._given = _as_text(dataset)
        self.dataset = _make(dataset) if isinstance(dataset, Mapping) else dataset
        if not (hasattr(self.dataset, "__len__") and hasattr(self.dataset, "__getitem__")):
            raise ConfigError(f"DatasetAdapter.dataset is {self.dataset!r}", allowed="a map-style data set")
        self.processor, self.images, self.weight = processor, images, weight
        self.group, self.num_used_data = group, num_used_data
        self.name = name or type(self.dataset).__name__
        self.unk_id = getattr(processor.tokenizer, "unk_id", None)
        self.own_fingerprint: str | None = getattr(self.dataset, "fingerprint", None)
        if cache_dir is not None:
            if not isinstance(self.own_fingerprint, str):
                kind = type(self.dataset).__name__
                problem = f"DatasetAdapter.cache_dir is given, and {kind}.fingerprint is {self.own_fingerprint!r}"
                raise ConfigError(problem, allowed="a text that changes with the content of the data set")
            self.cache_folder = Path(cache_dir)

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def fingerprint(self) -> str:
        """As of ``ScannedDataset``; with ``lengths()`` of them and of the data set's own ``fingerprint``."""
        return fingerprint(super().fingerprint, self.own_fingerprint) if self._has_lengths else super().fingerprint

    def content_digests(self) -> Array:
        """As of ``ScannedDataset``. With ``lengths()`` every item is read for it."""
        return self._read_once()[1] if self._has_lengths else super().content_digests()

    @property
    def _has_lengths(self) -> bool:
        return callable(getattr(self.dataset, "lengths", None))

    @cached_property
    def _scanned(self) -> tuple[Counts, Array, str]:
        return self._of_lengths() if self._has_lengths else self._read_once()

    def _read_once(self) -> tuple[Counts, Array, str]:
        """``_read_all``, by one process of a node; with ``cache_dir`` by one of all starts."""
        processor = getattr(self.processor, "fingerprint", None)
        facts = (_ADAPTER, self.name, len(self), self.images, processor, self.unk_id, self._given, self.own_fingerprint)
        folder, key = self.cache_folder, fingerprint(facts)
        if folder is None and (self._given is not None or self.own_fingerprint is not None):
            folder, key = shared_by_node(), fingerprint(facts, *launch())
            if folder is not None:
                left_by_others(folder / f"adapter-{key[:16]}{SUFFIX}")
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

        def make() -> dict[str, Array]:
            counts, records, digest = self._read_all()
            whole = np.frombuffer(bytes.fromhex(digest), dtype="<i8").astype(np.int64)
            return {**{name: getattr(counts, name) for name in COLUMNS}, "records": records, "digest": whole}

        found = cached(folder and folder / f"adapter-{key[:16]}{SUFFIX}", key, make)
        digest = np.ascontiguousarray(found["digest"], dtype="<i8").tobytes().hex()
        return Counts(*(found[name] for name in COLUMNS)), found["records"], digest

    def _of_lengths(self) -> tuple[Counts, Array, str]:
        """``_scanned`` of the data set's own ``lengths()``. Every token but the first counts as a target."""
        given = self.dataset.lengths()
        if len(given) != len(self):
            raise DataError(
                f"{self.name}.lengths() has {len(given)} values", allowed=f"one for each of {len(self)} items"
            )
        rows = [count(self._measured(value, f"{self.name}.lengths()[{i}]")) for i, value in enumerate(given)]
        records = [record_digest(b"", row) for row in rows]
        digest = hashlib.blake2b(np.asarray(records, dtype="<i8").tobytes(), digest_size=16).hexdigest()
        return Counts.of(rows), np.asarray(records, dtype=np.int64), digest

    def _measured(self, value: Any, where: str) -> Sample:
        """A sample of that length, without content."""
        tokens, images = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value, ())
        if isinstance(tokens, bool) or not isinstance(tokens, (int, np.integer)) or tokens < 0:
            raise DataError(f"{where} is {value!r}", allowed="tokens, or (tokens, [(height, width, role), ...])")
        splits: list[Split] = [_Tokens(int(tokens))]
        for height, width, *role in images:
            kind = self._kind(role[0] if role else None, where)
            channels = self.processor.vit_channels if kind == "vit" else self.processor.vae_channels
            blank = torch.empty((channels, int(height), int(width)), device="meta")
            splits.append(self.processor.ready_image(blank, kind, where))
        return Sample(tuple(splits))

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
        with _keyed_random(derive_seed("adapter", index, pass_number)):
            item = self.dataset[index]
        if not isinstance(item, Mapping):
            raise DataError(f"{where} is a {type(item).__name__}", allowed="a dict with input_ids and labels")
        tokens = _token_split(item, where)
        given, roles = _images(item, where), item.get("image_roles")
        if roles is not None and (not isinstance(roles, (list, tuple)) or len(roles) != len(given)):
            raise DataError(f"{where}.image_roles is {roles!r}", allowed=f"a list of {len(given)}, one for each image")
        kinds = [self._kind(roles[i] if roles else None, f"{where}.image_roles[{i}]") for i in range(len(given))]
        images = [
            self.processor.ready_image(image, kind, f"{where}.padded_images[{i}]")
            for i, (image, kind) in enumerate(zip(given, kinds, strict=True))
        ]
        before = [image for image in images if image.kind != "noise"]
        splits: list[Split] = [*before, tokens, *(image for image in images if image.kind == "noise")]
        document = not images and all(label >= 0 for label in tokens.labels[:-1])
        return Sample(tuple(splits), plain=document)


_ADAPTER = "unigen-adapter-1"
_ROLES: dict[str, ImageKind] = {"target": "noise", "condition": "vit", "edited": "vae"}
"""Of an image of a user's own data set -> how it is encoded."""


@dataclass(frozen=True)
class _Tokens(Split):
    """Text tokens of which only the number is known."""

    number: int

    @property
    def num_tokens(self) -> int:
        return self.number

    def count(self, tally: Tally) -> None:
        tally.text_targets += max(self.number - 1, 0)


def _as_text(dataset: Any) -> str | None:
    """The data set of a config, by which another process recognises it; None: it has objects of its own."""
    if not isinstance(dataset, Mapping):
        return None
    kind = dataset.get("type")
    name = f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else kind
    try:
        return json.dumps({**dataset, "type": name}, sort_keys=True)
    except (TypeError, ValueError):
        return None


def _make(spec: Mapping[str, Any]) -> Any:
    kind = spec.get("type")
    if isinstance(kind, str):
        module, _, attribute = kind.rpartition(".")
        try:
            kind = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"DatasetAdapter.dataset.type {kind!r} cannot be imported: {error}", allowed="a class or 'module.Class'"
            ) from error
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


def _token_split(item: Mapping[str, Any], where: str) -> TokenSplit:
    ids = _numbers(item, "input_ids", where)
    labels = _numbers(item, "labels", where)
    mask = _numbers(item, "attention_mask", where) if item.get("attention_mask") is not None else [1] * len(ids)
    if not len(ids) == len(labels) == len(mask):
        raise DataError(
            f"{where}: input_ids, labels and attention_mask have {len(ids)}, {len(labels)} and {len(mask)} positions",
            allowed="the same length",
        )
    kept = [i for i, seen in enumerate(mask) if seen]
    shifted = [labels[i] for i in kept[1:]] + [-100] * bool(kept)
    return TokenSplit(tuple(ids[i] for i in kept), tuple(label if label >= 0 else -100 for label in shifted))


def _numbers(item: Mapping[str, Any], key: str, where: str) -> list[int]:
    value = item.get(key)
    if isinstance(value, (Tensor, np.ndarray)):
        value = value.tolist()
    if isinstance(value, Sequence) and len(value) == 1 and isinstance(value[0], (list, tuple)):
        value = value[0]  # [1, T], as tokenizers return it
    if not isinstance(value, Sequence) or not all(isinstance(v, (int, float)) for v in value):
        raise DataError(
            f"{where}.{key} is {'missing' if value is None else type(value).__name__}", allowed="[T] numbers"
        )
    return [int(v) for v in value]


def _images(item: Mapping[str, Any], where: str) -> Sequence[Tensor]:
    images = item.get("padded_images")
    if images is None:
        return ()
    if isinstance(images, (list, tuple)) and all(isinstance(one, Tensor) and one.ndim == 3 for one in images):
        return images
    if not isinstance(images, Tensor) or images.ndim not in (3, 4):
        allowed = "None, [C, H, W], [n, C, H, W] or a list of [C, H, W]"
        raise DataError(f"{where}.padded_images is {type(images).__name__}", allowed=allowed)
    return (images,) if images.ndim == 3 else tuple(images)


def check_readable(datasets: Sequence[PlannedDataset], names: Sequence[str]) -> None:
    """Raise ``DataError`` with the first paths where no image of a source can be read: its folder is wrong."""
    for name, dataset in zip(names, datasets, strict=True):
        if not dataset.counts().no_image_readable:
            continue
        broken: dict[str, str] = {}
        for index in np.flatnonzero(dataset.counts().unreadable).tolist():
            broken |= {split.source: split.error for split in dataset.sample(index).splits if split.error}
            if len(broken) >= _SHOWN:
                break
        raise DataError(
            f"{name}: none of its {int(dataset.counts().images.sum()):,} images can be read. The first:\n  "
            + "\n  ".join(list(broken.values())[:_SHOWN]),
            remedy="image paths are files, relative to the data file's folder or to image_root",
        )


def is_streamed(dataset: PlannedDataset) -> bool:
    """Whether its records are found shard after shard (``streamed.py``)."""
    return getattr(dataset, "shards", None) is not None


def planned_tokens(dataset: PlannedDataset, index: int) -> int:
    """Tokens of a record, untruncated."""
    known: Any = getattr(dataset, "num_tokens", None)
    return int(dataset.lengths()[0][index] if known is None else known(index))


def dataset_weights(datasets: Sequence[PlannedDataset]) -> list[float] | None:
    """The weights of a mixture: all given, or none. Raises ``ConfigError`` where only some are."""
    weights = [dataset.weight for dataset in datasets]
    given = [weight for weight in weights if weight is not None]
    if given and len(given) < len(weights):
        without = [d.name for d in datasets if d.weight is None]
        raise ConfigError(f"data sets without a weight beside others with one: {', '.join(without)}",
                          remedy="give all of them a weight, or none")  # fmt: skip
    return given or None


def source_names(datasets: Sequence[PlannedDataset]) -> tuple[str, ...]:
    """Names for sample ids; a name that occurs again is followed by its number."""
    names: list[str] = []
    for dataset in datasets:
        name = dataset.name
        while name in names:
            name = f"{dataset.name}#{len(names)}" if name == dataset.name else name + "'"
        names.append(name)
    return tuple(names)
