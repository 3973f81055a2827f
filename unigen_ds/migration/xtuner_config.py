"""Configs of mmengine and xtuner, F-LMM's among them: read statically, then translated section by section.

What ``core/translate.py`` reads is translated by it. Classes of xtuner with a counterpart (LLaVA and language models,
their data sets, the chat hook) are translated here; of everything else the name and the reason are kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unigen_ds.core.config import parse_override
from unigen_ds.core.config_file import read_file, unread_names
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.translate import FOREIGN, translate
from unigen_ds.migration.commands import Command
from unigen_ds.migration.draft import SECTIONS, Draft, boolean, number, recipe, text, whole
from unigen_ds.migration.static_config import Computed, Reference, read_static

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
UNKNOWN_MODEL = "DIRECTORY_OF_THE_MODEL"
_LLAVA_FREEZE = {"freeze_visual_encoder": "vision_tower", "freeze_llm": "language_model"}
_MASKS = "masks and boxes are no data here: a family of your own trains them (docs/extending.md)"
_TEMPLATE = "the model's own chat template is used; tokenizer.chat_template replaces it"
_OWN_PROCESSOR = "the model's own image processor is used, as its directory states it"
_REMOTE = "code beside a model's files is never executed"
_LORA = {"r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout", "use_dora": "use_dora", "use_rslora": "use_rslora"}
"""peft's names -> ours."""
_ADAPTED = {"llm_lora": r"language_model.*_proj$", "visual_encoder_lora": r"vision_tower.*(_proj|fc1|fc2)$"}
"""xtuner's adapters of a part -> the linear layers that they are on."""
_DATASETS: dict[str, str] = {
    "tokenizer": "the tokenizer of the config is used",
    "image_processor": _OWN_PROCESSOR,
    "dataset_map_fn": "the layout of the records is recognised: docs/data.md",
    "template_map_fn": _TEMPLATE,
    "pad_image_to_square": _OWN_PROCESSOR,
    "prompt_template": _TEMPLATE,
    "remove_unused_columns": "columns that no layout has are not read",
    "shuffle_before_pack": "the order follows from randomness.seed",
    "use_varlen_attn": "packed documents never see each other",
}
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
_RUNTIME = ("num_gpus", "max_epochs", "batch_size", "accumulative_counts", "save_steps", "save_total_limit", "lr")


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
    draft.num_given = sum(1 for _ in _leaves(sections)) + len(statements) + len(command.given)
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
    return isinstance(value, str) and not isinstance(value, Computed) and _name(value) in _CLASSES


def _leaves(value: Any, path: str = "") -> Any:
    """(dotted path, value) of everything that is no section."""
    if isinstance(value, Mapping) and value:
        for key, inside in value.items():
            yield from _leaves(inside, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and any(isinstance(inside, (Mapping, Computed)) for inside in value):
        for index, inside in enumerate(value):
            yield from _leaves(inside, f"{path}.{index}")
    else:
        yield path, value


def shown(path: str, value: Any) -> str:
    """``model.llm = dict(type=..., ...)``, shortened."""
    found = f"{path} = {_short(value)}"
    return found if len(found) <= 200 else f"{found[:197]}..."


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"dict({', '.join(f'{key}={_short(inside)}' for key, inside in value.items())})"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_short, value))}]"
    return str(value) if isinstance(value, (Reference, Computed)) else repr(value)


def _unread(draft: Draft, path: Path, names: Mapping[str, Any]) -> None:
    """Names at the top that are no section, and that nothing reads."""
    for name in sorted(unread_names(path) & {*names}):
        known = name in SECTIONS or name in FOREIGN or name.startswith("__") or isinstance(names[name], Reference)
        if not known:
            draft.leave(shown(name, names[name]), "nothing in the file reads it, so it has no effect there either")


def _computed(draft: Draft) -> None:
    """Values that only executing the file would give."""
    for path, value in [*_leaves(draft.values)][::-1]:
        if isinstance(value, Computed):
            draft.leave(f"{path} = {value}", "the file is not executed: write the value that this has")
            draft.remove(path)


