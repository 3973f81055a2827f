"""Drawing and reading with a small model that was really trained for a few updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.tiny import tiny_config
from unigen_ds.data.batches.loader import pack_documents
from unigen_ds.data.samples.splits import ImageSplit, LoadedImage, TextSplit
from unigen_ds.examples.digits.dataset import draw_prompt
from unigen_ds.families.bagel.flow_settings import RENORMS, FlowSettings
from unigen_ds.families.bagel.processor import UnifiedProcessor
from unigen_ds.families.bagel.sampler import draw
from unigen_ds.models.flow import unpatchify_latent
from unigen_ds.runner import Runner
from unigen_ds.system.seeding import generator

SIZE, GRID, WIDTH = (8, 8), (4, 4), 4
"""A digit: 8 x 8 pixels, which are 4 x 4 patches of 2 x 2 latent pixels of one channel."""
PROMPTS = [draw_prompt(digit) for digit in (3, 8, 1)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> tuple[Any, UnifiedProcessor, list[Image.Image]]:
    config = tiny_config(tmp_path_factory.mktemp("sampler") / "run", digits, param_scheduler=[])
    runner = Runner.from_cfg(config, max_updates=40)
    runner.train()
    images = [Image.open(path).copy() for path in sorted((digits / "val").glob("*.png"))[:3]]
    return runner.backend.model.eval(), runner.processor, images


def sample(small: Any, prompts: list[str], *, seed: int = 0, **flow: Any) -> list[Tensor]:
    model, processor, _ = small
    return draw(model, processor, prompts, size=SIZE, flow=FlowSettings(num_timesteps=4, **flow), seed=seed)


@pytest.mark.parametrize("renorm", RENORMS)
def test_an_image_does_not_depend_on_how_many_are_drawn_together(small: Any, renorm: str) -> None:
    together = sample(small, PROMPTS, text_scale=2.0, renorm=renorm)
    assert [image.shape for image in together] == [(1, *SIZE)] * 3
    for number in (1, 2):
        for one, other in zip(sample(small, PROMPTS[:number], text_scale=2.0, renorm=renorm), together, strict=False):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert (together[0] - together[1]).abs().max() > 0.1, "each place has its own noise"
    other_seed = sample(small, PROMPTS[:1], text_scale=2.0, renorm=renorm, seed=1)
    assert (other_seed[0] - together[0]).abs().max() > 0.1


def by_hand(small: Any, prompt: str, *, num_timesteps: int, shift: float, scale: float, seed: int) -> Tensor:
    """Euler steps from noise to image, written out for one image."""
    model, processor, _ = small
    split = ImageSplit("", "noise", GRID)
    empty = torch.zeros(1, *SIZE)
    place = LoadedImage(split, None, empty, empty, torch.zeros(GRID[0] * GRID[1], WIDTH), 0.0)
    text = TextSplit(tuple(processor.tokenizer.encode(prompt)), loss=False)
    with_text, without = (pack_documents([splits], processor) for splits in ([text, place], [place]))
    x = torch.randn(GRID[0] * GRID[1], WIDTH, generator=generator(seed, 0, "draw"))
    times = [1.0 - i / (num_timesteps - 1) for i in range(num_timesteps)]
    times = [shift * t / (1 + (shift - 1) * t) for t in times]
    for t, following in zip(times, times[1:], strict=False):
        v_text, v_none = model.velocity(with_text, x, t), model.velocity(without, x, t)
        x = x + (following - t) * (v_none + scale * (v_text - v_none))
    return unpatchify_latent(x, GRID, 2)


@pytest.mark.parametrize(("num_timesteps", "shift", "scale"), [(2, 1.0, 2.0), (4, 3.0, 1.0), (4, 3.0, 2.5)])
@torch.no_grad()
def test_steps_written_out(small: Any, num_timesteps: int, shift: float, scale: float) -> None:
    expected = by_hand(small, PROMPTS[0], num_timesteps=num_timesteps, shift=shift, scale=scale, seed=7)
    flow = FlowSettings(num_timesteps=num_timesteps, timestep_shift=shift, text_scale=scale)
    (image,) = draw(small[0], small[1], PROMPTS[:1], size=SIZE, flow=flow, seed=7)
    torch.testing.assert_close(image, expected, rtol=1e-4, atol=1e-5)
    noise = torch.randn(GRID[0] * GRID[1], WIDTH, generator=generator(7, 0, "draw"))
    assert (image - unpatchify_latent(noise, GRID, 2)).abs().max() > 1e-2, "the model moves the noise"
