"""Checkpoints in DeepSpeed's layout without an engine: large ones need no memory for gradients and no training.

In: the names and shapes of a model, in its optimizer's groups. Out: the files of ``engine.save_checkpoint`` of
DeepSpeed 0.19.8 after bf16 training on two processes. ``compare`` compares the files with those of a real engine.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unigen_ds.checkpoint.layouts.deepspeed import DeepSpeedReader
from unigen_ds.core.shards import BUFFER, MASTER

RANKS = 2
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Model:
    """The content of a checkpoint. ``value``: name -> all elements, flat, fp32."""

    groups: list[Shapes]
    frozen: Shapes
    buffers: dict[str, Tensor]
    tied: dict[str, str]
    value: Callable[[str], Tensor]

    @property
    def numel(self) -> int:
        """Parameters, trained and frozen."""
        return sum(math.prod(shape) for shapes in (*self.groups, self.frozen) for shape in shapes.values())

    @classmethod
    def of_checkpoint(cls, folder: Path) -> Model:
        """The model of a real engine's checkpoint, with its weights."""
        reader = DeepSpeedReader(folder)
        shapes = {name: shape for (kind, name), shape in reader.shapes.items() if kind == MASTER}
        groups: list[Shapes] = [{} for _ in set(reader.groups.values())]
        for name, group in reader.groups.items():
            groups[group][name] = shapes[name]
        return cls(
            groups=groups,
            frozen={name: shapes[name] for name in shapes if name in reader.frozen},
            buffers={
                name: reader.read(BUFFER, name, 0, math.prod(shape)).view(shape)
                for (kind, name), shape in reader.shapes.items()
                if kind == BUFFER
            },
            tied=dict(reader.tied),
            value=lambda name: reader.read(MASTER, name, 0, math.prod(shapes[name])).float(),
        )


def decoder(numel: int) -> Model:
    """A decoder of about ``numel`` parameters, with tied weights, a frozen tower, two groups and a buffer."""
    layers, vocab = 24, 32_003
    width = round(math.sqrt(numel / (12.2 * layers)))
    inner = (numel - vocab * width - layers * 4 * width * width) // (3 * layers * width)
    blocks: Shapes = {"embed.weight": (vocab, width)}
    norms: Shapes = {}
    for i in range(layers):
        blocks |= {f"layers.{i}.{name}_proj.weight": (width, width) for name in "qkvo"}
        blocks |= {f"layers.{i}.{name}.weight": (inner, width) for name in ("gate", "up")}
        blocks[f"layers.{i}.down.weight"] = (width, inner)
        norms[f"layers.{i}.norm.weight"] = (width,)
    frozen: Shapes = {"tower.weight": (1001, width), "tower.bias": (1001,)}
    names = {name: (i, math.prod(shape)) for i, (name, shape) in enumerate({**blocks, **norms, **frozen}.items())}

    def value(name: str) -> Tensor:
        seed, count = names[name]
        return torch.empty(count).uniform_(-1, 1, generator=torch.Generator().manual_seed(seed))

    buffers = {"rotary": torch.arange(width, dtype=torch.float32)}
    return Model([blocks, norms], frozen, buffers, {"head.weight": "embed.weight"}, value)


def write_checkpoint(folder: Path, model: Model, *, stage: int) -> None:
    """``folder/global_step1`` and ``folder/latest``."""
    target = folder / "global_step1"
    target.mkdir(parents=True)
    for rank in range(RANKS):
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({**_config(stage), "optimizer_state_dict": _optimizer(model, stage, rank)}, target / name)
        if stage == 3:
            torch.save(_model3(model, rank), target / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    if stage == 2:
        torch.save(_model2(model), target / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text(target.name)


def _config(stage: int) -> dict[str, Any]:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    return {"ds_config": config, "ds_version": "0.19.8"}


def _optimizer(model: Model, stage: int, rank: int) -> dict[str, Any]:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    flats, mappings, paddings = [], [], []
    for shapes in model.groups:
        flat, mapping, padding = (_part2 if stage == 2 else _part3)(model, shapes, rank)
        flats.append(torch.nn.Parameter(flat).data.requires_grad_())
        mappings.append(mapping)
        paddings.append(padding)
    moments = {
        i: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(n), "exp_avg_sq": torch.zeros(n)}
        for i, n in enumerate(flat.numel() + padding for flat, padding in zip(flats, paddings, strict=True))
    }
    settings = [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "foreach": None,
                 "maximize": False, "capturable": False, "differentiable": False, "fused": None,
                 "decoupled_weight_decay": True, "params": [i]} for i in range(len(flats))]  # fmt: skip
    base = {"state": moments, "param_groups": settings}
    common = {"loss_scaler": LossScaler(1.0), "dynamic_loss_scale": False, "overflow": False,
              "zero_stage": ZeroStageEnum(stage)}  # fmt: skip
    if stage == 3:
        return {**common, "partition_count": RANKS, "optimizer_state_dict": base, "fp32_flat_groups": flats}
    return {
        **common,
        "clip_grad": 1.0,
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": flats,
        "group_paddings": paddings,
        "param_alignment_paddings": [[0] * len(shapes) for shapes in model.groups],
        "partition_count": [RANKS] * len(flats),
        "ds_version": "0.19.8",
        "param_slice_mappings": mappings,
    }


