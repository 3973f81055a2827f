"""A checkpoint in one file of weights and one of the optimizer's state, made while it is saved.

In: the staging folder, into which every rank has written its files. Out: the layout ``safetensors``, which is that of
``single`` and which every engine reads at any number of processes: ``model.safetensors`` under the model's own names,
``optimizer.safetensors``, and one file for each folder of hooks' shards (``ema``).

Rank 0 makes them from the files, a piece of 16 MiB at a time: no process ever has the whole model, no collective can
leave a rank waiting, and it works for every engine whose layout can be read. The price is time: everything is read and
written once more, by one process, while the others wait for the commit.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from unigen_ds.checkpoint.foreign import stored_dtype
from unigen_ds.checkpoint.layouts import open_reader, open_shards, shard_folders
from unigen_ds.checkpoint.layouts.base import PieceReader
from unigen_ds.checkpoint.manifest import FILE_NAME, FULL, FileEntry, Manifest
from unigen_ds.checkpoint.writers import Entry
from unigen_ds.core.shards import BUFFER, MASTER, OPTIMIZER_FILE, STAMP, shard_key
from unigen_ds.system.files import delete_inside
from unigen_ds.system.outputs import (
    DTYPE_NAMES,
    HashedFile,
    Output,
    bytes_output,
    safetensors_header,
    tensor_bytes,
    write_output,
)

Form = Literal["sharded", "full", "both"]
"""What a save leaves: the engine's own files, the consolidated ones, or both."""
LAYOUT = "safetensors"
"""A checkpoint of this layout is consolidated already."""
_ONE = "rank00000.safetensors"


def consolidate(staging: Path, manifest: Manifest, *, form: Form, rng: str, plain: Sequence[str]) -> None:
    """Add the consolidated files to a staging folder, or replace the engine's by them, and list them in
    ``manifest``, which lists the engine's.

    ``rng``: the folder of the generators' states, which stay a file of each rank. ``plain``: files at the top of the
    folder that are not the engine's. With ``'both'``, ``full/`` is a checkpoint of its own, with its own manifest.
    """
    folders = [name for name in shard_folders(manifest) if name != rng]
    outputs = _outputs(staging, manifest, folders)
    for folder in sorted({os.path.dirname(output.path) for output in outputs}):
        (staging / FULL / folder).mkdir(parents=True, exist_ok=True)
    made = [_written(staging / FULL, output) for output in outputs]
    is_engines = {entry.path: _parent(entry) in folders or (not _parent(entry) and entry.path not in plain)
                  for entry in manifest.files}  # fmt: skip
    kept = [entry for entry in manifest.files if not is_engines[entry.path]]
    if form == "both":
        whole = dataclasses.replace(manifest, layout=LAYOUT, files=_sorted([*kept, *made]))
        made += [_copied(staging, entry) for entry in kept]
        made.append(_written(staging / FULL, bytes_output(FILE_NAME, whole.to_json().encode())))
        added = [dataclasses.replace(entry, path=f"{FULL}/{entry.path}") for entry in made]
        manifest.files = _sorted([*manifest.files, *added])
        return
    for entry in manifest.files:
        if is_engines[entry.path]:
            (staging / entry.path).unlink()
    for entry in made:
        os.replace(staging / FULL / entry.path, staging / entry.path)
    delete_inside(staging / FULL, staging)
    manifest.layout, manifest.files = LAYOUT, _sorted([*kept, *made])


def _outputs(staging: Path, manifest: Manifest, folders: Iterable[str]) -> list[Output]:
    """The consolidated files. The readers stay open until they are written."""
    reader = open_reader(staging, manifest)
    weights = [pair for pair in reader.shapes if pair[0] in (MASTER, BUFFER)]
    found = [
        _output("model.safetensors", manifest, [_entry(reader, *pair, shape=reader.shapes[pair]) for pair in weights]),
        _output(
            OPTIMIZER_FILE, manifest, _flat(reader, (kind for kind in reader.kinds() if kind not in (MASTER, BUFFER)))
        ),
    ]
    for folder in folders:
        shards = open_shards(staging, manifest, folder)
        found.append(_output(f"{folder}/{_ONE}", manifest, _flat(shards, shards.kinds())))
    return found


def _flat(reader: PieceReader, kinds: Iterable[str]) -> list[Entry]:
    """Every tensor of some kinds, in one piece from its first element on."""
    pairs = [(kind, name) for kind in kinds for name in reader.names(kind)]
    return [_entry(reader, *pair, shape=(reader.numel(*pair),), key=shard_key(*pair, 0)) for pair in pairs]


def _entry(reader: PieceReader, kind: str, name: str, *, shape: tuple[int, ...], key: str | None = None) -> Entry:
    dtype = stored_dtype(reader, kind, name, shape)
    return Entry(key or name, shape, dtype, key or name, partial(reader.parts, kind, name))


def _output(path: str, manifest: Manifest, entries: Sequence[Entry]) -> Output:
    """A safetensors file of streamed tensors, in the order of ``safetensors_output``: each is aligned."""
    ordered = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))
    sizes = [(entry.name, DTYPE_NAMES[entry.dtype], entry.shape, entry.nbytes) for entry in ordered]
    header = safetensors_header(sizes, {"format": "pt", STAMP: manifest.stamp})

    def write(stream: HashedFile) -> None:
        stream.write(header)
        for entry in ordered:
            for piece in entry.pieces():
                stream.write(tensor_bytes(piece))

    return Output(path, len(header) + sum(entry.nbytes for entry in entries), write)


def _written(folder: Path, output: Output) -> FileEntry:
    size, digest, _ = write_output(folder, output)
    return FileEntry(output.path, size, digest)


def _copied(staging: Path, entry: FileEntry) -> FileEntry:
    """A small file of the checkpoint, in ``full/`` as well."""
    content = (staging / entry.path).read_bytes()
    return _written(staging / FULL, bytes_output(entry.path, content))


def _parent(entry: FileEntry) -> str:
    return entry.path.rpartition("/")[0]


def _sorted(entries: Iterable[FileEntry]) -> list[FileEntry]:
    return sorted(entries, key=lambda entry: entry.path)
