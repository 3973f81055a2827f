"""A model's directory or hub name -> transformers' own model and its weights, tensor by tensor.

The config is transformers' own (``AutoConfig``); no code beside it is ever run. Weights come from safetensors alone.
The names in published files may be those of an earlier version of transformers, which renames them while it loads; its
own rules are applied here, so that a process reads the rows of its own shard and never holds the whole model. Where a
rule also computes (experts that are stored one by one), transformers loads the whole model, with a line in the log.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from unigen_ds.config.overrides import plain_values
from unigen_ds.core.errors import CheckpointError, ConfigError, UnknownKey
from unigen_ds.core.json_values import stored_object
from unigen_ds.models.weights import Pretrained, Stored, read_json, stored_tensors
from unigen_ds.system.log import logger

_VOCABULARY = r"(embed_tokens|lm_head|wte|embed_in|embed_out)\.weight$"
_NOT_THE_MODELS = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures", "use_cache")
"""Keys of a config that change no number, in the config and in its parts."""
_OF_EVERY_CONFIG = {"id2label", "return_dict", "output_hidden_states"}
_FORMER_KEYS = ("rope_theta", "rope_scaling", "torch_dtype", "dtype", "model_type")
"""That configs of transformers accept and keep under other names."""


def auto_config(folder: Path | None, changes: Mapping[str, Any], *, where: str = "model.config") -> Any:
    """transformers' config of a folder, with ``changes`` of its keys (also inside of its parts).

    Raises ``ConfigError`` for a kind of model or a value that cannot work.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    source = where if folder is None else f"model.pretrained {folder}"
    kind = changes.get("model_type") if folder is None else read_json(folder / "config.json").get("model_type")
    if kind not in CONFIG_MAPPING:
        raise ConfigError(
            f"{source}: model_type is {kind!r}",
            allowed="a kind of model that transformers has; code beside a model's files is never run",
            remedy="a family of your own, in custom_imports (docs/extending/model.md)",
        )
    if changes.get("model_type", kind) != kind:
        raise ConfigError(f"{where}.model_type is {changes['model_type']!r}, and the files have {kind!r}")
    try:
        config = None if folder is None else AutoConfig.from_pretrained(folder, trust_remote_code=False)
        values = {"model_type": kind} if config is None else config.to_dict()
        if changes or config is None:
            config = CONFIG_MAPPING[kind].from_dict(_over(values, plain_values(changes)))
    except Exception as error:  # strict dataclasses, the kind's own checks, JSON, the hub: many kinds
        raise ConfigError(f"{where if changes else source}: {' '.join(str(error).split())[:400]}") from error
    _check_keys(changes, config, values, where)
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"{source} holds quantised weights", remedy="the model's unquantised files")
    return config


def _check_keys(changes: Mapping[str, Any], config: Any, values: Mapping[str, Any], where: str) -> None:
    """Raise ``ConfigError`` for a key that a config's class does not have: transformers would keep it without a use."""
    if set(changes) >= _OF_EVERY_CONFIG:  # a whole one of ``model_keys``, perhaps of another version of transformers
        return
    fields = {field.name for field in dataclasses.fields(config)}
    names = {*fields, *config.attribute_map, *values, *_FORMER_KEYS}
    for key, value in changes.items():
        if key not in names:
            raise UnknownKey(key, section=where, valid=names)
        if key in config.sub_configs and isinstance(value, Mapping) and getattr(config, key, None) is not None:
            _check_keys(value, getattr(config, key), values.get(key) or {}, f"{where}.{key}")


def model_keys(config: Any) -> dict[str, Any]:
    """Return plain values from which ``auto_config(None, ...)`` makes the same config."""

    def of_model(values: dict[str, Any]) -> dict[str, Any]:
        """Leave out keys that change no number; called for each object of the JSON."""
        return {key: value for key, value in values.items() if key not in _NOT_THE_MODELS}

    plain = json.loads(config.to_json_string(use_diff=False), object_hook=of_model)
    return {"model_type": config.model_type, **plain}


