"""Groups: their weights, a sample of each mandatory one in every sequence, ``num_used_data``; all exactly once."""

from __future__ import annotations

import json
import pickle
import random
from collections import Counter
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.data.support import make_stream
from unigen_ds.core.errors import CheckpointError, ConfigError, DataError, ResumeBlocked
from unigen_ds.data.batches.change import compare, continue_stream
from unigen_ds.data.batches.stream import SequenceStream
from unigen_ds.data.cache.array_cache import fingerprint
from unigen_ds.data.datasets.dataset import ScannedDataset
from unigen_ds.data.datasets.groups import DataGroup, blend
from unigen_ds.data.datasets.overflow import Overflow
from unigen_ds.data.datasets.subset import first_records
from unigen_ds.data.order.order import Cursor, Draw
from unigen_ds.data.samples.sample import Sample
from unigen_ds.data.samples.splits import TokenSplit

SEQ_LENGTH = 100


class Lengths(ScannedDataset):
    def __init__(self, name: str, lengths: list[int], folder: Path | None = None, **more: Any) -> None:
        self.name, self._lengths, self.cache_folder = name, lengths, folder
        self.group, self.weight, self.num_used_data = (more.get(k) for k in ("group", "weight", "num_used_data"))

    def __len__(self) -> int:
        return len(self._lengths)

    def sample(self, index: int, *, pass_number: int = 0) -> Sample:
        number = self._lengths[index]
        return Sample((TokenSplit(tuple(range(number)), tuple(range(1, number + 1))),))


def lengths(number: int, low: int, high: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randint(low, high) for _ in range(number)]


GROUPS = {
    "images": DataGroup.model_validate({"weight": 0.5, "mandatory": True}),
    "texts": DataGroup.model_validate({"weight": 9.5}),
}


def sources(folder: Path | None = None, *, images: int = 31) -> list[Any]:
    return [
        Lengths("drawn", lengths(images, 20, 40, 1), folder, group="images"),
        Lengths("edited", lengths(17, 10, 30, 2), group="images"),
        Lengths("long", lengths(120, 30, 60, 3), group="texts", weight=2),
        Lengths("short", lengths(80, 3, 20, 4), group="texts", weight=1),
    ]


def stream(datasets: list[Any] | None = None, groups: Any = GROUPS, *, window: int = 48, **more: Any) -> SequenceStream:
    datasets = datasets or sources()
    mixture = blend(datasets, [len(d) for d in datasets], groups)
    return make_stream(datasets, window=window, seq_length=SEQ_LENGTH, weights=mixture.weights, blend=mixture, **more)


def test_weights_are_those_of_groups_then_of_sources() -> None:
    mixture = blend(sources(), [31, 17, 120, 80], GROUPS)
    assert mixture.weights == ("31/960", "17/960", "19/30", "19/60")
    assert (mixture.mandatory, mixture.names) == (((0, 1),), ("images",))
    assert mixture.facts == {
        "groups": {"images": {"weight": 0.5, "mandatory": True}, "texts": {"weight": 9.5, "mandatory": False}},
        "sources": [["images", None], ["images", None], ["texts", 2], ["texts", 1]],
    }


@pytest.mark.parametrize("group", [None, "g"])
@pytest.mark.parametrize("weight", [0, -1.0, float("inf"), float("nan")])
def test_a_weight_with_which_nothing_is_drawn_names_its_source(weight: float, group: str | None) -> None:
    sources = [Lengths(name, [1], weight=value, group=group) for name, value in (("first", 1), ("second", weight))]
    groups = {} if group is None else {"g": DataGroup(weight=1.0)}
    with pytest.raises(ConfigError, match=rf"the data set second has weight={weight}\. .*remove second from the list"):
        blend(sources, [1, 1], groups)


@pytest.mark.parametrize("mandatory", [("images",), ("images", "texts"), ()])
def test_every_sequence_has_a_sample_of_each_mandatory_group(mandatory: tuple[str, ...]) -> None:
    groups = {
        name: DataGroup.model_validate({"weight": group.weight, "mandatory": name in mandatory})
        for name, group in GROUPS.items()
    }
    mixed_stream = stream(groups=groups)
    assert mixed_stream.packer is not None
    draws: list[Draw] = []
    for row, _ in islice(mixed_stream.rows(), 700):
        assert sum(mixed_stream._tokens[d.source][d.index] for d in row) <= SEQ_LENGTH
        assert all(any(d.source in group for d in row) for group in mixed_stream.order.mandatory)
        draws += row
    once_each_pass_after_pass(draws, mixed_stream)
    counts = Counter(d.source for d in draws)
    if not mandatory:
        assert abs(counts[0] + counts[1] - len(draws) / 20) <= mixed_stream.packer.window / 20 + 1
    else:
        assert counts[0] + counts[1] >= 700


