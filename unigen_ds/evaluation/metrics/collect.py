"""A metric over all ranks: rows are gathered on rank 0, which computes; every rank receives the same values."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

from unigen_ds.core import dist
from unigen_ds.evaluation.metrics.base import Metric, State
from unigen_ds.evaluation.provenance import Result


def gathered(metric: Metric) -> Mapping[str, float]:
    """The values over all ranks, equal on every rank. Raises ``DataError`` on all ranks alike. Collective."""
    states = dist.gather_to_main(metric.state())
    return dist.on_main(lambda: metric.compute(metric.merge(states or ())))


def evaluated(
    metric: Metric,
    *,
    checkpoint: str,
    made_by: Mapping[str, str] | None = None,
    resamples: int | None = None,
    seed: int = 0,
) -> Result:
    """The values over all ranks with their provenance and their bootstrap values, equal on every rank. Collective.

    Args:
        metric: with the samples of this rank.
        checkpoint: what made the predictions; the only part of a provenance that may differ in a comparison.
        made_by: how they were made, where it can differ (sampling seed, temperature, EMA): ``generation/<name>``.
        resamples: bootstrap values for the interval of a comparison; None: as many as the metric has by default.
        seed: of the resampling.
    """
    states = dist.gather_to_main(metric.state())
    count = metric.resamples if resamples is None else resamples

    def result() -> Result:
        merged = metric.merge(states or ())
        values = metric.compute(merged)
        provenance = {
            **metric.provenance,
            "num_samples": str(len(merged["keys"])),
            "samples": sample_set(merged),
            "checkpoint": checkpoint,
            "resampling": f"{count} draws, seed {seed}",
            **{f"generation/{name}": str(value) for name, value in (made_by or {}).items()},
        }
        return Result(values, provenance, metric.resampled(merged, count=count, seed=seed) if count else {})

    return dist.on_main(result)


def sample_set(merged: State) -> str:
    """A digest of which samples were scored against which references."""
    pairs = zip(merged["keys"], merged["digests"], strict=True)
    return blake2b("\n".join(f"{key} {digest}" for key, digest in pairs).encode(), digest_size=8).hexdigest()
