"""Counts the bytes of all tensors that exist, and the highest sum: by every operation that torch dispatches.

A storage counts from the first operation that returns it until it is freed, whatever refers to it. With ``fake`` the
tensors of floating-point numbers that an operation makes get no memory (torch's ``FakeTensor``); tensors of integers
are real, so what depends on their values (the shapes of a packed batch) is that of the data.
"""

from __future__ import annotations

import logging
import multiprocessing
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from multiprocessing import connection
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from unigen_ds.backends.memory import allocate
from unigen_ds.core.errors import UnigenError, short_text

_ISFINITE = torch.isfinite
_INPLACE_RESIZE = torch.UntypedStorage.resize_


class CountedBytes(TorchDispatchMode):
    """A context. ``now`` and ``peak`` are bytes; ``device_peak`` is without what ``on_host`` sets apart (offload)."""

    def __init__(self, *, fake: bool = False) -> None:
        super().__init__()
        self.now = self.peak = self.host = self.device_peak = 0
        self._on_host: set[int] = set()
        self._storages: dict[int, tuple[Any, int]] = {}
        self._patches = ExitStack()
        self._without_memory = FakeTensorMode(allow_non_fake_inputs=True) if fake else None

    def without_memory(self, module: torch.nn.Module) -> None:
        """Replace the parameters and the buffers of floating-point numbers that have memory by fakes, if ``fake``."""
        if (mode := self._without_memory) is None:
            return

        def has_memory(tensor: Tensor) -> bool:
            is_number = tensor.is_floating_point() or isinstance(tensor, torch.nn.Parameter)
            return is_number and not (tensor.is_meta or isinstance(tensor, FakeTensor))

        allocate(module, lambda tensor: mode.from_tensor(tensor.detach()), replaces=has_memory)

    def begin(self) -> int:
        """What exists now, from which a new peak is counted."""
        self.peak, self.device_peak = self.now, self.now - self.host
        return self.now

    def on_host(self, tensors: Iterable[Tensor]) -> None:
        """Count these as host memory from now on."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._storages and key not in self._on_host:
                self._on_host.add(key)
                self.host += self._storages[key][1]

    def __enter__(self) -> CountedBytes:
        super().__enter__()

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = _INPLACE_RESIZE(storage, size)
            if (key := storage._cdata) in self._storages:
                reference, before = self._storages[key]
                self._storages[key] = (reference, storage.nbytes())
                self._change(storage.nbytes() - before)
            return result

        self._patches.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize))
        if self._without_memory is not None:
            self._patches.enter_context(mock.patch.object(torch.nn.Module, "_apply", _apply))
            self._patches.enter_context(mock.patch.object(torch, "isfinite", _isfinite))
        return self

    def __exit__(self, *error: Any) -> None:
        self._patches.close()
        super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, Tensor) and kind not in PLAIN for kind in types):
            return NotImplemented  # a tensor of tensors (DTensor): its parts come here
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:  # torch itself asks for shapes
            return function(*args, **(kwargs or {}))
        result = self._run(function, args, kwargs or {})
        self.add_all(tensors_of(result))
        return result

    def _run(self, function: Any, args: Any, kwargs: Any) -> Any:
        mode = self._without_memory
        if mode is None:
            return function(*args, **kwargs)
        inputs = tensors_of((args, kwargs))
        if any(type(value) is FakeTensor for value in inputs):
            if function is torch.ops.aten._local_scalar_dense.default:  # without memory: no overflow, a norm of 0
                dtype = inputs[0].dtype
                return False if dtype is torch.bool else 0.0 if dtype.is_floating_point else 0
            if function is torch.ops.aten.equal.default:  # a model of transformers keeps documents of a row apart
                return True
            return function(*args, **kwargs)
        from_meta = any(value.is_meta for value in inputs) and str(kwargs.get("device") or "meta") != "meta"
        is_float = (kwargs.get("dtype") or torch.get_default_dtype()).is_floating_point
        makes = not inputs and bool(args) and isinstance(args[0], (list, tuple))  # torch.empty
        if from_meta or (makes and is_float and str(kwargs.get("device")) != "meta"):
            with mode:
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    def add_all(self, tensors: Iterable[Tensor]) -> None:
        """Count the storage of each tensor, once: also of those that no operation has returned (numpy's)."""
        for tensor in tensors:
            if tensor.layout is torch.strided and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._storages:
                    self._storages[key] = (weakref.ref(storage, partial(self._free, key)), storage.nbytes())
                    self._change(storage.nbytes())

    def _free(self, key: int, _: Any) -> None:
        nbytes = self._storages.pop(key)[1]
        if key in self._on_host:
            self._on_host.discard(key)
            self.host -= nbytes
        self._change(-nbytes)

    def _change(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        self.device_peak = max(self.device_peak, self.now - self.host)


def _apply(module: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:
    """Do as torch's ``_apply``, which replaces fake parameters by others: here they keep their identity."""
    for part in module.modules() if recurse else (module,):
        for parameter in part._parameters.values():
            if parameter is not None:
                with torch.no_grad():
                    new = function(parameter)
                if new is not parameter:
                    parameter.data = new
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = function(buffer)
    return module


def tensors_of(values: Any) -> list[Tensor]:
    """Those in arguments or results of an operation."""
    parts = values.values() if isinstance(values, dict) else values if isinstance(values, (list, tuple)) else ()
    return [values] if isinstance(values, Tensor) else [one for part in parts for one in tensors_of(part)]


PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)
"""Tensors that are not made of others."""


def _isfinite(tensor: Tensor) -> Tensor:
    """Everything without memory is finite."""
    return torch.ones(tensor.shape, dtype=torch.bool) if isinstance(tensor, FakeTensor) else _ISFINITE(tensor)


# Tasks in forked processes: each has what this process has read and imported, and changes nothing in it.

K = TypeVar("K", bound=Hashable)
Outcome = tuple[Any, str | None]
"""(the value of a task, None), or (None, the text of its error)."""


def in_processes(tasks: Mapping[K, Callable[[], Any]], *, jobs: int) -> Iterator[tuple[K, Outcome]]:
    """Yield the outcome of each task when it has ended; ``jobs`` processes run at a time."""
    context = multiprocessing.get_context("fork")
    waiting, running = [*tasks], dict[Any, tuple[K, Any]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_send_outcome, args=(tasks[name], sender))
            process.start()
            sender.close()
            running[receiver] = name, process
        ready: Any
        for ready in connection.wait([*running]):
            name, process = running.pop(ready)
            try:
                outcome: Outcome | None = ready.recv()
            except EOFError:
                outcome = None
            process.join()
            yield name, outcome or (None, f"the process that traced it ended with {process.exitcode}")


def _send_outcome(task: Callable[[], Any], sender: connection.Connection) -> None:
    torch.set_num_threads(1)  # torch's threads do not survive the fork
    logging.disable(logging.CRITICAL)  # what an engine logs at its start is not of this command
    warnings.simplefilter("ignore")
    try:
        outcome: Outcome = (task(), None)
    except UnigenError as error:
        outcome = (None, str(error))
    except Exception as error:
        outcome = (None, f"it could not be traced: {short_text(error)}")
    sender.send(outcome)
