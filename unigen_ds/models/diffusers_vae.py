"""An autoencoder of diffusers (``AutoencoderKL``: Stable Diffusion 1 to 3, SDXL, FLUX in diffusers' names).

Always frozen.
Weights are read from safetensors alone. A checkpoint has them, and the config as an argument, so it needs no folder.

Shape suffixes: K images, C channels, H and W pixels, z latent channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unigen_ds.config.hub import folder_of
from unigen_ds.config.registry import AUTOENCODERS, checked
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.json_values import stored_object

_CLASS, _CONFIG, _WEIGHTS = "AutoencoderKL", "config.json", "diffusion_pytorch_model.safetensors"
_FILES = tuple(folder + name for folder in ("", "vae/") for name in (_CONFIG, "diffusion_pytorch_model*.safetensors"))
"""Patterns of the files that are downloaded from a repository on the hub."""
EXTRA = "pip install 'unigen_ds[diffusers]'"


@AUTOENCODERS.register_module()
class DiffusersAutoencoder(nn.Module):
    """``encode`` draws from the posterior; latents are shifted and scaled by what the config states.

    Args:
        path: its directory, or its name on the hub: ``config.json`` and ``diffusion_pytorch_model.safetensors``; of a
            whole pipeline its folder ``vae``.
        config: its config, instead of ``path``: the weights are then a checkpoint's, or random.
    """

    @checked("model.vae")
    def __init__(self, *, path: str | None = None, config: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        if (path is None) == (config is None):
            raise ConfigError("model.vae has both path and config, or none of them", allowed="one of the two")
        folder, values = None, dict(config or {})
        if path is not None:
            whole = folder_of(path, where="model.vae.path", files=_FILES)
            folders = [one for one in (whole, whole / "vae") if (one / _CONFIG).is_file()]
            folder = next((one for one in folders if any(one.glob("*.safetensors"))), None)
            if folder is None:
                raise ConfigError(
                    f"model.vae.path is {str(whole)!r}, and it is no autoencoder of diffusers with safetensors",
                    allowed=f"a folder with {_CONFIG} and {_WEIGHTS}, or a pipeline's with vae/",
                )
            values = stored_object(folder / _CONFIG)
        if values.get("_class_name", _CLASS) != _CLASS:
            raise ConfigError(f"model.vae is diffusers' {values['_class_name']}", allowed=_CLASS)
        try:
            from diffusers import AutoencoderKL
        except ImportError as error:
            raise ConfigError("model.vae.type 'DiffusersAutoencoder' needs diffusers", remedy=EXTRA) from error
        self.config = {key: value for key, value in values.items() if key != "_name_or_path"}
        self.autoencoder: Any
        if folder is None or torch.empty(0).is_meta:
            self.autoencoder = AutoencoderKL.from_config(values)
        else:
            self.autoencoder = AutoencoderKL.from_pretrained(folder, use_safetensors=True, torch_dtype=torch.float32)
        sizes = self.autoencoder.config
        self.latent_channels: int = sizes.latent_channels
        self.downsample: int = 2 ** (len(sizes.block_out_channels) - 1)
        self.scale, self.shift = sizes.scaling_factor, getattr(sizes, "shift_factor", None) or 0.0
        self.eval()

    def arguments(self) -> dict[str, Any]:
        """Arguments of the constructor, which then needs no folder."""
        return {"config": self.config}

    def posterior(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance ``[K, z, H / downsample, W / downsample]`` of images ``[K, C, H, W]`` in [-1, 1]."""
        posterior = self.autoencoder.encode(images.float()).latent_dist
        return posterior.mean, posterior.logvar

    def encode(self, images: Tensor, noise: Tensor) -> Tensor:
        """Latents sampled with ``noise``, in fp32."""
        mean, logvar = self.posterior(images)
        return self.scale * (mean + torch.exp(0.5 * logvar) * noise - self.shift)

    def decode(self, latents: Tensor) -> Tensor:
        """Images in about [-1, 1], in fp32."""
        blocks = self.autoencoder.decoder.up_blocks  # diffusers reads a precision from the decoder's first parameter,
        none = torch.empty(0, device=latents.device)  # and here they are all buffers (``vae.py``)
        blocks.register_parameter("precision", nn.Parameter(none, requires_grad=False))
        try:
            return self.autoencoder.decode((latents / self.scale + self.shift).float()).sample.float()
        finally:
            del blocks.precision
