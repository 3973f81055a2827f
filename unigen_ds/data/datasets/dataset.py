"""Map-style data sets that plan before they decode: ``lengths()`` of all records at once, ``sample(index)`` for one.

``UnifiedGenerationDataset`` reads records of any format (``sources``) through their index. ``ScannedDataset`` is the
base of data sets that make their own samples; ``adapter.py`` has that of a user's own map-style data set.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from annotated_types import Ge

from unigen_ds.config.registry import DATASETS, FILTERS, build
from unigen_ds.config.section import Of, one_or_many
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.data.cache.array_cache import fingerprint
from unigen_ds.data.datasets.filters import RecordFilter
from unigen_ds.data.datasets.streamed import SPAN, StreamedShards, Streaming
from unigen_ds.data.index.index import Index, prefix_digest
from unigen_ds.data.records.records import Captions, Layout, Turn
from unigen_ds.data.records.unusable import BadRecord, OnRecordError
from unigen_ds.data.samples.processor import ConversationProcessor
from unigen_ds.data.samples.sample import Array, Counts, Sample, count, record_digest
from unigen_ds.data.sources.base import Row
from unigen_ds.data.sources.find import default_name, open_source

_EXAMPLES = 5


class PlannedDataset(Protocol):
    """The interface of a source that the stream and the collating code use."""

    name: str
    """The first part of a sample id."""
    weight: float | None
    """Relative share; None: every record once an epoch. A source may also have ``group`` and ``num_used_data``."""
    cache_folder: Path | None
    """Where plans may be cached."""

    def __len__(self) -> int: ...
    def lengths(self) -> tuple[Array, Array]:
        """(tokens, tiles) of every record, untruncated."""

    def counts(self) -> Counts: ...
    def sample(self, index: int, *, pass_number: int = 0) -> Sample: ...
    @property
    def fingerprint(self) -> str:
        """Changes whenever a record, its byte range or its length may change. Contains no path: data may be moved."""

    def prefix_digest(self, number: int) -> str:
        """Digest of the first ``number`` records: the same for every data set that begins with them."""


@DATASETS.register_module()
class UnifiedGenerationDataset:
    """Conversations, documents and images with texts, from files of any format (``docs/data/formats.md``).

    Args:
        data_path: a file, a folder, a pattern (``data/part-*.parquet``), or a list of files of one format; with
            ``format='huggingface'`` also a name of the hub.
        processor: plans a conversation.
        image_root: folder of relative image paths; None: that of the data file, or the folder itself.
        weight: relative share of the samples in a mixture; all sources (of a group) have one, or none has.
        group: its group of `train_dataloader.groups`.
        num_used_data: only the first records are used, so many of them; None: all.
        name: first part of a sample id; None: the file's stem.
        cache_dir: folder for index and unpacked copies where ``.unigen_index/`` beside the data cannot be written.
        index_workers: processes that build the index, once; 0: this one.
        format: name of the format, or ``dict(type=name, ...)`` with settings of its own; None: by suffix or content.
        columns: names of the records' keys -> those of a layout: ``{'prompt': 'text_prompt'}``.
        captions: what an image with a text teaches: ``'generate'`` (text, then the image) or ``'understand'`` (image,
            then the text); None: ``'generate'``, and in JSON ``{image, text}`` is a document.
        filters: list of components: filters that leave records out, counted.
        streaming: read shard after shard, each through a local copy, without reading all of the data first;
            ``data_path`` may then have urls, and names of the hub. ``dict(...)`` has [its settings](data/streaming.md).
        on_error: ``'skip'``: if it cannot be opened or indexed, or none of its images can be read, the run continues
            without it, with a warning.
        on_record_error: ``'error'``: a malformed record stops the start, with a list of the first. ``'skip'``: these,
            and records with an image that cannot be read, are left out, counted, and listed in ``left_out.jsonl``; more
            than ``max_skipped_fraction`` are refused.
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
        index_workers: Annotated[int, Ge(0)] = 0,
        format: str | Mapping[str, Any] | None = None,
        columns: Mapping[str, str] | None = None,
        captions: Captions | None = None,
        filters: Annotated[Any, Of(FILTERS, many=True)] = (),
        streaming: bool | Mapping[str, Any] = False,
        on_error: Literal["raise", "skip"] = "raise",
        on_record_error: OnRecordError = "error",
    ) -> None:
        self.filters: tuple[RecordFilter, ...] = tuple(
            build(FILTERS, one, where=f"filters[{i}]") if isinstance(one, Mapping) else one
            for i, one in enumerate(one_or_many(filters))
        )
        cache = Path(cache_dir) if cache_dir is not None else None
        root = Path(image_root) if image_root is not None else None
        self.processor, self.weight, self.name = processor, weight, name or default_name(data_path)
        self.group, self.num_used_data, self._on_record_error = group, num_used_data, on_record_error
        ratings = tuple(rating for one in self.filters for rating in one.ratings)
        layout = Layout(None, captions, tuple((columns or {}).items()), ratings, folders=image_root is None)
        build_options: dict[str, Any] = {"num_workers": index_workers, "on_record_error": on_record_error}
        self.shards: StreamedShards | None = None
        self.first_number = 0
        """The number of its first record in sample ids."""
        if streaming is not False:
            if num_used_data is not None:
                problem = f"{self.name} has streaming and num_used_data={num_used_data}, which needs all of the data"
                raise ConfigError(problem, remedy="one of the two; or a list of fewer shards as data_path")
            self.name = name or self.name.partition("{")[0].rstrip("-_.") or "data"
            self.shards = StreamedShards(
                data_path,
                processor,
                format=format,
                cache_dir=cache,
                layout=layout,
                settings=Streaming.parse(None if streaming is True else streaming, where="streaming"),
                facts=[fact for one in self.filters for fact in (one.settings, one.code)],
                image_root=root,
                **build_options,
            )
            self.index = self.shards.indexes[0]
            self.path = self.index.source.path
        else:
            source = open_source(data_path, format=format, cache_dir=cache, columns=columns)
            self.path, layout = source.origin, replace(layout, captions=captions or source.captions)
            build_options |= {"image_root": root, "cache_dir": cache, "layout": layout}
            self.index = Index.build(source, processor, **build_options)
        self.image_root = self.index.source.root if root is None else root
        self.cache_folder = self.index.folder

    def shard(self, number: int) -> UnifiedGenerationDataset:
        assert self.shards is not None
        shard = copy.copy(self)
        shard.index, shard.shards, shard.first_number = self.shards.indexes[number], None, number * SPAN
        shard.cache_folder = shard.index.folder
        return shard

    def __len__(self) -> int:
        """Number of records. A streamed data set has those of its first shard, also in ``lengths`` and ``counts``."""
        return len(self.index)

    def lengths(self) -> tuple[Array, Array]:
        return self.index.counts.tokens, self.index.counts.tiles

    def num_tokens(self, index: int) -> int:
        """Tokens of a record, untruncated, wherever it is."""
        own_index, position = self._find(index)
        return int(own_index.counts.tokens[position])

    def counts(self) -> Counts:
        return self.index.counts

    def sample(self, index: int, *, pass_number: int = 0) -> Sample:
        """The record as splits; reads the record and the files of its images, and decodes nothing."""
        entry, turns = self._read(index)
        return self.processor.plan(turns, entry.where, keep_images=True)

    def turns(self, index: int) -> list[Turn]:
        return self._read(index)[1]

    def _read(self, index: int) -> tuple[Row, list[Turn]]:
        own_index, position = self._find(index)
        entry = own_index.read(position)
        return entry, own_index.layout.at(entry).learned_turns(entry.record, entry.where)

    def _find(self, index: int) -> tuple[Index, int]:
        if self.shards is None:
            return self.index, index
        return self.shards.indexes[index // SPAN], index % SPAN

    @property
    def fingerprint(self) -> str:
        return self.index.digest if self.shards is None else self.shards.fingerprint

    def prefix_digest(self, number: int) -> str:
        shards = () if self.shards is None else (self.shards.fingerprint,)
        return prefix_digest(self.index.records, number, self.processor.fingerprint, *shards)

    def forget_mended(self) -> bool:
        """``Index.forget_mended``; False of a streamed data set."""
        return self.shards is None and self.index.forget_mended(self.processor)

    def unusable(self) -> Sequence[BadRecord]:
        """Records that ``on_record_error`` leaves out, by their numbers in sample ids."""
        if self._on_record_error == "error":
            return ()
        return [replace(one, number=self.first_number + one.number) for one in self.index.unusable()]

    def content_digests(self) -> Array:
        """[N] of each record's values, whatever the order of its keys and its white space. Cached with the index."""
        if self.shards is not None:
            problem = f"{self.name} is streamed, and val_dataloader.split needs all its records"
            raise ConfigError(problem, remedy="a dataset of its own for val_dataloader")
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
    first_number = 0

    def __len__(self) -> int:
        raise NotImplementedError

    def sample(self, index: int, *, pass_number: int = 0) -> Sample:
        raise NotImplementedError

    @cached_property
    def _scan(self) -> tuple[Counts, Array, str]:
        return self._read_all()

    def _read_all(self) -> tuple[Counts, Array, str]:
        """Counts, the digest of each record, and that of all."""
        rows, records, digest = [], [], hashlib.blake2b(digest_size=16)
        for index in range(len(self)):
            sample = self._sample_or_none(index)
            text = repr(sample).encode()
            rows.append(count(sample, unk_id=self.unk_id))
            records.append(record_digest(text, rows[-1]))
            digest.update(text)
        return Counts.of(rows), np.asarray(records, dtype=np.int64), digest.hexdigest()

    def _sample_or_none(self, index: int) -> Sample:
        """Return a sample; a subclass that leaves records out returns an empty one for these."""
        return self.sample(index)

    def unusable(self) -> Sequence[BadRecord]:
        """Records that are left out: none, unless a subclass finds some."""
        return ()

    def counts(self) -> Counts:
        return self._scan[0]

    def lengths(self) -> tuple[Array, Array]:
        return self.counts().tokens, self.counts().tiles

    @property
    def fingerprint(self) -> str:
        """Digest of the ``repr`` of every sample: ids, labels and image sizes; pixels are not read."""
        return fingerprint(len(self), self._scan[2])

    def prefix_digest(self, number: int) -> str:
        return prefix_digest(self._scan[1], number)

    def content_digests(self) -> Array:
        """[N] of the ``repr`` of each sample, and of its counts."""
        return self._scan[1]


def check_readable(datasets: Sequence[PlannedDataset], names: Sequence[str]) -> None:
    """Raise ``DataError`` with the first paths where no image of a source can be read: its folder is wrong."""
    for name, dataset in zip(names, datasets, strict=True):
        counts = dataset.counts()
        if not 0 < int(counts.images.sum()) == int(counts.unreadable.sum()):
            continue
        shards = getattr(dataset, "shards", None)
        errors: dict[str, str] = {}
        for index in np.flatnonzero(counts.unreadable)[: 4 * _EXAMPLES].tolist():
            errors |= {split.source: split.error for split in dataset.sample(index).splits if split.error}
        raise DataError(
            f"{name if shards is None else shards.title(name)}: none of its {int(counts.images.sum()):,}"
            " images can be read. The first:\n  " + "\n  ".join([*errors.values()][:_EXAMPLES]),
            remedy=f"relative image paths start at {getattr(dataset, 'image_root', None)}: image_root=FOLDER is another"
            " one; images as single files beside urls are not fetched",
        )


def is_streamed(dataset: PlannedDataset) -> bool:
    """Whether its records are found shard after shard (``streamed.py``)."""
    return getattr(dataset, "shards", None) is not None


def planned_tokens(dataset: PlannedDataset, index: int) -> int:
    """Tokens of a record, untruncated."""
    num_tokens: Any = getattr(dataset, "num_tokens", None)
    return int(dataset.lengths()[0][index] if num_tokens is None else num_tokens(index))


def source_names(datasets: Sequence[PlannedDataset]) -> tuple[str, ...]:
    """Names for sample ids; a name that occurs again is followed by its number."""
    names: list[str] = []
    for dataset in datasets:
        name = dataset.name
        while name in names:
            name = f"{dataset.name}#{len(names)}" if name == dataset.name else name + "'"
        names.append(name)
    return tuple(names)
