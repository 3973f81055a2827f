"""Dynamic loss scaling for fp16: halve on overflow, double after a run of good updates (Micikevicius et al., 2018)."""

from __future__ import annotations

from dataclasses import dataclass

INIT_SCALE, GROWTH_INTERVAL = 2.0**16, 1000


@dataclass
class LossScale:
    """The present scale and how many updates in a row were good."""

    scale: float = INIT_SCALE
    good_updates: int = 0
    growth_interval: int = GROWTH_INTERVAL

    def record(self, *, applied: bool) -> None:
        """Record whether an update was applied; equal on all ranks, so the scale stays equal."""
        if not applied:
            self.scale, self.good_updates = max(self.scale / 2.0, 1.0), 0
            return
        self.good_updates += 1
        if self.good_updates >= self.growth_interval:
            self.scale, self.good_updates = self.scale * 2.0, 0
