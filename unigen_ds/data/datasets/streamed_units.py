"""A streamed source: the units of each shard when it is reached, and the order in which they are drawn.

What a start reports and checks of a source (lengths, overflow, images that can be read) is of its first shard; each
other shard is checked when it is reached, and what of it is not trained on is in the log then. How many units there are
is estimated from the first shard, since nobody knows it before the first pass has ended.

The order (``ShardWalk``) needs no number of records. A pass is every unit once: the shards in a random order, some at a
time (a block), whose units are shuffled together. Both shuffles are keyed bijections (``order.py``) of (seed, source,
pass, block), so a position is (pass, block, position in the block); a cursor keeps of it where its block began.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.data.datasets.dataset import PlannedDataset, is_streamed
from unigen_ds.data.datasets.overflow import FittedSource, Overflow, check_positions, check_refused, overflow_line
from unigen_ds.data.datasets.streamed import SPAN, Recent, StreamedShards
from unigen_ds.data.datasets.subset import all_removed, filtering_of, kept_records, removal_line, whole_of
from unigen_ds.data.order.order import Draw, permute_many
from unigen_ds.data.records.unusable import BadRecord, exceeds, unusable_error
from unigen_ds.data.samples.sample import Array
from unigen_ds.system import dist
from unigen_ds.system.files import size_text
from unigen_ds.system.log import logger
from unigen_ds.system.seeding import derive_seed

_Start = tuple[int, int, int]
"""Where a block begins: draws of the source before it, its pass, and its number in the pass."""


class ShardWalk:
    """The endless order of one source, whose number is ``source``. ``units`` may take long: a shard is fetched then."""

    def __init__(
        self, shards: StreamedShards, units: Callable[[int], int], *, seed: int, source: int, first_pass: int
    ) -> None:
        self.num_shards, self.num_mixed = len(shards), shards.num_mixed
        self.blocks = -(-self.num_shards // self.num_mixed)
        """Number of blocks of a pass."""
        self._prepare, self._units = shards.prepare, units
        self._seed, self._source = seed, source
        self._starts: list[_Start] = [(0, first_pass, 0)]

    def shards(self, pass_number: int, block: int) -> list[int]:
        """Return the numbers of a block's shards, in the order of the pass."""
        key = derive_seed(self._seed, "shards", self._source, pass_number)
        last = min((block + 1) * self.num_mixed, self.num_shards)
        return permute_many(np.arange(block * self.num_mixed, last, dtype=np.int64), self.num_shards, key).tolist()

    def draws(self, numbers: Array) -> tuple[Array, Array]:
        """Return for each draw number the unit, as ``shard * SPAN + position``, and its pass."""
        units, passes = np.empty_like(numbers), np.empty_like(numbers)
        rest = np.argsort(numbers, kind="stable")
        while rest.size:
            (start, pass_number, block), sizes = self._block(int(numbers[rest[0]]))
            stop = start + int(sizes.sum())
            inside = int(np.searchsorted(numbers[rest], stop))
            here, rest = rest[:inside], rest[inside:]
            key = derive_seed(self._seed, "block", self._source, pass_number, block)
            shuffled = permute_many(numbers[here] - start, stop - start, key)
            ends = np.cumsum(sizes)
            which = np.searchsorted(ends, shuffled, side="right")
            shards = np.asarray(self.shards(pass_number, block), dtype=np.int64)
            units[here] = shards[which] * SPAN + shuffled - (ends - sizes)[which]
            passes[here] = pass_number
        return units, passes

    def state(self, number: int) -> _Start:
        """Where the block of a draw number begins, as far as it is known: that of a draw that follows known ones is."""
        return self._starts[self._before(number)]

    def remember(self, state: _Start) -> bool:
        """Take over what ``state`` returned. False: it is not a state of this order."""
        start, pass_number, block = state
        if start < 0 or not 0 <= block < self.blocks or pass_number < self._starts[0][1]:
            return False
        at = self._before(start)
        if self._starts[at][0] == start:  # blocks without a unit begin at the same number as the next one
            self._starts[at] = max(self._starts[at], state)
        else:
            insort(self._starts, state)
        return True

    def _before(self, number: int) -> int:
        return bisect_right(self._starts, number, key=lambda start: start[0]) - 1

    def _block(self, number: int) -> tuple[_Start, Array]:
        """The block that has a draw number, and the units of each of its shards."""
        at, empty = self._before(number), 0
        while True:
            start, pass_number, block = self._starts[at]
            following = (pass_number, block + 1) if block + 1 < self.blocks else (pass_number + 1, 0)
            shards = self.shards(pass_number, block)
            self._prepare([*shards, *self.shards(*following)])
            sizes = np.asarray([self._units(shard) for shard in shards], dtype=np.int64)
            stop = start + int(sizes.sum())
            if stop == start:
                self._starts[at], empty = (start, *following), empty + 1
                if empty > 2 * self.blocks:  # the end of a pass and the beginning of the next one may be empty
                    problem = f"none of {self.num_shards:,} shards has a record that can be used"
                    raise DataError(problem, remedy="a larger seq_length, another overflow, or weaker filters")
                continue
            empty = 0
            if at + 1 == len(self._starts) or self._starts[at + 1][0] > stop:
                self._starts.insert(at + 1, (stop, *following))
            if number < stop:
                return (start, pass_number, block), sizes
            at = self._before(number)


def fit_source(dataset: PlannedDataset, overflow: Overflow) -> FittedSource:
    return StreamedSource(dataset, overflow) if is_streamed(dataset) else FittedSource(dataset, overflow)


