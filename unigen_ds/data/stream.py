"""The cursor: where a run is in the global order of packed sequences, and what comes next.

In: data sets (their lengths), the global order, a packer. Out: an endless sequence of rows (the draws that make one
sequence), each with the cursor behind it. A row is a pure function of (data, seed, place), so ranks, workers, batch
sizes and kills change nothing: whoever continues from a cursor gets the rows that nobody got before.

Packed: an epoch is cut into windows of the global order, each planned from lengths alone; going to a cursor plans one
window (0.1 s at 8,192 samples), wherever it lies. Unpacked: one draw a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

import numpy as np

from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.core.seeding import derive_seed
from unigen_ds.data.datasets import PlannedDataset, source_names
from unigen_ds.data.index import cached, fingerprint
from unigen_ds.data.order import Draw, GlobalOrder

Row = tuple[Draw, ...]
"""The draws of one sequence. An empty one only fills up the last iteration of an epoch that keeps its last samples."""

_CHUNK = 1024
_FORMAT = "stream-1"


class Packer(Protocol):
    """Groups one window of samples into sequences, from lengths alone."""

    window: int

    @property
    def fingerprint(self) -> str: ...
    def plan(self, lengths: Sequence[int], tiles: Sequence[int], seq_length: int, key: int) -> list[list[int]]: ...


@dataclass(frozen=True)
class Cursor:
    """The place of the next sequence. The same on all ranks; independent of the geometry."""

    epoch: int = 0
    window: int = 0
    """Window of the epoch; 0 where nothing is packed."""
    row: int = 0
    """Sequence of the window (unpacked: of the epoch)."""
    sequences: int = 0
    """Sequences before it since the start of the run, over all epochs."""

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Cursor:
        names = {field.name for field in fields(cls)}
        if not names <= set(state):
            raise CheckpointError(f"a data cursor without {', '.join(sorted(names - set(state)))}")
        return cls(**{name: int(state[name]) for name in names})


class SequenceStream:
    """All sequences of a run, in order.

    Args:
        datasets: the sources, in the order of ``order``'s sizes.
        order: the global order.
        packer: groups samples into sequences; None: one sample a sequence.
        seq_length: tokens of a sequence at most; longer samples are truncated.
        drop_last: unpacked only: an epoch leaves out the samples that fill no whole iteration; otherwise empty rows
            fill up the last one. A packed epoch always keeps all.
        sequences_per_iteration: of the geometry at the first start; only used to work out ``sequences_per_epoch``.
        sequences_per_epoch: the stored value on resume; None: worked out here.
    """

    def __init__(
        self,
        datasets: Sequence[PlannedDataset],
        order: GlobalOrder,
        *,
        packer: Packer | None,
        seq_length: int,
        drop_last: bool = True,
        sequences_per_iteration: int = 1,
        sequences_per_epoch: int | None = None,
    ) -> None:
        if seq_length < 1:
            raise ConfigError(f"seq_length is {seq_length}", allowed="at least 1 token")
        assert tuple(len(d) for d in datasets) == order.sizes, "the order is that of other data sets"
        self.datasets, self.order, self.packer, self.seq_length = tuple(datasets), order, packer, seq_length
        self.names = source_names(datasets)
        self._tokens = [np.minimum(d.lengths()[0], seq_length) for d in datasets]
        self._tiles = [d.lengths()[1] for d in datasets]
        self._window_counts: dict[tuple[int, int], int] = {}
        if sequences_per_epoch is None:
            sequences_per_epoch = self._epoch_length(drop_last, sequences_per_iteration)
        self.sequences_per_epoch = sequences_per_epoch
        """Sequences of an epoch. Packed: the number planned for epoch 0, nominal for the others (another order packs
        into a few more or fewer); the epoch itself ends with its last window."""

    def _epoch_length(self, drop_last: bool, sequences_per_iteration: int) -> int:
        if self.packer is not None:
            return sum(self.window_count(0, window) for window in range(self.num_windows))
        whole = self.order.epoch_size // sequences_per_iteration
        if not drop_last:
            whole = -(-self.order.epoch_size // sequences_per_iteration)
        if whole == 0:
            raise ConfigError(
                f"{self.order.epoch_size} samples do not fill one iteration of {sequences_per_iteration} sequences",
                remedy="a smaller batch_size, more data, or drop_last=False",
            )
        return whole * sequences_per_iteration

    @property
    def tokens_per_sequence(self) -> float:
        """Mean over an epoch, from lengths alone; condition dropout makes the true number a little smaller."""
        drawn = sum(float(t.mean()) * n for t, n in zip(self._tokens, self.order.counts, strict=True))
        return drawn / self.sequences_per_epoch

    @property
    def num_windows(self) -> int:
        """Windows of an epoch; 1 where nothing is packed."""
        return 1 if self.packer is None else -(-self.order.epoch_size // self.packer.window)

    @property
    def facts(self) -> dict[str, Any]:
        """What the fingerprint is made of, by name: so that a checklist can say what changed."""
        return {
            "format": _FORMAT,
            "names": list(self.names),
            "sizes": list(self.order.sizes),
            "digests": [dataset.fingerprint for dataset in self.datasets],
            "weights": None if self.order.weights is None else list(self.order.weights),
            "seed": self.order.seed,
            "packing": None if self.packer is None else self.packer.fingerprint,
            "seq_length": self.seq_length,
        }

    @property
    def fingerprint(self) -> str:
        """Changes whenever any row of the stream may change."""
        return fingerprint(sorted(self.facts.items()))

    def window_rows(self, epoch: int, window: int) -> list[Row]:
        """All rows of one window of a packed stream."""
        assert self.packer is not None
        start = window * self.packer.window
        draws = self.order.draws(epoch, start, min(start + self.packer.window, self.order.epoch_size))
        lengths = [int(self._tokens[d.source][d.index]) for d in draws]
        tiles = [int(self._tiles[d.source][d.index]) for d in draws]
        key = derive_seed(self.order.seed, "window", epoch, window)
        groups = self.packer.plan(lengths, tiles, self.seq_length, key)
        return [tuple(draws[i] for i in group) for group in groups]

    def window_count(self, epoch: int, window: int) -> int:
        """Rows of one window. Those of epoch 0 are planned once and cached with the index."""
        if (epoch, window) not in self._window_counts:
            if epoch == 0:
                for w, number in enumerate(self._first_epoch_counts()):
                    self._window_counts[0, w] = number
            else:
                self._window_counts[epoch, window] = len(self.window_rows(epoch, window))
        return self._window_counts[epoch, window]

    def _first_epoch_counts(self) -> list[int]:
        folder = next((d.cache_folder for d in self.datasets if d.cache_folder is not None), None)
        key = self.fingerprint
        cache = None if folder is None else folder / f"plan-{key[:16]}.npz"

        def make() -> dict[str, Any]:
            counts = [len(self.window_rows(0, window)) for window in range(self.num_windows)]
            return {"counts": np.asarray(counts, dtype=np.int64)}

        return cached(cache, key, make)["counts"].tolist()

    def rows(self, cursor: Cursor | None = None) -> Iterator[tuple[Row, Cursor]]:
        """Every row from ``cursor`` on, over all epochs, each with the cursor behind it. Endless."""
        cursor = cursor or Cursor()
        return self._single_rows(cursor) if self.packer is None else self._packed_rows(cursor)

    def _packed_rows(self, cursor: Cursor) -> Iterator[tuple[Row, Cursor]]:
        epoch, window, first, sequences = cursor.epoch, cursor.window, cursor.row, cursor.sequences
        if window >= self.num_windows:
            raise CheckpointError(
                f"the data cursor stands in window {window} of an epoch of {self.num_windows}",
                remedy="the data or the packing differs from that of the checkpoint",
            )
        while True:
            rows = self.window_rows(epoch, window)
            if first >= len(rows):
                raise CheckpointError(
                    f"the data cursor stands at row {first} of a window of {len(rows)}",
                    remedy="the data or the packing differs from that of the checkpoint",
                )
            after = (epoch, window + 1) if window + 1 < self.num_windows else (epoch + 1, 0)
            for i in range(first, len(rows)):
                sequences += 1
                last = i + 1 == len(rows)
                yield rows[i], Cursor(*after, 0, sequences) if last else Cursor(epoch, window, i + 1, sequences)
            (epoch, window), first = after, 0

    def _single_rows(self, cursor: Cursor) -> Iterator[tuple[Row, Cursor]]:
        epoch, row, sequences, length = cursor.epoch, cursor.row, cursor.sequences, self.sequences_per_epoch
        if row >= length:
            raise CheckpointError(
                f"the data cursor stands at row {row} of an epoch of {length}",
                remedy="sequences_per_epoch is not that of the checkpoint",
            )
        while True:
            stop = min(row + _CHUNK, length)
            filled = min(stop, self.order.epoch_size)
            draws = self.order.draws(epoch, min(row, filled), filled)
            rows: list[Row] = [(draw,) for draw in draws] + [()] * (stop - row - len(draws))
            for i, content in enumerate(rows, start=row + 1):
                sequences += 1
                yield content, Cursor(epoch + 1, 0, 0, sequences) if i == length else Cursor(epoch, 0, i, sequences)
            epoch, row = (epoch + 1, 0) if stop == length else (epoch, stop)

    def seek(self, sequence: int) -> Cursor:
        """The cursor before a global sequence number. Packed: plans every window before it beyond epoch 0."""
        if self.packer is None:
            epoch, row = divmod(sequence, self.sequences_per_epoch)
            return Cursor(epoch, 0, row, sequence)
        epoch, window, left = 0, 0, sequence
        while left >= (number := self.window_count(epoch, window)):
            left -= number
            epoch, window = (epoch, window + 1) if window + 1 < self.num_windows else (epoch + 1, 0)
        return Cursor(epoch, window, left, sequence)
