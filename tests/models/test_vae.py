"""The FLUX autoencoder compared with numbers from the public code (``tests/golden/README.md``), in fp32."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.golden_files import BAGEL, BAGEL_META, atol
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
