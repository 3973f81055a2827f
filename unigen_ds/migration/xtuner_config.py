"""Configs of mmengine and xtuner, F-LMM's among them: a file, options of ``xtuner train``, or settings alone.

Keys of mmengine are translated by ``config/translation.py``; models and data sets of xtuner by ``xtuner_model.py``, and
what else its configs have here: hooks, the engine, arguments of its command. Of everything else a comment remains.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unigen_ds.config.file import read_file
from unigen_ds.config.overrides import parse_override
from unigen_ds.config.translation import FOREIGN, translate
from unigen_ds.core.errors import ConfigError
from unigen_ds.migration.commands import MAPPINGS, Command, Setting
from unigen_ds.migration.draft import SECTIONS, Draft, Table, assignment, boolean, leaves, number, recipe, text, whole
from unigen_ds.migration.xtuner_model import REASONS, Reference, is_own, last_name, translate_data, translate_model

_HOOKS = {
    "DatasetInfoHook": "the log has statistics of the data, and tools/inspect_data.py shows samples",
    "ThroughputHook": "the log has tokens_per_second",
    "VarlenAttnArgsToMessageHubHook": "packed documents never see each other",
    "HFCheckpointHook": "SavePretrainedHook writes a directory of transformers, and tools/export.py",
}
_SAME_HOOKS = ("CheckpointHook", "LoggerHook", "IterTimerHook", "EMAHook", "EarlyStoppingHook")
_OPTIMIZERS = ("AdamW", "Adam", "SGD", "Muon")
_RESUMED = "a resume continues the curve by itself: docs/resume.md"


def _optional(value: Any) -> str | None:
    return None if value in (None, "None", "") else text(value)


def _resume(value: Any) -> Any:
    return "auto" if value is True else {"true": True, "false": False}.get(text(value).lower(), value)


_TABLE: Table = {
    "work_dir": (text, ("work_dir",)),
    "launcher": (text, ("launcher",)),
    "randomness.seed": (whole, ("seed",)),
    "resume": (_resume, ("resume",)),
    "load_from": (_optional, ("load_from",)),
    "world_size": (whole, ("num_gpus",)),
    "train_dataloader.batch_size": (whole, ("batch_size",)),
    "optim_wrapper.accumulative_counts": (whole, ("accumulative_counts",)),
    "optim_wrapper.optimizer.lr": (number, ("lr",)),
    "train_cfg.max_epochs": (number, ("max_epochs",)),
    "default_hooks.checkpoint.interval": (whole, ("save_steps", "interval")),
    "default_hooks.checkpoint.max_keep_ckpts": (whole, ("save_total_limit", "max_keep_ckpts")),
    "default_hooks.checkpoint.by_epoch": (boolean, ("by_epoch",)),
}
"""Arguments of ``xtuner train``, and names that xtuner's configs give their settings."""


def config_file(command: Command) -> Draft:
    """A config in Python, alone or after ``xtuner train``; or settings alone: ``batch_size=64 resume=True``."""
    files = [name for name in command.files if name.endswith((".py", *MAPPINGS))]
    if len(files) > 1:
        raise ConfigError(f"{len(files)} configs are given: {', '.join(files)}", allowed="one")
    if files:
        draft = _of_file(Path(files[0]), command)
    else:
        draft = Draft(recipe("llava_zero2"), command, what="Settings of a config of xtuner")
        draft.notes.append("The model and the data are those of the shipped config llava_zero2: edit them.")
    draft.carry_all(_TABLE)
    draft.finish({"original_iterations_per_epoch": _RESUMED, "current_epoch": _RESUMED})
    return draft


def _of_file(path: Path, command: Command) -> Draft:
    command.files.remove(str(path) if str(path) in command.files else command.files[0])
    names = read_file(path).to_dict()
    _options(command, names)
    sections = {name: _copy(value) for name, value in names.items() if name in SECTIONS or name in FOREIGN}
    engine = sections.pop("strategy", None) or names.get("strategy")
    draft = Draft(sections, command, what=f"The config {path.name}")
    draft.num_settings += sum(1 for _ in leaves(sections))
    translate_model(draft)
    translate_data(draft)
    _hooks(draft)
    _engine(draft, engine)
    _keys_of_mmengine(draft)
    return draft


def _options(command: Command, names: dict[str, Any]) -> None:
    """``--cfg-options K=V ...`` of mmengine's and xtuner's command lines: as if the file had it."""
    for setting in [one for one in command.settings if one.name in ("cfg_options", "options")]:
        command.settings.remove(setting)
        for option in setting.value if isinstance(setting.value, list) else [setting.value]:
            try:
                dotted, value = parse_override(str(option))
                *above, last = dotted.split(".")
                node: Any = names
                for step in above:
                    node = node[int(step)] if isinstance(node, list) else node.setdefault(step, {})
                node[int(last) if isinstance(node, list) else last] = value
            except (ConfigError, ValueError, LookupError, AttributeError, TypeError):
                command.others.append((f"--cfg-options {option}", "it is no KEY=VALUE of a section of this config"))


