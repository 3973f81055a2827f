"""What is wrong with the first micro-batches, and how the ranks differ in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unigen_ds.checks.dry_run.context import Known
from unigen_ds.checks.dry_run.first_batches import FirstBatches, MadeBatch, make_first_batches
from unigen_ds.checks.dry_run.result import Checked, ok, problem, warning
from unigen_ds.core.batch import check_counts
from unigen_ds.data.datasets.dataset import PlannedDataset
from unigen_ds.data.records.unusable import exceeds

_SHOWN = 8


def check_batches(known: Known) -> Iterator[Checked]:
    """Adds ``batches``: samples that cannot be read, ids that the model does not have, and how ranks differ."""
    settings, start, geometry = known.need("settings"), known.need("start"), known.need("loaded")
    found = make_first_batches(settings, start, known.model, geometry, known.asked.num_batches)
    for text, number in found.errors.most_common(_SHOWN):
        yield problem(f"{number} micro-batch{'es' * (number != 1)}: {text}")
    if len(found.errors) > _SHOWN:
        yield problem(f"and {len(found.errors) - _SHOWN} other errors")
    yield from _skipped_results(found, start.data.stream.datasets, settings.train_dataloader.max_skipped_fraction)
    if found.foreign_ids:
        yield problem(
            f"{len(found.foreign_ids)} micro-batches have token ids that the model's vocabulary does not have:"
            f" {'; '.join(found.foreign_ids[:3])}",
            remedy="use the tokenizer of the model",
        )
    if not found.made:
        return
    known.batches = found
    for one in found.made:
        check_counts(one.targets, of="Batch", declared=settings.term_weights)
    seq_length = settings.train_dataloader.seq_length * geometry.batch_size
    yield ok("\n".join(_rank_lines(found, seq_length)))
    yield from _kind_results(found)


def _skipped_results(found: FirstBatches, datasets: Sequence[PlannedDataset], limit: float) -> Iterator[Checked]:
    """Samples that padding replaces. Too many: of those that were made, or of all records, as headers show it."""
    if not found.skipped:
        return
    samples = sum(one.samples for one in found.made)
    named = "; ".join(f"{one['sample']}: {one['why']}" for one in found.skipped[:_SHOWN])
    more = f"; and {len(found.skipped) - _SHOWN} more" if len(found.skipped) > _SHOWN else ""
    text = f"{len(found.skipped)} of {samples} samples cannot be read: {named}{more}"
    records, unreadable = sum(map(len, datasets)), sum(int((one.counts().unreadable > 0).sum()) for one in datasets)
    if unreadable > limit * records or exceeds(len(found.skipped), samples, limit):
        yield problem(text, allowed=f"a share of {limit:g} (train_dataloader.max_skipped_fraction)")
    else:
        yield warning(text)


def _rank_lines(found: FirstBatches, seq_length: int) -> Iterator[str]:
    """All ranks together, then each, or the two with the fewest and the most tokens."""
    made, ranks = found.made, len(found.of_rank)
    how = f"by {found.processes} processes" if found.processes else "in this process"
    yield f"{len(made):,} micro-batches of {ranks} rank{'s' * (ranks != 1)}, {_numbers(made, seq_length)}"
    yield f"made {how}: {found.seconds_each:.3g} s of one process for each"
    by_rank = [[one for one in rank if one is not None] for rank in found.of_rank]
    shown = sorted(range(ranks), key=lambda rank: sum(one.tokens for one in by_rank[rank]))
    shown = sorted(shown) if ranks <= _SHOWN else [shown[0], shown[-1]]
    yield from (f"rank {rank}: {_numbers(by_rank[rank], seq_length)}" for rank in shown if ranks > 1)


def _numbers(made: Sequence[MadeBatch], seq_length: int) -> str:
    samples, tokens, images = (sum(getattr(one, name) for one in made) for name in ("samples", "tokens", "images"))
    terms = sorted({term for one in made for term, number in one.targets.items() if number})
    without = {"images": sum(not one.images for one in made)} if images else {}
    without |= {f"targets of {term}": sum(not one.targets.get(term) for one in made) for term in terms}
    lacks = "; ".join(f"{number} without {what}" for what, number in without.items() if number)
    used = tokens / max(seq_length * len(made), 1)
    return f"{samples:,} samples, {tokens:,} tokens ({used:.1%} of the length), {images:,} images" + (
        f"; {lacks}" if lacks else ""
    )


def _kind_results(found: FirstBatches) -> Iterator[Checked]:
    """How unevenly the ranks of an update are loaded."""
    updates = [*found.updates()]
    if len(found.of_rank) == 1 or not updates:
        return
    mixed = sum(len({rank[k].kind for rank in update}) > 1 for update in updates for k in range(len(update[0])))
    costs = [[sum(one.flops or one.tokens for one in rank) for rank in update] for update in updates]
    waits = sum(1 - sum(ranks) / (len(ranks) * max(ranks)) for ranks in costs if max(ranks)) / len(costs)
    iterations = sum(len(update[0]) for update in updates)
    text = (
        f"in {mixed} of {iterations} iterations the ranks have different kinds of micro-batches; ranks that have less"
        f" to compute wait for {waits:.1%} of the time"
    )
    yield (
        warning(f"{text}: packing=dict(...), or larger micro-batches, make them more equal")
        if waits > 0.25
        else ok(text)
    )