def once_each_pass_after_pass(draws: list[Draw], stream: SequenceStream) -> None:
    """No (record, pass) twice; apart from one window, no pass begins before the one before it is complete."""
    assert len(set(draws)) == len(draws)
    for source, size in enumerate(stream.order.sizes):
        passes = Counter(d.pass_number for d in draws if d.source == source)
        assert sorted(passes) == list(range(len(passes)))
        slack = 2 * stream.packer.window // size + 2  # the samples of a window are in any order
        assert all(passes[number] == size for number in range(len(passes) - slack))
        last = [d for d in draws if d.source == source]
        assert [d.pass_number for d in last] == sorted(d.pass_number for d in last) or slack


def test_a_resume_anywhere_continues_with_the_same_rows(tmp_path: Path) -> None:
    whole = list(islice(stream(sources(tmp_path)).rows(), 400))
    for at in (1, 37, 150, 151, 333):
        fresh = stream(sources(tmp_path), sequences_per_epoch=55)
        cursor = Cursor.from_state_dict(json.loads(json.dumps(whole[at - 1][1].state_dict())))
        assert cursor == whole[at - 1][1]
        assert list(islice(fresh.rows(cursor), 20)) == whole[at : at + 20]
        assert fresh.seek(at) == Cursor(*(getattr(cursor, k) for k in ("epoch", "window", "row", "sequences")))
        assert list(islice(fresh.rows(fresh.seek(at)), 20)) == whole[at : at + 20]
    fresh, cursor = stream(), whole[332][1]
    assert list(islice(fresh.rows(cursor), 20)) == whole[333:353]
    # apart from the first epoch, nothing before the window of the cursor is planned again
    assert min(window for window in fresh._after if window[0]) == (cursor.epoch, cursor.window - 1) > (1, 0)
    with pytest.raises(CheckpointError, match="additional draws"):
        list(islice(stream().rows(Cursor(0, 2, 0, 30, extra=(3, 4))), 1))


def test_what_cannot_be_in_every_sequence_is_refused() -> None:
    class Plain:
        """A packer of a user's own, without ``plan_with``."""

        fingerprint = "plain"

        def __init__(self, window: int, max_tiles: int | None) -> None:
            self.window = window

        def plan(self, lengths: Any, tiles: Any, seq_length: int, key: int) -> list[list[int]]:
            return [[i] for i in range(len(lengths))]

    with pytest.raises(ConfigError, match=r"packing is Plain.*BestFitPacking"):
        mixture = blend(sources(), [31, 17, 120, 80], GROUPS)
        weights = mixture.weights
        make_stream(sources(), window=9, packing=Plain, seq_length=SEQ_LENGTH, weights=weights, blend=mixture)
    long = [*sources()[:3], Lengths("short", [99, 80, 60], group="texts", weight=1)]
    with pytest.raises(DataError, match=r"needs up to 40 tokens of 100: 2 samples .* more than the 60 tokens"):
        stream(long)
    shorter = Overflow(60, "truncate", key="max_sample_tokens")
    assert all(row for row, _ in islice(stream(long, overflow=shorter).rows(), 50))


def test_groups_are_part_of_the_data() -> None:
    """Another weight is a change of the data; a group whose sources follow their sizes may be appended to."""
    first = stream()
    row = next(islice(first.rows(), 70, 71))
    state = json.loads(json.dumps({"cursor": row[1].state_dict(), **first.identity}))
    assert state["facts"]["order"] == "mixture-2" and not compare(state, stream())
    other = {**GROUPS, "texts": DataGroup.model_validate({"weight": 9})}
    assert [fact for fact, _ in compare(state, stream(groups=other)).differences] == ["weights"]
    longer = stream(sources(images=40), sequences_per_epoch=first.sequences_per_epoch)
    with pytest.raises(ResumeBlocked, match="drawn had 31 records and has 40"):
        continue_stream(state, longer)
    for choice in ("append", "restart"):
        went_on, cursor = continue_stream(state, longer, on_change=choice)  # type: ignore[arg-type]
        before = [d for row, _ in islice(first.rows(), 71) for d in row]
        after = [d for row, _ in islice(went_on.rows(cursor), 400) for d in row]
        assert len({*before, *after}) == len(before) + len(after), "no (record, pass) twice"
        assert any(d.source == 0 and d.index >= 31 for d in after)
        again = json.loads(json.dumps({"cursor": cursor.state_dict(), **went_on.identity}))
        present, at = continue_stream(again, longer)
        assert [r for r, _ in islice(present.rows(at), 400)] == [r for r, _ in islice(went_on.rows(cursor), 400)]