# ---- sections -------------------------------------------------------------------------------------------------------


def _drop(draft: Draft, path: str, why: str) -> Any:
    """Remove a value, with a comment. Returns it."""
    value = draft.get(path)
    if value is not None:
        draft.leave(shown(path, value), why)
    return draft.remove(path)


def _sections(draft: Draft) -> None:
    _model(draft)
    _dataset(draft)
    _hooks(draft)
    _engine(draft)
    if (
        isinstance(draft.get("default_hooks.checkpoint"), Mapping)
        and draft.get("default_hooks.checkpoint.save_optimizer") is False
    ):
        _drop(draft, "default_hooks.checkpoint.save_optimizer", "a checkpoint always has the optimizer's state")
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
    own = optimizer is None or _is_ours(optimizer) or "custom_imports" in draft.values
    if not own and _name(optimizer) not in _OPTIMIZERS:
        draft.leave(shown("optim_wrapper.optimizer.type", optimizer), "AdamW of torch is used")
        draft.set("optim_wrapper.optimizer.type", "AdamW")
    for path, value in [*_leaves(draft.values)]:
        if isinstance(value, Reference) and not (path.startswith("custom_hooks") and not _is_ours(value)):
            draft.set(path, value.last)


def _is_ours(value: Any) -> bool:
    return isinstance(value, Reference) and value.startswith("unigen_ds.")


def _name(value: Any) -> str:
    """``transformers.AutoTokenizer.from_pretrained`` -> ``AutoTokenizer``; of a text the last part of its path."""
    found = str(value).removesuffix(".from_pretrained").removesuffix(".from_config")
    return found.rpartition(".")[2]


def _pretrained(section: Any) -> str | None:
    given = section.get("pretrained_model_name_or_path") if isinstance(section, Mapping) else None
    return given if isinstance(given, str) else None


def _model(draft: Draft) -> None:
    kind = draft.get("model.type")
    if kind is None or _is_ours(kind) or not isinstance(kind, Reference):
        return
    makers: dict[str, Callable[[Draft], None]] = {"LLaVAModel": _llava, "SupervisedFinetune": _language_model}
    makers.get(kind.last, _other_model)(draft)
    _tokenizer(draft)
    _drop_names(draft)


def _tokenizer(draft: Draft) -> None:
    """The model's own, with its chat template."""
    tokenizer = draft.values.pop("tokenizer", None)
    if isinstance(tokenizer, Mapping):
        path = _pretrained(tokenizer)
        for key, value in tokenizer.items():
            if key == "trust_remote_code":
                draft.leave(shown(f"tokenizer.{key}", value), _REMOTE)
            elif key == "padding_side":
                draft.leave(shown(f"tokenizer.{key}", value), "nothing is padded by the tokenizer")
            elif key == "type" or (key == "pretrained_model_name_or_path" and path):
                continue
            else:
                draft.leave(shown(f"tokenizer.{key}", value), "ModelTokenizer has no such argument")
    found = draft.get("model.pretrained")
    draft.set("tokenizer", {"type": "ModelTokenizer", "path": found})


def _drop_names(draft: Draft) -> None:
    if isinstance(draft.values.get("image_processor"), Mapping):
        _drop(draft, "image_processor", _OWN_PROCESSOR)