class StreamedSource(FittedSource):
    """One streamed source. Its attributes are those of the first shard."""

    limit: float | None = None
    """Share of the records that may be left out since they cannot be trained on; None: it is not known yet."""
    left_out_file: Path | None = None
    """Where these are listed, by rank 0."""
    old_lines: Collection[str] = ()
    """Lines that an earlier start has written there."""

    def __init__(self, dataset: Any, overflow: Overflow) -> None:
        self.shards: StreamedShards = dataset.shards
        self._whole, self._reported_shards = dataset, {0}
        self._unusable: list[BadRecord] = []
        self._num_records = 0
        self._recent: Recent[FittedSource] = Recent(
            2 * self.shards.num_mixed + 1, lambda shard: FittedSource(kept_records(dataset.shard(shard)), self.overflow)
        )
        first = kept_records(dataset.shard(0))
        if filtering_of(first) is not None and not len(first):
            raise all_removed(first, self.title(dataset.name))
        super().__init__(first, overflow)

    @property
    def unusable(self) -> Sequence[BadRecord]:
        """Records of the shards so far that cannot be trained on."""
        return self._unusable

    def count_unusable(self, part: FittedSource) -> None:
        """Add those of the next shard. Raises ``DataError`` where all shards so far have too many."""
        filtering, name = filtering_of(part.dataset), self._whole.name
        unusable = [] if filtering is None else filtering.unusable
        self._unusable += unusable
        self._num_records += len(whole_of(part.dataset))
        if self.left_out_file is not None and unusable:
            with self.left_out_file.open("a", encoding="utf-8") as stream:
                stream.writelines(line for one in unusable if (line := one.line(name)) not in self.old_lines)
        if self.limit is not None and exceeds(len(self._unusable), self._num_records, self.limit):
            raise unusable_error(self._unusable, name, self._num_records, limit=self.limit)

    def __len__(self) -> int:
        """Units of a pass, estimated from the first shard by the bytes of all, or by their number."""
        first, size, whole = len(self.tokens), self.shards.shard_list.shards[0].size, self.shards.size
        return first * whole // size if size and whole else first * len(self.shards)

    def title(self, name: str) -> str:
        return self.shards.title(name)

    def walk(self, source: int, *, seed: int, first_pass: int) -> ShardWalk:
        def units(shard: int) -> int:
            return len(self._part(shard).tokens)

        return ShardWalk(self.shards, units, seed=seed, source=source, first_pass=first_pass)

    def lengths_of(self, units: Array) -> tuple[Array, Array]:
        shards, positions = np.divmod(units, SPAN)
        tokens, tiles = np.empty_like(units), np.empty_like(units)
        for shard in np.unique(shards).tolist():
            here, part = shards == shard, self._part(shard)
            tokens[here], tiles[here] = part.lengths_of(positions[here])
        return tokens, tiles

    def record(self, unit: Draw) -> Draw:
        shard, position = divmod(unit.index, SPAN)
        return self._part(shard).record(unit._replace(index=position))

    def _part(self, shard: int) -> FittedSource:
        """The units of a shard, which is checked and reported when it is reached."""
        part = self._recent[shard]
        if shard in self._reported_shards:
            return part
        self._reported_shards.add(shard)
        name = self._whole.name
        title = f"{name}, shard {self.shards.shard_list.shards[shard].name}"
        check_refused(part, name, title)
        check_positions([part], [title], limit=self.positions)
        self.count_unusable(part)
        filtering = filtering_of(part.dataset)
        if dist.env_rank() == 0:
            if filtering is not None and sum(filtering.report["removed"].values()):
                logger().info("Data, %s: %s.", title, removal_line(filtering.report))
            if part.longer.size:
                logger().warning("Data, %s: %s.", title, overflow_line(part.report(name)))
        return part


def streamed_lines(name: str, source: FittedSource) -> Iterator[tuple[bool, str]]:
    """What a start reports of a streamed source: whether it is a warning, and a sentence. Nothing of any other one."""
    if not isinstance(source, StreamedSource):
        return
    shards, number = source.shards, len(source.shards)
    bytes_of_all = "" if shards.size is None else f" of {size_text(shards.size)} together"
    yield (
        False,
        f"Data, {name}: streamed from {number:,} shards{bytes_of_all}; about {len(source):,} samples a pass,"
        " estimated from the first shard. Epochs, and limits in epochs, use this number; a pass ends when every record"
        f" was used. Shards come in a random order, and records are shuffled within {shards.num_mixed} shards at a time"
        " (streaming.mixed_shards). All further numbers of its records are of the"
        f" {len(source.dataset):,} of {shards.measured_part}.",
    )
    if not all(shard.is_local for shard in shards.shard_list.shards):
        yield False, f"Data, {name}: copies of shards are kept in {shards.shard_list.folder}."
    if unknown := sum(shard.version is None for shard in shards.shard_list.shards):
        yield (
            True,
            f"Data, {name}: {unknown:,} of {number:,} shards have no version (an ETag, a digest) at their server:"
            " a shard that changes with the same size is noticed only when one of its records is found to be another.",
        )


def streamed_report(source: StreamedSource) -> dict[str, Any]:
    """Plain numbers of the whole source, and which part of it all other numbers are of."""
    shards = source.shards
    return {
        "shards": len(shards),
        "bytes": shards.size,
        "samples_per_pass_estimated": len(source),
        "exact": len(shards) == 1,
        "measured": {"shards": [shards.shard_list.shards[0].name], "records": len(source.dataset)},
        "mixed_shards": shards.num_mixed,
    }


def check_streamed(datasets: Sequence[PlannedDataset], *, what: str) -> None:
    """Raise ``ConfigError`` where a data set is streamed whose records must all be known for ``what``."""
    for dataset in datasets:
        if is_streamed(dataset):
            problem = f"{what} needs the number of all records, and {dataset.name} is streamed"
            raise ConfigError(problem, remedy="a data set without streaming there")
