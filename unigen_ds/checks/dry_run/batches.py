"""The first micro-batches of every rank, made by the loader's own code, and the collective calls of all ranks over
them: where two ranks differ, the run would hang.

Every rank must call the same collectives, with the same sizes, in the same order. An engine that shards weights calls
them wherever a module runs, so a model that leaves a part out where a micro-batch has nothing for it (no image) calls
others than the ranks that have images. Here the engine of the config runs one update for each kind of micro-batch that
any rank has, on tensors without memory and a process group that communicates with nobody, and its calls are recorded.
What an engine does later because of earlier updates is seen only as far as it differs in the second one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, zip_longest
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from unigen_ds.checks.dry_run.known import BatchKind, Checked, FirstBatches, Known, not_checked, ok, problem, warning
from unigen_ds.checks.memory.counted import PLAIN, CountedBytes, in_processes, tensors_of
from unigen_ds.checks.memory.planned import preload
from unigen_ds.checks.memory.traced import fake_group, one_update, prepare, without_compile
from unigen_ds.core.batch import Batch, check_counts
from unigen_ds.core.errors import UnigenError
from unigen_ds.core.progress import Geometry
from unigen_ds.data.batches.loader import BatchLoader, collate
from unigen_ds.data.records.unusable import exceeds
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.runner.start.build import build_optimizer_config
from unigen_ds.runner.start.stages import build_engine
from unigen_ds.system.machine import num_cores

_MOST_EXAMPLES = 8


def check_batches(known: Known) -> Iterator[Checked]:
    """Adds ``batches``: samples that cannot be read, and loss terms that are not those of the family."""
    settings, start, geometry = known.need("settings"), known.need("start"), known.need("geometry")
    stream, loading, size = start.data.stream, settings.train_dataloader, geometry.sequences_per_iteration
    number = max(known.options.num_batches, geometry.accumulative_counts)  # at least one update
    rows = [row for row, _ in islice(stream.rows(start.cursor), number * size)]
    of_ranks = [rows[i : i + size][rank :: geometry.dp_size] for i in range(0, len(rows), size)
                for rank in range(geometry.dp_size)]  # fmt: skip
    batches = FirstBatches(geometry.accumulative_counts, [[] for _ in range(geometry.dp_size)])
    make = partial(collate, datasets=stream.sources, processor=start.data.processor, names=stream.names,
                   seq_length=stream.sample_length)  # fmt: skip
    workers = min(loading.num_workers, num_cores())
    loader = BatchLoader(
        make, of_ranks, num_workers=workers, prefetch_factor=loading.prefetch_factor, timeout=loading.timeout
    )
    try:
        for i in range(len(of_ranks)):
            try:
                batch = loader.next()
                check_counts(batch.target_counts(), of="Batch", of_family=settings.term_weights)
                batches.add(i % geometry.dp_size, batch)
            except UnigenError as error:
                batches.errors.append(str(error))
                batches.kinds[i % geometry.dp_size].append(None)
    finally:
        loader.close()
    for text in [*dict.fromkeys(batches.errors)][:_MOST_EXAMPLES]:
        yield problem(f"{batches.errors.count(text)} of {len(of_ranks)} micro-batches: {text}")
    samples, num_skipped = batches.numbers["samples"], len(batches.skips)
    if num_skipped:
        examples = "; ".join(f"{one['sample']}: {one['why']}" for one in batches.skips[:_MOST_EXAMPLES])
        text = f"{num_skipped} of {samples} samples cannot be read: {examples}"
        limit = loading.max_skipped_fraction
        limit_text = f"a share of {limit:g} (train_dataloader.max_skipped_fraction)"
        yield problem(text, allowed=limit_text) if exceeds(num_skipped, samples, limit) else warning(text)
    if batches.examples:
        known.batches = batches
        share = batches.numbers["tokens"] / (loading.seq_length * geometry.batch_size * len(of_ranks))
        yield ok(
            f"{len(of_ranks):,} micro-batches of {geometry.dp_size} rank(s), {samples:,} samples,"
            f" {batches.numbers['tokens']:,} tokens ({share:.1%} of the length), {batches.numbers['images']:,} images"
        )


# ---- collective calls -----------------------------------------------------------------------------------------------

_WARM_UP, _MOST_WARM_UP = 2, 8
"""Updates before calls are recorded: the first makes the optimizer's state, and engines learn the order of modules,
another one in the first update of a model of transformers. They end when two have the same calls."""
REMEDY = (
    "run every part in each micro-batch, also where it has no input, so that its weights are gathered and get a zero"
    " gradient (as the vision tower in unigen_ds/families/nanovlm/model.py)"
)


class _RecordedCalls(TorchDispatchMode):
    """A context that collects the collective calls inside of it: operator, elements and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, Tensor) and kind not in PLAIN for kind in types):
            return NotImplemented  # a tensor of tensors (DTensor): its parts come here
        name = function._schema.name.partition("::")[2]
        if function.namespace in ("c10d", "_c10d_functional") and name != "wait_tensor":  # a collective
            tensors = tensors_of((args, kwargs or {}))
            sizes = ", ".join(f"{t.numel():,} {str(t.dtype).removeprefix('torch.')}" for t in tensors)
            self.calls.append(f"{name.strip('_')}({sizes})")
        return function(*args, **(kwargs or {}))


