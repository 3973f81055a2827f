"""Merge a checkpoint into plain weight files under the model's own names: ``pytorch_model.bin`` or safetensors.

In: a checkpoint of any layout, with or without a manifest. Out: a folder, complete or not at all, with the files that
DeepSpeed's ``zero_to_fp32`` would write (one file, or shards of at most ``max_shard_size`` and an index), and their
digests, ``digests.json``; ``model.load_state_dict(torch.load(file))`` accepts them. Tensors are streamed in bounded
pieces.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.foreign import locate, read_foreign, stored_dtype
from unigen_ds.checkpoint.layouts.safetensors import open_reader, open_shards
from unigen_ds.checkpoint.manifest import FILE_NAME, Base
from unigen_ds.checkpoint.saver import TOKENIZER, free_name
from unigen_ds.core.choices import DTYPE_NAMES
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.core.shards import BUFFER, EMA, MASTER, OPTIMIZER_FILE, ShardReader
from unigen_ds.system.files import check_digests, check_new, make_directory, new_directory
from unigen_ds.system.log import logger
from unigen_ds.system.outputs import Entry, save_entries, save_torch

DTYPES = dict(zip(DTYPE_NAMES, (torch.float32, torch.bfloat16, torch.float16), strict=True))


@dataclass(frozen=True)
class WeightSource:
    """The weights of a checkpoint, ready to be read."""

    directory: Path
    reader: ShardReader
    average: ShardReader | None
    """The EMA's tensors."""
    frozen: frozenset[str]
    tied: Mapping[str, str]
    """Further name -> name of the tensor."""
    base: Base | None = None
    """Record of the files that have all weights but the adapters."""

    def entries(self, *, dtype: torch.dtype, ema: bool = False, exclude_frozen: bool = False) -> list[Entry]:
        """Buffers, parameters, then tied names. Floating-point tensors become ``dtype``, others stay as they are."""
        if ema and self.average is None:
            raise CheckpointError(
                f"{self.directory} has no average of the weights (no {EMA}/)",
                remedy="train with custom_hooks=[dict(type='EMAHook')], or merge the weights themselves: without --ema",
            )
        average = self.average if ema else None
        ema_names = set() if average is None else set(average.names(EMA))
        entries: dict[str, Entry] = {}
        for (kind, name), shape in self.reader.shapes.items():
            if kind not in (MASTER, BUFFER) or (exclude_frozen and name in self.frozen):
                continue
            reader = self.reader
            if average is not None and name in ema_names:
                reader, kind = average, EMA
            own_dtype = stored_dtype(reader, kind, name, shape)
            target = dtype if own_dtype.is_floating_point else own_dtype
            entries[name] = Entry(name, shape, target, partial(reader.parts, kind, name), name)
        for alias, name in self.tied.items():
            if name in entries:
                entries[alias] = replace(entries[name], name=alias)
        return list(entries.values())


def read_source(checkpoint: Path, *, tag: str | None = None) -> WeightSource:
    """Open a checkpoint or a file of weights; of a work dir, or a folder of DeepSpeed's, the one its hint names, or
    ``tag``. Raises ``CheckpointError`` where it is incomplete or of an unknown layout.
    """
    directory = locate(checkpoint, tag)
    if not (directory / FILE_NAME).is_file():
        check_digests(directory)
        foreign = read_foreign(directory, tag="." if directory.is_dir() else None)
        return WeightSource(directory, foreign.reader, None, foreign.frozen, foreign.reader.tied)

    def has_weights(path: str) -> bool:  # a model for inference needs no other file
        return path.rpartition("/")[0] in ("", EMA, TOKENIZER) and path != OPTIMIZER_FILE

    manifest = store.verify_manifest(directory, accepts=has_weights)
    reader = open_reader(directory, manifest)
    average = open_shards(directory, manifest).get(EMA)
    tied = {alias: row["name"] for row in manifest.parameters for alias in row.get("tied", ())}
    frozen = frozenset(row["name"] for row in manifest.parameters if not row["trainable"])
    return WeightSource(directory, reader, average, frozen, {**reader.tied, **tied}, manifest.base)


