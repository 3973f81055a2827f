"""The life cycle, what a hook may see of a run, and the order in which hooks are called.

::

    before_run
      after_load_checkpoint(manifest)               on resume only
      before_train
        before_train_epoch                          whenever the data epoch changed
          before_update
            before_train_iter(i, batch)             accumulative_counts times
            after_train_iter(i, batch)              the last one's: after the optimizer step, as in mmengine
          after_update(result)                      progress already counts this update
            before_val; after_val(metrics)          when the evaluate hook evaluates (or in its before_update)
            before_save_checkpoint(metrics)         when the checkpoint hook saves
            after_save_checkpoint(path)             when that has succeeded, before old checkpoints are deleted; with
                                                    async_save some updates later
        after_train_epoch                           when the update before it ended one
      after_train
    after_run
    on_exception(error)                             instead of the rest; no collectives here
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from unigen_ds.backends.base import Backend
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.checkpoint.saver import Form
from unigen_ds.core.batch import Batch
from unigen_ds.core.progress import Geometry, Progress, Ruler, Skip
from unigen_ds.core.shards import Shard, ShardReader
from unigen_ds.data.datasets.dataset import PlannedDataset
from unigen_ds.evaluation.scoring import Validation
from unigen_ds.system.clock import Clock

PRIORITY = {
    "timer": 10,
    "nan_guard": 20,
    "spike": 22,
    "skipped": 25,
    "ema": 30,
    "first_update": 35,
    "evaluate": 40,
    "best": 45,
    "preview": 50,
    "ledger": 55,
    "logger": 60,
    "signals": 65,
    "time_limit": 66,
    "continuity": 68,
    "checkpoint": 70,
    "timeline": 80,
    "profile": 90,
    "push_to_hub": 95,
}
"""The order of hooks: lower runs earlier. A custom hook without an entry runs at 55, before the logger."""


@dataclass(frozen=True)
class UpdateResult:
    """What one update did. The same on all ranks, except ``local_sums``."""

    local_sums: Mapping[str, Tensor]
    """This rank's sum of each loss term over the update: detached scalars on the device."""
    counts: Mapping[str, float]
    """Targets of each term, over all ranks and iterations."""
    loss_weights: Mapping[str, float]
    grad_norm: Tensor | float
    """Global norm before clipping."""
    applied: bool
    """False when gradients were not finite and every weight was left as it was."""
    hparams: Sequence[Mapping[str, Any]]
    """``{'name', 'lr'}`` of each parameter group during this update."""
    num_skipped: int
    """Samples that could not be decoded and were replaced by padding, over all ranks."""
    sequences: tuple[int, int]
    """Half-open range of global sequence numbers; those of ``Run.skips`` in it are left out."""
    sample_digest: str
    """Digest of the sample ids of the whole update, over all ranks, in global order."""
    sample_ids: Sequence[str]
    """The sample ids themselves, in the order of the sequences."""
    tokens: int
    """Tokens of the update over all ranks."""
    loss_scale: float | None = None
    scale_fell: bool = False
    """Both as of ``StepResult``."""
    stop_wanted: bool = False
    """Whether a hook of any process wanted to stop (``Hook.wants_stop``) when this update began."""
    requests: Collection[str] = ()
    """Names of the hooks that had a request (``Hook.has_request``) on any process when this update began."""


@dataclass(frozen=True)
class Iteration:
    """What one micro-batch returned on this rank."""

    batch: Batch
    """The micro-batch, on the CPU."""
    sums: Mapping[str, Tensor]
    """Sum of each loss term over its targets: detached scalars on the device."""
    each: Mapping[str, Tensor]
    """The value of each target, as of ``LossTerms.each``: detached, on the device."""
    loss_weights: Mapping[str, float]


class GoBack(Exception):
    """Raised by a hook in ``after_update`` or ``before_save_checkpoint``, on all ranks alike: the run continues from
    ``checkpoint`` without the sequences of ``skip``, as a resume would; the engine stays."""

    def __init__(self, checkpoint: Path, skip: Skip) -> None:
        super().__init__(checkpoint, skip)  # as an exception is pickled for the other ranks
        self.checkpoint, self.skip = checkpoint, skip

    def __str__(self) -> str:
        return f"{self.skip.why}; sequences {self.skip} are left out, from {self.checkpoint.name} on"


