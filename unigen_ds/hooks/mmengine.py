"""Hooks that are written for mmengine's Runner, unmodified: ``custom_hooks=[dict(type='mmengine.ProfilerHook', ...)]``.

``MMEngineHook`` calls such a hook at the points and with the arguments of mmengine's loops, and passes a ``RunnerView``
as the runner. A view computes everything from the run when it is read, so nothing in it can disagree with the run;
``runner.iter`` counts micro-batches, as mmengine does. What cannot exist here (``runner.load_checkpoint``) is an error
that names it and what there is. Validation is one step: ``before_val_iter`` and ``after_val_iter`` are not called.

mmengine's hooks and Runner are imported where a config names a hook of mmengine: they import DeepSpeed, which needs
seconds and prints.
"""

from __future__ import annotations

import importlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mmengine.config import Config
from mmengine.logging import MessageHub
from mmengine.registry import HOOKS as MMENGINE_HOOKS
from mmengine.utils import get_object_from_string
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
from unigen_ds.system.log import logger, notice

if TYPE_CHECKING:
    import mmengine.hooks
    import mmengine.visualization

REFUSALS = {
    "CheckpointHook": "default_hooks.checkpoint saves",
    "EMAHook": "custom_hooks=[dict(type='EMAHook', momentum=...)] averages the engine's shards",
    "ParamSchedulerHook": "param_scheduler acts by itself",
    "DistSamplerSeedHook": "the order of the data is a function of seed and epoch",
    "SyncBuffersHook": "a checkpoint stores rank 0's buffers",
    "PrepareTTAHook": "there is no test loop",
    "NaiveVisualizationHook": "it draws boxes into pictures of a test loop; PreviewHook shows what the model answers",
    "NPUProfilerHook": "no backend computes on an NPU; mmengine.ProfilerHook is the one of CPU and CUDA",
}
"""Hooks of mmengine, and what does their work here; also for subclasses."""
_NOT_CALLED = ("before_val_iter", "after_val_iter", "before_test", "after_test", "before_test_epoch",
               "after_test_epoch", "before_test_iter", "after_test_iter")  # fmt: skip


