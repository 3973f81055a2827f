"""FID: the Frechet distance between the features of generated and real pictures, in float64."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor

from unigen_ds.core.errors import DataError
from unigen_ds.core.log import logger
from unigen_ds.core.registry import METRICS
from unigen_ds.evaluation.metrics.base import State
from unigen_ds.evaluation.metrics.features import FeatureMetric


def frechet_distance(mean_a: Tensor, cov_a: Tensor, mean_b: Tensor, cov_b: Tensor) -> float:
    """Squared Frechet (2-Wasserstein) distance of two Gaussians (Dowson and Landau, 1982).

    |mean_a - mean_b|^2 + tr(cov_a) + tr(cov_b) - 2 tr((cov_a cov_b)^(1/2)); shapes (d), (d, d), float64. The last trace
    is the sum of the singular values of cov_a^(1/2) cov_b^(1/2): no root of a product that is not symmetric is needed.
    """
    overlap = torch.linalg.svdvals(_root(cov_a) @ _root(cov_b)).sum()
    return float((mean_a - mean_b).square().sum() + cov_a.trace() + cov_b.trace() - 2 * overlap)


def _root(covariance: Tensor) -> Tensor:
    """The symmetric square root; eigenvalues that rounding made negative are 0."""
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp(min=0).sqrt() @ vectors.T


def frechet_distance_of_samples(a: Tensor, b: Tensor) -> float:
    """``frechet_distance`` of the Gaussians of two sets of features, shapes (n, d) and (m, d), with n - 1 and m - 1.

    With fewer samples than dimensions, the singular values are those of an (n, m) matrix: exact, and faster.
    """
    centred = [(one - one.mean(0)) / (len(one) - 1) ** 0.5 for one in (a, b)]
    if max(len(a), len(b)) >= a.shape[1]:
        return frechet_distance(a.mean(0), centred[0].T @ centred[0], b.mean(0), centred[1].T @ centred[1])
    overlap = torch.linalg.svdvals(centred[0] @ centred[1].T).sum()
    traces = sum(one.square().sum() for one in centred)
    return float((a.mean(0) - b.mean(0)).square().sum() + traces - 2 * overlap)


@METRICS.register_module()
class FID(FeatureMetric):
    """Frechet distance between generated and reference pictures, ``fid_<extractor>`` (Heusel et al., NeurIPS 2017).

    Smaller is better. Values of different extractors, sizes or numbers of samples cannot be compared. With fewer
    samples than dimensions the covariance has not full rank and the value is too large: a warning.

    Args:
        extractor: file of the weights of FID's Inception network, folder of a vision model of transformers,
            ``dict(type=...)`` of a registered module, or a module that maps float32 (n, 3, height, width) from 0 to 255
            to (n, dimensions).
        name: of the extractor, part of the metric's name; None: the folder's, the class's, or ``inception``.
        resize: height and width that a module gets, bicubic with antialiasing; None: as they are, for Inception 299. A
            folder has its own.
        batch_size: pictures at a time; changes rounding only.
        device: of the extractor; None: this process's CUDA device, or the CPU.
    """

    kind = "fid"
    resamples = 100

    def __init__(
        self,
        *,
        extractor: Any,
        name: str | None = None,
        resize: Annotated[int, Ge(1)] | None = None,
        batch_size: Annotated[int, Ge(1)] = 16,
        device: str | None = None,
    ) -> None:
        super().__init__(extractor, name=name, resize=resize, batch_size=batch_size, device=device)

    def compute(self, merged: State) -> dict[str, float]:
        samples = len(merged["rows"])
        dimensions = len(merged["rows"][0]) // 2 if samples else 0
        if samples == 1:
            raise DataError(f"{self.name} has 1 sample", allowed="at least 2, for a covariance")
        if samples < dimensions:
            logger().warning(
                "%s: %d samples are fewer than the %d dimensions of the features; the value is too large and cannot be"
                " compared with one of another number of samples. Remedy: evaluate more samples, or use KID",
                self.name, samples, dimensions,
            )  # fmt: skip
        return super().compute(merged)

    def values(self, table: np.ndarray) -> dict[str, float]:
        made, real = torch.from_numpy(table).chunk(2, dim=1)
        return {self.name: frechet_distance_of_samples(made, real)}
