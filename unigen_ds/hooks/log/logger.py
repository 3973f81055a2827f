"""The record of a run: one line of ``metrics.jsonl`` per log interval, the same to the console and to the writers.

The losses of a line are those of its own update, over all ranks, so a resumed run can be compared with an
uninterrupted one line by line; where the data has several sources, they are there for each source, too. The price is
one small gloo reduction (of several sources two) and one device synchronisation, at log time only.

Lines with ``event`` are not those of an update: ``training_stats`` (``hooks/log/timer.py``), ``evaluation``
(``after_val``), ``resume`` (``hooks/log/journal.py``), and what others log (``LoggerHook.log``).
"""

from __future__ import annotations

import math
import resource
import statistics
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from annotated_types import Ge

from unigen_ds.config.registry import HOOKS, checked
from unigen_ds.core.batch import DEFAULT_WEIGHT, Batch
from unigen_ds.core.errors import ConfigError
from unigen_ds.data.datasets.dataset import source_names
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.hooks.log.by_source import SourceLosses
from unigen_ds.hooks.log.console import Console, make_console
from unigen_ds.hooks.log.epoch import EpochMeans
from unigen_ds.hooks.log.journal import Journal
from unigen_ds.hooks.log.timer import IterTimerHook, find_timer, statistics_over_ranks
from unigen_ds.system import dist
from unigen_ds.system.journals import METRICS_FILE
from unigen_ds.system.log import logger
from unigen_ds.tracking.sent import ROUNDING, ROUNDING_CUDA
from unigen_ds.tracking.writer import SafeWriter, Writer

if TYPE_CHECKING:
    from PIL.Image import Image

VERSION = 2
STATISTICS = "training_stats"
"""Event of the lines with the statistics over ranks."""
_NUMBERS = ("model", "tokenizer", "processor", "train_dataloader", "optim_wrapper", "loss_weights", "param_scheduler",
            "train_cfg", "backend", "val_dataloader", "randomness", "load_from", "load_cfg", "on_batch_change",
            "on_data_change")  # fmt: skip
"""Sections of a config that determine the numbers of a run."""


