"""The memory of a rank in every part of a run: the engine's own code on tensors without memory, in this process.

The real model, optimizer and engine run as in a training, on a process group of torch's that communicates with nobody
(its backend ``fake``), so any number of processes can be planned on one machine. Collectives return at once and their
results have no values. What follows from values (a gradient that is not finite, a branch on a number) is fixed: no
overflow, a norm of 0. ``torch.compile`` is left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from unigen_ds.backends.base import Backend
from unigen_ds.checks.memory.counted import CountedBytes
from unigen_ds.core.batch import Batch
from unigen_ds.core.progress import Geometry
from unigen_ds.core.shards import BUFFER, MASTER, Shard, ShardReader
from unigen_ds.hooks.evaluate.ema import EMAHook
from unigen_ds.optim.optimizer import construct, optimizer_class
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.runner.start import build

PHASES = ("load", "step", "evaluate", "save", "resume")


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank. What is on which side follows from the config's offload; see docs/planning.md."""

    built: int
    """Highest sum while the model is built, on the host, before the engine has it."""
    held: int
    """Between two updates: weights, copies, moments, average, and buffers that the engine keeps."""
    peak: Mapping[str, int]
    """Highest sum in each phase, device and host together."""
    device: Mapping[str, int]
    """The same without what offload holds in host memory."""
    host: int
    """What offload holds in host memory."""
    masters: int
    """fp32 weights of this rank that are trained; each moment and the average are as large."""
    largest: int
    """The largest tensor of this rank: what a save copies to the host at a time."""
    trainable: int
    """Parameters that are trained, on all ranks together."""
    unlike: Sequence[int] = ()
    """Ranks that may need more than rank 0: to be traced, too."""


def highest(ranks: Sequence[RankMemory]) -> RankMemory:
    """The most that any of the ranks needs, in every phase."""
    most: dict[str, Any] = {}
    for name, value in vars(ranks[0]).items():
        if isinstance(value, int):
            most[name] = max(getattr(one, name) for one in ranks)
        elif isinstance(value, Mapping):
            most[name] = {phase: max(getattr(one, name)[phase] for one in ranks) for phase in PHASES}
    return replace(ranks[0], **most)


def trace(
    settings: Settings,
    backend: Backend,
    processor: Any,
    batches: Sequence[Batch],
    *,
    geometry: Geometry,
    fake: bool = True,
) -> RankMemory:
    """Run the phases; of several processes in a ``fake_group``. ``fake``: without memory; else on one process alone."""
    counter = CountedBytes(fake=fake)
    optimizer_cfg = build.build_optimizer_config(settings)
    matrix = nn.Parameter(torch.zeros(2, 2))  # one update of it makes the state that has the shape of the weights
    optimizer = construct(
        optimizer_class(optimizer_cfg.type), [{"params": [matrix], "lr": 1.0}], optimizer_cfg.arguments
    )
    matrix.grad = torch.ones_like(matrix)
    optimizer.step()
    state = optimizer.state[matrix].items()
    kinds = sorted(kind for kind, value in state if isinstance(value, Tensor) and value.shape == matrix.shape)
    offloads = bool(backend.topology().get("offload") or backend.topology().get("cpu_offload"))
    averages = sum(issubclass(hook.cls, EMAHook) for hook in settings.custom_hooks)
    peak, device = dict.fromkeys(PHASES, 0), dict.fromkeys(PHASES, 0)

    def end(phase: str, *, moments: Sequence[str] = kinds, extra: Iterable[Tensor] = ()) -> None:
        """Note the peak; then the state that exists now is known to be on the host, where the engine offloads it."""
        peak[phase] = max(counter.peak, peak[phase])
        if offloads:
            on_host = [shard.data for shard in backend.master_shards()]
            on_host += [shard.data for kind in moments for shard in backend.moments(kind)]
            before = counter.host
            counter.on_host([*on_host, *extra])
            counter.device_peak -= counter.host - before  # it was there all the time
        device[phase] = max(counter.device_peak, device[phase])

    with counter, without_compile():
        build_peak = prepare(counter, settings, backend, processor)
        backend.load_tensors(_zeros(backend, ()), weights_only=True)
        end("load", moments=())  # the first update makes them
        copies = [[t.detach().clone() for t in backend.master_data()] for _ in range(averages)]
        end("load", moments=())
        totals = []
        # the first update makes the optimizer's state, the second meets it; so does the second micro-batch of an update
        # with the gradients of the first, and a third would meet nothing new
        first = [batches[0]] * (min(geometry.accumulative_counts, 2) - 1)
        for micro_batches in (batches[:1], *([*first, last] for last in batches)):
            counter.begin()
            one_update(backend, micro_batches, settings.term_weights)
            for copy in copies:
                torch._foreach_lerp_(copy, list(backend.master_data()), 0.5)
            end("step", extra=(t for copy in copies for t in copy))
            totals.append(counter.now)
        counter.begin()
        backend.model.eval()
        average = [Shard(s.name, s.shape, s.flat_start, s.data) for s in backend.master_shards()]
        with backend.swapped(average) if copies else nullcontext(), torch.no_grad():
            for batch in batches:
                backend.model(batch.map_tensors(Tensor.clone))
        del average
        end("evaluate")
        backend.model.train()
        counter.begin()
        files = backend.state_files()
        end("save")
        del files
        counter.begin()
        backend.load_tensors(_zeros(backend, kinds))
        end("resume")
        for phases in (peak, device):  # a resume begins with what a load needs
            phases["resume"] = max(phases["resume"], phases["load"])
        shards = [*backend.master_shards(), *backend.frozen_shards()]
        result = RankMemory(
            built=build_peak,
            held=max(totals[1:]),
            peak=peak,
            device=device,
            host=counter.host,
            masters=sum(shard.data.nbytes for shard in backend.master_shards()),
            largest=max((shard.data.nbytes for shard in shards), default=0),
            trainable=sum(backend.trainable_sizes().values()),
            unlike=backend.unlike_ranks(),
        )
        del shards
    return result


