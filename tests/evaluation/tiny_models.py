"""Tiny models of transformers in folders, as a user has them: random ones, and a CLIP that knows four colours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPProcessor,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
    SiglipConfig,
    SiglipImageProcessorPil,
    SiglipModel,
)

COLOURS = {"red": (220, 30, 30), "green": (20, 200, 40), "blue": (30, 40, 230), "yellow": (230, 220, 20)}
WORDS = ("a", "the", "picture", "of", "cat", "dog", "sat", "on", "mat", "is", "in", *COLOURS)
_WORDS = ("<s>", "</s>", "<unk>", *WORDS)


def tokenizer(length: int = 16) -> PreTrainedTokenizerFast:
    """One token for each word, between <s> and </s>."""
    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(_WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>",
        model_max_length=length,
    )  # fmt: skip


def roberta(folder: Path) -> Path:
    """Random weights; of its 18 positions the first two are not used, and its tokenizer has no limit."""
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=len(_WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=18, pad_token_id=1, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    RobertaModel(config).save_pretrained(folder)
    tokenizer(1000).save_pretrained(folder)
    return folder


def bert(folder: Path) -> Path:
    """Random weights, two layers."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(_WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


_TEXT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "vocab_size": len(_WORDS), "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1,
         "pad_token_id": 1}  # fmt: skip
_VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
           "image_size": 16, "patch_size": 8}  # fmt: skip


def clip(folder: Path, *, steps: int = 0) -> Path:
    """A CLIP; with ``steps`` it has learned which word names which colour."""
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config=_TEXT, vision_config=_VISION, projection_dim=8))
    size = {"height": 16, "width": 16}
    processor = CLIPProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=size), tokenizer=tokenizer()
    )
    if steps:
        learn_colours(model, processor, steps)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def siglip(folder: Path) -> Path:
    """Random weights."""
    torch.manual_seed(0)
    text = {**_TEXT, "projection_size": 16}
    SiglipModel(SiglipConfig(text_config=text, vision_config=_VISION)).save_pretrained(folder)
    SiglipImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def learn_colours(model: Any, processor: Any, steps: int) -> None:
    """The loss of CLIP on the four colours: a second."""
    inputs = processor(
        text=[f"a {name} picture" for name in COLOURS],
        images=[plain(name) for name in COLOURS],
        return_tensors="pt",
        padding=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        loss = model(**inputs, return_loss=True).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def plain(colour: str, size: tuple[int, int] = (16, 16)) -> Image.Image:
    """A picture of one colour."""
    return Image.new("RGB", size, COLOURS[colour])


def noise(number: int, *, size: int = 12, seed: int = 0, bright: int = 256) -> list[Image.Image]:
    """Random pictures."""
    pixels = torch.randint(
        0, bright, (number, size, size, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    return [Image.fromarray(one.numpy()) for one in pixels]


class Convolution(nn.Module):
    """An extractor with six features, for pictures of any size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Conv2d(3, 6, 3)
        self.num_features = 6

    def forward(self, images: Tensor) -> Tensor:
        return torch.tanh(self.layer(images.float() / 64 - 2)).mean((2, 3))
