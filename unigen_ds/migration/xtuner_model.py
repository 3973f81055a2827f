"""Models and data sets of xtuner and F-LMM: LLaVA, language models and others, with adapters and quantised bases."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from unigen_ds.migration.draft import Draft, assignment

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
_FREEZE = {"freeze_visual_encoder": "vision_tower", "freeze_llm": "language_model"}
_LORA = {"r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout", "use_dora": "use_dora", "use_rslora": "use_rslora"}
"""peft's names -> ours."""
_ADAPTERS = {
    "llm_lora": r"language_model.*_proj$", "visual_encoder_lora": r"vision_tower.*(_proj|fc1|fc2)$", "lora": "_proj$",
}  # fmt: skip
"""xtuner's adapters of a part -> the linear layers that they are on."""
_MASKS = "masks and boxes are no data here: a family of your own trains them (docs/extending.md)"
_TEMPLATE = "the model's own chat template is used; tokenizer.chat_template replaces it"
_OWN_PROCESSOR = "the model's own image processor is used, as its directory states it"
_DTYPE = "weights are fp32; optim_wrapper.precision is that of the arithmetic"
REASONS = {
    "tokenizer": "the tokenizer of the config is used",
    "image_processor": _OWN_PROCESSOR,
    "dataset_map_fn": "the layout of the records is recognised: docs/data.md",
    "template_map_fn": _TEMPLATE,
    "pad_image_to_square": _OWN_PROCESSOR,
    "prompt_template": _TEMPLATE,
    "remove_unused_columns": "columns that no layout has are not read",
    "shuffle_before_pack": "the order follows from randomness.seed",
    "use_varlen_attn": "packed documents never see each other",
    "system": "write it into the prompts",
    "stop_words": "the model's own end tokens",
    "trust_remote_code": "code beside a model's files is never executed",
    "padding_side": "nothing is padded by the tokenizer",
    "torch_dtype": _DTYPE, "dtype": _DTYPE, "low_cpu_mem_usage": _DTYPE,
    "pretrained_pth": "its names are xtuner's: convert it to a directory of transformers",
    "mask_head": _MASKS, "loss_mask": _MASKS, "PNGDataset": _MASKS, "RefCocoDataset": _MASKS,
}  # fmt: skip
"""Arguments and classes of xtuner that have no counterpart -> what replaces them."""


class Reference(str):
    """The dotted path of a class that a config imports: ``torch.optim.AdamW``."""

    @property
    def last(self) -> str:
        """Its last name."""
        return self.rpartition(".")[2]


def is_own(value: Any) -> bool:
    """Whether a ``type`` is a class of this package."""
    return isinstance(value, str) and value.startswith("unigen_ds.")


def last_name(value: Any) -> str:
    """``transformers.AutoTokenizer.from_pretrained`` -> ``AutoTokenizer``; of a text the last part of its path."""
    return str(value).removesuffix(".from_pretrained").removesuffix(".from_config").rpartition(".")[2]


def _pretrained(section: Any) -> str | None:
    """The directory or name that a section loads from."""
    path = section.get("pretrained_model_name_or_path") if isinstance(section, Mapping) else None
    return path if isinstance(path, str) else None


def _omit(draft: Draft, path: str, section: Mapping[str, Any], known: Iterable[str], why: str) -> None:
    """Omit the keys of a section that are not known; ``why``: without a reason of their own."""
    for key, value in section.items():
        if key not in (*known, "type") and value is not None:
            draft.omit(assignment(f"{path}.{key}", value), REASONS.get(key, why))


# ---- models ---------------------------------------------------------------------------------------------------------


def translate_model(draft: Draft) -> None:
    """Replace a model of another project by the published model that it is built on."""
    model = draft.get("model")
    kind = model.get("type") if isinstance(model, Mapping) else None
    if not isinstance(kind, Reference) or is_own(kind):
        return
    name = last_name(kind)
    draft.comments["model.pretrained"] = name
    if name == "LLaVAModel":
        _llava(draft, model)
    elif name == "SupervisedFinetune":
        _published(draft, "CausalLM", model.get("llm"), of=f"llm {_pretrained(model.get('llm'))}")
    else:
        _other(draft, model, name)
    if name in ("LLaVAModel", "SupervisedFinetune"):
        draft.values["model"]["activation_checkpointing"] = bool(model.get("use_activation_checkpointing", True))
        for key, pattern in _ADAPTERS.items():
            if isinstance(model.get(key), Mapping):
                _lora(draft, f"model.{key}", model[key], pattern)
        adapts = any(key in model for key in _ADAPTERS)
        parts = ("llm", "visual_encoder")
        for part in parts:
            _part(draft, f"model.{part}", model.get(part), adapts=adapts)
        known = ("use_activation_checkpointing", *_FREEZE, *_ADAPTERS, *parts)
        _omit(draft, "model", model, known, f"{draft.values['model']['type']} has no such argument")
    tokenizer = draft.values.pop("tokenizer", None)
    if isinstance(tokenizer, Mapping):
        _omit(draft, "tokenizer", tokenizer, ["pretrained_model_name_or_path"], "ModelTokenizer has no such argument")
    draft.set("tokenizer", {"type": "ModelTokenizer", "path": draft.get("model.pretrained")})


