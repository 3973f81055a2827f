"""A model, records and this machine -> a config: the recipe of the model's kind, with what depends on them decided.

The optimizer, the weights of the losses and the dropouts are those of the shipped recipe. Decided are: the learning
rate (by the number of parameters), the length of a sequence (by the lengths of the records), the sequences of an update
(by their number in an epoch), the batch (by the memory plan), the share for validation, and the intervals.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from unigen_ds.checks.dry_run.known import Hardware
from unigen_ds.checks.dry_run.this_machine import find_and_hide_devices
from unigen_ds.checks.first_config.inputs import KINDS, DataInput, ModelInput, find_input_data, find_input_model
from unigen_ds.checks.memory.planned import GIB, Reserve, plan_memory, report_values
from unigen_ds.config.paths import tool
from unigen_ds.config.python_text import python_text
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.progress import Geometry
from unigen_ds.data.datasets.subset import Division
from unigen_ds.data.text.tokenizers import ModelTokenizer
from unigen_ds.migration.draft import SECTIONS, recipe
from unigen_ds.models.lora import candidates
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.runner.start import build
from unigen_ds.runner.start.stages import data_errors
from unigen_ds.system.machine import host_memory, num_cores

_WIDTH = 118
_RECIPES = {
    "DecoderLM": ("decoder_lm_90m", 90e6), "CausalLM": ("qwen_sft", 0.5e9), "ImageTextToText": ("llava_zero2", 7e9),
    "VLM": ("nanovlm_460m", 0.46e9), "UnifiedModel": ("bagel_7b_fsdp", 14e9),
}  # fmt: skip
"""Class of a model -> the recipe whose optimizer and losses it gets, and the parameters of that recipe's model."""
_ADAPTED = (r"(language_model|text_model)\..*_proj(_moe_gen)?$", r"_proj$", r".")
"""Layers that get adapters: those of the first expression that matches any."""
_VISION = ("vision_tower", "vision_model", "visual", "vision_encoder")
"""Parts of a model of transformers that its recipe freezes: the first that there is."""
_LORA_RATE = 1e-4
_MOST_IN_UPDATE, _LEAST_UPDATES, _MOST_EPOCHS = 64, 50, 20


