"""How a picture is drawn from noise: the settings of the flow, as plain numbers. No torch: ``--help`` shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from unigen_ds.core.errors import ConfigError

RENORMS = ("none", "global", "channel", "text_channel")


@dataclass(frozen=True)
class FlowSettings:
    """How the flow is integrated, in BAGEL's terms."""

    num_timesteps: int = 50
    """Times from noise to image; one less Euler step is made."""
    timestep_shift: float = 1.0
    text_scale: float = 1.0
    """Guidance (Ho and Salimans, 2022): ``v = v_without + text_scale * (v_with_text - v_without)``; 1 is none."""
    interval: tuple[float, float] = (0.0, 1.0)
    """Guidance acts where ``lo < t <= hi``."""
    image_scale: float = 1.0
    """Guidance by the images of the context, on top of that by the text (without it there is none); 1 is none."""
    renorm: str = "none"
    """One of ``RENORMS``. Shrink the guided velocity to the length of the plain one: over everything, per patch, or
    per patch before the image guidance."""
    renorm_min: float = 0.0
    """Shrink to this share at the most."""

    def __post_init__(self) -> None:
        if self.num_timesteps < 2:
            raise ConfigError(f"num_timesteps is {self.num_timesteps}", allowed="at least 2")
        if self.renorm not in RENORMS:
            raise ConfigError(f"renorm is {self.renorm!r}", allowed=", ".join(RENORMS))

    def guides(self, t: float) -> bool:
        """Whether there is guidance at time ``t``."""
        low, high = self.interval
        return self.text_scale != 1.0 and low < t <= high


BAGEL_FLOW = FlowSettings(
    num_timesteps=50, timestep_shift=3.0, text_scale=4.0, image_scale=1.5, interval=(0.4, 1.0), renorm="global"
)
"""The settings of the public code."""


def flow_for(model: Any, flow: FlowSettings | Mapping[str, Any] | None = None, *, where: str = "flow") -> FlowSettings:
    """BAGEL's settings with those of ``flow``. ``timestep_shift``, where it is not given: of an unchanged published
    directory (and for ``model`` None) BAGEL's, of weights that were trained or fine-tuned here that of their training.

    Raises ``ConfigError``, whose paths begin with ``where``, for unknown names and wrong values.
    """
    from unigen_ds.config.registry import check_arguments  # which imports torch

    if not isinstance(flow, FlowSettings | Mapping | None):
        raise ConfigError(f"{where} is {flow!r}", allowed="FlowSettings, a mapping with fields of it, or None")
    fields = vars(flow) if isinstance(flow, FlowSettings) else flow or {}
    check_arguments(FlowSettings, fields, where=where)
    of_training = {} if getattr(model, "published", model is None) else {"timestep_shift": model.timestep_shift}
    try:
        return replace(BAGEL_FLOW, **{**of_training, **fields})
    except ConfigError as error:
        raise error.at(where) from error