def _published(draft: Draft, kind: str, section: Any, *, of: str) -> None:
    """A model whose published directory is that of a section."""
    name = _pretrained(section) or ""
    draft.values["model"] = {"type": kind, "pretrained": _WHOLE.get(name, name) or _UNKNOWN}
    draft.comments["model.pretrained"] = of


def _llava(draft: Draft, model: Mapping[str, Any]) -> None:
    """xtuner joins a language model and a vision tower; here they are one published directory."""
    llm, tower = _pretrained(model.get("llm")), _pretrained(model.get("visual_encoder"))
    first, second = (str(name).rstrip("/").rpartition("/")[2] for name in (llm, tower))
    pretrained = _PAIRS.get((first, second))
    freeze = [part for key, part in _FREEZE.items() if model.get(key)]
    draft.values["model"] = {"type": "ImageTextToText", "pretrained": pretrained or _UNKNOWN, "freeze": freeze}
    draft.comments["model.pretrained"] = f"llm {llm}, visual_encoder {tower}"
    draft.comments["model.freeze"] = ", ".join(f"{key}={model[key]}" for key in _FREEZE if key in model)
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


def _other(draft: Draft, model: Mapping[str, Any], name: str) -> None:
    """A class of somebody's own, F-LMM's for example: the model that it is built on, with all else left out."""
    part = next((key for key in ("model", "llm") if _pretrained(model.get(key))), "model")
    _published(draft, "ImageTextToText", model.get(part), of=f"{name}, {_pretrained(model.get(part))}")
    if "frozen" in name.lower():
        draft.set(
            "model.freeze", ["vision_tower|vision_model|visual", "language_model"], of=f"{name} freezes its model"
        )
    draft.notes.append(
        f"{name} is a class of its own, which this project does not have: the config has the published model below it,"
        " and trains what joins images and language. For its own heads and losses register a model and a family"
        " (docs/extending.md), name their module in custom_imports, and put them here."
    )
    _part(draft, f"model.{part}", model.get(part), adapts=False)
    _omit(draft, "model", model, [part], f"this project has no {name}")


def _part(draft: Draft, path: str, section: Any, *, adapts: bool) -> None:
    """Arguments of ``from_pretrained``, bitsandbytes' ``BitsAndBytesConfig`` among them: ``lora.quantize``."""
    if not isinstance(section, Mapping):
        return
    known = ["pretrained_model_name_or_path", "quantization_config"]
    _omit(draft, path, section, known, "it is no argument of the whole model")
    quantization = section.get("quantization_config")
    if quantization is None:
        return
    path = f"{path}.quantization_config"
    settings = quantization if isinstance(quantization, Mapping) else {}
    scheme = "nf4" if settings.get("load_in_4bit") else "int8" if settings.get("load_in_8bit") else None
    if scheme is None or not adapts:
        draft.omit(assignment(path, quantization), "without lora a model of transformers is not quantised")
        return
    draft.values.setdefault("lora", {})["quantize"] = scheme
    draft.comments["lora.quantize"] = path
    draft.notes.append("lora.quantize packs every linear layer of the base; xtuner packs those of its language model.")
    known = ["load_in_4bit", "load_in_8bit", *["bnb_4bit_quant_type"] * (settings.get("bnb_4bit_quant_type") == "nf4")]
    _omit(draft, path, settings, known, "a scheme has no settings")


