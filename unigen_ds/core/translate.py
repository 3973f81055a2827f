"""Runtime keys of mmengine and xtuner configs with an obvious meaning -> keys of this project, each with a line.

In: a config as plain values, which is changed in place. Out: lines for the log, and errors where such a key contradicts
another one. A key that would change the training has no translation: ``config_hints.py`` has the advice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unigen_ds.core.errors import ConfigError

_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_ONE_LOOP = "there is one loop, and max_epochs or max_iters sets its length"
_ORDER = "the order follows from randomness.seed alone"
_ANY_ORDER = "the values of an evaluation depend on no order"
_DROPPED: dict[str, str] = {
    "log_processor": "it changes what is shown, and each line has update, iteration and epoch",
    "default_scope": "there is one registry for each kind of component",
    "runner_type": "one Runner trains every config, by epochs and by iterations",
    "env_cfg.mp_cfg": "how processes are started changes no number",
    "env_cfg.resource_limit": "it changes no number",
    "env_cfg.dist_cfg.backend": "the device decides it",
    "train_cfg.type": _ONE_LOOP,
    "visualizer.type": "visualizer.vis_backends are the log writers",
    "visualizer.name": "visualizer.run_name names the run in trackers",
    "default_hooks.param_scheduler": "param_scheduler acts by itself",
    "default_hooks.sampler_seed": _ORDER,
    "default_hooks.runtime_info": "the logger has all of it",
    "train_dataloader.persistent_workers": "workers live as long as the run",
    "val_dataloader.persistent_workers": "workers live as long as an evaluation",
    "val_dataloader.drop_last": "every sample is evaluated",
}
"""Keys without a counterpart whose removal changes no number, and why."""
_NO_EFFECT: dict[str, tuple[Any, str]] = {
    "optim_wrapper.clip_grad.error_if_nonfinite": (False, "NanGuardHook skips and counts such updates"),
    "optim_wrapper.clip_grad.norm_type": (2, "the norm is the L2 norm of all gradients"),
    "randomness.deterministic": (False, "it is off: env.deterministic"),
    "randomness.diff_rank_seed": (False, "every sample has a seed of its own"),
    "env_cfg.cudnn_benchmark": (False, "it is off"),
    "default_hooks.checkpoint.save_optimizer": (True, "a checkpoint always has the optimizer's state"),
    "default_hooks.checkpoint.save_param_scheduler": (True, "the learning rate is a function of the progress"),
    "default_hooks.checkpoint.save_last": (True, "the end of a run is always saved"),
}
"""Keys without a counterpart that change nothing with this value, and why."""


FOREIGN = frozenset((
    "log_level", "log_processor", "default_scope", "runner_type", "env_cfg",
    "val_cfg", "val_evaluator", "test_cfg", "test_dataloader", "test_evaluator",
))  # fmt: skip
"""Sections of mmengine's that this project does not have; ``translate`` removes what it understands of them."""
_READ = (
    "train_cfg.by_epoch", "train_cfg.val_interval", "optim_wrapper.type", "optim_wrapper.dtype",
    "default_hooks.checkpoint.save_best", "default_hooks.checkpoint.rule",
    *(f"{part}_dataloader.{key}" for part in ("train", "val") for key in ("sampler", "shuffle", "collate_fn")),
)  # fmt: skip
"""Keys that ``translate`` reads, beside those of the tables and ``FOREIGN``."""


def is_translated(path: Sequence[str]) -> bool:
    """Whether ``translate`` reads that key, or one that contains it, with some value."""
    dotted = [".".join(path[: k + 1]) for k in range(len(path))]
    return path[0] in FOREIGN or any(key in (*_DROPPED, *_NO_EFFECT, *_READ) for key in dotted)


