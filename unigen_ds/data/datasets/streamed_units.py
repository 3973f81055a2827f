"""A streamed source, fitted to ``seq_length`` shard by shard: the units of each, when it is reached.

What a start reports and checks of a source (lengths, overflow, images that can be read) is of its first shard; each
other shard is checked when it is reached, and what of it is not trained on is in the log then. How many units there are
is estimated from the first shard, since nobody knows it before the first pass has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.data.datasets.dataset import PlannedDataset, is_streamed
from unigen_ds.data.datasets.filtered import Filtered, all_removed, kept_records, leaves_out, removal_line
from unigen_ds.data.datasets.held_out import record_number, whole_of
from unigen_ds.data.datasets.overflow import Fitted, Overflow, overflow_line
from unigen_ds.data.datasets.shard_order import ShardWalk
from unigen_ds.data.datasets.streamed import SPAN, Recent, StreamedShards
from unigen_ds.data.index.index import Index
from unigen_ds.data.order.order import Draw
from unigen_ds.data.records.turn import Turn
from unigen_ds.data.records.unusable import BadRecord, exceeds, unusable_error
from unigen_ds.data.samples.counts import Array, Counts
from unigen_ds.data.samples.sample import Sample
from unigen_ds.data.sources.shards.spool import shown
from unigen_ds.system import dist
from unigen_ds.system.log import logger


def fitted(dataset: PlannedDataset, overflow: Overflow) -> Fitted:
    """``Fitted`` of any data set."""
    return StreamedFitted(dataset, overflow) if is_streamed(dataset) else Fitted(dataset, overflow)


class ShardRecords:
    """One shard as a ``PlannedDataset`` of its own."""

    def __init__(self, dataset: Any, shard: int) -> None:
        self._of, self.shard, self.weight, self.first = dataset, shard, dataset.weight, shard * SPAN
        self.index: Index = dataset.shards.index(shard)
        self.name, self.filters, self.processor = dataset.name, dataset.filters, dataset.processor

    @property
    def cache_folder(self) -> Path | None:
        return self.index.folder

    def __len__(self) -> int:
        return len(self.index)

    def lengths(self) -> tuple[Array, Array]:
        return self.index.counts.tokens, self.index.counts.tiles

    def counts(self) -> Counts:
        return self.index.counts

    def sample(self, index: int, *, pass_number: int = 0) -> Sample:
        sample: Sample = self._of.sample(self.shard * SPAN + index, pass_number=pass_number)
        return sample

    def turns(self, index: int) -> list[Turn]:
        """As of the whole data set."""
        turns: list[Turn] = self._of.turns(self.shard * SPAN + index)
        return turns

    @property
    def fingerprint(self) -> str:
        return self.index.digest

    def prefix_digest(self, number: int) -> str:
        return self.index.digest


class StreamedFitted(Fitted):
    """One streamed source. Its attributes are those of the first shard."""

    def __init__(self, dataset: Any, overflow: Overflow) -> None:
        self.shards: StreamedShards = dataset.shards
        self._whole, self._reported = dataset, {0}
        self.unusable: list[BadRecord] = []
        """That are left out, of the shards so far."""
        self._num_records = 0
        self._recent: Recent[Fitted] = Recent(2 * self.shards.mixed + 1)
        first = self._records_of(0)
        if isinstance(first, Filtered) and not len(first):
            raise all_removed(first, title=self.titled(dataset.name))
        super().__init__(first, overflow)

    limit: float | None = None
    """Share of the records that may be left out since they cannot be trained on; None: it is not known yet."""
    left_out_file: Path | None = None
    """Where these are listed, by rank 0."""
    listed: Collection[str] = ()
    """Lines that an earlier start has written there."""

    def count_unusable(self, part: Fitted) -> None:
        """Of a shard that is reached. Raises ``DataError`` where all shards so far have too many."""
        found = part.dataset.unusable if isinstance(part.dataset, Filtered) else ()
        self.unusable += found
        self._num_records += len(whole_of(part.dataset))
        if self.left_out_file is not None and found:
            lines = [line for one in found if (line := one.line(self._whole.name)) not in self.listed]
            with self.left_out_file.open("a", encoding="utf-8") as stream:
                stream.writelines(lines)
        if self.limit is not None and exceeds(len(self.unusable), self._num_records, self.limit):
            raise unusable_error(self.unusable, self._whole.name, self._num_records, limit=self.limit)

    def __len__(self) -> int:
        """Units of a pass, as far as can be known: those of the first shard times the number of shards, or in
        proportion to the bytes of all. It is the same in every process and at every start.
        """
        first, listed = len(self.tokens), self.shards.listed.shards
        size, whole = listed[0].size, self.shards.size
        return first * whole // size if size and whole else first * len(listed)

    def titled(self, name: str) -> str:
        return self.shards.titled(name)

    def walk(self, source: int, *, seed: int, first_pass: int) -> ShardWalk:
        """The order of the source, whose number is ``source``."""
        return ShardWalk(
            len(self.shards),
            lambda shard: len(self._part(shard).tokens),
            prepare=self.shards.prepare,
            mixed=self.shards.mixed,
            seed=seed,
            source=source,
            first_pass=first_pass,
        )

    def lengths_of(self, units: Array) -> tuple[Array, Array]:
        shards, positions = np.divmod(units, SPAN)
        tokens, tiles = np.empty_like(units), np.empty_like(units)
        for shard in np.unique(shards).tolist():
            here, part = shards == shard, self._part(shard)
            tokens[here], tiles[here] = part.lengths_of(positions[here])
        return tokens, tiles

    def record(self, unit: Draw) -> Draw:
        shard, position = divmod(unit.index, SPAN)
        found = self._part(shard).record(unit._replace(index=position))
        return found._replace(index=shard * SPAN + found.index)

    def _part(self, shard: int) -> Fitted:
        """The units of a shard."""
        found = self._recent.get(shard)
        if found is None:
            found = Fitted(self._records_of(shard), self.overflow)
            self._recent.keep(shard, found, records=len(found.dataset))
            if shard not in self._reported:
                self._reported.add(shard)
                self._check(shard, found)
        return found

    def _records_of(self, shard: int) -> Any:
        records = ShardRecords(self._whole, shard)
        return kept_records(records, records) if leaves_out(records) else records

    def _check(self, shard: int, part: Fitted) -> None:
        """Report what of a shard is not trained on. Raises ``DataError`` where overflow is 'error'."""
        name = f"{self._whole.name}, shard {self.shards.listed.shards[shard].name}"
        overflow, refused = self.overflow, part.by_action["error"]
        if refused.size:
            raise DataError(
                f"{name}: {len(refused):,} of {len(part.dataset):,} records are longer than {overflow.key}"
                f" {overflow.seq_length:,}, and train_dataloader.overflow is 'error'",
                remedy="a larger limit, or another overflow: 'split', 'truncate' or 'skip'",
            )
        longest = int(part.tokens.max(initial=0))
        if self.positions is not None and longest > self.positions:
            raise DataError(
                f"{name}: a sample has {longest:,} tokens, and the model {self.positions:,} positions",
                remedy=f"train_dataloader.seq_length of at most {self.positions:,}: longer texts are split",
            )
        self.count_unusable(part)
        if dist.env_rank() != 0:
            return
        if isinstance(part.dataset, Filtered) and sum(part.dataset.report["removed"].values()):
            logger().info("Data, %s: %s.", name, removal_line(part.dataset.report))
        if part.longer.size:
            report, records = part.report(name), len(part.dataset)
            skipped = part.by_action["skip"].tolist()
            numbers = [shard * SPAN + record_number(part.dataset, index) for index in skipped]
            report["skipped_records"] = [f"{self._whole.name}:{number}" for number in numbers]
            line = overflow_line(report, records=records, seq_length=overflow.seq_length, key=overflow.key)
            logger().warning("Data, %s: %s.", name, line)


def streamed_lines(name: str, source: Fitted) -> Iterator[tuple[bool, str]]:
    """What a start reports of a streamed source: whether it is a warning, and a sentence. Nothing of any other one."""
    if not isinstance(source, StreamedFitted):
        return
    shards = source.shards
    number, size, listed = len(shards), shards.size, shards.listed.shards
    has = f"{number:,} shards" if size is None else f"{number:,} shards of {shown(size)} together"
    by = "the number of shards" if size is None or not listed[0].size else "the sizes of all"
    estimate = (
        f"about {len(source):,} samples a pass, estimated from the first shard and {by}"
        if number > 1
        else f"{len(source):,} samples a pass"
    )
    yield (
        False,
        f"Data, {name}: streamed from {has}; {estimate}. Epochs, and limits in epochs, use this number; a pass ends"
        " when every record was used, and every resume continues exactly. All further numbers of its records are of the"
        f" {len(source.dataset):,} of {shards.measured}.",
    )
    if shards.mixed < number:
        yield (
            False,
            f"Data, {name}: a pass is not one shuffle of all records: shards come in a random order, and records are"
            f" shuffled within {shards.mixed} shards at a time (streaming.mixed_shards).",
        )
    if (copied := sum(shard.copied for shard in listed)) or size is None:
        amount = shown(copied) if size is not None else "an unknown size"
        per_node, processes = dist.env_processes_per_node(), dist.env_world_size()
        nodes = "each node" if per_node is None or processes > per_node else "this node"
        yield (
            False,
            f"Data, {name}: {nodes} fetches every shard once a pass ({amount}) and keeps at most"
            f" {shown(shards.settings.limit)} in {shards.spool.folder}; nodes that share this folder (cache_dir) fetch"
            " it once together.",
        )
    for note in shards.listed.notes:
        yield True, f"Data, {name}: {note}."


def streamed_report(source: StreamedFitted) -> dict[str, Any]:
    """Plain numbers of the whole source, and which part of it all others are of that are shown."""
    return {
        "shards": len(source.shards),
        "bytes": source.shards.size,
        "samples_per_pass_estimated": len(source),
        "exact": len(source.shards) == 1,
        "measured": {"shards": [source.shards.listed.shards[0].name], "records": len(source.dataset)},
        "mixed_shards": source.shards.mixed,
        "folder": str(source.shards.spool.folder),
    }


def check_streamed(datasets: Sequence[PlannedDataset], *, what: str) -> None:
    """Raise ``ConfigError`` where a data set is streamed whose records must all be known for ``what``."""
    for dataset in datasets:
        if is_streamed(dataset):
            raise ConfigError(
                f"{what} needs the number of all records, and {dataset.name} is streamed",
                remedy="a data set without streaming there",
            )
