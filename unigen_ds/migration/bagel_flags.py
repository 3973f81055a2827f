"""BAGEL's two trainers: exported variables of ``train_unified_fsdp.sh``, flags of ``train_unified_generation.py``.

Both train a published BAGEL directory on text and images and share most names. What neither guide states (image sizes,
condition dropout, betas) is that of the shipped config ``bagel_7b_fsdp``.
"""

from __future__ import annotations

from typing import Any

from unigen_ds.migration.commands import Command, Given, read_files
from unigen_ds.migration.draft import Draft, Unusable, boolean, continue_from, number, recipe, text, whole

_PARTS = ("llm", "vit", "vae")
_SCHEDULES = ("linear", "cosine", "constant")
_WHY = {
    "vae_path": "the published directory of model_path has the autoencoder",
    "llm_path": "the published directory of model_path has the language model",
    "vit_path": "the published directory of model_path has the vision tower",
    "freeze_vae": "the autoencoder is always frozen: it has no trainable form here",
}


def _bagel() -> dict[str, Any]:
    """The guides' example values, and of what they do not state the shipped config's."""
    shipped = recipe("bagel_7b_fsdp")
    return {
        "model": {"type": "UnifiedModel", "pretrained": shipped["model"]["pretrained"], "freeze": ["vae"]},
        "tokenizer": shipped["tokenizer"],
        "processor": shipped["processor"],
        "train_dataloader": {
            "batch_size": 1,
            "num_workers": 1,
            "seq_length": shipped["train_dataloader"]["seq_length"],
            "dataset": {"type": "UnifiedGenerationDataset", "data_path": "data/train.jsonl"},
        },
        "optim_wrapper": {
            "optimizer": {**shipped["optim_wrapper"]["optimizer"], "lr": 1e-5},
            "accumulative_counts": 8,
            "clip_grad": shipped["optim_wrapper"]["clip_grad"],
            "precision": shipped["optim_wrapper"]["precision"],
        },
        "loss_weights": {"text": 1.0, "image": 1.0},
        "param_scheduler": [],
        "default_hooks": {
            "logger": {"type": "LoggerHook", "interval": 10, "unit": "update"},
            "checkpoint": {"type": "CheckpointHook", "unit": "update", "interval": 1000, "filename_tmpl": "step_{}"},
        },
        "custom_hooks": [],
        "randomness": {"seed": 42},
    }


def exported_variables(command: Command) -> Draft:
    """Of ``scripts/train_unified_fsdp.sh``: BAGEL with FSDP."""
    read_files(command)
    values = _bagel()
    values["model"]["activation_checkpointing"] = True
    values["backend"] = {"type": "fsdp", "sharding_strategy": "HYBRID_SHARD"}
    values["custom_hooks"] = [{"type": "EMAHook", "momentum": 0.0001}]
    values["visualizer"] = {"vis_backends": [{"type": "WandbVisBackend"}]}
    values["train_cfg"] = {"max_updates": 50000}
    values["work_dir"] = "results"
    draft = Draft(values, command, what="BAGEL's FSDP trainer (exported variables)")
    draft.notes.append(
        "The old trainer keeps an average of the weights by itself: EMAHook, with BAGEL's decay of 0.9999."
    )
    _shared(draft)
    _sharding(draft)
    _warmup(draft, default=1000)
    _resume(draft)
    draft.finish(_WHY)
    return draft


def flags(command: Command) -> Draft:
    """Of ``train_unified_generation.py``: BAGEL on one or several GPUs."""
    read_files(command)
    values = _bagel()
    several = "torchrun" in command.starts
    values["backend"] = {"type": "fsdp", "sharding_strategy": "NO_SHARD"} if several else {"type": "single"}
    values["optim_wrapper"]["precision"] = "fp32"
    values["train_cfg"] = {"max_epochs": 3}
    values["work_dir"] = "outputs/unified_training"
    draft = Draft(values, command, what="The unified generation trainer (flags)")
    if several:
        draft.notes.append(
            "Each GPU has a whole copy, as in the old trainer; --backend fsdp:FULL_SHARD needs less memory."
        )
    _shared(draft)
    _precision(draft)
    _warmup(draft, default=0)
    _resume(draft)
    draft.finish(_WHY)
    return draft