@dataclass
class FirstConfig:
    """The config in the making, each decision with its reason."""

    model: ModelInput
    data: DataInput
    hardware: Hardware
    values: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    """Key at the top of the config -> its comment."""
    decisions: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Name -> what was decided, and why."""

    @property
    def world_size(self) -> int:
        return max(self.hardware.count, 1)

    def decide(self, name: str, value: str, why: str, *, key: str | None = None) -> None:
        """``key``: of the config, whose comment ``why`` is."""
        self.decisions[name] = value, why
        if key is not None:
            self.comments[key] = why

    def lines(self) -> list[str]:
        """The decisions as text."""
        width = max(map(len, self.decisions))
        return [f"{name:<{width}}  {value}: {why}" for name, (value, why) in self.decisions.items()]

    def command(self, out: str) -> str:
        """The command that starts the training."""
        script = tool("train")
        if len(script) == 1 and not (near := os.path.relpath(script[0])).startswith(".."):
            script = [near]
        start = ["python"] if self.world_size == 1 else ["torchrun", "--nproc_per_node", str(self.world_size)]
        return shlex.join([*start, *script, out])

    def text(self, out: str) -> str:
        """The whole file."""
        what = " ".join(f"{self.decisions['model'][0]} learns {self.decisions['data'][0]}".split())
        lines = [f"# {what}.", f"# Start: {self.command(out)}    After a stop, to continue: the same with --resume", ""]
        for key in sorted(self.values, key=SECTIONS.index):
            lines += _section_lines(key, self.values[key], self.comments.get(key, ""))
        return "\n".join(lines) + "\n"


def _section_lines(key: str, value: Any, comment: str) -> Iterator[str]:
    """One line where it fits, else as few as the items of the section need."""
    line, comment = f"{key} = {python_text(value, width=sys.maxsize)}", f"  # {comment}" if comment else ""
    if len(line + comment) <= _WIDTH or not isinstance(value, (Mapping, list)):
        yield line + comment
        return
    is_list = isinstance(value, list)
    items = [("", one) for one in value] if is_list else [(f"{name}=", one) for name, one in value.items()]
    yield f"{key} = {'[' if is_list else 'dict('}{comment}"
    line = "   "
    for number, (name, one) in enumerate(items, 1):
        text = f" {name}{python_text(one, '    ', width=_WIDTH - len(name))}"
        text += "," if number < len(items) else "])"[not is_list]
        if len(line + text.partition("\n")[0]) > _WIDTH and line.strip():
            yield line
            line = "   "
        line += text
    yield line


def first_config(
    model: str,
    data: str,
    *,
    task: str | None = None,
    lora: bool = False,
    epochs: float | None = None,
    lr: float | None = None,
    work_dir: str | None = None,
) -> FirstConfig:
    """Decide on a config for this machine. ``task``: of ``KINDS``; None: as the records are. The index of the data is
    cached beside it, as by a start. Raises ``ConfigError`` where something must be stated or cannot work together, and
    what reading the model and the data raises.
    """
    with mock.patch.dict(os.environ):
        hardware = find_and_hide_devices() or Hardware(0, "CPU", memory=host_memory(), bf16=False)
        inputs = find_input_model(model)
        config = FirstConfig(inputs, find_input_data(data, task=task, model=inputs), hardware)
        name, recipe_size = next(_RECIPES[one.__name__] for one in inputs.kind.__mro__ if one.__name__ in _RECIPES)
        values, base = config.values, recipe(name)
        values |= {**inputs.sections, "backend": {"type": "single"}}
        if config.world_size > 1:
            values["backend"] = {"type": "fsdp", "sharding_strategy": "FULL_SHARD"}
        if work_dir is not None:
            values["work_dir"] = work_dir
        module, section, dataset = _read(config)
        size = sum(p.numel() for p in module.parameters())
        title = type(getattr(module, "transformers_model", module)).__name__
        config.decide("model", f"{title} with {_count(size)} parameters", f"{inputs.title}; recipe {name}")
        records = config.data
        kinds = (f"{100 * number / records.sampled:.3g} % {KINDS[one]}" for one, number in records.kinds.items())
        config.decide("data", f"{records.total:,} records of {records.dataset['data_path']}", ", ".join(kinds))
        _decide_trained(config, module, base, lora=lora)
        lengths = dataset.lengths()[0]
        seq_length = _decide_length(config, module, lengths)
        lengths = lengths[~_decide_validation(config, dataset)]
        tokens = lengths if records.main_kind == "pretrain" else lengths[lengths <= seq_length]
        sequences = max(math.ceil(tokens.sum() / seq_length), 1)
        of_device, updates = _decide_updates(config, sequences, epochs=epochs)
        values["train_dataloader"] = {
            "batch_size": of_device, "seq_length": seq_length, "num_workers": section["index_workers"],
            "packing": {"type": "BestFitPacking"}, "dataset": section,
        }  # fmt: skip
        _decide_hooks(config, updates)
        _decide_optimizer(config, base, lr=lr, scale=recipe_size / size)
        _decide_batch(config)
    return config


def _read(config: FirstConfig) -> tuple[nn.Module, dict[str, Any], Any]:
    """The model without memory, the section of the data, and the data set."""
    data, workers = config.data, min(4, max(num_cores() // config.world_size, 1), config.data.total // 1000 + 1)
    section = {"type": "UnifiedGenerationDataset", **data.dataset, "index_workers": workers}
    settings = Settings.from_config({
        **config.values,
        "backend": {"type": "single"},
        "train_dataloader": {"batch_size": 1, "seq_length": 2**31, "dataset": section},
        "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 1e-4}},
        "train_cfg": {"max_epochs": 1},
    }).with_choices(seed=0, precision="fp32")  # fmt: skip
    tokenizer = None if settings.tokenizer is None else settings.tokenizer.build()
    if isinstance(tokenizer, ModelTokenizer) and not tokenizer.chat.chat_template and {*data.kinds} != {"pretrain"}:
        raise ConfigError(
            f"--model {config.model.name} has no chat template, and the records are conversations",
            allowed="its Instruct or Chat version; or documents, {'text': ...}",
            remedy="one of them; or a config of your own with tokenizer.chat_template",
        )
    read = build.build_data(settings, geometry=Geometry(1, 1, 1), ruler=None)
    for error in data_errors(settings, read.parts):
        raise error
    with torch.device("meta"):
        return build.build_model(settings, read.processor, seed=0), section, read.stream.datasets[0]


def _decide_trained(config: FirstConfig, module: nn.Module, base: Mapping[str, Any], *, lora: bool) -> None:
    """What of the model is trained, and what is left out of conditions meanwhile."""
    values, names = config.values, [name for name, _ in module.named_parameters()]
    vision = next((part for part in _VISION if any(part in name for name in names)), None)
    if lora:
        linear = candidates(module)
        pattern = next(one for one in _ADAPTED if any(re.search(one, layer) for layer in linear))
        values["lora"] = {"r": 16, "alpha": 32, "dropout": 0.05, "target_modules": pattern}
        number = sum(bool(re.search(pattern, layer)) for layer in linear)
        config.decide("trained", "adapters of rank 16", f"--lora; on {number} linear layers", key="lora")
    elif vision and base["model"].get("freeze"):
        values["model"] = {**values["model"], "freeze": [vision]}
        config.decide("trained", f"all but {vision}", "as in the recipe; --lora trains adapters alone")
    else:
        config.decide("trained", "all parameters", "as in the recipe; --lora trains adapters alone")
    if dropouts := {key: value for key, value in (base.get("processor") or {}).items() if key.endswith("_dropout")}:
        values["processor"] = {**values.get("processor", {}), **dropouts}


def _decide_length(config: FirstConfig, module: nn.Module, lengths: np.ndarray) -> int:
    """Tokens of a sequence. A few records that are twice as long as all others are not kept whole: every sequence would
    need the memory of them.
    """
    longest, usual, documents = int(lengths.max()), int(np.percentile(lengths, 99)), config.data.main_kind == "pretrain"
    limit, cuda = getattr(module, "max_document_tokens", None) or 2**31, config.hardware.count > 0
    least = 1024 if cuda else 256
    hold = longest if longest <= max(2 * usual, least) else usual
    if documents:
        hold = min(longest, 2048 if cuda else 512)
    length = min(max(64 * math.ceil(hold / 64), least), limit)
    why = f"the longest of {len(lengths):,} records has {longest:,}, 99 % have at most {usual:,}"
    if long := int((lengths > length).sum()):
        why += f"; {long:,} longer ones are {'split' if documents else 'left out'}"
    config.decide("seq_length", f"{length:,} tokens", why + (f"; positions: {limit:,}" if limit < longest else ""))
    return length


def _decide_validation(config: FirstConfig, dataset: Any) -> np.ndarray:
    """Which records are for validation."""
    total = len(dataset)
    for share in (0.01, 0.02, 0.05, 0.1, 0.2, 0.3):  # each record is drawn on its own: a share of few may have none
        chosen = Division(share, 0).draw(dataset.content_digests()) < share
        if chosen.sum() >= min(100, max(total // 20, 2)) and total >= 20:
            config.values["val_dataloader"] = {"split": share}
            number = f"{int(chosen.sum()):,} of {total:,} records, never trained on"
            config.decide("validation", f"a share of {share:g}", number, key="val_dataloader")
            return chosen
    config.decide("validation", "none", f"{total:,} records cannot be divided; val_dataloader.dataset names others")
    return np.zeros(total, bool)


def _decide_updates(config: FirstConfig, sequences: int, *, epochs: float | None) -> tuple[int, int]:
    """Sequences of an update on each device, and the number of updates."""
    data, world, why = config.data, config.world_size, "--epochs"
    if epochs is None:
        usual = 1 if data.total > 100_000 or data.main_kind == "pretrain" else 10 if data.draws else 3
        epochs = max(usual, min(math.ceil(_LEAST_UPDATES / sequences), _MOST_EPOCHS))
        why = "1 for documents and many records, 10 where images are drawn, else 3; more of few; --epochs"
    config.values["train_cfg"] = {"max_epochs": int(epochs) if float(epochs).is_integer() else epochs}
    most = min(max(sequences * epochs / _LEAST_UPDATES, world), _MOST_IN_UPDATE)
    of_device = 2 ** int(math.log2(max(most / world, 1)))
    updates = math.ceil(sequences * epochs / (of_device * world))
    config.decide("epochs", f"{epochs:g}", why)
    number = f"an epoch has about {sequences:,} sequences; {updates:,} updates in all"
    config.decide("update", f"{of_device * world} sequence(s)", number, key="train_cfg")
    return of_device, updates


def _decide_hooks(config: FirstConfig, updates: int) -> None:
    values, interval, hooks = config.values, _round_number(updates / 10), list[dict[str, Any]]()
    if "val_dataloader" in values:
        hooks.append({"type": "EvaluateHook", "unit": "update", "interval": interval, "save_best": "val/loss"})
        if values["val_dataloader"]["split"] * config.data.total > 1000:
            hooks[-1]["max_batches"] = 64
    if config.data.draws:
        momentum = max(1e-4, min(0.01, _digit(10 / updates)))
        hooks.append({"type": "EMAHook", "momentum": momentum})
        config.decide("average", f"of the weights, momentum {momentum:g}", "pictures are drawn with it")
        if "val_dataloader" in values:
            hooks.append({"type": "PreviewHook", "num_held_out": 4, "interval": interval})
            config.decide("previews", f"every {interval} update(s)", "4 records of the validation are drawn")
    values["custom_hooks"] = hooks
    values["default_hooks"] = {
        "logger": {"unit": "update", "interval": _round_number(updates / 100)},
        "checkpoint": {"unit": "update", "interval": interval, "max_keep_ckpts": 2},
    }  # fmt: skip
    best = ", the best by val/loss is kept" if "val_dataloader" in values else ""
    config.decide("checkpoints", f"every {interval} update(s)", f"a tenth of the run{best}", key="default_hooks")


def _decide_optimizer(config: FirstConfig, base: Mapping[str, Any], *, lr: float | None, scale: float) -> None:
    """``scale``: parameters of the recipe's model for each of this one: smaller models learn with larger rates."""
    wrapper, why = base["optim_wrapper"], "--lr"
    if lr is None:
        own = _digit(wrapper["optimizer"]["lr"] * min(max(math.sqrt(scale), 1.0), 100.0))
        lr, why = (_LORA_RATE, "of adapters; --lr") if "lora" in config.values else (own, "by its parameters; --lr")
    config.decide("lr", f"{lr:g}", why)
    precision = "fp32" if not config.hardware.count else "bf16" if config.hardware.bf16 else "fp16"
    config.decide("precision", precision, config.hardware.name)
    config.values["optim_wrapper"] = {
        "optimizer": {**wrapper["optimizer"], "lr": lr}, "accumulative_counts": 1, "clip_grad": wrapper["clip_grad"],
        "precision": precision,
    }  # fmt: skip
    config.values["param_scheduler"] = {"type": "WarmupCosineLR", "warmup_ratio": 0.03, "min_ratio": 0.1}
    if base.get("loss_weights"):
        config.values["loss_weights"] = base["loss_weights"]


