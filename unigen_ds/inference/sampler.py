"""Draw images from prompts and read images into text, many documents per forward pass.

A document that is drawn is ``[prompt][noise image]``; its unguided twin is ``[noise image]`` alone, which training with
dropped prompts has taught the model. Each Euler step computes both velocities. Reading is greedy. The whole document is
recomputed at each step: right for short documents, and the same attention rules as in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from unigen_ds.core.batch import PackedBatch
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.seeding import generator
from unigen_ds.data.collate import Loaded, LoadedImage, pack_documents
from unigen_ds.data.processor import UnifiedProcessor
from unigen_ds.data.samples import ImageSplit, TextSplit, TokenSplit
from unigen_ds.data.transforms import patchify
from unigen_ds.models.flow import sampling_timesteps, unpatchify_latent


@dataclass(frozen=True)
class FlowSettings:
    """How the flow is integrated, in BAGEL's terms."""

    num_timesteps: int = 50
    """Times from noise to image; one less Euler step is made."""
    timestep_shift: float = 1.0
    text_scale: float = 1.0
    """Guidance (Ho and Salimans, 2022): ``v = v_without + text_scale * (v_with_text - v_without)``; 1 is none."""
    interval: tuple[float, float] = (0.0, 1.0)
    """Guidance acts where ``lo < t <= hi``."""

    def __post_init__(self) -> None:
        if self.num_timesteps < 2:
            raise ConfigError(f"num_timesteps is {self.num_timesteps}", allowed="at least 2")


@torch.no_grad()
def draw(
    model: Any,
    processor: UnifiedProcessor,
    prompts: Sequence[str],
    *,
    size: Sequence[int],
    flow: FlowSettings,
    seed: int,
) -> list[Tensor]:
    """One image ``[channels, height, width]`` in about [-1, 1] per prompt. ``size`` = (height, width) in pixels.

    The first noise of image i depends on (seed, i) alone, not on how many are drawn together.
    """
    stride = processor.vae_downsample
    grid = (size[0] // stride, size[1] // stride)
    if grid[0] * stride != size[0] or grid[1] * stride != size[1]:
        raise ConfigError(f"image size {tuple(size)}", allowed=f"multiples of {stride}")
    width = processor.latent_channels * processor.latent_patch_size**2
    target = _noise_image(processor, grid, width)
    device = model.llm2vae.weight.device
    texts = [TextSplit(tuple(processor.tokenizer.encode(prompt)), loss=False) for prompt in prompts]
    guided = pack_documents([[text, target] for text in texts], processor).to(device)
    unguided = pack_documents([[target]] * len(prompts), processor).to(device)
    x_LC = torch.cat(
        [torch.randn(grid[0] * grid[1], width, generator=generator(seed, i, "draw")) for i in range(len(prompts))]
    ).to(device)
    for t, following in zip(*_steps(flow), strict=True):
        x_LC = x_LC - (t - following) * _velocity(model, guided, unguided, x_LC, t, flow)
    return [
        model.vae.decode(unpatchify_latent(part, grid, processor.latent_patch_size)[None])[0]
        for part in x_LC.chunk(len(prompts))
    ]


def _steps(flow: FlowSettings) -> tuple[list[float], list[float]]:
    times = sampling_timesteps(flow.num_timesteps, flow.timestep_shift).tolist()
    return times[:-1], times[1:]


def _velocity(
    model: Any, guided: PackedBatch, unguided: PackedBatch, x_LC: Tensor, t: float, flow: FlowSettings
) -> Tensor:
    with_text = model.velocity(guided, x_LC, t)
    low, high = flow.interval
    if flow.text_scale == 1.0 or not low < t <= high:
        return with_text
    without = model.velocity(unguided, x_LC, t)
    return without + flow.text_scale * (with_text - without)


@torch.no_grad()
def read(
    model: Any, processor: UnifiedProcessor, images: Sequence[Image.Image], *, max_new_tokens: int = 16
) -> list[str]:
    """The text that the model greedily says of each image."""
    device = model.llm2vae.weight.device
    seen = [_vit_image(processor, image) for image in images]
    said: list[list[int]] = [[] for _ in images]
    open_ones = list(range(len(images)))
    for _ in range(max_new_tokens):
        documents: list[list[Loaded]] = [
            [seen[i], TokenSplit((processor.tokenizer.bos_id, *said[i]), (-100,) * (1 + len(said[i])))]
            for i in open_ones
        ]
        batch = pack_documents(documents, processor).to(device)
        latents_LC = batch.flow_noise  # no latent in these documents: an empty tensor of the right width
        chosen = model.next_token_logits(batch, latents_LC).argmax(-1).tolist()
        for i, token in zip(open_ones, chosen, strict=True):
            said[i].append(token)
        open_ones = [i for i in open_ones if said[i][-1] != processor.tokenizer.eos_id]
        if not open_ones:
            break
    return [processor.tokenizer.decode(ids) for ids in said]


def _vit_image(processor: UnifiedProcessor, image: Image.Image) -> LoadedImage:
    if processor.vit_transform is None:
        raise ConfigError("this processor has no vit_transform, so it cannot read images")
    pixels = processor.vit_transform(image)
    p = processor.vit_patch_size
    grid = (pixels.shape[1] // p, pixels.shape[2] // p)
    return LoadedImage(ImageSplit("", "vit", grid), vit_patches=patchify(pixels, p))


def _noise_image(processor: UnifiedProcessor, grid: tuple[int, int], width: int) -> LoadedImage:
    """The place of an image to be drawn; its tensors are replaced by the sampler's own."""
    side, p = processor.vae_downsample, processor.latent_patch_size
    return LoadedImage(
        ImageSplit("", "noise", grid),
        vae_image=torch.zeros(processor.vae_channels, grid[0] * side, grid[1] * side),
        vae_noise=torch.zeros(processor.latent_channels, grid[0] * p, grid[1] * p),
        flow_noise=torch.zeros(grid[0] * grid[1], width),
        timestep=0.0,
    )
