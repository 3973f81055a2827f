"""Which stored tensors fit a model, by name and shape: the one comparison that every way of loading uses.

Loading a checkpoint into an engine, the check of a resume, ``load_cfg``, published weights, an average and a model that
is only to be used differ in what they allow, not in how they compare or name what differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from unigen_ds.core.errors import CheckpointError

Shape = tuple[int, ...]
T = TypeVar("T")
_SHOWN = 8


@dataclass(frozen=True)
class Misfit:
    """What differs between stored tensors and a model; empty (False) where all fit."""

    missing: list[str] = field(default_factory=list)
    """Names of the model that are not stored."""
    unexpected: list[str] = field(default_factory=list)
    """Names that are stored and not in the model."""
    reshaped: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    """Name -> (stored shape, the model's)."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.reshaped)

    def __str__(self) -> str:
        reshaped = [f"{name} {stored} for {wanted}" for name, (stored, wanted) in self.reshaped.items()]
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "reshaped": reshaped}
        return "; ".join(f"{kind}: {first_names(names)}" for kind, names in kinds.items() if names)


def misfit(stored: Mapping[str, Shape], own: Mapping[str, Shape]) -> Misfit:
    """Compare by name. Where only numbers of elements are known, the shape is ``(numel,)`` on both sides."""
    return Misfit(
        missing=[name for name in own if name not in stored],
        unexpected=[name for name in stored if name not in own],
        reshaped={n: (stored[n], own[n]) for n in own if n in stored and stored[n] != own[n]},
    )


def refuse_misfit(where: object, *misfits: Misfit, **of_kind: Misfit) -> None:
    """Raise ``CheckpointError`` naming all that differs; ``of_kind``: of the optimizer's state and the like."""
    texts = [str(each) for each in misfits if each]
    texts += [f"of {kind}: {each}" for kind, each in of_kind.items() if each]
    if texts:
        raise CheckpointError(f"{where} does not fit the model: {'; '.join(texts)}")


def by_first_name(tensors: Mapping[str, T], tied: Mapping[str, str]) -> dict[str, T]:
    """Tensors with one name each: ``tied`` maps further names to the first. One may be stored under any or all."""
    own = {name: tensor for name, tensor in tensors.items() if name not in tied}
    return {**{tied[name]: tensor for name, tensor in tensors.items() if name in tied}, **own}


def first_names(names: Sequence[str]) -> str:
    """The first names, and how many more."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
