"""The record of a run: one line of ``metrics.jsonl`` per log interval, the same to the console and to the writers.

The losses of a line are those of its own update, over all ranks, so a resumed run can be compared with an
uninterrupted one line by line; where the data has several sources, they are there for each source, too. The price is
one small gloo reduction (of several sources two) and one device synchronisation, at log time only.

Lines with ``event`` are not those of an update: ``training_stats`` (``hooks/log/timer.py``), ``evaluation``
(``after_val``), ``resume`` (``hooks/log/journal.py``), and what others log (``LoggerHook.log``).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from annotated_types import Ge
from rich.console import Console as RichOutput
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichBar

from unigen_ds.config.registry import HOOKS, checked
from unigen_ds.core.batch import Batch
from unigen_ds.data.datasets.dataset import source_names
from unigen_ds.hooks.base import Run, UpdateResult
from unigen_ds.hooks.log.journal import JournalHook
from unigen_ds.hooks.log.measurements import (
    EpochMeans,
    GradNormWatch,
    SourceLosses,
    global_losses,
    global_memory,
    global_rates,
)
from unigen_ds.hooks.log.timer import find_timer, statistics_over_ranks
from unigen_ds.system import dist
from unigen_ds.system.journals import METRICS_FILE
from unigen_ds.system.log import logger
from unigen_ds.tracking.writer import SafeWriter, Writer

if TYPE_CHECKING:
    from PIL.Image import Image

VERSION = 2
STATISTICS = "training_stats"
"""Event of the lines with the statistics over ranks."""
_NUMBERS = ("model", "tokenizer", "processor", "train_dataloader", "optim_wrapper", "loss_weights", "param_scheduler",
            "train_cfg", "val_dataloader", "randomness", "load_from", "load_cfg", "on_batch_change",
            "on_data_change")  # fmt: skip
"""Sections of a config that determine the numbers of a run."""
_WITHOUT_EFFECT = ("batch_size", "global_batch_size", "accumulative_counts", "num_workers", "prefetch_factor",
                   "pin_memory", "timeout", "max_skipped_fraction")  # fmt: skip
"""Keys of them that change no number beyond rounding; the effective batch is compared by itself."""


@HOOKS.register_module()
class LoggerHook(JournalHook):
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
    kept = ("run_ids", "grad_norms", "epoch")

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
        super().__init__(METRICS_FILE)
        self._interval, self._unit = interval, unit
        self._statistics_interval = statistics_interval
        self._log_metric_by_epoch = log_metric_by_epoch
        self._writers = [SafeWriter(writer, name) for writer, name in zip(writers, _names(writers), strict=True)]
        self._run_name = run_name
        self._console = Console()
        self._last: UpdateResult | None = None
        self._logged_update: int | None = None
        self._norms: list[torch.Tensor | float] = []
        self.run_ids: dict[str, str] = {}
        """Id of the run in each tracker, by the writer's name."""
        self.grad_norms: list[float] = []
        self.epoch: dict[str, dict[str, float]] = {"sums": {}, "counts": {}}
        self._watch, self._epoch = GradNormWatch(self.grad_norms), EpochMeans(self.epoch)
        self._by_source = SourceLosses()

    def before_train(self, run: Run) -> None:
        super().before_train(run)
        self._watch, self._epoch = GradNormWatch(self.grad_norms), EpochMeans(self.epoch)
        self._by_source = SourceLosses(source_names(run.datasets))
        if self._log_metric_by_epoch:
            logger().warning("LoggerHook.log_metric_by_epoch has no effect: each line has update, iteration and epoch")
        if dist.is_main():
            name, identity = self._run_name or run.work_dir.name, _identity(run) if self._writers else {}
            for writer in self._writers:  # not earlier: a resume has restored the run ids by now
                writer.run_id = self.run_ids.get(writer.name)
                writer.open(
                    work_dir=run.work_dir,
                    config=run.config,
                    updates=run.progress.updates,
                    name=name,
                    identity=identity,
                )
            self.run_ids = {writer.name: writer.run_id for writer in self._writers if writer.run_id is not None}

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
        super().sync()
        for writer in self._writers:
            writer.sync()

    def close(self) -> None:
        super().close()
        self._console.close()
        for writer in self._writers if dist.is_main() else ():
            writer.close()

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
    """What determines the numbers of a run, apart from the code and from rounding: no engine and no process count."""
    sections = {name: run.config.get(name) for name in _NUMBERS}
    for name, section in sections.items():
        if isinstance(section, Mapping):
            sections[name] = {key: value for key, value in section.items() if key not in _WITHOUT_EFFECT}
    data = [dataset.fingerprint for dataset in run.datasets]
    return {"config": sections, "global_batch_size": run.geometry.global_batch_size, "data": data}


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


# What the user sees: one live progress line on a terminal, plain log lines everywhere else.


def loss_names(record: Mapping[str, Any]) -> list[str]:
    """``loss``, and ``loss/<term>`` of each term, whatever the family calls them."""
    return [name for name in record if name == "loss" or (name.startswith("loss/") and name.count("/") == 1)]


def progress_line(record: Mapping[str, Any], *, summary: Mapping[str, float]) -> str:
    """Losses, learning rate, gradient norm, rates, time shares, time to go and MFU, in one line."""
    parts = [f"update {record['update']}", f"iteration {record['iteration']}", f"epoch {record['epoch']:.3f}"]
    parts += [
        f"{name} {record[name]:.4g}"
        for name in (*loss_names(record), "lr", "grad_norm")
        if record.get(name) is not None
    ]
    if not record["applied"]:
        parts.append("NOT APPLIED")
    if summary:
        parts.append(f"{summary['tokens_per_second']:.0f} tokens/s")
        shares = (("data", "data"), ("fwd+bwd", "forward_backward"), ("comm", "communication"), ("step", "step"),
                  ("other", "other"))  # fmt: skip
        parts.append("time " + " ".join(f"{label} {summary[f'share/{key}']:.0%}" for label, key in shares))
        if summary["eta"] < float("inf"):
            parts.append(f"ETA {timedelta(seconds=round(summary['eta']))}")
    if "mfu" in record:
        parts.append(f"MFU {record['mfu']:.1%}")
    parts.append(f"memory {record['memory']:.0f} MiB")
    return "  ".join(parts)


class Console:
    """A bar over the sequences of the run with a description beside it, where standard error is a terminal; else a log
    line for each record."""

    def __init__(self) -> None:
        self._bar: RichBar | None = None

    def show(self, record: Mapping[str, Any], *, summary: Mapping[str, float], total_sequences: float) -> None:
        """Show ``record``, a line of ``metrics.jsonl``; ``summary`` is the timer's."""
        text = progress_line(record, summary=summary)
        if not sys.stderr.isatty():
            logger().info("%s", text)
            return
        if self._bar is None:
            columns = TextColumn("{task.percentage:>5.1f} %"), BarColumn(bar_width=20), TextColumn("{task.description}")
            self._bar = RichBar(*columns, console=RichOutput(stderr=True), auto_refresh=False)
            self._bar.start()
            self._bar.add_task("", total=None)
        self._bar.update(
            self._bar.task_ids[0],
            total=total_sequences if total_sequences < float("inf") else None,
            completed=record["sequences"],
            description=text,
            refresh=True,
        )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