def _shared(draft: Draft) -> None:
    """What both have."""
    _model(draft)
    draft.carry("train_dataloader.dataset.data_path", "train_data_path")
    _validation(draft)
    draft.carry("train_dataloader.batch_size", "batch_size", kind=whole)
    draft.carry("train_dataloader.num_workers", "num_workers", kind=whole)
    draft.carry("optim_wrapper.accumulative_counts", "gradient_accumulation_steps", kind=whole)
    draft.carry("optim_wrapper.optimizer.lr", "learning_rate", "lr", kind=number)
    draft.carry("optim_wrapper.optimizer.weight_decay", "weight_decay", kind=number)
    draft.carry("optim_wrapper.clip_grad.max_norm", "max_grad_norm", kind=number)
    draft.carry("loss_weights.text", "text_loss_weight", kind=number)
    draft.carry("loss_weights.image", "image_loss_weight", kind=number)
    draft.carry("work_dir", "output_dir", "results_dir")
    draft.carry("checkpoint_dir", "checkpoint_dir")
    draft.carry("randomness.seed", "seed", kind=whole)
    draft.carry("default_hooks.checkpoint.interval", "save_every", "save_steps", kind=whole)
    draft.carry("default_hooks.checkpoint.max_keep_ckpts", "save_total_limit", kind=whole)
    draft.carry("default_hooks.logger.interval", "log_every", "logging_steps", kind=whole)
    _length(draft)
    _cut(draft)
    _wandb(draft)
    _boolean(draft, "model.compile", "compile")
    _boolean(draft, "model.activation_checkpointing", "gradient_checkpointing")


def _boolean(draft: Draft, path: str, name: str) -> None:
    value, one = draft.take(name, kind=boolean)
    if one is not None:
        draft.set(path, value, of=one)


def _model(draft: Draft) -> None:
    """A published directory, or its three parts; what is frozen."""
    folder, one = draft.take("model_path")
    if one is not None:
        draft.set("model.pretrained", folder, of=one)
        draft.set("tokenizer.path", folder, of=one)
    else:
        for part in _PARTS:
            path, one = draft.take(f"{part}_path")
            if one is not None:
                draft.set(f"model.pretrained.{part}", path, of=one)
                if part == "llm":
                    draft.set("tokenizer.path", path, of=one)
                    draft.set("model.copy_init_moe", True)
    for part in _PARTS:
        frozen, one = draft.take(f"freeze_{part}", kind=boolean)
        if one is None:
            continue
        if part == "vae" and not frozen:
            draft.leave(one.shown, _WHY["freeze_vae"])
            continue
        parts = [name for name in draft.get("model.freeze") if name != part] + [part] * frozen
        draft.set("model.freeze", parts)
        draft.comments["model.freeze"] = ", ".join(filter(None, [draft.comments.get("model.freeze"), one.shown]))


def _validation(draft: Draft) -> None:
    path, one = draft.take("val_data_path")
    if one is None:
        return
    found = {"dataset": {"type": "UnifiedGenerationDataset", "data_path": path}} if path else None
    draft.set("val_dataloader", found, of=one)
    if found:
        draft.notes.append(
            "The validation data are evaluated after every epoch; EvaluateHook(interval=..., save_best='val/loss') in"
            " custom_hooks changes that and keeps the best checkpoint."
        )


def _length(draft: Draft) -> None:
    """The end of the training: the names exclude each other."""
    for name, key in (("total_steps", "max_updates"), ("num_epochs", "max_epochs")):
        value, one = draft.take(name, kind=number)
        if one is not None:
            if draft.comments.get(f"train_cfg.{key}") is None and f"train_cfg.{key}" not in draft.comments:
                others = [k for k in draft.values["train_cfg"] if f"train_cfg.{k}" not in draft.comments]
                for other in others:
                    draft.remove(f"train_cfg.{other}")
            draft.set(f"train_cfg.{key}", value, of=one)


