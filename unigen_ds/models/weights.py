"""Where the weights of a new model come from, tensor by tensor: a published file, or the model's own initial values.

In: safetensors files. Out: an ``InitialWeights``, a ``ShardReader`` like that of a checkpoint. So a model can be built
on the meta device (names and shapes, no memory), sharded by its engine, and filled with ``Backend.load_tensors``:
a process reads the rows of its own shard and never holds the whole. Values that no file has are drawn from a generator
of their own, keyed by seed and name; they are the same under every engine and process count.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.core.shards import (
    BUFFER,
    MASTER,
    Misfit,
    ShardReader,
    by_first_name,
    first_names,
    misfit,
    persistent_buffers,
    read_flat,
    tied_names,
)
from unigen_ds.system.log import logger
from unigen_ds.system.seeding import generator


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file, or ``shape[0]`` of its rows from ``first_row`` on."""

    file: Callable[[], Any]
    """Opens its file: torch maps all of its bytes as memory of this process, so not before one is read."""
    key: str
    shape: tuple[int, ...]
    first_row: int = 0
    changed: Callable[[Tensor], Tensor] | None = None
    """Turns the file's tensor into ours; such a tensor is read whole."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def flat(self, start: int, stop: int) -> Tensor:
        """Elements ``start .. stop``; only the rows that hold them are read."""
        if self.changed:
            return self.changed(self.file().get_tensor(self.key)).reshape(-1)[start:stop]
        offset = self.first_row * math.prod(self.shape[1:])
        return read_flat(self.file(), self.key, self.shape, offset + start, offset + stop)


def stored_tensors(path: Path, *, linear_patches: bool = True) -> dict[str, Stored]:
    """Every tensor of a file, or of a sharded folder's ``*.safetensors``. Raises ``CheckpointError``.

    ``linear_patches``: a convolution over patches as the linear map of (row, column, channel) vectors of our towers.
    """
    check_here(path)
    paths = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not paths:
        raise CheckpointError(f"{path} holds no *.safetensors")
    tensors: dict[str, Stored] = {}
    for each in paths:
        try:
            header, file = safe_open(each, framework="np"), cache(partial(safe_open, each, framework="pt"))
            for key in header.keys():  # noqa: SIM118 - not a dict
                shape = tuple(header.get_slice(key).get_shape())
                patches = key.endswith(("patch_embedding.weight", "patch_embedding.conv.weight"))
                if linear_patches and patches and len(shape) == 4:
                    flat = (shape[0], math.prod(shape[1:]))
                    tensors[key] = Stored(file, key, flat, changed=lambda x: x.permute(0, 2, 3, 1).flatten(1))
                else:
                    tensors[key] = Stored(file, key, shape)
        except Exception as error:  # the reader has its own exception types
            raise CheckpointError(f"{each} cannot be read: {error}") from error
    return tensors


def vision_tensors(path: Path) -> dict[str, Stored]:
    """``stored_tensors`` of a vision tower by the names of the whole SigLIP; newer transformers' save shorter ones."""
    tensors = stored_tensors(path)
    if any(name.startswith("vision_model.") for name in tensors):
        return tensors
    return {f"vision_model.{name}": tensor for name, tensor in tensors.items()}


def check_here(path: Path, *, where: str = "model.pretrained") -> None:
    """Raise ``ConfigError`` for a folder that does not exist."""
    folder = path.parent if path.suffix in (".json", ".safetensors") else path
    if not folder.exists():
        raise ConfigError(
            f"{where} names {str(folder)!r}, and there is no such file or folder",
            allowed="a folder with the published files, or a name on the hub: organisation/name",
            remedy=f"check the path; a relative one begins at {Path.cwd()}",
        )


def read_json(path: Path) -> dict[str, Any]:
    """A config beside the weights. Raises ``ConfigError``."""
    check_here(path)
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"model.pretrained: {path} cannot be read: {error}") from error


