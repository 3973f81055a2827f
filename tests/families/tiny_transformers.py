"""Tiny random models of transformers as published directories, each with a tokenizer of words and a chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

IMAGE = {"llava": "<image>", "qwen2_5_vl": "<|image_pad|>", "smolvlm": "<image>", "gemma3": "<image_soft_token>"}
KINDS = ("qwen3", "mistral", "gemma2", "gemma3_text", *IMAGE)
SPECIAL = (
    "<pad>", "<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<image>", "<|image_pad|>", "<|vision_start|>",
    "<|vision_end|>", "<|video_pad|>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    "<start_of_image>", "<end_of_image>", "<image_soft_token>", *(f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2)),
)  # fmt: skip
COLOURS = ("red", "green", "blue", "grey")
WORDS = (
    "user", "assistant", "system", "what", "colour", "is", "it", *COLOURS, *"abcdefghijklmnopqrstuvwxyz?.:,!AU[]", "\n",
    "and", "dark", "not", "so",
)  # fmt: skip
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}{image}{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}{{ m.content }}</s>{% endgeneration %}"
    "{{ '\\n' }}"
    "{% else %}U: {{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
)
LANGUAGE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 2,
    "eos_token_id": 3, "initializer_range": 0.2,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
_PIXELS = {"do_rescale": True, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def tokenizer(*, kind: str = "", template: str | None = None) -> PreTrainedTokenizerFast:
    """A word is one token, and so is every other character."""
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys((*SPECIAL, *WORDS, " ")))}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = Split(Regex(r"[a-z]+|."), "isolated")
    inner.decoder = Fuse()
    inner.add_special_tokens([*SPECIAL])  # type: ignore[arg-type]
    template = CHATML.replace("{image}", _placeholder(kind)) if template is None else template
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        additional_special_tokens=[*SPECIAL[4:]], chat_template=template, model_max_length=10_000,
        **({"extra_special_tokens": {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>",
                                     "eoi_token": "<end_of_image>"}} if kind == "gemma3" else {}),
    )  # fmt: skip
    return fast


def _placeholder(kind: str) -> str:
    if kind == "qwen2_5_vl":
        return "<|vision_start|><|image_pad|><|vision_end|>"
    return "<start_of_image>" if kind == "gemma3" else "<image>"


def language_config(kind: str, **changes: Any) -> Any:
    own: dict[str, Any] = {}
    if kind == "mistral":
        own = {"sliding_window": 6}
    if kind == "gemma3_text":
        own = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    if kind == "gemma2":
        own = {"sliding_window": 6, "query_pre_attn_scalar": 8}
    if kind == "qwen3":
        own = {"tie_word_embeddings": True}
    return CONFIG_MAPPING[kind](**{**LANGUAGE, **own, **changes})


def images_config(kind: str) -> Any:
    text, ids = dict(LANGUAGE), {word: i for i, word in enumerate(SPECIAL)}
    if kind == "llava":
        vision = {**VISION, "model_type": "clip_vision_model"}
        return CONFIG_MAPPING[kind](
            vision_config=vision, text_config={**text, "model_type": "llama"}, image_token_index=ids["<image>"],
            image_token_id=ids["<image>"], vision_feature_layer=-2,
        )  # fmt: skip
    if kind == "smolvlm":
        return CONFIG_MAPPING[kind](
            vision_config={**VISION, "model_type": "smolvlm_vision"}, text_config={**text, "model_type": "llama"},
            image_token_id=ids["<image>"], scale_factor=2, pad_token_id=0,
        )  # fmt: skip
    if kind == "gemma3":
        gemma = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
        return CONFIG_MAPPING[kind](
            vision_config={**VISION, "model_type": "siglip_vision_model"},
            text_config={**text, **gemma, "model_type": "gemma3_text"}, mm_tokens_per_image=4,
            image_token_id=ids["<image_soft_token>"], boi_token_index=ids["<start_of_image>"],
            eoi_token_index=ids["<end_of_image>"],
        )  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16, "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
    return CONFIG_MAPPING[kind](
        vision_config=vision, text_config={**text, "rope_parameters": rope, "model_type": "qwen2_5_vl_text"},
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip


def _image_files(kind: str) -> dict[str, dict[str, Any]]:
    square = {"height": 16, "width": 16}
    if kind == "llava":
        own = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16}, "crop_size": square}
        more = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        name = "LlavaProcessor"
    elif kind == "smolvlm":
        own = {
            "image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 32}, "do_image_splitting": True,
            "max_image_size": {"longest_edge": 16},
        }  # fmt: skip
        more, name = {"image_seq_len": 4}, "SmolVLMProcessor"
    elif kind == "gemma3":
        own, more = {"image_processor_type": "Gemma3ImageProcessor", "size": square}, {"image_seq_length": 4}
        name = "Gemma3Processor"
    else:
        own = {
            "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2,
            "min_pixels": 64, "max_pixels": 1024,
        }  # fmt: skip
        more, name = {}, "Qwen2_5_VLProcessor"
    return {
        "preprocessor_config.json": {**_PIXELS, **own, "processor_class": name},
        "processor_config.json": {**more, "processor_class": name},
    }


def write(root: Path, kinds: Iterable[str] = KINDS) -> None:
    for kind in kinds:
        (write_images if kind in IMAGE else write_language)(root / kind, kind)


def write_language(folder: Path, kind: str, *, template: str | None = None, **changes: Any) -> Path:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(language_config(kind, **changes))
    model.save_pretrained(folder)
    tokenizer(template=template).save_pretrained(folder)
    _write_ends(folder)
    return folder


def write_images(folder: Path, kind: str) -> Path:
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(images_config(kind))
    for name, parameter in model.named_parameters():  # a vision tower that one sees the effect of
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    tokenizer(kind=kind).save_pretrained(folder)
    for name, content in _image_files(kind).items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    _write_ends(folder)
    return folder


def _write_ends(folder: Path) -> None:
    values = {"eos_token_id": [3, SPECIAL.index("<|im_end|>")], "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
