"""Hooks that are written for mmengine's Runner, unmodified: ``custom_hooks=[dict(type='mmengine.ProfilerHook', ...)]``.

``MMEngineHook`` calls such a hook at the points and with the arguments of mmengine's loops, and passes a ``RunnerView``
as the runner: ``runner.iter``, ``runner.message_hub``, ``runner.train_loop`` and the like. A view computes everything
from the run when it is read, so nothing in it can disagree with the run; ``runner.iter`` counts micro-batches, as
mmengine does. What cannot exist here (``runner.load_checkpoint``) is an error that names it and what there is instead.
mmengine's ``RuntimeInfoHook`` runs beside the first one (``completed``), so ``runner.message_hub`` has what it has
there. Validation is one step here: ``before_val_iter`` and ``after_val_iter`` are not called.

mmengine's hooks and Runner are imported where a config names a hook of mmengine: they import DeepSpeed, which needs
seconds and prints.
"""

from __future__ import annotations

import importlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from logging import Logger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from mmengine.config import Config
from mmengine.logging import MessageHub
from mmengine.registry import HOOKS as MMENGINE_HOOKS
from PIL import Image
from torch import Tensor, nn

from unigen_ds.config.registry import HOOKS, check_arguments
from unigen_ds.config.section import Component
from unigen_ds.core.batch import Batch
from unigen_ds.core.errors import ConfigError, TrainingError
from unigen_ds.core.json_values import by_name, json_values
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.hooks.evaluate.evaluate import EvaluateHook, check_result
from unigen_ds.hooks.save.checkpoint import CheckpointHook
from unigen_ds.system import dist
from unigen_ds.system.journals import JsonLines
from unigen_ds.system.log import logger, notice
from unigen_ds.tracking.writer import numbers

if TYPE_CHECKING:
    import mmengine.hooks

OURS = ("CheckpointHook", "EMAHook")
"""Hooks of mmengine that save or own the training's state: ours of the same name are used instead."""
NOT_NEEDED = {
    "ParamSchedulerHook": "param_scheduler acts by itself",
    "DistSamplerSeedHook": "the order of the data is a function of seed and epoch",
    "SyncBuffersHook": "a checkpoint stores rank 0's buffers",
    "PrepareTTAHook": "there is no test loop",
    "NaiveVisualizationHook": "it draws boxes into pictures of a test loop; PreviewHook shows what the model answers",
    "NPUProfilerHook": "no backend computes on an NPU; mmengine.ProfilerHook is the one of CPU and CUDA",
}
"""Hooks of mmengine whose work is done elsewhere, and where."""
_REPLACED = {
    **NOT_NEEDED,
    "CheckpointHook": "default_hooks.checkpoint saves",
    "EMAHook": "custom_hooks=[dict(type='EMAHook', momentum=...)] averages the engine's shards",
}
_UNUSED_POINTS = ("before_val_iter", "after_val_iter", "before_test", "after_test", "before_test_epoch",
                  "after_test_epoch", "before_test_iter", "after_test_iter")  # fmt: skip


