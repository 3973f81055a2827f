"""A guide's name and what its user has -> the text of a config, checked: ``migrate``.

Each trainer has a table of names (path of a config -> kind and the names there) and a function for what no row can
state. What a guide does not state is that of a shipped config.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unigen_ds.config.paths import is_hub_name
from unigen_ds.core.choices import GUIDES
from unigen_ds.core.errors import ConfigError, UnknownKey, nearest, raise_any
from unigen_ds.migration.commands import MAPPINGS, Command, read_command
from unigen_ds.migration.draft import Draft, Table, assignment, boolean, number, recipe, text, whole_number
from unigen_ds.migration.xtuner import xtuner_config

_CLASS = re.compile(r"(?!model\.|tokenizer\.)([\w.\[\]]+)\.type is ")
"""An error about the class of a component."""


def migrate(guide: str, words: Sequence[str], *, check: Callable[[dict[str, Any]], Any]) -> Draft:
    """Translate ``words`` (as of ``read_command``) of the trainer that a guide, one of ``GUIDES``, describes.

    ``check`` raises ``ConfigError`` for a wrong config; unknown keys and classes become a comment. Raises it for an
    unknown guide, an unreadable file, and values that no config may have.
    """
    if guide not in _READERS:
        raise ConfigError(f"no guide is called {guide!r}", remedy=nearest(guide, GUIDES))
    draft = _READERS[guide](read_command(words))
    while True:
        values = dict(draft.values)
        if isinstance(values.get("backend"), dict):  # a start compares the number of shards with that of its processes
            values["backend"] = {key: value for key, value in values["backend"].items() if key != "num_shard"}
        try:
            check(values)
            return draft
        except ConfigError as error:
            errors = [*error.parts] or [error]
        unknown = [(error.path, error.hint or "there is no such key here") for error in errors
                   if isinstance(error, UnknownKey)]  # fmt: skip
        classes = [(match[1], str(error)) for error in errors if (match := _CLASS.match(error.problem))]
        if not unknown and not classes:
            raise_any(errors)
        for path, why in unknown or classes[:1]:
            node, key = draft.parent(re.sub(r"\[(\d+)\]", r".\1", path))
            draft.omit(assignment(path, node.pop(key)), why)


# ---- BAGEL: exported variables of train_unified_fsdp.sh, flags of train_unified_generation.py -----------------------

_BAGEL: Table = {
    "train_dataloader.dataset.data_path": (text, ("train_data_path",)),
    "train_dataloader.batch_size": (whole_number, ("batch_size",)),
    "train_dataloader.num_workers": (whole_number, ("num_workers",)),
    "optim_wrapper.accumulative_counts": (whole_number, ("gradient_accumulation_steps",)),
    "optim_wrapper.optimizer.lr": (number, ("learning_rate", "lr")),
    "optim_wrapper.optimizer.weight_decay": (number, ("weight_decay",)),
    "optim_wrapper.clip_grad.max_norm": (number, ("max_grad_norm",)),
    "loss_weights.text": (number, ("text_loss_weight",)),
    "loss_weights.image": (number, ("image_loss_weight",)),
    "work_dir": (text, ("output_dir", "results_dir")),
    "checkpoint_dir": (text, ("checkpoint_dir",)),
    "randomness.seed": (whole_number, ("seed",)),
    "default_hooks.checkpoint.interval": (whole_number, ("save_every", "save_steps")),
    "default_hooks.checkpoint.max_keep_ckpts": (whole_number, ("save_total_limit",)),
    "default_hooks.logger.interval": (whole_number, ("log_every", "logging_steps")),
    "model.compile": (boolean, ("compile",)),
    "model.activation_checkpointing": (boolean, ("gradient_checkpointing",)),
    "backend.sharding_strategy": (text, ("sharding_strategy",)),
    "backend.cpu_offload": (boolean, ("cpu_offload",)),
}
_PARTS = ("llm", "vit", "vae")


def exported_variables(command: Command) -> Draft:
    """Translate ``scripts/train_unified_fsdp.sh``: BAGEL with FSDP, which averages weights with a decay of 0.9999."""
    values = {
        "backend": {"type": "fsdp", "sharding_strategy": "HYBRID_SHARD"},
        "custom_hooks": [{"type": "EMAHook", "momentum": 0.0001}],
        "visualizer": {"vis_backends": [{"type": "WandbVisBackend"}]},
        "train_cfg": {"max_updates": 50000},
        "work_dir": "results",
    }
    draft = _bagel_draft(command, values, what="BAGEL's FSDP trainer (exported variables)", warmup=1000)
    draft.values["model"].setdefault("activation_checkpointing", True)
    return draft


def flags(command: Command) -> Draft:
    """Translate ``train_unified_generation.py``: BAGEL on one or several GPUs, each with a whole copy."""
    several = "torchrun" in command.starts
    backend = {"type": "fsdp", "sharding_strategy": "NO_SHARD"} if several else {"type": "single"}
    values = {"train_cfg": {"max_epochs": 3}, "work_dir": "outputs/unified_training", "backend": backend}
    return _bagel_draft(command, values, what="The unified generation trainer (flags)", warmup=0, precision="fp32")


def _bagel_draft(command: Command, values: dict[str, Any], *, what: str, warmup: int, **wrapper: Any) -> Draft:
    """The guides' example values, and of what they do not state those of ``bagel_7b_fsdp``."""
    example = recipe("bagel_7b_fsdp")
    wrapper = {**example["optim_wrapper"], **wrapper, "accumulative_counts": 8}
    draft = Draft({
        "model": {"type": "UnifiedModel", "pretrained": example["model"]["pretrained"], "freeze": ["vae"]},
        "tokenizer": example["tokenizer"],
        "processor": example["processor"],
        "train_dataloader": {
            "batch_size": 1, "num_workers": 1, "seq_length": example["train_dataloader"]["seq_length"],
            "dataset": {"type": "UnifiedGenerationDataset", "data_path": "data/train.jsonl"},
        },
        "optim_wrapper": {**wrapper, "optimizer": {**wrapper["optimizer"], "lr": 1e-5}},
        "loss_weights": {"text": 1.0, "image": 1.0},
        "default_hooks": {
            "logger": {"type": "LoggerHook", "interval": 10, "unit": "update"},
            "checkpoint": {"type": "CheckpointHook", "unit": "update", "interval": 1000, "filename_tmpl": "step_{}"},
        },
        "randomness": {"seed": 42},
        **values,
    }, command, what=what)  # fmt: skip
    _bagel_model(draft)
    draft.carry_all(_BAGEL)
    if draft.carry("train_dataloader.seq_length", "max_sequence_length", kind=whole_number):
        draft.set("train_dataloader.overflow", "truncate")
        draft.notes.append("overflow='truncate' cuts texts, never an image: a longer image is skipped and counted.")
    limits = {"max_updates": draft.take("total_steps", number), "max_epochs": draft.take("num_epochs", number)}
    if limits := {key: value for key, value in limits.items() if value is not None}:
        draft.values["train_cfg"] = limits
    if (path := draft.take("val_data_path")) is not None:
        validation = {"dataset": {"type": "UnifiedGenerationDataset", "data_path": path}}
        draft.set("val_dataloader", validation if path else None)
    for name in ("wandb_project", "wandb_run_name", "wandb_entity"):
        if (value := draft.take(name)) is not None:
            if not draft.get("visualizer.vis_backends"):
                draft.set("visualizer.vis_backends", [{"type": "WandbVisBackend"}])
            draft.set(f"visualizer.vis_backends.0.{name.rpartition('_')[2]}", value)
    for name in ("bf16", "fp16"):
        if (is_on := draft.take(name, boolean)) is not None:
            draft.set("optim_wrapper.precision", name if is_on else "fp32")
    shards, strategy = draft.take("num_shard", whole_number), draft.get("backend.sharding_strategy")
    if shards is not None and strategy != "HYBRID_SHARD":
        draft.omit(draft.sources["num_shard"], f"{strategy} shards over all processes, HYBRID_SHARD alone over a part")
    elif shards is not None:  # None: the processes of a node
        is_node = draft.command.launch.get("nproc_per_node") == str(shards)
        draft.set("backend.num_shard", None if is_node else shards)
    _warmup(draft, default=warmup)
    newest = draft.take("auto_resume", boolean)
    for name in ("resume_from", "resume_from_checkpoint"):
        path = draft.take(name)
        if path and newest:
            draft.set("load_from", path)
            draft.notes.append(
                f"Both auto_resume and {name} are given: the newest checkpoint of the work dir is resumed; where there"
                f" is none, the weights of {name} are loaded and the training starts at 0."
            )
        elif path:
            draft.continue_from(path)
    if newest is not None and (newest or draft.get("resume") is None):
        draft.set("resume", "auto" if newest else False)
    return draft.finish({f"{part}_path": "the published directory of model_path has it" for part in _PARTS})


