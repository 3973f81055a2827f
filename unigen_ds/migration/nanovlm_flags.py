"""nanoVLM's ``train.py``: its flags and the keys of ``TrainConfig`` and ``VLMConfig``, over ``nanovlm_460m``."""

from __future__ import annotations

from typing import Any

from unigen_ds.config.paths import is_hub_name
from unigen_ds.migration.commands import Command, read_files, sources
from unigen_ds.migration.draft import Draft, Table, Unusable, boolean, number, recipe, text, whole

_VIT, _LLM = "google/siglip2-base-patch16-512", "HuggingFaceTB/SmolLM2-360M-Instruct"
_RATES = "optim_wrapper.paramwise_cfg.groups"
_FILTERS = "train_dataloader.dataset.filters"
_EVALUATION = "python tools/evaluate.py {{checkpoint}} --lmms-tasks {tasks} --step {{step}} --out {{out}}"
_TASKS = "mmstar,mmmu_val,ocrbench,textvqa_val,docvqa_val,scienceqa,mme,infovqa_val,chartqa"
_WHY = {
    "val_size": "validation is a share of the records, not a number: val_dataloader.split",
    "num_gpus": "the launcher sets the number of processes",
}


def _rate(value: Any) -> float | int:
    """A learning rate of 0 or less freezes its part, here as there: ``lr=0``."""
    return max(number(value), 0)


_TABLE: Table = {
    f"{_RATES}.0.lr": (_rate, ("lr_mp",)),
    f"{_RATES}.1.lr": (_rate, ("lr_vision_backbone", "lr_vision")),
    f"{_RATES}.2.lr": (_rate, ("lr_language_backbone", "lr_language")),
    "tokenizer.path": (text, ("lm_tokenizer",)),
    "train_dataloader.batch_size": (whole, ("batch_size",)),
    "train_dataloader.num_workers": (whole, ("num_workers",)),
    "train_dataloader.seq_length": (whole, ("seq_length", "max_length", "lm_max_length")),
    "train_dataloader.max_sample_tokens": (whole, ("max_sample_length",)),
    "train_dataloader.packing.window": (whole, ("num_of_sequences",)),
    "train_dataloader.packing.max_tiles": (whole, ("max_images_per_knapsack",)),
    "train_dataloader.dataset.streaming": (boolean, ("stream_dataset",)),
    **{f"{_FILTERS}.0.{name}_min_rating": (whole, (f"{name}_min_rating",))
       for name in ("relevance", "image_correspondence", "visual_dependency", "formatting")},
    f"{_FILTERS}.1.max_tiles": (whole, ("max_images_per_example",)),
    "processor.max_image_size": (whole, ("max_img_size",)),
    "optim_wrapper.accumulative_counts": (whole, ("gradient_accumulation_steps",)),
    "optim_wrapper.clip_grad.max_norm": (number, ("max_grad_norm",)),
    "train_cfg.max_updates": (whole, ("max_training_steps", "max_steps")),
    "default_hooks.logger.statistics_interval": (whole, ("stats_log_interval",)),
    "world_size": (whole, ("world_size",)),
    "model.compile": (boolean, ("compile",)),
    "model.pixel_shuffle_factor": (whole, ("mp_pixel_shuffle_factor",)),
}  # fmt: skip


def train_flags(command: Command) -> Draft:
    """Of ``train.py``, or a YAML file of the two configs' keys."""
    read_files(command)
    values = recipe("nanovlm_460m")
    values["model"] = {"type": "VLM", "pretrained": {"vit": _VIT, "llm": _LLM}, "pixel_shuffle_factor": 4}
    values["default_hooks"]["checkpoint"]["filename_tmpl"] = "step_{}"
    values["visualizer"] = {"run_name": "nanovlm", "vis_backends": [{"type": "WandbVisBackend", "project": "nanoVLM"}]}
    values["work_dir"] = "checkpoints/{run_name}"
    draft = Draft(values, command, what="nanoVLM's train.py")
    _weights(draft)
    draft.carry_all(_TABLE)
    _lengths(draft)
    _data(draft)
    _evaluation(draft)
    _tracking(draft)
    draft.finish(_WHY)
    return draft


def _weights(draft: Draft) -> None:
    """Where the weights come from, and where checkpoints go: one name has both meanings there."""
    loads, setting = draft.take("resume_from_vlm_checkpoint", kind=boolean)
    path, folder = draft.take("vlm_checkpoint_path")
    if loads and path:
        draft.set("model", {"type": "VLM", "pretrained": path}, of=sources((setting, folder)))
        draft.notes.append(
            "As in nanoVLM only the weights of that folder are read, and the training starts at 0. A checkpoint of this"
            f" project continues in full: resume={path!r} instead."
        )
        return
    if folder is not None:
        draft.set("work_dir", f"{path.rstrip('/')}/{{run_name}}", of=folder)
    if setting is not None:
        draft.comments["model"] = setting.source
    if loads:
        draft.notes.append("resume_from_vlm_checkpoint is given without vlm_checkpoint_path: nothing is loaded.")
    draft.carry("model.pretrained.vit", "vit_model_type")
    draft.carry("model.pretrained.llm", "lm_model_type")


