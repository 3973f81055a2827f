"""BAGEL's two trainers: exported variables of ``train_unified_fsdp.sh``, flags of ``train_unified_generation.py``.

Both train a published BAGEL directory on text and images and share most names. What neither guide states (image sizes,
condition dropout, betas) is that of the shipped config ``bagel_7b_fsdp``.
"""

from __future__ import annotations

from typing import Any

from unigen_ds.migration.commands import Command, read_files, sources
from unigen_ds.migration.draft import Draft, Table, Unusable, boolean, number, recipe, text, whole

_PARTS = ("llm", "vit", "vae")
_DATASET = "UnifiedGenerationDataset"
_ALWAYS_FROZEN = "the autoencoder is always frozen: it has no trainable form here"
_WHY = {f"{part}_path": "the published directory of model_path has it" for part in _PARTS}
_TABLE: Table = {
    "train_dataloader.dataset.data_path": (text, ("train_data_path",)),
    "train_dataloader.batch_size": (whole, ("batch_size",)),
    "train_dataloader.num_workers": (whole, ("num_workers",)),
    "optim_wrapper.accumulative_counts": (whole, ("gradient_accumulation_steps",)),
    "optim_wrapper.optimizer.lr": (number, ("learning_rate", "lr")),
    "optim_wrapper.optimizer.weight_decay": (number, ("weight_decay",)),
    "optim_wrapper.clip_grad.max_norm": (number, ("max_grad_norm",)),
    "loss_weights.text": (number, ("text_loss_weight",)),
    "loss_weights.image": (number, ("image_loss_weight",)),
    "work_dir": (text, ("output_dir", "results_dir")),
    "checkpoint_dir": (text, ("checkpoint_dir",)),
    "randomness.seed": (whole, ("seed",)),
    "default_hooks.checkpoint.interval": (whole, ("save_every", "save_steps")),
    "default_hooks.checkpoint.max_keep_ckpts": (whole, ("save_total_limit",)),
    "default_hooks.logger.interval": (whole, ("log_every", "logging_steps")),
    "model.compile": (boolean, ("compile",)),
    "model.activation_checkpointing": (boolean, ("gradient_checkpointing",)),
}


def _bagel() -> dict[str, Any]:
    """The guides' example values, and of what they do not state the shipped config's."""
    shipped = recipe("bagel_7b_fsdp")
    loader, wrapper = shipped["train_dataloader"], shipped["optim_wrapper"]
    return {
        "model": {"type": "UnifiedModel", "pretrained": shipped["model"]["pretrained"], "freeze": ["vae"]},
        "tokenizer": shipped["tokenizer"],
        "processor": shipped["processor"],
        "train_dataloader": {
            "batch_size": 1, "num_workers": 1, "seq_length": loader["seq_length"],
            "dataset": {"type": _DATASET, "data_path": "data/train.jsonl"},
        },
        "optim_wrapper": {
            "optimizer": {**wrapper["optimizer"], "lr": 1e-5}, "accumulative_counts": 8,
            "clip_grad": wrapper["clip_grad"], "precision": wrapper["precision"],
        },
        "loss_weights": {"text": 1.0, "image": 1.0},
        "default_hooks": {
            "logger": {"type": "LoggerHook", "interval": 10, "unit": "update"},
            "checkpoint": {"type": "CheckpointHook", "unit": "update", "interval": 1000, "filename_tmpl": "step_{}"},
        },
        "custom_hooks": [],
        "randomness": {"seed": 42},
    }  # fmt: skip


def exported_variables(command: Command) -> Draft:
    """Of ``scripts/train_unified_fsdp.sh``: BAGEL with FSDP."""
    read_files(command)
    values = _bagel() | {
        "backend": {"type": "fsdp", "sharding_strategy": "HYBRID_SHARD"},
        "custom_hooks": [{"type": "EMAHook", "momentum": 0.0001}],
        "visualizer": {"vis_backends": [{"type": "WandbVisBackend"}]},
        "train_cfg": {"max_updates": 50000},
        "work_dir": "results",
    }
    values["model"]["activation_checkpointing"] = True
    draft = Draft(values, command, what="BAGEL's FSDP trainer (exported variables)")
    draft.notes.append("The old trainer averages the weights by itself: EMAHook, with BAGEL's decay of 0.9999.")
    _shared(draft)
    _sharding(draft)
    _warmup(draft, default=1000)
    draft.finish(_WHY)
    return draft


def flags(command: Command) -> Draft:
    """Of ``train_unified_generation.py``: BAGEL on one or several GPUs."""
    read_files(command)
    values = _bagel() | {"train_cfg": {"max_epochs": 3}, "work_dir": "outputs/unified_training"}
    several = "torchrun" in command.starts
    values["backend"] = {"type": "fsdp", "sharding_strategy": "NO_SHARD"} if several else {"type": "single"}
    values["optim_wrapper"]["precision"] = "fp32"
    draft = Draft(values, command, what="The unified generation trainer (flags)")
    if several:
        draft.notes.append("Each GPU has a whole copy, as before; --backend fsdp:FULL_SHARD needs less memory.")
    _shared(draft)
    for name in ("bf16", "fp16"):
        enabled, setting = draft.take(name, kind=boolean)
        if setting is not None:
            draft.set("optim_wrapper.precision", name if enabled else "fp32", of=setting)
    _warmup(draft, default=0)
    draft.finish(_WHY)
    return draft


