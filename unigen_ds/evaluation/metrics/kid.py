"""KID: the squared maximum mean discrepancy between features, in float64, without bias."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from annotated_types import Ge

from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.core.registry import METRICS
from unigen_ds.evaluation.metrics.base import State, draws
from unigen_ds.evaluation.metrics.features import FeatureMetric


def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(x . y / d + 1)^3 of all pairs: shapes (n, d) and (m, d) -> (n, m)."""
    return (a @ b.T / a.shape[1] + 1.0) ** 3


def unbiased_mmd(made: np.ndarray, real: np.ndarray, both: np.ndarray, weights: np.ndarray) -> float:
    """The unbiased estimate from the kernels of n samples each, shapes (n, n); ``weights``: how often each counts.

    A sample and itself are no pair (Gretton et al., JMLR 2012, lemma 6), also where it was drawn several times.
    """
    pairs = weights.sum() ** 2 - (weights**2).sum()
    within = sum(weights @ one @ weights - weights**2 @ np.diag(one) for one in (made, real))
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

    kind = "kid"

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
        super().__init__(
            extractor,
            name=name,
            resize=resize,
            batch_size=batch_size,
            device=device,
            subsets=subsets,
            subset_size=subset_size,
        )
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
        found = []
        for n in range(self._subsets):
            drawn = np.random.default_rng((self._seed, n))
            made, real = (drawn.choice(len(table), self._subset_size, replace=False) for _ in range(2))
            parts = (kernels[0][np.ix_(made, made)], kernels[1][np.ix_(real, real)], kernels[2][np.ix_(made, real)])
            found.append(unbiased_mmd(*parts, np.ones(self._subset_size)))
        return {self.name: float(np.mean(found)), f"{self.name}_std": float(np.std(found))}

    def resampled(self, merged: State, *, count: int, seed: int) -> dict[str, list[float]]:
        """Of the estimate over all samples. The kernels are computed once: a draw is a weight of each sample."""
        table = self._table(merged)
        kernels, samples = _kernels(table), len(table)
        chosen = draws(samples, count=count, seed=seed)
        weights = [np.bincount(one, minlength=samples).astype(np.float64) for one in chosen]
        return {self.name: [unbiased_mmd(*kernels, one) for one in weights]}

    def details(self) -> dict[str, str]:
        return {**super().details(), **({} if self._subsets is None else {"seed": str(self._seed)})}


def _kernels(table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    made, real = np.split(table, 2, axis=1)
    return kernel(made, made), kernel(real, real), kernel(made, real)
