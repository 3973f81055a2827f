"""Keys of mmengine and other trainers: one table, ``KEYS``, of what each is here.

``translate`` is applied once in a start, to the plain values of a config after all overrides and before any check. A
runtime key of mmengine with an obvious meaning becomes a key of this project, or is left out where it changes nothing;
a line of the log states each. Where a config has both a key of mmengine's and ours, ours counts. A key that would
change the training stays where it is, and is an unknown key with the table's advice: ``hint``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unigen_ds.config.registry import class_name
from unigen_ds.core.errors import short_value

_ALWAYS: Sequence[Any] = ()
_NEVER: Sequence[Any] = (object(),)
_EMPTY: Sequence[Any] = (None, {}, [], "")


@dataclass(frozen=True)
class Key:
    why: str
    """Why it is not needed here; empty: only ``remedy`` applies."""
    values: Sequence[Any] = _ALWAYS
    """It is left out with one of these; ``_ALWAYS``: with any."""
    remedy: str = ""
    """What to do about another value; without one: to delete it."""


@dataclass(frozen=True)
class Change:
    source: str
    """``log_level='INFO'``"""
    why: str = ""
    """Why it is left out; empty: it is read as ``meaning``."""
    path: str = ""
    """Path of our key that it is read as."""
    meaning: str = ""

    def __str__(self) -> str:
        return f"Config: {self.source} " + (f"is left out: {self.why}." if self.why else f"is read as {self.meaning}.")


_LOOP = "there is one loop, and max_epochs or max_iters sets its length"
_ORDER = "the order follows from randomness.seed alone"
_LIVES = "workers live as long as the run"
_ENV = "delete it; env.dist_timeout_s and env.num_threads, and launcher are what there is of env_cfg"
_EVALUATION = "delete it, EvaluateHook in custom_hooks sets when and what is evaluated: docs/evaluation/validation.md"
_TEST = "delete it, and give val_dataloader the data: docs/evaluation/validation.md"

_NAMES = {
    "optim_wrapper.optimizer.lr": ("lr", "learning_rate"),
    "optim_wrapper.optimizer.betas": ("betas",),
    "optim_wrapper.optimizer.weight_decay": ("weight_decay",),
    "optim_wrapper.optimizer.type": ("optim_type",),
    "optim_wrapper.paramwise_cfg.custom_keys": ("custom_keys",),
    "optim_wrapper.accumulative_counts": ("gradient_accumulation_steps",),
    "optim_wrapper.clip_grad.max_norm": ("max_grad_norm",),
    "train_dataloader.batch_size": ("per_device_train_batch_size", "train_batch_size"),
    "train_dataloader.seq_length": ("max_length", "max_sequence_length"),
    "train_dataloader.num_workers": ("dataloader_num_workers",),
    "train_dataloader.dataset.data_path": ("data_path", "train_data_path"),
    "val_dataloader.dataset.data_path": ("val_data_path",),
    "train_dataloader.dataset.filters, a RatingFilter": (
        "relevance_min_rating", "image_correspondence_min_rating", "visual_dependency_min_rating",
        "formatting_min_rating",
    ),
    "train_dataloader.dataset.filters, an ImageCountFilter with max_tiles": ("max_images_per_example",),
    "train_dataloader.packing.max_tiles": ("max_images_per_knapsack",),
    "EvaluateHook.interval, of custom_hooks": ("eval_interval", "eval_steps"),
    "EvaluateHook.save_best, of custom_hooks": ("metric_for_best_model",),
    "AsyncEvaluateHook.command, of custom_hooks": ("lmms_eval_tasks",),
    "val_dataloader.split, a share of the records": ("val_size",),
    "train_cfg.max_epochs": ("num_epochs", "num_train_epochs"),
    "train_cfg.max_updates": ("total_steps",),
    "param_scheduler": ("warmup_ratio", "warmup_steps"),
    "default_hooks.checkpoint.interval": ("save_steps", "save_every"),
    "default_hooks.checkpoint.max_keep_ckpts": ("save_total_limit",),
    "default_hooks.logger.interval": ("log_every", "logging_steps"),
    "loss_weights.text": ("text_loss_weight",),
    "loss_weights.image": ("image_loss_weight",),
    "work_dir": ("output_dir",),
    "resume='CKPT'": ("resume_from", "resume_from_checkpoint"),
}  # fmt: skip
OUR_PATHS = {name: path for path, names in _NAMES.items() for name in names}
"""Names of settings in other trainers, and the path of each in this one."""
KEYS: dict[str, Key] = {
    "log_level": Key("", _NEVER, "write env.log_level"),
    "log_processor": Key("it changes what is shown, and each line has update, iteration and epoch"),
    "default_scope": Key("there is one registry for each kind of component"),
    "runner_type": Key("one Runner trains every config, by epochs and by iterations: see train_cfg"),
    "strategy": Key("", _NEVER, "backend=dict(type='deepspeed', config='zero2')"),
    "auto_scale_lr": Key("", _NEVER, "delete it, on_batch_change='linear' or 'sqrt' scales the learning rate"),
    "env_cfg": Key("nothing is left of it", _EMPTY, _ENV),
    "env_cfg.mp_cfg": Key("how processes are started changes no number"),
    "env_cfg.resource_limit": Key("it changes no number"),
    "env_cfg.dist_cfg": Key("nothing is left of it", _EMPTY, _ENV),
    "env_cfg.dist_cfg.backend": Key("the device decides it"),
    "env_cfg.dist_cfg.timeout": Key("", _NEVER, "write env.dist_timeout_s"),
    "env_cfg.cudnn_benchmark": Key("it is off", (False, None), _ENV),
    "train_cfg.type": Key(_LOOP),
    "train_cfg.by_epoch": Key(_LOOP),
    "optim_wrapper.type": Key("", _NEVER, "delete it, optim_wrapper.precision is 'fp32', 'bf16' or 'fp16'"),
    "optim_wrapper.dtype": Key("", _NEVER, "optim_wrapper.precision='bf16' or 'fp16'"),
    "optim_wrapper.clip_grad.error_if_nonfinite": Key("NanGuardHook skips and counts such updates", (False,)),
    "optim_wrapper.clip_grad.norm_type": Key("the norm is the L2 norm of all gradients", (2,)),
    "visualizer.type": Key("visualizer.vis_backends are the log writers"),
    "visualizer.name": Key("visualizer.run_name names the run in trackers"),
    "default_hooks.param_scheduler": Key("param_scheduler acts by itself"),
    "default_hooks.sampler_seed": Key(_ORDER),
    "default_hooks.logger.log_metric_by_epoch": Key("each line has update, iteration and epoch"),
    "default_hooks.runtime_info": Key("the logger has all of it"),
    "default_hooks.checkpoint.save_optimizer": Key("a checkpoint always has the optimizer's state", (True,)),
    "default_hooks.checkpoint.save_param_scheduler": Key("the learning rate is a function of the progress", (True,)),
    "default_hooks.checkpoint.save_last": Key("the end of a run is always saved", (True,)),
    "train_dataloader.sampler": Key(_ORDER, _NEVER),
    "train_dataloader.shuffle": Key(_ORDER, (True,)),
    "train_dataloader.collate_fn": Key("the model's processor makes a batch", _NEVER),
    "train_dataloader.persistent_workers": Key(_LIVES),
    "val_dataloader.sampler": Key("the values of an evaluation depend on no order", _NEVER),
    "val_dataloader.shuffle": Key("the values of an evaluation depend on no order", (True, False)),
    "val_dataloader.collate_fn": Key("the model's processor makes a batch", _NEVER),
    "val_dataloader.persistent_workers": Key(_LIVES),
    "val_dataloader.drop_last": Key("every sample is evaluated"),
    "val_dataloader.packing": Key("an evaluation has one sample in a sequence, so a sample is always the same", _NEVER),
    "randomness.deterministic": Key("it is off: env.deterministic", (False,), "write env.deterministic"),
    "randomness.diff_rank_seed": Key("every sample has a seed of its own", (False,)),
    "val_cfg": Key("EvaluateHook evaluates, in the precision of the training"),
    "val_evaluator": Key(
        "there is none", _EMPTY, "delete it, the metrics of EvaluateHook in custom_hooks replace it: docs/evaluation"
    ),
    "val_interval": Key("", _NEVER, _EVALUATION),
    "val_begin": Key("", _NEVER, _EVALUATION),
    **dict.fromkeys(("test_cfg", "test_dataloader", "test_evaluator"), Key("there is none", _EMPTY, _TEST)),
    "world_size": Key(
        "", _NEVER, "write world_size at the top of the config: it is compared with the number that the launcher starts"
    ),
    "save_best": Key("", _NEVER, "write EvaluateHook(save_best='val/loss') in custom_hooks"),
    "max_steps": Key(
        "", _NEVER, "train_cfg.max_updates counts optimizer steps, train_cfg.max_iters forward and backward passes"
    ),
    **{name: Key("", _NEVER, f"write {path}") for name, path in OUR_PATHS.items()},
}
"""Path of a key, or its name at any path -> what it is here."""
OTHER_KEYS = frozenset((
    "log_level", "log_processor", "default_scope", "runner_type", "env_cfg",
    "val_cfg", "val_evaluator", "test_cfg", "test_dataloader", "test_evaluator",
))  # fmt: skip
"""Sections of mmengine's that this project does not have."""


