"""A model, records and this machine -> a config: the recipe of the model's kind, with what depends on them decided.

The optimizer, the weights of the losses and the dropouts are those of the shipped recipe. Decided are: the learning
rate (by the number of parameters), the length of a sequence (by the lengths of the records), the sequences of an update
(by their number in an epoch), the batch (by the memory plan), the share for validation, and the intervals.
"""

from __future__ import annotations

import math
import os
import re
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
from unigen_ds.config.paths import command
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
_NEW_RATE, _NEW_SIZE, _MOST_RATE = 6e-4, 90e6, 2e-3
"""The learning rate of new weights of so many parameters, and the largest."""
_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3)
"""Of the records for validation: the first that has 100 records, or a twentieth of all, but 4."""
_MOST_IN_UPDATE, _LEAST_UPDATES, _LEAST_OF_NEW, _MOST_EPOCHS = 64, 50, 500, 20
"""New weights need more updates, and so smaller ones."""
_WIDTH = 118


@dataclass
class FirstConfig:
    """The config in the making. Each decision is printed with its reason."""

    model: ModelInput
    data: DataInput
    hardware: Hardware
    values: dict[str, Any] = field(default_factory=dict)
    decisions: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    """Name -> what was decided, why, and the key at the top of the config whose comment that is, if any."""

    @property
    def world_size(self) -> int:
        return max(self.hardware.count, 1)

    def decide(self, name: str, value: str, why: str, *, key: str = "") -> None:
        self.decisions[name] = value, why, key
        print(f"{name:<12} {value}: {why}", flush=True)

    def command(self, out: str) -> str:
        return command("train", out, processes=self.world_size)

    def text(self, out: str) -> str:
        what = " ".join(f"{self.decisions['model'][0]} learns {self.decisions['data'][0]}".split())
        lines = [f"# {what}.", f"# Start: {self.command(out)}    After a stop, to continue: the same with --resume", ""]
        comments = {key: why for _, why, key in self.decisions.values()}
        for key in sorted(self.values, key=SECTIONS.index):
            lines += _section_lines(key, self.values[key], comments.get(key, ""))
        return "\n".join(lines) + "\n"


def _section_lines(key: str, value: Any, comment: str) -> Iterator[str]:
    """One line where it fits, else as few as the items of the section need."""
    line, comment = f"{key} = {python_text(value, width=sys.maxsize)}", f"  # {comment}" if comment else ""
    if len(line + comment) <= _WIDTH or not isinstance(value, (Mapping, list)):
        yield line + comment
        return
    items = [("", one) for one in value] if isinstance(value, list) else [(f"{k}=", one) for k, one in value.items()]
    start, end = "[]" if isinstance(value, list) else ("dict(", ")")
    yield f"{key} = {start}{comment}"
    line = "   "
    for number, (name, one) in enumerate(items, 1):
        text = f" {name}{python_text(one, '    ', width=_WIDTH - len(name))}{',' if number < len(items) else end}"
        if len(line + text.partition("\n")[0]) > _WIDTH and line.strip():
            yield line
            line = "   "
        line += text
    yield line


