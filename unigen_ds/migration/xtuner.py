"""Configs of mmengine and xtuner, F-LMM's among them: a file, options of ``xtuner train``, or settings alone.

Keys of mmengine are translated by ``config/translation.py``; LLaVA's models and data sets, and the engine here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unigen_ds.config.file import read_file
from unigen_ds.config.overrides import apply_overrides, parse_override, plain_values
from unigen_ds.config.translation import OTHER_KEYS, translate
from unigen_ds.core.errors import ConfigError
from unigen_ds.migration.commands import MAPPINGS, Command
from unigen_ds.migration.draft import SECTIONS, Draft, Table, assignment, boolean, number, recipe, text, whole_number

_RESUME_NOTE = "a resume continues the curve by itself: docs/resume/resume.md"
_NO_COUNTERPART = "the class here has no such argument: docs/migrating/xtuner.md"
_PAIRS = {
    ("vicuna-7b-v1.5", "clip-vit-large-patch14-336"): "llava-hf/llava-1.5-7b-hf",
    ("vicuna-13b-v1.5", "clip-vit-large-patch14-336"): "llava-hf/llava-1.5-13b-hf",
    ("Meta-Llama-3-8B-Instruct", "clip-vit-large-patch14-336"): "xtuner/llava-llama-3-8b-v1_1-transformers",
    ("Phi-3-mini-4k-instruct", "clip-vit-large-patch14-336"): "xtuner/llava-phi-3-mini-hf",
}
"""(language model, vision tower) -> a published model of transformers' own class that joins the two."""
_WHOLE = {
    "deepseek-ai/deepseek-vl-1.3b-chat": "deepseek-community/deepseek-vl-1.3b-chat",
    "deepseek-ai/deepseek-vl-7b-chat": "deepseek-community/deepseek-vl-7b-chat",
}
"""A model with code of its own -> the same one for transformers' class."""
_UNKNOWN = "DIRECTORY_OF_THE_MODEL"


def _optional(value: Any) -> str | None:
    return None if value in ("None", "") else text(value)


def _resume(value: Any) -> Any:
    return "auto" if value is True else {"true": True, "false": False}.get(text(value).lower(), value)


_TABLE: Table = {
    "work_dir": (text, ("work_dir",)),
    "launcher": (text, ("launcher",)),
    "randomness.seed": (whole_number, ("seed",)),
    "resume": (_resume, ("resume",)),
    "load_from": (_optional, ("load_from",)),
    "world_size": (whole_number, ("num_gpus",)),
    "train_dataloader.batch_size": (whole_number, ("batch_size",)),
    "optim_wrapper.accumulative_counts": (whole_number, ("accumulative_counts",)),
    "optim_wrapper.optimizer.lr": (number, ("lr",)),
    "train_cfg.max_epochs": (number, ("max_epochs",)),
    "default_hooks.checkpoint.interval": (whole_number, ("save_steps", "interval")),
    "default_hooks.checkpoint.max_keep_ckpts": (whole_number, ("save_total_limit", "max_keep_ckpts")),
    "default_hooks.checkpoint.by_epoch": (boolean, ("by_epoch",)),
}
"""Arguments of ``xtuner train``, and names that xtuner's configs give their settings."""


def xtuner_config(command: Command) -> Draft:
    """A config in Python, alone or after ``xtuner train``; or settings alone: ``batch_size=64 resume=True``."""
    files = [name for name in command.files if name.endswith((".py", *MAPPINGS))]
    if len(files) > 1:
        raise ConfigError(f"{len(files)} configs are given: {', '.join(files)}", allowed="one")
    if files:
        draft = _of_file(files[0], command)
    else:
        draft = Draft(recipe("llava_zero2"), command, what="Settings of a config of xtuner")
        draft.notes.append("The model and the data are those of the shipped config llava_zero2: edit them.")
    draft.carry_all(_TABLE)
    return draft.finish({"original_iterations_per_epoch": _RESUME_NOTE, "current_epoch": _RESUME_NOTE})


