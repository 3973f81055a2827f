"""The record of a run: one line of ``metrics.jsonl`` per log interval, the same to the console and to the writers.

The losses of a line are those of its own update, over all ranks, so a resumed run can be compared with an
uninterrupted one line by line. The price is one small gloo reduction and one device synchronisation, at log time only.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from annotated_types import Ge
from PIL.Image import Image

from unigen_ds.core import dist
from unigen_ds.core.batch import DEFAULT_WEIGHT
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.log import logger
from unigen_ds.core.metrics import METRICS_FILE
from unigen_ds.core.progress import Duration
from unigen_ds.core.registry import HOOKS, checked
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.hooks.console import Console, make_console
from unigen_ds.hooks.journal import Journal
from unigen_ds.hooks.timer import IterTimerHook, find_timer
from unigen_ds.tracking.writer import SafeWriter, Writer

VERSION = 1


@HOOKS.register_module()
class LoggerHook(Hook):
    """Logs every ``interval`` iterations, and always the first and the last update of a process.

    Args:
        interval: iterations between lines; the first and the last update of a process are always logged.
        writers: those of ``visualizer.vis_backends`` of the config.
        log_metric_by_epoch: mmengine's; no effect: a line has update, iteration and epoch.
    """

    name = "logger"

    @checked()
    def __init__(
        self,
        *,
        interval: Annotated[int, Ge(1)] = 10,
        writers: Sequence[Writer] = (),
        log_metric_by_epoch: bool = False,
    ) -> None:
        self._interval = interval
        self._log_metric_by_epoch = log_metric_by_epoch
        self._writers = [SafeWriter(writer) for writer in writers]
        self._journal = Journal(METRICS_FILE)
        self._console: Console | None = None
        self._last: UpdateResult | None = None
        self._logged_update: int | None = None

    def after_load_checkpoint(self, run: Run, manifest: Mapping[str, Any]) -> None:
        self._journal.resume(run, manifest)

    def before_train(self, run: Run) -> None:
        self._journal.start(run)
        if self._log_metric_by_epoch:
            logger().warning("LoggerHook.log_metric_by_epoch has no effect: each line has update, iteration and epoch")
        if dist.is_main():
            self._console = make_console()
            for writer in self._writers:  # not earlier: a resume has restored the run ids by now
                writer.open(work_dir=run.work_dir, config=run.config, updates=run.progress.updates)

    def after_update(self, run: Run, result: UpdateResult) -> None:
        first = self._last is None
        self._last = result
        every: Duration = run.ruler.duration(self._interval, "iteration")
        if first or every.every(run.progress, run.previous):
            self._log(run, result)

    def before_save_checkpoint(self, run: Run, metrics: dict[str, float]) -> None:
        if run.done:  # the last line is there before the last checkpoint
            self._log_last(run)

    def after_train(self, run: Run) -> None:
        self._log_last(run)

    def _log_last(self, run: Run) -> None:
        if self._last is not None and self._logged_update != run.progress.updates:
            self._log(run, self._last)

    def after_val(self, run: Run, metrics: Mapping[str, float]) -> None:
        self.log_metrics(run, metrics, update=run.progress.updates, event="evaluation")

    def log_metrics(self, run: Run, metrics: Mapping[str, Any], *, update: int, event: str = "val") -> None:
        """Log results of a validation, or of an evaluation of an earlier ``update`` that ended late.

        Writes ``{"event": "val", "update": n, **metrics}``; names are kept as given. Not collective.
        """
        self._journal.append(run, {"event": event, "update": update, **metrics})
        if dist.is_main():
            shown = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in metrics.items())
            logger().info("%s at update %d: %s", event, update, shown)
            for writer in self._writers:
                writer.write(metrics, update=update)

    def image(self, run: Run, name: str, picture: Image, *, update: int) -> None:
        """Give a picture to the writers that show some. On rank 0 alone; not collective."""
        for writer in self._writers:
            writer.image(name, picture, update=update)

    def log(
        self, run: Run, values: Mapping[str, Any], *, update: int, axis: str = "update", event: str = "log"
    ) -> None:
        """Log values of an ``update``, which may be an earlier one: a line of its own, and the writers."""
        self._journal.append(run, {"event": event, "update": update, **values})
        own = {} if axis == "update" else {axis: update}
        for writer in self._writers if dist.is_main() else ():
            writer.write({**values, **own}, update=update)

    def sync(self) -> None:
        self._journal.sync()

    def after_run(self, run: Run) -> None:
        self._close()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._close()

    def state_dict(self) -> dict[str, Any]:
        return {"version": VERSION, "run_ids": {w.name: w.run_id for w in self._writers if w.run_id is not None}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != VERSION:
            raise ConfigError(f"state of LoggerHook has version {state.get('version')!r}", allowed=str(VERSION))
        for writer in self._writers:
            writer.run_id = state["run_ids"].get(writer.name)

    def _log(self, run: Run, result: UpdateResult) -> None:
        """Collective. Reads the device: the only code outside the optimizer step that waits for it."""
        losses = global_losses(result)
        timer = find_timer(run)
        rates = global_rates(timer) if timer else {}
        memory = global_memory()
        self._logged_update = run.progress.updates
        if not dist.is_main():
            return
        summary = timer.summary() if timer else {}
        record = {**_position(run), **_learning_rates(result), **losses}
        record |= {"grad_norm": float(result.grad_norm), "applied": result.applied}
        record |= {k: summary.get(k) for k in ("time/update", "time/data", "tokens_per_second", "samples_per_second")}
        record |= {**rates, **memory}
        self._journal.append(run, record)
        if self._console is None:
            self._console = make_console()
        self._console.show(record, summary=summary, total_sequences=run.total_sequences)
        for writer in self._writers:
            writer.write({**record, **{k: v for k, v in summary.items() if k != "eta"}}, update=run.progress.updates)

    def _close(self) -> None:
        self._journal.close()
        if self._console is not None:
            self._console.close()
            self._console = None
        if dist.is_main():
            for writer in self._writers:
                writer.close()


def logger_of(run: Run) -> LoggerHook:
    """The run's logger."""
    return next(hook for hook in run.hooks if isinstance(hook, LoggerHook))


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
