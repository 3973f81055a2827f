"""Low-rank adapters on a frozen base: LoRA (Hu et al., 2021), DoRA (Liu et al., 2024), QLoRA (Dettmers et al., 2023).

In: a model of any family, whole or on the meta device. Out: the same model, in which peft's layers replace
the linear layers that a pattern chooses; each keeps its layer as ``base_layer``. Everything but the adapters is frozen.
Initial values of adapters are keyed by seed and name, so they are the same under every engine and process count.

A layer computes ``W x + alpha / r * B A x``; DoRA multiplies each row of ``W + alpha / r * B A`` by its learned length
over its own. ``B`` begins at zero and a length at that of its row, so a run begins with the base's numbers.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unigen_ds.core.errors import ConfigError
from unigen_ds.core.shards import BUFFER, MASTER, ShardReader, first_names, persistent_buffers
from unigen_ds.models.quantized import QuantizedLinear, pack, shared_weights, unpack
from unigen_ds.models.settings import Lora
from unigen_ds.models.weights import InitialWeights
from unigen_ds.system.log import logger
from unigen_ds.system.machine import import_optional
from unigen_ds.system.outputs import save_safetensors

ADAPTER = "default"
"""peft's name of the one set of adapters."""
_peft = partial(import_optional, "peft", "lora", install="'unigen_ds[lora]'")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@dataclass(frozen=True)
class AdapterRecord:
    """What ``add_adapters`` has done: ``adapter_record`` returns it."""

    lora: Lora
    layers: tuple[str, ...]
    from_files: frozenset[str]
    """Parameters and buffers, under their present names, that the base's files have whole."""


def adapter_record(model: nn.Module) -> AdapterRecord | None:
    return model.__dict__.get("adapted")


def add_adapters(model: Any, lora: Lora, *, seed: int) -> None:
    """Freeze the model and add adapters to the layers that ``lora.target_modules`` chooses, in place.

    Raises ``ConfigError`` where a pattern matches no layer, or one that shares its weight, and where peft is missing.
    """
    inject = _peft().inject_adapter_in_model
    model.requires_grad_(False)
    names = candidates(model)
    if lora.quantize is not None:
        pack(model, [name for name in names if name not in shared_weights(model, names)], lora.quantize)
    for pattern in lora.patterns:
        if not any(re.search(pattern, name) for name in names):
            kinds = [*dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "N", name) for name in names)]
            raise ConfigError(
                f"lora.target_modules: {pattern!r} matches no linear layer",
                allowed=f"a part of one of the names {first_names(kinds)}; N is a number",
            )
    layers = tuple(name for name in names if any(re.search(pattern, name) for pattern in lora.patterns))
    if shared := shared_weights(model, layers):
        raise ConfigError(
            f"lora.target_modules chooses {first_names(shared)}, whose weight another module uses as well",
            remedy="a pattern that leaves it out: merged, the adapter would change both",
        )
    weights = {name: model.get_submodule(name) for name in layers}
    files: frozenset[str] = getattr(model, "from_files", frozenset())
    meta = any(parameter.is_meta for parameter in model.parameters())
    base = model.initial_weights(seed=seed) if meta and hasattr(model, "initial_weights") else None  # by other names
    with torch.device("meta") if meta else nullcontext(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unsupported layer type .*QuantizedLinear")  # registered in ``_peft_config``
        inject(_peft_config(lora, layers), model, adapter_name=ADAPTER)
    for name, layer in weights.items():
        wrapper = model.get_submodule(name)
        for hooks in _HOOKS:  # they belong to the whole layer: dropout on a branch, say
            setattr(wrapper, hooks, getattr(layer, hooks))
            setattr(layer, hooks, type(getattr(layer, hooks))())
        for key, parameter in wrapper.named_parameters():
            parameter.requires_grad_(not key.startswith("base_layer."))
    tensors = (*dict(model.named_parameters()), *persistent_buffers(model))
    packed = re.compile(r"\.(packed|scales)$")  # they follow from the weight of the files
    in_files = frozenset(name for name in tensors if packed.sub(".weight", base_name(name)) in files)
    model.__dict__["adapted"] = AdapterRecord(lora, layers, in_files)
    initial = AdapterWeights(model, base, seed=seed)
    if base is not None:
        model.__dict__["initial_weights"] = lambda *, seed: initial
    elif not meta:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(initial.read(MASTER, name, 0, parameter.numel()).view_as(parameter))
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    logger().info(f"{'DoRA' if lora.use_dora else 'LoRA'} of rank {lora.r} on {len(layers)} linear layers,"
                  f" {num_trained:,} parameters: {first_names(layers)}")  # fmt: skip


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers that may have an adapter: not the output head, and none whose weight is held as a buffer."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, QuantizedLinear) or (type(layer) is nn.Linear and "weight" in layer._parameters)
        if name.rpartition(".")[2] != "lm_head" and "." in name
    }


def base_name(name: str) -> str:
    """The name that a tensor of the base has without adapters."""
    return name.replace(".base_layer.", ".")