@dataclass(frozen=True)
class MergeResult:
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
) -> MergeResult:
    """Write the weights of ``checkpoint`` into the new folder ``out``.

    Args:
        tag: name of the checkpoint's folder below ``checkpoint``.
        ema: the average of the weights instead of the weights; buffers and frozen parameters are the model's.
        max_shard_size: of a file, in bytes or as ``'5GB'``; a larger tensor gets a file of its own.
        safe_serialization: safetensors instead of ``torch.save``.

    Raises:
        CheckpointError: the checkpoint is incomplete, or the disk is full.
        ConfigError: ``max_shard_size`` cannot work, or ``out`` exists.
    """
    check_new(out)
    source = read_source(checkpoint, tag=tag)
    if source.base is not None:
        raise CheckpointError(
            f"{source.directory} holds adapters, and their base is in {source.base.path}",
            remedy="tools/export.py --merge CHECKPOINT OUT writes the merged weights, without --merge the adapters",
        )
    entries = {entry.name: entry for entry in source.entries(dtype=dtype, ema=ema, exclude_frozen=exclude_frozen)}
    if not entries:
        raise CheckpointError(f"{source.directory} contains no weights")
    file = "model.safetensors" if safe_serialization else "pytorch_model.bin"
    try:  # by the function of Hugging Face that DeepSpeed uses, so with its result
        split = split_state_dict_into_shards_factory(
            entries,
            get_storage_size=lambda entry: entry.nbytes,
            get_storage_id=lambda entry: None if safe_serialization else entry.source,
            filename_pattern=file.replace(".", "{suffix}.", 1),
            max_shard_size=max_shard_size,
        )
    except ValueError as error:
        choices = "a number of bytes, or one with a unit, like 5GB"
        raise ConfigError(f"--max-shard-size {max_shard_size!r} is no size", allowed=choices) from error
    shards = {name: [entries[each] for each in names] for name, names in split.filename_to_tensors.items()}
    sizes = []
    for of_file in shards.values():  # torch.save stores what tied names share once
        distinct = of_file if safe_serialization else {entry.source: entry for entry in of_file}.values()
        sizes.append(sum(entry.nbytes for entry in distinct))
    nbytes, files = sum(sizes), [*shards]
    with new_directory(out) as staging:
        more = 0 if safe_serialization else max(sizes)  # torch.save reads from a further file
        if shutil.disk_usage(staging).free < nbytes + more:  # now, and not after hours of writing
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {(nbytes + more) / 2**20:,.1f} MiB are needed")
        for name, of_file in shards.items():
            if safe_serialization:
                save_entries(staging / name, of_file, {"format": "pt"})
            else:
                save_torch(staging / name, of_file)
        if split.is_sharded:
            files.append(f"{file}.index.json")
            content = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (staging / files[-1]).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return MergeResult(files, len(entries), sum(entry.numel for entry in entries.values()), nbytes)


def export_weights(checkpoint: Path) -> None:
    """Write the weights of a committed checkpoint into ``weights/<its name>`` beside it, in safetensors, and their
    average, where there is one, into ``weights/<its name>_ema``. What cannot be written is an error in the log.
    """
    for ema in [False, True] if (checkpoint / EMA).is_dir() else [False]:
        out = free_name(checkpoint.parent / store.WEIGHTS / (checkpoint.name.removesuffix(".pth") + "_ema" * ema))
        try:
            make_directory(out.parent)
            merge(checkpoint, out, ema=ema, safe_serialization=True)
            logger().info("Saved weights %s.", out)
        except Exception as error:  # the checkpoint is complete, and training continues
            option = " --ema" if ema else ""
            logger().error("%s was not written: %s The checkpoint itself is complete. By hand, while it is there:"
                           " tools/zero_to_fp32.py %s %s --safe-serialization%s", out, error, checkpoint, out,
                           option)  # fmt: skip