def adapt_hook(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an entry of ``custom_hooks``, as one of ``MMEngineHook`` if it names a class derived from mmengine's
    ``Hook``. A bare name is ours where we have it."""
    cls = _mmengine_class(spec.get("type"))
    if cls is None or (cls.__name__ in ("CheckpointHook", "EMAHook") and _is_own(cls)):
        return spec
    path = f"{cls.__module__}.{cls.__qualname__}"
    hook = path if get_object_from_string(path) is cls else cls
    return {**spec, "type": "MMEngineHook", "hook": hook}


def _mmengine_class(kind: Any) -> type | None:
    """Return the class that ``type`` names if it is derived from mmengine's ``Hook``, else None."""
    if isinstance(kind, str) and kind not in HOOKS.module_dict:
        module, _, name = kind.rpartition(".")
        if module in ("", "mmengine", "mmengine.hooks"):
            own = getattr(importlib.import_module("mmengine.hooks"), name, None)
            kind = own if module else MMENGINE_HOOKS.module_dict.get(name, own)
        else:
            kind = get_object_from_string(kind)
    bases = kind.__mro__ if isinstance(kind, type) else ()
    return kind if any(_is_own(base) and base.__name__ == "Hook" for base in bases) else None


def _is_own(cls: type) -> bool:
    return cls.__module__.split(".")[0] == "mmengine"


def _is_kind(cls: type, name: str) -> bool:
    return any(base.__name__ == name for base in cls.__mro__)


def stops_early(hook: Component) -> bool:
    """Whether a hook is our or mmengine's ``EarlyStoppingHook``, which needs evaluations."""
    cls = _mmengine_class(hook.get("hook")) if issubclass(hook.cls, MMEngineHook) else None
    return _is_kind(cls or hook.cls, "EarlyStoppingHook")


def with_runtime_info(hooks: Sequence[Hook]) -> list[Hook]:
    """Add mmengine's ``RuntimeInfoHook`` where other hooks of mmengine need it, and give each a name of its own."""
    adapters = [hook for hook in hooks if isinstance(hook, MMEngineHook)]
    if adapters and not any(_is_kind(hook.cls, "RuntimeInfoHook") for hook in adapters):
        adapters.insert(0, MMEngineHook("mmengine.hooks.RuntimeInfoHook"))
        hooks = [*hooks, adapters[0]]
    for number, hook in enumerate(adapters, 1):
        if hook.name in {other.name for other in adapters[: number - 1]}:
            hook.name = f"{hook.name}#{number}"
    return list(hooks)


@HOOKS.register_module()
class MMEngineHook(Hook):
    """A hook written for mmengine's Runner. ``dict(type='mmengine.ProfilerHook', ...)``, the class itself or a subclass
    of mmengine's ``Hook`` in ``custom_hooks`` becomes one; it need not be named.

    Args:
        hook: its class, or ``'module.Class'``.
        priority: mmengine's, a name or 0 to 100, lower first; None: the class's own.
        arguments: of its constructor.
    """

    priority = 0
    """mmengine's: that of the hook, or the one of the config."""
    view: RunnerView
    """What the hooks see; one for all of them."""

    def __init__(self, hook: Any, *, priority: str | int | None = None, **arguments: Any) -> None:
        cls = _mmengine_class(hook)
        if cls is None:
            raise ConfigError(
                f"hook is {hook!r}",
                allowed="a class derived from mmengine.hooks.Hook, or 'module.Class'",
                remedy="hooks of mmengine: " + ", ".join(sorted(MMENGINE_HOOKS.module_dict)),
            )
        for base in cls.__mro__:
            if _is_own(base) and base.__name__ in REFUSALS:
                raise ConfigError(f"{cls.__name__} cannot run here: {REFUSALS[base.__name__]}", remedy="delete it")
        check_arguments(cls, arguments, where=cls.__name__)
        from mmengine.runner.priority import get_priority

        try:
            self.priority = get_priority(getattr(cls, "priority", "NORMAL") if priority is None else priority)
            self.hook: mmengine.hooks.Hook = cls(**arguments)
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            problem = f"{cls.__name__} cannot be built with priority {priority!r}: {error}"
            raise ConfigError(problem, allowed="a priority of 0 to 100, or a name as 'NORMAL'") from error
        self.cls, self.name = cls, f"mmengine.{cls.__name__}"
        self.additions: dict[str, Any] = {}
        """What the hook added to the checkpoint."""
        self._save = False

    def before_run(self, run: Run) -> None:
        self._adapters = [hook for hook in run.hooks if isinstance(hook, MMEngineHook)]
        self.view = RunnerView(run) if self._adapters[0] is self else self._adapters[0].view
        bases = {point: next(base for base in self.cls.__mro__ if point in vars(base)) for point in _NOT_CALLED}
        own = ", ".join(point for point, base in bases.items() if not _is_own(base))
        if own and dist.is_main():
            logger().warning("%s.%s will not be called: validation is one step here.", self.cls.__name__, own)
        if _is_kind(self.cls, "EarlyStoppingHook"):
            monitor: str = getattr(self.hook, "monitor", "")
            check_result(run, monitor, where=f"{self.cls.__name__}.monitor", prefix="")
        self._call("before_run")

    def after_load_checkpoint(self, run: Run, manifest: Mapping[str, Any]) -> None:
        self._call("after_load_checkpoint", {**self.additions, "meta": self.view.meta})

    def before_train(self, run: Run) -> None:
        self._call("before_train")

    def before_train_epoch(self, run: Run) -> None:
        self._call("before_train_epoch")

    def before_train_iter(self, run: Run, index: int, batch: Batch) -> None:
        self.view.index = index
        self._call("before_train_iter", self.view.batch_idx, batch)

    def after_train_iter(self, run: Run, index: int, batch: Batch) -> None:
        self.view.index = index
        self._call("after_train_iter", self.view.batch_idx, batch, self.view.outputs)

    def after_update(self, run: Run, result: UpdateResult) -> None:
        self.view.index = 0
        if self._adapters[0] is self:  # before the checkpoint hook
            self._agree(run, any(not _is_own(hook.cls) for hook in self._adapters))

    def after_train_epoch(self, run: Run) -> None:
        self.view.ended_epoch = run.previous.epoch
        self._call("after_train_epoch")
        self.view.ended_epoch = None

    def before_val(self, run: Run) -> None:
        self._call("before_val")
        self._call("before_val_epoch")

    def after_val(self, run: Run, metrics: Mapping[str, float]) -> None:
        self._call("after_val_epoch", {name.removeprefix("val/"): value for name, value in metrics.items()})
        self._call("after_val")
        if self._adapters[-1] is self:  # all of them know the values
            self._agree(run, True)

    def wants_save(self) -> bool:
        return self._save

    def before_save_checkpoint(self, run: Run, metrics: dict[str, float]) -> None:
        self._save = False
        checkpoint = {"meta": self.view.meta}
        self._call("before_save_checkpoint", checkpoint)
        self.additions = {}
        for key, value in checkpoint.items():
            try:
                json.dumps(value)
                self.additions[key] = value
            except (TypeError, ValueError, RecursionError):
                logger().warning(
                    "%s added %r to the checkpoint, a %s, which is not stored: only numbers, texts, lists and dicts"
                    " are.", self.cls.__name__, key, type(value).__name__,
                )  # fmt: skip

    def after_train(self, run: Run) -> None:
        self._call("after_train")

    def after_run(self, run: Run) -> None:
        self._call("after_run")

    def state_dict(self) -> dict[str, Any]:
        return self.additions

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.additions = dict(state)

    def _call(self, point: str, *arguments: Any) -> None:
        self.view.caller = f"{self.cls.__name__}.{point}"
        getattr(self.hook, point)(self.view, *arguments)

    def _agree(self, run: Run, on_one_rank: bool) -> None:
        """End the run where a hook set ``train_loop.stop_training``, and save where one called ``save_checkpoint``.
        Collective where hooks may have done so ``on_one_rank`` alone."""
        stop, save = bool(self.view.train_loop.stop_training), self.view.save_wanted
        self.view.save_wanted = False
        if on_one_rank and not run.done:
            stop, save = map(bool, dist.sum_floats([float(stop), float(save)]))
        self._save = self._save or save
        if stop and not run.done:
            names = ", ".join(hook.name for hook in self._adapters)
            run.request_stop(f"a hook of mmengine set train_loop.stop_training (one of {names})")


# ---- what a hook sees ----------------------------------------------------------------------------------------------


class NoSuchAttribute(TrainingError, AttributeError):
    """An attribute of mmengine's Runner that does not exist here; ``hasattr`` is False for it."""


class _View:
    """A part of the runner with the attributes that exist here; any other is an error that names them."""

    def __init__(self, runner: RunnerView, what: str, **attributes: Any) -> None:
        self._runner, self._what = runner, what
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NoSuchAttribute(
            f"{self._runner.caller} uses {self._what}.{name}, which does not exist in unigen_ds, or not in this run",
            allowed=", ".join(sorted(key for key in {*dir(type(self)), *vars(self)} if not key.startswith("_"))),
            remedy="the engine steps, the config loads and resumes, val_dataloader=dict(...) evaluates; or derive the"
            " hook from unigen_ds.hooks.base.Hook (docs/extending/hooks.md)",
        )


class _WithLength(_View):
    """Something of which a hook reads the length."""

    def __len__(self) -> int:
        return int(self._length)


class _Loop(_View):
    """``runner.train_loop``. Setting ``stop_training`` ends the run with a checkpoint, on every rank alike."""

    iter = property(lambda self: self._runner.iter)
    epoch = property(lambda self: self._runner.epoch)
    max_iters = property(lambda self: self._runner.max_iters)
    max_epochs = property(lambda self: self._runner.max_epochs)


class RunnerView(_View):
    """What ``runner`` is for a hook of mmengine. Read-only, except for ``train_loop.stop_training``."""

    def __init__(self, run: Run) -> None:
        from mmengine.runner import LogProcessor

        super().__init__(self, "runner")
        self._run, self.caller = run, ""
        self.index = 0
        """Index of the micro-batch in the present update; 0 between updates."""
        self.ended_epoch: int | None = None
        """The epoch that has ended, until ``after_train_epoch`` is over."""
        self.save_wanted = False
        self._by_epoch = (run.config.get("train_cfg") or {}).get("max_epochs") is not None
        self.timestamp = time.strftime("%Y%m%d_%H%M%S", time.localtime(dist.broadcast_object(time.time())))
        self.experiment_name = run.work_dir.name
        self.work_dir, self.log_dir = str(run.work_dir), str(run.work_dir / self.timestamp)
        self.rank, self.world_size = dist.rank(), dist.world_size()
        self.distributed = self.world_size > 1
        self.seed = int((run.config.get("randomness") or {}).get("seed") or 0)
        self.logger, self.log_processor = logger(), LogProcessor(by_epoch=self._by_epoch)
        self.message_hub = MessageHub.get_instance(f"{self.experiment_name}_{id(self):x}")
        self.cfg = Config(json_values(dict(run.config), by_name))
        samples, geometry = run.ruler.sequences_per_epoch, run.geometry
        batches = -(-samples // geometry.sequences_per_iteration)
        self.train_dataloader = self._loader("runner.train_dataloader", batches, samples, geometry.batch_size)
        self.train_loop = self._train_loop = _Loop(
            self, "runner.train_loop", stop_training=False, dataloader=self.train_dataloader
        )

    def _loader(self, what: str, batches: int, samples: int, batch_size: int) -> _View:
        """A data loader: its length in micro-batches, their size, and the length of its data set."""
        dataset = _WithLength(self, f"{what}.dataset", _length=samples)
        return _WithLength(self, what, _length=batches, batch_size=batch_size, dataset=dataset)

    @property
    def meta(self) -> dict[str, Any]:
        """What mmengine writes into each checkpoint."""
        return {"epoch": self.epoch, "iter": self.iter, "seed": self.seed}

    @property
    def iter(self) -> int:
        """Micro-batches of this run before the present one."""
        return self._run.progress.iteration(self._run.geometry) + self.index

    @property
    def epoch(self) -> int:
        return self._run.progress.epoch if self.ended_epoch is None else self.ended_epoch

    @property
    def max_iters(self) -> int:
        """``iter`` at the end of the training: whole updates, as the run makes them."""
        run = self._run
        rest = math.floor(run.total_sequences - run.progress.sequences) // run.geometry.global_batch_size
        return run.progress.iteration(run.geometry) + max(rest, 0) * run.geometry.accumulative_counts

    @property
    def max_epochs(self) -> int:
        return math.ceil(self._run.total_sequences / self._run.ruler.sequences_per_epoch)

    @property
    def batch_idx(self) -> int:
        """Index of the present micro-batch in its epoch; ``iter`` where the training's length is not in epochs."""
        if not self._by_epoch:
            return self.iter
        begin = self.epoch * self._run.ruler.sequences_per_epoch
        per_iteration = self._run.geometry.sequences_per_iteration
        return max(0, self._run.progress.sequences - begin) // per_iteration + self.index

    @property
    def model(self) -> nn.Module:
        """The model as the engine wraps it."""
        return self._run.backend.model

    @property
    def optim_wrapper(self) -> _View:
        """What can be read: this update's learning rates, and copies of the groups. The engine makes the steps."""
        groups = [dict(group) for group in self._run.hparams]
        rates = [float(group["lr"]) for group in groups]
        return _View(self, "runner.optim_wrapper", param_groups=groups, get_lr=lambda: {"lr": rates})

    @property
    def param_schedulers(self) -> list[_View]:
        """One entry to read. The schedule is a function of the progress."""
        rates = [float(group["lr"]) for group in self._run.hparams]
        return [_View(self, "runner.param_schedulers[0]", param_name="lr", last_step=self._run.progress.updates,
                      get_last_value=lambda: rates)]  # fmt: skip

    @cached_property
    def visualizer(self) -> mmengine.visualization.Visualizer:
        """mmengine's own, with the folder ``vis_data`` of ``log_dir``. Rank 0 alone writes."""
        from mmengine.visualization import Visualizer

        name = f"{self.experiment_name}_{id(self):x}"
        return Visualizer(name, vis_backends=[{"type": "LocalVisBackend"}], save_dir=self.log_dir)

    @property
    def val_dataloader(self) -> _View:
        """The loader of an evaluation: the batches of this rank, and the samples of all ranks."""
        run = self._run
        if not run.validation:
            raise AttributeError("val_dataloader")
        limit = next((hook.max_batches for hook in run.hooks if isinstance(hook, EvaluateHook)), None)
        batches = run.validation.num_batches(limit, dp_size=run.backend.dp_size)
        return self._loader("runner.val_dataloader", batches, len(run.validation), run.validation.batch_size)

    @property
    def val_loop(self) -> _View:
        """``dataloader`` alone: an evaluation is one step."""
        return _View(self, "runner.val_loop", dataloader=self.val_dataloader)

    @property
    def outputs(self) -> dict[str, Tensor]:
        """``loss/<term>`` of this rank's last micro-batch, means over its own targets; ``loss``, their weighted sum."""
        iteration = self._run.iteration
        if iteration is None:
            return {}
        counts = iteration.batch.target_counts()
        means = {name: value / counts[name] for name, value in iteration.sums.items() if counts.get(name)}
        summands = [value * iteration.loss_weights.get(name, 1.0) for name, value in means.items()]
        return {"loss": sum(summands[1:], summands[0]), **{f"loss/{k}": v for k, v in means.items()}} if means else {}

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        """Ask ``default_hooks.checkpoint`` for a save after the present update, on one rank or all. mmengine's
        arguments have no effect, which is logged once. Raises ``ConfigError`` where there is no such hook."""
        if not any(isinstance(hook, CheckpointHook) for hook in self._run.hooks):
            raise ConfigError("runner.save_checkpoint is called, and default_hooks.checkpoint=None saves nothing",
                              remedy="dict(type='CheckpointHook', interval=-1) saves when it is asked")  # fmt: skip
        if dist.is_main():
            notice("A hook of mmengine calls runner.save_checkpoint: the checkpoint is saved after the update by"
                   " default_hooks.checkpoint, which chooses folder, name and content.")  # fmt: skip
        self.save_wanted = True
