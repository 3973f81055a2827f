"""``param_scheduler`` as a config has it -> its components, without a whole config."""

from __future__ import annotations

from typing import Annotated, Any

from unigen_ds.config.section import AS_LIST, Component, Section
from unigen_ds.schedule.schedule import CurveComponent


class _Curves(Section):
    param_scheduler: Annotated[tuple[CurveComponent, ...], AS_LIST] = ()


def curves(specs: Any) -> tuple[Component, ...]:
    return _Curves.parse({"param_scheduler": specs}).param_scheduler
