"""Merge a checkpoint into plain weight files under the model's own names: ``pytorch_model.bin`` or safetensors.

In: a checkpoint of any layout, with or without a manifest. Out: a folder with the files that DeepSpeed's
``zero_to_fp32`` would write (one file, or shards of at most ``max_shard_size`` and an index), which
``model.load_state_dict(torch.load(file))`` accepts. Tensors are streamed in bounded pieces (``system/outputs.py``).

``digests.json`` beside them has their digests. The files are written in the folder of ``out`` under a temporary name,
flushed, compared with the source if asked, and then renamed: ``out`` appears complete or not at all. If ``out`` is an
existing folder, its other files stay, and its older weight files are replaced one by one, the index and the digests
last. The next merge deletes what a killed one left.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.base_files import Base
from unigen_ds.checkpoint.foreign import locate, read_foreign, stored_dtype
from unigen_ds.checkpoint.layouts.safetensors import SafetensorsReader
from unigen_ds.checkpoint.manifest import FILE_NAME
from unigen_ds.checkpoint.saver import TOKENIZER
from unigen_ds.core.choices import DTYPE_NAMES
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.core.shards import BUFFER, EMA, MASTER, OPTIMIZER_FILE, Fetch, PieceReader, slices_of
from unigen_ds.system.files import (
    DIGESTS,
    check_digests,
    delete_inside,
    fsync_path,
    rename_into_place,
    stored_digests,
    temporary_beside,
    write_digests,
)
from unigen_ds.system.outputs import Entry, save_entries, save_torch

DTYPES = dict(zip(DTYPE_NAMES, (torch.float32, torch.bfloat16, torch.float16), strict=True))

OnProgress = Callable[[str, int, int], None]
"""Called with what is being done (``'writing'``, ``'verifying'``), bytes done, bytes in all."""


@dataclass(frozen=True)
class Source:
    """The weights of a checkpoint, ready to be read."""

    directory: Path
    """The folder of its files."""
    reader: PieceReader
    average: PieceReader | None
    """The EMA's tensors."""
    frozen: frozenset[str]
    tied: Mapping[str, str]
    """Further name -> name of the tensor."""
    base: Base | None = None
    """For adapters, the record of the files that have all other weights."""

    def entries(self, *, dtype: torch.dtype, ema: bool = False, exclude_frozen: bool = False) -> list[Entry]:
        """Buffers, parameters, then tied names. Floating-point tensors become ``dtype``, others stay as they are."""
        if ema and self.average is None:
            raise CheckpointError(
                f"{self.directory} has no average of the weights (no {EMA}/)",
                remedy="train with custom_hooks=[dict(type='EMAHook')], or merge the weights themselves: without --ema",
            )
        average = self.average if ema else None
        averaged = set() if average is None else set(average.names(EMA))
        entries: dict[str, Entry] = {}
        for (kind, name), shape in self.reader.shapes.items():
            if kind not in (MASTER, BUFFER) or (exclude_frozen and name in self.frozen):
                continue
            reader = self.reader
            if average is not None and name in averaged:
                reader, kind = average, EMA
            stored = stored_dtype(reader, kind, name, shape)
            target = dtype if stored.is_floating_point else stored
            entries[name] = Entry(name, shape, target, partial(reader.parts, kind, name), name)
        for alias, name in self.tied.items():
            if name in entries:
                entries[alias] = replace(entries[name], name=alias)
        return list(entries.values())


def read_source(checkpoint: Path, *, tag: str | None = None) -> Source:
    """Open a checkpoint or a file of weights; of a work dir, or a folder of DeepSpeed's, the one its hint names, or
    ``tag``.

    Raises ``CheckpointError`` where it is incomplete or of an unknown layout.
    """
    directory = locate(checkpoint, tag)
    if not (directory / FILE_NAME).is_file():
        check_digests(directory)
        foreign = read_foreign(directory, tag="." if directory.is_dir() else None)
        frozen = frozenset(row["name"] for row in foreign.parameters if not row["trainable"])
        return Source(directory, foreign.reader, None, frozen, dict(foreign.reader.tied))

    def has_weights(path: str) -> bool:  # a model for inference needs no other file
        return path.rpartition("/")[0] in ("", EMA, TOKENIZER) and path != OPTIMIZER_FILE

    manifest = store.verify_manifest(directory, wanted=has_weights)
    reader = store.open_reader(directory, manifest)
    average = store.open_shards(directory, manifest).get(EMA)
    tied = {alias: row["name"] for row in manifest.parameters for alias in row.get("tied", ())}
    frozen = frozenset(row["name"] for row in manifest.parameters if not row["trainable"])
    base = None if manifest.base is None else Base.from_state(manifest.base)
    return Source(directory, reader, average, frozen, {**reader.tied, **tied}, base)


