"""Models of xtuner and F-LMM: LLaVA, language models and others, with adapters and quantised bases."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from unigen_ds.migration.draft import Draft
from unigen_ds.migration.static_config import Reference
from unigen_ds.migration.xtuner_values import (
    MASKS,
    NOT_CARRIED_OVER,
    OWN_PROCESSOR,
    drop,
    is_ours,
    pretrained_name,
    shown,
)

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
_REMOTE = "code beside a model's files is never executed"
_LORA = {"r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout", "use_dora": "use_dora", "use_rslora": "use_rslora"}
"""peft's names -> ours."""
_ADAPTED = {"llm_lora": r"language_model.*_proj$", "visual_encoder_lora": r"vision_tower.*(_proj|fc1|fc2)$"}
"""xtuner's adapters of a part -> the linear layers that they are on."""


def translate_model(draft: Draft) -> None:
    kind = draft.get("model.type")
    if kind is None or is_ours(kind) or not isinstance(kind, Reference):
        return
    makers: dict[str, Callable[[Draft], None]] = {"LLaVAModel": _llava, "SupervisedFinetune": _language_model}
    makers.get(kind.last, _other_model)(draft)
    _tokenizer(draft)
    _drop_names(draft)


def _tokenizer(draft: Draft) -> None:
    """The model's own, with its chat template."""
    tokenizer = draft.values.pop("tokenizer", None)
    if isinstance(tokenizer, Mapping):
        path = pretrained_name(tokenizer)
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
        drop(draft, "image_processor", OWN_PROCESSOR)


def _llava(draft: Draft) -> None:
    """xtuner joins a language model and a vision tower; here they are one published directory."""
    given = draft.values["model"]
    llm, tower = pretrained_name(given.get("llm")), pretrained_name(given.get("visual_encoder"))
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
    llm = pretrained_name(given.get("llm"))
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
            draft.leave(shown(f"model.{key}", value), NOT_CARRIED_OVER.get(key, "CausalLM has no such argument"))


def _other_model(draft: Draft) -> None:
    """A class of somebody's own, F-LMM's for example: what it is built on, by its name, with all else left out."""
    given = draft.values["model"]
    found = [name for key, value in given.items() if key in ("model", "llm") and (name := pretrained_name(value))]
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
        if key in ("model", "llm") and pretrained_name(value):
            _of_part(draft, f"model.{key}", value)
        else:
            why = "the tokenizer of the config is used" if key == "tokenizer" else MASKS if "mask" in key else None
            draft.leave(shown(f"model.{key}", value), why or f"this project has no {given['type'].last}")
