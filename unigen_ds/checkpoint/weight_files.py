"""Which files a path means: a checkpoint's folder, or files of plain weights; and the sizes in its configs.

In: what a user names: a folder, a file inside one, a file of weights. Nothing here reads a tensor.

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

import re
import zipfile
from pathlib import Path
from typing import Any

from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.home import home_of
from unigen_ds.checkpoint.layouts.deepspeed import is_deepspeed
from unigen_ds.checkpoint.manifest import FILE_NAME, Manifest
from unigen_ds.config.hub import folder_of
from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.json_values import stored_object
from unigen_ds.models.weights import flat_sizes

HINTS = ("latest", store.HINT)
"""Files that name the newest checkpoint of a folder: DeepSpeed's; mmengine's and ours."""
TRAINER_STATE = "trainer_state.json"
_FSDP = "pytorch_model_fsdp_{}"
_BINARIES = ("pytorch_model.bin", "pytorch_model_fsdp.bin")
_ENDINGS = (".safetensors", ".bin", ".pth", ".pt", ".ckpt", ".index.json")
_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-\d{5}(?P<ending>\.\w+)$")


def locate(path: Path, tag: str | None = None) -> Path:
    """The folder or the file of weights that ``path`` means: see the table above.

    Args:
        tag: name of the folder below ``path``, instead of what a hint there names.

    Raises ``CheckpointError`` when there is none.
    """
    path = folder_of(path, where="MODEL")
    if not path.exists():
        raise store.missing(path)
    path = home_of(path)
    owner = _owner(path)
    if owner is not None and tag is None:
        return owner
    if path.is_file():
        return _of_file(path)
    hints = [hint for hint in (path / name for name in HINTS) if hint.is_file()]
    if tag is None and ((path / FILE_NAME).is_file() or not hints):
        return _fsdp_folder(path) or path
    if tag is None:  # mmengine and this project write whole paths, which may have been true before a move
        newest = Path(hints[0].read_text(encoding="utf-8").strip())
        tag = newest.name if (path / newest.name).exists() else str(newest)
    if not (path / tag).exists():
        folders = sorted(folder.name for folder in path.iterdir() if folder.is_dir())
        raise CheckpointError(f"{path} has no tag {tag!r}", allowed=", ".join(folders) or "it has no folder at all")
    return path / tag


def _owner(path: Path) -> Path | None:
    """The checkpoint of this project that ``path`` is, or is a part of: other files in its folder are none."""
    if (path / FILE_NAME).is_file():
        return path
    for folder in (path.parent, path.parent.parent):
        if (folder / FILE_NAME).is_file():
            name = path.relative_to(folder).as_posix()
            files = [entry.path for entry in Manifest.read(folder).files]
            if name == FILE_NAME or any(file == name or file.startswith(name + "/") for file in files):
                return folder
    return None


def _of_file(path: Path) -> Path:
    folder, shard = path.parent, _SHARD.match(path.name)
    if path.name in HINTS:
        return locate(folder)
    if path.name in (".metadata", TRAINER_STATE) or path.suffix == ".distcp" or is_deepspeed(path.name):
        return _fsdp_folder(folder) or folder
    if shard:
        return folder / f"{shard['stem']}{shard['ending']}.index.json"
    from unigen_ds.families.directories import format_of_file  # imported only where it is needed

    return folder if format_of_file(path) else path


def _fsdp_folder(folder: Path) -> Path | None:
    """Return the folder in which accelerate's FSDP keeps the model, or None. Raises ``CheckpointError`` where it keeps
    several models.
    """
    first, second = (folder / _FSDP.format(number) for number in (0, 1))
    if not (first / ".metadata").is_file():
        return None
    if second.is_dir():
        raise CheckpointError(f"{folder} contains several models", remedy=f"name one of them: {first}, {second}, ...")
    return first


def is_weight_file(path: Path) -> bool:
    """Whether the name, or else the content, is that of a file of weights."""
    return path.is_file() and (path.name.endswith(_ENDINGS) or zipfile.is_zipfile(path))


def weight_files(path: Path) -> list[Path]:
    """The files of plain weights that ``path`` means; none where it has none.

    Raises ``CheckpointError`` where a file of an index is missing.
    """
    if path.name.endswith(".index.json"):
        return _of_index(path)
    if path.is_file():
        return [path]
    for ending in (".safetensors", ".bin"):
        indexes = sorted(path.glob(f"*{ending}.index.json"))
        if len(indexes) == 1:
            return _of_index(indexes[0])
    tensors = sorted(path.glob("*.safetensors"))
    return tensors or [path / name for name in _BINARIES if (path / name).is_file()][:1]


def _of_index(path: Path) -> list[Path]:
    index = stored_object(path)
    names = sorted({str(name) for name in (index.get("weight_map") or {}).values()})
    if not names or any(Path(name).name != name for name in names):
        raise CheckpointError(f"{path} is no index of weight files", allowed='{"weight_map": {tensor: file beside it}}')
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise CheckpointError(f"{path.parent} lacks {', '.join(missing)}, which {path.name} lists")
    return [path.parent / name for name in names]


def stated_model(folder: Path) -> dict[str, Any]:
    """Arguments of a model (``llm``, ``vit``) that configs in the folder of the weights state, if there are any."""
    from unigen_ds.families.directories import published_sizes  # imported only where it is needed

    if sizes := published_sizes(folder):
        return sizes
    config = stored_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    if "vision_config" in config or "siglip" in str(config.get("model_type")):
        return {"vit": flat_sizes(config.get("vision_config") or config)}
    return {"llm": flat_sizes(config)} if "num_attention_heads" in config else {}


def trainer_state(folder: Path) -> str:
    """Describe a checkpoint by a Hugging Face Trainer's ``trainer_state.json``; ``''`` without one."""
    if not (folder / TRAINER_STATE).is_file():
        return ""
    state = stored_object(folder / TRAINER_STATE)
    return f"Hugging Face Trainer, step {state.get('global_step')}, epoch {state.get('epoch')}"
