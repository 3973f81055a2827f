"""Equal batches, bit by bit, for all numbers of workers and ranks, batch sizes and kills; the workers' life cycle."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch

from tests.data.batches.test_loader_collate import same
from tests.data.support import make_processor, make_stream, mixed_dataset
from unigen_ds.core.progress import Geometry
from unigen_ds.data.batches.loader import MicroBatch, Packet, UpdateLoader, collate
from unigen_ds.data.order.order import Cursor


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    processor = make_processor(text_dropout=0.3, vit_dropout=0.3, vae_dropout=0.3)
    return mixed_dataset(tmp_path_factory.mktemp("data"), 36, processor=processor)


def loader(data: Any, geometry: Geometry, *, window: int | None = 12, **more: Any) -> UpdateLoader:
    stream = make_stream([data], window=window, sequences_per_epoch=more.pop("sequences_per_epoch", None))
    return UpdateLoader(stream, processor=data.processor, geometry=geometry, seed=11, **more)


def updates(number: int, *arguments: Any, **more: Any) -> list[list[MicroBatch]]:
    data_loader = loader(*arguments, **more)
    try:
        return list(islice(data_loader, number))
    finally:
        data_loader.close()


def flat(many: list[list[MicroBatch]]) -> list[MicroBatch]:
    return [micro for update in many for micro in update]


def test_workers_change_nothing(data: Any) -> None:
    geometry = Geometry(2, 3, 2)
    alone = updates(4, data, geometry, dp_rank=1)
    for workers in (1, 2):
        many = updates(4, data, geometry, dp_rank=1, num_workers=workers, prefetch_factor=3)
        for one, other in zip(flat(alone), flat(many), strict=True):
            same(one.batch, other.batch)
            assert one.cursor == other.cursor and one.rows == other.rows


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize(("batch", "accumulate", "ranks"), [(1, 1, 1), (4, 1, 1), (2, 2, 2), (1, 1, 3), (2, 1, 3)])
def test_every_sequence_once_over_ranks(data: Any, window: int | None, batch: int, accumulate: int, ranks: int) -> None:
    geometry = Geometry(batch, accumulate, ranks)
    stream = make_stream([data], window=window)
    per_rank = [updates(8, data, geometry, dp_rank=r, window=window) for r in range(ranks)]
    ids: list[str] = []
    for update in zip(*per_rank, strict=True):
        for micro in zip(*update, strict=True):
            assert all(m.rows == micro[0].rows and m.cursor == micro[0].cursor for m in micro)
            assert len(micro[0].rows) == batch * ranks and all(m.batch.num_sequences == batch for m in micro)
            for i, row in enumerate(micro[0].rows):
                expected = [draw.sample_id(stream.names) for draw in row]
                ids += expected
                rank, column = i % ranks, i // ranks
                row_ids = [
                    d.sample_id(stream.names) for r in micro[0].rows[rank::ranks][column : column + 1] for d in r
                ]
                assert row_ids == expected and set(expected) <= set(micro[rank].batch.sample_ids)
            assert Counter(i for m in micro for i in m.batch.sample_ids) == Counter(
                d.sample_id(stream.names) for row in micro[0].rows for d in row
            )
    total = 8 * geometry.global_batch_size
    assert ids == [d.sample_id(stream.names) for row, _ in islice(stream.rows(), total) for d in row]
    first = [i for i in ids if i.endswith(":0")]
    assert len(first) == len(set(first)) <= 36
    if total > stream.sequences_per_epoch:
        assert len(first) == 36
    assert per_rank[0][-1][-1].cursor.sequences == total


@pytest.mark.parametrize("window", [None, 12])
def test_killed_and_resumed_after_every_update(data: Any, window: int | None) -> None:
    geometry = Geometry(2, 2, 1)
    length = make_stream([data], window=window).sequences_per_epoch
    whole = updates(12, data, geometry, window=window)
    for count in range(0, 12, 3):
        cursor = whole[count - 1][-1].cursor if count else Cursor()
        rest = updates(12 - count, data, geometry, window=window, cursor=cursor, sequences_per_epoch=length)
        for one, other in zip(flat(whole[count:]), flat(rest), strict=True):
            same(one.batch, other.batch)
            assert one.cursor == other.cursor


@pytest.mark.parametrize("workers", [0, 2])
def test_global_random_state_is_left_alone(data: Any, workers: int) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    updates(2, data, Geometry(2, 1, 1), num_workers=workers)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_packet_has_the_same_bits_and_aligned_memory(data: Any) -> None:
    """Sums of unaligned memory could differ."""
    for rows in ([row for row, _ in islice(make_stream([data], window=12).rows(), 3)], [()]):
        batch = collate(rows, [data], data.processor, seq_length=96)
        packet = pickle.loads(ForkingPickler.dumps(Packet.pack(batch)))
        assert packet.block.is_shared()
        copy = packet.unpack()
        same(copy, batch)
        tensors = [value for value in vars(copy).values() if isinstance(value, torch.Tensor)]
        assert all(tensor.data_ptr() % 64 == 0 and not tensor.is_shared() for tensor in tensors)


@pytest.mark.parametrize("factor", [1, 2])
def test_no_batch_is_overwritten_while_it_is_used(data: Any, monkeypatch: pytest.MonkeyPatch, factor: int) -> None:
    """Batches are kept, and read late, when the workers have made all that they were asked for."""
    expected = [micro.batch for update in updates(8, data, Geometry(2, 2, 1)) for micro in update]
    unpack = Packet.unpack

    def late(self: Packet) -> Any:
        time.sleep(0.03)
        return unpack(self)

    monkeypatch.setattr(Packet, "unpack", late)
    loading = loader(data, Geometry(2, 2, 1), num_workers=2, prefetch_factor=factor)
    batches = [micro.batch for update in islice(loading, 8) for micro in update]
    loading.close()
    assert len(batches) == len(expected) == 16
    for one, other in zip(batches, expected, strict=True):
        same(one, other)


@pytest.mark.parametrize(("window", "workers"), [(None, 0), (12, 2)])
def test_a_chain_of_geometries_is_one_stream(data: Any, window: int | None, workers: int) -> None:
    """Resumed five times, each time with another split, over several epochs. What no update used is not lost."""
    length = make_stream([data], window=window, sequences_per_iteration=1).sequences_per_epoch
    cursor, rows = Cursor(), []
    for geometry in (Geometry(2, 2, 1), Geometry(1, 1, 3), Geometry(5, 2, 2), Geometry(1, 3, 1), Geometry(7, 1, 2)):
        more = {"window": window, "cursor": cursor, "sequences_per_epoch": length, "num_workers": workers}
        for update in updates(3, data, geometry, **more):
            rows += [row for micro in update for row in micro.rows]
            cursor = update[-1].cursor
    stream = make_stream([data], window=window, sequences_per_epoch=length)
    assert cursor.epoch >= 3 and cursor.sequences == len(rows)
    assert rows == [row for row, _ in islice(stream.rows(), len(rows))]
