"""A run as a hook of mmengine sees it: ``runner.iter``, ``runner.message_hub``, ``runner.train_loop`` and the like.

Everything is computed from the run when it is read, so nothing here can disagree with it. ``runner.iter`` counts
micro-batches, as mmengine does. What cannot exist here (``runner.load_checkpoint``, ``optim_wrapper.step``) is an error
that names it and what there is instead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from logging import Logger
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.config import Config
from mmengine.logging import MessageHub
from mmengine.runner import LogProcessor
from PIL import Image
from torch import Tensor, nn

from unigen_ds.core import dist
from unigen_ds.core.errors import ConfigError, TrainingError
from unigen_ds.core.json_values import by_name, json_values
from unigen_ds.core.log import logger, notice
from unigen_ds.core.metrics import JsonLines
from unigen_ds.evaluation.validation import Validation
from unigen_ds.hooks.base import Run
from unigen_ds.hooks.checkpoint import CheckpointHook
from unigen_ds.hooks.evaluate import EvaluateHook
from unigen_ds.tracking.writer import numbers

_INSTEAD = {
    "load_checkpoint": "the config's resume and load_from load",
    "resume": "the config's resume and load_from load",
    "step": "the engine makes the optimizer step, and param_scheduler of the config acts by itself",
    "add_graph": "tensorboard's graph needs inputs that a view does not have; write it with torch in the hook itself",
    "add_datasample": "PreviewHook shows what the model answers",
    "test_loop": "there is no test loop: tools/evaluate.py evaluates a checkpoint",
    "test_dataloader": "there is no test loop: tools/evaluate.py evaluates a checkpoint",
    "update_params": "the engine makes the optimizer step",
    "optimizer": "the engine's optimizer is sharded: run.backend in a hook of unigen_ds",
}
"""What to use instead of an attribute that cannot exist here."""


class NoSuchAttribute(TrainingError, AttributeError):
    """An attribute of mmengine's Runner that does not exist here; ``hasattr`` is False for it."""

    def used_by(self, name: str) -> NoSuchAttribute:
        """The same, with the name of the hook."""
        problem = self.problem.replace("a hook of mmengine uses", f"{name} uses", 1)
        return type(self)(problem, allowed=self.allowed, remedy=self.remedy)


_INTERNAL = ("what", "at", "in_epoch", "agreed")
"""What the adapter alone uses."""


class _View:
    """Base: a missing attribute is an error that names what there is."""

    what = ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        names = {*dir(type(self)), *vars(self)}.difference(_INTERNAL)
        public = sorted(key for key in names if not key.startswith("_"))
        raise NoSuchAttribute(
            f"a hook of mmengine uses {self.what}.{name}, which does not exist in unigen_ds",
            allowed=", ".join(public),
            remedy=_INSTEAD.get(name, "derive the hook from unigen_ds.hooks.base.Hook (docs/extending.md)"),
        )


