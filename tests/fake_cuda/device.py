"""A pretended CUDA device on a CPU build of torch. ``install`` changes ``torch.cuda`` for the whole process.

Tensors on the CPU are real, those on "cuda" are FakeTensors (a shape, a dtype, a device, no values). ``Recorder``
decides for each operation which of the two it is, notes every point where the host would wait for the device, and gives
fixed numbers to whoever reads a value.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

SHIM = Path(__file__).with_name("shim.cpp")
NAME = "NVIDIA H100 80GB HBM3"


def compile_shim(folder: Path) -> Path:
    """Compile ``shim.cpp`` with g++ against this torch: about three seconds."""
    from torch.utils.cpp_extension import include_paths

    library, libs = folder / "libfake_cuda.so", Path(torch.__file__).parent / "lib"
    includes = [f"-I{path}" for path in include_paths()]
    command = ["g++", "-O0", "-std=c++20", "-shared", "-fPIC", *includes, str(SHIM), "-o", str(library)]
    command += [f"-L{libs}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libs}"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


class Waits:
    """What is called when the host would wait for the device; ``Recorder`` puts its own function here."""

    note: Callable[[str], None] = staticmethod(lambda what: None)


class Event:
    """Replaces ``torch.cuda.Event``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.timed = bool(options.get("enable_timing"))

    def record(self, stream: Any = None) -> Event:
        return self

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two recorded events: always one."""
        assert self.timed and end.timed, "an event without enable_timing has no time"
        return 1.0

    def synchronize(self) -> None:
        Waits.note("event.synchronize")


class Stream:
    """Replaces ``torch.cuda.Stream``."""

    cuda_stream = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.device = torch.device("cuda", 0)

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        Waits.note("stream.synchronize")


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    Waits.note("cuda.get_rng_state")
    return torch.zeros(16, dtype=torch.uint8)


def _set_rng_state(state: torch.Tensor, device: Any = "cuda") -> None:
    assert state.dtype == torch.uint8 and state.device.type == "cpu" and state.shape == (16,)
    Waits.note("cuda.set_rng_state")


def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """``torch.utils.swap_tensors`` without its refusal of weak references, of which FakeTensors always have some."""
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


def _apply(self: torch.nn.Module, real: Any, fn: Any, recurse: bool = True) -> torch.nn.Module:
    """``Module._apply`` that keeps the parameter objects, and so ties, when real tensors become FakeTensors."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return real(self, fn, recurse)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _move_states_to_device(params: list[Any], buffers: list[Any], device: torch.device) -> None:
    """FSDP2's function of this name, which sets ``.data``: a real tensor cannot become a FakeTensor that way."""
    for tensor in (*params, *buffers):
        if tensor.device != device and tensor.device.type != "meta":
            with torch.no_grad():
                copy = tensor.to(device)
            if isinstance(tensor, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, tensor.requires_grad)
            _swap(tensor, copy)


def install(library: Path) -> None:
    """Load the shim and replace the functions of ``torch.cuda`` that this project and torch call."""
    import torch.distributed.fsdp._fully_shard._fsdp_init as fsdp_init
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert ctypes.CDLL(str(library)).install_fake_cuda() == 1
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[method-assign, assignment]
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device='cuda') is then a copy from the CPU, as it is
    torch.nn.Module._apply = functools.partialmethod(_apply, torch.nn.Module._apply)  # type: ignore[assignment]
    torch.utils.swap_tensors = _swap
    assert hasattr(fsdp_init, "_move_states_to_device")
    fsdp_init._move_states_to_device = _move_states_to_device
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (9, 0),
        "max_memory_allocated": lambda device=None: 3 * 2**20,
        "max_memory_reserved": lambda device=None: 5 * 2**20,
        "memory_allocated": lambda device=None: 2 * 2**20,
        "memory_reserved": lambda device=None: 4 * 2**20,
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "_lazy_init": lambda: None,
        "synchronize": lambda device=None: Waits.note("cuda.synchronize"),
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "empty_cache": lambda: None,
    }
    for name, function in functions.items():
        assert hasattr(torch.cuda, name), name
        setattr(torch.cuda, name, function)


@contextlib.contextmanager
def replace(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """``owner.name`` is ``value`` inside; yields what it was."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield before
    finally:
        setattr(owner, name, before)
