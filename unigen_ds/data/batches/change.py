"""Changed data on resume: what differs, and how the run continues: refused, with appended records, or with new data.

In: the data's identity of a checkpoint (``SequenceStream.identity`` and the cursor, plain values) and the stream of the
present config. Out: the stream in its phases, and the cursor to continue at. A later checkpoint keeps both, so no
choice is needed twice.

* ``append``: each source begins with its old records, unchanged (their digests are compared), and
  new sources follow the old ones. The epoch of the checkpoint is finished with the old records in
  the old order; from the next epoch on all are used.
* ``restart``: anything may differ. A new epoch of the new data begins; the rest of the old one is not used.

A new phase numbers its passes above all earlier ones, so no sample id (source:index:pass) comes twice in a run, with or
without weights. In a weighted mixture the sources are stopped in mid-pass: each begins a new pass with the new phase,
and what its unfinished pass had not reached comes with that one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unigen_ds.core.errors import ResumeBlocked
from unigen_ds.data.batches.stream import Cursor, Phase, SequenceStream

OnDataChange = Literal["refuse", "append", "restart"]
_DRAWS_OF_A_WINDOW = 1 << 24
"""More than a window has: of a streamed source, passes that may have begun in the window of a cursor."""


@dataclass(frozen=True)
class DataChange:
    """Differences, as sentences. False where the data is the same."""

    differences: tuple[tuple[str, str], ...] = ()
    """(fact, what it was and is); facts: format, seed, packing, seq_length, max_sample_tokens, validation, filters,
    overflow, names, sizes, weights, content."""
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
        if now is None:
            return False
        return was is None or was["seed"] != now["seed"] or was["share"] < now["share"]

    def __str__(self) -> str:
        return "; ".join(text for _, text in self.differences)


def compare(stored: Mapping[str, Any], stream: SequenceStream) -> DataChange:
    """How the stream's data differs from that of a checkpoint (its manifest's ``loader``)."""
    was, now = stored["facts"], stream.facts
    if stored["fingerprint"] == stream.fingerprint and was["records"] == now["records"]:
        return DataChange()  # the fingerprint alone is of samples of a large file: its records are compared as well
    settings = tuple(_settings(was, now))
    obstacles = (*(text for _, text in settings), *_not_appended(was, stream))
    divisions = (was.get("validation"), now.get("validation"))
    changed = divisions if divisions[0] != divisions[1] else None
    return DataChange((*settings, *_differences(was, now)), obstacles, changed)


_SETTINGS = {"format": "the format of the order", "seed": "randomness.seed", "packing": "the packing",
             "seq_length": "seq_length", "max_sample_tokens": "max_sample_tokens"}  # fmt: skip


def _settings(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for fact, words in _SETTINGS.items():
        if was.get(fact) != now.get(fact):
            yield fact, f"{words} was {was.get(fact)} and is {now.get(fact)}"
    if was.get("validation") != now.get("validation"):
        shares = [
            "none" if facts is None else f"{facts['share']:g} by seed {facts['seed']}"
            for facts in (was.get("validation"), now.get("validation"))
        ]
        yield "validation", f"the share of the records for validation was {shares[0]} and is {shares[1]}"
    before, after = was.get("filters") or {}, now.get("filters") or {}
    for name in [name for name in was["names"] if name in now["names"] and before.get(name) != after.get(name)]:
        yield "filters", f"the filters of {name} were {_filters(before.get(name))} and are {_filters(after.get(name))}"
    if was["overflow"] != now["overflow"]:
        yield "overflow", f"overflow was {_actions(was)} and is {_actions(now)}"


def _filters(settings: Sequence[str] | None) -> str:
    return "; ".join(settings) if settings else "none"


def _actions(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{kind}: {action}" for kind, action in facts["overflow"].items())


def _differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Those of the sources."""
    if was["names"] != now["names"]:
        yield "names", f"the sources were {', '.join(was['names'])} and are {', '.join(now['names'])}"
    if _weights(was) != _weights(now):
        yield "weights", f"the weights were {_weights_text(was)} and are {_weights_text(now)}"
    rows = zip(was["names"], was["sizes"], was["digests"], was["records"], strict=True)
    before = {name: facts for name, *facts in rows}
    streamed, streamed_before = now.get("shards") or {}, was.get("shards") or {}
    for name, *facts in zip(now["names"], now["sizes"], now["digests"], now["records"], strict=True):
        if name in streamed and name in before and before[name] != facts:
            had = f"{streamed_before[name]:,} shards" if name in streamed_before else "no shards"
            changed = "names, sizes or versions of shards, their order (mixed_shards), filters or the processor changed"
            yield "content", f"{name} had {had} and has {streamed[name]:,}: {changed}"
            continue
        (size, digest, record), (old_size, old_digest, old_record) = facts, before.get(name, facts)
        if size != old_size:
            yield "sizes", f"{name} had {old_size} records and has {size}"
        elif digest != old_digest or record != old_record:
            what = "processor or what its filters keep" if name in (now.get("filters") or {}) else "processor"
            yield "content", f"the records of {name}, their byte ranges or their {what} changed"