def prepare(counter: CountedBytes, settings: Settings, backend: Backend, processor: Any) -> int:
    """Build the model and pass it to the engine, inside of ``counter``. Returns the highest sum while it was built."""
    model: Any = build.build_model(settings, processor, seed=settings.seed, stream=True)
    counter.without_memory(model)
    counter.add_all([*model.parameters(), *model.buffers()])
    build_peak = counter.peak
    groups = build.build_groups(settings, model.named_parameters(remove_duplicate=False))
    build.prepare_engine(settings, backend, model, groups)
    return build_peak


def _zeros(backend: Backend, kinds: Sequence[str]) -> ShardReader:
    """A checkpoint of this model: values without memory."""
    reader, trainable = ShardReader(), backend.trainable_sizes()
    sizes: dict[str, Mapping[str, int]] = {
        **dict.fromkeys(kinds, trainable),
        MASTER: {**trainable, **backend.frozen_sizes()},
        BUFFER: {name: buffer.numel() for name, buffer in backend.buffers().items()},
    }
    for kind, of_kind in sizes.items():
        for name, numel in of_kind.items():
            reader.add(kind, name, 0, numel, lambda start, stop: torch.zeros((stop - start,)))
    return reader


def one_update(backend: Backend, micro_batches: Sequence[Batch], loss_weights: Mapping[str, float]) -> None:
    terms: Any = None
    for i, batch in enumerate(micro_batches):
        with backend.accumulate(last=i == len(micro_batches) - 1):
            terms = backend.model(batch.map_tensors(Tensor.clone))
            backend.backward(terms.weighted_sum(loss_weights, dict.fromkeys(terms.sums, 1.0)))
    del terms
    backend.step()


@contextmanager
def fake_group(world_size: int, *, rank: int = 0) -> Iterator[None]:
    """A process group of ``world_size`` processes, of which this one is ``rank`` and the others do not exist."""
    import torch.distributed as td
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with mock.patch.dict(os.environ, RANK=str(rank), LOCAL_RANK="0"):
        td.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            yield
        finally:
            td.destroy_process_group()


def without_compile() -> AbstractContextManager[object]:
    return mock.patch.object(nn.Module, "compile", lambda module, *args, **kwargs: None)
