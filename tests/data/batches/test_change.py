"""Changed data on resume: old records once per epoch, new ones from the next epoch on; all else is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.data.support import make_processor, make_stream, mixed_records, write_jsonl
from unigen_ds.core.errors import DataError, ResumeBlocked
from unigen_ds.data.batches.change import compare, continue_stream
from unigen_ds.data.batches.statistics import derive
from unigen_ds.data.batches.stream import SequenceStream
from unigen_ds.data.cache.array_cache import fingerprint
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.data.order.order import Cursor, GlobalOrder

WINDOWS = [None, 6]
RECORDS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    mixed_records(path, 1)  # the images
    return path


@pytest.fixture(scope="module")
def records(folder: Path) -> list[Any]:
    return mixed_records(folder, RECORDS)


class Sources:
    """Data sets over files of the first records of two lists, each file written and planned once."""

    def __init__(self, folder: Path, records: list[Any]) -> None:
        self._folder, self._records = folder, records
        self._made: dict[tuple[str, int], UnifiedGenerationDataset] = {}

    def __call__(self, **sizes: int) -> list[UnifiedGenerationDataset]:
        return [self._one(name, size) for name, size in sizes.items()]

    def _one(self, name: str, size: int) -> UnifiedGenerationDataset:
        if (name, size) not in self._made:
            records = self._records if name == "a" else self._records[::-1]
            path = write_jsonl(self._folder / f"{name}-{size}.jsonl", records[:size])
            self._made[name, size] = UnifiedGenerationDataset(path, make_processor(), name=name)
        return self._made[name, size]


@pytest.fixture(scope="module")
def sources(folder: Path, records: list[Any]) -> Sources:
    return Sources(folder, records)


def state_of(stream: SequenceStream, cursor: Cursor) -> dict[str, Any]:
    loader: dict[str, Any] = json.loads(json.dumps({"cursor": cursor.state_dict(), **stream.identity}))
    return loader


def take(stream: SequenceStream, number: int, cursor: Cursor | None = None) -> list[Any]:
    return list(islice(stream.rows(cursor), number))


def epochs(stream: SequenceStream, cursor: Cursor, stop: int) -> list[tuple[int, Any, Cursor]]:
    rows, epoch = [], cursor.epoch
    for row, after in stream.rows(cursor):
        rows.append((epoch, row, after))
        epoch = after.epoch
        if epoch == stop:
            return rows
    raise AssertionError


def by_epoch(rows: Sequence[tuple[int, Any, Cursor]]) -> dict[int, Counter[tuple[int, int]]]:
    counts: dict[int, Counter[tuple[int, int]]] = {}
    for epoch, row, _ in rows:
        counts.setdefault(epoch, Counter()).update((d.source, d.index) for d in row)
    return counts


def once(*sizes: int) -> Counter[tuple[int, int]]:
    return Counter((k, i) for k, size in enumerate(sizes) for i in range(size))


def ids(stream: SequenceStream, rows: Sequence[tuple[int, Any, Cursor]]) -> list[str]:
    return [d.sample_id(stream.names) for _, row, _ in rows for d in row]


def make(datasets: list[Any], first: SequenceStream, **more: Any) -> SequenceStream:
    return make_stream(datasets, sequences_per_epoch=first.sequences_per_epoch, **more)


def mid_epoch(stream: SequenceStream, epoch: int, rows: int) -> tuple[list[tuple[int, Any, Cursor]], Cursor]:
    sequences = epochs(stream, Cursor(), epoch) if epoch else []
    first = len(sequences)
    sequences += epochs(stream, sequences[-1][2] if sequences else Cursor(), epoch + 1)[:rows]
    assert len(sequences) == first + rows
    return sequences, sequences[-1][2]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("third", [{}, {"c": 5}])
def test_append_in_mid_epoch_is_exactly_once(sources: Sources, window: int | None, third: dict[str, int]) -> None:
    old = make_stream(sources(a=17, b=9), window=window)
    before, cursor = mid_epoch(old, 1, 5)
    present = make(sources(a=23, b=12, **third), old, window=window)
    change = compare(state_of(old, cursor), present)
    assert change.only_appended and "a had 17 records and has 23" in str(change)
    new, at = continue_stream(state_of(old, cursor), present, on_change="append")
    assert at == cursor and new.sequences_per_epoch == old.sequences_per_epoch
    rows = before + epochs(new, at, 4)
    sizes = (23, 12, *third.values())
    assert by_epoch(rows) == {0: once(17, 9), 1: once(17, 9), 2: once(*sizes), 3: once(*sizes)}
    assert [row for _, row, _ in rows][: len(before) + 4] == [row for row, _ in take(old, len(before) + 4)]
    assert len(set(ids(new, rows))) == len(ids(new, rows))
    assert [after.sequences for _, _, after in rows] == list(range(1, len(rows) + 1))


@pytest.mark.parametrize("window", WINDOWS)
def test_a_resume_after_the_change_has_the_same_rows_from_any_cursor(sources: Sources, window: int | None) -> None:
    old = make_stream(sources(a=17, b=9), window=window)
    _, cursor = mid_epoch(old, 1, 3)
    make_stream(sources(a=20, b=12), window=window)  # a separate run, which must not use the other's cached plan
    new, _ = continue_stream(state_of(old, cursor), make(sources(a=20, b=12), old, window=window), on_change="append")
    rows = epochs(new, Cursor(), 4)
    cursors = [Cursor(), *(after for _, _, after in rows)]
    assert [new.seek(i) for i in range(len(cursors))] == cursors
    names = [[d.sample_id(new.names) for d in row] for _, row, _ in rows]
    for i in range(cursor.sequences, len(rows) - 1, 7):
        again = make(sources(a=20, b=12), old, window=window)  # without the flag: the change is recorded
        later, at = continue_stream(state_of(new, cursors[i]), again)
        assert at == cursors[i] and later.phases == new.phases
        assert take(later, 9, at) == take(new, 9, at)
        assert derive(later, i, i + 2) == names[i : i + 2]


def test_appended_twice(sources: Sources) -> None:
    for window in WINDOWS:
        stream = make_stream(sources(a=11, b=4), window=window)
        first_epoch = stream.sequences_per_epoch
        rows, cursor = mid_epoch(stream, 0, 2)
        for sizes in ({"a": 13, "b": 4}, {"a": 13, "b": 9}):  # the first of them is replaced before it begins
            present = make(sources(**sizes), stream, window=window)
            stream, _ = continue_stream(state_of(stream, cursor), present, on_change="append")
        assert [phase.first_epoch for phase in stream.phases] == [0, 1]
        rows += epochs(stream, cursor, 2)
        cursor = rows[-1][2]
        present = make(sources(a=17, b=10), stream, window=window)
        stream, _ = continue_stream(state_of(stream, cursor), present, on_change="append")
        rows += epochs(stream, cursor, 4)
        # the cursor is between two epochs: the next one has all records
        assert by_epoch(rows) == {0: once(11, 4), 1: once(13, 9), 2: once(17, 10), 3: once(17, 10)}
        assert len(set(ids(stream, rows))) == len(ids(stream, rows))
        assert stream.phases[-1].first_sequence == cursor.sequences and stream.sequences_per_epoch == first_epoch
        assert [stream.seek(i) for i in range(1, len(rows) + 1)] == [after for _, _, after in rows]


def test_unpacked_epochs_are_rounded_by_the_first_geometry(sources: Sources) -> None:
    old = make_stream(sources(a=17, b=9), sequences_per_iteration=4)
    rows, cursor = mid_epoch(old, 0, 6)
    present = make(sources(a=22, b=9), old, sequences_per_iteration=4)
    new, _ = continue_stream(state_of(old, cursor), present, on_change="append")
    lengths = Counter(epoch for epoch, _, _ in rows + epochs(new, cursor, 3))
    assert lengths == {0: 24, 1: 28, 2: 28} and new.sequences_per_epoch == 24
    assert new.tokens_per_sequence == old.tokens_per_sequence
    # the decision is kept: a later resume does not round again
    later, _ = continue_stream(state_of(new, cursor), make(sources(a=22, b=9), old, sequences_per_iteration=5))
    assert later.phases == new.phases


@pytest.mark.parametrize(("window", "weights"), [(None, [1.0, 3.0]), (6, [1.0, 3.0]), (None, [5.0, 1.0])])
def test_weighted_ids_never_come_twice(sources: Sources, window: int | None, weights: list[float]) -> None:
    old = make_stream(sources(a=17, b=5), window=window, weights=weights)
    rows, cursor = mid_epoch(old, 1, 4)
    present = make(sources(a=19, b=7), old, window=window, weights=weights)
    new, _ = continue_stream(state_of(old, cursor), present, on_change="append")
    rows += epochs(new, cursor, 4)
    assert len(set(ids(new, rows))) == len(ids(new, rows))
    # in the new phase each source starts from its beginning: all of a before any record of it repeats
    passes: dict[tuple[int, int], set[int]] = {}
    for epoch, row, _ in rows:
        for d in row:
            if epoch >= 2:
                passes.setdefault((d.source, d.pass_number), set()).add(d.index)
    first = new.phases[-1].first_pass
    draws = 2 * new.order.counts[1]
    assert len(passes[1, first]) == min(draws, 7)
    other = make(sources(a=19, b=7), old, window=window, weights=[2.0, 1.0])
    with pytest.raises(ResumeBlocked, match="the weights were"):
        continue_stream(state_of(old, cursor), other, on_change="append")


def edit(folder: Path, records: list[Any], name: str, change: Any, *, processor: Any = None) -> Any:
    lines = list(records)
    change(lines)
    path = write_jsonl(folder / f"{name}.jsonl", lines)
    return UnifiedGenerationDataset(path, processor or make_processor(), name="a")


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.__setitem__(3, {"text_prompt": "drew 3", "image_path": "0.png"}),
        lambda r: r.__setitem__(slice(2, 4), r[3:1:-1]),
        lambda r: r.insert(0, r[0]),
        lambda r: r.pop(0),
        lambda r: r.__delitem__(slice(15, None)),
    ],
    ids=["edited", "swapped", "put in front", "removed", "shortened"],
)
def test_what_was_not_only_appended_is_refused(
    folder: Path, records: list[Any], sources: Sources, request: pytest.FixtureRequest, change: Any
) -> None:
    old = make_stream(sources(a=17), window=6)
    _, cursor = mid_epoch(old, 0, 2)
    other = edit(folder, records[:25], f"edited-{request.node.callspec.id}".replace(" ", "-"), change)
    present = make([other], old, window=6)
    assert not compare(state_of(old, cursor), present).only_appended
    with pytest.raises(ResumeBlocked, match=r"a had .*are not the old ones|the records of a"):
        continue_stream(state_of(old, cursor), present, on_change="append")
    with pytest.raises(ResumeBlocked, match="choose --on-data-change restart"):
        continue_stream(state_of(old, cursor), present)


@pytest.mark.parametrize(("was", "now"), [(None, 5), (6, None), (6, 4)])
def test_restart_begins_a_new_epoch_of_any_data(sources: Sources, was: int | None, now: int | None) -> None:
    old = make_stream(sources(a=17, b=9), window=was)
    before, cursor = mid_epoch(old, 1, 4)
    present = make(sources(b=12, a=5), old, window=now, seed=8, seq_length=80, sequences_per_iteration=4)
    new, at = continue_stream(state_of(old, cursor), present, on_change="restart")
    assert at == Cursor(2, 0, 0, cursor.sequences) and new.sequences_per_epoch == old.sequences_per_epoch
    rows = epochs(new, at, 5)
    if now is not None:
        assert by_epoch(rows) == dict.fromkeys((2, 3, 4), once(12, 5))
    assert set(Counter(epoch for epoch, _, _ in rows)) == {2, 3, 4}
    assert not set(ids(old, before)) & set(ids(new, rows))
    for i, (_, _, position) in enumerate(rows[:20], start=1):
        again, again_at = continue_stream(state_of(new, position), present)
        assert again_at == position and take(again, 3, position) == take(new, 3, position)
        assert again.seek(cursor.sequences + i) == position
    for call in (lambda: new.seek(cursor.sequences - 1), lambda: next(new.rows(Cursor(1, 0, 0, 30)))):
        with pytest.raises(DataError, match="before the data was replaced"):
            call()


def test_append_after_a_restart(sources: Sources) -> None:
    old = make_stream(sources(a=17))
    before, cursor = mid_epoch(old, 0, 4)
    new, at = continue_stream(state_of(old, cursor), make(sources(b=9), old, window=4), on_change="restart")
    # immediately, before any sample was used: the restarted phase is replaced
    more, same = continue_stream(state_of(new, at), make(sources(b=12), old, window=4), on_change="append")
    assert same == at and [phase.first_epoch for phase in more.phases] == [1]
    assert more.seek(at.sequences) == at and by_epoch(epochs(more, at, 2)) == {1: once(12)}
    rows = epochs(new, at, 2)[:2]
    more, same = continue_stream(state_of(new, rows[-1][2]), make(sources(b=12), old, window=4), on_change="append")
    rows += epochs(more, same, 4)
    assert by_epoch(rows) == {1: once(9), 2: once(12), 3: once(12)}
    assert [more.seek(after.sequences) for _, _, after in rows] == [after for _, _, after in rows]
    assert len(set(ids(more, rows) + ids(old, before))) == len(ids(more, rows) + ids(old, before))


def test_the_text_of_differences(sources: Sources) -> None:
    old = make_stream(sources(a=17, b=9), window=6)
    was = state_of(old, Cursor(0, 1, 0, 3))

    def differs(datasets: list[Any], **more: Any) -> dict[str, str]:
        change = compare(was, make(datasets, old, **{"window": 6, **more}))
        assert bool(change) == bool(change.differences)
        return dict(change.differences)

    same = sources(a=17, b=9)
    assert differs(same) == {}
    assert differs(same, seed=4) == {"seed": "randomness.seed was 3 and is 4"}
    assert differs(same, seq_length=97) == {"seq_length": "seq_length was 96 and is 97"}
    assert set(differs(same, window=None)) == {"packing"}
    assert differs(same, weights=[1.0, 2.0]) == {"weights": "the weights were None and are [1.0, 2.0]"}
    assert differs(sources(b=9, a=17)) == {"names": "the sources were a, b and are b, a"}
    assert set(differs(sources(a=17, c=9))) == {"names"}
    assert differs(sources(a=17, b=12)) == {"sizes": "b had 9 records and has 12"}
    with pytest.raises(ResumeBlocked, match=r"append .* or --on-data-change restart"):
        continue_stream(was, make(sources(a=17, b=12), old, window=6))
    for more in ({"seed": 4}, {"window": 7}, {"seq_length": 97}):
        present = make(sources(a=17, b=12), old, **{"window": 6, **more})
        with pytest.raises(ResumeBlocked, match="cannot be appended"):
            continue_stream(was, present, on_change="append")
    with pytest.raises(ResumeBlocked, match="new ones may only follow"):
        continue_stream(was, make(sources(c=5, a=17, b=9), old, window=6), on_change="append")


ROWS = {
    (None, None): ["cb59cc30f630afe8aae7987e316cd681", "6df369a77694700f234b06d06a968315"],
    (None, (1.0, 3.0)): ["09e26c17bde9c3df1a1cb841acad5e78", "a298cb097e0765a9a5263af23757dcab"],
    (6, None): ["f1e2ba9ff2818191b16d9a6a186ecbc6", "91020f696f8434a84c94f9da6e73d728"],
    (6, (1.0, 3.0)): ["8a4c3333ad353a82eb9ab90f52d5592d", "7bd16d66ec3488849de25c722cf29650"],
}


@pytest.mark.parametrize(("window", "weights"), list(ROWS))
def test_the_rows_of_the_first_phase_stay_the_same(sources: Sources, window: int | None, weights: Any) -> None:
    """Pinned: checkpoints continue with these rows."""
    stream = make_stream(sources(a=17, b=9), window=window, weights=list(weights) if weights else None)
    assert [fingerprint(take(stream, 90)), stream.fingerprint] == ROWS[window, weights]
    rows = None if window else stream.sequences_per_epoch
    assert stream.phases == (GlobalOrder((17, 9), weights, seed=3, rows_per_epoch=rows),)
