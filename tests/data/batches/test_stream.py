"""No sample is repeated or skipped: from any cursor, under any geometry, over epochs and mixtures."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.data.support import make_processor, make_stream, mixed_dataset
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.data.batches import stream as stream_module
from unigen_ds.data.batches.stream import SequenceStream
from unigen_ds.data.images.image_files import ImageTransform
from unigen_ds.data.order.order import Cursor


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return mixed_dataset(tmp_path_factory.mktemp("data"), 41)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("three")
    return [mixed_dataset(folder / name, number, name=name) for name, number in (("a", 23), ("b", 5), ("c", 9))]


def take(stream: SequenceStream, number: int, cursor: Cursor | None = None) -> list[Any]:
    return list(islice(stream.rows(cursor), number))


def epoch_rows(stream: SequenceStream, epoch: int) -> list[Any]:
    return [row for window in range(stream.num_windows(epoch)) for row in stream.window_rows(epoch, window)]


@pytest.mark.parametrize("window", [None, 1, 7, 16, 41, 1000])
def test_continuing_from_every_cursor(data: Any, window: int | None) -> None:
    stream = make_stream([data], window=window)
    rows = take(stream, 70)
    assert rows[-1][1].epoch >= 1  # across the end of an epoch
    for i, (_, cursor) in enumerate(rows[:50]):
        copy = Cursor.from_state_dict(cursor.state_dict())
        assert copy == cursor and cursor.sequences == i + 1
        fresh = make_stream([data], window=window, sequences_per_epoch=stream.sequences_per_epoch)
        assert take(fresh, 20, copy) == rows[i + 1 : i + 21]


@pytest.mark.parametrize("weights", [None, [0.3, 0.5, 0.2]])
@pytest.mark.parametrize("window", [4, 16, 37])
def test_a_packed_epoch_holds_each_draw_of_the_order_once(three: list[Any], window: int, weights: Any) -> None:
    stream = make_stream(three, window=window, weights=weights)
    for epoch in range(3):
        rows = epoch_rows(stream, epoch)
        draws = [draw for row in rows for draw in row]
        assert sorted(draws) == sorted(stream.order.draws(epoch, 0, stream.order.epoch_size))
        for row in rows:
            length = sum(min(int(three[d.source].lengths()[0][d.index]), stream.seq_length) for d in row)
            assert 0 < length <= stream.seq_length
    if weights is None:
        assert Counter((d.source, d.index) for row in epoch_rows(stream, 1) for d in row) == Counter(
            (k, i) for k, d in enumerate(three) for i in range(len(d))
        )


@pytest.mark.parametrize(("spi", "length"), [(1, 41), (2, 40), (4, 40), (6, 36), (41, 41)])
def test_unpacked_drop_last(data: Any, spi: int, length: int) -> None:
    stream = make_stream([data], sequences_per_iteration=spi, drop_last=True)
    assert stream.sequences_per_epoch == length
    rows = take(stream, 2 * length)
    for epoch in range(2):
        part = rows[epoch * length : (epoch + 1) * length]
        indices = [draw.index for row, _ in part for draw in row]
        assert len(indices) == len(set(indices)) == length
    assert rows[length - 1][1] == Cursor(1, 0, 0, length)


def test_too_little_data(data: Any) -> None:
    with pytest.raises(ConfigError, match="do not fill one iteration of 42"):
        make_stream([data], sequences_per_iteration=42)
    assert make_stream([data], sequences_per_iteration=42, drop_last=False).sequences_per_epoch == 42


def test_unpacked_epochs_longer_than_one_chunk(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = take(make_stream([data]), 100)
    monkeypatch.setattr(stream_module, "_CHUNK", 7)
    assert take(make_stream([data]), 100) == whole


def test_foreign_cursors_are_refused(data: Any) -> None:
    packed, single = make_stream([data], window=16), make_stream([data])
    for stream, cursor in ((packed, Cursor(0, 3)), (packed, Cursor(0, 0, 99)), (single, Cursor(0, 0, 41))):
        with pytest.raises(CheckpointError, match="the data cursor is"):
            next(stream.rows(cursor))
    with pytest.raises(CheckpointError, match="without epoch, row"):
        Cursor.from_state_dict({"window": 0, "sequences": 1})


def test_fingerprint_follows_every_part(data: Any, three: list[Any], tmp_path: Path) -> None:
    other = mixed_dataset(tmp_path, 41, processor=make_processor(vit_transform=ImageTransform(12, 8, 4)))
    streams = [
        make_stream([data], window=8),
        make_stream([data], window=9),
        make_stream([data]),
        make_stream([data], window=8, seed=4),
        make_stream([data], window=8, seq_length=95),
        make_stream([data], window=8, max_tiles=2),
        make_stream([other], window=8),
        make_stream(three, window=8),
        make_stream(three, window=8, weights=[1.0, 1.0, 1.0]),
        make_stream([three[1], three[0], three[2]], window=8),
    ]
    assert len({stream.fingerprint for stream in streams}) == len(streams)
    dataset = mixed_dataset(tmp_path / "moved", 41)
    assert make_stream([dataset], window=8).fingerprint == streams[0].fingerprint
    again = make_stream([data], window=8, sequences_per_epoch=7, sequences_per_iteration=3)
    assert again.fingerprint == streams[0].fingerprint  # neither geometry nor epoch length is part of the data
    assert streams[0].facts["sizes"] == [41] and streams[0].facts["names"] == ["train"]
