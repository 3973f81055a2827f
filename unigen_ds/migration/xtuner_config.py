"""Configs of mmengine and xtuner, F-LMM's among them: read statically, then translated section by section.

What ``core/translate.py`` reads is translated by it. Classes of xtuner with a counterpart (LLaVA and language models,
their data sets, the chat hook) are translated here; of everything else the name and the reason are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unigen_ds.core.config import parse_override
from unigen_ds.core.config_file import read_file, unread_names
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.translate import FOREIGN, translate
from unigen_ds.migration.commands import Command
from unigen_ds.migration.draft import SECTIONS, Draft, boolean, number, recipe, text, whole
from unigen_ds.migration.static_config import Computed, Reference, read_static
from unigen_ds.migration.xtuner_data import translate_data
from unigen_ds.migration.xtuner_model import translate_model
from unigen_ds.migration.xtuner_values import (
    OWN_PROCESSOR,
    TEMPLATE,
    drop,
    is_ours,
    last_name,
    leaves,
    shown,
)

_HOOKS = {
    "DatasetInfoHook": "the log has statistics of the data, and tools/inspect_data.py shows samples",
    "ThroughputHook": "the log has tokens_per_second",
    "VarlenAttnArgsToMessageHubHook": "packed documents never see each other",
    "HFCheckpointHook": "SavePretrainedHook writes a directory of transformers, and tools/export.py",
}
_CLASSES = {
    "LLaVAModel", "SupervisedFinetune", "LLaVADataset", "process_hf_dataset", "load_dataset", "EvaluateChatHook",
    "LengthGroupedSampler", *_HOOKS,
}  # fmt: skip
"""Classes that are translated, by their last name."""
_OPTIMIZERS = ("AdamW", "Adam", "SGD", "Muon")
_OURS = ("CheckpointHook", "LoggerHook", "IterTimerHook", "EMAHook", "EarlyStoppingHook")


def config_file(command: Command) -> Draft:
    """A config in Python, alone or after ``xtuner train``; or settings alone: ``batch_size=64 resume=True``."""
    files = [name for name in command.files if name.endswith((".py", ".yaml", ".yml", ".json"))]
    if len(files) > 1:
        raise ConfigError(f"{len(files)} configs are given: {', '.join(files)}", allowed="one")
    if not files:
        return _snippet(command)
    path = Path(files[0])
    command.files.remove(files[0])
    names, statements = read_static(path) if path.suffix == ".py" else (read_file(path).to_dict(), [])
    _overrides(command, names)
    sections = {name: _copied(value) for name, value in names.items() if name in SECTIONS or name in FOREIGN}
    draft = Draft(sections, command, what=f"The config {path.name}")
    draft.num_given = sum(1 for _ in leaves(sections)) + len(statements) + len(command.given)
    for statement in statements:
        draft.leave(statement, "the file is not executed, and this is no assignment of plain values")
    _unread(draft, path, names)
    _computed(draft)
    _sections(draft)
    _arguments(draft)
    return draft


def _copied(value: Any) -> Any:
    """Without shared parts: many parts of a config have the same tokenizer. A class of xtuner's may be a text."""
    if isinstance(value, Mapping):
        return {
            key: Reference(inside) if key == "type" and _is_xtuners(inside) else _copied(inside)
            for key, inside in value.items()
        }
    return type(value)(map(_copied, value)) if isinstance(value, (list, tuple)) else value


def _is_xtuners(value: Any) -> bool:
    return isinstance(value, str) and not isinstance(value, Computed) and last_name(value) in _CLASSES


def _unread(draft: Draft, path: Path, names: Mapping[str, Any]) -> None:
    """Names at the top that are no section, and that nothing reads."""
    for name in sorted(unread_names(path) & {*names}):
        known = name in SECTIONS or name in FOREIGN or name.startswith("__") or isinstance(names[name], Reference)
        if not known:
            draft.leave(shown(name, names[name]), "nothing in the file reads it, so it has no effect there either")