def _bagel_model(draft: Draft) -> None:
    """A published directory, or its three parts; what is frozen."""
    folder = draft.take("model_path")
    if folder is not None:
        draft.set("model.pretrained", folder)
        draft.set("tokenizer.path", folder)
    elif draft.carry("model.pretrained.llm", "llm_path"):
        draft.set("tokenizer.path", draft.get("model.pretrained.llm"))
        draft.set("model.copy_init_moe", True)
    for part in ("vit", "vae") if folder is None else ():
        draft.carry(f"model.pretrained.{part}", f"{part}_path")
    freeze = {part: draft.take(f"freeze_{part}", boolean) for part in _PARTS}
    draft.set("model.freeze", [*(part for part in ("vit", "llm") if freeze[part]), "vae"])
    if freeze["vae"] is False:
        draft.omit(draft.sources["freeze_vae"], "the autoencoder is always frozen: it has no trainable form here")


def _warmup(draft: Draft, *, default: int) -> None:
    """A linear warm-up by updates, and the curve after it: cosine, linear or constant."""
    steps = draft.take("warmup_steps", whole_number)
    begin = default if steps is None else steps
    curves: list[dict[str, Any]] = []
    if begin:
        curves.append({"type": "LinearLR", "unit": "update", "begin": 0, "end": begin, "start_factor": 1 / begin})
    names = ("lr_scheduler", "lr_scheduler_type", "scheduler")
    schedule = next((value for name in names if (value := draft.take(name, _schedule)) is not None), None)
    if schedule == "cosine":
        curves.append({"type": "CosineAnnealingLR", "unit": "update", "begin": begin})
    elif schedule == "linear":
        curves.append({"type": "LinearLR", "unit": "update", "begin": begin, "start_factor": 1.0, "end_factor": 0.0})
    draft.set("param_scheduler", curves)