@dataclass(frozen=True)
class Merged:
    """The result of ``merge``."""

    files: list[str]
    num_tensors: int
    numel: int
    nbytes: int


def merge(
    checkpoint: Path,
    out: Path,
    *,
    tag: str | None = None,
    ema: bool = False,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | int = "5GB",
    safe_serialization: bool = False,
    exclude_frozen: bool = False,
    verify: bool = False,
    progress: OnProgress | None = None,
) -> Merged:
    """Write the weights of ``checkpoint`` into the folder ``out``.

    Args:
        tag: name of the checkpoint's folder below ``checkpoint``.
        ema: the average of the weights instead of the weights; buffers and frozen parameters are the model's.
        max_shard_size: of a file, in bytes or as ``'5GB'``; a larger tensor gets a file of its own.
        safe_serialization: safetensors instead of ``torch.save``.
        verify: read the files back and compare every bit with the checkpoint before they replace anything.

    Raises:
        CheckpointError: the checkpoint is incomplete, the disk is full, or the files read back differ.
        ConfigError: ``max_shard_size`` or ``out`` cannot work.
    """
    source = read_source(checkpoint, tag=tag)
    if source.base is not None:
        raise CheckpointError(
            f"{source.directory} holds adapters, and their base is in {source.base.path}",
            remedy="tools/export.py --merge CHECKPOINT OUT writes the merged weights, without --merge the adapters",
        )
    if out.exists() and (
        not out.is_dir() or (out / FILE_NAME).is_file() or out.resolve() == source.directory.resolve()
    ):
        what = "a checkpoint" if out.is_dir() else "a file"
        raise ConfigError(f"the output {out} is {what}", allowed="a folder of its own, new or not")
    entries = source.entries(dtype=dtype, ema=ema, exclude_frozen=exclude_frozen)
    if not entries:
        raise CheckpointError(f"{source.directory} contains no weights")
    form = _SAFETENSORS if safe_serialization else _TORCH
    try:  # by the function of Hugging Face that DeepSpeed uses, so with its result
        split = split_state_dict_into_shards_factory(
            {entry.name: entry for entry in entries},
            get_storage_size=lambda entry: entry.nbytes,
            get_storage_id=lambda entry: entry.source if form.shares else None,
            filename_pattern=form.file.replace(".", "{suffix}.", 1),
            max_shard_size=max_shard_size,
        )
    except ValueError as error:
        allowed = "a number of bytes, or one with a unit, like 5GB"
        raise ConfigError(f"--max-shard-size {max_shard_size!r} is no size", allowed=allowed) from error
    by_name = {entry.name: entry for entry in entries}
    shards = {file: [by_name[name] for name in names] for file, names in split.filename_to_tensors.items()}
    sizes = [*map(form.size, shards.values())]
    needed = sum(sizes)
    try:
        with _staging_folder(out) as staging:
            if (
                shutil.disk_usage(staging).free < needed + max(sizes) * form.shares
            ):  # now, and not after hours of writing
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = _report_bytes(shards, "writing", needed, progress)
            for file, of_file in written.items():
                form.save(staging / file, of_file)
            if split.is_sharded:
                index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
                text = json.dumps(index, indent=2, sort_keys=True) + "\n"
                (staging / form.index).write_text(text, encoding="utf-8")
            if verify:
                _verify(staging, _report_bytes(shards, "verifying", sum(e.nbytes for e in entries), progress))
            write_digests(staging, keep={k: v for k, v in stored_digests(out).items() if not form.is_own(k)})
            _publish(staging, out, form)
    except OSError as error:
        raise CheckpointError(
            f"could not write {out}: {error}",
            remedy=f"free disk space ({needed / 2**20:,.1f} MiB are needed), fix the"
            " permission, or name another folder; nothing was changed",
        ) from error
    files = [*shards, *([form.index] if split.is_sharded else [])]
    return Merged(files, len(entries), sum(e.numel for e in entries), needed)