def test_only_the_first_records_are_used(caplog: pytest.LogCaptureFixture) -> None:
    whole = Lengths("a", lengths(20, 1, 9), num_used_data=7)
    part = first_records(whole)
    assert len(part) == 7 and part.sample(6) == whole.sample(6)
    assert [len(column) for column in (*part.lengths(), part.counts().tokens, part.content_digests())] == [7] * 4
    assert part.fingerprint != whole.fingerprint
    assert part.prefix_digest(5) == whole.prefix_digest(5) and len(pickle.loads(pickle.dumps(part))) == 7
    assert {d.index for d in make_stream([part]).order.draws(0, 0, 7)} == set(range(7))
    few = Lengths("few", [3, 4], num_used_data=5)
    assert first_records(few) is few
    assert "few: num_used_data is 5, and there are 2 records: all of them are used" in caplog.text
    assert first_records(Lengths("all", [3, 4])).fingerprint == few.fingerprint


def test_long_periods_resume_from_the_state_of_their_cursor() -> None:
    """Weights in proportion to sizes whose sums have no small common multiple."""
    data = [Lengths("a", [5] * 400), Lengths("b", [7] * 300)]
    for window in (None, 64):
        more: dict[str, Any] = {"weights": [1.2345671, 0.7654321], "window": window}
        whole = list(islice(make_stream(data, **more).rows(), 1300))
        for at in (3, 1200):
            cursor = Cursor.from_state_dict(whole[at][1].state_dict())
            assert sum(cursor.drawn) % 1024 == 0 and len(cursor.drawn) == 2 * (at > 1024)
            assert list(islice(make_stream(data, **more).rows(cursor), 50)) == whole[at + 1 : at + 51]
        with pytest.raises(CheckpointError, match="the state"):
            next(make_stream(data, **more).rows(Cursor(0, 0, 0, 5, drawn=(9, 9))))


def test_an_unpacked_epoch_leaves_no_draw_out() -> None:
    """With whole iterations alone, what an epoch has no space for is drawn in the next one."""
    data = [Lengths("a", [5] * 10), Lengths("b", [7] * 7)]
    stream = make_stream(data, weights=[1.0, 2.0], sequences_per_iteration=5)
    rows = [row[0] for row, _ in islice(stream.rows(), 200)]
    assert stream.sequences_per_epoch == 15
    for source, size in ((0, 10), (1, 7)):
        mine = [d for d in rows if d.source == source]
        assert [d.pass_number for d in mine] == [i // size for i in range(len(mine))]
    assert abs(sum(d.source == 0 for d in rows) - 200 / 3) <= 1


def test_rows_are_those_of_ever() -> None:
    """Pinned: checkpoints with mixture-2 and FastPacking-1 continue with these rows."""
    no_groups = make_stream([Lengths("a", [5] * 17), Lengths("b", [7] * 9)], weights=[1.0, 3.0])
    digests = [fingerprint([row for row, _ in islice(one.rows(), 90)]) for one in (stream(), no_groups)]
    assert digests == ["1aac6b578415e041327e67ca9f49c006", "688cfb594394e8be1ba6e371ce762ffc"]
    assert (stream().fingerprint, no_groups.fingerprint) == (
        "46e8b5f13f5fedb7a683092eedaa2e60",
        "51476868674b80ebb391943c0e602d27",
    )


def test_the_share_holds_after_packing_at_the_end_of_each_window() -> None:
    groups = {name: DataGroup.model_validate({"weight": group.weight}) for name, group in GROUPS.items()}
    mixed_stream, counts, position = stream(groups=groups), Counter[int](), 0
    shares = [Fraction(weight) for weight in mixed_stream.order.weights or ()]  # type: ignore[arg-type]
    for epoch in range(3):
        for window in range(mixed_stream.num_windows(epoch)):
            rows = mixed_stream.window_rows(epoch, window)
            counts.update(d.source for row in rows for d in row)
            position += sum(map(len, rows))
            assert all(abs(counts[k] - share * position) <= 1 for k, share in enumerate(shares))
