"""Hooks that are written for mmengine's Runner, unmodified: ``custom_hooks=[dict(type='mmengine.ProfilerHook', ...)]``.

``MMEngineHook`` calls such a hook at the points and with the arguments of mmengine's loops, and passes a ``RunnerView``
as the runner. mmengine's ``RuntimeInfoHook`` runs beside the first one (``completed``), so ``runner.message_hub`` has
what it has there. Validation is one step here: ``before_val_iter`` and ``after_val_iter`` are not called.

mmengine's hooks and Runner are imported where a config names a hook of mmengine: they import DeepSpeed, which needs
seconds and prints.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmengine.registry import HOOKS as MMENGINE_HOOKS

from unigen_ds.core import dist
from unigen_ds.core.batch import Batch
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.log import logger
from unigen_ds.core.registry import HOOKS, check_arguments
from unigen_ds.core.settings import Component
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.hooks.evaluate import check_result

if TYPE_CHECKING:
    import mmengine.hooks

    from unigen_ds.hooks.mmengine_runner import RunnerView

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
    return "EarlyStoppingHook" in map(_name, (adapts or hook.cls).__mro__)


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
        from unigen_ds.hooks.mmengine_runner import RunnerView

        others = [hook for hook in run.hooks if isinstance(hook, MMEngineHook)]
        self.view = others[0].view or RunnerView(run)
        others[0].view = self.view
        self._first, self._last = others[0] is self, others[-1] is self
        self._users = [hook for hook in others if not _is_own(hook.cls)]
        stopping = [
            hook for hook in others if hook in self._users or "EarlyStoppingHook" in map(_name, hook.cls.__mro__)
        ]
        self._may_stop = ", ".join(hook.name for hook in stopping)
        own = [name for name in _UNUSED_POINTS if not _is_own(_owner(self.cls, name))]
        if own and dist.is_main():
            logger().warning(
                "%s.%s will not be called: validation is one step here.", self.cls.__name__, ", ".join(own)
            )
        if "EarlyStoppingHook" in map(_name, self.cls.__mro__):
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
        from unigen_ds.hooks.mmengine_runner import NoSuchAttribute

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
    if of_mmengine and not any("RuntimeInfoHook" in map(_name, hook.cls.__mro__) for hook in of_mmengine):
        of_mmengine.insert(0, MMEngineHook("mmengine.hooks.RuntimeInfoHook"))
        hooks = [*hooks, of_mmengine[0]]
    for number, hook in enumerate(of_mmengine, 1):
        if any(other.name == hook.name for other in of_mmengine[: number - 1]):
            hook.name = f"{hook.name}#{number}"
    return list(hooks)


def _name(cls: type) -> str:
    return cls.__name__


def _owner(cls: type, method: str) -> type:
    """The class that defines a method."""
    return next(base for base in cls.__mro__ if method in vars(base))


_REPLACED = {
    **NOT_NEEDED,
    "CheckpointHook": "default_hooks.checkpoint saves",
    "EMAHook": "custom_hooks=[dict(type='EMAHook', momentum=...)] averages the engine's shards",
}
