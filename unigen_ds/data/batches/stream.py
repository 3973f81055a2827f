"""The cursor: where a run is in the global order of packed sequences, and what comes next.

In: data sets (their lengths), the global order, a packer. Out: an endless sequence of rows (the draws that make one
sequence), each with the cursor after it. A row is a pure function of (data, seed, position), so ranks, workers, batch
sizes and kills change nothing: a run that continues from a cursor gets exactly the rows that were not used before.

Packed: an epoch is split into windows of the global order, each planned from lengths alone; seeking a cursor plans one
window (20 ms at 8,192 samples), wherever it is. Unpacked: one draw a row.

A mandatory group has a sample in every row. Where a window has too few of it, the next records of the group are drawn
in addition; how many were drawn before a window is part of the cursor.

A run whose data was changed on a resume (``change.py``) has several phases, each with an order of its own.
``sequences_per_epoch``, by which schedules and limits measure the run, stays that of its first start.
"""

from __future__ import annotations

import copy
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import numpy as np

from unigen_ds.core.errors import CheckpointError, ConfigError, DataError
from unigen_ds.core.progress import Skip, merged_skips
from unigen_ds.data.cache.array_cache import SUFFIX, ArrayFile, fingerprint, load_or_fill
from unigen_ds.data.datasets.dataset import PlannedDataset, source_names
from unigen_ds.data.datasets.groups import Blend, check_mandatory
from unigen_ds.data.datasets.overflow import Overflow
from unigen_ds.data.datasets.streamed_units import ShardWalk, StreamedSource, fit_source
from unigen_ds.data.datasets.subset import division_of, filtering_of, whole_of
from unigen_ds.data.order.order import Cursor, Draw, GlobalOrder
from unigen_ds.data.order.packing import Packer
from unigen_ds.data.samples.sample import Array
from unigen_ds.system.seeding import derive_seed

_CHUNK = 1024
PackedRow = tuple[Draw, ...]
"""The draws of one sequence. An empty one only fills up the last iteration of an epoch that keeps its last samples."""

_TOO_OLD = "is from before the data was replaced (--on-data-change restart)"
_OLD_DATA = "the data of that time, with a checkpoint of that time"
_FORMAT = "stream-1"
"""Version of order, reading and mixing of records: a checkpoint of another version is changed data."""