def _of_file(name: str, command: Command) -> Draft:
    command.files.remove(name)
    config = read_file(Path(name))
    for setting in [one for one in command.settings if one.name in ("cfg_options", "options")]:
        command.settings.remove(setting)
        for option in setting.value if isinstance(setting.value, list) else [setting.value]:
            try:
                problems = apply_overrides(config, dict([parse_override(str(option))]))
            except ConfigError as error:
                problems = [error]
            command.others += [(f"--cfg-options {option}", str(problem)) for problem in problems]
    names = plain_values(config.to_dict())
    sections = {name: value for name, value in names.items() if name in SECTIONS or name in OTHER_KEYS}
    draft = Draft(sections, command, what=f"The config {Path(name).name}")
    _translate_data(draft)
    _translate_model(draft)
    _translate_engine(draft, names.get("strategy"))
    if draft.get("default_hooks.checkpoint.save_optimizer") is False:
        draft.drop("default_hooks.checkpoint.save_optimizer", "a checkpoint always has the optimizer's state")
    for change in translate(draft.values):
        if change.why:
            draft.omit(change.source, change.why)
    optimizer = draft.get("optim_wrapper.optimizer")
    if _is_foreign(optimizer) and _last(optimizer["type"]) not in ("AdamW", "Adam", "SGD", "Muon"):
        draft.omit(assignment("optim_wrapper.optimizer.type", optimizer["type"]), "AdamW of torch is used")
        optimizer["type"] = "AdamW"
    hooks = draft.values.pop("custom_hooks", None)
    draft.values = _without_modules(draft.values) | ({} if hooks is None else {"custom_hooks": hooks})
    return draft


def _without_modules(value: Any) -> Any:
    """The class names of all components, without the modules that they are of."""
    if isinstance(value, Mapping):
        inside = {key: _without_modules(one) for key, one in value.items()}
        return {**inside, "type": _last(inside["type"])} if isinstance(inside.get("type"), str) else inside
    return [_without_modules(one) for one in value] if isinstance(value, list) else value


def _is_foreign(section: Any) -> bool:
    """Whether its ``type`` is the path of a class that is not of this package: ``torch.optim.AdamW``."""
    kind = section.get("type") if isinstance(section, Mapping) else None
    return isinstance(kind, str) and "." in kind and not kind.startswith("unigen_ds.")


def _last(kind: Any) -> str:
    """``transformers.AutoTokenizer.from_pretrained`` -> ``AutoTokenizer``; of a text the last part of its path."""
    return str(kind).removesuffix(".from_pretrained").removesuffix(".from_config").rpartition(".")[2]


def _translate_model(draft: Draft) -> None:
    """Replace a model of another project by the published model that it is built on."""
    model, name = draft.get("model"), _last(draft.get("model.type"))
    if not _is_foreign(model):
        return
    frozen = {"freeze_visual_encoder": "vision_tower", "freeze_llm": "language_model"}
    parts = [key for key in ("model", "llm", "visual_encoder") if key in model]
    paths = {part: draft.get(f"model.{part}.pretrained_model_name_or_path") for part in parts}
    base = next(filter(None, paths.values()), None) or model.get("pretrained_model_name_or_path") or _UNKNOWN
    values: dict[str, Any] = {"type": "ImageTextToText", "pretrained": _WHOLE.get(base, base)}
    if name == "LLaVAModel":  # a language model and a vision tower; here they are one published directory
        llm, tower = (str(paths.get(part)).rstrip("/") for part in ("llm", "visual_encoder"))
        values["pretrained"] = _PAIRS.get((llm.rpartition("/")[2], tower.rpartition("/")[2]), _UNKNOWN)
        values["freeze"] = [part for key, part in frozen.items() if model.get(key)]
        draft.notes.append(
            f"model.pretrained joins {llm} and {tower}, with a trained projector. Where it is {_UNKNOWN}, give such a"
            " directory, as transformers writes LLaVA, there and in tokenizer.path."
        )
    elif name == "SupervisedFinetune":
        values["type"] = "CausalLM"
    else:  # a class of somebody's own, F-LMM's for example
        if "frozen" in name.lower():
            values["freeze"] = ["vision_tower|vision_model|visual", "language_model"]
        draft.notes.append(
            f"{name} is a class of its own, which this project does not have: the config has the published model below"
            " it. For its own heads and losses register a model and a family: docs/extending/model.md."
        )
    names = {"type", "use_activation_checkpointing", "pretrained_model_name_or_path", *frozen}
    sections = {"model": model, **{f"model.{part}": model[part] for part in parts}, "tokenizer": draft.get("tokenizer")}
    for path, section in sections.items():
        for key, value in section.items() if isinstance(section, Mapping) else ():
            if key not in {*names, *(parts if path == "model" else ())} and value is not None:
                draft.omit(assignment(f"{path}.{key}", value), _NO_COUNTERPART)
    values["activation_checkpointing"] = bool(model.get("use_activation_checkpointing", True))
    draft.values |= {"model": values, "tokenizer": {"type": "ModelTokenizer", "path": values["pretrained"]}}