@dataclass(frozen=True)
class _Format:
    """Names as DeepSpeed and Hugging Face have them."""

    file: str
    index: str
    save: Callable[[Path, Sequence[Entry]], None]
    shares: bool
    """Whether tied names share their bytes."""

    def size(self, entries: Sequence[Entry]) -> int:
        if self.shares:
            entries = list({entry.source: entry for entry in entries}.values())
        return sum(entry.nbytes for entry in entries)

    def is_own(self, name: str) -> bool:
        """Whether an earlier merge in this format may have written the file."""
        stem, ending = self.file.rsplit(".", 1)
        return re.fullmatch(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.{ending}(\.index\.json)?", name) is not None


_TORCH = _Format("pytorch_model.bin", "pytorch_model.bin.index.json", save_torch, shares=True)
_SAFETENSORS = _Format(
    "model.safetensors",
    "model.safetensors.index.json",
    partial(save_entries, metadata={"format": "pt"}),
    shares=False,
)


def _report_bytes(
    shards: Mapping[str, list[Entry]], what: str, total: int, progress: OnProgress | None
) -> Mapping[str, list[Entry]]:
    """The same entries, which report to ``progress`` the bytes that are read from them."""
    if progress is None:
        return shards
    done = 0

    def parts(entry: Entry, start: int, stop: int) -> Iterator[Tensor]:
        nonlocal done
        for part in entry.parts(start, stop):
            yield part
            done += part.numel() * entry.dtype.itemsize
            progress(what, done, total)

    return {file: [replace(e, parts=partial(parts, e)) for e in entries] for file, entries in shards.items()}


def _verify(staging: Path, shards: Mapping[str, list[Entry]]) -> None:
    """Compare every bit of the files with the source. Raises ``CheckpointError`` naming the tensor that differs."""
    for file, entries in shards.items():
        path = staging / file
        written: dict[str, tuple[tuple[int, ...], Fetch]]
        if path.suffix == ".safetensors":
            reader = SafetensorsReader(staging, files=[file])
            written = {name: (shape, partial(reader.read, kind, name)) for (kind, name), shape in reader.shapes.items()}
        else:
            state = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
            written = {name: (tuple(tensor.shape), slices_of(tensor)) for name, tensor in state.items()}
        if set(written) != {entry.name for entry in entries}:
            raise CheckpointError(f"{file}, read back, has other tensors than were written; nothing was changed")
        for entry in entries:
            shape, fetch = written[entry.name]
            at, same = 0, shape == entry.shape
            for piece in entry.pieces() if same else ():
                values = fetch(at, at + piece.numel())
                same = same and values.dtype == piece.dtype
                same = same and torch.equal(values.view(torch.uint8), piece.view(torch.uint8))
                at += piece.numel()
            if not same:
                problem = f"{entry.name} in {file}, read back, differs from the checkpoint"
                raise CheckpointError(problem, remedy="merge again; if it happens again, the disk is faulty")


@contextmanager
def _staging_folder(out: Path) -> Iterator[Path]:
    """A folder on the disk of ``out``, removed at the end unless it was renamed."""
    out = out.resolve()
    home = out if out.is_dir() else out.parent
    home.mkdir(parents=True, exist_ok=True)
    staging = temporary_beside(home / out.name, "writing")
    staging.mkdir()
    try:
        yield staging
    finally:
        with suppress(OSError):
            delete_inside(staging, home)


def _publish(staging: Path, out: Path, form: _Format) -> None:
    """Rename. Into a folder that exists: without its old index first, and the digests last, so that a mixture never
    looks complete.
    """
    files = sorted(path.name for path in staging.iterdir())
    for path in (staging / form.index, staging / DIGESTS, staging):
        if path.exists():
            fsync_path(path)
    if not out.is_dir():
        rename_into_place(staging, out)
        return
    (out / form.index).unlink(missing_ok=True)
    for name in sorted(files, key=lambda name: (name == DIGESTS, name == form.index)):
        os.replace(staging / name, out / name)  # the folder is flushed below
    for path in [path for path in out.iterdir() if form.is_own(path.name) and path.name not in files]:
        path.unlink()
    fsync_path(out)
