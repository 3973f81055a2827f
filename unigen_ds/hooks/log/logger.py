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
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from unigen_ds.config.registry import HOOKS, checked
from unigen_ds.core.batch import DEFAULT_WEIGHT, Batch, to_device
from unigen_ds.data.datasets.dataset import source_names
from unigen_ds.hooks.base import Run, UpdateResult, is_due
from unigen_ds.hooks.log.journal import JournalHook
from unigen_ds.hooks.log.timer import IterTimerHook
from unigen_ds.system import dist
from unigen_ds.system.journals import METRICS_FILE
from unigen_ds.system.log import logger
from unigen_ds.tracking.writer import SafeWriter, Writer

if TYPE_CHECKING:
    from PIL.Image import Image

STATISTICS = "training_stats"
"""Event of the lines with the statistics over ranks."""
WINDOW = 100
"""Updates whose median gradient norm is what is usual."""
FEWEST = 20
"""Updates before the first alarm."""
FACTOR = 10.0
_NUMBERS = ("model", "tokenizer", "processor", "train_dataloader", "optim_wrapper", "loss_weights", "param_scheduler",
            "train_cfg", "val_dataloader", "randomness", "load_from", "load_cfg", "on_batch_change",
            "on_data_change")  # fmt: skip
"""Sections of a config that determine the numbers of a run."""
_WITHOUT_EFFECT = ("batch_size", "global_batch_size", "accumulative_counts", "num_workers", "prefetch_factor",
                   "pin_memory", "timeout", "max_skipped_fraction", "max_time")  # fmt: skip
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
    """

    name = "logger"
    state_attributes = ("run_ids", "grad_norms", "epoch")
    _timer: IterTimerHook | None = None

    @checked()
    def __init__(
        self,
        *,
        interval: Annotated[int, Ge(1)] = 10,
        unit: Literal["iteration", "update"] = "iteration",
        statistics_interval: Annotated[int, Ge(1)] = 100,
        writers: Sequence[Writer] = (),
        run_name: str | None = None,
    ) -> None:
        super().__init__(METRICS_FILE)
        self._interval, self._unit, self._statistics_interval = interval, unit, statistics_interval
        kinds = [type(writer).__name__ for writer in writers]
        self._writers = [
            SafeWriter(writer, f"{kind}-{kinds[:i].count(kind) + 1}" if kind in kinds[:i] else kind)
            for i, (writer, kind) in enumerate(zip(writers, kinds, strict=True))
        ]
        self._run_name = run_name
        self._last: UpdateResult | None = None
        self._logged_update: int | None = None
        self._norms: list[Tensor | float] = []
        """Gradient norms that are not read from the device yet."""
        self._norm_outside = False
        self._local_sums: dict[str, Tensor] = {}
        """This rank's sum of each loss term of the epoch that is not in ``epoch`` yet, on the device."""
        self._by_source = SourceLosses()
        self._epoch_tokens, self._epoch_since = 0, time.perf_counter()
        self.run_ids: dict[str, str] = {}
        """Id of the run in each tracker, by the writer's name."""
        self.grad_norms: list[float] = []
        """The last ``WINDOW`` of them."""
        self.epoch: dict[str, dict[str, float]] = {"sums": {}, "counts": {}}
        """Sums of loss terms since the epoch began, over all ranks. Without times: a resumed run has the same state."""

    def before_train(self, run: Run) -> None:
        super().before_train(run)
        self._epoch_since = time.perf_counter()
        self._by_source = SourceLosses(source_names(run.datasets))
        self._timer = next((hook for hook in run.hooks if isinstance(hook, IterTimerHook)), None)
        if dist.is_main() and self._writers:
            identity = _identity(run)
            for writer in self._writers:  # not earlier: a resume has restored the run ids by now
                writer.run_id = self.run_ids.get(writer.name)
                writer.open(work_dir=run.work_dir, config=run.config, updates=run.progress.updates,
                            name=self._run_name or run.work_dir.name, identity=identity)  # fmt: skip
            self.run_ids = {writer.name: writer.run_id for writer in self._writers if writer.run_id is not None}

    def after_train_iter(self, run: Run, index: int, batch: Batch) -> None:
        if run.iteration is not None:
            self._by_source.add(batch, run.iteration.each, begins=index == 0)

    def after_update(self, run: Run, result: UpdateResult) -> None:
        first, self._last = self._last is None, result
        self._norms.append(result.grad_norm)
        if result.applied:  # the sums of a skipped update may not be finite
            for name, value in result.local_sums.items():
                self._local_sums[name] = self._local_sums[name] + value if name in self._local_sums else value.double()
            for name, count in result.counts.items():
                self.epoch["counts"][name] = self.epoch["counts"].get(name, 0.0) + count
        self._epoch_tokens += result.tokens
        epoch_ended = run.progress.epoch != run.previous.epoch  # before the checkpoint, which begins with a new one
        of_epoch = self._end_epoch(result.loss_weights) if epoch_ended else {}
        if first or epoch_ended or is_due(run, self._interval, self._unit):
            self._log(run, result, of_epoch)
        if self._timer and is_due(run, self._statistics_interval, "update"):
            self.log(run, self._timer.statistics_over_ranks(), update=run.progress.updates, event=STATISTICS)

    def before_save_checkpoint(self, run: Run, metrics: dict[str, float]) -> None:
        self._sum_over_ranks()
        if run.done:  # the last line is there before the last checkpoint
            self.after_train(run)
        self._read_norms(run)

    def after_train(self, run: Run) -> None:
        if self._last is not None and self._logged_update != run.progress.updates:
            self._log(run, self._last, {})

    def after_val(self, run: Run, metrics: Mapping[str, float]) -> None:
        self.log(run, metrics, update=run.progress.updates, event="evaluation")

    def log(
        self, run: Run, values: Mapping[str, Any], *, update: int, axis: str = "update", event: str = "log"
    ) -> None:
        """Log values of an ``update``, which may be an earlier one: as a line ``{"event": event, "update": update,
        **values}``, and to the writers. ``axis``: what trackers that have several axes draw them against. May be called
        on every rank, with the values of rank 0. Not collective.
        """
        if not dist.is_main():
            return
        now = run.progress.updates
        self.append(run, {"event": event, "update": update, **({} if now == update else {"at": now}), **values})
        averages, note = values, ""
        if event == STATISTICS:
            averages = {k.removeprefix(f"{STATISTICS}/avg_"): v for k, v in values.items() if "/avg_" in k}
            note = f"  ({METRICS_FILE} has all {len(values)} values)"
        text = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in averages.items())
        logger().info("%s at update %d: %s%s", event, update, text, note)
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
        for writer in self._writers if dist.is_main() else ():
            writer.close()

    def _log(self, run: Run, result: UpdateResult, of_epoch: Mapping[str, float]) -> None:
        """Collective. Reads the device: the only code outside the optimizer step that waits for it."""
        losses = {**global_losses(result), **self._by_source.means(sorted(result.counts))}
        timer = self._timer
        rates = timer.flops_over_ranks() if timer else {}
        memory = global_memory()
        progress = run.progress
        self._logged_update = progress.updates
        norms = self._read_norms(run)
        if not dist.is_main():
            return
        summary = timer.summary() if timer else {}
        rate_names = ("time/update", "time/data", "tokens_per_second", "samples_per_second")
        record: dict[str, Any] = {
            "update": progress.updates,
            "iteration": progress.iteration(run.geometry),
            "epoch": progress.sequences / run.ruler.sequences_per_epoch,
            "sequences": progress.sequences,
            "samples": progress.samples,
            "tokens": progress.tokens,
            **{f"lr/{group['name']}" if i else "lr": group["lr"] for i, group in enumerate(result.hparams)},
            **losses,
            "grad_norm": norms[-1] if norms else float(result.grad_norm),
            "applied": result.applied,
            **({} if result.loss_scale is None else {"loss_scale": result.loss_scale}),
            **{name: summary.get(name) for name in (*rate_names, "tokens_per_second_per_device")},
            **rates,
            **memory,
            **of_epoch,
        }
        self.append(run, record)
        logger().info("%s", progress_line(record, summary=summary))
        for writer in self._writers:
            writer.write({**record, **{k: v for k, v in summary.items() if k != "eta"}}, update=progress.updates)

    def _read_norms(self, run: Run) -> list[float]:
        """The gradient norms since the last call, on rank 0; a warning where one leaves the usual range."""
        tensors, self._norms = self._norms, []
        norms = list(map(float, tensors)) if dist.is_main() else []
        for update, norm in enumerate(norms, start=run.progress.updates - len(norms) + 1):
            if not math.isfinite(norm):  # the NanGuardHook's
                continue
            usual = statistics.median(self.grad_norms) if len(self.grad_norms) >= FEWEST else norm
            outside = not usual / FACTOR <= norm <= usual * FACTOR
            if outside and not self._norm_outside:
                logger().warning(
                    "update %d: the gradient norm is %.4g; usual is %.4g to %.4g (%.4g is the median of the last %d"
                    " updates). If it stays there, gradients are %s: look at the samples of this update"
                    " (tools/replay.py WORK_DIR --update N) and at the learning rate.",
                    update, norm, usual / FACTOR, usual * FACTOR, usual, len(self.grad_norms),
                    "exploding" if norm > usual else "vanishing",
                )  # fmt: skip
            self._norm_outside = outside
            self.grad_norms = [*self.grad_norms, norm][-WINDOW:]
        return norms

    def _sum_over_ranks(self) -> None:
        """Add the sums that are on the device to those of the epoch. Collective."""
        names, sums = sorted(self.epoch["counts"]), self.epoch["sums"]
        local = [float(self._local_sums.get(name, 0.0)) for name in names]
        for name, value in zip(names, dist.sum_floats(local), strict=True):
            sums[name] = sums.get(name, 0.0) + value
        self._local_sums = {}

    def _end_epoch(self, loss_weights: Mapping[str, float]) -> dict[str, float]:
        """Return the values of the epoch, means over all its targets, and begin the next. Collective."""
        self._sum_over_ranks()
        sums, counts = self.epoch["sums"], self.epoch["counts"]
        means = {name: sums.get(name, 0.0) / count for name, count in sorted(counts.items()) if count}
        values = {f"epoch_loss/{name}": mean for name, mean in means.items()}
        if means:
            values["epoch_loss"] = sum(loss_weights.get(n, DEFAULT_WEIGHT) * mean for n, mean in means.items())
        now = time.perf_counter()
        values["epoch_tokens_per_second"] = self._epoch_tokens / (now - self._epoch_since)
        self.epoch, self._epoch_tokens, self._epoch_since = {"sums": {}, "counts": {}}, 0, now
        return values


