"""Decides for each operation whether it is real (CPU) or pretended (CUDA), and records what the host waits for.

A *wait* is a point where the host stops until the device has finished what was queued: reading a value, a copy between
devices that is not asynchronous, an index that lives on the host, an output whose size depends on values. A copy counts
as asynchronous if it is ``non_blocking`` and its side in host memory is page-locked, as on a real device.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fake_cuda.device import Waits

aten = torch.ops.aten
_PLAIN = (Tensor, nn.Parameter, nn.Buffer, FakeTensor)
_SIZED_BY_VALUES = ("nonzero", "masked_select", "unique", "_unique", "unique_dim", "unique_consecutive", "bincount")
_BY_INDEX = ("index", "index_put", "index_put_", "_unsafe_index")
_MAY_MIX = ("_to_copy", "copy_", "_foreach_copy_", *_BY_INDEX)
"""Operations whose tensors may be on different devices: all others raise, as they would on a real device."""


class Recorder(TorchDispatchMode):
    """Active for a whole run. ``phase`` is set by the caller; ``waits`` and ``collectives`` are counted by phase."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.phase = "start"
        self.waits: Counter[tuple[str, str, str]] = Counter()
        self.collectives: Counter[tuple[str, str]] = Counter()
        self._pinned: dict[int, Any] = {}
        Waits.note = self.note  # type: ignore[method-assign, assignment]

    def note(self, what: str) -> None:
        """Count a wait at the line of the project, or of torch, that causes it."""
        self.waits[self.phase, what, _where()] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(not issubclass(kind, _PLAIN) for kind in types):
            return NotImplemented  # a DTensor: its own code runs next and comes back here with the local tensors
        name = func.__name__.split(".")[0]
        tensors = [*_tensors((*args, *kwargs.values()))]
        self._count(func, name, tensors)
        if name in ("_pin_memory", "is_pinned"):
            return self._pin(name, args[0])
        if name == "_local_scalar_dense" and isinstance(args[0], FakeTensor):
            return self._read(args[0])
        if name == "equal" and any(isinstance(x, FakeTensor) for x in tensors):
            self._look(func, name, args, kwargs, tensors)
            self.note("value read")
            return True
        device = kwargs.get("device")
        on_device = device is not None and torch.device(device).type == "cuda"
        if not on_device and not any(isinstance(x, FakeTensor) for x in tensors):
            return func(*args, **kwargs)
        self._look(func, name, args, kwargs, tensors)
        return self._pretend(func, name, args, kwargs)

    def _pretend(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "_to_copy" and not isinstance(args[0], FakeTensor):
            source = args[0]  # made directly: torch's converter would keep a weak reference, and a swap would fail
            with self.fake:
                return torch.empty_strided(
                    source.shape, source.stride(), dtype=kwargs.get("dtype") or source.dtype, device=kwargs["device"]
                )
        if name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1]):
            (mask,) = (i for i in args[1] if i is not None)  # every element is taken
            with self.fake:
                return args[0].new_empty((mask.numel(), *args[0].shape[mask.ndim :]))
        with self.fake:
            out = func(*args, **kwargs)
        in_place = func.namespace == "aten" and name.endswith("_") and not name.endswith("__")
        return args[0] if in_place and isinstance(args[0], Tensor) else out

    def _look(self, func: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        kinds = {x.device.type for x in tensors if x.ndim or name.startswith(("_fused", "_foreach"))}
        if len(kinds) > 1 and name not in _MAY_MIX:
            where = [f"{tuple(x.shape)} {x.dtype} {x.device}" for x in tensors]
            raise RuntimeError(f"{func}: tensors on different devices: {where}")
        if name == "_to_copy":
            device = kwargs.get("device")
            if device is not None:
                host = args[0] if args[0].device.type == "cpu" else None
                self._record_copy(args[0].device.type, torch.device(device).type, kwargs.get("non_blocking"), host)
                if args[0].device.type == "cuda" and torch.device(device).type == "cpu":
                    assert "pin_memory" not in kwargs or not kwargs["pin_memory"]
        elif name == "copy_":
            to, source = args[:2]
            host = source if source.device.type == "cpu" else to
            blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            self._record_copy(source.device.type, to.device.type, not blocking, host)
        elif name == "_foreach_copy_":
            for to, source in zip(args[0], args[1], strict=True):
                self._record_copy(source.device.type, to.device.type, len(args) > 2 and args[2], None)
        elif name in _SIZED_BY_VALUES:
            self.note(name)
        elif name in _BY_INDEX:
            if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
                self.note(f"{name} by a mask")
            elif "cpu" in kinds:
                self.note(f"{name} by an index on the host")
        elif name == "repeat_interleave" and not kwargs.get("output_size"):
            self.note("repeat_interleave without output_size")

    def _record_copy(self, source: str, to: str, non_blocking: Any, host: Tensor | None) -> None:
        """A copy to the host is recorded unless it is asynchronous; so is one to the device."""
        if source == to:
            return
        if not non_blocking:
            self.note(f"copy {source} -> {to}")
        elif source == "cpu" and (host is None or not self._is_pinned(host)):
            self.note(f"copy {source} -> {to} from pageable memory")

    def _read(self, x: Tensor) -> Any:
        if x.device.type == "cuda":
            self.note("value read")
        return True if x.dtype == torch.bool else 1.0 if x.is_floating_point() else 1

    def _pin(self, name: str, x: Tensor) -> Any:
        if name == "is_pinned":
            return self._is_pinned(x)
        assert x.device.type == "cpu", x.device
        if isinstance(x, FakeTensor):
            copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")  # its values do not matter
        else:
            copy = x.clone()
        self._pinned[copy.untyped_storage().data_ptr()] = copy.untyped_storage()
        return copy

    def _is_pinned(self, x: Tensor) -> bool:
        return not isinstance(x, FakeTensor) and x.untyped_storage().data_ptr() in self._pinned

    def _count(self, func: Any, name: str, tensors: list[Tensor]) -> None:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in name:
            kinds = "+".join(sorted({x.device.type for x in tensors}))
            self.collectives[self.phase, f"{name} {kinds}"] += 1


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """Also those in lists of lists; torch's ``tree_flatten`` takes a tenth of a case's time."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _where() -> str:
    """The innermost line of the project; and, if torch's FSDP or optimizer called in between, that file."""
    ours, theirs = "", ""
    frame: Any = sys._getframe(2)
    while frame and not ours:
        file = frame.f_code.co_filename
        if "/unigen_ds/" in file:
            ours = f"{file.rpartition('/unigen_ds/')[2]}:{frame.f_code.co_name}"
        elif not theirs and any(part in file for part in ("/fsdp/", "/optim/", "/nn/utils/", "/transformers/")):
            theirs = file.rpartition("/")[2] + ":" + frame.f_code.co_name
        frame = frame.f_back
    return f"{ours or 'no line of the project'}" + (f" ({theirs})" if theirs else "")