def _llava(draft: Draft) -> None:
    """xtuner joins a language model and a vision tower; here they are one published directory."""
    given = draft.values["model"]
    llm, tower = _pretrained(given.get("llm")), _pretrained(given.get("visual_encoder"))
    pair = tuple(str(name).rstrip("/").rpartition("/")[2] for name in (llm, tower))
    pretrained = _PAIRS.get((pair[0], pair[1]))
    freeze = [part for key, part in _LLAVA_FREEZE.items() if given.get(key)]
    checkpointing = given.get("use_activation_checkpointing", True)
    draft.values["model"] = {
        "type": "ImageTextToText", "pretrained": pretrained or UNKNOWN_MODEL, "freeze": freeze,
        "activation_checkpointing": bool(checkpointing),
    }  # fmt: skip
    draft.comments["model.pretrained"] = f"llm {llm}, visual_encoder {tower}"
    draft.comments["model.freeze"] = ", ".join(f"{key}={given[key]}" for key in _LLAVA_FREEZE if key in given)
    if pretrained is None:
        draft.notes.append(
            f"No published model that joins {llm} and {tower} is known: give its directory (config.json, safetensors,"
            " as transformers writes LLaVA) in model.pretrained and tokenizer.path."
        )
    else:
        draft.notes.append(
            f"{pretrained} has both parts and its projector trained. xtuner begins with the base models, and with the"
            " projector of pretrained_pth."
        )
    known = ("type", "use_activation_checkpointing", *_LLAVA_FREEZE)
    for key, value in given.items():
        if key == "pretrained_pth" and value is not None:
            draft.leave(
                shown(f"model.{key}", value), "its names are xtuner's: convert it to a directory of transformers"
            )
        elif key in ("llm", "visual_encoder") and isinstance(value, Mapping):
            _of_part(draft, f"model.{key}", value, adapted=any(name in given for name in _ADAPTED))
        elif key in _ADAPTED:
            _lora(draft, f"model.{key}", value, _ADAPTED[key])
        elif key not in known and key != "pretrained_pth":
            draft.leave(shown(f"model.{key}", value), "ImageTextToText has no such argument")


def _lora(draft: Draft, path: str, given: Any, pattern: str) -> None:
    """peft's ``LoraConfig`` of one part -> ``lora``, which the whole model has; xtuner adapts every linear layer."""
    if not isinstance(given, Mapping):
        return
    found: dict[str, Any] = {}
    for key, value in given.items():
        if key in _LORA:
            found[_LORA[key]] = value
        elif key == "target_modules":
            names = [value] if isinstance(value, str) else [*value]
            part = pattern.partition(".*")[0] + ".*" if ".*" in pattern else ""
            pattern = f"{part}({'|'.join(map(re.escape, names))})$"
        elif key not in ("type", "task_type") and value not in ("none", None):
            draft.leave(shown(f"{path}.{key}", value), "lora has no such key")
    before = draft.values.get("lora") or {}
    same = {key: value for key, value in before.items() if key not in ("target_modules", "quantize")} == found
    if "target_modules" in before and not same:
        draft.leave(shown(path, given), f"lora is one section, and is already that of {draft.comments['lora']}")
        return
    patterns = [*before.get("target_modules", ()), pattern]
    draft.values["lora"] = {**before, **found, "target_modules": patterns}
    draft.comments["lora"] = ", ".join(filter(None, [draft.comments.get("lora"), path]))
    if len(patterns) == 1 and path != "model.lora":
        draft.notes.append("With lora the adapters alone are trained; xtuner also trains the projector.")


def _of_part(draft: Draft, path: str, section: Mapping[str, Any], *, adapted: bool = False) -> None:
    """Arguments of ``from_pretrained``. ``adapted``: whether the model has adapters."""
    for key, value in section.items():
        if key == "trust_remote_code":
            draft.leave(shown(f"{path}.{key}", value), _REMOTE)
        elif key in ("torch_dtype", "dtype", "low_cpu_mem_usage"):
            draft.leave(
                shown(f"{path}.{key}", value), "weights are fp32; optim_wrapper.precision is that of the arithmetic"
            )
        elif key == "quantization_config":
            _quantized(draft, f"{path}.{key}", value, adapted=adapted)
        elif key not in ("type", "pretrained_model_name_or_path"):
            draft.leave(shown(f"{path}.{key}", value), "it is no argument of the whole model")