def adapted(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """An entry of ``custom_hooks`` that names a hook of mmengine, or a subclass of its ``Hook``, as one of
    ``MMEngineHook``; any other as it is. A bare name is ours where we have it.
    """
    kind = spec.get("type")
    cls = _mmengine_class(kind)
    if cls is None or (cls.__name__ in OURS and _is_own(cls)):
        return spec
    rest = {key: value for key, value in spec.items() if key != "type"}
    path = f"{cls.__module__}.{cls.__qualname__}"
    return {"type": "MMEngineHook", "hook": path if _imported(path) is cls else cls, **rest}


def _mmengine_class(kind: Any) -> type | None:
    """The class that ``type`` names, if it is derived from mmengine's ``Hook``."""
    if isinstance(kind, str) and kind not in HOOKS.module_dict:
        first, _, last = kind.rpartition(".")
        if first in ("", "mmengine", "mmengine.hooks"):
            own = getattr(importlib.import_module("mmengine.hooks"), last, None)
            kind = MMENGINE_HOOKS.module_dict.get(last, own) if first == "" else own
        else:
            kind = _imported(kind)
    bases = kind.__mro__ if isinstance(kind, type) else ()
    return kind if any(_is_own(base) and base.__name__ == "Hook" for base in bases) else None


def stops_early(hook: Component) -> bool:
    """Whether a hook is our or mmengine's ``EarlyStoppingHook``, which needs evaluations."""
    adapts = _mmengine_class(hook.get("hook")) if issubclass(hook.cls, MMEngineHook) else None
    return _is_kind(adapts or hook.cls, "EarlyStoppingHook")


def _imported(path: str) -> Any:
    """What ``'module.Class'`` names; None where it cannot be imported, or is a bare name."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None) if module else None
    except ImportError:
        return None


def _is_own(cls: type) -> bool:
    """Whether a class is one of mmengine's own."""
    return cls.__module__.split(".")[0] == "mmengine"


@HOOKS.register_module()
class MMEngineHook(Hook):
    """A hook written for mmengine's Runner. ``dict(type='mmengine.ProfilerHook', ...)``, the class itself or a subclass
    of mmengine's ``Hook`` in ``custom_hooks`` becomes one; it need not be named.

    Args:
        hook: its class, or ``'module.Class'``.
        priority: mmengine's, a name or 0 to 100, lower first; None: the class's own.
        arguments: of its constructor.
    """

    def __init__(self, hook: Any, *, priority: str | int | None = None, **arguments: Any) -> None:
        cls = _mmengine_class(hook)
        if cls is None:
            raise ConfigError(
                f"hook is {hook!r}",
                allowed="a class derived from mmengine.hooks.Hook, or 'module.Class'",
                remedy="hooks of mmengine: " + ", ".join(sorted(MMENGINE_HOOKS.module_dict)),
            )
        replaced = next((base.__name__ for base in cls.__mro__ if _is_own(base) and base.__name__ in _REPLACED), None)
        if replaced is not None:
            raise ConfigError(f"{cls.__name__} cannot run here: {_REPLACED[replaced]}", remedy="delete it")
        check_arguments(cls, arguments, where=cls.__name__)
        from mmengine.runner.priority import get_priority

        try:
            self._priority = get_priority(getattr(cls, "priority", "NORMAL") if priority is None else priority)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{cls.__name__}.priority is {priority!r}", allowed="0 to 100, or a name as 'NORMAL'"
            ) from error
        self.cls, self.arguments = cls, arguments
        self.name = f"mmengine.{cls.__name__}"
        self.view: RunnerView | None = None
        self._added: dict[str, Any] = {}
        self._save = False
        if _is_own(cls):
            _ = self.hook  # refuses its arguments now; a user's own is created when the run begins

    @cached_property
    def hook(self) -> mmengine.hooks.Hook:
        """The hook itself."""
        try:
            made: mmengine.hooks.Hook = self.cls(**self.arguments)
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(f"{self.cls.__name__} cannot be built: {error}") from error
        return made

    @property
    def priority(self) -> int:
        return self._priority

    # ---- the life cycle ----------------------------------------------------------------------------------------------

    def before_run(self, run: Run) -> None:
        others = [hook for hook in run.hooks if isinstance(hook, MMEngineHook)]
        self.view = others[0].view or RunnerView(run)
        others[0].view = self.view
        self._first, self._last = others[0] is self, others[-1] is self
        self._users = [hook for hook in others if not _is_own(hook.cls)]
        stopping = [hook for hook in others if hook in self._users or _is_kind(hook.cls, "EarlyStoppingHook")]
        self._may_stop = ", ".join(hook.name for hook in stopping)
        own = [name for name in _UNUSED_POINTS if not _is_own(_owner(self.cls, name))]
        if own and dist.is_main():
            logger().warning(
                "%s.%s will not be called: validation is one step here.", self.cls.__name__, ", ".join(own)
            )
        if _is_kind(self.cls, "EarlyStoppingHook"):
            monitor: str = getattr(self.hook, "monitor", "")
            check_result(run, monitor, where=f"{self.cls.__name__}.monitor", prefix="")
        self._at("before_run")

    def after_load_checkpoint(self, run: Run, manifest: Mapping[str, Any]) -> None:
        self._at("after_load_checkpoint", HookCheckpoint({"meta": self._meta(), **self._added}))

    def before_train(self, run: Run) -> None:
        self._at("before_train")

    def before_train_epoch(self, run: Run) -> None:
        self._at("before_train_epoch")

    def before_train_iter(self, run: Run, index: int, batch: Batch) -> None:
        self.runner.at(index)
        self._call("before_train_iter", self.runner.batch_idx, batch)

    def after_train_iter(self, run: Run, index: int, batch: Batch) -> None:
        self.runner.at(index)
        self._call("after_train_iter", self.runner.batch_idx, batch, self.runner.outputs)

    def after_update(self, run: Run, result: UpdateResult) -> None:
        self.runner.at(0)
        if self._first:  # before the checkpoint hook
            self._agree(run, self._users)

    def after_train_epoch(self, run: Run) -> None:
        with self.runner.in_epoch(run.previous.epoch):
            self._at("after_train_epoch")

    def before_val(self, run: Run) -> None:
        self._at("before_val")
        self._at("before_val_epoch")

    def after_val(self, run: Run, metrics: Mapping[str, float]) -> None:
        self._at("after_val_epoch", {name.removeprefix("val/"): value for name, value in metrics.items()})
        self._at("after_val")
        if self._last:  # all of them know the values
            self._agree(run, [self])

    def wants_save(self) -> bool:
        return self._save

    def before_save_checkpoint(self, run: Run, metrics: dict[str, float]) -> None:
        given = HookCheckpoint({"meta": self._meta()})
        self._at("before_save_checkpoint", given)
        self._added = {key: value for key, value in given.items() if key != "meta" and self._storable(key, value)}

    def after_save_checkpoint(self, run: Run, path: Path) -> None:
        self._save = False

    def after_train(self, run: Run) -> None:
        self._at("after_train")

    def after_run(self, run: Run) -> None:
        self._at("after_run")

    def state_dict(self) -> dict[str, Any]:
        """What the hook added to the checkpoint."""
        return dict(self._added)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._added = dict(state)

    # ---- parts -------------------------------------------------------------------------------------------------------

    @property
    def runner(self) -> RunnerView:
        assert self.view is not None, "used before before_run"
        return self.view

    def _at(self, point: str, *arguments: Any) -> None:
        self.runner.at(0)
        self._call(point, *arguments)

    def _call(self, point: str, *arguments: Any) -> None:
        """Raises ``NoSuchAttribute`` with the hook's name."""
        call: Callable[..., None] = getattr(self.hook, point)
        try:
            call(self.runner, *arguments)
        except NoSuchAttribute as error:
            raise error.used_by(f"{self.cls.__name__}.{point}") from error

    def _agree(self, run: Run, setters: Sequence[MMEngineHook]) -> None:
        """End the run where a hook set ``train_loop.stop_training``, and save where one called ``save_checkpoint``; for
        all of them at once."""
        stop, save = self.runner.agreed([] if run.done else setters)
        self._save = self._save or save
        if stop and not run.done:
            run.request_stop(f"a hook of mmengine set train_loop.stop_training ({self._may_stop})")

    def _meta(self) -> dict[str, Any]:
        return {"epoch": self.runner.epoch, "iter": self.runner.iter, "seed": self.runner.seed}

    def _storable(self, key: str, value: Any) -> bool:
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            logger().warning(
                "%s added %r to the checkpoint, a %s, which is not stored: only numbers, texts, lists and dicts are.",
                self.cls.__name__, key, type(value).__name__,
            )  # fmt: skip
            return False
        return True


