"""A checkpoint without our manifest: what its files state, and what cannot be known.

In: a directory that plain DeepSpeed, mmengine or xtuner wrote. Out: ``Foreign``: a reader of its tensors, the
parameter table, the geometry of the run from the stored ``ds_config`` (or from ``assume``, for what is not there), how
far the run was, and one sentence for each thing that cannot be known. Nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unigen_ds.checkpoint.layouts.dcp import DCPReader
from unigen_ds.checkpoint.layouts.deepspeed import DeepSpeedReader, is_deepspeed
from unigen_ds.checkpoint.layouts.safetensors import SafetensorsReader
from unigen_ds.checkpoint.layouts.torch_file import TorchReader
from unigen_ds.checkpoint.weight_files import is_weight_file, locate, stated_model, trainer_state, weight_files
from unigen_ds.config.registry import FOREIGN_STATES
from unigen_ds.core.errors import CheckpointError, ConfigError, nearest
from unigen_ds.core.progress import Geometry
from unigen_ds.core.shards import LOSS_SCALE, MASTER, PieceReader
from unigen_ds.families.base import PublishedFormat
from unigen_ds.models.weights import Pretrained

ASSUMABLE = ("batch_size", "accumulative_counts", "dp_size")


@dataclass(frozen=True)
class Foreign:
    """A checkpoint of another trainer. A field is None where the files do not state it."""

    directory: Path
    """The folder of the files, below that of the tag; or the one file."""
    layout: str
    """``deepspeed``, ``dcp`` or ``safetensors``, as in a manifest; or ``torch``; ``published``, by a family; or
    ``registered``, in ``FOREIGN_STATES``."""
    writer: str
    """The program that wrote it, as text."""
    reader: PieceReader
    parameters: list[dict[str, Any]]
    """Name, shape, dtype, trainable, group, tied: as in a manifest."""
    unknown: tuple[str, ...]
    """One sentence for each thing that cannot be known."""
    geometry: Geometry | None = None
    updates: int | None = None
    skipped_updates: int | None = None
    iteration: int | None = None
    epoch: int | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the model that configs beside the weights state."""
    precision: str | None = None
    """``fp32``, ``bf16`` or ``fp16``: what it was trained in."""

    @property
    def sequences(self) -> int | None:
        """Sequences that the run had trained on, if it never changed its geometry."""
        if self.geometry is None or self.updates is None:
            return None
        return self.updates * self.geometry.global_batch_size


@dataclass(frozen=True)
class ForeignState:
    """A training of another trainer, as a function of ``FOREIGN_STATES`` has read it from a folder or a file. What is
    None is not known: a resume then needs ``--assume``, and is refused without ``updates``.
    """

    reader: PieceReader
    """``master`` of every parameter, ``buffer``, each moment of the optimizer under its own name, and ``step``."""
    writer: str
    """The program that wrote it, as text."""
    updates: int | None = None
    epoch: int | None = None
    batch_size: int | None = None
    accumulative_counts: int | None = None
    dp_size: int | None = None
    frozen: frozenset[str] = frozenset()
    """Parameters that were not trained."""


def parse_assume(text: str) -> dict[str, int]:
    """``'batch_size=4,dp_size=2'`` -> values. Raises ``ConfigError`` naming what is wrong."""
    values: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in ASSUMABLE:
            raise ConfigError(f"--assume names {name!r}", remedy=nearest(name, ASSUMABLE))
        if not value.isdigit() or int(value) < 1:
            raise ConfigError(f"--assume {part!r}", allowed=f"{name}=N with an integer N of at least 1")
        values[name] = int(value)
    return values


def is_known(path: Path) -> bool:
    """Whether ``path``, a folder or a file, is of a layout that ``read_foreign`` reads."""
    if path.is_file():
        return is_weight_file(path)
    if _of_users(path, {}) is not None:
        return True
    known = (path / ".metadata").is_file() or _has_deepspeed(path) or bool(weight_files(path))
    return known or _published(path) is not None


def _published(path: Path) -> PublishedFormat | None:
    """The format of a directory that a family knows."""
    from unigen_ds.families.directories import published_format  # imported only where it is needed

    return published_format(path) if path.is_dir() else None


def _has_deepspeed(folder: Path) -> bool:
    """Whether any of DeepSpeed's files is there: an incomplete set is named as such by its reader."""
    return any(is_deepspeed(path.name) for path in folder.iterdir())