def _decide_batch(config: FirstConfig) -> None:
    """The largest batch of a device that the memory plan has memory for, and what is accumulated to the update's."""
    values, loader, memory = config.values, config.values["train_dataloader"], config.hardware.memory
    of_device = loader["batch_size"]

    def need(batch: int) -> int:
        """Bytes of a device."""
        loader["batch_size"], values["optim_wrapper"]["accumulative_counts"] = batch, of_device // batch
        report = plan_memory(values, world_size=config.world_size, alternatives=False)
        engine = report_values(report, Reserve(2 * GIB, 0.05, 0))["engines"][0]
        if engine["problem"] is not None:
            raise ConfigError(f"the memory of this config cannot be planned: {engine['problem']}")
        return max(engine["device"].values())

    least = need(1)
    if least > memory:
        values["model"] = {**values["model"], "activation_checkpointing": True}
        config.decide("layers", "are computed again in the backward pass", "they do not fit otherwise", key="model")
        least = need(1)
    if least > memory:
        raise ConfigError(
            f"{config.decisions['model'][0]}: an update of one sequence of {loader['seq_length']:,} tokens needs"
            f" {least / GIB:.1f} GiB of a device, and this machine has {memory / GIB:.1f}",
            remedy="a smaller model" if "lora" in values else "--lora, or a smaller model",
        )
    batch, peak = 1, least
    if of_device > 1:
        each = max(need(2) - least, 1)
        batch = min(of_device, 2 ** int(math.log2((memory - least) // each + 1)))
        peak = need(batch)
        while peak > memory:
            batch //= 2
            peak = need(batch)
    config.decide(
        "batch", f"{batch} of a device, {of_device // batch} accumulated",
        f"{peak / GIB:.1f} of {memory / GIB:.1f} GiB by the memory plan", key="train_dataloader",
    )  # fmt: skip


def _count(number: float) -> str:
    """``494 M``."""
    unit = next((unit for unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")) if number >= unit[0]), (1, ""))
    return f"{number / unit[0]:.3g}{unit[1]}"


def _digit(number: float) -> float:
    """The number with one digit."""
    return float(f"{number:.0e}")


def _round_number(number: float) -> int:
    """1, 2, 5, 10, 20, 50, ...: the largest that is not above ``number``."""
    power = 10 ** int(math.log10(max(number, 1)))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= max(number, 1))