class HookCheckpoint(dict[str, Any]):
    """The ``checkpoint`` of mmengine's hooks: what a hook adds is stored with it, and is there after a resume."""

    def __missing__(self, key: str) -> Any:
        raise KeyError(f"{key!r}: the checkpoint that a hook of mmengine sees has {', '.join(self)} alone; weights and "
                       "optimizer states are sharded, and in files of their own")  # fmt: skip


def completed(hooks: Sequence[Hook]) -> list[Hook]:
    """With mmengine's ``RuntimeInfoHook`` where others of mmengine need it, and a name of its own for each."""
    of_mmengine = [hook for hook in hooks if isinstance(hook, MMEngineHook)]
    if of_mmengine and not any(_is_kind(hook.cls, "RuntimeInfoHook") for hook in of_mmengine):
        of_mmengine.insert(0, MMEngineHook("mmengine.hooks.RuntimeInfoHook"))
        hooks = [*hooks, of_mmengine[0]]
    for number, hook in enumerate(of_mmengine, 1):
        if any(other.name == hook.name for other in of_mmengine[: number - 1]):
            hook.name = f"{hook.name}#{number}"
    return list(hooks)


def _is_kind(cls: type, name: str) -> bool:
    """Whether a class, or one of its bases, has that name."""
    return any(base.__name__ == name for base in cls.__mro__)