def first_config(
    model: str, data: str, *, task: str | None, lora: bool, epochs: float | None, lr: float | None
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
        base, records = recipe(name), config.data
        sharded = {"type": "fsdp", "sharding_strategy": "FULL_SHARD"}
        config.values |= {**inputs.sections, "backend": sharded if config.world_size > 1 else {"type": "single"}}
        module, dataset, section = _read(config)
        size = sum(p.numel() for p in module.parameters())
        title = type(getattr(module, "transformers_model", module)).__name__
        config.decide("model", f"{title} with {size:,} parameters", f"{inputs.title}; recipe {name}")
        kinds = (f"{100 * n / records.kinds.total():.3g} % {KINDS[one]}" for one, n in records.kinds.items())
        config.decide("data", f"{len(dataset):,} records of {section['data_path']}", ", ".join(kinds))
        _decide_trained(config, module, base, lora=lora)
        _decide_data(config, module, dataset, section, epochs=epochs)
        _decide_optimizer(config, base, lr=lr, size=size, recipe_size=recipe_size)
        _decide_batch(config)
    return config


def _read(config: FirstConfig) -> tuple[nn.Module, Any, dict[str, Any]]:
    """The model without memory, the data set, and its section."""
    workers = min(4, max(num_cores() // config.world_size, 1), config.data.total // 1000 + 1)
    section = {"type": "UnifiedGenerationDataset", **config.data.dataset, "index_workers": workers}
    settings = Settings.from_config({
        **config.values,
        "backend": {"type": "single"},
        "train_dataloader": {"batch_size": 1, "seq_length": 2**31, "dataset": section},
        "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 1e-4}},
        "train_cfg": {"max_epochs": 1},
    }).with_choices(seed=0, precision="fp32")  # fmt: skip
    tokenizer = None if settings.tokenizer is None else settings.tokenizer.build()
    has_chats = {*config.data.kinds} != {"pretrain"}
    if isinstance(tokenizer, ModelTokenizer) and not tokenizer.chat.chat_template and has_chats:
        raise ConfigError(
            f"--model {config.model.name} has no chat template, and the records are conversations",
            remedy="its Instruct or Chat version; or documents, {'text': ...}",
        )
    read = build.build_data(settings, geometry=Geometry(1, 1, 1), ruler=None)
    for error in data_errors(settings, read.parts):
        raise error
    with torch.device("meta"):
        return build.build_model(settings, read.processor, seed=0), read.stream.datasets[0], section


def _decide_trained(config: FirstConfig, module: nn.Module, base: Mapping[str, Any], *, lora: bool) -> None:
    values, names = config.values, [name for name, _ in module.named_parameters()]
    vision = next((part for part in _VISION if any(part in name for name in names)), "")
    what, why = "all parameters", "as in the recipe; --lora trains adapters alone"
    if lora:
        linear = candidates(module)
        pattern = next(one for one in _ADAPTED if any(re.search(one, layer) for layer in linear))
        values["lora"] = {"r": 16, "alpha": 32, "dropout": 0.05, "target_modules": pattern}
        what, why = "adapters", f"--lora; on {sum(bool(re.search(pattern, one)) for one in linear)} linear layers"
    elif vision and base["model"].get("freeze") and not config.model.is_new:
        values["model"], what = {**values["model"], "freeze": [vision]}, f"all but {vision}"
    config.decide("trained", what, why, key="lora" if lora else "")
    if dropouts := {key: value for key, value in (base.get("processor") or {}).items() if key.endswith("_dropout")}:
        values["processor"] = {**values.get("processor", {}), **dropouts}


def _decide_data(
    config: FirstConfig, module: nn.Module, dataset: Any, section: Mapping[str, Any], *, epochs: float | None
) -> None:
    """The length of a sequence, the records for validation, the sequences of an update, and intervals."""
    values, total, lengths, world = config.values, len(dataset), dataset.lengths()[0], config.world_size
    length = _sequence_length(config, lengths, limit=getattr(module, "max_document_tokens", None) or 2**31)
    least = min(100, max(total // 20, 4))
    for share in (share for share in _SHARES if share * total >= least):
        is_held_out = Division(share, 0).draw(dataset.content_digests()) < share  # each record is drawn on its own
        if is_held_out.sum() >= least / 2:
            values["val_dataloader"], lengths = {"split": share}, lengths[~is_held_out]
            number = f"{total - len(lengths):,} of {total:,} records, never trained on"
            config.decide("validation", f"a share of {share:g}", number, key="val_dataloader")
            break
    else:
        config.decide("validation", "none", f"{total:,} records are too few; val_dataloader.dataset names others")
    is_new, is_text = config.model.is_new, config.data.is_text
    trained = lengths if is_text else lengths[lengths <= length]
    sequences, why = max(math.ceil(trained.sum() / length), 1), "--epochs"
    least_updates = _LEAST_OF_NEW if is_new else _LEAST_UPDATES
    if epochs is None:
        rules = ((total > 100_000, 1, "many records"), (is_new, 10, "random weights"), (is_text, 1, "documents"),
                 (config.data.draws, 10, "images"), (True, 3, "conversations"))  # fmt: skip
        usual, of_what = next((number, name) for holds, number, name in rules if holds)
        epochs = max(usual, min(math.ceil(least_updates / sequences), _MOST_EPOCHS))
        why = f"usual with {of_what}" if epochs == usual else f"for about {least_updates} updates"
        why += "; --epochs"
    of_device = 2 ** int(math.log2(max(min(sequences * epochs / least_updates, _MOST_IN_UPDATE) / world, 1)))
    updates = math.ceil(sequences * epochs / (of_device * world))
    interval, warmup = _round_number(updates / 10), round((0.1 if is_new else 0.03) * updates)
    curve = {"type": "CosineAnnealingLR", "eta_min_ratio": 0.1, "unit": "update", "begin": warmup}
    rise = {"type": "LinearLR", "start_factor": 0.1, "unit": "update", "begin": 0, "end": warmup}
    values["param_scheduler"] = [rise, curve] if warmup > 1 else {**curve, "begin": 0}
    config.decide("epochs", f"{epochs:g}", why)
    number = f"an epoch has about {sequences:,} sequences; {updates:,} updates in all"
    config.decide("update", f"{of_device * world} sequence(s)", number, key="train_cfg")
    values["train_cfg"] = {"max_epochs": int(epochs) if float(epochs).is_integer() else epochs}
    values["train_dataloader"] = {
        "batch_size": of_device, "seq_length": length, "num_workers": section["index_workers"],
        "packing": {"type": "BestFitPacking"}, "dataset": section,
    }  # fmt: skip
    values["default_hooks"] = {
        "logger": {"unit": "update", "interval": _round_number(updates / 100)},
        "checkpoint": {"unit": "update", "interval": interval, "max_keep_ckpts": 2},
    }  # fmt: skip
    best = ", and the best by val/loss is kept" if "val_dataloader" in values else ""
    config.decide("checkpoints", f"every {interval} update(s)", f"a tenth of the run{best}", key="default_hooks")
    hooks: list[dict[str, Any]] = []
    if best:
        hooks += [{"type": "EvaluateHook", "unit": "update", "interval": interval, "save_best": "val/loss"}]
        hooks[0] |= {"max_batches": 64} if total - len(lengths) > 1000 else {}
    if config.data.draws:
        momentum = max(1e-4, min(0.01, float(f"{10 / updates:.0e}")))
        hooks += [{"type": "EMAHook", "momentum": momentum}]
        config.decide("average", f"of the weights, momentum {momentum:g}", "pictures are drawn with it")
    if config.data.draws and best:
        hooks += [{"type": "PreviewHook", "num_held_out": 4, "interval": interval}]
        config.decide("previews", f"every {interval} update(s)", "4 records of the validation are drawn")
    values["custom_hooks"] = hooks


def _sequence_length(config: FirstConfig, lengths: np.ndarray, *, limit: int) -> int:
    """A few records that are twice as long as all others are not kept whole: each sequence would need their memory."""
    longest, usual, cuda = int(lengths.max()), int(np.percentile(lengths, 99)), config.hardware.count > 0
    least = 1024 if cuda else 256
    hold = longest if longest <= max(2 * usual, least) else usual
    if config.data.is_text:
        hold = min(longest, 2048 if cuda else 512)
    length = min(max(64 * math.ceil(hold / 64), least), limit)
    why = f"the longest record has {longest:,} tokens, 99 % at most {usual:,}"
    if long := int((lengths > length).sum()):
        why += f"; {long:,} longer ones are {'split' if config.data.is_text else 'left out'}"
    why += f"; positions {limit:,}" if limit < longest else ""
    config.decide("seq_length", f"{length:,} tokens", why, key="train_dataloader")
    return length


def _decide_optimizer(
    config: FirstConfig, base: Mapping[str, Any], *, lr: float | None, size: int, recipe_size: float
) -> None:
    """Smaller models learn with larger rates. ``size``: parameters, also of the recipe's model."""
    optimizer, own = base["optim_wrapper"]["optimizer"], (_LORA_RATE, "of adapters; --lr")
    if "lora" not in config.values and config.model.is_new:
        rate = min(_NEW_RATE * (_NEW_SIZE / size) ** 0.5, _MOST_RATE)
        reason = "of random weights, by their number; half of it with learned positions (GPT-2); --lr"
        own = float(f"{rate:.0e}"), reason
    elif "lora" not in config.values:
        rate = optimizer["lr"] * min(max((recipe_size / size) ** 0.5, 1), 100)
        own = float(f"{rate:.0e}"), "by the number of parameters; --lr"
    lr, why = (lr, "--lr") if lr else own
    precision = "bf16" if config.hardware.bf16 else "fp16" if config.hardware.count else "fp32"
    config.decide("lr", f"{lr:g}", why)
    config.decide("precision", precision, config.hardware.name)
    config.values["optim_wrapper"] = {
        "optimizer": {**optimizer, "lr": lr}, "accumulative_counts": 1,
        "clip_grad": base["optim_wrapper"]["clip_grad"], "precision": precision,
    }  # fmt: skip
    config.values |= {key: base[key] for key in ("loss_weights",) if base.get(key)}


def _decide_batch(config: FirstConfig) -> None:
    """The largest batch of a device that the memory plan has memory for, and what is accumulated to the update's."""
    values, loader, memory = config.values, config.values["train_dataloader"], config.hardware.memory
    of_device = loader["batch_size"]

    def largest() -> tuple[int, int]:
        """The largest batch for which there is memory, and its bytes; of 1 also where there is not."""
        batch = of_device
        while True:
            loader["batch_size"], values["optim_wrapper"]["accumulative_counts"] = batch, of_device // batch
            report = plan_memory(values, world_size=config.world_size, alternatives=False)
            engine = report_values(report, Reserve(2 * GIB, 0.05, 0))["engines"][0]
            if engine["problem"] is not None:
                raise ConfigError(f"the memory of this config cannot be planned: {engine['problem']}")
            peak, state = max(engine["device"].values()), engine["traced"]["held"] + engine["traced"]["masters"]
            if peak <= memory or batch == 1:
                return batch, peak
            fixed = 2 * GIB + 1.05 * state  # weights, moments and gradients; the rest grows with the batch
            fitting = (memory - fixed) * batch / max(peak - fixed, 1)
            batch = min(batch // 2, 2 ** int(math.log2(max(fitting, 1))))

    batch, peak = largest()
    if peak > memory:
        values["model"] = {**values["model"], "activation_checkpointing": True}
        config.decide("layers", "are computed again in the backward pass", "they do not fit otherwise", key="model")
        batch, peak = largest()
    if peak > memory:
        raise ConfigError(
            f"{config.decisions['model'][0]}: an update of one sequence of {loader['seq_length']:,} tokens needs"
            f" {peak / GIB:.1f} GiB of a device, and this machine has {memory / GIB:.1f}",
            remedy=f"{'' if 'lora' in values else '--lora, '}a smaller model, or shorter records",
        )
    what = f"{batch} of a device, {of_device // batch} accumulated"
    why = f"{peak / GIB:.1f} of {memory / GIB:.1f} GiB by the memory plan"
    config.decide("batch", what, why, key="backend")


def _round_number(number: float) -> int:
    """1, 2, 5, 10, 20, 50, ...: the largest that is not above ``number``."""
    power = 10 ** int(math.log10(max(number, 1)))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= max(number, 1))