def _data(draft: Draft) -> None:
    """A data set, or one for each configuration; one that cannot be opened is skipped, as there."""
    path, setting = draft.take("train_dataset_path")
    names, of = draft.take("train_dataset_name", kind=_names)
    dataset, where = draft.get("train_dataloader.dataset"), "train_dataloader.dataset"
    if setting is None:
        draft.notes.append("train_dataset_path is not given: edit train_dataloader.dataset.data_path.")
    else:
        draft.set(f"{where}.data_path", path, of=setting)
        if is_hub_name(path):
            dataset["format"] = {"type": "huggingface"}
    if dataset.get("streaming"):
        dataset.pop("index_workers", None)
    if names and of is not None:
        of_each = [key for key in draft.comments if key.startswith(f"{where}.")]
        draft.comments[where] = ", ".join([*map(draft.comments.pop, of_each), of.source])
        more: dict[str, Any] = {"on_error": "skip"}
        draft.values["train_dataloader"]["dataset"] = [
            {**dataset, "format": {"type": "huggingface", "config": name}, **more, "name": name} for name in names
        ]
    elif of is not None:
        draft.omit(of.source, "it names no configuration")


def _names(value: Any) -> list[str]:
    names = [*value] if isinstance(value, (list, tuple)) else text(value).replace(",", " ").split()
    if not all(isinstance(name, str) for name in names):
        raise Unusable("it is no list of names")
    return names


def _lengths(draft: Draft) -> None:
    longest = "train_dataloader.max_sample_tokens"
    if (draft.get(longest) or 0) > draft.get("train_dataloader.seq_length"):
        draft.remove(longest)
        source = draft.comments.pop(longest)
        draft.omit(source, "a sample has at most the tokens of a sequence: seq_length is smaller")
    size, tiles = draft.get("processor.max_image_size"), draft.get(f"{_FILTERS}.1.max_tiles")
    if size and (size // 512) ** 2 + 1 > tiles:
        draft.notes.append(
            f"An image of {size} pixels has up to {(size // 512) ** 2 + 1} tiles, and both caps count tiles: with"
            f" ImageCountFilter(max_tiles={tiles}) such records are left out and counted; raise both."
        )


def _evaluation(draft: Draft) -> None:
    hooks = draft.values["custom_hooks"]
    interval, setting = draft.take("eval_interval", kind=whole)
    if setting is not None:
        draft.set("custom_hooks.0.interval", interval)
        draft.set("default_hooks.checkpoint.interval", interval)
    evaluates, of_loss = draft.take("eval_in_epochs", kind=boolean)
    benchmarks, of = draft.take("use_lmms_eval", kind=boolean)
    tasks, of_tasks = draft.take("lmms_eval_tasks")
    if benchmarks:
        command = _EVALUATION.format(tasks=tasks or _TASKS)
        hooks.append(
            {"type": "AsyncEvaluateHook", "command": command, "interval": 2 * hooks[0]["interval"], "unit": "update"}
        )
    if of_loss is not None and not evaluates:
        hooks.pop(0)
        draft.values["val_dataloader"] = None
    if comment := sources((setting, of_loss, of, of_tasks)):
        draft.comments["custom_hooks"] = comment


def _tracking(draft: Draft) -> None:
    off, setting = draft.take("no_log_wandb", kind=boolean)
    on, of = draft.take("log_wandb", kind=boolean)
    writers = [] if off or on is False else draft.get("visualizer.vis_backends")
    draft.set("visualizer.vis_backends", writers, of=sources((setting, of)))
    entity, setting = draft.take("wandb_entity")
    if setting is not None and writers:
        draft.set("visualizer.vis_backends.0.entity", entity, of=setting)
    elif setting is not None:
        draft.omit(setting.source, "W&B is off")
    repo, of = draft.take("hf_repo_name")
    if of is not None and repo not in ("", "None"):
        draft.values["custom_hooks"].append({"type": "PushToHubHook", "repo": repo})
        draft.comments[f"custom_hooks.{len(draft.values['custom_hooks']) - 1}"] = of.source
        if "/" not in repo:
            draft.notes.append("hf_repo_name has no owner: PushToHubHook needs 'OWNER/NAME'.")
    elif of is not None:
        draft.omit(of.source, "nothing is uploaded without a name")