def _shared(draft: Draft) -> None:
    """What both have."""
    _model(draft)
    draft.carry_all(_TABLE)
    _validation(draft)
    for name, key in (("total_steps", "max_updates"), ("num_epochs", "max_epochs")):
        value, setting = draft.take(name, kind=number)
        if setting is not None:
            if not any(path.startswith("train_cfg") for path in draft.comments):
                draft.values["train_cfg"] = {}
            draft.set(f"train_cfg.{key}", value, of=setting)
    if draft.carry("train_dataloader.seq_length", "max_sequence_length", kind=whole) and (
        "train_dataloader.seq_length" in draft.comments
    ):
        draft.set("train_dataloader.overflow", "truncate")
        draft.notes.append("overflow='truncate' cuts texts, never an image: a longer image is skipped and counted.")
    for key, names in (("project", ["wandb_project"]), ("name", ["wandb_run_name", "wandb_name"]),
                       ("entity", ["wandb_entity"])):  # fmt: skip
        value, setting = draft.take(*names)
        if setting is not None:
            if not draft.get("visualizer.vis_backends"):
                draft.set("visualizer.vis_backends", [{"type": "WandbVisBackend"}])
            draft.set(f"visualizer.vis_backends.0.{key}", value, of=setting)
    _resume(draft)


def _model(draft: Draft) -> None:
    """A published directory, or its three parts; what is frozen."""
    folder, setting = draft.take("model_path")
    if setting is not None:
        draft.set("model.pretrained", folder, of=setting)
        draft.set("tokenizer.path", folder, of=setting)
    for part in _PARTS if setting is None else ():
        path, one = draft.take(f"{part}_path")
        if one is not None:
            draft.set(f"model.pretrained.{part}", path, of=one)
        if one is not None and part == "llm":
            draft.set("tokenizer.path", path, of=one)
            draft.set("model.copy_init_moe", True)
    frozen, settings = ["vae"], []
    for part in _PARTS:
        freeze, one = draft.take(f"freeze_{part}", kind=boolean)
        if one is not None and part == "vae" and not freeze:
            draft.omit(one.source, _ALWAYS_FROZEN)
        elif one is not None:
            settings.append(one)
            frozen = [part] * (freeze and part != "vae") + frozen
    draft.set("model.freeze", frozen, of=sources(settings))


def _validation(draft: Draft) -> None:
    path, setting = draft.take("val_data_path")
    if setting is not None:
        data = {"dataset": {"type": _DATASET, "data_path": path}} if path else None
        draft.set("val_dataloader", data, of=setting)
    if path:
        draft.notes.append("EvaluateHook(interval=..., save_best='val/loss') in custom_hooks states when to evaluate.")


def _sharding(draft: Draft) -> None:
    strategy = draft.carry("backend.sharding_strategy", "sharding_strategy")
    draft.carry("backend.cpu_offload", "cpu_offload", kind=boolean)
    shards, setting = draft.take("num_shard", kind=whole)
    if setting is not None and strategy != "HYBRID_SHARD":
        draft.omit(setting.source, f"{strategy} shards over all processes; only HYBRID_SHARD has a number of shards")
    elif setting is not None:
        of_node = draft.command.launch.get("nproc_per_node") == str(shards)
        draft.set("backend.num_shard", None if of_node else shards, of=setting)
        if of_node:
            draft.notes.append(f"num_shard=None: the processes of a node, which are the {shards} of nproc_per_node.")


def _warmup(draft: Draft, *, default: int) -> None:
    """A linear warm-up by updates, and the curve after it: cosine, linear or constant."""
    steps, setting = draft.take("warmup_steps", kind=whole)
    begin = default if setting is None else steps
    curves: list[dict[str, Any]] = []
    if begin:
        curves.append({"type": "LinearLR", "unit": "update", "begin": 0, "end": begin, "start_factor": 1 / begin})
    schedule, of = draft.take("lr_scheduler", "lr_scheduler_type", "scheduler", kind=_schedule)
    if schedule == "cosine":
        curves.append({"type": "CosineAnnealingLR", "unit": "update", "begin": begin})
    elif schedule == "linear":
        curves.append({"type": "LinearLR", "unit": "update", "begin": begin, "start_factor": 1.0, "end_factor": 0.0})
    elif of is None:
        draft.notes.append(
            "No schedule is given: the learning rate stays constant after its warm-up. The guide advises a cosine:"
            " dict(type='CosineAnnealingLR', unit='update', begin=...) in param_scheduler."
        )
    draft.set("param_scheduler", curves, of=sources((setting, of)))


def _schedule(value: Any) -> str:
    name = text(value).lower()
    if name not in ("linear", "cosine", "constant"):
        raise Unusable(f"{value!r} is none of linear, cosine, constant")
    return name


def _resume(draft: Draft) -> None:
    """From a named checkpoint, or from the newest one."""
    path, setting = draft.take("resume_from", "resume_from_checkpoint")
    newest, auto = draft.take("auto_resume", kind=boolean)
    if auto is not None and (newest or not path):
        draft.set("resume", "auto" if newest else False, of=auto)
    if setting is None:
        return
    if path and not newest:
        draft.continue_from(path, of=setting)
        return
    draft.set("load_from", path or None, of=setting)
    if path:
        draft.notes.append(
            "Both auto_resume and resume_from are given: the newest checkpoint of the work dir is resumed; where there"
            " is none, the weights of resume_from are loaded and the training starts at 0."
        )