def _cut(draft: Draft) -> None:
    """Longer sequences are cut, as there."""
    value, one = draft.take("max_sequence_length", kind=whole)
    if one is not None:
        draft.set("train_dataloader.seq_length", value, of=one)
        draft.set("train_dataloader.overflow", "truncate")
        draft.notes.append(
            "overflow='truncate' cuts texts only, never an image: a longer image is skipped and counted."
        )


def _wandb(draft: Draft) -> None:
    names = {"project": ("wandb_project",), "name": ("wandb_run_name", "wandb_name"), "entity": ("wandb_entity",)}
    for key, given in names.items():
        value, one = draft.take(*given)
        if one is not None:
            if not draft.get("visualizer.vis_backends"):
                draft.set("visualizer.vis_backends", [{"type": "WandbVisBackend"}])
            draft.set(f"visualizer.vis_backends.0.{key}", value, of=one)


def _sharding(draft: Draft) -> None:
    strategy = draft.carry("backend.sharding_strategy", "sharding_strategy")
    shards, one = draft.take("num_shard", kind=whole)
    if one is not None and strategy == "HYBRID_SHARD" and draft.command.launch.get("nproc_per_node") == str(shards):
        draft.set("backend.num_shard", None, of=one)
        draft.notes.append(f"num_shard=None: the processes of a node, which are the {shards} of nproc_per_node.")
    elif one is not None and strategy == "HYBRID_SHARD":
        draft.set("backend.num_shard", shards, of=one)
    elif one is not None:
        draft.leave(one.shown, f"{strategy} shards over all processes; only HYBRID_SHARD has a number of shards")
    _boolean(draft, "backend.cpu_offload", "cpu_offload")


def _precision(draft: Draft) -> None:
    for name in ("bf16", "fp16"):
        wanted, one = draft.take(name, kind=boolean)
        if one is not None and wanted:
            draft.set("optim_wrapper.precision", name, of=one)
        elif one is not None:
            draft.set("optim_wrapper.precision", "fp32", of=one)


def _warmup(draft: Draft, *, default: int) -> None:
    """A linear warm-up by updates, and the curve after it: cosine, linear or constant."""
    steps, one = draft.take("warmup_steps", kind=whole)
    number_of = steps if one is not None else default
    curves: list[dict[str, Any]] = []
    if number_of:
        curves.append(
            {"type": "LinearLR", "unit": "update", "begin": 0, "end": number_of, "start_factor": 1 / number_of}
        )
    schedule, of = draft.take("lr_scheduler", "lr_scheduler_type", "scheduler", kind=_schedule)
    if schedule == "cosine":
        curves.append({"type": "CosineAnnealingLR", "unit": "update", "begin": number_of})
    elif schedule == "linear":
        curves.append(
            {"type": "LinearLR", "unit": "update", "begin": number_of, "start_factor": 1.0, "end_factor": 0.0}
        )
    elif of is None:
        draft.notes.append(
            "No schedule is given: the learning rate stays constant after its warm-up. The guide advises a cosine:"
            " dict(type='CosineAnnealingLR', unit='update', begin=...) in param_scheduler."
        )
    draft.set("param_scheduler", curves)
    shown = ", ".join(given.shown for given in (one, of) if given is not None)
    if shown:
        draft.comments["param_scheduler"] = shown


def _schedule(given: Any) -> str:
    found = text(given).lower()
    if found not in _SCHEDULES:
        raise Unusable(f"{given!r} is none of {', '.join(_SCHEDULES)}")
    return found


def _resume(draft: Draft) -> None:
    """From a named checkpoint, or from the newest one."""
    path, one = draft.take("resume_from", "resume_from_checkpoint")
    newest, auto = draft.take("auto_resume", kind=boolean)
    if auto is not None:
        draft.set("resume", "auto" if newest else False, of=auto)
    if one is None or not path:
        if isinstance(one, Given):
            draft.set("load_from", None, of=one)
        return
    if newest:
        draft.set("load_from", path, of=one)
        draft.notes.append(
            "Both auto_resume and resume_from are given: the newest checkpoint of the work dir is resumed; where there"
            " is none, the weights of resume_from are loaded and the training starts at 0."
        )
    else:
        draft.remove("resume")
        draft.comments.pop("resume", None)
        continue_from(draft, path, of=one)