def _part2(model: Model, shapes: Shapes, rank: int) -> tuple[Tensor, OrderedDict[str, Any], int]:
    """A rank's equal part of the group's flat buffer, its offsets, and the padding omitted at its end."""
    from deepspeed.utils.tensor_fragment import fragment_address

    total = sum(math.prod(shape) for shape in shapes.values())
    size = -(-total // (2 * RANKS)) * 2
    first, last = rank * size, min((rank + 1) * size, total)
    flat, at = torch.empty(last - first), 0
    mapping: OrderedDict[str, Any] = OrderedDict()
    for name, shape in shapes.items():
        start, stop = max(at, first), min(at + math.prod(shape), last)
        if start < stop:
            flat[start - first : stop - first] = model.value(name)[start - at : stop - at]
            mapping[name] = fragment_address(numel=stop - start, start=start - first)
        at += math.prod(shape)
    return flat, mapping, size - (last - first)


def _part3(model: Model, shapes: Shapes, rank: int) -> tuple[Tensor, None, int]:
    """A rank's part of every parameter, each padded at its end."""
    parts = [-(-math.prod(shape) // RANKS) for shape in shapes.values()]
    flat, at = torch.zeros(sum(parts)), 0
    for name, part in zip(shapes, parts, strict=True):
        own = model.value(name)[rank * part : (rank + 1) * part]
        flat[at : at + own.numel()] = own
        at += part
    return flat, None, 0


def _header(model: Model, stage: int) -> dict[str, Any]:
    return {
        **_config(stage),
        "buffer_names": list(model.buffers),
        "param_shapes": [OrderedDict((n, torch.Size(s)) for n, s in shapes.items()) for shapes in model.groups],
        "frozen_param_shapes": OrderedDict((name, torch.Size(shape)) for name, shape in model.frozen.items()),
        **dict.fromkeys(("optimizer", "lr_scheduler", "data_sampler", "random_ltd")),
        **{"skipped_steps": 0, "global_steps": 1, "global_samples": RANKS, "dp_world_size": RANKS, "mp_world_size": 1},
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
    }


def _model2(model: Model) -> dict[str, Any]:
    """One file: the whole module in bf16, each group's parameters as views of one buffer."""
    module: OrderedDict[str, Tensor] = OrderedDict(model.buffers)
    for shapes in model.groups:
        flat, at = torch.empty(sum(math.prod(shape) for shape in shapes.values()), dtype=torch.bfloat16), 0
        for name, shape in shapes.items():
            module[name] = flat[at : at + math.prod(shape)].view(shape)
            module[name].view(-1).copy_(model.value(name))
            at += math.prod(shape)
    frozen = OrderedDict((name, model.value(name).bfloat16().view(shape)) for name, shape in model.frozen.items())
    module |= frozen
    module |= {alias: module[name] for alias, name in model.tied.items()}
    return {**_header(model, 2), "module": module, "frozen_param_fragments": frozen, "shared_params": model.tied}


def _model3(model: Model, rank: int) -> dict[str, Any]:
    """A file for each rank: placeholders, and its part of the frozen parameters."""
    names = [name for shapes in (*model.groups, model.frozen, model.tied) for name in shapes]
    module = OrderedDict((name, torch.empty(0, dtype=torch.bfloat16)) for name in names)
    fragments: OrderedDict[str, Tensor] = OrderedDict()
    for name, shape in model.frozen.items():
        part = -(-math.prod(shape) // RANKS)
        own = model.value(name)[rank * part : (rank + 1) * part].bfloat16()
        fragments[name] = torch.nn.functional.pad(own, (0, part - own.numel()))
    shared = model.tied if rank == 0 else {}
    return {
        **_header(model, 3),
        "module": module | model.buffers,
        "frozen_param_fragments": fragments,
        "shared_params": shared,
    }


# ---- against a real engine -------------------------------------------------------------------------------------------


def compare(own: Path, real: Path) -> list[str]:
    """The differences: files, keys, types, shapes, dtypes; and the values of every weight and buffer."""
    names = [{path.name for path in folder.iterdir()} for folder in (own, real)]
    if names[0] != names[1]:
        return [f"files {sorted(names[0] ^ names[1])}"]
    lines = []
    for name in sorted(names[0]):
        a, b = (torch.load(folder / name, weights_only=False, mmap=True) for folder in (own, real))
        lines += [f"{name}: {difference}" for difference in _differences(a, b)]
    readers = [DeepSpeedReader(folder) for folder in (own, real)]
    if list(readers[0].shapes.items()) != list(readers[1].shapes.items()) or readers[0].tied != readers[1].tied:
        return [*lines, "shapes or tied names"]
    for (kind, name), shape in readers[0].shapes.items():
        a, b = (reader.read(kind, name, 0, math.prod(shape)) for reader in readers)
        if a.dtype != b.dtype or not torch.equal(a, b):
            lines.append(f"{kind} {name}")
    return lines


def _differences(a: Any, b: Any, where: str = "") -> Iterator[str]:
    if type(a) is not type(b):
        yield f"{where}: {type(a).__name__}, not {type(b).__name__}"
    elif isinstance(a, Mapping):
        if set(a) - {"ds_config", "note"} != set(b) - {"ds_config", "note"}:
            yield f"{where}: keys {sorted(map(str, set(a) ^ set(b)))}"
        for key in a:
            if key in b and key != "ds_config":
                yield from _differences(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list):
        if len(a) != len(b):
            yield f"{where}: {len(a)} items, not {len(b)}"
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from _differences(x, y, f"{where}[{i}]")
    elif isinstance(a, Tensor):
        if (a.shape, a.dtype, a.requires_grad) != (b.shape, b.dtype, b.requires_grad):
            yield f"{where}: {tuple(a.shape)} {a.dtype}, not {tuple(b.shape)} {b.dtype}"
    elif hasattr(a, "start") and (a.start, a.numel) != (b.start, b.numel):
        yield f"{where}: {a}, not {b}"
