"""The parts of drawing: time steps, guidance, the image that is drawn; and reading images into text, many documents in
each forward pass, without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from unigen_ds.core.errors import ConfigError
from unigen_ds.data.images.image_files import patchify
from unigen_ds.data.samples.sample import LoadedSplit
from unigen_ds.data.samples.splits import ImageSplit, LoadedImage, TokenSplit
from unigen_ds.families.bagel.flow_settings import FlowSettings
from unigen_ds.families.bagel.processor import UnifiedProcessor
from unigen_ds.inference.answers import continue_prompts
from unigen_ds.models.flow import shift_timesteps


def guide(v: Tensor, without_text: Tensor, without_image: Tensor | None, flow: FlowSettings) -> Tensor:
    """The guided velocity, ``[L, C]`` as the three given ones. Renormalised it is never longer than ``v``."""

    def shrink(velocity: Tensor, dim: int | None) -> Tensor:
        plain, now = (torch.linalg.vector_norm(x, dim=dim, keepdim=True) for x in (v, velocity))
        return velocity * (plain / (now + 1e-8)).clamp(flow.renorm_min, 1.0)

    velocity = without_text + flow.text_scale * (v - without_text)
    if flow.renorm == "text_channel":
        velocity = shrink(velocity, -1)
    if without_image is not None:
        velocity = without_image + flow.image_scale * (velocity - without_image)
    if flow.renorm in ("global", "channel"):
        velocity = shrink(velocity, None if flow.renorm == "global" else -1)
    return velocity


def steps(flow: FlowSettings) -> list[tuple[float, float]]:
    """The times that each Euler step goes from and to: from 1 down to 0."""
    times = shift_timesteps(torch.linspace(1.0, 0.0, flow.num_timesteps), flow.timestep_shift)
    return list(pairwise(times.tolist()))


def image_grid(processor: UnifiedProcessor, size: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of latent patches of an image of (height, width) pixels."""
    stride, largest = processor.vae_downsample, processor.max_latent_size
    rows, columns = size[0] // stride, size[1] // stride
    if (rows * stride, columns * stride) != tuple(size) or not (0 < rows <= largest and 0 < columns <= largest):
        raise ConfigError(f"image size {tuple(size)}", allowed=f"multiples of {stride}, up to {largest * stride}")
    return rows, columns


def read_texts(model: Any, processor: UnifiedProcessor, images: Sequence[Image.Image]) -> list[str]:
    """The model's greedy text for each image, of 16 tokens at most."""
    begin = TokenSplit.unlearned([processor.tokenizer.bos_id])
    prompts: list[list[LoadedSplit]] = [[vit_image(processor, image), begin] for image in images]
    texts = continue_prompts(model, processor, prompts, max_new_tokens=16, cached=False)
    return [processor.tokenizer.decode(ids) for ids in texts]


def vit_image(processor: UnifiedProcessor, image: Image.Image | Tensor) -> LoadedImage:
    """An image to be understood: a picture, or ``[C, H, W]`` in [-1, 1] of its final size."""
    if processor.vit_transform is None:
        raise ConfigError("this processor has no vit_transform, so it cannot read images")
    pixels = image if isinstance(image, Tensor) else processor.vit_transform(image)
    p = processor.vit_patch_size
    grid = (pixels.shape[1] // p, pixels.shape[2] // p)
    return LoadedImage(ImageSplit("", "vit", grid), vit_patches=patchify(pixels, p))


def noise_image(processor: UnifiedProcessor, grid: tuple[int, int]) -> LoadedImage:
    """Placeholder for an image to be drawn; the sampler replaces its tensors."""
    side, p = processor.vae_downsample, processor.latent_patch_size
    return LoadedImage(
        ImageSplit("", "noise", grid),
        vae_image=torch.zeros(processor.vae_channels, grid[0] * side, grid[1] * side),
        vae_noise=torch.zeros(processor.latent_channels, grid[0] * p, grid[1] * p),
        flow_noise=torch.zeros(grid[0] * grid[1], processor.latent_channels * p * p),
        timestep=0.0,
    )