@HOOKS.register_module()
class LoggerHook(Hook):
    """Logs every ``interval`` iterations, and always the first and the last update of a process, and of an epoch the
    last, whose line has ``epoch_loss``, ``epoch_loss/<term>`` and ``epoch_tokens_per_second``.

    Args:
        interval: iterations or updates between lines.
        unit: what ``interval`` counts: iterations or updates, of the first start.
        statistics_interval: updates between lines with the statistics over ranks (``training_stats/*``).
        writers: those of ``visualizer.vis_backends`` of the config.
        run_name: ``visualizer.run_name``, filled in; None: the name of the work dir.
        log_metric_by_epoch: mmengine's; no effect: a line has update, iteration and epoch.
    """

    name = "logger"

    @checked()
    def __init__(
        self,
        *,
        interval: Annotated[int, Ge(1)] = 10,
        unit: Literal["iteration", "update"] = "iteration",
        statistics_interval: Annotated[int, Ge(1)] = 100,
        writers: Sequence[Writer] = (),
        run_name: str | None = None,
        log_metric_by_epoch: bool = False,
    ) -> None:
        self._interval, self._unit = interval, unit
        self._statistics_interval = statistics_interval
        self._log_metric_by_epoch = log_metric_by_epoch
        self._writers = [SafeWriter(writer, name) for writer, name in zip(writers, _names(writers), strict=True)]
        self._run_name = run_name
        self._journal = Journal(METRICS_FILE)
        self._console: Console | None = None
        self._last: UpdateResult | None = None
        self._logged_update: int | None = None
        self._norms: list[torch.Tensor | float] = []
        self._watch = GradNormWatch()
        self._epoch = EpochMeans()
        self._by_source = SourceLosses()

    def after_load_checkpoint(self, run: Run, manifest: Mapping[str, Any]) -> None:
        self._journal.resume(run, manifest)

    def before_train(self, run: Run) -> None:
        self._journal.start(run)
        self._epoch.start()
        self._by_source = SourceLosses(source_names(run.datasets))
        if self._log_metric_by_epoch:
            logger().warning("LoggerHook.log_metric_by_epoch has no effect: each line has update, iteration and epoch")
        if dist.is_main():
            self._console = make_console()
            name, identity = self._run_name or run.work_dir.name, _identity(run) if self._writers else {}
            for writer in self._writers:  # not earlier: a resume has restored the run ids by now
                writer.open(
                    work_dir=run.work_dir,
                    config=run.config,
                    updates=run.progress.updates,
                    name=name,
                    identity=identity,
                    rounding=ROUNDING_CUDA if torch.cuda.is_available() else ROUNDING,
                )

    def before_update(self, run: Run) -> None:
        self._by_source.begin()

    def after_train_iter(self, run: Run, index: int, batch: Batch) -> None:
        if run.iteration is not None:
            self._by_source.add(batch, run.iteration.each)

    def after_update(self, run: Run, result: UpdateResult) -> None:
        first = self._last is None
        self._last = result
        self._norms.append(result.grad_norm)
        self._epoch.add(result)
        ended = run.progress.epoch != run.previous.epoch  # before the checkpoint, which then begins with a new epoch
        of_epoch = self._epoch.finish(result.loss_weights) if ended else {}
        if first or ended or _crossed(run, self._interval, self._unit):
            self._log(run, result, of_epoch)
        if _crossed(run, self._statistics_interval, "update") and (timer := find_timer(run)):
            self.log(run, statistics_over_ranks(timer), update=run.progress.updates, event=STATISTICS)

    def before_save_checkpoint(self, run: Run, metrics: dict[str, float]) -> None:
        self._epoch.settle()
        if run.done:  # the last line is there before the last checkpoint
            self._log_last(run)
        self._read_norms(run)

    def after_train(self, run: Run) -> None:
        self._log_last(run)

    def _log_last(self, run: Run) -> None:
        if self._last is not None and self._logged_update != run.progress.updates:
            self._log(run, self._last)

    def after_val(self, run: Run, metrics: Mapping[str, float]) -> None:
        """The results of an evaluation at the present update, the same on all ranks."""
        self.log(run, metrics, update=run.progress.updates, event="evaluation")

    def log(
        self, run: Run, values: Mapping[str, Any], *, update: int, axis: str = "update", event: str = "log"
    ) -> None:
        """Log values of an ``update``, which may be an earlier one: a line of its own, and the writers.

        The line is ``{"event": event, "update": update, **values}``; names are kept as given. ``axis``: what trackers
        that have several axes draw the values against. May be called on every rank, with the values of rank 0. Not
        collective.
        """
        if not dist.is_main():
            return
        now = run.progress.updates
        self._journal.append(
            run, {"event": event, "update": update, **({} if now == update else {"at": now}), **values}
        )
        logger().info("%s at update %d: %s", event, update, _shown(event, values))
        for writer in self._writers:
            writer.write(values, update=update, event=event, at=now, axis=axis)

    def image(self, run: Run, name: str, picture: Image, *, update: int) -> None:
        """Show a picture in the writers that can. May be called on every rank, with that of rank 0. Not collective."""
        for writer in self._writers if dist.is_main() else ():
            writer.image(name, picture, update=update, at=run.progress.updates)

    def sync(self) -> None:
        self._journal.sync()
        for writer in self._writers:
            writer.sync()

    def after_run(self, run: Run) -> None:
        self._close()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._close()

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "run_ids": {w.name: w.run_id for w in self._writers if w.run_id is not None},
            "grad_norms": self._watch.state_dict(),
            "epoch": self._epoch.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != VERSION:
            raise ConfigError(f"state of LoggerHook has version {state.get('version')!r}", allowed=str(VERSION))
        for writer in self._writers:
            writer.run_id = state["run_ids"].get(writer.name)
        self._watch.load_state_dict(state["grad_norms"])
        self._epoch.load_state_dict(state["epoch"])

    def _log(self, run: Run, result: UpdateResult, of_epoch: Mapping[str, float] | None = None) -> None:
        """Collective. Reads the device: the only code outside the optimizer step that waits for it."""
        losses = {**global_losses(result), **self._by_source.means(sorted(result.counts))}
        timer = find_timer(run)
        rates = global_rates(timer) if timer else {}
        memory = global_memory()
        self._logged_update = run.progress.updates
        norms = self._read_norms(run)
        if not dist.is_main():
            return
        summary = timer.summary() if timer else {}
        record = {**_position(run), **_learning_rates(result), **losses}
        record |= {"grad_norm": norms[-1] if norms else float(result.grad_norm), "applied": result.applied}
        if result.loss_scale is not None:
            record["loss_scale"] = result.loss_scale
        rate_names = ("time/update", "time/data", "tokens_per_second", "samples_per_second")
        record |= {k: summary.get(k) for k in (*rate_names, "tokens_per_second_per_device")}
        record |= {**rates, **memory, **(of_epoch or {})}
        self._journal.append(run, record)
        if self._console is None:
            self._console = make_console()
        self._console.show(record, summary=summary, total_sequences=run.total_sequences)
        for writer in self._writers:
            writer.write({**record, **{k: v for k, v in summary.items() if k != "eta"}}, update=run.progress.updates)

    def _read_norms(self, run: Run) -> list[float]:
        """The gradient norms since the last call, on rank 0; a warning where one leaves the usual range."""
        tensors, self._norms = self._norms, []
        norms = list(map(float, tensors)) if dist.is_main() else []
        for sentence in self._watch.observe(norms, last_update=run.progress.updates):
            logger().warning(sentence)
        return norms

    def _close(self) -> None:
        self._journal.close()
        if self._console is not None:
            self._console.close()
            self._console = None
        if dist.is_main():
            for writer in self._writers:
                writer.close()


