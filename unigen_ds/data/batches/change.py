"""Changed data on resume: what differs, and how the run continues: refused, with appended records, or with new data.

In: the data's identity of a checkpoint (``SequenceStream.identity`` and the cursor, plain values) and the stream of the
present config. Out: the stream in its phases, and the cursor to continue at; a later checkpoint keeps both.

* ``append``: each source begins with its old records (their digests are compared), new sources follow the old ones.
  The epoch of the checkpoint is finished with the old records in the old order; the next one has all of them.
* ``restart``: anything may differ. A new epoch of the new data begins; the rest of the old one is not used.

A new phase numbers its passes above all earlier ones, so no sample id (source:index:pass) comes twice in a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from unigen_ds.core.errors import ResumeBlocked
from unigen_ds.data.batches.stream import SequenceStream
from unigen_ds.data.order.order import Cursor, GlobalOrder

OnDataChange = Literal["refuse", "append", "restart"]
_DRAWS_OF_A_WINDOW = 1 << 24
"""More than a window has: of a streamed source, passes that may have begun in the window of a cursor."""
_SETTINGS = {
    "format": "the format of the order", "seed": "randomness.seed", "packing": "the packing",
    "seq_length": "seq_length", "max_sample_tokens": "max_sample_tokens", "validation": "val_dataloader.split",
    "overflow": "overflow",
}  # fmt: skip


@dataclass(frozen=True)
class DataChange:
    """Differences, as sentences. False where the data is the same."""

    differences: tuple[tuple[str, str], ...] = ()
    """(fact, what it was and is); facts: those of ``_SETTINGS``, filters, names, sizes, weights, content."""
    obstacles: tuple[str, ...] = ()
    """Why the new data is more than the old data with records appended; empty where it is just that."""
    division: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None] | None = None
    """Where the split for validation changed: ``share`` and ``seed`` of the checkpoint and of now; None: no split."""

    def __bool__(self) -> bool:
        return bool(self.differences)

    @property
    def only_appended(self) -> bool:
        return bool(self.differences) and not self.obstacles

    @property
    def holds_out_trained(self) -> bool:
        """Whether records may be held out that were trained on. A smaller share is a part of a larger one."""
        was, now = self.division or (None, None)
        return now is not None and (was is None or was["seed"] != now["seed"] or was["share"] < now["share"])

    def __str__(self) -> str:
        return "; ".join(text for _, text in self.differences)


def compare(loader: Mapping[str, Any], stream: SequenceStream) -> DataChange:
    """How the stream's data differs from that of a checkpoint (its manifest's ``loader``)."""
    was, now = loader["facts"], stream.facts
    if loader["fingerprint"] == stream.fingerprint and was["records"] == now["records"]:
        return DataChange()  # the fingerprint alone is of samples of a large file: its records are compared as well
    number, differences, obstacles = len(was["names"]), list[tuple[str, str]](), list[str]()

    def differs(fact: str, text: str, *, blocks: bool = True, why: str = "") -> None:
        differences.append((fact, text))
        if blocks:
            obstacles.append(text + why)

    for fact, words in _SETTINGS.items():
        if was.get(fact) != now.get(fact):
            differs(fact, f"{words} was {was.get(fact)} and is {now.get(fact)}")
    before, after = was.get("filters") or {}, now.get("filters") or {}
    for name in [name for name in was["names"] if name in now["names"] and before.get(name) != after.get(name)]:
        texts = ["; ".join(filters.get(name, ())) or "none" for filters in (before, after)]
        differs("filters", f"the filters of {name} were {texts[0]} and are {texts[1]}")
    if was["names"] != now["names"]:
        text = f"the sources were {', '.join(was['names'])} and are {', '.join(now['names'])}"
        differs("names", text, blocks=now["names"][:number] != was["names"], why=": new ones may only follow")
    (weights_before, groups_before), (weights, groups) = _weights(was), _weights(now)
    if (weights_before, groups_before) != (weights, groups):
        blocks = groups_before != groups or (weights if weights is None else weights[:number]) != weights_before
        texts = [f"{one}, of the groups {of}" if of else f"{one}" for one, of in map(_weights, (was, now))]
        differs("weights", f"the weights were {texts[0]} and are {texts[1]}", blocks=blocks)
    shards, shards_before = now.get("shards") or {}, was.get("shards") or {}
    if shards or shards_before:
        names = ", ".join(sorted({*shards, *shards_before}))
        obstacles.append(f"{names}: records cannot be appended where a source is streamed")
    rows = zip(was["names"], was["sizes"], was["digests"], was["records"], strict=True)
    old_facts = {name: facts for name, *facts in rows}
    rows = zip(now["names"], now["sizes"], now["digests"], now["records"], strict=True)
    for (name, *facts), dataset in zip(rows, stream.datasets, strict=True):
        if old_facts.get(name, facts) == facts:
            continue
        size, _, records = old_facts[name]
        if name in shards:
            had = f"{shards_before[name]:,} shards" if name in shards_before else "no shards"
            causes = "names, sizes or versions of shards, their order (mixed_shards), filters or the processor changed"
            differs("content", f"{name} had {had} and has {shards[name]:,}: {causes}")
            continue
        why = f": its first {size} records, or their processor, are not the old ones"
        blocks = len(dataset) < size or dataset.prefix_digest(size) != records
        if size != facts[0]:
            differs("sizes", f"{name} had {size} records and has {facts[0]}", blocks=blocks, why=why)
        else:
            what = "processor or what its filters keep" if name in after else "processor"
            differs("content", f"the records of {name}, their byte ranges or their {what} changed", blocks=blocks)
    divisions = (was.get("validation"), now.get("validation"))
    return DataChange(tuple(differences), tuple(obstacles), divisions if divisions[0] != divisions[1] else None)


def _weights(facts: Mapping[str, Any]) -> tuple[Any, Any]:
    """Weights of the sources and of the groups, as in the config: sources without one follow their sizes."""
    groups = facts.get("groups") or {}
    return groups.get("sources", facts["weights"]), groups.get("groups")


def continue_stream(
    loader: Mapping[str, Any], stream: SequenceStream, *, on_change: OnDataChange = "refuse"
) -> tuple[SequenceStream, Cursor]:
    """The stream in the phases of the run, and the cursor to continue at. Raises ``ResumeBlocked`` where the data
    differs and ``on_change`` does not allow it. ``loader``: the ``loader`` of a manifest; ``stream``: of the present
    config, with the run's ``sequences_per_epoch`` and first ``sequences_per_iteration``.
    """
    change, cursor = compare(loader, stream), Cursor.from_state_dict(loader["cursor"])
    phases = tuple(GlobalOrder.from_state_dict(state, seed=stream.order.seed) for state in loader["phases"])

    def new_phase(first: int, sequences: int | None) -> GlobalOrder:
        """Return a phase of the present data from epoch ``first`` on, with passes that no draw before has reached."""
        passes = phases[0].first_pass
        if earlier := [phase for phase in phases if phase.first_epoch < first]:
            order = earlier[-1]
            # additional draws of a mandatory group up to the end of the cursor's epoch: at most one beside each other
            extra = max(cursor.extra) + 2 * order.epoch_size * (first > cursor.epoch) if cursor.extra else 0
            passes = order.passes_before(first, extra=extra)
        for number in cursor.blocks[1::3]:  # a streamed source may have had more passes than its estimated size means
            passes = max(passes, number + _DRAWS_OF_A_WINDOW)
        return stream.new_phase(first, first_pass=passes, first_sequence=sequences)

    if not change:
        return stream.with_phases(phases), cursor
    if on_change == "restart":
        phase = new_phase(cursor.epoch + 1, cursor.sequences)
        return stream.with_phases((phase,)), Cursor(phase.first_epoch, 0, 0, cursor.sequences)
    if on_change == "append" and change.only_appended:
        in_epoch = (cursor.window, cursor.row) != (0, 0)
        first = cursor.epoch + in_epoch
        phase = new_phase(first, None if in_epoch else cursor.sequences)
        return stream.with_phases((*(one for one in phases if one.first_epoch < first), phase)), cursor
    if on_change == "append":
        raise ResumeBlocked(
            f"records cannot be appended to the data of the checkpoint: {'; '.join(change.obstacles)}",
            remedy="restore the old records and settings; --on-data-change restart begins a new epoch of the new data",
        )
    option = "--on-data-change append (finish this epoch with the old records, then use all) or "
    raise ResumeBlocked(
        f"the training data differs from that of the checkpoint: {change}",
        remedy=f"restore it, or choose {option * change.only_appended}--on-data-change restart (begin a new epoch of"
        " the new data)",
    )
