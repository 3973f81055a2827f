"""An alarm on gradient norms that leave their usual range: exploding or vanishing."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence

WINDOW = 100
"""Updates whose median is what is usual."""
FEWEST = 20
"""Updates before the first alarm."""
FACTOR = 10.0


class GradNormWatch:
    """Compares each norm with the median of the last ``WINDOW`` before it. One warning when the range is left."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._outside = False

    def observe(self, norms: Sequence[float], *, last_update: int) -> Iterator[str]:
        """A sentence for each of ``norms``, those of the updates up to ``last_update``, that leaves the range.

        Norms that are not finite are the ``NanGuardHook``'s.
        """
        for update, norm in enumerate(norms, start=last_update - len(norms) + 1):
            if not math.isfinite(norm):
                continue
            usual = statistics.median(self._norms) if len(self._norms) >= FEWEST else None
            outside = usual is not None and not usual / FACTOR <= norm <= usual * FACTOR
            if outside and not self._outside:
                assert usual is not None
                kind = "exploding" if norm > usual else "vanishing"
                yield (
                    f"update {update}: the gradient norm is {norm:.4g}; usual is {usual / FACTOR:.4g} to"
                    f" {usual * FACTOR:.4g} ({usual:.4g} is the median of the last {len(self._norms)} updates). If it"
                    f" stays there, gradients are {kind}: look at the samples of this update (tools/inspect_data.py)"
                    " and at the learning rate."
                )
            self._outside = outside
            self._norms.append(norm)

    def state_dict(self) -> list[float]:
        return [*self._norms]

    def load_state_dict(self, state: Sequence[float]) -> None:
        self._norms = deque(map(float, state), maxlen=WINDOW)
