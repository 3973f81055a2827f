"""Layer 2: learning-rate schedules as pure functions of progress. Imports ``core`` only."""

from unigen_ds.schedule.curves import Curve, PlacedCurve
from unigen_ds.schedule.schedule import Schedules, curves_text

__all__ = ["Curve", "PlacedCurve", "Schedules", "curves_text"]
