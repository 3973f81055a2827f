"""The collective calls of all ranks over their first micro-batches: where two differ, the run would hang.

Every rank must call the same collectives, with the same sizes, in the same order. An engine that shards weights calls
them wherever a module runs, so a model that leaves a part out where a micro-batch has nothing for it (no image) calls
others than the ranks that have images. Here the engine of the config runs one update for each kind of micro-batch that
any rank has, on tensors without memory and a process group that communicates with nobody, and its calls are recorded.
What an engine does later because of earlier updates is seen only as far as it differs in the second one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unigen_ds.checks.dry_run.first_batches import FirstBatches, Kind, titles
from unigen_ds.checks.dry_run.known import Checked, Known, ok, problem, untraced, warning
from unigen_ds.checks.memory.counted import PLAIN, CountedBytes, in_processes
from unigen_ds.checks.memory.planned import preload
from unigen_ds.checks.memory.traced import copy_batch, fake_group, one_update, prepare, without_compile
from unigen_ds.core.batch import Batch
from unigen_ds.core.progress import Geometry
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.runner.start.build import build_optimizer_config
from unigen_ds.runner.start.stages import build_engine

_OF_GROUPS = ("c10d", "_c10d_functional")
"""Namespaces of torch's operators that are collective."""
_WARM_UP, _MOST_WARM_UP = 2, 8
"""Updates before calls are recorded: the first makes the optimizer's state, and engines learn the order of modules,
another one in the first update of a model of transformers. They end when two have the same calls."""
REMEDY = (
    "run every part in each micro-batch, also where it has no input, so that its weights are gathered and get a zero"
    " gradient (as the vision tower in unigen_ds/families/nanovlm/model.py)"
)


@dataclass(frozen=True)
class Call:
    """One collective call."""

    what: str
    """Operator, elements and dtype: the same on all ranks."""
    where: str
    """The innermost module that runs; empty between modules."""

    @property
    def text(self) -> str:
        return f"{self.what}{f' in {self.where}' if self.where else ''}"


class _Recorded(TorchDispatchMode):
    """A context that collects the collective calls inside of it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._names = {id(module): name or "the model" for name, module in model.named_modules()}
        self._running: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, Tensor) and kind not in PLAIN for kind in types):
            return NotImplemented  # a tensor of tensors (DTensor): its parts come here
        if function.namespace in _OF_GROUPS and function._schema.name.partition("::")[2] != "wait_tensor":
            tensors = [value for value in tree_leaves((args, kwargs or {})) if isinstance(value, Tensor)]
            sizes = ", ".join(f"{t.numel():,} {str(t.dtype).removeprefix('torch.')}" for t in tensors)
            name = function._schema.name.partition("::")[2].strip("_")
            self.calls.append(Call(f"{name}({sizes})", self._running[-1] if self._running else ""))
        return function(*args, **(kwargs or {}))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Also follows which module runs."""
        before = torch_module.register_module_forward_pre_hook(self._begins)
        after = torch_module.register_module_forward_hook(self._ends, always_call=True)
        try:
            with self:
                yield
        finally:
            before.remove()
            after.remove()

    def _begins(self, module: nn.Module, inputs: Any) -> None:
        self._running.append(self._names.get(id(module), type(module).__name__))

    def _ends(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._running:
            self._running.pop()


def record_calls(settings: Settings, processor: Any, batches: Sequence[Batch], geometry: Geometry) -> list[list[Call]]:
    """The collective calls of an update with each of ``batches``. For a process of its own."""
    backend, _ = build_engine(settings)
    counted = CountedBytes(fake=True)
    calls: list[list[Call]] = []

    def update(batch: Batch) -> list[Call]:
        recorded = _Recorded(backend.model)
        with recorded.recording():
            one_update(backend, [copy_batch(batch)], settings.term_weights)
        return recorded.calls

    with fake_group(geometry.dp_size), counted, without_compile():
        optimizer_cfg = build_optimizer_config(settings, fused=True)
        prepare(counted, settings, backend, processor, optimizer_cfg, geometry=geometry)
        for batch in batches:
            if not calls or first_difference(calls[-1], calls[0]):  # an engine has learnt another order
                last = [update(batches[0]) for _ in range(_WARM_UP)]
                while len(last) < _MOST_WARM_UP and first_difference(*last[-2:]):
                    last.append(update(batches[0]))
            calls.append(update(batch))
    return calls


def first_difference(one: Sequence[Call], other: Sequence[Call]) -> str | None:
    """The first call in which two sequences differ, as text; None: in none."""
    for number, (a, b) in enumerate(zip_longest(one, other, fillvalue=Call("none", "")), 1):
        if a.what != b.what:
            return f"call {number} of an update is {a.text} on the one, and {b.text} on the other"
    return None


def compare(batches: FirstBatches, calls: Mapping[Kind, Sequence[Sequence[Call]]]) -> Checked:
    """The first micro-batch in which two ranks differ is a problem; so is a kind whose batches differ.

    ``calls``: of each kind those of its examples.
    """
    step, title = batches.geometry.accumulative_counts, titles(calls)
    for i in range(len(batches.of_rank[0])):
        kinds = [(rank, one.kind) for rank, made in enumerate(batches.of_rank) if (one := made[i])]
        where = f"update {i // step + 1}, micro-batch {i % step + 1}"
        for rank, kind in kinds[1:]:
            first_rank, first = kinds[0]
            if kind.terms != first.terms:
                return problem(
                    f"{where}: target_counts() has the terms {', '.join(first.terms)} on rank {first_rank} and"
                    f" {', '.join(kind.terms)} on rank {rank}",
                    allowed="the same terms in every batch",
                    remedy="a term without targets has the count 0",
                )
            if difference := first_difference(calls[first][0], calls[kind][0]):
                return problem(
                    f"{where}: rank {first_rank} ({title[first]}) and rank {rank} ({title[kind]}) call different"
                    f" collectives, so both would wait for ever: {difference}",
                    remedy=REMEDY,
                )
    for kind, of_examples in calls.items():
        if difference := first_difference(of_examples[0], of_examples[-1]):
            return problem(
                f"micro-batches of one kind ({title[kind]}) call different collectives where one has more images or"
                f" tokens: {difference}",
                remedy="call collectives, and modules whose weights are sharded, as often in every micro-batch",
            )
    base, *others = calls
    for kind in others:
        if difference := first_difference(calls[base][0], calls[kind][0]):
            return warning(
                f"micro-batches {title[base]} and {title[kind]} call different collectives; no two ranks have both in"
                f" the same iteration yet: {difference}. Remedy: {REMEDY}."
            )
    number, names = len(calls[base][0]), "; ".join(title.values())
    return ok(f"the same {number} calls in every update of all ranks, for micro-batches {names}")


def check_collectives(known: Known) -> Iterator[Checked]:
    """The engine's calls for every kind of micro-batch that there is, compared in every iteration."""
    settings, batches, start = known.need("settings"), known.need("batches"), known.need("start")
    geometry = known.need("geometry")
    known.need("model")
    if geometry.dp_size == 1:
        yield ok("one process calls none")
        return
    examples = [batch for of_kind in batches.examples.values() for batch in of_kind]
    preload()
    task = partial(record_calls, settings, start.data.processor, examples, geometry)
    calls, why = in_processes({"calls": task}, jobs=1)["calls"]
    if calls is None:
        yield untraced(why)
        return
    in_order = iter(calls)
    yield compare(batches, {kind: [next(in_order) for _ in each] for kind, each in batches.examples.items()})