def logger_of(run: Run) -> LoggerHook:
    """The run's logger: every run has one."""
    return next(hook for hook in run.hooks if isinstance(hook, LoggerHook))


def _identity(run: Run) -> dict[str, Any]:
    """What determines the numbers of a run, apart from the code and from rounding: no engine and no process count."""
    sections = {name: run.config.get(name) for name in _NUMBERS}
    for name, section in sections.items():
        if isinstance(section, Mapping):
            sections[name] = {key: value for key, value in section.items() if key not in _WITHOUT_EFFECT}
    data = [dataset.fingerprint for dataset in run.datasets]
    skips = {"skips": [*map(str, run.skips)]} if run.skips else {}
    return {"config": sections, "global_batch_size": run.geometry.global_batch_size, "data": data, **skips}


def progress_line(record: Mapping[str, Any], *, summary: Mapping[str, float]) -> str:
    """What the user sees of a line: losses, learning rate, gradient norm, rates, time shares, time to go and MFU."""
    parts = [f"update {record['update']}", f"iteration {record['iteration']}", f"epoch {record['epoch']:.3f}"]
    losses = [name for name in record if name == "loss" or name.startswith("loss/")]
    parts += [f"{k} {record[k]:.4g}" for k in (*losses, "lr", "grad_norm") if record.get(k) is not None]
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


