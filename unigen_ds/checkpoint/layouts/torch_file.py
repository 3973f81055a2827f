"""``torch.save`` files that others wrote, read as data: memory-mapped tensors, and nothing of theirs is executed.

torch's restricted unpickler accepts tensors and plain containers. Every other name in a file (the classes of DeepSpeed,
mmengine, numpy, of a user's own ``client_state``) is replaced by an inert class that keeps the stored values and does
nothing; the module is never imported. An inert class may be *filled*, which is how objects are stored. *Calling* a name
is how a file would run code, so that is refused, except for the few names below that store objects this way.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from unigen_ds.core.errors import CheckpointError

_TRAINERS = ("deepspeed", "mmengine", "mmengine_lite", "xtuner", "numpy", "addict", "pathlib", "datetime")
_FUNCTIONS = {
    "builtins.getattr",  # mmengine's HistoryBuffer names its methods so
    "_codecs.encode", "copyreg._reconstructor",
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    "numpy.dtype", "numpy.ndarray",
}  # fmt: skip
_DICTS = ("collections.defaultdict", "mmengine.config.config.ConfigDict", "addict.addict.Dict")
_BLOCKED = ("os", "posix", "nt", "sys")
"""Modules that torch's unpickler refuses, whatever replaces them."""


class Inert:
    """Keeps what was stored: ``values``, the arguments of the constructor, and ``state``, the attributes."""

    values: tuple[Any, ...]
    state: Any

    def __new__(cls, *values: Any) -> Inert:
        self = super().__new__(cls)
        self.values = values
        self.state = {}
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _NotCalled(Inert):
    """As ``Inert``; but a file that calls it, instead of filling it, is refused."""

    path = ""

    def __init__(self, *values: Any) -> None:
        raise _refusal(self.path)


def _refusal(name: str) -> CheckpointError:
    return CheckpointError(
        f"it asks for a call of {name}, which is never executed: it may be harmful",
        remedy="if you trust the author, remove the object from the file (mostly from DeepSpeed's client_state)",
    )


def _inert_class(path: str) -> tuple[type, str]:
    package, name = path.partition(".")[0], path.rpartition(".")[2]
    stored_by_call = path in _FUNCTIONS or (package in _TRAINERS and name[:1].isupper())
    return type(name, (Inert if stored_by_call else _NotCalled,), {"path": path}), path


def load_file(path: Path) -> Any:
    """What a ``torch.save`` file holds. Raises ``CheckpointError`` when it is damaged, or wants to run something."""
    try:
        if not zipfile.is_zipfile(path):  # the format before torch 1.6: it cannot be mapped
            return torch.load(path, weights_only=True, map_location="cpu")
        unknown = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        for name in unknown:
            if name.partition(".")[0] in _BLOCKED:
                raise _refusal(name)
        # a mapping instead of an inert class: torch's unpickler fills nothing else
        stand_ins: list[Any] = [(_dict_of, name) if name in _DICTS else _inert_class(name) for name in unknown]
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused: {error.problem}", remedy=error.remedy) from error
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _dict_of(*values: Any) -> dict[Any, Any]:
    return next((dict(value) for value in values if isinstance(value, dict)), {})
