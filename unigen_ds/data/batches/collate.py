"""Rows (which samples make which sequences) -> one batch: read, decode, add to the batch, draw noise.

The processor defines the batch: its ``builder`` collects the documents, and each split loads and adds itself.
Everything random is keyed by (seed, pass, sample id, purpose, number of the split in its sample), so a sample is the
same wherever it is loaded. A sample that cannot be loaded, or whose length is no longer the one it was planned with,
becomes a document of padding of the planned length and is named in ``skipped``. A row without any token becomes one
padding token, so that no micro-batch is empty.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from unigen_ds.core.batch import Batch
from unigen_ds.data.batches.stream import Row
from unigen_ds.data.datasets.dataset import PlannedDataset, planned_tokens, source_names
from unigen_ds.data.images.image_files import UnreadableImage
from unigen_ds.data.order.order import Draw
from unigen_ds.data.samples.processor import Processor
from unigen_ds.data.samples.sample import Loaded as Loaded
from unigen_ds.data.samples.sample import Sample, piece_bounds
from unigen_ds.data.samples.splits import unreadable
from unigen_ds.system.seeding import generator


def collate(
    rows: Sequence[Row],
    datasets: Sequence[PlannedDataset],
    processor: Processor,
    *,
    seq_length: int,
    seed: int | None = None,
    names: Sequence[str] | None = None,
) -> Batch:
    """One micro-batch.

    Args:
        rows: the sequences, as ``SequenceStream`` returns them.
        datasets: the sources that the draws point into.
        processor: sizes and ids; ``seed`` and ``names`` default to the processor's and the data sets' own.
        seq_length: each sample is truncated to it.
    """
    seed = processor.seed if seed is None else seed
    names = source_names(datasets) if names is None else names
    builder = processor.builder()
    sample_ids: list[str] = []
    skipped: list[dict[str, str]] = []
    sources: list[int] = []
    ends: list[int] = []
    for row in rows:
        before = builder.num_tokens
        for draw in row:
            sample_id, dataset = draw.sample_id(names), datasets[draw.source]
            sample_ids.append(sample_id)
            try:
                loaded = load(draw, dataset, processor, seq_length=seq_length, seed=seed, name=sample_id)
            except UnreadableImage as error:
                skipped.append({"sample": sample_id, "path": error.path, "why": error.problem})
                planned = planned_tokens(dataset, draw.index)
                builder.add_padding(unit_tokens(planned, draw.piece, seq_length))
            else:
                builder.add_document(loaded)
            sources.append(draw.source)
            ends.append(builder.num_tokens)
        if builder.num_tokens == before:
            builder.add_padding(1)
    batch = builder.batch(len(rows), tuple(sample_ids), tuple(skipped))
    return dataclasses.replace(batch, sample_sources=tuple(sources), sample_ends=tuple(ends))


def pack_documents(documents: Sequence[Sequence[Loaded]], processor: Processor) -> Any:
    """One document after the other, as given: for inference, where nothing is read from a data set."""
    builder = processor.builder()
    for document in documents:
        builder.add_document(document)
    return builder.batch(len(documents), (), ())


def load(
    draw: Draw, dataset: PlannedDataset, processor: Processor, *, seq_length: int, seed: int, name: str
) -> list[Loaded]:
    """Read, truncate, drop conditions, decode. Raises ``UnreadableImage`` where the sample must be skipped."""
    sample = dataset.sample(draw.index, pass_number=draw.pass_number)
    for split in (sample if draw.piece >= 0 else sample.truncated(seq_length)).splits:
        if split.error:
            raise unreadable(split.source, split.error)
    planned = planned_tokens(dataset, draw.index)
    if sample.num_tokens != planned:
        changed = next((split.source for split in sample.splits if split.source), "")
        raise unreadable(changed, f"the sample has {sample.num_tokens} tokens, but {planned} when it was indexed")
    part, key = _part_of(sample, draw.piece, seq_length), (seed, draw.pass_number, name)
    removed = _dropped(part, processor, key)
    loaded = (
        split.dropped() if number in removed else split.load(processor, (*key, number))
        for number, split in enumerate(part.splits)
    )
    return [one for one in loaded if one is not None]


def _part_of(sample: Sample, piece: int, seq_length: int) -> Sample:
    """The part of its record that a drawn unit is."""
    if piece < 0:
        return sample.truncated(seq_length)
    start, stop = piece_bounds(sample.num_tokens, seq_length, piece)
    return sample.part(int(start), int(stop))


def unit_tokens(num_tokens: int, piece: int, seq_length: int) -> int:
    """Tokens of a drawn unit of a record of ``num_tokens``."""
    if piece < 0:
        return min(num_tokens, seq_length)
    start, stop = piece_bounds(num_tokens, seq_length, piece)
    return int(stop - start)


def _dropped(sample: Sample, processor: Processor, key: tuple[object, ...]) -> set[int]:
    """Numbers of the splits that condition dropout removes. One number is drawn for every split, droppable or not."""
    if not any(getattr(processor, "dropout", {}).values()):  # a family of a user's own may have none
        return set()
    chances = torch.rand(len(sample.splits), generator=generator(*key, "dropout"), dtype=torch.float32).tolist()
    return {
        number
        for number, (split, chance) in enumerate(zip(sample.splits, chances, strict=True))
        if split.condition is not None and chance < processor.dropout.get(split.condition, 0.0)
    }