class SequenceStream:
    """All sequences of a run, in order.

    Args:
        order: the global order of the units (``overflow.FittedSource``) of ``datasets``.
        packer: groups samples into sequences; None: one sample a sequence.
        overflow: what happens to longer records; None: the default.
        drop_last: unpacked only: an epoch leaves out the samples that fill no whole iteration; otherwise empty rows
            fill up the last one. A packed epoch always keeps all.
        sequences_per_iteration: of the geometry at the first start; unpacked epochs are rounded to whole ones.
        sequences_per_epoch: the stored value on resume; None: worked out here.
        blend: where the order's weights are those of groups: the groups.
    """

    def __init__(
        self,
        datasets: Sequence[PlannedDataset],
        order: GlobalOrder,
        *,
        packer: Packer | None,
        seq_length: int,
        overflow: Overflow | None = None,
        drop_last: bool = True,
        sequences_per_iteration: int = 1,
        sequences_per_epoch: int | None = None,
        blend: Blend | None = None,
    ) -> None:
        overflow = overflow or Overflow(seq_length)
        self.fitted_sources = tuple(fit_source(dataset, overflow) for dataset in datasets)
        assert tuple(map(len, self.fitted_sources)) == order.sizes, "the order is that of other data sets"
        self.datasets, self.packer, self.seq_length = tuple(datasets), packer, seq_length
        self.phases: tuple[GlobalOrder, ...] = (order,)
        self.sources = tuple(whole_of(dataset) for dataset in datasets)
        """What the draws of rows point into."""
        self.sample_length = overflow.seq_length
        self.drop_last, self.sequences_per_iteration = drop_last, sequences_per_iteration
        self.skips: tuple[Skip, ...] = ()
        """What ``rows`` leaves out; no number of another sequence changes."""
        self.blend, self.names = blend or Blend(), source_names(datasets)
        self._tokens = [source.tokens for source in self.fitted_sources]
        tiles = [source.tiles for source in self.fitted_sources]
        check_mandatory(self.blend, self._tokens, tiles, packer=packer, seq_length=seq_length)
        self._use((self.new_phase(0, first_pass=0, first_sequence=0, rows=sequences_per_epoch),))
        self.sequences_per_epoch = sequences_per_epoch or self._first_epoch_rows
        """Rows of epoch 0, which schedules and limits use. Packed, other epochs have a few more or fewer."""

    @property
    def order(self) -> GlobalOrder:
        """That of all the present data."""
        return self.phases[-1]

    def _use(self, phases: tuple[GlobalOrder, ...]) -> None:
        """Begin in these phases; the last one has these data sets."""
        order = self.order
        assert (phases[-1].sizes, phases[-1].weights) == (order.sizes, order.weights), "the phases are of other data"
        self.phases = phases
        self._window_counts: dict[tuple[int, int], int] = {}
        self._after: dict[tuple[int, int], tuple[int, ...]] = {}
        """Additional draws up to the end of a window, of each mandatory group, as far as they are known."""
        self.walks: dict[int, ShardWalk] = {
            k: source.walk(k, seed=order.seed, first_pass=phases[-1].first_pass)
            for k, source in enumerate(self.fitted_sources)
            if isinstance(source, StreamedSource)
        }
        """The order of each streamed source: a run with one has one phase."""
        assert not self.walks or (len(phases) == 1 and order.mixture is not None), "streamed sources have weights"
        self.order.walks.update(self.walks)

    def with_phases(self, phases: Sequence[GlobalOrder]) -> SequenceStream:
        stream = copy.copy(self)
        stream._use(tuple(phases))
        return stream

    def skipping(self, skips: Iterable[Skip]) -> SequenceStream:
        stream = copy.copy(self)
        stream.skips = merged_skips(skips)
        return stream

    def position_after(self, position: int, number: int) -> int:
        """The position of a run after ``number`` sequences more."""
        stop = position + number
        for skip in self.skips:
            if skip.stop > position and skip.first < stop:
                stop += skip.stop - max(skip.first, position)
        return stop

    def new_phase(
        self, first_epoch: int, *, first_pass: int, first_sequence: int | None, rows: int | None = None
    ) -> GlobalOrder:
        """A phase of all the present data. Raises ``ConfigError`` where that does not fill one iteration."""
        order, number = self.order, self.sequences_per_iteration
        whole = order.epoch_size // number if self.drop_last else -(-order.epoch_size // number)
        rows = None if self.packer is not None else rows or whole * number
        if rows == 0:
            problem = f"{order.epoch_size} samples do not fill one iteration of {number} sequences"
            raise ConfigError(problem, remedy="a smaller batch_size, more data, or drop_last=False")
        return replace(
            order, first_epoch=first_epoch, first_pass=first_pass, first_sequence=first_sequence, rows_per_epoch=rows
        )

    @property
    def _first_epoch_rows(self) -> int:
        """Rows of the first epoch of the first phase: exact; an estimate where a source is streamed."""
        first = self.phases[0]
        if first.rows_per_epoch is not None:
            return first.rows_per_epoch
        if self.walks:  # nobody knows the lengths beyond the first window
            start, stop = self._window_range(first.first_epoch, 0)
            return max(1, self.window_count(first.first_epoch, 0) * first.epoch_size // (stop - start))
        return sum(self.window_count(first.first_epoch, w) for w in range(self.num_windows(first.first_epoch)))

    @property
    def draws_per_epoch(self) -> tuple[int, ...]:
        """Draws of each source in the first epoch of all the present data, with additional ones of mandatory groups."""
        return self._draws(self.order)

    def _draws(self, phase: GlobalOrder) -> tuple[int, ...]:
        """Return the draws of each source of a phase, in its first epoch."""
        if not phase.mandatory:
            return phase.counts
        first = phase.first_epoch
        ahead = phase.ahead(self._extra_after(first, self.num_windows(first) - 1)).tolist()
        return tuple(map(sum, zip(phase.counts, ahead, strict=True)))

    @property
    def samples_per_sequence(self) -> float:
        """Mean over an epoch of the first phase; 1 where nothing is packed."""
        return 1.0 if self.packer is None else sum(self._draws(self.phases[0])) / self.sequences_per_epoch

    @property
    def tokens_per_sequence(self) -> float:
        """Mean of the first phase (appended data moves no limit); condition dropout makes it a little smaller."""
        first = self.phases[0]
        means = [float(tokens[:size].mean()) for tokens, size in zip(self._tokens, first.sizes, strict=False)]
        total = sum(mean * count for mean, count in zip(means, self._draws(first), strict=True))
        return total / (self.sequences_per_epoch if first.first_epoch == 0 else self._first_epoch_rows)

    def epoch_order(self, epoch: int) -> GlobalOrder:
        """The order of the phase that an epoch belongs to. Raises ``DataError`` where its data was replaced."""
        number = bisect([phase.first_epoch for phase in self.phases], epoch) - 1
        if number < 0:
            raise DataError(f"epoch {epoch} of the data {_TOO_OLD}", remedy=_OLD_DATA)
        return self.phases[number]

    def num_windows(self, epoch: int) -> int:
        """Windows of an epoch; 1 where nothing is packed."""
        return 1 if self.packer is None else -(-self.epoch_order(epoch).epoch_size // self.packer.window)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The data by name, so that a resume can report what changed. Plain values."""
        filtering = {name: filtering_of(dataset) for name, dataset in zip(self.names, self.datasets, strict=True)}
        filters = {name: list(one.settings) for name, one in filtering.items() if one is not None and one.settings}
        shards = {self.names[k]: walk.num_shards for k, walk in self.walks.items()}
        return {
            **self._facts_of_order,
            **({"filters": filters} if filters else {}),
            "records": [dataset.prefix_digest(len(dataset)) for dataset in self.datasets],
            "overflow": self.fitted_sources[0].overflow.actions,
            "units": list(self.order.sizes),
            **({"shards": shards} if shards else {}),
        }

    @property
    def _facts_of_order(self) -> dict[str, Any]:
        actions = sorted({item for source in self.fitted_sources for item in source.long_kinds.items()})
        division = division_of(self.datasets)
        return {
            "format": _FORMAT,
            "names": list(self.names),
            "sizes": [len(dataset) for dataset in self.datasets],
            "digests": [dataset.fingerprint for dataset in self.datasets],
            "weights": None if self.order.weights is None else list(self.order.weights),
            "seed": self.order.seed,
            "packing": None if self.packer is None else self.packer.fingerprint,
            "seq_length": self.seq_length,
            **({"order": "mixture-2"} if self.order.mixture is not None else {}),
            **({"groups": self.blend.facts} if self.blend.facts else {}),
            **({"max_sample_tokens": self.sample_length} if self.sample_length != self.seq_length else {}),
            **({"long_records": actions} if actions else {}),
            **({"validation": asdict(division)} if division else {}),
        }

    @property
    def fingerprint(self) -> str:
        """Changes whenever any row of a phase of all the present data may change."""
        return fingerprint(sorted(self._facts_of_order.items()))

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the cursor: which data this is, and in which phases the run uses it."""
        phases = [phase.state_dict() for phase in self.phases]
        skips = {"skips": [list(skip) for skip in self.skips]} if self.skips else {}
        return {"seed": self.order.seed, "fingerprint": self.fingerprint, "facts": self.facts, "phases": phases} | skips

    def window_rows(self, epoch: int, window: int) -> list[PackedRow]:
        plan, columns = self._plan(epoch, window)
        draws = [Draw(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        return [tuple(self.fitted_sources[draws[i].source].record(draws[i]) for i in group) for group in plan]

    def _plan(self, epoch: int, window: int) -> tuple[list[list[int]], tuple[Array, ...]]:
        """The plan of a window, and its draws as columns: as many of each mandatory group in addition as it lacks."""
        packer: Any = self.packer
        order, before = self.epoch_order(epoch), self._extra_before(epoch, window)
        bounds, key = self._window_range(epoch, window), derive_seed(self.order.seed, "window", epoch, window)
        columns: tuple[Array, ...] = order.columns(epoch, *bounds, extra=before)
        if not order.mandatory:
            tokens, tiles = self._lengths_of(*columns[:2])
            return packer.plan(tokens.tolist(), tiles.tolist(), self.seq_length, key), columns
        extra = list(before)
        while True:
            tokens, tiles = self._lengths_of(*columns[:2])
            groups = [np.flatnonzero(np.isin(columns[0], sources)) for sources in order.mandatory]
            plan, missing = packer.plan_with(tokens, tiles, self.seq_length, key, groups=groups)
            if not any(missing):
                break
            for group, number in enumerate(missing):
                more = order.additional(epoch, bounds[1], group, number, extra=extra)
                columns = tuple(np.concatenate(pair) for pair in zip(columns, more, strict=True))
                extra[group] += number
        self._after[epoch, window] = tuple(extra)
        return plan, columns

    def _extra_before(self, epoch: int, window: int) -> tuple[int, ...]:
        """Additional draws of each mandatory group before a window, since the start of its phase."""
        order = self.epoch_order(epoch)
        if not order.mandatory or (epoch, window) == (order.first_epoch, 0):
            return (0,) * len(order.mandatory)
        return self._extra_after(*self._window_before(epoch, window))

    def _extra_after(self, epoch: int, window: int) -> tuple[int, ...]:
        """Additional draws after a window. Plans the windows before it, as far as neither cache nor cursor has them."""
        if (epoch, window) not in self._after:
            self.window_count(self.epoch_order(epoch).first_epoch, 0)  # plans the first epoch, or reads its plan
        windows, at = [], (epoch, window)
        while at not in self._after:
            windows.append(at)
            at = self._window_before(*at)
        for one in reversed(windows):
            self._plan(*one)
        return self._after[epoch, window]

    def _window_before(self, epoch: int, window: int) -> tuple[int, int]:
        return (epoch, window - 1) if window else (epoch - 1, self.num_windows(epoch - 1) - 1)

    def _window_range(self, epoch: int, window: int) -> tuple[int, int]:
        assert self.packer is not None
        start = window * self.packer.window
        return start, min(start + self.packer.window, self.epoch_order(epoch).epoch_size)

    def _lengths_of(self, sources: Array, records: Array) -> tuple[Array, Array]:
        """(tokens, tiles) of some draws."""
        tokens, tiles = np.empty_like(records), np.empty_like(records)
        for source in np.unique(sources).tolist():
            here = sources == source
            tokens[here], tiles[here] = self.fitted_sources[source].lengths_of(records[here])
        return tokens, tiles

    def window_count(self, epoch: int, window: int) -> int:
        """Rows of one window. Those of a phase's first epoch are planned once and cached with the index."""
        if (epoch, window) not in self._window_counts:
            if self.epoch_order(epoch).first_epoch == epoch and not self.walks:
                for w, number in enumerate(self._first_epoch_counts(epoch)):
                    self._window_counts[epoch, w] = number
            else:
                self._window_counts[epoch, window] = len(self._plan(epoch, window)[0])
        return self._window_counts[epoch, window]

    def _first_epoch_counts(self, epoch: int) -> list[int]:
        folder = next((d.cache_folder for d in self.datasets if d.cache_folder is not None), None)
        changed = epoch > 0 or len(self.phases) > 1
        key = fingerprint(self.fingerprint, self.epoch_order(epoch)) if changed else self.fingerprint
        cache = None if folder is None else folder / f"plan-{key[:16]}{SUFFIX}"

        def fill(new: ArrayFile) -> None:
            windows = range(self.num_windows(epoch))
            new.store("counts", np.asarray([len(self._plan(epoch, window)[0]) for window in windows], dtype=np.int64))
            if self.order.mandatory:
                new.store("extra", np.asarray([self._after[epoch, window] for window in windows], dtype=np.int64))

        arrays = load_or_fill(cache, key, fill)
        for window, extra in enumerate(arrays["extra"].tolist() if self.order.mandatory else ()):
            self._after[epoch, window] = tuple(extra)
        return arrays["counts"].tolist()

    def fetch_ahead(self) -> None:
        """Fetch the shards that come next in the background: called where rows are loaded, not only planned."""
        for k in self.walks:
            self.fitted_sources[k].shards.fetches_ahead = True  # type: ignore[attr-defined]

    def rows(self, cursor: Cursor | None = None) -> Iterator[tuple[PackedRow, Cursor]]:
        """Every row from ``cursor`` on, over all epochs, each with the cursor after it. Endless. Without ``skips``."""
        cursor = cursor or Cursor()
        self._take_over(cursor)
        rows = self._single_rows(cursor) if self.packer is None else self._packed_rows(cursor)
        return (pair for pair in rows if not any(one.first < pair[1].sequences <= one.stop for one in self.skips))

    def _take_over(self, cursor: Cursor) -> None:
        """What the cursor knows of its position, so that nothing before it is planned again."""
        order = self.epoch_order(cursor.epoch)
        offset = cursor.row if self.packer is None else cursor.window * self.packer.window
        position = order.position(cursor.epoch, min(offset, order.stride))
        fits = not cursor.drawn
        if order.mixture is not None and cursor.drawn:
            fits = order.mixture.remember(position, cursor.drawn)
        if cursor.extra and (cursor.epoch, cursor.window) != (order.first_epoch, 0):
            before = self._window_before(cursor.epoch, cursor.window)
            fits = fits and self._after.setdefault(before, cursor.extra) == cursor.extra
        fits = fits and len(cursor.blocks) in (0, 3 * len(self.walks))
        if cursor.blocks and fits:
            counts = order.mixture.counts(position) if order.mixture is not None else ()
            for i, (k, walk) in enumerate(self.walks.items()):
                start, pass_number, block = cursor.blocks[3 * i : 3 * i + 3]
                fits = fits and start <= counts[k] and walk.remember((start, pass_number, block))
        if not fits or len(cursor.extra) not in (0, len(order.mandatory)):
            state = f"the state {list(cursor.drawn)} and the blocks {list(cursor.blocks)}"
            raise _wrong_cursor(f"has {list(cursor.extra)} additional draws, {state}")

    def _state(self, epoch: int, window: int, row: int) -> dict[str, Any]:
        """``extra``, ``counts`` and ``blocks`` of a cursor at a window (unpacked: at a row)."""
        order = self.epoch_order(epoch)
        if order.mixture is None:
            return {}
        offset = row if self.packer is None else self._window_range(epoch, window)[0]
        position = order.position(epoch, min(offset, order.stride))
        state = {"extra": self._extra_before(epoch, window), "drawn": order.mixture.state(position)}
        if self.walks:
            counts = order.mixture.counts(position)
            state["blocks"] = tuple(number for k, walk in self.walks.items() for number in walk.state(counts[k]))
        return state

    def _packed_rows(self, cursor: Cursor) -> Iterator[tuple[PackedRow, Cursor]]:
        epoch, window, first, sequences = cursor.epoch, cursor.window, cursor.row, cursor.sequences
        windows = self.num_windows(epoch)
        if window >= windows:
            raise _wrong_cursor(f"is in window {window} of an epoch of {windows}")
        while True:
            rows = self.window_rows(epoch, window)
            if first >= len(rows):
                raise _wrong_cursor(f"is at row {first} of a window of {len(rows)}")
            after = self._next_window(epoch, window)
            state, state_after = self._state(epoch, window, 0), self._state(*after, 0)
            for i in range(first, len(rows)):
                sequences += 1
                here = Cursor(epoch, window, i + 1, sequences, **state)
                yield rows[i], Cursor(*after, 0, sequences, **state_after) if i + 1 == len(rows) else here
            (epoch, window), first = after, 0

    def _single_rows(self, cursor: Cursor) -> Iterator[tuple[PackedRow, Cursor]]:
        epoch, row, sequences = cursor.epoch, cursor.row, cursor.sequences
        if row >= self._rows_per_epoch(epoch):
            raise _wrong_cursor(f"is at row {row} of an epoch of {self._rows_per_epoch(epoch)}")
        while True:
            order, length = self.epoch_order(epoch), self._rows_per_epoch(epoch)
            stop = min(row + _CHUNK, length)
            end = min(stop, order.stride)
            draws = order.draws(epoch, min(row, end), end)
            rows: list[PackedRow] = [(self.fitted_sources[draw.source].record(draw),) for draw in draws]
            rows += [()] * (stop - row - len(draws))
            for i, content in enumerate(rows, start=row + 1):
                sequences += 1
                at = (epoch + 1, 0, 0) if i == length else (epoch, 0, i)
                yield content, Cursor(*at, sequences, **self._state(*at))
            epoch, row = (epoch + 1, 0) if stop == length else (epoch, stop)

    def _next_window(self, epoch: int, window: int) -> tuple[int, int]:
        return (epoch, window + 1) if window + 1 < self.num_windows(epoch) else (epoch + 1, 0)

    def _rows_per_epoch(self, epoch: int) -> int:
        rows = self.epoch_order(epoch).rows_per_epoch
        assert rows is not None, "packed"
        return rows

    def seek(self, sequence: int) -> Cursor:
        """The cursor before a global sequence number; plans what is before it. Raises ``DataError``: replaced data."""
        starts = [(phase.first_sequence, phase.first_epoch) for phase in self.phases]
        before = [(first, epoch) for first, epoch in starts if first is not None and first <= sequence]
        if not before:
            raise DataError(f"sequence {sequence} {_TOO_OLD}", remedy=_OLD_DATA)
        first, epoch = before[-1]
        rest, window = sequence - first, 0
        if self.packer is None:
            while rest >= (length := self._rows_per_epoch(epoch)):
                rest, epoch = rest - length, epoch + 1
            return Cursor(epoch, 0, rest, sequence)
        while rest >= (number := self.window_count(epoch, window)):
            rest -= number
            epoch, window = self._next_window(epoch, window)
        return Cursor(epoch, window, rest, sequence)


def _wrong_cursor(problem: str) -> CheckpointError:
    remedy = "the data, its packing, weights or groups, or sequences_per_epoch, are not those of the checkpoint"
    return CheckpointError(f"the data cursor {problem}", remedy=remedy)
