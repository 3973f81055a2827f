"""The FLUX autoencoder compared with numbers from the public code (``tests/golden/README.md``), in fp32."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.golden_files import BAGEL, BAGEL_META, atol, read_json
from unigen_ds.core.errors import ConfigError
from unigen_ds.models import FluxAutoencoder


@pytest.fixture(scope="module")
def vae() -> FluxAutoencoder:
    sizes = BAGEL_META["vae_params"]
    vae = FluxAutoencoder(
        base_channels=sizes["ch"],
        channel_multipliers=sizes["ch_mult"],
        num_blocks=sizes["num_res_blocks"],
        latent_channels=sizes["z_channels"],
        channels=sizes["in_channels"],
        scale_factor=sizes["scale_factor"],
        shift_factor=sizes["shift_factor"],
    )
    assert vae.downsample == sizes["downsample"]
    vae.load_state_dict(load_file(BAGEL / "ae.safetensors"), strict=True)
    return vae


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(BAGEL / "vae.safetensors")


def close(name: str, actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=atol(f"bagel/{name}"), rtol=0)


@torch.no_grad()
def test_encode(vae: FluxAutoencoder, golden: dict[str, Tensor]) -> None:
    mean, logvar = vae.posterior(golden["image"])
    close("vae.mean", mean, golden["mean"])
    close("vae.logvar", logvar, golden["logvar"])
    close("vae.latent_sampled", vae.encode(golden["image"], golden["noise"]), golden["latent_sampled"])


@torch.no_grad()
def test_decode(vae: FluxAutoencoder, golden: dict[str, Tensor]) -> None:
    for kind in ("mean", "sampled"):
        close("vae.recon", vae.decode(golden[f"latent_{kind}"]), golden[f"recon_from_{kind}"])


@torch.no_grad()
def test_a_padded_pack_as_the_public_code_encodes_it(vae: FluxAutoencoder) -> None:
    """Padding changes the result: therefore the model encodes the images of each size separately."""
    golden = load_file(BAGEL / "train.safetensors")
    images, noise = golden["padded_images"], golden["vae_noise"]
    close("padded_latent", vae.encode(images, noise), golden["padded_latent"])
    shapes = read_json(BAGEL / "train.json")["vae_image_shapes"]
    number, (_, height, width) = min(enumerate(shapes), key=lambda pair: pair[1][1] * pair[1][2])
    if (height, width) == images.shape[-2:]:
        return  # all images have one size: nothing is padded
    h, w = height // vae.downsample, width // vae.downsample
    alone = vae.encode(images[number : number + 1, :, :height, :width], noise[number : number + 1, :, :h, :w])
    assert (alone[0] - golden["padded_latent"][number, :, :h, :w]).abs().max() > 1000 * atol("bagel/padded_latent")


def test_widths_are_checked() -> None:
    with pytest.raises(ConfigError, match="multiples of 32"):
        FluxAutoencoder(base_channels=48)
