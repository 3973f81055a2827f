"""Names of an evaluation's results, as far as a run knows them when it begins: for ``save_best`` and ``monitor``.

Known are ``val/loss``, the family's loss terms and what the values of each metric begin with (``Metric.name``). Which
sources and groups of a term have targets is known only after an evaluation, so names below a term are accepted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unigen_ds.core.errors import ConfigError, suggestion
from unigen_ds.core.registry import METRICS

PREFIX = "val/"


@dataclass(frozen=True)
class ResultNames:
    """Args: ``terms``: names of the loss terms. ``metrics``: what the names of each metric's values begin with."""

    terms: Sequence[str]
    metrics: Sequence[str]

    def check(self, name: str, *, where: str, prefix: str = PREFIX) -> None:
        """Raise ``ConfigError`` where no evaluation can have that name. ``prefix``: what all names begin with."""
        known = [f"{prefix}{one}" for one in ("loss", *(f"loss/{term}" for term in self.terms), *self.metrics)]
        if name.startswith(prefix) and self._possible(name.removeprefix(prefix)):
            return
        near = f"did you mean '{prefix}{name}'?" if f"{prefix}{name}" in known else suggestion(name, known)
        raise ConfigError(
            f"{where} is {name!r}, which no evaluation of this run has",
            allowed=", ".join(known),
            remedy=_metric_of(name.removeprefix(prefix)) or near,
        )

    def _possible(self, name: str) -> bool:
        first, *rest = name.split("/")
        of_loss = first == "loss" and (not rest or rest[0] in self.terms)
        return of_loss or any(name.startswith(beginning) for beginning in self.metrics)


def _metric_of(name: str) -> str | None:
    """How to get a value that a metric would have, which is not computed."""
    for kind, cls in METRICS.module_dict.items():
        own = getattr(cls, "name", "")
        if name.startswith(kind.lower()) or (isinstance(own, str) and own and name.startswith(own)):
            return f"EvaluateHook(metrics=[dict(type={kind!r})]) computes it"
    return None