def _shown(event: str, values: Mapping[str, Any]) -> str:
    """The values in one line; of statistics over ranks the averages alone."""
    averages, note = f"{STATISTICS}/avg_", ""
    if event == STATISTICS:
        note = f"  ({METRICS_FILE} has all {len(values)} values)"
        values = {name.removeprefix(averages): value for name, value in values.items() if name.startswith(averages)}
    return "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items()) + note


def logger_of(run: Run) -> LoggerHook:
    """The run's logger: every run has one."""
    return next(hook for hook in run.hooks if isinstance(hook, LoggerHook))


def _names(writers: Sequence[Any]) -> list[str]:
    """The class of each writer; the second of a class and later ones with a number."""
    kinds = [type(writer).__name__ for writer in writers]
    seen = [kinds[: index + 1].count(kind) for index, kind in enumerate(kinds)]
    return [kind if number == 1 else f"{kind}-{number}" for kind, number in zip(kinds, seen, strict=True)]


def _crossed(run: Run, interval: int, unit: str) -> bool:
    return run.ruler.duration(interval, unit).every(run.progress, run.previous)


def _identity(run: Run) -> dict[str, Any]:
    """What determines the numbers of a run, apart from the code."""
    config = {name: run.config.get(name) for name in _NUMBERS}
    data = [dataset.fingerprint for dataset in run.datasets]
    return {"config": config, "geometry": asdict(run.geometry), "processes": dist.world_size(), "data": data}