def _computed(draft: Draft) -> None:
    """Values that only executing the file would give."""
    for path, value in [*leaves(draft.values)][::-1]:
        if isinstance(value, Computed):
            draft.leave(f"{path} = {value}", "the file is not executed: write the value that this has")
            draft.remove(path)


def _sections(draft: Draft) -> None:
    translate_model(draft)
    translate_data(draft)
    _hooks(draft)
    _engine(draft)
    if (
        isinstance(draft.get("default_hooks.checkpoint"), Mapping)
        and draft.get("default_hooks.checkpoint.save_optimizer") is False
    ):
        drop(draft, "default_hooks.checkpoint.save_optimizer", "a checkpoint always has the optimizer's state")
    lines, errors = translate(draft.values)
    for line in lines:
        given, _, why = line.removeprefix("Config: ").partition(" is left out: ")
        if why:
            draft.leave(given, why.rstrip("."))
        else:
            before, _, after = given.rstrip(".").partition(" is read as ")
            draft.comments[after.partition("=")[0]] = before
    for error in errors:
        draft.notes.append(str(error))
    optimizer = draft.get("optim_wrapper.optimizer.type")
    own = optimizer is None or is_ours(optimizer) or "custom_imports" in draft.values
    if not own and last_name(optimizer) not in _OPTIMIZERS:
        draft.leave(shown("optim_wrapper.optimizer.type", optimizer), "AdamW of torch is used")
        draft.set("optim_wrapper.optimizer.type", "AdamW")
    for path, value in [*leaves(draft.values)]:
        if isinstance(value, Reference) and not (path.startswith("custom_hooks") and not is_ours(value)):
            draft.set(path, value.last)


def _hooks(draft: Draft) -> None:
    given = draft.values.get("custom_hooks")
    kept: list[Any] = []
    for index, hook in enumerate(given if isinstance(given, (list, tuple)) else [given] if given else []):
        kind = hook.get("type") if isinstance(hook, Mapping) else None
        name = last_name(kind)
        path = f"custom_hooks[{index}]"
        if name == "EvaluateChatHook":
            kept += _preview(draft, hook, path)
        elif not isinstance(kind, Reference) or is_ours(kind) or name in _OURS or kind.startswith("mmengine."):
            kept.append({**hook, "type": str(kind) if not is_ours(kind) and name not in _OURS else name})
        else:
            draft.leave(
                shown(path, hook), _HOOKS.get(name, "this project has no such hook: write it for mmengine's Runner")
            )
    if given is not None:
        draft.values["custom_hooks"] = kept


