"""Models, data and configs of ``benchmarks/gpu.py``: everything is made here, nothing is downloaded.

In: a folder and a size. Out: a config as a mapping, whose model starts from random weights, on texts and pictures of
random words and pixels. The sizes ``TINY`` are for results that are compared with the CPU's, and for a rehearsal.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor, nn

Config = dict[str, Any]
PICTURES, RECORDS = 6, 96
TINY: Config = {
    "llm": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2},
    "vit": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
    "picture": 16, "patch": 4, "latent_patch": 4, "words": 60, "length": 160,
}  # fmt: skip
MEDIUM: Config = {
    "llm": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12,
            "num_key_value_heads": 4},
    "vit": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4},
    "picture": 224, "patch": 16, "latent_patch": 16, "words": 8_000, "length": 2_048,
}  # fmt: skip
BILLION: Config = {
    "llm": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 4},
    "vit": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "picture": 224, "patch": 16, "latent_patch": 16, "words": 32_000, "length": 4_096,
}  # fmt: skip
"""Of a mixture of transformers: two experts of 0.4 billion each, a vision tower and the embeddings."""
SEVEN_BILLION: Config = {
    "llm": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8},
    "words": 32_000, "length": 4_096,
}  # fmt: skip


def write_records(folder: Path, size: Mapping[str, Any], *, texts_only: bool, alike: bool) -> Path:
    """A JSONL of texts, of pictures to draw and of pictures to describe. ``alike``: of one kind and length."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, pixels, words = random.Random(0), np.random.default_rng(0), size["words"]
    for number in range(0 if texts_only else PICTURES):
        side = size["picture"]
        Image.fromarray(pixels.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    longest = size["length"] // (8 if alike else 4)

    def text(most: int) -> str:
        return " ".join(f"w{draw.randrange(words)}" for _ in range(most if alike else draw.randint(most // 2, most)))

    def record(number: int) -> Config:
        picture = f"{draw.randrange(PICTURES)}.png"
        if texts_only:
            return {"text": text(longest)}
        if alike:
            seen = {"role": "user", "type": "image", "image_path": picture}
            return {"conversations": [seen, {"role": "user", "type": "text", "content": text(longest)},
                                      {"role": "assistant", "type": "image", "image_path": picture}]}  # fmt: skip
        if number % 3 == 0:
            return {"text": text(longest)}
        if number % 3 == 1:
            return {"text_prompt": text(longest // 8 + 1), "image_path": picture}
        answer = {"role": "assistant", "type": "text", "content": text(longest // 4)}
        return {"conversations": [{"role": "user", "type": "image", "image_path": picture}, answer]}

    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(record(number)) + "\n" for number in range(RECORDS)), encoding="utf-8")
    return path


def config_of(folder: Path, size: Mapping[str, Any], *, length: int | None = None, alike: bool = False) -> Config:
    """The config of a size: of a unified model where it has a vision tower, else of a decoder with adapters.

    An update has four sequences in two micro-batches, on one process or two.
    """
    length = length or size["length"]
    unified = "vit" in size
    data = write_records(folder / "data", {**size, "length": length}, texts_only=not unified, alike=alike)
    config: Config = {
        "tokenizer": {"type": "WordTokenizer", "words": [f"w{number}" for number in range(size["words"])]},
        "train_dataloader": {
            "global_batch_size": 4, "num_workers": 0, "seq_length": length,
            "packing": {"type": "BestFitPacking", "window": 64},
            "dataset": {"type": "UnifiedGenerationDataset", "data_path": str(data)},
        },
        "optim_wrapper": {
            "optimizer": {"type": "AdamW", "lr": 1e-3 if size is TINY else 1e-5}, "precision": "fp32",
            "accumulative_counts": 2, "clip_grad": {"max_norm": 1.0},
        },
        "train_cfg": {"max_epochs": 99},
        "backend": {"type": "single"},
        "default_hooks": {"logger": {"interval": 1, "unit": "update"}, "checkpoint": {"interval": -1}},
        "randomness": {"seed": 0},
        "work_dir": str(folder / "run"),
    }  # fmt: skip
    if unified:
        side, patch, latent = size["picture"], size["patch"], size["latent_patch"]
        config["model"] = {
            "type": "UnifiedModel", "llm": {**size["llm"], "dropout": 0.0},
            "vit": {**size["vit"], "image_size": side, "patch_size": patch, "num_channels": 3},
            "vae": {"type": "PixelAutoencoder", "channels": 3}, "latent_patch_size": latent,
            "max_latent_size": side // latent, "activation_checkpointing": size is BILLION,
        }  # fmt: skip
        transform = {"type": "ImageTransform", "max_size": side, "min_size": side}
        config["processor"] = {"vit_transform": {**transform, "stride": patch},
                               "vae_transform": {**transform, "stride": latent}}  # fmt: skip
    else:
        config["model"] = {
            "type": "DecoderLM", "activation_checkpointing": True,
            "llm": {**size["llm"], "model_type": "llama", "max_position_embeddings": length},
        }  # fmt: skip
        config["lora"] = {"r": 16, "alpha": 32, "target_modules": [r"self_attn\.[qkvo]_proj$", r"mlp\.\w+_proj$"]}
    return config


def write_config(path: Path, config: Mapping[str, Any]) -> Path:
    """A config file, as the tools read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{key} = {value!r}\n" for key, value in config.items()), encoding="utf-8")
    return path


_BLOCK: dict[str, Tensor] = {}


def quick_weights(module: nn.Module, name: str, tensor: Tensor, generator: Any = None) -> None:
    """``initialise`` of a model whose values do not matter: one block of random numbers, repeated. Billions of numbers
    that are drawn one by one would need a minute."""
    import torch

    if tensor.ndim < 2:
        tensor.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    block = _BLOCK.setdefault("block", torch.randn(1 << 20) * 0.02)
    flat = tensor.view(-1)
    for begin in range(0, flat.numel(), block.numel()):
        part = flat[begin : begin + block.numel()]
        part.copy_(block[: part.numel()])