def _schedule(value: Any) -> str:
    name = text(value).lower()
    if name not in ("linear", "cosine", "constant"):
        raise ValueError(f"{value!r} is none of linear, cosine, constant")
    return name


# ---- decoder language models: train_fsdp.py CONFIG.yaml -------------------------------------------------------------

_DECODER: Table = {
    "backend.sharding_strategy": (text, ("sharding_strategy",)),
    "world_size": (whole_number, ("world_size",)),
    "model.compile": (boolean, ("compile",)),
    "model.dropout": (number, ("dropout",)),
    "optim_wrapper.optimizer.lr": (number, ("lr", "learning_rate")),
    "optim_wrapper.optimizer.weight_decay": (number, ("weight_decay",)),
    "train_dataloader.dataset.data_path": (text, ("train_data_path", "data_path")),
    "train_dataloader.num_workers": (whole_number, ("num_workers",)),
}


def yaml_file(command: Command) -> Draft:
    """Translate ``train_fsdp.py``. Without its file (``config/train300M_fsdp.yaml``) the size alone is known."""
    files = [Path(name) for name in command.files if name.endswith(MAPPINGS)]
    if len(files) != 1:
        raise ConfigError(f"{len(files)} YAML files are given", allowed="train_fsdp.py CONFIG.yaml, or that file alone")
    file = files[0]
    name = "decoder_lm_300m" if "300m" in file.name.lower() else "decoder_lm_90m"
    values = recipe(name)
    values["optim_wrapper"]["precision"] = "auto"
    values["visualizer"] = {"vis_backends": [{"type": "TensorboardVisBackend", "save_dir": "./tensorboard"}]}
    values["work_dir"] = "checkpoints"
    values["default_hooks"]["logger"] = {"type": "LoggerHook", "interval": 1, "unit": "update"}
    if not file.is_file():
        command.files.remove(str(file))
        command.others.append((str(file), "there is no such file here, so its keys are not known: run it where it is"))
    draft = Draft(values, command, what=f"The FSDP trainer of decoder LMs ({file.name})")
    draft.notes.append(f"The model is that of the shipped config {name}, by the name of the file.")
    draft.carry_all(_DECODER)
    if draft.carry("train_dataloader.seq_length", "block_size", "seq_length", "max_sequence_length", kind=whole_number):
        draft.set("model.llm.max_position_embeddings", draft.get("train_dataloader.seq_length"))
    shards = draft.take("fsdp", boolean)
    if shards is False:
        draft.set("backend.sharding_strategy", "NO_SHARD")
    total, each = draft.take("train_batch", whole_number), draft.take("batch_size", whole_number)
    processes = draft.get("world_size")
    if total is not None:  # that of an update; batch_size is that of a process
        draft.values["train_dataloader"].pop("batch_size", None)
        draft.set("train_dataloader.global_batch_size", total)
        draft.set("optim_wrapper.accumulative_counts", 1)
    if total is None and each is not None:
        draft.set("train_dataloader.batch_size", each)
    elif each is not None and processes and total % (each * processes) == 0:
        draft.set("optim_wrapper.accumulative_counts", total // (each * processes))
    elif each is not None:
        draft.omit(draft.sources["batch_size"], f"with train_batch {total} the number of processes decides it")
    if (path := draft.take("resume_from")) is not None:
        draft.continue_from(path)
    return draft.finish({"vocab_size": "model.llm.vocab_size follows from the tokenizer"})


# ---- nanoVLM: flags of train.py, keys of TrainConfig and VLMConfig --------------------------------------------------

_RATES = "optim_wrapper.paramwise_cfg.groups"
_FILTERS = "train_dataloader.dataset.filters"
_TASKS = "mmstar,mmmu_val,ocrbench,textvqa_val,docvqa_val,scienceqa,mme,infovqa_val,chartqa"


def _rate(value: Any) -> float | int:
    """A learning rate of 0 or less freezes its part, here as there: ``lr=0``."""
    return max(number(value), 0)


_NANOVLM: Table = {
    f"{_RATES}.0.lr": (_rate, ("lr_mp",)),
    f"{_RATES}.1.lr": (_rate, ("lr_vision_backbone", "lr_vision")),
    f"{_RATES}.2.lr": (_rate, ("lr_language_backbone", "lr_language")),
    "tokenizer.path": (text, ("lm_tokenizer",)),
    "train_dataloader.batch_size": (whole_number, ("batch_size",)),
    "train_dataloader.num_workers": (whole_number, ("num_workers",)),
    "train_dataloader.seq_length": (whole_number, ("seq_length", "max_length", "lm_max_length")),
    "train_dataloader.max_sample_tokens": (whole_number, ("max_sample_length",)),
    "train_dataloader.packing.window": (whole_number, ("num_of_sequences",)),
    "train_dataloader.packing.max_tiles": (whole_number, ("max_images_per_knapsack",)),
    "train_dataloader.dataset.streaming": (boolean, ("stream_dataset",)),
    **{f"{_FILTERS}.0.{name}_min_rating": (whole_number, (f"{name}_min_rating",))
       for name in ("relevance", "image_correspondence", "visual_dependency", "formatting")},
    f"{_FILTERS}.1.max_tiles": (whole_number, ("max_images_per_example",)),
    "processor.max_image_size": (whole_number, ("max_img_size",)),
    "optim_wrapper.accumulative_counts": (whole_number, ("gradient_accumulation_steps",)),
    "optim_wrapper.clip_grad.max_norm": (number, ("max_grad_norm",)),
    "train_cfg.max_updates": (whole_number, ("max_training_steps", "max_steps")),
    "default_hooks.logger.statistics_interval": (whole_number, ("stats_log_interval",)),
    "world_size": (whole_number, ("world_size",)),
    "model.compile": (boolean, ("compile",)),
    "model.pixel_shuffle_factor": (whole_number, ("mp_pixel_shuffle_factor",)),
    "model.pretrained.vit": (text, ("vit_model_type",)),
    "model.pretrained.llm": (text, ("lm_model_type",)),
}  # fmt: skip


def train_flags(command: Command) -> Draft:
    """Translate ``train.py``, or a YAML file of the two configs' keys."""
    values = recipe("nanovlm_460m")
    backbones = {"vit": "google/siglip2-base-patch16-512", "llm": "HuggingFaceTB/SmolLM2-360M-Instruct"}
    values["model"] = {"type": "VLM", "pretrained": backbones, "pixel_shuffle_factor": 4}
    values["default_hooks"]["checkpoint"]["filename_tmpl"] = "step_{}"
    values["visualizer"] = {"run_name": "nanovlm", "vis_backends": [{"type": "WandbVisBackend", "project": "nanoVLM"}]}
    values["work_dir"] = "checkpoints/{run_name}"
    draft = Draft(values, command, what="nanoVLM's train.py")
    draft.carry_all(_NANOVLM)
    loads, folder = draft.take("resume_from_vlm_checkpoint", boolean), draft.take("vlm_checkpoint_path")
    if folder is not None and loads:  # one name has two meanings there
        draft.set("model", {"type": "VLM", "pretrained": folder})
        draft.notes.append(
            "As in nanoVLM only the weights of that folder are read, and the training starts at 0. A checkpoint of this"
            f" project continues in full: resume={folder!r} instead."
        )
    elif folder is not None:
        draft.set("work_dir", f"{folder.rstrip('/')}/{{run_name}}")
    elif loads:
        draft.omit(draft.sources["resume_from_vlm_checkpoint"], "there is no vlm_checkpoint_path")
    longest = "train_dataloader.max_sample_tokens"
    if (draft.get(longest) or 0) > draft.get("train_dataloader.seq_length"):
        draft.drop(longest, "a sample has at most the tokens of a sequence: seq_length is smaller")
    dataset = draft.get("train_dataloader.dataset")
    if not draft.carry("train_dataloader.dataset.data_path", "train_dataset_path"):
        draft.notes.append("train_dataset_path is not given: edit train_dataloader.dataset.data_path.")
    elif is_hub_name(dataset["data_path"]):
        dataset["format"] = {"type": "huggingface"}
    if dataset.get("streaming"):
        dataset.pop("index_workers", None)
    if names := draft.take("train_dataset_name", _names):
        datasets = [{**dataset, "format": {"type": "huggingface", "config": name}, "on_error": "skip", "name": name}
                    for name in names]  # fmt: skip
        draft.set("train_dataloader.dataset", datasets)
    _nanovlm_hooks(draft)
    return draft.finish({
        "val_size": "validation is a share of the records, not a number: val_dataloader.split",
        "num_gpus": "the launcher sets the number of processes",
    })  # fmt: skip


def _names(value: Any) -> list[str]:
    return [*value] if isinstance(value, (list, tuple)) else text(value).replace(",", " ").split()


def _nanovlm_hooks(draft: Draft) -> None:
    """Evaluation, benchmarks, trackers and the upload."""
    hooks = draft.values["custom_hooks"]
    if draft.carry("custom_hooks.0.interval", "eval_interval", kind=whole_number):
        draft.set("default_hooks.checkpoint.interval", hooks[0]["interval"])
    evaluates = draft.take("eval_in_epochs", boolean)
    benchmarks, tasks = draft.take("use_lmms_eval", boolean), draft.take("lmms_eval_tasks")
    repo = draft.take("hf_repo_name")
    if benchmarks:
        command = f"python tools/evaluate.py {{checkpoint}} --lmms-tasks {tasks or _TASKS}"
        command += " --step {step} --out {out}"
        interval = 2 * hooks[0]["interval"]
        hooks.append({"type": "AsyncEvaluateHook", "command": command, "interval": interval, "unit": "update"})
    if repo and repo != "None":
        hooks.append({"type": "PushToHubHook", "repo": repo})
    if evaluates is False:
        hooks.pop(0)
        draft.values["val_dataloader"] = None
    off, on = draft.take("no_log_wandb", boolean), draft.take("log_wandb", boolean)
    if off or on is False:
        draft.set("visualizer.vis_backends", [])
    entity = draft.take("wandb_entity")
    if entity is not None and draft.get("visualizer.vis_backends"):
        draft.set("visualizer.vis_backends.0.entity", entity)
    elif entity is not None:
        draft.omit(draft.sources["wandb_entity"], "W&B is off")


_READERS: dict[str, Callable[[Command], Draft]] = {
    "unified_fsdp": exported_variables,
    "unified_generation": flags,
    "decoder_fsdp": yaml_file,
    "xtuner": xtuner_config,
    "nanovlm": train_flags,
}