def read_foreign(path: Path, *, tag: str | None = None, assume: Mapping[str, int] | None = None) -> Foreign:
    """Read a checkpoint that has no manifest. No collective; nothing is written, nothing executed.

    Args:
        path: the folder with the files, one of the files, or the folder above with a hint (``weight_files.HINTS``).
        tag: name of the folder below, instead of the one that ``latest`` names.
        assume: parts of the geometry that the files do not state; see ``parse_assume``.

    Raises:
        CheckpointError: it is no checkpoint of a known layout, or is incomplete, or wants to run something.
        ConfigError: an assumption contradicts the files.
    """
    folder = locate(path, tag)
    if (own := _of_users(folder, dict(assume or {}))) is not None:
        return own
    if folder.is_dir() and _has_deepspeed(folder):
        return _deepspeed(folder, dict(assume or {}))
    if (folder / ".metadata").is_file():
        return _bare(folder, "dcp", DCPReader(folder))
    if (family := _published(folder)) and (weights := family.weights(folder)):
        return _bare(folder, "published", StoredReader(weights), writer=family.name)
    files = weight_files(folder)
    if (folder / "adapter_config.json").is_file() and all(file.name.startswith("adapter_model.") for file in files):
        raise CheckpointError(
            f"{folder} holds adapters in peft's form, without their base",
            remedy="the checkpoint that they are of; or the whole model: tools/export.py CKPT OUT --merge",
        )
    if files and files[0].suffix == ".safetensors":
        reader = SafetensorsReader(files[0].parent, files=[file.name for file in files])
        return _bare(folder, "safetensors", reader)
    if files:
        return _bare(folder, "torch", TorchReader(files))
    raise CheckpointError(
        f"{folder} contains no checkpoint",
        allowed="files of DeepSpeed (*_model_states.pt), PyTorch's DCP (.metadata), safetensors or pytorch_model.bin",
        remedy="name the folder that contains them, the file of weights itself, or the folder above and its tag (-t);"
        " for a format of your own --config CONFIG, which imports it",
    )


def _of_users(folder: Path, assume: dict[str, int]) -> Foreign | None:
    """Read a folder with the first function of ``FOREIGN_STATES`` that knows it; None where none does."""
    state: ForeignState | None
    state = next((state for read in FOREIGN_STATES.module_dict.values() if (state := read(folder)) is not None), None)
    if state is None:
        return None
    sizes = {"batch_size": state.batch_size, "accumulative_counts": state.accumulative_counts, "dp_size": state.dp_size}
    geometry, unknown = _geometry(sizes, assume)
    return Foreign(
        directory=folder,
        layout="registered",
        writer=state.writer,
        reader=state.reader,
        parameters=_table(state.reader, frozen=state.frozen),
        unknown=(*unknown, *_unknown_everywhere(state.reader)),
        geometry=geometry,
        updates=state.updates,
        iteration=None if geometry is None or not state.updates else state.updates * geometry.accumulative_counts,
        epoch=state.epoch,
    )


def _deepspeed(folder: Path, assume: dict[str, int]) -> Foreign:
    reader = DeepSpeedReader(folder)
    header = reader.header
    meta = header.get("meta")
    meta = meta if isinstance(meta, dict) else {}
    by_mmengine = "mmengine" in meta or "message_hub" in header
    geometry, unknown = _geometry(_stored_sizes(header), assume)
    updates, epoch = _count(header.get("global_steps")), _count(meta.get("epoch"))
    iteration = _count(meta.get("iter"))
    if iteration is None and geometry is not None and updates is not None:
        iteration = updates * geometry.accumulative_counts
    writer = f"DeepSpeed {header.get('ds_version', 'of an unknown version')}, ZeRO stage {reader.zero_stage}"
    if by_mmengine:
        writer += f", run by mmengine {meta.get('mmengine', '')}".rstrip()
    if updates is None:
        unknown.append("How many updates it had done is not stored.")
    if epoch is None:
        unknown.append("The epoch is not stored.")
    unknown += _unknown_everywhere(reader)
    if reader.zero_stage == 0:
        unknown.append("Which weights were frozen is not stored.")
        unknown.append("Moments of the optimizer are not read: without ZeRO every optimizer stores its own form.")
    return Foreign(
        directory=folder,
        layout="deepspeed",
        writer=writer,
        reader=reader,
        parameters=_table(reader, frozen=reader.frozen, groups=reader.groups),
        geometry=geometry,
        updates=updates,
        skipped_updates=_count(header.get("skipped_steps")),
        iteration=iteration,
        epoch=epoch,
        unknown=tuple(unknown),
        precision=_precision(header),
    )


def _precision(header: Mapping[str, Any]) -> str | None:
    """From the stored ``ds_config``: a section that is not there, or not enabled, means fp32."""
    config = header.get("ds_config")
    if not isinstance(config, dict):
        return None
    for name, sections in (("bf16", ("bf16", "bfloat16")), ("fp16", ("fp16",))):
        values = [config[section].get("enabled") for section in sections if isinstance(config.get(section), dict)]
        if any(values):
            return name if all(value in (True, False) for value in values) else None  # "auto" is no answer
    return "fp32"


