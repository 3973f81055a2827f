"""Metrics of texts and pictures. The package registers them in ``METRICS``; their libraries load at first use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from unigen_ds.config.registry import METRICS, build
from unigen_ds.core.errors import ConfigError
from unigen_ds.evaluation.metrics import picture_metrics, text_metrics  # noqa: F401 - register
from unigen_ds.evaluation.metrics.base import Metric, evaluated

__all__ = ["Metric", "build_metrics", "evaluated"]


def build_metrics(specs: Sequence[Mapping[str, Any] | Metric], *, where: str = "metrics") -> list[Metric]:
    """The metrics that ``[dict(type='BLEU'), ...]`` names, each checked: what is missing is an error here.

    Raises ``ConfigError``, also for two metrics of one name, whose values could not be distinguished.
    """
    metrics = [
        spec if isinstance(spec, Metric) else build(METRICS, spec, where=f"{where}[{n}]")
        for n, spec in enumerate(specs)
    ]
    for n, metric in enumerate(metrics):
        try:
            metric.check()
        except ConfigError as error:
            raise error.at(f"{where}[{n}]") from error
    twice = [name for name, number in Counter(metric.name for metric in metrics).items() if number > 1]
    if twice:
        raise ConfigError(f"{where} has {twice[0]} twice", remedy="write it once, or give their extractors a name each")
    return metrics