def flat_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and words of a config of transformers; of the rotary embedding's, its base."""
    rope = config.get("rope_parameters") or {}
    flat = {key: value for key, value in config.items() if isinstance(value, (int, float, str))}
    return flat | ({"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {})


def check_fixed(config: Mapping[str, Any], values: Mapping[str, Any], where: object) -> None:
    """Raises ``ConfigError`` where ``config`` has another value for a key of ``values``: the numbers would be wrong."""
    for key, value in values.items():
        if config.get(key, value) != value:
            raise ConfigError(f"{where}: {key} is {config[key]!r}", allowed=repr(value))


def stated_sizes(part: str, path: Path, keys: Iterable[str]) -> dict[str, Any]:
    """Read ``keys`` from transformers' config of a SigLIP (``vit``), or of a Qwen2 or Llama (``llm``), if it has them.

    Raises ``ConfigError`` where our modules would compute other numbers: another activation, scaled rotary angles, ...
    """
    config = read_json(path)
    config = config.get("vision_config", config) if part == "vit" else config
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    values: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh"}
    if part == "llm":
        values = {"hidden_act": "silu", "use_sliding_window": False, "rope_type": "default"}
    check_fixed({**config, "rope_type": rope.get("rope_type", rope.get("type", "default"))}, values, path)
    flat = {**rope, **config}
    return {key: flat[key] for key in keys if key in flat}


@dataclass(frozen=True)
class Pretrained:
    """Sizes and tensors in the files of ``model.pretrained``."""

    where: str
    sizes: Mapping[str, Any]
    """Arguments of the model, as far as the files have them."""
    tensors: Mapping[str, Stored]
    """Tensors by the model's names."""
    may_lack: str = "$^"
    """Pattern of names that keep their initial values where the files do not have them."""
    may_leave: str = "$^"
    """Pattern of names in the files that are not used."""
    may_grow: str = "$^"
    """Pattern of names that may have more rows than stored: a vocabulary."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Further name of a tensor -> its name in ``tensors``."""


class InitialWeights(ShardReader):
    """A ``ShardReader`` over initial values, beside what is in files. ``initialise``: (name, whole tensor on the CPU,
    generator) -> fills the tensor with the initial values of that parameter."""

    def __init__(self, initialise: Callable[[str, Tensor, torch.Generator | None], None], *, seed: int) -> None:
        super().__init__()
        self._initialise, self._seed = initialise, seed
        self._last = "", torch.empty(0, device="cpu")

    def add_initial(self, kind: str, name: str, shape: Sequence[int], first: int = 0) -> None:
        """Add the elements from ``first`` on of a tensor: those before are in a file."""
        self.add(kind, name, first, math.prod(shape) - first, partial(self._draw, name, shape, first))

    def _draw(self, name: str, shape: Sequence[int], first: int, start: int, stop: int) -> Tensor:
        if self._last[0] != name:  # the last one is kept, as shards read one tensor several times
            whole = torch.empty(shape, device="cpu")
            with torch.no_grad():
                self._initialise(name, whole, generator(self._seed, "initial", name))
            self._last = name, whole.view(-1)
        return self._last[1][first + start : first + stop]


def match(model: nn.Module, source: Pretrained) -> dict[str, Stored]:
    """The stored tensors that the model accepts; it gets ``from_files``, the names of those that the files have whole.
    Raises ``CheckpointError`` with all names that do not fit.
    """
    file_tensors = by_first_name(source.tensors, tied_names(model))
    own = {name: tuple(tensor.shape) for name, tensor in _named_tensors(model).items()}
    differences = misfit({name: tensor.shape for name, tensor in file_tensors.items()}, own)
    longer = [name for name, (was, now) in differences.reshaped.items()
             if re.search(source.may_grow, name) and was[1:] == now[1:] and was < now]  # fmt: skip
    wrong = Misfit(
        missing=[name for name in differences.missing if not re.search(source.may_lack, name)],
        unexpected=[name for name in differences.unexpected if not re.search(source.may_leave, name)],
        reshaped={name: shapes for name, shapes in differences.reshaped.items() if name not in longer},
    )
    if wrong:
        raise CheckpointError(
            f"model.pretrained {source.where} does not fit the model: {wrong}",
            remedy="leave sizes out of the section model, or set them to None where a recipe has them: the files have"
            " every size",
        )
    notes = {"not used": differences.unexpected, "initialised": differences.missing, "more rows than stored": longer}
    for what, names in notes.items():
        if names:
            logger().info(f"pretrained {source.where}: {what}: {first_names(names)}")
    model.__dict__["from_files"] = frozenset(name for name in own if name in file_tensors and name not in longer)
    return {name: file_tensors[name] for name in own if name in file_tensors}


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers; of tied parameters the first name."""
    return {**dict(model.named_parameters()), **persistent_buffers(model)}


class PretrainedModel(nn.Module):
    """A model that may start from published weights, read at once or, when built on the meta device, shard by shard."""

    _file_tensors: Mapping[str, Stored]
    from_files: frozenset[str] = frozenset()
    """Parameters and buffers that the files have whole (``match``)."""

    def initialise(self, name: str, tensor: Tensor, generator: torch.Generator | None = None) -> None:
        """Fill ``tensor``, the whole of the parameter ``name``, with its initial values.

        By default a language model and tables of positions are Normal(0, 0.02), as Qwen2's, all else Normal(0, 1 /
        fan-in), so that image content is not drowned by the positions it is added to. Norms one, biases zero.
        """
        if tensor.ndim > 1:
            wide = name.startswith("language_model.") or name.endswith("position_embedding.weight")
            tensor.normal_(std=0.02 if wide else tensor.shape[1] ** -0.5, generator=generator)
        else:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)

    def parts(self) -> dict[str, nn.Module]:
        """Return the parts by the names that ``freeze`` and ``quantize`` of the section ``model`` use."""
        raise NotImplementedError

    def freeze(self, names: Iterable[str]) -> None:
        """No gradient for these ``parts``: they stay bit-identical."""
        for name in names:
            self.parts()[name].requires_grad_(False)

    @torch.no_grad()
    def start_from(self, source: Pretrained | None) -> None:
        """Called at the end of the constructor: initial values, and over them what the files hold."""
        self._file_tensors = match(self, source) if source else {}
        own = _named_tensors(self)
        if any(tensor.is_meta for tensor in own.values()):
            return
        for name, parameter in self.named_parameters():
            self.initialise(name, parameter)
        for name, file_tensor in self._file_tensors.items():
            own[name].view(-1)[: file_tensor.numel].copy_(file_tensor.flat(0, file_tensor.numel))
        self._file_tensors = {}

    def initial_weights(self, *, seed: int) -> InitialWeights:
        """The weights of a model built on the meta device; the references to the open files are released here."""
        file_tensors, self._file_tensors = self._file_tensors, {}
        reader, parameters = InitialWeights(self.initialise, seed=seed), dict(self.named_parameters())
        for name, tensor in _named_tensors(self).items():
            kind, first = MASTER if name in parameters else BUFFER, 0
            if name in file_tensors:
                first = file_tensors[name].numel
                reader.add(kind, name, 0, first, file_tensors[name].flat)
            reader.add_initial(kind, name, tensor.shape, first)
        return reader