class RunnerView(_View):
    """What ``runner`` is for a hook of mmengine. Read-only, except for ``train_loop.stop_training``."""

    what = "runner"

    def __init__(self, run: Run) -> None:
        self._run = run
        self._index = 0
        self._ended: int | None = None
        self.timestamp = time.strftime("%Y%m%d_%H%M%S", time.localtime(dist.broadcast_object(time.time())))
        name = f"{self.experiment_name}_{id(self):x}"
        self.message_hub = MessageHub.get_instance(name)
        self.log_processor = LogProcessor(by_epoch=self._by_epoch)
        self.optim_wrapper = OptimWrapperView(run)
        self.visualizer = VisualizerView(run, Path(self.log_dir) / "vis_data")
        self.train_loop = LoopView(self)
        self.val_loop = ValLoopView(run)
        self._save_wanted = False

    # ---- how far the run is ------------------------------------------------------------------------------------------

    @property
    def iter(self) -> int:
        """Micro-batches of this run before the present one."""
        return self._run.progress.iteration(self._run.geometry) + self._index

    @property
    def epoch(self) -> int:
        """The present pass over the data; when one has ended, that one until ``after_train_epoch`` is over."""
        return self._run.progress.epoch if self._ended is None else self._ended

    @property
    def max_iters(self) -> int:
        """``iter`` at the end of the training: whole updates, as the run makes them."""
        run = self._run
        left = math.floor(run.total_sequences - run.progress.sequences) // run.geometry.global_batch_size
        return run.progress.iteration(run.geometry) + max(left, 0) * run.geometry.accumulative_counts

    @property
    def max_epochs(self) -> int:
        return math.ceil(self._run.total_sequences / self._run.ruler.sequences_per_epoch)

    @property
    def batch_idx(self) -> int:
        """Index of the present micro-batch in its epoch; ``iter`` where the training's length is not in epochs."""
        if not self._by_epoch:
            return self.iter
        begun = self.epoch * self._run.ruler.sequences_per_epoch
        per_iteration = self._run.geometry.sequences_per_iteration
        return max(0, self._run.progress.sequences - begun) // per_iteration + self._index

    @property
    def _by_epoch(self) -> bool:
        return (self._run.config.get("train_cfg") or {}).get("max_epochs") is not None

    def at(self, index: int) -> None:
        """Which micro-batch of the present update is computed; 0 between updates."""
        self._index = index

    @contextmanager
    def in_epoch(self, epoch: int) -> Iterator[None]:
        """``epoch`` inside the context."""
        self._ended = epoch
        try:
            yield
        finally:
            self._ended = None

    # ---- objects -----------------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """As the engine wraps it."""
        return self._run.backend.model

    @property
    def logger(self) -> Logger:
        return logger()

    @property
    def train_dataloader(self) -> DataLoaderView:
        return self.train_loop.dataloader

    @property
    def val_dataloader(self) -> Any:
        return self.val_loop.dataloader

    @property
    def param_schedulers(self) -> list[SchedulerView]:
        """One, of the learning rates of all groups: to read."""
        return [SchedulerView(self._run)]

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        """Ask ``default_hooks.checkpoint`` for a save after the present update, on one rank or all. It chooses folder,
        name and content, so mmengine's arguments have no effect, which is logged once.

        Raises ``ConfigError`` where the config has no ``default_hooks.checkpoint``.
        """
        if not any(isinstance(hook, CheckpointHook) for hook in self._run.hooks):
            raise ConfigError("runner.save_checkpoint is called, and default_hooks.checkpoint=None saves nothing",
                              remedy="dict(type='CheckpointHook', interval=-1) saves when it is asked")  # fmt: skip
        given = [repr(one) for one in arguments] + [f"{key}={value!r}" for key, value in options.items()]
        if given and dist.is_main():
            notice(f"A hook of mmengine calls runner.save_checkpoint({', '.join(given)}): the checkpoint is saved after"
                   " the update by default_hooks.checkpoint, which chooses folder, name and content.")  # fmt: skip
        self._save_wanted = True

    @property
    def _train_loop(self) -> LoopView:
        return self.train_loop

    @cached_property
    def cfg(self) -> Config:
        """The config as mmengine's; changes have no effect."""
        return Config(json_values(dict(self._run.config), by_name))

    @property
    def seed(self) -> int:
        return int((self._run.config.get("randomness") or {}).get("seed") or 0)

    @property
    def experiment_name(self) -> str:
        return self._run.work_dir.name

    @property
    def work_dir(self) -> str:
        return str(self._run.work_dir)

    @property
    def log_dir(self) -> str:
        """``<work_dir>/<timestamp>``, as mmengine has it."""
        return str(self._run.work_dir / self.timestamp)

    @property
    def rank(self) -> int:
        return dist.rank()

    @property
    def world_size(self) -> int:
        return dist.world_size()

    @property
    def distributed(self) -> bool:
        return dist.world_size() > 1

    @property
    def outputs(self) -> dict[str, Tensor]:
        """Of the last micro-batch on this rank: ``loss/<term>``, the mean over its own targets, and ``loss``, their
        weighted sum. Empty before the first.
        """
        found = self._run.iteration
        if found is None:
            return {}
        counts = found.batch.target_counts()
        means = {name: value / counts[name] for name, value in found.sums.items() if counts.get(name)}
        weighted = [value * found.loss_weights.get(name, 1.0) for name, value in means.items()]
        return {"loss": sum(weighted[1:], weighted[0]), **{f"loss/{k}": v for k, v in means.items()}} if means else {}

    def agreed(self, setters: Sequence[Any]) -> tuple[bool, bool]:
        """Whether ``train_loop.stop_training`` is set, and whether ``save_checkpoint`` was called, on any rank; the
        second is asked once. Collective, if there are several and ``setters`` is not empty: hooks that may do so on one
        rank alone.
        """
        stop, save = bool(self.train_loop.stop_training), self._save_wanted
        self._save_wanted = False
        if dist.world_size() > 1 and setters:
            stops, saves = dist.sum_floats([float(stop), float(save)])
            stop, save = stops > 0, saves > 0
        return stop, save