def global_losses(result: UpdateResult) -> dict[str, float | None]:
    """``loss/<term>``: the mean over all targets of the update on all ranks; ``loss``: their weighted sum. Collective.

    A term without targets is None and left out of the total; the total is None when no term has any.
    """
    terms = sorted(result.counts)
    local = [float(result.local_sums[term]) if term in result.local_sums else 0.0 for term in terms]
    losses: dict[str, float | None] = {}
    total: float | None = None
    for term, value in zip(terms, dist.sum_floats(local), strict=True):
        count = result.counts[term]
        losses[f"loss/{term}"] = mean = value / count if count else None
        if mean is not None:
            total = (total or 0.0) + result.loss_weights.get(term, DEFAULT_WEIGHT) * mean
    return {"loss": total, **losses}


def global_rates(timer: IterTimerHook) -> dict[str, float]:
    """``tflops``: 10**12 operations a second of one device, mean over ranks; ``mfu``: that as a share of its peak.
    Collective. Each is left out where it is not known.
    """
    (total,) = dist.sum_floats([timer.flops_per_second()])
    tflops, peak = total / dist.world_size() / 1e12, timer.peak_tflops
    if not tflops:
        return {}
    return {"tflops": tflops, "mfu": tflops / peak} if peak else {"tflops": tflops}


def global_memory() -> dict[str, float]:
    """``memory``: the largest amount so far, MiB, of the process that has most: allocated on its CUDA device, else
    resident in the process. ``memory_reserved``, on CUDA alone: what the allocator has reserved on the device, which is
    what runs out. Collective.
    """
    if torch.cuda.is_available():
        peaks = [torch.cuda.max_memory_allocated() / 2**20, torch.cuda.max_memory_reserved() / 2**20]
    else:
        peaks = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)]
    return dict(zip(("memory", "memory_reserved"), dist.max_floats(peaks), strict=False))


def _position(run: Run) -> dict[str, float]:
    progress = run.progress
    return {
        "update": progress.updates,
        "iteration": progress.iteration(run.geometry),
        "epoch": progress.sequences / run.ruler.sequences_per_epoch,
        "sequences": progress.sequences,
        "samples": progress.samples,
        "tokens": progress.tokens,
    }


def _learning_rates(result: UpdateResult) -> dict[str, float]:
    """``lr`` is the first group's, ``lr/<name>`` every other's."""
    rates: dict[str, float] = {}
    for index, group in enumerate(result.hparams):
        rates["lr" if index == 0 else f"lr/{group['name']}"] = group["lr"]
    return rates


# An alarm on gradient norms that leave their usual range: exploding or vanishing.

WINDOW = 100
"""Updates whose median is what is usual."""
FEWEST = 20
"""Updates before the first alarm."""
FACTOR = 10.0


class GradNormWatch:
    """Compares each norm with the median of the last ``WINDOW`` before it. One warning when the range is left."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._outside = False

    def observe(self, norms: Sequence[float], *, last_update: int) -> Iterator[str]:
        """A sentence for each of ``norms``, those of the updates up to ``last_update``, that leaves the range.

        Norms that are not finite are the ``NanGuardHook``'s.
        """
        for update, norm in enumerate(norms, start=last_update - len(norms) + 1):
            if not math.isfinite(norm):
                continue
            usual = statistics.median(self._norms) if len(self._norms) >= FEWEST else None
            outside = usual is not None and not usual / FACTOR <= norm <= usual * FACTOR
            if outside and not self._outside:
                assert usual is not None
                kind = "exploding" if norm > usual else "vanishing"
                yield (
                    f"update {update}: the gradient norm is {norm:.4g}; usual is {usual / FACTOR:.4g} to"
                    f" {usual * FACTOR:.4g} ({usual:.4g} is the median of the last {len(self._norms)} updates). If it"
                    f" stays there, gradients are {kind}: look at the samples of this update (tools/inspect_data.py)"
                    " and at the learning rate."
                )
            self._outside = outside
            self._norms.append(norm)

    def state_dict(self) -> list[float]:
        return [*self._norms]

    def load_state_dict(self, state: Sequence[float]) -> None:
        self._norms = deque(map(float, state), maxlen=WINDOW)
