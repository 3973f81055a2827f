"""Configs of mmengine and xtuner, F-LMM's among them: a file, options of ``xtuner train``, or settings alone.

Keys of mmengine are translated by ``config/translation.py``; LLaVA's models and data sets, hooks and the engine here.
Of everything else a comment remains.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from unigen_ds.config.file import read_file
from unigen_ds.config.overrides import apply_overrides, parse_override, plain_values
from unigen_ds.config.translation import FOREIGN, translate
from unigen_ds.core.errors import ConfigError
from unigen_ds.migration.commands import MAPPINGS, Command
from unigen_ds.migration.draft import SECTIONS, Draft, Table, assignment, boolean, leaves, number, recipe, text, whole

_RESUMED = "a resume continues the curve by itself: docs/resume.md"
_MASKS = "masks and boxes are no data here: a family of your own trains them (docs/extending.md)"
_TEMPLATE = "the model's own chat template is used; tokenizer.chat_template replaces it"
_OWN_PROCESSOR = "the model's own image processor is used, as its directory states it"
_DTYPE = "weights are fp32; optim_wrapper.precision is that of the arithmetic"
_LORA = "write the section lora: docs/lora.md"
_REASONS = {
    "tokenizer": "the tokenizer of the config is used",
    "image_processor": _OWN_PROCESSOR,
    "pad_image_to_square": _OWN_PROCESSOR,
    "dataset_map_fn": "the layout of the records is recognised: docs/data.md",
    "template_map_fn": _TEMPLATE,
    "use_varlen_attn": "packed documents never see each other",
    "trust_remote_code": "code beside a model's files is never executed",
    "padding_side": "nothing is padded by the tokenizer",
    "torch_dtype": _DTYPE, "dtype": _DTYPE, "low_cpu_mem_usage": _DTYPE,
    "pretrained_pth": "its names are xtuner's: convert it to a directory of transformers",
    "mask_head": _MASKS, "loss_mask": _MASKS, "PNGDataset": _MASKS, "RefCocoDataset": _MASKS,
    "lora": _LORA, "llm_lora": _LORA, "visual_encoder_lora": _LORA, "quantization_config": _LORA,
}  # fmt: skip
"""Arguments and classes of xtuner that have no counterpart -> what replaces them."""
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
    return draft.finish({"original_iterations_per_epoch": _RESUMED, "current_epoch": _RESUMED})


def _of_file(name: str, command: Command) -> Draft:
    command.files.remove(name)
    config = read_file(Path(name))
    for setting in [one for one in command.settings if one.name in ("cfg_options", "options")]:
        command.settings.remove(setting)
        for option in setting.value if isinstance(setting.value, list) else [setting.value]:
            try:
                key, value = parse_override(str(option))
                problems: Iterable[ConfigError] = apply_overrides(config, {key: value})
            except ConfigError as error:
                problems = [error]
            command.others += [(f"--cfg-options {option}", str(problem)) for problem in problems]
    names = plain_values(config.to_dict())
    sections = {name: value for name, value in names.items() if name in SECTIONS or name in FOREIGN}
    draft = Draft(sections, command, what=f"The config {Path(name).name}")
    draft.num_settings += sum(1 for _ in leaves(sections))
    _translate_model(draft)
    _translate_data(draft)
    _translate_engine(draft, names.get("strategy"))
    if draft.get("default_hooks.checkpoint.save_optimizer") is False:
        draft.drop("default_hooks.checkpoint.save_optimizer", "a checkpoint always has the optimizer's state")
    for change in translate(draft.values):
        if change.path:
            draft.origins[change.path] = change.source
        else:
            draft.omit(change.source, change.why)
    optimizer = draft.get("optim_wrapper.optimizer.type")
    if _is_foreign(optimizer) and _last(optimizer) not in ("AdamW", "Adam", "SGD", "Muon"):
        draft.omit(assignment("optim_wrapper.optimizer.type", optimizer), "AdamW of torch is used")
        draft.set("optim_wrapper.optimizer.type", "AdamW")
    for path, value in [*leaves(draft.values)]:
        if path.endswith(".type") and isinstance(value, str) and not path.startswith("custom_hooks"):
            draft.set(path, _last(value))
    return draft


def _is_foreign(kind: Any) -> bool:
    """Whether a ``type`` is the path of a class that is not of this package: ``torch.optim.AdamW``."""
    return isinstance(kind, str) and "." in kind and not kind.startswith("unigen_ds.")


def _last(kind: Any) -> str:
    """``transformers.AutoTokenizer.from_pretrained`` -> ``AutoTokenizer``; of a text the last part of its path."""
    return str(kind).removesuffix(".from_pretrained").removesuffix(".from_config").rpartition(".")[2]


def _kind(section: Any) -> Any:
    return section.get("type") if isinstance(section, Mapping) else None


def _pretrained(section: Any) -> str | None:
    name = section.get("pretrained_model_name_or_path") if isinstance(section, Mapping) else None
    return name if isinstance(name, str) else None


def _omit(draft: Draft, path: str, section: Any, known: Iterable[str], why: str) -> None:
    """Omit the keys of a section that are not known; ``why``: without a reason of their own."""
    for key, value in section.items() if isinstance(section, Mapping) else ():
        if key not in (*known, "type") and value is not None:
            draft.omit(assignment(f"{path}.{key}", value), _REASONS.get(key, why))


def _translate_model(draft: Draft) -> None:
    """Replace a model of another project by the published model that it is built on."""
    model = draft.get("model")
    if not _is_foreign(_kind(model)):
        return
    name, llm = _last(model["type"]), _pretrained(model.get("llm"))
    frozen = {"freeze_visual_encoder": "vision_tower", "freeze_llm": "language_model"}
    recomputes = bool(model.get("use_activation_checkpointing", True))
    parts = [key for key in ("model", "llm", "visual_encoder") if key in model]
    known = ("use_activation_checkpointing", *frozen, *parts)
    if name == "LLaVAModel":  # a language model and a vision tower; here they are one published directory
        tower = _pretrained(model.get("visual_encoder"))
        last_names = tuple(str(one).rstrip("/").rpartition("/")[2] for one in (llm, tower))
        pretrained = _PAIRS.get((last_names[0], last_names[1]), _UNKNOWN)
        freeze = [part for key, part in frozen.items() if model.get(key)]
        values = {"type": "ImageTextToText", "pretrained": pretrained, "freeze": freeze}
        source = f"{name}, llm {llm}, visual_encoder {tower}"
        draft.notes.append(
            f"model.pretrained has both parts and its projector trained; xtuner begins with {llm} and {tower}."
            if pretrained != _UNKNOWN
            else f"No published model that joins {llm} and {tower} is known: give its directory (config.json,"
            " safetensors, as transformers writes LLaVA) in model.pretrained and tokenizer.path."
        )
    elif name == "SupervisedFinetune":
        values, source = {"type": "CausalLM", "pretrained": llm or _UNKNOWN}, f"{name}, llm {llm}"
    else:  # a class of somebody's own, F-LMM's for example: the model that it is built on
        base = next((own for part in parts if (own := _pretrained(model[part]))), _pretrained(model)) or _UNKNOWN
        values, source = {"type": "ImageTextToText", "pretrained": _WHOLE.get(base, base)}, f"{name}, {base}"
        if "frozen" in name.lower():
            values["freeze"] = ["vision_tower|vision_model|visual", "language_model"]
        draft.notes.append(
            f"{name} is a class of its own, which this project does not have: the config has the published model below"
            " it, and trains what joins images and language. For its own heads and losses register a model and a family"
            " (docs/extending.md), name their module in custom_imports, and put them here."
        )
    _omit(draft, "model", model, known, f"{values['type']} has no such argument")
    for part in parts:
        _omit(draft, f"model.{part}", model[part], ["pretrained_model_name_or_path"], "the whole model has no such one")
    draft.values["model"] = {**values, "activation_checkpointing": recomputes}
    draft.origins["model.pretrained"] = source
    _omit(draft, "tokenizer", draft.values.pop("tokenizer", None), ["pretrained_model_name_or_path"],
          "ModelTokenizer has no such argument")  # fmt: skip
    draft.set("tokenizer", {"type": "ModelTokenizer", "path": values["pretrained"]})


def _translate_data(draft: Draft) -> None:
    """Replace data sets of LLaVA's records: their files and lengths."""
    where = "train_dataloader.dataset"
    data = draft.get(where)
    if not _is_foreign(_kind(data)):
        return
    joins = _last(data["type"]) in ("concat_datasets", "ConcatDataset")
    datasets: list[dict[str, Any]] = []
    for member in (data.get("datasets_list") or data.get("datasets") or []) if joins else [data]:
        if _last(_kind(member)) not in ("LLaVADataset", "LLaVAProxyEvalDataset"):
            draft.omit(assignment(where, member), _REASONS.get(_last(_kind(member)), "no such data set is known"))
            continue
        dataset = {"type": "UnifiedGenerationDataset", "data_path": member.get("data_path", "train.jsonl")}
        datasets.append(dataset | ({"image_root": member["image_folder"]} if "image_folder" in member else {}))
        _omit(draft, where, member, ("data_path", "image_folder", "max_length"), "the data set has no such argument")
        if "max_length" in member:  # counts texts there; images are inserted after the truncation, and count here
            grid = re.search(r"patch(\d+)-(\d+)", draft.origins.get("model.pretrained", ""))
            image = (int(grid[2]) // int(grid[1])) ** 2 if grid else 0
            draft.set("train_dataloader.seq_length", member["max_length"] + image)
            draft.origins["train_dataloader.seq_length"] = f"max_length, and {image} of an image" * bool(image)
            draft.set("train_dataloader.overflow", "truncate")
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
    draft.set("backend", {"type": "deepspeed", "config": name}, "deepspeed")