class Run(Protocol):
    """The part of a run that hooks can use. Read-only, except for ``request_stop``."""

    progress: Progress
    previous: Progress
    """Progress before the present update."""
    hparams: Sequence[Mapping[str, Any]]
    """``{'name', 'lr'}`` of each parameter group in the present or last update; empty before the first."""
    iteration: Iteration | None
    """The last micro-batch of this process; None before the first."""
    ruler: Ruler
    geometry: Geometry
    total_sequences: float
    """Sequences after which training ends by ``train_cfg`` (an estimate where the limit is in tokens)."""
    backend: Backend
    processor: Any
    """The value of ``Family.processor``; its attributes depend on the family."""
    datasets: Sequence[PlannedDataset]
    """The sources of the training data, in the order of the config."""
    validation: Validation
    """The validation data and its losses; false where the config has none."""
    work_dir: Path
    run_id: str
    """The id of the work dir: the same over all starts of this run, and no other run's."""
    checkpoint_dir: Path
    """The folder of the checkpoints, which may be the work dir."""
    config: Mapping[str, Any]
    """The config as plain values, for records of the run."""
    peak_tflops: float | None
    """``env.peak_tflops``: 10**12 operations a second of one device, where the config has it."""
    clock: Clock
    hooks: Sequence[Hook]

    @property
    def model(self) -> nn.Module:
        """The model without an engine's wrapper (``backend.model`` computes); ZeRO-3 and FSDP2 shard its parameters."""

    @property
    def skips(self) -> Sequence[Skip]:
        """Sequences that the run leaves out: recorded by its checkpoints, or since the last one."""

    @property
    def done(self) -> bool:
        """Whether the loop ends after the present update: a limit is reached or a stop was requested."""

    @property
    def finished(self) -> bool:
        """Whether the limit of ``train_cfg`` is reached: the training is complete, not merely stopped."""

    def last_losses(self) -> dict[str, float] | None:
        """Mean of each loss term over the last update's data at the present weights, without dropout; None before the
        first update, and where the present batch size cannot split it into whole iterations. Collective."""

    def request_stop(self, reason: str, *, error: Exception | None = None) -> None:
        """Ask the loop to end after this update: a checkpoint is saved, then ``error`` is raised, if there is one."""

    def save_checkpoint(
        self, name: str, *, form: Form = "sharded", background: bool = False, weights: bool = False
    ) -> Path | None:
        """Save and commit now, at an update boundary. Collective. Raises ``CheckpointError``; nothing is lost then.

        ``form``: the engine's own files, the consolidated ones, or both. With ``background`` another process writes and
        commits it: None; no other may be saved before ``finish_save`` has returned it. ``weights``: export its weights
        as well, once it is committed (``checkpoint.convert.export_weights``).
        """

    def finish_save(self, *, wait: bool) -> Path | None:
        """The checkpoint that is saved in the background, once it is complete; None: it is not, yet. Collective. Raises
        as ``save_checkpoint``; then this save has ended, too."""

    def save_base(self) -> None:
        """Copy the files of the base of adapters into the work dir, once. Collective. Raises ``ConfigError`` where the
        run has none, and what the disk raises."""

    def export(self, checkpoint: Path, out: Path, *, raw: bool = False, dtype: str = "fp32") -> None:
        """Write a checkpoint of this run into the new folder ``out``, as ``tools/export.py`` does: the model is opened
        a second time, on the CPU. On the calling rank alone; not collective. Raises ``ConfigError`` where ``out``
        exists, ``CheckpointError`` where it cannot be written.
        """


class Hook:
    """Base: every method does nothing. State: in ``state_attributes``, or by ``state_dict`` and ``load_state_dict``."""

    name = ""
    """Its key in ``PRIORITY``, and the key of its state in a checkpoint."""
    state_attributes: ClassVar[tuple[str, ...]] = ()
    """Names of its attributes, with JSON values, that a checkpoint keeps."""

    @property
    def priority(self) -> int:
        return PRIORITY.get(self.name, 55)

    def before_run(self, run: Run) -> None: ...
    def after_load_checkpoint(self, run: Run, manifest: Mapping[str, Any]) -> None: ...
    def before_train(self, run: Run) -> None: ...
    def before_train_epoch(self, run: Run) -> None: ...
    def before_update(self, run: Run) -> None: ...
    def before_train_iter(self, run: Run, index: int, batch: Batch) -> None: ...
    def after_train_iter(self, run: Run, index: int, batch: Batch) -> None: ...
    def after_update(self, run: Run, result: UpdateResult) -> None: ...
    def after_train_epoch(self, run: Run) -> None: ...
    def before_val(self, run: Run) -> None: ...
    def after_val(self, run: Run, metrics: Mapping[str, float]) -> None:
        """``metrics``: ``val/loss`` and all others of this evaluation; the same on all ranks."""

    def before_save_checkpoint(self, run: Run, metrics: dict[str, float]) -> None: ...
    def after_save_checkpoint(self, run: Run, path: Path) -> None:
        """Called on every rank when the checkpoint of the last ``before_save_checkpoint`` is complete; not after a save
        that failed. May be collective."""

    def sync(self) -> None:
        """Called on rank 0 alone, as the first step of each save: flush to disk what the hook has written to files of
        the work dir. Raises ``OSError`` where that fails; the save then fails, and training continues."""

    def after_train(self, run: Run) -> None: ...
    def after_run(self, run: Run) -> None: ...
    def on_exception(self, run: Run, error: BaseException) -> None: ...

    def wants_stop(self) -> bool:
        """Whether this process asks the run to stop. Asked once for each update, on every rank; not collective. The
        answers are summed with the counts of the update that begins next, after which every rank finds
        ``UpdateResult.stop_wanted``; no rank waits for it.
        """
        return False

    def has_request(self) -> bool:
        """Whether this process asks that all do what this hook does where ``UpdateResult.requests`` has its name. Asked
        and summed as ``wants_stop``."""
        return False

    def wants_save(self) -> bool:
        """Whether the checkpoint hook is to save at this update, once, whoever asks. Asked in its ``after_update``; not
        collective; the answer must be the same on all ranks."""
        return False

    def keeps(self, manifest: Manifest) -> bool:
        """Whether the work dir's checkpoint with this manifest must stay. Asked on rank 0 alone, after each save."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values; stored in ``hooks.json`` under ``name``."""
        return {name: getattr(self, name) for name in self.state_attributes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``'s value. Called after ``before_run``."""
        for name in self.state_attributes:
            setattr(self, name, state[name])

    def shards(self) -> Mapping[str, Sequence[Shard]]:
        """Tensors to store in a checkpoint: sub-directory name -> this rank's shards."""
        return {}

    def load_shards(self, readers: Mapping[str, ShardReader]) -> None:
        """Restore ``shards``'s tensors from the sub-directories the checkpoint has. Called after ``before_run``."""


def is_due(run: Run, interval: float | None, unit: str, *, since: Progress | None = None) -> bool:
    """Whether the last update, or all those after ``since``, crossed a multiple of ``interval``. None: never."""
    return interval is not None and run.ruler.duration(interval, unit).every(run.progress, since or run.previous)
