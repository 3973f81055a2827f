"""What a path means, and a checkpoint without our manifest: what its files state, and what cannot be known.

In: what a user names: a folder, a file inside one, a file of weights (``locate``). Out: ``Foreign``: a reader of its
tensors, the parameter table, the geometry of the run from the stored ``ds_config``, how far the run was, and one
sentence for each thing that cannot be known. Nothing is guessed.

=================================================  =================================================================
``iter_100.pth/``, a file that its manifest lists   this project's checkpoint
``DIR`` with ``latest`` or ``last_checkpoint``      what that file names: a folder, or mmengine's ``.pth`` file
a work dir with ``checkpoint_dir.txt``             the same, in the folder that this file names
``*_states.pt``, ``.metadata``, ``*.distcp``        DeepSpeed's folder, PyTorch's DCP folder
``DIR/pytorch_model_fsdp_0/``                       accelerate's FSDP: a DCP folder below ``DIR``
``*.index.json``, a shard of one                    all files of the index
a file that a family's directory has as a part      that directory (``PublishedFormat.parts``)
another file                                        itself: safetensors, or ``torch.save``'s
``OWNER/NAME``, ``OWNER/NAME@REVISION``              the folder of that model of the hub, in the cache of transformers
a folder                                            its index; else its ``*.safetensors``; else ``pytorch_model*.bin``
=================================================  =================================================================
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.home import home_of
from unigen_ds.checkpoint.layouts.dcp import DCPReader
from unigen_ds.checkpoint.layouts.deepspeed import DeepSpeedReader, is_deepspeed
from unigen_ds.checkpoint.layouts.safetensors import SafetensorsReader
from unigen_ds.checkpoint.layouts.torch_file import TorchReader
from unigen_ds.checkpoint.manifest import FILE_NAME, Manifest
from unigen_ds.config.hub import folder_of
from unigen_ds.config.registry import FOREIGN_STATES
from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.json_values import stored_object
from unigen_ds.core.progress import Geometry
from unigen_ds.core.shards import LOSS_SCALE, MASTER, ShardReader
from unigen_ds.families.directories import format_of_file, published_format, published_sizes
from unigen_ds.models.weights import flat_sizes

HINTS = ("latest", store.HINT)
"""Files that name the newest checkpoint of a folder: DeepSpeed's; mmengine's and ours."""
_UNKNOWN = (
    "The order of its data, and the position in it, are not stored: data begins at its start or where you set it.",
    "The learning-rate schedule is not stored in a known form: that of the config is used.",
    "An average of the weights (EMA) is not stored: an average would begin with the weights.",
    "The state of the random generators is not stored.",
)
"""What no other trainer stores in a form that is read."""
_BINARIES = ("pytorch_model.bin", "pytorch_model_fsdp.bin")
_ENDINGS = (".safetensors", ".bin", ".pth", ".pt", ".ckpt", ".index.json")
_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-\d{5}(?P<ending>\.\w+)$")


# Which files a path means. Nothing here reads a tensor.


def locate(path: Path, tag: str | None = None) -> Path:
    """The folder or the file of weights that ``path`` means: see the table above. ``tag``: name of the folder below it,
    instead of what a hint there names. Raises ``CheckpointError`` when there is none.
    """
    path = folder_of(path, where="MODEL")
    if not path.exists():
        raise store.missing(path)
    if path.suffix == ".py":
        raise CheckpointError(f"{path} is a config, not a checkpoint", remedy="the work dir of its run: work_dirs/NAME")
    path = home_of(path)
    if tag is None and (path / FILE_NAME).is_file():
        return path
    for folder in (path.parent, path.parent.parent) if tag is None else ():
        if (folder / FILE_NAME).is_file():  # a part of a checkpoint of this project; other files in its folder are none
            name = path.relative_to(folder).as_posix()
            files = [FILE_NAME, *(entry.path for entry in Manifest.read(folder).files)]
            if any(file == name or file.startswith(name + "/") for file in files):
                return folder
    if path.is_file():
        folder, shard = path.parent, _SHARD.match(path.name)
        if path.name in HINTS:
            return locate(folder)
        if path.name in (".metadata", "trainer_state.json") or path.suffix == ".distcp" or is_deepspeed(path.name):
            return _fsdp_folder(folder) or folder
        if shard:
            return folder / f"{shard['stem']}{shard['ending']}.index.json"
        return folder if format_of_file(path) else path
    hints = [hint for hint in (path / name for name in HINTS) if hint.is_file()]
    if tag is None and not hints:
        return _fsdp_folder(path) or path
    if tag is None:  # mmengine and this project write whole paths, which may have been true before a move
        newest = Path(hints[0].read_text(encoding="utf-8").strip())
        tag = newest.name if (path / newest.name).exists() else str(newest)
    if not (path / tag).exists():
        folders = sorted(folder.name for folder in path.iterdir() if folder.is_dir())
        raise CheckpointError(f"{path} has no tag {tag!r}", allowed=", ".join(folders) or "it has no folder at all")
    return path / tag


def _fsdp_folder(folder: Path) -> Path | None:
    """The folder in which accelerate's FSDP keeps the model. Raises ``CheckpointError`` where it has several."""
    first, second = (folder / f"pytorch_model_fsdp_{number}" for number in (0, 1))
    if not (first / ".metadata").is_file():
        return None
    if second.is_dir():
        raise CheckpointError(f"{folder} contains several models", remedy=f"name one of them: {first}, {second}, ...")
    return first


