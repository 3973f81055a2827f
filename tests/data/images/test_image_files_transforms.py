"""Sizes, pixels and patches equal those of the public code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.data.support import picture
from tests.support.golden_files import BAGEL, BAGEL_META, atol, read_json
from unigen_ds.data.images.image_files import ImageTransform, UnreadableImage, image_header, open_image, patchify

VAE, VIT = (64, 32, 16), (84, 28, 14)


def test_golden_pixels() -> None:
    """The public inferencer makes the ViT image from the image that the VAE transform resized."""
    golden, cases = load_file(BAGEL / "infer.safetensors"), read_json(BAGEL / "infer.json")
    vae, vit = (ImageTransform(*BAGEL_META[f"{part}_transform"]) for part in ("vae", "vit"))
    for case in cases["edit"].values():
        picture = open_image(BAGEL / case["png"])
        for tensor, name in ((vae(picture), "edit.vae_image"), (vit(vae.resize(picture)), "edit.vit_image")):
            torch.testing.assert_close(tensor, golden[name], atol=atol(f"bagel/{name}"), rtol=0)
    with_image = {name: case for name, case in cases["und"].items() if case["has_image"]}
    for case_name, case in with_image.items():
        tensor, name = vit(vae.resize(open_image(BAGEL / case["png"]))), f"und.{case_name}.vit_image"
        torch.testing.assert_close(tensor, golden[name], atol=atol(f"bagel/{name}"), rtol=0)


def test_golden_patches() -> None:
    golden, shapes = load_file(BAGEL / "train.safetensors"), read_json(BAGEL / "train.json")["vit_image_shapes"]
    images = [golden[f"vit_image_{i}"] for i in range(len(shapes))]
    assert [list(image.shape) for image in images] == shapes
    patches = torch.cat([patchify(image, BAGEL_META["vit_patch_size"]) for image in images])
    assert torch.equal(patches, golden["packed_vit_tokens"])


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((64, 64), (64, 64)),
        ((1, 1), (32, 32)),
        ((1000, 500), (64, 32)),
        ((10000, 10), (64, 16)),  # both limits cannot be met: the upper one is used
        ((40, 33), (32, 32)),  # 40 / 16 = 2.5 rounds to the even 2
        ((75, 44), (64, 32)),
    ],
)
def test_size_rule(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert ImageTransform(*VAE).size(*size) == expected


def test_values_and_modes() -> None:
    grey = Image.fromarray(np.array([[0, 255], [51, 204]], dtype=np.uint8))
    one = ImageTransform(2, 2, 1, mode="L")(grey)
    assert one.shape == (1, 2, 2) and one.dtype == torch.float32
    torch.testing.assert_close(one[0], torch.tensor([[-1.0, 1.0], [-0.6, 0.6]]))
    three = ImageTransform(2, 2, 1)(grey)
    assert three.shape == (3, 2, 2) and torch.equal(three[0], three[2])


def test_broken_images_are_named(tmp_path: Path) -> None:
    good = picture(tmp_path / "good.png", 40, 40)
    assert image_header(good).size == (40, 40)
    path = tmp_path / "truncated.png"
    path.write_bytes(good.read_bytes()[:600])
    assert image_header(path).size == (40, 40)  # the header is complete
    with pytest.raises(UnreadableImage, match=r"truncated\.png cannot be decoded"):
        open_image(path)
    noise = tmp_path / "noise.png"
    noise.write_bytes(b"no picture")
    for bad in (noise, tmp_path / "missing.png"):
        assert image_header(bad).size is None and bad.name in image_header(bad).error
        with pytest.raises(UnreadableImage, match=bad.name):
            open_image(bad)