def _quantized(draft: Draft, path: str, given: Any, *, adapted: bool) -> None:
    """bitsandbytes' ``BitsAndBytesConfig`` -> ``lora.quantize``: only a frozen base is packed."""
    section = given if isinstance(given, Mapping) else {}
    scheme = "nf4" if section.get("load_in_4bit") else "int8" if section.get("load_in_8bit") else None
    if scheme is None or not adapted:
        draft.leave(shown(path, given), "without lora a model of transformers is not quantised")
        return
    draft.values.setdefault("lora", {})["quantize"] = scheme
    draft.comments["lora.quantize"] = path
    draft.notes.append("lora.quantize packs every linear layer of the base; xtuner packs those of its language model.")
    for key, value in section.items():
        if key not in ("type", "load_in_4bit", "load_in_8bit") and (key, value) != ("bnb_4bit_quant_type", "nf4"):
            draft.leave(shown(f"{path}.{key}", value), "a scheme has no settings")


def _language_model(draft: Draft) -> None:
    """``SupervisedFinetune``: a language model on conversations."""
    given = draft.values["model"]
    llm = _pretrained(given.get("llm"))
    draft.values["model"] = {
        "type": "CausalLM", "pretrained": llm or UNKNOWN_MODEL,
        "activation_checkpointing": bool(given.get("use_activation_checkpointing", True)),
    }  # fmt: skip
    draft.comments["model.pretrained"] = f"llm {llm}"
    for key, value in given.items():
        if key == "llm" and isinstance(value, Mapping):
            _of_part(draft, "model.llm", value, adapted="lora" in given)
        elif key == "lora":
            _lora(draft, "model.lora", value, "_proj$")
        elif key not in ("type", "llm", "use_activation_checkpointing"):
            draft.leave(shown(f"model.{key}", value), _DATASETS.get(key, "CausalLM has no such argument"))


def _other_model(draft: Draft) -> None:
    """A class of somebody's own, F-LMM's for example: what it is built on, by its name, with all else left out."""
    given = draft.values["model"]
    found = [name for key, value in given.items() if key in ("model", "llm") and (name := _pretrained(value))]
    name = found[0] if found else None
    draft.values["model"] = {"type": "ImageTextToText", "pretrained": _WHOLE.get(name or "", name) or UNKNOWN_MODEL}
    draft.comments["model.pretrained"] = f"{given['type'].last}, {name}"
    if "frozen" in given["type"].last.lower():
        draft.set("model.freeze", ["vision_tower|vision_model|visual", "language_model"])
        draft.comments["model.freeze"] = f"{given['type'].last} freezes its model"
    draft.notes.append(
        f"{given['type'].last} is a class of its own, which this project does not have: the config has the published"
        " model below it, and trains what joins images and language. For its own heads and losses register a model and"
        " a family (docs/extending.md), name their module in custom_imports, and put them here."
    )
    for key, value in given.items():
        if key in ("model", "llm") and _pretrained(value):
            _of_part(draft, f"model.{key}", value)
        else:
            why = "the tokenizer of the config is used" if key == "tokenizer" else _MASKS if "mask" in key else None
            draft.leave(shown(f"model.{key}", value), why or f"this project has no {given['type'].last}")


# ---- data -----------------------------------------------------------------------------------------------------------


def _dataset(draft: Draft) -> None:
    given = draft.get("train_dataloader.dataset")
    kind = given.get("type") if isinstance(given, Mapping) else None
    if not isinstance(kind, Reference) or _is_ours(kind):
        return
    if kind.last in ("concat_datasets", "ConcatDataset"):
        members = given.get("datasets_list") or given.get("datasets") or []
    else:
        members = [given]
    found = [one for index, member in enumerate(members) if (one := _one_dataset(draft, member, index)) is not None]
    if not found:
        found = [{"type": "UnifiedGenerationDataset", "data_path": "train.jsonl"}]
        draft.notes.append("None of the data sets has a counterpart: edit train_dataloader.dataset.data_path.")
    draft.set("train_dataloader.dataset", found[0] if len(found) == 1 else found)
    sampler = draft.get("train_dataloader.sampler.type")
    if isinstance(sampler, Reference) and sampler.last == "LengthGroupedSampler":
        _drop(
            draft,
            "train_dataloader.sampler",
            "the order follows from randomness.seed; packing fills rows: WindowPacking",
        )
    if isinstance(draft.get("train_dataloader.collate_fn.type"), Reference):
        _drop(draft, "train_dataloader.collate_fn", "the model's processor makes a batch")