def _preview(draft: Draft, hook: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
    """``EvaluateChatHook`` -> ``PreviewHook``: the same questions about the same pictures, where these are files."""
    images = hook.get("evaluation_images") or []
    images = [images] if isinstance(images, str) else [*images]
    local = [image for image in images if isinstance(image, str) and "://" not in image]
    for image in images:
        if image not in local:
            draft.leave(
                f"{path}.evaluation_images: {image}", "nothing is downloaded: save it, and give its path in prompts"
            )
    texts = hook.get("evaluation_inputs") or []
    texts = [texts] if isinstance(texts, str) else [*texts]
    prompts = [{"prompt": one, "images": [image]} for image in local for one in texts] if local else [*texts]
    reasons = {
        "tokenizer": "the tokenizer of the config is used", "image_processor": OWN_PROCESSOR,
        "prompt_template": TEMPLATE, "system": "write it into the prompts", "stop_words": "the model's own end tokens",
    }  # fmt: skip
    taken = ("type", "evaluation_images", "evaluation_inputs", "every_n_iters", "max_new_tokens")
    for key, value in hook.items():
        if key not in taken and value not in ("", None):
            draft.leave(shown(f"{path}.{key}", value), reasons.get(key, "PreviewHook has no such argument"))
    found = {
        "type": "PreviewHook",
        "prompts": prompts,
        "unit": "iteration",
        "interval": hook.get("every_n_iters") or 500,
    }
    if images and not local:
        draft.leave(f"{path}: {hook['type']}", "it asks about pictures, and none of them is a file")
        return []
    return [found | ({"max_new_tokens": hook["max_new_tokens"]} if hook.get("max_new_tokens") else {})]


def _engine(draft: Draft) -> None:
    """``strategy`` and ``--deepspeed deepspeed_zero2`` -> ``backend``; F-LMM and LLaVA train with ZeRO-2."""
    strategy, one = draft.values.pop("strategy", None), None
    preset, one = draft.take("deepspeed")
    if preset is not None:
        name = Path(preset).stem.removeprefix("deepspeed_") if not preset.endswith(".json") else preset
        draft.set("backend", {"type": "deepspeed", "config": name}, of=one)
    elif isinstance(strategy, Mapping):
        stage = (strategy.get("zero_optimization") or {}).get("stage", 2)
        draft.set("backend", {"type": "deepspeed", "config": f"zero{stage}"}, of=shown("strategy", strategy))
    elif draft.get("backend") is None:
        draft.set("backend", {"type": "deepspeed", "config": "zero2"})
        draft.notes.append("The config names no engine, which xtuner's command line does: ZeRO-2, as the guide has it.")


def _arguments(draft: Draft) -> None:
    """Arguments of ``xtuner train`` beside the config."""
    draft.carry("work_dir", "work_dir")
    draft.carry("launcher", "launcher")
    draft.carry("randomness.seed", "seed", kind=whole)
    resumed, one = draft.take("resume")
    if one is not None:
        draft.set("resume", "auto" if one.value is True else resumed, of=one)
    _settings(draft)
    draft.finish({})


def _snippet(command: Command) -> Draft:
    """The settings of the guide, ``batch_size=64 accumulative_counts=2 resume=True``, over LLaVA's outline."""
    draft = Draft(recipe("llava_zero2"), command, what="Settings of a config of xtuner")
    draft.notes.append("The model and the data are those of the shipped config llava_zero2: edit them.")
    _settings(draft)
    draft.finish({})
    return draft


def _overrides(command: Command, names: dict[str, Any]) -> None:
    """``--cfg-options K=V ...`` of mmengine's and xtuner's command lines: as if the file had it."""
    for one in [one for one in command.given if one.name in ("cfg_options", "options")]:
        command.given.remove(one)
        for text_of in one.value if isinstance(one.value, list) else [one.value]:
            try:
                dotted, value = parse_override(str(text_of))
                *above, last = dotted.split(".")
                node: Any = names
                for step in above:
                    node = node[int(step)] if isinstance(node, list) else node.setdefault(step, {})
                node[int(last) if isinstance(node, list) else last] = value
            except (ConfigError, ValueError, LookupError, AttributeError, TypeError):
                command.other.append((f"--cfg-options {text_of}", "it is no KEY=VALUE of a section of this config"))


def _settings(draft: Draft) -> None:
    """Names that xtuner's configs give their settings."""
    draft.carry("train_dataloader.batch_size", "batch_size", kind=whole)
    draft.carry("optim_wrapper.accumulative_counts", "accumulative_counts", kind=whole)
    draft.carry("train_cfg.max_epochs", "max_epochs", kind=number)
    draft.carry("optim_wrapper.optimizer.lr", "lr", kind=number)
    draft.carry("world_size", "num_gpus", kind=whole)
    draft.carry("default_hooks.checkpoint.interval", "save_steps", "interval", kind=whole)
    draft.carry("default_hooks.checkpoint.max_keep_ckpts", "save_total_limit", "max_keep_ckpts", kind=whole)
    draft.carry("default_hooks.checkpoint.by_epoch", "by_epoch", kind=boolean)
    draft.carry("work_dir", "work_dir")
    resumed, one = draft.take("resume", kind=boolean)
    if one is not None:
        draft.set("resume", resumed, of=one)
    path, of = draft.take("load_from", kind=_optional)
    if of is not None:
        draft.set("load_from", path, of=of)
    for name in ("original_iterations_per_epoch", "current_epoch"):
        _, given = draft.take(name)
        if given is not None:
            draft.leave(given.shown, "a resume continues the curve by itself: docs/resume.md")


def _optional(value: Any) -> str | None:
    return None if value in (None, "None", "") else text(value)
