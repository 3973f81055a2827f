"""What ``unified_generate`` accepts, refuses, and reads in which order."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.families.bagel.test_inference_golden import inferencer  # noqa: F401 - a fixture
from unigen_ds.core.errors import ConfigError
from unigen_ds.families.bagel.flow_settings import BAGEL_FLOW, FlowSettings
from unigen_ds.families.bagel.inference import Contexts, InterleaveInferencer
from unigen_ds.inference.generated import to_picture
from unigen_ds.system.seeding import generator

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "inference" / "drawing.md").read_text(encoding="utf-8")
FAST = FlowSettings(num_timesteps=3, text_scale=3.0, image_scale=2.0)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """three.png and four.png in the working directory."""
    monkeypatch.chdir(tmp_path)
    paths = [Path("three.png"), Path("four.png")]
    for path, size in zip(paths, ((48, 32), (32, 48)), strict=True):
        Image.effect_noise(size, 60).convert("RGB").save(path)
    return paths


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"understand": True, "size": (8, 8)}, "got size with understand, which draws nothing"),
        ({"max_length": 0}, "max_length is 0. Allowed: a whole number of at least 1"),
        ({"size": 8}, r"size is 8. Allowed: \(height, width\) in pixels"),
        ({"flow": {"num_timestep": 4}}, "did you mean 'num_timesteps'"),
        ({"flow": {"num_timesteps": "4"}}, "flow.num_timesteps is '4'. Allowed: a whole number"),
        ({"flow": 4}, "flow is 4. Allowed: FlowSettings"),
        ({"temprature": 1.0}, r"has no key 'temprature'.*Remedy: did you mean 'temperature'"),
        ({"images": np.zeros((4, 4, 3))}, r"a ndarray of float64 with shape \(4, 4, 3\). Allowed: a path, a PIL"),
        ({"parts": ["a", "three.png"]}, "the text 'three.png', which is a file. Remedy: pathlib.Path"),
        ({"parts": [4]}, "parts is 4. Allowed: a list of texts and pictures"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(
    options: dict[str, Any],
    message: str,
    files: list[Path],
    inferencer: InterleaveInferencer,  # noqa: F811
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        inferencer.unified_generate(**{"prompt": "1 2", **options})
    assert "[[" not in str(error.value), "no array is printed"


def test_a_picture_of_any_kind_alone_or_in_a_list(
    files: list[Path],
    inferencer: InterleaveInferencer,  # noqa: F811
) -> None:
    picture = Image.open(files[0])
    kinds = (str(files[0]), files[0], picture, np.asarray(picture), [np.asarray(picture)], (files[0],))
    images = [inferencer.unified_generate("1 2", images=kind, flow=FAST).images[0] for kind in kinds]
    assert {image.tobytes() for image in images} == {images[0].tobytes()} and images[0].size[0] > images[0].size[1]


def test_a_mapping_changes_these_fields_of_the_default(inferencer: InterleaveInferencer) -> None:  # noqa: F811
    side = 2 * inferencer.processor.vae_downsample
    shift = inferencer.model.timestep_shift if not inferencer.model.published else BAGEL_FLOW.timestep_shift
    for fields, meant in (({}, shift), ({"timestep_shift": 7.0}, 7.0)):
        flow = replace(BAGEL_FLOW, num_timesteps=4, timestep_shift=meant)
        with_fields, same = (
            inferencer.unified_generate("1 2", size=[side, side], flow=one).images[0].tobytes()
            for one in ({"num_timesteps": 4, **fields}, flow)
        )
        assert with_fields == same


@torch.no_grad()
def test_parts_are_read_in_their_order(files: list[Path], inferencer: InterleaveInferencer) -> None:  # noqa: F811
    """By hand, from the contexts: with a text at the end, and with a picture."""
    processor, contexts, encode = inferencer.processor, Contexts(), inferencer.processor.tokenizer.encode
    assert processor.vae_transform is not None
    parts = ["1 2", files[0], "3", Image.open(files[1])]
    number = 0
    for part in [*parts, "4 5"]:
        if part == "4 5":
            contexts.without_text = contexts.full.copy()
            at_the_picture = replace(contexts, **{k: getattr(contexts, k).copy() for k in vars(contexts)})
        if isinstance(part, str):
            for context in (contexts.full, contexts.without_image):
                inferencer.extend_text(context, encode(part))
            continue
        image = processor.vae_transform.resize(Image.open(part) if isinstance(part, Path) else part)
        pixels, side = processor.vae_transform(image), processor.vae_spatial_downsample
        shape = (processor.latent_channels, pixels.shape[1] // side, pixels.shape[2] // side)
        inferencer.extend_vae(contexts.full, pixels, torch.randn(shape, generator=generator(3, number, "vae")))
        inferencer.extend_vit(contexts.full, image)
        number += 1
    grid = (pixels.shape[1] // processor.vae_downsample, pixels.shape[2] // processor.vae_downsample)
    width = processor.latent_channels * processor.latent_patch_size**2
    for prompt, read_so_far in (("4 5", contexts), ("", at_the_picture)):
        drawing = inferencer.unified_generate(prompt, parts=parts, flow=FAST, seed=3).images[0]
        noise = torch.randn(grid[0] * grid[1], width, generator=generator(3, 0, "draw"))
        by_hand = to_picture(inferencer.decode(inferencer.denoise(read_so_far, noise, grid, flow=FAST), grid))
        assert drawing.tobytes() == by_hand.tobytes() and drawing.size[0] < drawing.size[1], prompt
    swap = inferencer.unified_generate("4 5", parts=["3", *parts[1::-1], parts[3]], flow=FAST, seed=3)
    first = inferencer.unified_generate("4 5", parts=parts, flow=FAST, seed=3)
    assert swap.images[0].tobytes() != first.images[0].tobytes()


def test_the_interleaved_examples_of_the_page_run(
    files: list[Path],
    inferencer: InterleaveInferencer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast = replace(BAGEL_FLOW, num_timesteps=3)
    monkeypatch.setattr("unigen_ds.families.bagel.flow_settings.BAGEL_FLOW", fast)
    blocks = [b for b in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "four.png" in b]
    names: dict[str, Any] = {"inferencer": inferencer}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 2 and len(names["made"].images) == 1
    assert (
        names["context"].position > 9
        and names["ids"]
        and names["answer"] == inferencer.processor.tokenizer.decode(names["ids"])
    )
