"""The sums of ``describe`` are consistent, and ``derive`` returns the loader's samples."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from tests.data.support import make_stream, mixed_dataset
from unigen_ds.data.batches.statistics import derive, describe


def test_describe(tmp_path: Path) -> None:
    sets = [mixed_dataset(tmp_path / name, number, name=name) for name, number in (("a", 20), ("b", 8))]
    stream = make_stream(sets, window=28, weights=[1.0, 3.0], seq_length=60)
    both = describe(stream)
    one = both["sources"]["a"]
    assert one["records"] == 20 and one["records_text_only"] == 5 and one["records_with_images"] == 15
    assert one["tokens"] == one["text_tokens"] + one["image_tokens"] == sets[0].lengths()[0].sum()
    assert 0 < one["image_token_share"] < 1 and one["text_targets"] > 0 and one["image_targets"] > 0
    assert one["lengths"]["min"] <= one["lengths"]["p50"] <= one["lengths"]["max"]
    json.dumps(both)
    assert both["records"] == 28 and both["sources"]["b"]["draws_per_epoch"] == 21
    assert both["sequences_per_epoch"] == stream.sequences_per_epoch and both["packed"]
    tokens = sum(min(int(sets[d.source].lengths()[0][d.index]), 60) for r in stream.window_rows(0, 0) for d in r)
    assert both["utilisation"] == pytest.approx(tokens / (60 * stream.sequences_per_epoch))
    assert describe(make_stream(sets))["samples_per_sequence"] == 1.0


@pytest.mark.parametrize("window", [None, 6])
def test_derive_names_the_samples_of_any_range(tmp_path: Path, window: int | None) -> None:
    stream = make_stream([mixed_dataset(tmp_path, 20)], window=window)
    rows = list(islice(stream.rows(), 60))
    ids = [[d.sample_id(stream.names) for d in row] for row, _ in rows]
    for start, stop in ((0, 3), (5, 5), (7, 31), (45, 60)):
        assert derive(stream, start, stop) == ids[start:stop]