def weight_files(path: Path) -> list[Path]:
    """The files of plain weights that ``path`` means, if any. ``CheckpointError`` where one of an index is missing."""
    indexes = [path] if path.name.endswith(".index.json") else []
    if path.is_file() and not indexes:
        return [path]
    for ending in (".safetensors", ".bin"):
        inside = sorted(path.glob(f"*{ending}.index.json")) if path.is_dir() else []
        indexes = indexes or (inside if len(inside) == 1 else [])
    if not indexes:
        return sorted(path.glob("*.safetensors")) or [path / n for n in _BINARIES if (path / n).is_file()][:1]
    (index,) = indexes
    names = sorted({str(name) for name in (stored_object(index).get("weight_map") or {}).values()})
    if not names or any(Path(name).name != name for name in names):
        raise CheckpointError(f"{index} is no index of weight files", allowed='{"weight_map": {tensor: file}}')
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(f"{index.parent} lacks {', '.join(missing)}, which {index.name} lists")
    return [index.parent / name for name in names]


# What files without a manifest state.


@dataclass(frozen=True)
class ForeignState:
    """A training of another trainer, as a function of ``FOREIGN_STATES`` has read it from a folder or a file. What is
    None is not known: a resume is then refused.
    """

    reader: ShardReader
    """``master`` of every parameter, ``buffer``, each moment of the optimizer under its own name, and ``step``."""
    writer: str
    """The program that wrote it, as text."""
    updates: int | None = None
    batch_size: int | None = None
    accumulative_counts: int | None = None
    dp_size: int | None = None
    frozen: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Foreign(ForeignState):
    """A checkpoint of another trainer, with all that its files state."""

    directory: Path
    """The folder of the files, below that of the tag; or the one file."""
    layout: str = "registered"
    """A manifest's layout; ``torch``; ``published``, by a family; or ``registered``, in ``FOREIGN_STATES``."""
    unknown: tuple[str, ...] = ()
    """One sentence for each thing that cannot be known."""
    groups: Mapping[str, int] = field(default_factory=dict)
    """Number of the optimizer's group of a parameter."""
    skipped_updates: int | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the model that configs beside the weights state."""
    precision: str | None = None
    """``fp32``, ``bf16`` or ``fp16``: what it was trained in."""

    @property
    def geometry(self) -> Geometry | None:
        sizes = (self.batch_size, self.accumulative_counts, self.dp_size)
        return None if None in sizes else Geometry(*sizes)  # type: ignore[arg-type]

    @property
    def parameters(self) -> list[dict[str, Any]]:
        """Name, shape, dtype, trainable, group, tied: as in a manifest."""
        return [
            {
                "name": name,
                "shape": list(shape),
                "dtype": str(stored_dtype(self.reader, kind, name, shape)).removeprefix("torch."),
                "trainable": name not in self.frozen,
                "group": str(self.groups[name]) if name in self.groups else None,
                "tied": [alias for alias, first in self.reader.tied.items() if first == name],
            }
            for (kind, name), shape in self.reader.shapes.items()
            if kind == MASTER
        ]


def is_known(path: Path) -> bool:
    """Whether ``path``, a folder or a file, is of a layout that ``read_foreign`` reads."""
    if path.is_file():
        return path.name.endswith(_ENDINGS) or zipfile.is_zipfile(path)
    has_reader = any(read(path) is not None for read in FOREIGN_STATES.module_dict.values())
    has_reader = has_reader or (path / ".metadata").is_file() or any(is_deepspeed(file.name) for file in path.iterdir())
    return has_reader or bool(weight_files(path)) or published_format(path) is not None


def read_foreign(path: Path, *, tag: str | None = None) -> Foreign:
    """Read a checkpoint without a manifest; arguments as of ``locate``. No collective; writes and executes nothing.

    Raises ``CheckpointError`` where it is no checkpoint of a known layout, or is incomplete, or wants to run something.
    """
    folder = locate(path, tag)
    states = (read(folder) for read in FOREIGN_STATES.module_dict.values())
    state = next((state for state in states if state is not None), None)
    if state is not None:
        foreign = Foreign(**vars(state), directory=folder)
    elif folder.is_dir() and any(is_deepspeed(file.name) for file in folder.iterdir()):
        foreign = _deepspeed(folder)
    else:
        foreign = _plain(folder)
    unknown = (*foreign.unknown, *_UNKNOWN)
    if LOSS_SCALE not in foreign.reader.kinds():
        unknown += ("A dynamic loss scale is not stored: it would begin with its initial value.",)
    return replace(foreign, unknown=unknown)


def _plain(folder: Path) -> Foreign:
    """Tensors and nothing else. Raises ``CheckpointError``."""
    unknown = [
        "The effective batch is not stored, nor how far it had trained: it cannot be resumed.",
        "Which weights were frozen, and which names are tied, is not stored.",
    ]
    reader: ShardReader
    kind = published_format(folder) if folder.is_dir() else None
    if (folder / ".metadata").is_file():
        reader, layout, writer = DCPReader(folder), "dcp", "unknown, dcp files"
    elif kind and (weights := kind.weights(folder)):
        reader, layout, writer = ShardReader(unique=True), "published", kind.name
        reader.tied = dict(weights.tied)
        for name, tensor in weights.tensors.items():
            reader.add(MASTER, name, 0, tensor.numel, tensor.flat, source=weights.where, shape=tensor.shape)
    elif not (files := weight_files(folder)):
        raise CheckpointError(
            f"{folder} contains no checkpoint",
            allowed="files of DeepSpeed (*_model_states.pt), PyTorch's DCP (.metadata), safetensors, pytorch_model.bin",
            remedy="name the folder that contains them, the file of weights itself, or the folder above and its tag"
            " (-t); for a format of your own --config CONFIG, which imports it",
        )
    elif (folder / "adapter_config.json").is_file() and all(file.name.startswith("adapter_model.") for file in files):
        raise CheckpointError(
            f"{folder} holds adapters in peft's form, without their base",
            remedy="the checkpoint that they are of; or the whole model: tools/export.py CKPT OUT --merge",
        )
    elif files[0].suffix == ".safetensors":
        reader = SafetensorsReader(files[0].parent, files=[file.name for file in files])
        layout, writer = "safetensors", "unknown, safetensors files"
    else:
        reader, layout, writer = TorchReader(files), "torch", "unknown, torch files"
        unknown += [f"Not read: {', '.join(reader.others)}."] * bool(reader.others)
    sizes = _stated_model(folder if folder.is_dir() else folder.parent)
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    one_is_stored = (MASTER, embedding) in reader.shapes and (MASTER, head) not in reader.shapes
    if not reader.tied and one_is_stored and (sizes.get("llm") or {}).get("tie_word_embeddings") is True:
        reader.tied = {head: embedding}
    return Foreign(reader, writer, directory=folder, layout=layout, unknown=tuple(unknown), sizes=sizes)


def _deepspeed(folder: Path) -> Foreign:
    """A folder of DeepSpeed's, with the geometry that the stored ``ds_config`` states, or DeepSpeed derives."""
    reader = DeepSpeedReader(folder)
    header = reader.header
    meta, config = (part if isinstance(part := header.get(key), dict) else {} for key in ("meta", "ds_config"))

    def count(value: Any, *, least: int = 1) -> int | None:
        """A stored number; None for what is absent or no whole number (``'auto'``)."""
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= least else None

    sizes: dict[str, Any] = {
        "batch_size": count(config.get("train_micro_batch_size_per_gpu")),
        "accumulative_counts": count(config.get("gradient_accumulation_steps")),
        "dp_size": count(header.get("dp_world_size")),
    }
    total, missing = count(config.get("train_batch_size")), [name for name, size in sizes.items() if size is None]
    if total is not None and len(missing) == 1:
        sizes[missing[0]] = total // math.prod(size for size in sizes.values() if size is not None)
    elif total is None and config and "gradient_accumulation_steps" not in config:
        sizes["accumulative_counts"] = 1  # DeepSpeed's default
    unknown = [f"{name} is not stored: it cannot be resumed." for name, size in sizes.items() if size is None]
    updates = count(header.get("global_steps"), least=0)
    unknown += ["How many updates it had done is not stored."] * (updates is None)
    writer = f"DeepSpeed {header.get('ds_version', 'of an unknown version')}, ZeRO stage {reader.zero_stage}"
    if "mmengine" in meta or "message_hub" in header:
        writer += f", run by mmengine {meta.get('mmengine', '')}".rstrip()
    if reader.zero_stage == 0:
        unknown.append("Which weights were frozen is not stored.")
        unknown.append("Moments of the optimizer are not read: without ZeRO every optimizer stores its own form.")
    precision: str | None = "fp32" if isinstance(header.get("ds_config"), dict) else None
    for name, sections in (("fp16", ("fp16",)), ("bf16", ("bf16", "bfloat16"))):
        values = [config[section].get("enabled") for section in sections if isinstance(config.get(section), dict)]
        if any(values):
            precision = name if all(value in (True, False) for value in values) else None  # "auto" is no answer
    return Foreign(
        reader,
        writer,
        updates,
        **sizes,
        frozen=frozenset(reader.frozen),
        directory=folder,
        layout="deepspeed",
        unknown=tuple(unknown),
        groups=reader.groups,
        skipped_updates=count(header.get("skipped_steps"), least=0),
        precision=precision,
    )


def _stated_model(folder: Path) -> dict[str, Any]:
    """Arguments of a model (``llm``, ``vit``) that configs in the folder of the weights state, if there are any."""
    if sizes := published_sizes(folder):
        return sizes
    config = stored_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    if "vision_config" in config or "siglip" in str(config.get("model_type")):
        return {"vit": flat_sizes(config.get("vision_config") or config)}
    return {"llm": flat_sizes(config)} if "num_attention_heads" in config else {}


def stored_dtype(reader: ShardReader, kind: str, name: str, shape: tuple[int, ...]) -> torch.dtype:
    """The dtype of a tensor on disk; fp32 if it has no elements."""
    return reader.read(kind, name, 0, 1).dtype if math.prod(shape) else torch.float32
