"""Files of a checkpoint while they are written: plain streams that hash what is written to them.

An engine returns what a rank has to write as ``StateFiles`` (no disk access, collectives allowed); the saver then
writes it (disk access, no collectives). So an error of the disk can leave no rank in a collective. ``HashedFile``
computes the hash while it writes (xxh3_128, about 6 GB/s), so that no byte is read back; files are made with ``open``'s
mode 0666, so the umask decides who may read them.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import xxhash
from torch import Tensor

from unigen_ds.system.files import ALGORITHM

_BUFFER = 1 << 20
_PIECE = 16 << 20

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""dtype -> its name in a safetensors file."""


@dataclass(frozen=True)
class Output:
    """One file that this rank writes."""

    path: str
    """Relative to the checkpoint's directory."""
    nbytes: int
    """Size; where the format's overhead is not known, the tensors' bytes."""
    write: Callable[[HashedFile], Any]
    """Write the content. Not collective; may run in a thread. What it returns is passed to ``StateFiles.index``."""


def _no_index(results: Sequence[Sequence[Any]]) -> Sequence[Output]:
    return ()


@dataclass(frozen=True)
class StateFiles:
    """What a rank writes of an engine's state."""

    layout: str
    """Which reader opens it (``checkpoint/layouts``)."""
    files: Sequence[Output]
    index: Callable[[Sequence[Sequence[Any]]], Sequence[Output]] = _no_index
    """Called on rank 0 once all ranks have written, with what each rank's ``write`` calls returned: further files."""


class HashedFile:
    """A new file, written in order; ``digest`` is that of all bytes written. Small writes are collected.

    It has no ``fileno`` on purpose: ``torch.save`` would write to that without the hash.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._hash = xxhash.xxh3_128()
        self._buffer = bytearray()
        self._size = 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if not view.nbytes:
            return 0
        view = view.cast("B")
        self._size += view.nbytes
        if view.nbytes + len(self._buffer) <= _BUFFER:
            self._buffer += view
        else:
            self.flush()
            self._put(view)
        return view.nbytes

    def _put(self, view: memoryview) -> None:
        self._hash.update(view)
        while view:
            view = view[os.write(self._descriptor, view[:_PIECE]) :]

    def flush(self) -> None:
        """Write the collected bytes to the file."""
        collected, self._buffer = self._buffer, bytearray()
        self._put(memoryview(collected))

    def tell(self) -> int:
        return self._size

    @property
    def digest(self) -> str:
        """``algorithm:hex`` of what was flushed."""
        return f"{ALGORITHM}:{self._hash.hexdigest()}"

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Without an error, the content is on disk afterwards."""
        try:
            if kind is None:
                self.flush()
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


def safetensors_header(
    entries: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Length and header of a file whose tensors (name, dtype name, shape, bytes) follow in this order."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, dtype, shape, nbytes in entries:
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    header = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header


def safetensors_output(path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Output:
    """A safetensors file. Tensors may be on any device: each is copied to the host when it is written."""
    # as the safetensors package orders them: each tensor is aligned
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    sizes = [(name, DTYPE_NAMES[t.dtype], t.shape, t.numel() * t.dtype.itemsize) for name, t in ordered]
    header = safetensors_header(sizes, metadata)

    def write(stream: HashedFile) -> None:
        stream.write(header)
        for _, tensor in ordered:
            stream.write(tensor_bytes(tensor))

    return Output(path, len(header) + sum(size for *_, size in sizes), write)


def bytes_output(path: str, content: bytes) -> Output:
    """A small file."""

    def write(stream: HashedFile) -> None:
        stream.write(content)

    return Output(path, len(content), write)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The elements of a tensor, row-major, as bytes on the host; no copy where they are so already."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite. A sum that is finite shows it in one pass; it may also overflow."""
    if not tensor.is_floating_point():
        return True
    total = tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
    return bool(total.isfinite()) or bool(tensor.isfinite().all())


def write_output(directory: Path, output: Output) -> tuple[int, str, Any]:
    """Write one file durably. Returns its size, its digest and what ``write`` returned."""
    path = directory / output.path
    if not path.parent.is_dir():
        path.parent.mkdir(exist_ok=True)
    try:
        with HashedFile(path) as stream:
            result = output.write(stream)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    return stream.tell(), stream.digest, result


def save_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """``safetensors.torch.save_file``, but durable, and readable by whom the umask allows."""
    write_output(path.parent, safetensors_output(path.name, tensors, metadata))


def nested_bytes(state: Any) -> int:
    """Bytes of all tensors in nested dicts and sequences, each storage once: about what ``torch.save`` writes."""
    storages: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, Mapping):
            for inner in value.values():
                visit(inner)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                visit(inner)

    visit(state)
    return sum(storages.values())
