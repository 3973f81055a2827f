"""The FSDP trainer of decoder language models: ``train_fsdp.py CONFIG.yaml``. Its recipes are two of this project's."""

from __future__ import annotations

import re
from pathlib import Path

from unigen_ds.core.errors import ConfigError
from unigen_ds.migration.commands import MAPPINGS, Command, read_mapping
from unigen_ds.migration.draft import Draft, Table, boolean, number, recipe, text, whole

_RECIPES = {"90": "decoder_lm_90m", "300": "decoder_lm_300m"}
_TABLE: Table = {
    "backend.sharding_strategy": (text, ("sharding_strategy",)),
    "world_size": (whole, ("world_size",)),
    "model.compile": (boolean, ("compile",)),
    "model.dropout": (number, ("dropout",)),
    "optim_wrapper.optimizer.lr": (number, ("lr", "learning_rate")),
    "optim_wrapper.optimizer.weight_decay": (number, ("weight_decay",)),
    "train_dataloader.seq_length": (whole, ("block_size", "seq_length", "max_sequence_length")),
    "train_dataloader.dataset.data_path": (text, ("train_data_path", "data_path")),
    "train_dataloader.num_workers": (whole, ("num_workers",)),
}


def yaml_file(command: Command) -> Draft:
    """Of ``train_fsdp.py``. Without the file (``config/train300M_fsdp.yaml``) its size alone is known, by its name."""
    files = [name for name in command.files if name.endswith(MAPPINGS)]
    if len(files) != 1:
        raise ConfigError(f"{len(files)} YAML files are given", allowed="train_fsdp.py CONFIG.yaml, or that file alone")
    command.files.remove(files[0])
    file = Path(files[0])
    size = re.search(r"(90|300)m", file.name.lower())
    name = _RECIPES[size[1]] if size else "decoder_lm_90m"
    values = recipe(name)
    values["optim_wrapper"]["precision"] = "auto"
    values["visualizer"] = {"vis_backends": [{"type": "TensorboardVisBackend", "save_dir": "./tensorboard"}]}
    values["work_dir"] = "checkpoints"
    values["default_hooks"]["logger"] = {"type": "LoggerHook", "interval": 1, "unit": "update"}
    if file.is_file():
        command.settings[:0] = read_mapping(file)
    draft = Draft(values, command, what=f"The FSDP trainer of decoder LMs ({file.name})")
    draft.num_settings += 1
    if size:
        draft.comments["model"] = f"the shipped config {name}, by the name {file.name}"
    else:
        draft.notes.append(f"The name {file.name} states no size (90M or 300M): the model is that of decoder_lm_90m.")
    if not file.is_file():
        draft.omit(str(file), "there is no such file here, so its keys are not known: run it where the file is")
    draft.carry_all(_TABLE)
    if "train_dataloader.seq_length" in draft.comments:
        draft.set("model.llm.max_position_embeddings", draft.get("train_dataloader.seq_length"))
    sharded, setting = draft.take("fsdp", kind=boolean)
    if setting is not None and not sharded:
        draft.set("backend.sharding_strategy", "NO_SHARD", of=setting)
    _batch(draft)
    path, setting = draft.take("resume_from")
    if setting is not None:
        draft.continue_from(path, of=setting)
    draft.finish({"vocab_size": "model.llm.vocab_size follows from the tokenizer"})
    return draft


def _batch(draft: Draft) -> None:
    """``train_batch`` is that of an update, ``batch_size`` that of a process."""
    total, setting = draft.take("train_batch", kind=whole)
    if setting is None:
        draft.carry("train_dataloader.batch_size", "batch_size", kind=whole)
        return
    draft.remove("train_dataloader.batch_size")
    draft.set("train_dataloader.global_batch_size", total, of=setting)
    draft.set("optim_wrapper.accumulative_counts", 1)
    draft.notes.append(
        "global_batch_size is split among the processes, in one iteration; with train_dataloader.batch_size, the"
        " sequences that fit into memory, and optim_wrapper.accumulative_counts it is split further."
    )
    each, setting = draft.take("batch_size", kind=whole)
    if setting is not None:
        counts, rest = divmod(total, each * (draft.get("world_size") or total + 1))
        if rest or not counts:
            draft.omit(setting.source, f"with train_batch {total} the number of processes decides it")
        else:
            draft.set("optim_wrapper.accumulative_counts", counts, of=setting)
