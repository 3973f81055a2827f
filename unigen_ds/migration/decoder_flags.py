"""The FSDP trainer of decoder language models: ``train_fsdp.py CONFIG.yaml``. Its recipes are two of this project's."""

from __future__ import annotations

import re
from pathlib import Path

from unigen_ds.core.errors import ConfigError
from unigen_ds.migration.commands import Command, read_mapping
from unigen_ds.migration.draft import Draft, boolean, continue_from, number, recipe, whole

_RECIPES = {"90": "decoder_lm_90m", "300": "decoder_lm_300m"}


def yaml_file(command: Command) -> Draft:
    """Of ``train_fsdp.py``. Without the file (``config/train300M_fsdp.yaml``) its size alone is known, by its name."""
    files = [Path(name) for name in command.files if name.endswith((".yaml", ".yml", ".json"))]
    if len(files) != 1:
        raise ConfigError(f"{len(files)} YAML files are given", allowed="train_fsdp.py CONFIG.yaml, or that file alone")
    file = files[0]
    size = re.search(r"(90|300)m", file.name.lower())
    name = _RECIPES[size[1]] if size else "decoder_lm_90m"
    values = recipe(name)
    values["optim_wrapper"]["precision"] = "auto"
    values["visualizer"] = {"vis_backends": [{"type": "TensorboardVisBackend", "save_dir": "./tensorboard"}]}
    values["work_dir"] = "checkpoints"
    values["default_hooks"]["logger"] = {"type": "LoggerHook", "interval": 1, "unit": "update"}
    command.files.remove(str(file) if str(file) in command.files else command.files[0])
    read_too = file.is_file()
    if read_too:
        command.given[:0] = read_mapping(file)
    draft = Draft(values, command, what=f"The FSDP trainer of decoder LMs ({file.name})")
    draft.num_given += 1
    if size:
        draft.comments["model"] = f"the shipped config {name}, by the name {file.name}"
    if not size:
        draft.notes.append(f"The name {file.name} states no size (90M or 300M): the model is that of decoder_lm_90m.")
    if not read_too:
        draft.leave(str(file), "there is no such file here, so its keys are not known: run it where the file is")
    _keys(draft)
    _flags(draft)
    draft.finish({"vocab_size": "model.llm.vocab_size follows from the tokenizer"})
    return draft


def _keys(draft: Draft) -> None:
    sharded, one = draft.take("fsdp", kind=boolean)
    if one is not None:
        draft.set("backend.type", "fsdp", of=one)
        if not sharded:
            draft.set("backend.sharding_strategy", "NO_SHARD", of=one)
    draft.carry("backend.sharding_strategy", "sharding_strategy")
    draft.carry("world_size", "world_size", kind=whole)
    compiled, one = draft.take("compile", kind=boolean)
    if one is not None:
        draft.set("model.compile", compiled, of=one)
    total, one = draft.take("train_batch", kind=whole)
    if one is not None:
        draft.remove("train_dataloader.batch_size")
        draft.set("train_dataloader.global_batch_size", total, of=one)
        draft.set("optim_wrapper.accumulative_counts", 1)
        draft.notes.append(
            "global_batch_size is split among the processes, in one iteration; with train_dataloader.batch_size, the"
            " sequences that fit into memory, and optim_wrapper.accumulative_counts it is split further."
        )
    each, one = draft.take("batch_size", kind=whole)
    if one is not None and total is None:
        draft.set("train_dataloader.batch_size", each, of=one)
    elif one is not None:
        counts, rest = divmod(total, each * (draft.get("world_size") or total + 1))
        if rest or not counts:
            draft.leave(one.shown, f"with train_batch {total} the number of processes decides it")
        else:
            draft.set("optim_wrapper.accumulative_counts", counts, of=one)
    draft.carry("optim_wrapper.optimizer.lr", "lr", "learning_rate", kind=number)
    draft.carry("optim_wrapper.optimizer.weight_decay", "weight_decay", kind=number)
    draft.carry("train_dataloader.seq_length", "block_size", "seq_length", "max_sequence_length", kind=whole)
    if "train_dataloader.seq_length" in draft.comments:
        draft.set("model.llm.max_position_embeddings", draft.get("train_dataloader.seq_length"))
    draft.carry("model.dropout", "dropout", kind=number)
    draft.carry("train_dataloader.dataset.data_path", "train_data_path", "data_path")
    draft.carry("train_dataloader.num_workers", "num_workers", kind=whole)


def _flags(draft: Draft) -> None:
    path, one = draft.take("resume_from")
    if one is not None:
        continue_from(draft, path, of=one)