def translate(config: dict[str, Any]) -> tuple[list[str], list[ConfigError]]:
    """Change ``config`` in place. Returns lines for the log, and errors."""
    work = _Translation(config)
    for dotted, why in _DROPPED.items():
        work.drop(dotted, why)
    for dotted, (value, why) in _NO_EFFECT.items():
        if work.get(dotted) is not None and work.get(dotted) == value:
            work.drop(dotted, why)
    work.collate()
    work.local_writer()
    work.log_level()
    work.environment()
    work.loop()
    work.precision()
    work.sampler()
    work.no_validation()
    work.validation()
    work.best()
    return work.lines, work.errors


class _Translation:
    """One config, and what was done about it."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.lines: list[str] = []
        self.errors: list[ConfigError] = []

    def _above(self, dotted: str) -> tuple[Any, str]:
        """The mapping that holds a key, or an empty one, and the key's last name."""
        *above, last = dotted.split(".")
        node: Any = self.config
        for key in above:
            node = node.get(key) if isinstance(node, Mapping) else None
        return (node if isinstance(node, dict) else {}), last

    def get(self, dotted: str) -> Any:
        node, last = self._above(dotted)
        return node.get(last)

    def pop(self, dotted: str) -> Any:
        node, last = self._above(dotted)
        return node.pop(last, None)

    def drop(self, dotted: str, why: str) -> None:
        node, last = self._above(dotted)
        if last in node:
            value = node.pop(last)
            self.lines.append(f"Config: {dotted}={_short(value)} is left out: {why}.")

    def set(self, dotted: str, value: Any, *, was: str) -> None:
        """Set a key of ours; a different value that is there already is a contradiction."""
        section, key = dotted.split(".")
        node = self.config.setdefault(section, {})
        if node is None:
            node = self.config[section] = {}
        if node.get(key, value) != value:
            problem = f"the config has {was} and {dotted}={node[key]!r}"
            self.errors.append(ConfigError(problem, remedy=f"delete {was.partition('=')[0]}"))
            return
        node[key] = value
        self.lines.append(f"Config: {was} is read as {dotted}={value!r}.")

    def log_level(self) -> None:
        level = self.get("log_level")
        if isinstance(level, str) and level.upper() in _LEVELS:
            self.pop("log_level")
            self.set("env.log_level", level.upper(), was=f"log_level={level!r}")

    def collate(self) -> None:
        """mmengine's own ways to make a batch of samples: the model's processor does it here."""
        for section in ("train_dataloader", "val_dataloader"):
            given = self.get(f"{section}.collate_fn")
            kind = given.get("type") if isinstance(given, Mapping) else given
            if _name(kind) in ("default_collate", "pseudo_collate"):
                self.drop(f"{section}.collate_fn", "the model's processor makes a batch")

    def local_writer(self) -> None:
        """mmengine's writer into the work dir."""
        node, last = self._above("visualizer.vis_backends")
        given = node.get(last)
        for one in [*given] if isinstance(given, (list, tuple)) else []:
            if isinstance(one, Mapping) and _name(one.get("type")) == "LocalVisBackend":
                node[last] = [other for other in node[last] if other is not one]
                self.lines.append(
                    f"Config: visualizer.vis_backends: {_short(one)} is left out: metrics.jsonl has every value."
                )

    def environment(self) -> None:
        """``env_cfg``: what is left of it is an unknown key."""
        timeout = self.get("env_cfg.dist_cfg.timeout")
        if isinstance(timeout, (int, float)):
            self.pop("env_cfg.dist_cfg.timeout")
            self.set("env.dist_timeout_s", timeout, was=f"env_cfg.dist_cfg.timeout={timeout!r}")
        given = self.config.get("env_cfg")
        left: dict[str, Any] = given if isinstance(given, dict) else {}
        for key in [*left]:
            if left[key] and not (key == "dist_cfg" and isinstance(left[key], Mapping)):
                problem = f"env_cfg.{key} is {left.pop(key)!r}"
                remedy = "delete it; env.dist_timeout_s and env.num_threads, and launcher are what there is of env_cfg"
                self.errors.append(ConfigError(problem, remedy=remedy))
        for section in ("env_cfg.dist_cfg", "env_cfg"):
            node, last = self._above(section)
            if last in node and not node[last]:
                node.pop(last)

    def loop(self) -> None:
        """``train_cfg.by_epoch`` agrees with the limit that is given."""
        by_epoch = self.get("train_cfg.by_epoch")
        if not isinstance(by_epoch, bool):
            return
        self.pop("train_cfg.by_epoch")
        limit = "max_epochs" if by_epoch else "max_iters"
        if self.get(f"train_cfg.{limit}") is None:
            problem = f"the config has train_cfg.by_epoch={by_epoch} and no train_cfg.{limit}"
            self.errors.append(ConfigError(problem, remedy=f"give train_cfg.{limit}, or delete by_epoch"))
            return
        self.lines.append(f"Config: train_cfg.by_epoch={by_epoch} is left out: {_ONE_LOOP}.")

    def precision(self) -> None:
        """``optim_wrapper.type`` and ``dtype`` -> ``precision``."""
        kind, dtype = self.get("optim_wrapper.type"), self.get("optim_wrapper.dtype")
        name = kind if isinstance(kind, str) else getattr(kind, "__name__", None)
        name = str(name).rpartition(".")[2] if name else None
        if name is not None and not name.endswith("OptimWrapper"):
            return
        found = _PRECISIONS.get(str(dtype).removeprefix("torch."))
        if dtype is not None and found is None:
            return  # stays an unknown key, with its hint
        if name == "AmpOptimWrapper" and dtype is None:
            found = "fp16"  # as torch's autocast chooses on CUDA
        elif name == "OptimWrapper" and dtype is None:
            found = "fp32"
        given = ", ".join(
            f"optim_wrapper.{key}={_short(value)}" for key, value in (("type", kind), ("dtype", dtype)) if value
        )
        if not given:
            return
        self.pop("optim_wrapper.type")
        self.pop("optim_wrapper.dtype")
        if found is None:
            self.lines.append(f"Config: {given} is left out: optim_wrapper.precision sets the precision.")
        else:
            self.set("optim_wrapper.precision", found, was=given)

    def sampler(self) -> None:
        """A shuffled order is what there is; any other sampler is refused."""
        for section in ("train_dataloader", "val_dataloader"):
            sampler = self.get(f"{section}.sampler")
            if not isinstance(sampler, Mapping):
                continue
            kind = sampler.get("type", "DefaultSampler")
            name = _name(kind)
            known = name in ("DefaultSampler", "InfiniteSampler") and {*sampler} <= {
                "type",
                "shuffle",
                "seed",
                "round_up",
            }
            evaluated = section == "val_dataloader"  # in any order: the values are the same
            if known and (evaluated or (sampler.get("shuffle", True) is True and sampler.get("seed") is None)):
                self.drop(f"{section}.sampler", _ANY_ORDER if evaluated else _ORDER)
        if self.get("train_dataloader.shuffle") is True:
            self.drop("train_dataloader.shuffle", _ORDER)
        if isinstance(self.get("val_dataloader.shuffle"), bool):
            self.drop("val_dataloader.shuffle", _ANY_ORDER)

    def no_validation(self) -> None:
        """An empty text in place of validation data, as scripts pass it, means none."""
        given = self.get("val_dataloader")
        empty = given == "" or (isinstance(given, Mapping) and _names_no_data(given))
        if not empty:
            return
        self.config["val_dataloader"] = None
        self.lines.append("Config: val_dataloader names no data: there is no validation.")
        hooks = self.config.get("custom_hooks")
        if isinstance(hooks, (list, tuple)):
            kept = [hook for hook in hooks if not _is_evaluation(hook)]
            if len(kept) < len(hooks):
                self.config["custom_hooks"] = kept
                self.lines.append("Config: EvaluateHook is left out, since there is no validation.")

    def validation(self) -> None:
        """mmengine's loops and evaluators -> ``EvaluateHook``."""
        for key in ("val_cfg", "val_evaluator", "test_cfg", "test_dataloader", "test_evaluator"):
            if key in self.config and not self.config[key]:
                self.pop(key)
        if isinstance(loop := self.get("val_cfg"), Mapping) and {*loop} <= {"type", "fp16"}:
            self.drop("val_cfg", "EvaluateHook evaluates, in the precision of the training")
        interval = self.get("train_cfg.val_interval")
        if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
            return
        if self.config.get("val_dataloader") is None:
            self.drop("train_cfg.val_interval", "there is no val_dataloader")
            return
        self.pop("train_cfg.val_interval")
        was, hooks = f"train_cfg.val_interval={interval}", self._hooks()
        if any(_is_evaluation(hook) for hook in hooks):
            self.errors.append(ConfigError(f"the config has {was} and an EvaluateHook", remedy="delete val_interval"))
            return
        by_epoch = self.get("train_cfg.max_epochs") is not None
        hook = {"type": "EvaluateHook", "interval": interval, "by_epoch": by_epoch}
        self.config["custom_hooks"] = [*hooks, hook]
        self.lines.append(f"Config: {was} is read as {hook!r} in custom_hooks.")

    def best(self) -> None:
        """``save_best`` and ``rule`` of mmengine's ``CheckpointHook`` -> those of ``EvaluateHook``."""
        given = {key: self.get(f"default_hooks.checkpoint.{key}") for key in ("save_best", "rule")}
        if not isinstance(given["save_best"], str) or not isinstance(given["rule"], str | None):
            return  # stays an unknown key, with its hint
        if self.config.get("val_dataloader") is None:
            for key in given:
                self.drop(f"default_hooks.checkpoint.{key}", "there is no val_dataloader")
            return
        for key in given:
            self.pop(f"default_hooks.checkpoint.{key}")
        name = "loss" if given["save_best"] == "auto" else given["save_best"].removeprefix("val/")
        wanted = {"save_best": f"val/{name}", **({"rule": given["rule"]} if given["rule"] else {})}
        was, hooks = f"default_hooks.checkpoint.save_best={given['save_best']!r}", self._hooks()
        number = next((k for k, hook in enumerate(hooks) if _is_evaluation(hook)), len(hooks))
        hook = dict(hooks[number]) if number < len(hooks) else {"type": "EvaluateHook"}
        if any(hook.get(key, value) != value for key, value in wanted.items()):
            problem = f"the config has {was} and EvaluateHook.save_best={hook.get('save_best')!r}"
            self.errors.append(ConfigError(problem, remedy="delete default_hooks.checkpoint.save_best and rule"))
            return
        self.config["custom_hooks"] = [*hooks[:number], {**hook, **wanted}, *hooks[number + 1 :]]
        shown = ", ".join(f"{key}={value!r}" for key, value in wanted.items())
        self.lines.append(f"Config: {was} is read as EvaluateHook({shown}) in custom_hooks.")

    def _hooks(self) -> list[Any]:
        """``custom_hooks``, which may be one hook alone."""
        hooks = self.config.get("custom_hooks") or []
        return [*hooks] if isinstance(hooks, (list, tuple)) else [hooks]


def _names_no_data(loader: Mapping[str, Any]) -> bool:
    """Whether a data set, or the file of the only one, is an empty text."""
    if "dataset" not in loader or loader.get("split") is not None:
        return False
    data = loader["dataset"]
    only = data[0] if isinstance(data, (list, tuple)) and len(data) == 1 else data
    return only in ("", None) or (isinstance(only, Mapping) and only.get("data_path", "given") in ("", None))


def _is_evaluation(hook: Any) -> bool:
    return isinstance(hook, Mapping) and _name(hook.get("type")) == "EvaluateHook"


def _name(kind: Any) -> str:
    """Of a class, or of its name with its module."""
    return str(getattr(kind, "__name__", kind)).rpartition(".")[2]


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, type) else value.__name__
    return text if len(text) <= 60 else f"{text[:57]}..."