class DataLoaderView(_View):
    """``runner.train_dataloader``: its length, and that of its data set."""

    what = "runner.train_dataloader"

    def __init__(self, run: Run) -> None:
        self._run = run
        self.dataset = DatasetView(run)

    def __len__(self) -> int:
        """Micro-batches of an epoch."""
        return -(-self._run.ruler.sequences_per_epoch // self._run.geometry.sequences_per_iteration)

    @property
    def batch_size(self) -> int:
        return self._run.geometry.batch_size


class DatasetView(_View):
    """``runner.train_dataloader.dataset``."""

    what = "runner.train_dataloader.dataset"

    def __init__(self, run: Run) -> None:
        self._run = run

    def __len__(self) -> int:
        """Sequences of an epoch."""
        return self._run.ruler.sequences_per_epoch


class LoopView(_View):
    """``runner.train_loop``. Setting ``stop_training`` ends the run with a checkpoint, on every rank alike."""

    what = "runner.train_loop"

    def __init__(self, runner: RunnerView) -> None:
        self._runner = runner
        self.stop_training = False
        self.dataloader = DataLoaderView(runner._run)

    @property
    def iter(self) -> int:
        return self._runner.iter

    @property
    def epoch(self) -> int:
        return self._runner.epoch

    @property
    def max_iters(self) -> int:
        return self._runner.max_iters

    @property
    def max_epochs(self) -> int:
        return self._runner.max_epochs


class ValDataLoaderView(_View):
    """``runner.val_dataloader``: its length, and that of its data set."""

    what = "runner.val_dataloader"

    def __init__(self, run: Run, validation: Validation) -> None:
        self._run, self._validation = run, validation
        self.dataset = ValDatasetView(validation)

    def __len__(self) -> int:
        """Batches of this rank in an evaluation."""
        max_batches = next((hook.max_batches for hook in self._run.hooks if isinstance(hook, EvaluateHook)), None)
        return self._validation.data.num_batches(max_batches, dp_size=self._run.backend.dp_size)

    @property
    def batch_size(self) -> int:
        return self._validation.data.batch_size


class ValDatasetView(_View):
    """``runner.val_dataloader.dataset``."""

    what = "runner.val_dataloader.dataset"

    def __init__(self, validation: Validation) -> None:
        self._validation = validation

    def __len__(self) -> int:
        """Samples of a whole evaluation, over all ranks."""
        return len(self._validation.data)


class ValLoopView(_View):
    """``runner.val_loop``."""

    what = "runner.val_loop"

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def dataloader(self) -> ValDataLoaderView:
        """Raises ``NoSuchAttribute`` where the config has none."""
        found = getattr(self._run, "validation", None)
        if found is None:
            raise NoSuchAttribute(
                "a hook of mmengine uses runner.val_dataloader, and the config has no val_dataloader",
                remedy="add val_dataloader=dict(...) (docs/evaluation.md)",
            )
        return ValDataLoaderView(self._run, found)


class SchedulerView(_View):
    """An entry of ``runner.param_schedulers``: what can be read. The schedule is a function of the progress."""

    what = "runner.param_schedulers[0]"
    param_name = "lr"

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def last_step(self) -> int:
        """Updates of the run."""
        return self._run.progress.updates

    def get_last_value(self) -> list[float]:
        """The learning rate of each parameter group in this update."""
        return [float(group["lr"]) for group in self._run.hparams]


class OptimWrapperView(_View):
    """``runner.optim_wrapper``: what can be read. The engine makes the steps."""

    what = "runner.optim_wrapper"

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """``name``, ``lr`` and what else a schedule sets, of each group in this update: copies."""
        return [dict(group) for group in self._run.hparams]

    def get_lr(self) -> dict[str, list[float]]:
        """The learning rate of each parameter group in this update."""
        return {"lr": [float(group["lr"]) for group in self._run.hparams]}


class VisualizerView(_View):
    """``runner.visualizer``: what is added goes to ``<log_dir>/vis_data``, as mmengine's LocalVisBackend writes it.
    Rank 0 alone writes.
    """

    what = "runner.visualizer"

    def __init__(self, run: Run, folder: Path) -> None:
        self._run, self._folder = run, folder
        self._files: dict[str, JsonLines] = {}

    def add_scalars(self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None) -> None:
        self._append({**numbers(scalar_dict), "step": step}, "scalars.json", *([file_path] if file_path else []))

    def add_scalar(self, name: str, value: Any, step: int = 0) -> None:
        self._append({name: float(value), "step": step}, "scalars.json")

    def add_image(self, name: str, image: Any, step: int = 0) -> None:
        """``image``: uint8 [H, W, 3] in RGB."""
        picture = image if isinstance(image, Image.Image) else Image.fromarray(np.asarray(image))
        if dist.is_main():
            self._folder.mkdir(parents=True, exist_ok=True)
            picture.save(self._folder / f"{Path(name).name}_{step}.png")

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _append(self, record: Mapping[str, Any], *names: str) -> None:
        if not dist.is_main():
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            self._files.setdefault(name, JsonLines(self._folder / name)).append(record)