def _copy(value: Any, key: str = "") -> Any:
    """Without shared parts: many parts of a config have the same tokenizer. The path of a class may be a text."""
    if isinstance(value, Mapping):
        return {name: _copy(inside, name) for name, inside in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_copy, value))
    is_class = key == "type" and isinstance(value, str) and ("." in value or value in _BARE)
    return Reference(value) if is_class else value


_BARE = ("LLaVAModel", "SupervisedFinetune", "LLaVADataset", "process_hf_dataset", "EvaluateChatHook", *_HOOKS)
"""Classes of xtuner that a text names without their module."""


def _keys_of_mmengine(draft: Draft) -> None:
    if draft.get("default_hooks.checkpoint.save_optimizer") is False:
        draft.drop("default_hooks.checkpoint.save_optimizer", "a checkpoint always has the optimizer's state")
    for change in translate(draft.values):
        if change.path:
            draft.comments[change.path] = change.source
        else:
            draft.omit(change.source, change.why)
    optimizer = draft.get("optim_wrapper.optimizer.type")
    known = optimizer is None or is_own(optimizer) or last_name(optimizer) in _OPTIMIZERS
    if not known and "custom_imports" not in draft.values:
        draft.omit(assignment("optim_wrapper.optimizer.type", optimizer), "AdamW of torch is used")
        draft.set("optim_wrapper.optimizer.type", "AdamW")
    for path, value in [*leaves(draft.values)]:
        if isinstance(value, Reference) and (not path.startswith("custom_hooks") or is_own(value)):
            draft.set(path, value.last)


def _hooks(draft: Draft) -> None:
    hooks = draft.values.get("custom_hooks")
    if hooks is None:
        return
    kept: list[Any] = []
    for index, hook in enumerate(hooks if isinstance(hooks, (list, tuple)) else [hooks]):
        kind = hook.get("type") if isinstance(hook, Mapping) else None
        name, path = last_name(kind), f"custom_hooks[{index}]"
        if name == "EvaluateChatHook":
            kept += _preview(draft, hook, path)
        elif is_own(kind) or name in _SAME_HOOKS:
            kept.append({**hook, "type": name})
        elif not isinstance(kind, Reference) or kind.startswith("mmengine."):
            kept.append({**hook, "type": str(kind)} if kind else hook)
        else:
            why = _HOOKS.get(name, "this project has no such hook: write it for mmengine's Runner")
            draft.omit(assignment(path, hook), why)
    draft.values["custom_hooks"] = kept


def _preview(draft: Draft, hook: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
    """``EvaluateChatHook`` -> ``PreviewHook``: the same questions about the same pictures, where these are files."""
    images, questions = (
        [one] if isinstance(one := hook.get(f"evaluation_{key}") or [], str) else [*one] for key in ("images", "inputs")
    )
    local = [image for image in images if "://" not in str(image)]
    for image in images:
        if image not in local:
            draft.omit(f"{path}.evaluation_images: {image}", "nothing is downloaded: save it, and give its path")
    carried = ("type", "evaluation_images", "evaluation_inputs", "every_n_iters", "max_new_tokens")
    for key, value in hook.items():
        if key not in carried and value not in ("", None):
            draft.omit(assignment(f"{path}.{key}", value), REASONS.get(key, "PreviewHook has no such argument"))
    if images and not local:
        draft.omit(f"{path}: {hook['type']}", "it asks about pictures, and none of them is a file")
        return []
    pairs = [{"prompt": question, "images": [image]} for image in local for question in questions]
    preview = {"type": "PreviewHook", "prompts": pairs if local else questions, "unit": "iteration"}
    length = {"max_new_tokens": hook["max_new_tokens"]} if hook.get("max_new_tokens") else {}
    return [{**preview, "interval": hook.get("every_n_iters") or 500, **length}]


def _engine(draft: Draft, strategy: Any) -> None:
    """``strategy`` and ``--deepspeed deepspeed_zero2`` -> ``backend``; F-LMM and LLaVA train with ZeRO-2."""
    preset, setting = draft.take("deepspeed")
    of: Setting | str | None = setting
    if preset is not None:
        name = preset if preset.endswith(".json") else Path(preset).stem.removeprefix("deepspeed_")
    elif isinstance(strategy, Mapping):
        name = f"zero{(strategy.get('zero_optimization') or {}).get('stage', 2)}"
        of = assignment("strategy", strategy)
    elif draft.get("backend") is None:
        name = "zero2"
        draft.notes.append("The config names no engine, which xtuner's command line does: ZeRO-2, as the guide has it.")
    else:
        return
    draft.set("backend", {"type": "deepspeed", "config": name}, of=of)