def _one_dataset(draft: Draft, given: Any, index: int) -> dict[str, Any] | None:
    """One data set of LLaVA's records or of Hugging Face's ``datasets``."""
    kind = given.get("type") if isinstance(given, Mapping) else None
    path = f"train_dataloader.dataset[{index}]" if index else "train_dataloader.dataset"
    name = _name(kind)
    if name not in ("LLaVADataset", "process_hf_dataset", "LLaVAProxyEvalDataset"):
        draft.leave(
            shown(path, given), _MASKS if name in ("PNGDataset", "RefCocoDataset") else "no such data set is known"
        )
        return None
    found: dict[str, Any] = {"type": "UnifiedGenerationDataset"}
    for key, value in given.items():
        if key == "data_path":
            found["data_path"] = value
        elif key == "image_folder":
            found["image_root"] = value
        elif key == "dataset":
            found |= _loaded(draft, value, f"{path}.dataset")
        elif key == "max_length" and isinstance(value, int):
            _max_length(draft, value)
        elif key == "pack_to_max_length":
            if value:
                draft.set("train_dataloader.packing", {"type": "WindowPacking"}, of=f"{path}.{key} = {value}")
        elif key != "type":
            draft.leave(
                shown(f"{path}.{key}", value), _DATASETS.get(key, "UnifiedGenerationDataset has no such argument")
            )
    return {"data_path": "train.jsonl", **found}


def _loaded(draft: Draft, given: Any, path: str) -> dict[str, Any]:
    """``load_dataset(path=..., name=...)``."""
    if not isinstance(given, Mapping) or _name(given.get("type")) != "load_dataset":
        draft.leave(shown(path, given), "it is no load_dataset(path=...)")
        return {}
    for key, value in given.items():
        if key not in ("type", "path", "data_files", "name", "split"):
            draft.leave(shown(f"{path}.{key}", value), "it is no argument of format='huggingface'")
    if given.get("path") == "json" and isinstance(given.get("data_files"), (str, dict)):
        files = given["data_files"]
        return {"data_path": files if isinstance(files, str) else files.get("train", "train.jsonl")}
    form = {"type": "huggingface", "config": given.get("name"), "split": given.get("split")}
    return {"data_path": given.get("path"), "format": {key: value for key, value in form.items() if value is not None}}


def _max_length(draft: Draft, length: int) -> None:
    """xtuner's counts texts; images are inserted after the truncation, and count here."""
    grid = re.search(r"patch(\d+)-(\d+)", draft.comments.get("model.pretrained", ""))
    image = (int(grid[2]) // int(grid[1])) ** 2 if grid else 0
    draft.set(
        "train_dataloader.seq_length",
        length + image,
        of=f"max_length={length}" + f", and {image} of an image" * bool(image),
    )
    draft.set("train_dataloader.overflow", "truncate")


# ---- hooks and engine -----------------------------------------------------------------------------------------------


def _hooks(draft: Draft) -> None:
    given = draft.values.get("custom_hooks")
    kept: list[Any] = []
    for index, hook in enumerate(given if isinstance(given, (list, tuple)) else [given] if given else []):
        kind = hook.get("type") if isinstance(hook, Mapping) else None
        name = _name(kind)
        path = f"custom_hooks[{index}]"
        if name == "EvaluateChatHook":
            kept += _preview(draft, hook, path)
        elif not isinstance(kind, Reference) or _is_ours(kind) or name in _OURS or kind.startswith("mmengine."):
            kept.append({**hook, "type": str(kind) if not _is_ours(kind) and name not in _OURS else name})
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
        "tokenizer": "the tokenizer of the config is used", "image_processor": _OWN_PROCESSOR,
        "prompt_template": _TEMPLATE, "system": "write it into the prompts", "stop_words": "the model's own end tokens",
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


# ---- settings alone -------------------------------------------------------------------------------------------------


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