# ---- what a line has, over all ranks; sums are added up on the device and read where a line is logged ----


def global_losses(result: UpdateResult) -> dict[str, float | None]:
    """``loss/<term>``: the mean over all targets of the update on all ranks, None where there are none; ``loss``: the
    weighted sum of the others, if any. Collective."""
    return losses_of_updates([result])[0]


def losses_of_updates(results: Sequence[UpdateResult]) -> list[dict[str, float | None]]:
    """``global_losses`` of several updates by one sum over the ranks."""
    pairs = [(number, term) for number, result in enumerate(results) for term in sorted(result.counts)]
    local = [float(results[number].local_sums.get(term, 0.0)) for number, term in pairs]
    means: list[dict[str, float | None]] = [{"loss": None} for _ in results]
    for (number, term), value in zip(pairs, dist.sum_floats(local), strict=True):
        result, losses = results[number], means[number]
        count = result.counts[term]
        losses[f"loss/{term}"] = mean = value / count if count else None
        if mean is not None:
            losses["loss"] = (losses["loss"] or 0.0) + result.loss_weights.get(term, DEFAULT_WEIGHT) * mean
    return means


def global_memory() -> dict[str, float]:
    """``memory``: the largest amount so far, MiB, of the process that has most, allocated on its CUDA device, else
    resident; on CUDA ``memory_reserved``: what the allocator has reserved, which is what runs out. Collective."""
    if torch.cuda.is_available():
        peaks = [torch.cuda.max_memory_allocated() / 2**20, torch.cuda.max_memory_reserved() / 2**20]
    else:
        peaks = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)]
    most = map(max, zip(*dist.gather_objects(peaks), strict=True))
    return dict(zip(("memory", "memory_reserved"), most, strict=False))


