"""What a data set or a stream holds, in numbers, and which samples a range of sequences is made of.

For ``tools/inspect_data.py``: nothing is decoded, everything comes from the index.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np

from unigen_ds.data.datasets import PlannedDataset
from unigen_ds.data.stream import Cursor, Row, SequenceStream

_PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
_WINDOWS = 8


def describe(source: PlannedDataset | SequenceStream) -> dict[str, Any]:
    """Plain numbers. Of a stream: those of each source, of all together, and of the sequences they make."""
    if not isinstance(source, SequenceStream):
        return _describe_dataset(source)
    tokens = np.concatenate([d.lengths()[0] for d in source.datasets])
    return {
        "fingerprint": source.fingerprint,
        "records": int(source.order.epoch_size),
        "sources": {
            name: {**_describe_dataset(d), "draws_per_epoch": source.order.counts[k], "weight": d.weight}
            for k, (name, d) in enumerate(zip(source.names, source.datasets, strict=True))
        },
        "lengths": _percentiles(tokens),
        "truncated": int((tokens > source.seq_length).sum()),
        "seq_length": source.seq_length,
        "sequences_per_epoch": source.sequences_per_epoch,
        **_packing(source),
    }


def _describe_dataset(dataset: PlannedDataset) -> dict[str, Any]:
    counts = dataset.counts()
    tokens, image_tokens = int(counts.tokens.sum()), int(counts.image_tokens.sum())
    with_image = counts.image_tokens > 0
    return {
        "name": dataset.name,
        "records": len(dataset),
        "records_with_images": int(with_image.sum()),
        "records_text_only": int((~with_image).sum()),
        "records_unreadable": int((counts.unreadable > 0).sum()),
        "records_with_empty_text": int((counts.empty_texts > 0).sum()),
        "unknown_tokens": int(counts.unknown.sum()),
        "unknown_token_share": int(counts.unknown.sum()) / max(tokens - image_tokens, 1),
        "tokens": tokens,
        "text_tokens": tokens - image_tokens,
        "image_tokens": image_tokens,
        "image_token_share": image_tokens / max(tokens, 1),
        "text_targets": int(counts.text_targets.sum()),
        "image_targets": int(counts.image_targets.sum()),
        "condition_images": int(counts.tiles.sum()),
        "lengths": _percentiles(counts.tokens),
    }


def _percentiles(lengths: np.ndarray) -> dict[str, float]:
    values = np.percentile(lengths, _PERCENTILES)
    shown = {f"p{p}": float(v) for p, v in zip(_PERCENTILES, values, strict=True)}
    return {"min": float(lengths.min()), **shown, "max": float(lengths.max()), "mean": float(lengths.mean())}


def _packing(stream: SequenceStream) -> dict[str, Any]:
    """Share of ``seq_length`` that is filled, and samples a sequence, over the first windows of a whole epoch."""
    epoch = stream.phases[-1].first_epoch
    if stream.packer is None:
        order = stream.epoch_order(epoch)
        start = order.draws(epoch, 0, min(order.epoch_size, 65536))
        rows: list[Row] = [(draw,) for draw in start]
    else:
        rows = [r for w in range(min(stream.num_windows(epoch), _WINDOWS)) for r in stream.window_rows(epoch, w)]
    lengths = [d.lengths()[0] for d in stream.datasets]
    filled = sum(min(int(lengths[d.source][d.index]), stream.seq_length) for row in rows for d in row)
    return {
        "packed": stream.packer is not None,
        "utilisation": filled / (len(rows) * stream.seq_length),
        "samples_per_sequence": sum(map(len, rows)) / len(rows),
    }


def derive(
    stream: SequenceStream, start_sequence: int, stop_sequence: int, *, near: Cursor | None = None
) -> list[list[str]]:
    """The sample ids of each of the global sequences ``start_sequence .. stop_sequence``, in the stream's order.

    ``near``: a cursor known to lie at or before the start (of a checkpoint, say); otherwise the place is found from
    the number of sequences of each window, which plans the windows between epoch 0 and it.
    """
    if near is not None and near.sequences <= start_sequence:
        cursor, passed = near, start_sequence - near.sequences
    else:
        cursor, passed = stream.seek(start_sequence), 0
    rows = islice(stream.rows(cursor), passed, passed + stop_sequence - start_sequence)
    return [[draw.sample_id(stream.names) for draw in row] for row, _ in rows]
