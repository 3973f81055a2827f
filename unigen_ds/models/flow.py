"""Flow matching (Liu et al., 2022; Lipman et al., 2022), in BAGEL's convention: t = 1 is noise, t = 0 is the image.

``x_t = (1 - t) x_0 + t e``; the model predicts the velocity ``e - x_0``.
"""

from __future__ import annotations

from torch import Tensor


def shift_timesteps(t: Tensor, shift: float) -> Tensor:
    """``s t / (1 + (s - 1) t)``: moves time towards the noise for s > 1 (Esser et al., 2024)."""
    return shift * t / (1.0 + (shift - 1.0) * t)


def interpolate(clean_LC: Tensor, noise_LC: Tensor, t_L: Tensor) -> Tensor:
    """``x_t`` for each latent patch."""
    t = t_L[:, None].to(clean_LC.dtype)
    return (1.0 - t) * clean_LC + t * noise_LC


def patchify_latent(latent: Tensor, shape: tuple[int, int], patch: int) -> Tensor:
    """``[z, rows * p, columns * p]`` -> patches ``[rows * columns, p * p * z]`` in (row, column, channel) order."""
    rows, columns = shape
    grid = latent.reshape(latent.shape[0], rows, patch, columns, patch).permute(1, 3, 2, 4, 0)
    return grid.reshape(rows * columns, -1)


def unpatchify_latent(vectors: Tensor, shape: tuple[int, int], patch: int) -> Tensor:
    """The inverse: ``[rows * columns, p * p * z]`` -> ``[z, rows * p, columns * p]``."""
    rows, columns = shape
    grid = vectors.reshape(rows, columns, patch, patch, -1).permute(4, 0, 2, 1, 3)
    return grid.reshape(grid.shape[0], rows * patch, columns * patch)