def _not_appended(was: Mapping[str, Any], stream: SequenceStream) -> Iterator[str]:
    """Every source that is not the old one with records appended."""
    number, (before, groups_before), (weights, groups) = len(was["names"]), _weights(was), _weights(stream.facts)
    if list(stream.names[:number]) != was["names"]:
        yield f"the sources were {', '.join(was['names'])} and are {', '.join(stream.names)}: new ones may only follow"
        return
    if groups_before != groups or (weights if weights is None else weights[:number]) != before:
        yield f"the weights were {_weights_text(was)} and are {_weights_text(stream.facts)}"
    if streamed := sorted({*(stream.facts.get("shards") or ()), *(was.get("shards") or ())}):
        yield f"{', '.join(streamed)}: records cannot be appended where a source is streamed"
        return
    for name, size, records, dataset in zip(was["names"], was["sizes"], was["records"], stream.datasets, strict=False):
        if len(dataset) < size:
            yield f"{name} was not only appended to: it had {size} records and has {len(dataset)}"
        elif dataset.prefix_digest(size) != records:
            yield f"{name} was not only appended to: its first {size} records, or their processor, are not the old ones"


def _weights(facts: Mapping[str, Any]) -> tuple[Any, Any]:
    """Of the sources and of the groups, as given: without weights in a group those of its sources follow its sizes."""
    groups = facts.get("groups") or {}
    return groups.get("sources", facts["weights"]), groups.get("groups")


def _weights_text(facts: Mapping[str, Any]) -> str:
    weights, groups = _weights(facts)
    return f"{weights}, of the groups {groups}" if groups else f"{weights}"


def stored_phases(stored: Mapping[str, Any]) -> tuple[Phase, ...]:
    """The phases of a checkpoint."""
    return tuple(Phase.from_state_dict(state) for state in stored["phases"])


def append(stored: Mapping[str, Any], stream: SequenceStream) -> tuple[Phase, ...]:
    """The phases of a run to whose data was appended. Raises ``ResumeBlocked`` where that is not all that changed."""
    if obstacles := compare(stored, stream).obstacles:
        raise ResumeBlocked(
            f"records cannot be appended to the data of the checkpoint: {'; '.join(obstacles)}",
            remedy="restore the old records and settings; --on-data-change restart begins a new epoch of the new data",
        )
    cursor, phases = Cursor.from_state_dict(stored["cursor"]), stored_phases(stored)
    begun = (cursor.window, cursor.row) != (0, 0)
    first = cursor.epoch + begun
    earlier = tuple(phase for phase in phases if phase.first_epoch < first)
    passes = phases[0].first_pass
    if earlier:
        order = earlier[-1].order(seed=stream.order.seed)
        passes = order.passes_before(first, extra=_most_extra(cursor, order.epoch_size, begun))
    phase = stream.new_phase(first, first_pass=passes, first_sequence=None if begun else cursor.sequences)
    return (*earlier, phase)


def _most_extra(cursor: Cursor, epoch_size: int, begun: bool) -> int:
    """Additional draws of a mandatory group up to the end of the cursor's epoch: no more than one beside each other."""
    return max(cursor.extra) + 2 * epoch_size * begun if cursor.extra else 0


def restart(stored: Mapping[str, Any], stream: SequenceStream) -> tuple[tuple[Phase, ...], Cursor]:
    """The only phase of a run that continues with other data, and the cursor at its beginning."""
    cursor, phases = Cursor.from_state_dict(stored["cursor"]), stored_phases(stored)
    first = cursor.epoch + 1
    order = [phase for phase in phases if phase.first_epoch < first][-1].order(seed=stored["seed"])
    passes = order.passes_before(first, extra=_most_extra(cursor, order.epoch_size, True))
    if cursor.blocks:  # a streamed source may have had more passes than its estimated size means
        passes = max(passes, *(reached + _DRAWS_OF_A_WINDOW for reached in cursor.blocks[1::3]))
    phase = stream.new_phase(first, first_pass=passes, first_sequence=cursor.sequences)
    return (phase,), Cursor(first, 0, 0, cursor.sequences)


def continued(
    stored: Mapping[str, Any], stream: SequenceStream, *, on_change: OnDataChange = "refuse"
) -> tuple[SequenceStream, Cursor]:
    """The stream in the phases of the run, and the cursor to continue at.

    Args:
        stored: the ``loader`` of a manifest: ``SequenceStream.identity`` and ``cursor``.
        stream: of the present config, built with the run's ``sequences_per_epoch`` and the
            ``sequences_per_iteration`` of its first start.
        on_change: what to do where the data differs. Without a difference it has no effect.

    Raises ``ResumeBlocked`` where the data differs and the choice does not allow it.
    """
    change, cursor = compare(stored, stream), Cursor.from_state_dict(stored["cursor"])
    if not change:
        return stream.with_phases(stored_phases(stored)), cursor
    if on_change == "append":
        return stream.with_phases(append(stored, stream)), cursor
    if on_change == "restart":
        phases, cursor = restart(stored, stream)
        return stream.with_phases(phases), cursor
    appended = "--on-data-change append (finish this epoch with the old records, then use all) or "
    raise ResumeBlocked(
        f"the training data differs from that of the checkpoint: {change}",
        remedy=f"restore it, or choose {appended if change.only_appended else ''}--on-data-change restart (begin a new"
        " epoch of the new data)",
    )