def _translate_data(draft: Draft) -> None:
    """Replace data sets of LLaVA's records: their files and lengths."""
    where = "train_dataloader.dataset"
    data = draft.get(where)
    if not _is_foreign(data):
        return
    joins = _last(data["type"]) in ("concat_datasets", "ConcatDataset")
    datasets: list[dict[str, Any]] = []
    for member in (data.get("datasets_list") or data.get("datasets") or []) if joins else [data]:
        if not isinstance(member, Mapping) or _last(member.get("type")) != "LLaVADataset":
            draft.omit(assignment(where, member), "no such data set is known: docs/extending/data.md")
            continue
        values = dict(member)
        dataset = {"type": "UnifiedGenerationDataset", "data_path": values.pop("data_path", "train.jsonl")}
        if folder := values.pop("image_folder", None):
            dataset["image_root"] = folder
        datasets.append(dataset)
        if longest := values.pop("max_length", None):  # of texts there; here images count, too
            tower = str(draft.get("model.visual_encoder.pretrained_model_name_or_path"))
            grid = re.search(r"patch(\d+)-(\d+)", tower)
            draft.set("train_dataloader.seq_length", longest + (int(grid[2]) // int(grid[1])) ** 2 if grid else longest)
            draft.set("train_dataloader.overflow", "truncate")
        for key, value in values.items():
            if key != "type" and value is not None:
                draft.omit(assignment(f"{where}.{key}", value), _NO_COUNTERPART)
    if not datasets:
        datasets = [{"type": "UnifiedGenerationDataset", "data_path": "train.jsonl"}]
        draft.notes.append("None of the data sets has a counterpart: edit train_dataloader.dataset.data_path.")
    draft.set(where, datasets[0] if len(datasets) == 1 else datasets)
    if _last(draft.get("train_dataloader.sampler.type")) == "LengthGroupedSampler":
        why = "the order follows from randomness.seed; train_dataloader.packing fills rows"
        draft.drop("train_dataloader.sampler", why)
    draft.drop("train_dataloader.collate_fn", "the model's processor makes a batch")


def _translate_engine(draft: Draft, strategy: Any) -> None:
    """``strategy`` and ``--deepspeed deepspeed_zero2`` -> ``backend``; F-LMM and LLaVA train with ZeRO-2."""
    preset = draft.take("deepspeed")
    if preset is not None:
        name = preset if preset.endswith(".json") else Path(preset).stem.removeprefix("deepspeed_")
    elif isinstance(strategy, Mapping):
        name = f"zero{(strategy.get('zero_optimization') or {}).get('stage', 2)}"
        draft.omit(assignment("strategy", strategy), f"backend=dict(type='deepspeed', config={name!r}) is its stage")
    elif draft.get("backend") is None:
        name = "zero2"
        draft.notes.append("The config names no engine, which xtuner's command line does: ZeRO-2, as the guide has it.")
    else:
        return
    draft.set("backend", {"type": "deepspeed", "config": name})