# ---- the losses of each source of the training data ------------------------------------------------------------------


class SourceLosses:
    """The mean loss over the targets of each source in an update, of all ranks. The losses of the sources, weighted by
    their targets, are the loss of the term. Of one source it does nothing: its losses are those of the update."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = tuple(names)
        self._parts: dict[str, tuple[Tensor, Tensor]] = {}
        """Term -> by source, the sum of the losses on the device, and of the weights of the targets on the CPU."""

    def add(self, batch: Batch, each: Mapping[str, Tensor], *, begins: bool) -> None:
        """A micro-batch of this rank. ``batch`` on the CPU; ``each``: as of ``LossTerms``, detached. ``begins``: it is
        the first one of an update."""
        if begins:
            self._parts = {}
        if len(self._names) < 2 or not each or not batch.sample_ends:
            return
        ends, sources = torch.tensor(batch.sample_ends), torch.tensor(batch.sample_sources)
        for term, (index, weight) in batch.target_positions().items():
            if term in each:
                labels = sources[torch.searchsorted(ends, index, right=True)]
                values, none = each[term].double(), torch.zeros(len(self._names), dtype=torch.float64)
                sums, weights = self._parts.get(term, (torch.zeros_like(none, device=values.device), none))
                sums = sums.index_add(0, to_device(labels, values.device), values)
                self._parts[term] = sums, weights.index_add(0, labels, weight.double())

    def means(self, terms: Sequence[str]) -> dict[str, float]:
        """``loss/<term>/<source>``, where a source has targets. Collective: ``terms`` are the same on all ranks."""
        if len(self._names) < 2:
            return {}
        none = torch.zeros(len(self._names))
        local = [part.tolist() for term in terms for part in self._parts.get(term, (none, none))]
        totals = dist.sum_floats([value for part in local for value in part])
        means: dict[str, float] = {}
        number = len(self._names)
        for term in terms:
            sums, weights, totals = totals[:number], totals[number : 2 * number], totals[2 * number :]
            parts = zip(self._names, sums, weights, strict=True)
            means |= {f"loss/{term}/{name}": total / weight for name, total, weight in parts if weight}
        return means