def _lora(draft: Draft, path: str, adapter: Mapping[str, Any], pattern: str) -> None:
    """peft's ``LoraConfig`` of one part -> ``lora``, which the whole model has; xtuner adapts every linear layer."""
    section = {_LORA[key]: value for key, value in adapter.items() if key in _LORA}
    known = [*_LORA, "task_type", "target_modules", *["bias"] * (adapter.get("bias") == "none")]
    _omit(draft, path, adapter, known, "lora has no such key")
    if targets := adapter.get("target_modules"):
        names = [targets] if isinstance(targets, str) else [*targets]
        part = pattern.partition(".*")[0] + ".*" if ".*" in pattern else ""
        pattern = f"{part}({'|'.join(map(re.escape, names))})$"
    first = draft.values.get("lora")
    if first is not None and {key: value for key, value in first.items() if key != "target_modules"} != section:
        draft.omit(assignment(path, adapter), f"lora is one section, and is already that of {draft.comments['lora']}")
        return
    patterns = [*(first or {}).get("target_modules", ()), pattern]
    draft.values["lora"] = {**section, "target_modules": patterns}
    draft.comments["lora"] = ", ".join(filter(None, [draft.comments.get("lora"), path]))
    if first is None and path != "model.lora":
        draft.notes.append("With lora the adapters alone are trained; xtuner also trains the projector.")


# ---- data sets ------------------------------------------------------------------------------------------------------


def translate_data(draft: Draft) -> None:
    """Replace data sets of LLaVA's records and of Hugging Face's ``datasets``: their files and lengths."""
    data = draft.get("train_dataloader.dataset")
    kind = data.get("type") if isinstance(data, Mapping) else None
    if not isinstance(kind, Reference) or is_own(kind):
        return
    joins = last_name(kind) in ("concat_datasets", "ConcatDataset")
    members = (data.get("datasets_list") or data.get("datasets") or []) if joins else [data]
    datasets = [one for i, member in enumerate(members) if (one := _dataset(draft, member, i)) is not None]
    if not datasets:
        datasets = [{"type": "UnifiedGenerationDataset", "data_path": "train.jsonl"}]
        draft.notes.append("None of the data sets has a counterpart: edit train_dataloader.dataset.data_path.")
    draft.set("train_dataloader.dataset", datasets[0] if len(datasets) == 1 else datasets)
    if last_name(draft.get("train_dataloader.sampler.type")) == "LengthGroupedSampler":
        why = "the order follows from randomness.seed; train_dataloader.packing fills rows"
        draft.drop("train_dataloader.sampler", why)
    if isinstance(draft.get("train_dataloader.collate_fn.type"), Reference):
        draft.drop("train_dataloader.collate_fn", "the model's processor makes a batch")


def _dataset(draft: Draft, section: Any, index: int) -> dict[str, Any] | None:
    path = f"train_dataloader.dataset[{index}]" if index else "train_dataloader.dataset"
    name = last_name(section.get("type") if isinstance(section, Mapping) else None)
    if name not in ("LLaVADataset", "process_hf_dataset", "LLaVAProxyEvalDataset"):
        draft.omit(assignment(path, section), REASONS.get(name, "no such data set is known"))
        return None
    dataset = {"type": "UnifiedGenerationDataset", "data_path": section.get("data_path", "train.jsonl")}
    if "image_folder" in section:
        dataset["image_root"] = section["image_folder"]
    if "dataset" in section:
        dataset |= _loaded(draft, section["dataset"], f"{path}.dataset")
    if "max_length" in section:
        _max_length(draft, section["max_length"])
    if section.get("pack_to_max_length"):
        draft.set("train_dataloader.packing", {"type": "BestFitPacking"}, of=f"{path}.pack_to_max_length")
    known = ("data_path", "image_folder", "dataset", "max_length", "pack_to_max_length")
    _omit(draft, path, section, known, "UnifiedGenerationDataset has no such argument")
    return dataset


def _loaded(draft: Draft, section: Any, path: str) -> dict[str, Any]:
    """``load_dataset(path=..., name=...)``."""
    if not isinstance(section, Mapping) or last_name(section.get("type")) != "load_dataset":
        draft.omit(assignment(path, section), "it is no load_dataset(path=...)")
        return {}
    _omit(draft, path, section, ("path", "data_files", "name", "split"), "it is no argument of format='huggingface'")
    files = section.get("data_files")
    if section.get("path") == "json" and isinstance(files, (str, dict)):
        return {"data_path": files if isinstance(files, str) else files.get("train", "train.jsonl")}
    form = {"type": "huggingface", "config": section.get("name"), "split": section.get("split")}
    return {
        "data_path": section.get("path"),
        "format": {key: value for key, value in form.items() if value is not None},
    }


def _max_length(draft: Draft, length: Any) -> None:
    """xtuner's counts texts; images are inserted after the truncation, and count here."""
    grid = re.search(r"patch(\d+)-(\d+)", draft.comments.get("model.pretrained", ""))
    image = (int(grid[2]) // int(grid[1])) ** 2 if grid else 0
    source = f"max_length={length}" + f", and {image} of an image" * bool(image)
    draft.set("train_dataloader.seq_length", length + image, of=source)
    draft.set("train_dataloader.overflow", "truncate")