def record_calls(settings: Settings, processor: Any, batches: Sequence[Batch], geometry: Geometry) -> list[list[str]]:
    """The collective calls of an update with each of ``batches``. For a process of its own."""
    backend, _ = build_engine(settings)
    backend.check(geometry=geometry, optimizer_cfg=build_optimizer_config(settings))
    counter = CountedBytes(fake=True)
    calls: list[list[str]] = []

    def update(batch: Batch) -> list[str]:
        with _RecordedCalls() as recorder:
            one_update(backend, [batch.map_tensors(Tensor.clone)], settings.term_weights)
        return recorder.calls

    with fake_group(geometry.dp_size), counter, without_compile():
        prepare(counter, settings, backend, processor)
        for batch in batches:
            # one process calls none; an engine may have learnt another order
            if geometry.dp_size > 1 and (not calls or first_difference(calls[-1], calls[0])):
                last = [update(batches[0]) for _ in range(_WARM_UP)]
                while len(last) < _MOST_WARM_UP and first_difference(*last[-2:]):
                    last.append(update(batches[0]))
            calls.append(update(batch))
    return calls


def first_difference(one: Sequence[str], other: Sequence[str]) -> str | None:
    """The first call in which two sequences differ, as text; None: in none."""
    for number, (a, b) in enumerate(zip_longest(one, other, fillvalue="none"), 1):
        if a != b:
            return f"call {number} of an update is {a} on the one, and {b} on the other"
    return None


def compare_ranks(batches: FirstBatches, calls: Mapping[BatchKind, Sequence[str]]) -> Checked:
    """A problem where two ranks differ in an iteration; a warning where kinds differ that did not meet yet."""
    step = batches.accumulative_counts
    titles = {kind: f"without {', '.join(kind)}" if kind else "with all parts" for kind in calls}
    for i, column in enumerate(zip(*batches.kinds, strict=True)):
        of_ranks = [(rank, kind) for rank, kind in enumerate(column) if kind is not None]
        for rank, kind in of_ranks[1:]:
            first_rank, first = of_ranks[0]
            if difference := first_difference(calls[first], calls[kind]):
                return problem(
                    f"update {i // step + 1}, micro-batch {i % step + 1}: rank {first_rank} ({titles[first]}) and rank"
                    f" {rank} ({titles[kind]}) call different collectives, so both would wait for ever: {difference}",
                    remedy=REMEDY,
                )
    base = next(iter(calls.values()))
    for kind, of_kind in calls.items():
        if difference := first_difference(base, of_kind):
            return warning(
                f"micro-batches {titles[kind]} call other collectives; no two ranks have both kinds in the same"
                f" iteration yet: {difference}. Remedy: {REMEDY}."
            )
    return ok(
        f"the same {len(base)} calls in every update of all ranks, for micro-batches " + "; ".join(titles.values())
    )


def check_collectives(known: Known) -> Iterator[Checked]:
    """The engine's calls for every kind of micro-batch that there is, compared in every iteration."""
    settings, batches, start = known.need("settings"), known.need("batches"), known.need("start")
    geometry = known.need("geometry")
    known.need("model")  # of one that cannot be built the problem is listed
    preload()
    task = partial(record_calls, settings, start.data.processor, [*batches.examples.values()], geometry)
    ((_, (calls, why)),) = in_processes({"calls": task}, jobs=1)
    without = "DynamicOutputShape|DataDependentOutput|UnsupportedOperator|UnsupportedFakeTensor"
    if calls is None and re.search(without, str(why)):
        yield not_checked(f"an update cannot be traced without memory: {why}")
    elif calls is None:
        yield problem(f"an update fails: {why}")
    elif geometry.dp_size == 1:
        yield ok("one process calls none; an update of each kind of micro-batch can be computed")
    else:
        yield compare_ranks(batches, dict(zip(batches.examples, calls, strict=True)))