def _over(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(values)
    for key, value in changes.items():
        below = values.get(key)
        result[key] = _over(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def build_auto(auto: str, config: Any, *, attention: str | None, whole: bool) -> Any:
    """transformers' model of a config, in fp32, by its class ``auto``. ``ConfigError`` for a kind that this lacks.

    ``attention``: transformers' name of one; None: it chooses. ``whole``: with initial values; otherwise parameters are
    on the meta device. Buffers always have their values.
    """
    import transformers
    from transformers.initialization import no_init_weights

    cls: Any = getattr(transformers, auto)
    if type(config) not in cls._model_mapping:
        other = "ImageTextToText" if auto == "AutoModelForCausalLM" else "CausalLM"
        problem = f"{config.model_type!r} is no model of transformers' {auto}"
        raise ConfigError(problem, remedy=f"model.type={other!r}, if it is one of those")
    with torch.device("cpu"):
        try:
            if whole:
                return cls.from_config(config, dtype=torch.float32, attn_implementation=attention)
            with _parameters_on_meta(), no_init_weights():
                model = cls.from_config(config, dtype=torch.float32, attn_implementation=attention)
            model.tie_weights()
            return model
        except (ValueError, ImportError) as error:
            raise ConfigError(f"model: {str(error).strip().splitlines()[0]}") from error


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside, every parameter loses its memory as soon as it is made. Buffers, which no file may have, keep theirs."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]


def read_weights(folder: Path, model: Any, *, auto: str) -> Pretrained:
    """The tensors of a folder by the names of ``model``, transformers' own of its config.

    Raises ``CheckpointError``, also for weights in another format than safetensors.
    """
    if not any(folder.glob("*.safetensors")):
        bin_files = ", ".join(sorted(path.name for path in folder.glob("*.bin"))[:3])
        raise CheckpointError(
            f"{folder} holds no *.safetensors" + f" (it holds {bin_files})" * bool(bin_files),
            remedy="save it again with save_pretrained of transformers: other formats can execute code",
        )
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if index.is_file():  # a folder may have the same weights again in another program's names
        weight_map = stored_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index} is damaged", allowed="an object with weight_map, a file for each tensor")
        files = [folder / name for name in sorted(set(weight_map.values()))]
    file_tensors: dict[str, Stored] = {}
    for path in files:
        file_tensors |= stored_tensors(path, linear_patches=False)
    tensors = _rename(file_tensors, model)
    if tensors is None:
        tensors = _loaded_whole(folder, auto)
    # older files have the rotary frequencies
    unused_names = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq$"]
    return Pretrained(str(folder), {}, tensors, may_leave=f"({'|'.join(unused_names)})", may_grow=_VOCABULARY)


def _rename(tensors: Mapping[str, Stored], model: Any) -> dict[str, Stored] | None:
    """Rename tensors by transformers' own rules for older names; None where a rule also computes."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    own = model.state_dict()
    if set(tensors) <= set(own):
        return dict(tensors)
    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    by_own_name: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        ours, conversion = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if conversion is not None:
            return None
        by_own_name[ours] = tensor
    return by_own_name


def _loaded_whole(folder: Path, auto: str) -> dict[str, Stored]:
    import transformers

    with torch.device("cpu"):
        model = getattr(transformers, auto).from_pretrained(
            folder, dtype="auto", use_safetensors=True, trust_remote_code=False
        )
    tensors: dict[str, Tensor] = model.state_dict()
    gigabytes = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
    logger().info(
        f"{folder}: transformers joins stored tensors; each process holds {gigabytes:.1f} GB until all are read."
    )
    in_memory = SimpleNamespace(get_tensor=tensors.__getitem__, get_slice=tensors.__getitem__)
    return {name: Stored(lambda: in_memory, name, tuple(tensor.shape)) for name, tensor in tensors.items()}
