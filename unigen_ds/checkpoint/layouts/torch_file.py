"""``torch.save`` files that others wrote, read as data: memory-mapped tensors, and nothing of theirs is executed.

torch's restricted unpickler accepts tensors and plain containers. Every other name in a file (classes of DeepSpeed,
mmengine, a user) is replaced by an inert class that keeps the stored values; the module is never imported. *Calling* a
name is how a file would run code, so that is refused, except for the few names below that store objects this way.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.shards import MASTER, ShardReader, slices_of

WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which trainers keep the model's state dict, next to the optimizer's."""

_TRAINERS = ("deepspeed", "mmengine", "mmengine_lite", "xtuner", "numpy", "addict", "pathlib", "datetime")
_FUNCTIONS = {
    "builtins.getattr",  # mmengine's HistoryBuffer names its methods so
    "_codecs.encode", "copyreg._reconstructor",
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    "numpy.dtype", "numpy.ndarray",
}  # fmt: skip


class Inert:
    """Keeps what was stored: ``values``, the arguments of the constructor, and ``state``, the attributes."""

    values: tuple[Any, ...]
    state: Any

    def __new__(cls, *values: Any) -> Inert:
        self = super().__new__(cls)
        self.values, self.state = values, {}
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _NotCalled(Inert):
    """An inert class that may only be filled: a file that calls it is refused."""

    path = ""

    def __init__(self, *values: Any) -> None:
        raise _refusal(self.path)


def _refusal(name: str) -> CheckpointError:
    return CheckpointError(
        f"it asks for a call of {name}, which is never executed: it may be harmful",
        remedy="if you trust the author, remove the object from the file (mostly from DeepSpeed's client_state)",
    )


def _stand_in(path: str) -> Any:
    """What is put at a name of a file. A mapping is none: torch's unpickler fills nothing else."""
    if path in ("collections.defaultdict", "mmengine.config.config.ConfigDict", "addict.addict.Dict"):
        return lambda *values: next((dict(value) for value in values if isinstance(value, dict)), {})
    package, name = path.partition(".")[0], path.rpartition(".")[2]
    stored_by_call = path in _FUNCTIONS or (package in _TRAINERS and name[:1].isupper())
    return type(name, (Inert if stored_by_call else _NotCalled,), {"path": path})


def load_file(path: Path) -> Any:
    """Read a ``torch.save`` file. Raises ``CheckpointError`` when it is damaged, or wants to run something."""
    try:
        if not zipfile.is_zipfile(path):  # the format before torch 1.6: it cannot be mapped
            return torch.load(path, weights_only=True, map_location="cpu")
        unknown = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        for name in unknown:
            if name.partition(".")[0] in ("os", "posix", "nt", "sys"):  # torch's unpickler refuses these
                raise _refusal(name)
        stand_ins: list[Any] = [(_stand_in(name), name) for name in unknown]
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused: {error.problem}", remedy=error.remedy) from error
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


# Weights in plain form: by torch itself, mmengine, accelerate, transformers, or a merge. A state dict at the top of a
# file, or under one of ``WRAPPERS``; its tensors get the model's names, without the prefixes that wrappers leave.


class TorchReader(ShardReader):
    """A ``ShardReader`` over plain torch files. ``others``: keys at their top that are not read (an optimizer's)."""

    def __init__(self, paths: Iterable[Path]) -> None:
        super().__init__()
        self.others: list[str] = []
        tensors: dict[str, Tensor] = {}
        for path in paths:
            content = load_file(path)
            state = _state_dict(content, path)
            if state is not content:
                self.others += [str(key) for key in content if content[key] is not state]
            tensors |= {str(name): tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
        for prefix in ("module.", "_orig_mod."):  # of DistributedDataParallel and torch.compile
            if tensors and all(name.startswith(prefix) for name in tensors):
                tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        self.tied = shared_names(tensors)
        for name, tensor in tensors.items():
            if name in self.tied:
                continue
            if tensor.layout is not torch.strided or tensor.is_quantized:
                raise CheckpointError(f"{name} is a {tensor.layout} tensor", allowed="dense tensors")
            fetch = slices_of(tensor if tensor.is_contiguous() else tensor.contiguous())
            self.add(MASTER, name, 0, tensor.numel(), fetch, shape=tensor.shape)


def shared_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Further names of tensors that share their memory -> the first name."""
    first: dict[tuple[int, ...], str] = {}
    shared = {}
    for name, tensor in tensors.items():
        if tensor.layout is torch.strided and tensor.numel():
            memory = (tensor.data_ptr(), tensor.numel(), *tensor.stride())
            if first.setdefault(memory, name) != name:
                shared[name] = first[memory]
    return shared


def _state_dict(content: Any, path: Path) -> Mapping[str, Any]:
    """The mapping of names to tensors. Raises ``CheckpointError`` where there is none."""
    state = content
    while isinstance(state, Mapping) and not any(isinstance(value, Tensor) for value in state.values()):
        state = next((state[key] for key in WRAPPERS if isinstance(state.get(key), Mapping)), None)
    if not isinstance(state, Mapping):
        what = ", ".join(map(str, content)) if isinstance(content, Mapping) else f"a {type(content).__name__}"
        raise CheckpointError(
            f"{path} contains no weights ({what[:200] or 'nothing'})",
            allowed=f"a state dict, or one under {', '.join(WRAPPERS)}",
            remedy="save model.state_dict(); a whole model is a pickle of classes, which is not executed",
        )
    return state
