"""FID and KID: how far the features of generated pictures are from those of real ones, in float64.

FID is the Frechet distance of Gaussians, KID the squared maximum mean discrepancy, without bias.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor

from unigen_ds.config.registry import METRICS
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.evaluation.metrics.base import State, draws
from unigen_ds.evaluation.metrics.features import FeatureMetric
from unigen_ds.system.log import logger


def frechet_distance_of_samples(a: Tensor, b: Tensor) -> float:
    """Squared Frechet (2-Wasserstein) distance of the Gaussians of two sets of features, shapes (n, d) and (m, d)
    (Dowson and Landau, 1982): |mean_a - mean_b|^2 + tr(cov_a) + tr(cov_b) - 2 tr((cov_a cov_b)^(1/2)).

    With centred = Q R the last trace is the sum of the singular values of R_a R_b^T: no root of a matrix is needed.
    """
    centred = [(one - one.mean(0)) / (len(one) - 1) ** 0.5 for one in (a, b)]
    factors = [torch.linalg.qr(one, mode="r").R for one in centred]
    overlap = torch.linalg.svdvals(factors[0] @ factors[1].T).sum()
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

    resamples = 100

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
        predictions, references = torch.from_numpy(table).chunk(2, dim=1)
        return {self.name: frechet_distance_of_samples(predictions, references)}


def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(x . y / d + 1)^3 of all pairs: shapes (n, d) and (m, d) -> (n, m)."""
    return (a @ b.T / a.shape[1] + 1.0) ** 3


def unbiased_mmd(predictions: np.ndarray, references: np.ndarray, both: np.ndarray, weights: np.ndarray) -> float:
    """The unbiased estimate from the kernels of n samples each, shapes (n, n); ``weights``: how often each counts.

    A sample and itself are no pair (Gretton et al., JMLR 2012, lemma 6), also where it was drawn several times.
    """
    pairs = weights.sum() ** 2 - (weights**2).sum()
    within = sum(weights @ one @ weights - weights**2 @ np.diag(one) for one in (predictions, references))
    return float(within / pairs - 2 * weights @ both @ weights / weights.sum() ** 2)


@METRICS.register_module()
class KID(FeatureMetric):
    """Kernel distance between generated and reference pictures, ``kid_<extractor>`` (Binkowski et al., ICLR 2018).

    The unbiased estimate over all samples, so it can be negative and does not depend on their number on average. With
    ``subsets`` the mean over random subsets instead, and ``kid_<extractor>_std``, as other packages report it.

    Args:
        extractor: as of ``FID``.
        name: as of ``FID``.
        resize: as of ``FID``.
        subsets: number of random subsets; None: all samples at once.
        subset_size: samples of a subset; needed with ``subsets``.
        seed: of the subsets.
        batch_size: pictures at a time; changes rounding only.
        device: of the extractor; None: this process's CUDA device, or the CPU.
    """

    def __init__(
        self,
        *,
        extractor: Any,
        name: str | None = None,
        resize: Annotated[int, Ge(1)] | None = None,
        subsets: Annotated[int, Ge(1)] | None = None,
        subset_size: Annotated[int, Ge(2)] | None = None,
        seed: Annotated[int, Ge(0)] = 0,
        batch_size: Annotated[int, Ge(1)] = 16,
        device: str | None = None,
    ) -> None:
        if (subsets is None) != (subset_size is None):
            raise ConfigError(
                f"KID has subsets={subsets} and subset_size={subset_size}", allowed="both, or neither: all samples"
            )
        super().__init__(extractor=extractor, name=name, resize=resize, batch_size=batch_size, device=device)
        self.settings = {"subsets": subsets, "subset_size": subset_size}
        self._subsets, self._subset_size, self._seed = subsets, subset_size, seed

    def compute(self, merged: State) -> dict[str, float]:
        samples = len(merged["rows"])
        if samples == 1:
            raise DataError(f"{self.name} has 1 sample", allowed="at least 2")
        if self._subset_size is not None and 0 < samples < self._subset_size:
            raise DataError(
                f"{self.name}: subset_size is {self._subset_size}", allowed=f"at most {samples}, all samples"
            )
        return super().compute(merged)

    def values(self, table: np.ndarray) -> dict[str, float]:
        kernels = _kernels(table)
        if self._subsets is None or self._subset_size is None:
            return {self.name: unbiased_mmd(*kernels, np.ones(len(table)))}
        estimates = []
        for n in range(self._subsets):
            generator = np.random.default_rng((self._seed, n))
            predictions, references = (generator.choice(len(table), self._subset_size, replace=False) for _ in range(2))
            parts = (
                kernels[0][np.ix_(predictions, predictions)],
                kernels[1][np.ix_(references, references)],
                kernels[2][np.ix_(predictions, references)],
            )
            estimates.append(unbiased_mmd(*parts, np.ones(self._subset_size)))
        return {self.name: float(np.mean(estimates)), f"{self.name}_std": float(np.std(estimates))}

    def resampled(self, merged: State, *, count: int, seed: int) -> dict[str, list[float]]:
        """Resample the estimate over all samples. The kernels are computed once: a draw is a weight of each sample."""
        table = self._table(merged)
        kernels, chosen = _kernels(table), draws(len(table), count=count, seed=seed)
        weights = [np.bincount(one, minlength=len(table)).astype(np.float64) for one in chosen]
        return {self.name: [unbiased_mmd(*kernels, one) for one in weights]}

    def details(self) -> dict[str, str]:
        return {**super().details(), **({} if self._subsets is None else {"seed": str(self._seed)})}


def _kernels(table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    predictions, references = np.split(table, 2, axis=1)
    return kernel(predictions, predictions), kernel(references, references), kernel(predictions, references)
