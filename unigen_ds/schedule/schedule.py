"""All curves of a run, composed: progress in, ``{'name', 'lr'}`` of every parameter group out.

Made once, at the first start, and stored as plain JSON in sequences and tokens; ``from_state_dict`` returns the same
function to the last bit under any geometry. The position of an update is its progress *before* the update, so how the
update is split into iterations does not matter. Curves are chained in the order in which they begin: ranges that follow
each other give mmengine's values; where ranges overlap, factors multiply, as they do there. (Only an overlap with
an ``eta_min`` above 0 differs: mmengine's recursion has no closed form then.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from unigen_ds.config.registry import CURVES
from unigen_ds.config.section import Component, Of, argument_defaults
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.core.json_values import json_values
from unigen_ds.core.progress import Progress, Ruler
from unigen_ds.schedule.curves import PlacedCurve

VERSION = 1
CurveComponent = Annotated[Component, Of(CURVES)]


@dataclass(frozen=True)
class Schedules:
    """Learning rates as a pure function of progress. Immutable; the same object on every rank."""

    curves: tuple[PlacedCurve, ...]
    base: tuple[tuple[str, float], ...]
    """(name, learning rate of the config) of each parameter group, in the backend's order."""
    config: str
    """Canonical text of the ``param_scheduler`` the curves came from: two configs are equal if their texts are."""
    total_sequences: float
    """Length of training when the curves were placed: the value of an ``end`` that is left out."""
    lr_scale: float = 1.0
    """Multiplies every learning rate; set when the global batch size changes."""

    @classmethod
    def from_cfg(
        cls, curves: Sequence[Component], *, ruler: Ruler, base: Sequence[Mapping[str, Any]], total_sequences: float
    ) -> Schedules:
        """Place the curves of a config by the first start's ``ruler``. Without any, every group keeps its learning
        rate. Raises ``ConfigError`` naming the entry that cannot work."""
        placed_curves: list[PlacedCurve] = []
        for curve in curves:
            try:
                placed_curves.append(curve.build().place(ruler=ruler, total_sequences=total_sequences))
            except ConfigError as error:
                raise error.at(curve.where) from error
        if len({curve.axis for curve in placed_curves}) == 1:  # sequences and tokens have no common order
            placed_curves.sort(key=lambda curve: curve.begin)
        return cls(
            curves=tuple(placed_curves),
            base=_base(base),
            config=curves_text(curves),
            total_sequences=float(total_sequences),
        )

    def same_curves(self, other: Schedules) -> bool:
        """Whether both came from the same curves: a default made explicit is no difference."""
        return _complete(self.config) == _complete(other.config)

    def at(self, progress: Progress) -> list[dict[str, Any]]:
        """``{'name', 'lr'}`` of each group for the update that begins at ``progress``. A rate of 0 stays 0: frozen."""
        groups = []
        for name, base in self.base:
            value = base
            for curve in self.curves if base else ():
                value = curve.map(value, base=base, progress=progress)
            groups.append({"name": name, "lr": value * self.lr_scale})
        return groups

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values, lossless."""
        return {
            "version": VERSION,
            "curves": [asdict(curve) for curve in self.curves],
            "base": [{"name": name, "lr": lr} for name, lr in self.base],
            "config": self.config,
            "total_sequences": self.total_sequences,
            "lr_scale": self.lr_scale,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Schedules:
        """The function that ``state_dict`` described. Raises ``CheckpointError`` for a state it cannot read."""
        if state.get("version") != VERSION:
            raise CheckpointError(
                f"the stored schedule has version {state.get('version')!r}",
                allowed=str(VERSION),
                remedy="resume with the version of this package that wrote the checkpoint",
            )
        try:
            return cls(
                curves=tuple(PlacedCurve.from_state_dict(curve) for curve in state["curves"]),
                base=_base(state["base"]),
                config=str(state["config"]),
                total_sequences=float(state["total_sequences"]),
                lr_scale=float(state["lr_scale"]),
            )
        except KeyError as error:
            raise CheckpointError(f"the stored schedule has no {error}") from error


def curves_text(curves: Sequence[Component]) -> str:
    """Curves as canonical JSON text: as given, keys sorted, numbers as floats."""
    return json.dumps([_plain({"type": curve.name, **curve.arguments}) for curve in curves], sort_keys=True)


def _plain(value: Any) -> Any:
    """Return a value of JSON, with floats for integers: an end of 4 and one of 4.0 are the same schedule."""
    return json_values(value, lambda leaf: float(leaf) if type(leaf) is int else leaf)


def _complete(text: str) -> Any:
    """The curves of a ``curves_text`` with every default."""
    return [{**_plain(argument_defaults(CURVES.module_dict.get(one["type"]))), **one} for one in json.loads(text)]


def _base(groups: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, float], ...]:
    return tuple((str(group["name"]), float(group["lr"])) for group in groups)