def _peft_config(lora: Lora, layers: Iterable[str]) -> Any:
    peft = _peft()
    from peft.tuners.lora import Linear

    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_dora=lora.use_dora,
        use_rslora=lora.use_rslora,
        target_modules="|".join(map(re.escape, layers)),  # names in a list would match as endings, too
    )
    config._register_custom_module({QuantizedLinear: Linear})
    return config


class AdapterWeights(InitialWeights):
    """A ``ShardReader`` over the initial weights of the adapters and, under their present names, those of ``base``: of
    a model on the meta device, by the names without adapters; None: it is not there.
    """

    def __init__(self, model: nn.Module, base: ShardReader | None, *, seed: int) -> None:
        super().__init__(self._initialise_adapter, seed=seed)
        self._model, self._base = model, base
        parameters = dict(model.named_parameters())
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                self.add_initial(MASTER, name, parameter.shape)
        in_base = {(kind, name) for kind in base.kinds() for name in base.names(kind)} if base else ()
        for name in (*parameters, *persistent_buffers(model)):
            key = MASTER if name in parameters else BUFFER, base_name(name)
            if base and key in in_base:
                self.add(key[0], name, 0, base.numel(*key), partial(base.read, *key))

    def _initialise_adapter(self, name: str, tensor: Tensor, generator: torch.Generator | None) -> None:
        """Fill a tensor as peft does: A uniform in +-1 / sqrt(fan-in), B zero, lengths those of the rows."""
        if ".lora_A." in name:
            bound = 1 / math.sqrt(tensor.shape[1])
            tensor.uniform_(-bound, bound, generator=generator)
        elif ".lora_B." in name:
            tensor.zero_()
        else:
            owner = name.partition(".lora_magnitude_vector.")[0]
            layer: Any = self._model.get_submodule(owner)
            if self._base is None:
                weight: Tensor = layer.base_layer.weight.detach()
            else:
                numel = self._base.numel(MASTER, f"{owner}.weight")
                weight = self._base.read(MASTER, f"{owner}.weight", 0, numel).view(-1, layer.in_features)
            tensor.copy_(torch.linalg.norm(weight.float(), dim=1))


def base_tensors(model: nn.Module) -> frozenset[str]:
    """Frozen parameters and buffers that the base's files have: what checkpoints leave out. Empty without adapters."""
    own = adapter_record(model)
    if own is None:
        return frozenset()
    tensors = {**dict(model.named_parameters()), **persistent_buffers(model)}
    others = [name for name, one in tensors.items() if not one.requires_grad and name not in own.from_files]
    if others:
        millions = sum(tensors[name].numel() for name in others) / 1e6
        logger().info("Checkpoints also hold %.2f M frozen elements that the base's files do not have: %s",
                      millions, first_names(others))  # fmt: skip
    return own.from_files


def hold_base_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Hold the frozen parameters in the compute precision alone: nothing updates them."""
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def switch_adapters(model: nn.Module, *, on: bool) -> None:
    """Compute with the adapters, or with the base alone. No weight changes, and none is trained afterwards."""
    own = adapter_record(model)
    for name in own.layers if own is not None else ():
        layer: Any = model.get_submodule(name)
        layer.enable_adapters(on)
        layer.requires_grad_(False)


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Replace each adapted layer by one linear layer of the same result, in place. Packed weights are unpacked."""
    own = adapter_record(model)
    assert own is not None, "a model with adapters"
    for name in own.layers:
        wrapper: Any = model.get_submodule(name)
        if isinstance(wrapper.base_layer, QuantizedLinear):
            wrapper.base_layer = unpack(wrapper.base_layer)
        wrapper.merge(safe_merge=True)
        for hooks in _HOOKS:
            setattr(wrapper.base_layer, hooks, getattr(wrapper, hooks))
        model.set_submodule(name, wrapper.base_layer)
    for name, rest in [*model.named_modules()]:
        if isinstance(rest, QuantizedLinear):
            model.set_submodule(name, unpack(rest))
    for key in ("adapted", "initial_weights", "peft_config"):
        model.__dict__.pop(key, None)


def rounding(model: nn.Module, dtype: torch.dtype) -> float:
    """The largest relative L2 difference between a matrix and itself in ``dtype``."""
    largest = 0.0
    for parameter in model.parameters():
        if parameter.ndim > 1 and (length := float(parameter.norm())):
            largest = max(largest, float((parameter.to(dtype).float() - parameter).norm()) / length)
    return largest


def write_adapters(model: nn.Module, folder: Path, *, base: Any) -> None:
    """Write the two files that peft loads on the base's own class. ``base``: the model's name in the config."""
    own = adapter_record(model)
    assert own is not None, "a model with adapters"
    config = _peft_config(own.lora, own.layers)
    config.base_model_name_or_path, config.inference_mode = str(base), True
    config.save_pretrained(str(folder))
    state = _peft().get_peft_model_state_dict(model, adapter_name=ADAPTER)
    tensors = {f"base_model.model.{name}": tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_safetensors(folder / "adapter_model.safetensors", tensors, {"format": "pt"})