# ---- advice ---------------------------------------------------------------------------------------------------------


def hint(path: str, schema: Mapping[str, Any]) -> str | None:
    """What to do about an unknown key: another trainer's name, or a key that belongs to another section."""
    name = path.rpartition(".")[2]
    key = KEYS.get(path) or KEYS.get(name)
    if key is not None and OUR_PATHS.get(name) != path:
        return key.remedy or f"delete it, {key.why}"
    own_path = dict(reversed([*_paths(schema)])).get(name)
    return f"write {own_path}" if own_path and own_path != path else None


def _paths(schema: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(last name, whole path) of every key of a schema below its top."""
    for key, inner in schema.items():
        if key == "val_dataloader":
            continue
        if prefix:
            yield key, f"{prefix}.{key}"
        if isinstance(inner, Mapping):
            yield from _paths(inner, f"{prefix}.{key}" if prefix else key)


# ---- the translation ------------------------------------------------------------------------------------------------

_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
_OF_WRAPPERS = {"AmpOptimWrapper": "fp16", "OptimWrapper": "fp32"}  # fp16: as torch's autocast chooses on CUDA
_COLLATES = ("default_collate", "pseudo_collate")


def translate(config: dict[str, Any]) -> list[Change]:
    """Change the plain values of a config in place. Returns what became of each key of mmengine's."""
    translation = _Translation(config)
    translation.runtime()
    for section in ("train_dataloader", "val_dataloader"):
        translation.order(section)
    translation.no_validation()
    translation.evaluation()
    for path, key in sorted(KEYS.items(), key=lambda item: -item[0].count(".")):  # a section after what is in it
        node, last = translation.above(path)
        if last in node and (key.values is _ALWAYS or node[last] in key.values):
            translation.drop(path, key.why)
    return translation.changes


class _Translation:
    """A config, which is changed in place, and its changes."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.changes: list[Change] = []
        hooks = config.get("custom_hooks") or []
        self.hooks = [*hooks] if isinstance(hooks, (list, tuple)) else [hooks]

    def above(self, path: str) -> tuple[dict[str, Any], str]:
        """The mapping that holds a key, or an empty one, and the key's last name."""
        *above, last = path.split(".")
        node: Any = self.config
        for key in above:
            node = node.get(key) if isinstance(node, Mapping) else None
        return (node if isinstance(node, dict) else {}), last

    def get(self, path: str) -> Any:
        node, last = self.above(path)
        return node.get(last)

    def drop(self, path: str, why: str) -> None:
        """Remove a key, with a line unless it is None or empty."""
        node, last = self.above(path)
        if last in node and (value := node.pop(last)) not in _EMPTY:
            self.changes.append(Change(f"{path}={_short(value)}", why))

    def replace(self, path: str, value: Any, *sources: str) -> None:
        """Remove keys of mmengine's that are there, and set one of ours. A value that is there already counts."""
        section, key = path.split(".")
        node = self.config.get(section) or {}
        if not isinstance(node, dict):
            return
        self.config[section] = node
        source = ", ".join(f"{one}={_short(self.get(one))}" for one in sources if self.get(one) is not None)
        for one in sources:
            above, last = self.above(one)
            above.pop(last, None)
        if node.get(key) is not None:
            self.changes.append(Change(source, f"the config has {path}={node[key]!r}"))
        else:
            node[key] = value
            self.changes.append(Change(source, path=path, meaning=f"{path}={value!r}"))

    def runtime(self) -> None:
        """The level of the log, the timeout of collectives, the precision, and mmengine's writer into the work dir."""
        level, timeout = str(self.get("log_level")).upper(), self.get("env_cfg.dist_cfg.timeout")
        if level in ("DEBUG", "INFO", "WARNING", "ERROR"):
            self.replace("env.log_level", level, "log_level")
        if isinstance(timeout, (int, float)):
            self.replace("env.dist_timeout_s", timeout, "env_cfg.dist_cfg.timeout")
        sources = ("optim_wrapper.type", "optim_wrapper.dtype")
        kind, dtype = map(self.get, sources)
        if (kind is not None or dtype is not None) and (kind is None or class_name(kind).endswith("OptimWrapper")):
            of_dtype = _PRECISIONS.get(str(dtype).removeprefix("torch."))
            precision = _OF_WRAPPERS.get(class_name(kind)) if dtype is None else of_dtype
            if precision is not None:
                self.replace("optim_wrapper.precision", precision, *sources)
            elif dtype is None:
                self.drop("optim_wrapper.type", "optim_wrapper.precision sets the precision")
        node, last = self.above("visualizer.vis_backends")
        writers = node.get(last)
        for writer in [*writers] if isinstance(writers, (list, tuple)) else []:
            if isinstance(writer, Mapping) and class_name(writer.get("type")) == "LocalVisBackend":
                node[last] = [other for other in node[last] if other is not writer]
                source = f"visualizer.vis_backends: {_short(writer)}"
                self.changes.append(Change(source, "metrics.jsonl has every value"))

    def order(self, section: str) -> None:
        """mmengine's shuffled order is what there is, and its ways to make a batch are not needed."""
        sampler, collate = self.get(f"{section}.sampler"), self.get(f"{section}.collate_fn")
        if isinstance(sampler, Mapping) and {*sampler} <= {"type", "shuffle", "seed", "round_up"}:
            is_known = class_name(sampler.get("type", "DefaultSampler")) in ("DefaultSampler", "InfiniteSampler")
            shuffles = sampler.get("shuffle", True) is True and sampler.get("seed") is None
            if is_known and (shuffles or section == "val_dataloader"):
                self.drop(f"{section}.sampler", KEYS[f"{section}.sampler"].why)
        if class_name(collate.get("type") if isinstance(collate, Mapping) else collate) in _COLLATES:
            self.drop(f"{section}.collate_fn", KEYS[f"{section}.collate_fn"].why)

    def no_validation(self) -> None:
        """An empty text in place of validation data, or of the only file, as scripts pass it, means none."""
        loader = self.config.get("val_dataloader")
        if isinstance(loader, Mapping) and "dataset" in loader and loader.get("split") is None:
            data = loader["dataset"]
            only = data[0] if isinstance(data, (list, tuple)) and len(data) == 1 else data
            path = only.get("data_path", "its own") if isinstance(only, Mapping) else only
            loader = "" if path is None else path
        if loader != "":
            return
        self.config["val_dataloader"] = None
        self.changes.append(Change("val_dataloader", "it names no data, so there is no validation"))
        if any(map(_evaluates, self.hooks)):
            self.hooks = self.config["custom_hooks"] = [hook for hook in self.hooks if not _evaluates(hook)]
            self.changes.append(Change("EvaluateHook", "there is no validation"))

    def evaluation(self) -> None:
        """``val_interval`` and ``save_best`` of mmengine -> ``EvaluateHook``, whose own arguments count."""
        interval, best = self.get("train_cfg.val_interval"), self.get("default_hooks.checkpoint.save_best")
        own = next((hook for hook in self.hooks if _evaluates(hook)), None)
        hook = own or {"type": "EvaluateHook"}
        arguments: dict[str, dict[str, Any]] = {}
        if type(interval) is int and interval > 0:
            by_epoch = self.get("train_cfg.max_epochs") is not None
            arguments["train_cfg.val_interval"] = {"interval": interval, "by_epoch": by_epoch}
        if isinstance(best, str):
            name = "loss" if best == "auto" else best.removeprefix("val/")
            arguments["default_hooks.checkpoint.save_best"] = {"save_best": f"val/{name}"}
            if (rule := self.get("default_hooks.checkpoint.rule")) is not None:
                arguments["default_hooks.checkpoint.rule"] = {"rule": rule}
        for source, values in arguments.items():
            if self.config.get("val_dataloader") is None:
                self.drop(source, "there is no val_dataloader")
            elif own is not None and (source.endswith("val_interval") or hook.keys() & values.keys()):
                self.drop(source, f"custom_hooks has {hook!r}")
            else:
                node, last = self.above(source)
                text = f"{source}={_short(node.pop(last))}"
                position = self.hooks.index(hook) if hook in self.hooks else len(self.hooks)
                hook = {**hook, **values}
                self.hooks[position : position + 1] = [hook]
                self.config["custom_hooks"] = self.hooks
                self.changes.append(Change(text, path="custom_hooks", meaning=f"{hook!r} in custom_hooks"))


def _evaluates(hook: Any) -> bool:
    return isinstance(hook, Mapping) and class_name(hook.get("type")) == "EvaluateHook"


def _short(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else short_value(value)
