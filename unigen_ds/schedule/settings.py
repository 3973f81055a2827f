"""``param_scheduler`` of a config."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from unigen_ds.config.registry import CURVES
from unigen_ds.config.section import LISTED, Component, Of, Section
from unigen_ds.schedule import curves as _curves  # noqa: F401 - registers them

Curve = Annotated[Component, Of(CURVES)]


class CurveList(Section):
    """The curves alone, for a use without a whole config."""

    param_scheduler: Annotated[tuple[Curve, ...], LISTED] = Field(default=())


def curves_of(param_scheduler: Any) -> tuple[Component, ...]:
    """Curves from what a config has: None, a mapping, or a list of mappings. Raises ``ConfigError``."""
    return CurveList.parse({"param_scheduler": param_scheduler}).param_scheduler