def _bare(folder: Path, layout: str, reader: PieceReader, *, writer: str = "") -> Foreign:
    """Tensors and nothing else."""
    unknown = [
        "The effective batch is not stored, nor how far it had trained: it cannot be resumed.",
        "Which weights were frozen, and which names are tied, is not stored.",
    ]
    if isinstance(reader, TorchReader) and reader.others:
        unknown.append(f"Not read: {', '.join(reader.others)}.")
    parent = folder if folder.is_dir() else folder.parent
    if not reader.tied:
        reader.tied = _tied_head(reader, stated_model(parent))
    unknown += _unknown_everywhere(reader)
    writer = writer or trainer_state(parent) or trainer_state(parent.parent) or f"unknown, {layout} files"
    parameters, sizes = _table(reader), stated_model(parent)
    return Foreign(folder, layout, writer, reader, parameters, tuple(unknown), sizes=sizes)


def _tied_head(reader: PieceReader, stated: Mapping[str, Any]) -> dict[str, str]:
    """Tied embeddings of a Hugging Face directory: stated by its config, and one of the two is stored."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    tied = (stated.get("llm") or {}).get("tie_word_embeddings") is True
    one_is_stored = (MASTER, embedding) in reader.shapes and (MASTER, head) not in reader.shapes
    return {head: embedding} if tied and one_is_stored else {}


def _table(
    reader: PieceReader, *, frozen: Collection[str] = (), groups: Mapping[str, int] | None = None
) -> list[dict[str, Any]]:
    """The parameter table, as a manifest has it."""
    aliases: dict[str, list[str]] = {}
    for alias, name in reader.tied.items():
        aliases.setdefault(name, []).append(alias)
    return [
        {
            "name": name,
            "shape": list(shape),
            "dtype": str(stored_dtype(reader, kind, name, shape)).removeprefix("torch."),
            "trainable": name not in frozen,
            "group": str(groups[name]) if groups and name in groups else None,
            "tied": aliases.get(name, []),
        }
        for (kind, name), shape in reader.shapes.items()
        if kind == MASTER
    ]


def stored_dtype(reader: PieceReader, kind: str, name: str, shape: tuple[int, ...]) -> torch.dtype:
    """The dtype of a tensor on disk; fp32 if it has no elements."""
    return reader.read(kind, name, 0, 1).dtype if math.prod(shape) else torch.float32


def _stored_sizes(header: Mapping[str, Any]) -> dict[str, int | None]:
    """Those of ``ASSUMABLE`` that the stored ``ds_config`` states, or DeepSpeed derives."""
    config = header.get("ds_config")
    config = config if isinstance(config, dict) else {}
    sizes = {
        "batch_size": _count(config.get("train_micro_batch_size_per_gpu"), least=1),
        "accumulative_counts": _count(config.get("gradient_accumulation_steps"), least=1),
        "dp_size": _count(header.get("dp_world_size"), least=1),
    }
    total = _count(config.get("train_batch_size"), least=1)
    missing = [name for name, size in sizes.items() if size is None]
    if total is not None and len(missing) == 1:
        sizes[missing[0]] = total // math.prod(size for size in sizes.values() if size is not None)
    elif total is None and config and "gradient_accumulation_steps" not in config:
        sizes["accumulative_counts"] = 1  # DeepSpeed's default
    return sizes


def _geometry(stored: Mapping[str, int | None], assume: dict[str, int]) -> tuple[Geometry | None, list[str]]:
    """From what is stored, and then from what is assumed; a sentence for each part that neither has."""
    for name, value in assume.items():
        if stored[name] not in (None, value):
            raise ConfigError(
                f"--assume {name}={value}, but the checkpoint was written with {name}={stored[name]}",
                remedy=f"leave {name} out; the new run may still use another",
            )
    sizes = {name: size for name, size in {**stored, **assume}.items() if size is not None}
    unknown = [
        f"{name} is not stored; set it with --assume {name}=N." for name in ASSUMABLE if name not in sizes
    ]  # fmt: skip
    return (None if unknown else Geometry(**sizes)), unknown


def _count(value: Any, *, least: int = 0) -> int | None:
    """A stored number; None for what is absent or no whole number (``'auto'``)."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= least else None


def _unknown_everywhere(reader: PieceReader) -> Iterator[str]:
    yield "The order of its data, and the position in it, are not stored: data begins at its start or where you set it."
    yield "The learning-rate schedule is not stored in a known form: that of the config is used."
    yield "An average of the weights (EMA) is not stored: an average would begin with the weights."
    yield "The state of the random generators is not stored."
    if LOSS_SCALE not in reader.kinds():
        yield "A dynamic loss scale is not stored: it would begin with its initial value."


# A published directory as master weights under the model's names, so that ``load_from`` can read it.


class StoredReader(PieceReader):
    """A ``ShardReader`` over what a family's format has found (``PublishedFormat.weights``).

    Rows are read when they are requested.
    """

    def __init__(self, weights: Pretrained) -> None:
        super().__init__(unique=True)
        self.tied = dict(weights.tied)
        for name, stored in weights.tensors.items():
            self.add(MASTER, name, 0, stored.numel, stored.flat, source=weights.where, shape=stored.shape)