def _owner(cls: type, method: str) -> type:
    """The class that defines a method."""
    return next(base for base in cls.__mro__ if method in vars(base))


# ---- what a hook sees ----------------------------------------------------------------------------------------------


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

    def __init__(self, run: Run) -> None:
        self._run = run

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
        from mmengine.runner import LogProcessor

        super().__init__(run)
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

    @cached_property
    def cfg(self) -> Config:
        """The config as mmengine's; changes have no effect."""
        return Config(json_values(dict(self._run.config), by_name))

    @property
    def seed(self) -> int:
        return int((self._run.config.get("randomness") or {}).get("seed") or 0)

    experiment_name = property(lambda self: self._run.work_dir.name)
    work_dir = property(lambda self: str(self._run.work_dir))
    rank = property(lambda self: dist.rank())
    world_size = property(lambda self: dist.world_size())
    distributed = property(lambda self: dist.world_size() > 1)
    train_dataloader = property(lambda self: self.train_loop.dataloader)
    val_dataloader = property(lambda self: self.val_loop.dataloader)
    _train_loop = property(lambda self: self.train_loop)

    @property
    def log_dir(self) -> str:
        """``<work_dir>/<timestamp>``, as mmengine has it."""
        return str(self._run.work_dir / self.timestamp)

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


class LoopView(_View):
    """``runner.train_loop``. Setting ``stop_training`` ends the run with a checkpoint, on every rank alike."""

    what = "runner.train_loop"
    iter = property(lambda self: self._runner.iter)
    epoch = property(lambda self: self._runner.epoch)
    max_iters = property(lambda self: self._runner.max_iters)
    max_epochs = property(lambda self: self._runner.max_epochs)

    def __init__(self, runner: RunnerView) -> None:
        super().__init__(runner._run)
        self._runner = runner
        self.stop_training = False
        self.dataloader = DataLoaderView(
            f"{runner.what}.train_dataloader",
            lambda: -(-self._run.ruler.sequences_per_epoch // self._run.geometry.sequences_per_iteration),
            lambda: self._run.ruler.sequences_per_epoch,
            batch_size=lambda: self._run.geometry.batch_size,
        )


class ValLoopView(_View):
    """``runner.val_loop``."""

    what = "runner.val_loop"

    @property
    def dataloader(self) -> DataLoaderView:
        """Of an evaluation of all sets: the batches of this rank, and the samples of all ranks.

        Raises ``NoSuchAttribute`` where the config has none.
        """
        sets = [one.data for one in getattr(self._run, "validation", ())]
        if not sets:
            raise NoSuchAttribute(
                "a hook of mmengine uses runner.val_dataloader, and the config has no val_dataloader",
                remedy="add val_dataloader=dict(...) (docs/evaluation.md)",
            )
        limit = next((hook.max_batches for hook in self._run.hooks if isinstance(hook, EvaluateHook)), None)
        return DataLoaderView(
            "runner.val_dataloader",
            lambda: sum(one.num_batches(limit, dp_size=self._run.backend.dp_size) for one in sets),
            lambda: sum(map(len, sets)),
            batch_size=lambda: sets[0].batch_size,
        )


class SizedView(_View):
    """Something of which a hook reads the length."""

    def __init__(self, what: str, length: Callable[[], int]) -> None:
        self.what, self._length = what, length

    def __len__(self) -> int:
        return self._length()


class DataLoaderView(SizedView):
    """A data loader: its length in micro-batches, and that of its data set."""

    def __init__(
        self, what: str, length: Callable[[], int], samples: Callable[[], int], *, batch_size: Callable[[], int]
    ) -> None:
        super().__init__(what, length)
        self.dataset = SizedView(f"{what}.dataset", samples)
        self._batch_size = batch_size

    @property
    def batch_size(self) -> int:
        return self._batch_size()


class SchedulerView(_View):
    """An entry of ``runner.param_schedulers``: what can be read. The schedule is a function of the progress."""

    what = "runner.param_schedulers[0]"
    param_name = "lr"

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
        super().__init__(run)
        self._folder = folder
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
