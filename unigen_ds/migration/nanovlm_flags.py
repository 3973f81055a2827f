"""nanoVLM's ``train.py``: its flags and the keys of ``TrainConfig`` and ``VLMConfig``, over ``nanovlm_460m``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unigen_ds.core.paths import is_hub_name
from unigen_ds.migration.commands import Command, Given, read_files
from unigen_ds.migration.draft import Draft, Unusable, boolean, number, recipe, text, whole

_VIT, _LLM = "google/siglip2-base-patch16-512", "HuggingFaceTB/SmolLM2-360M-Instruct"
_RATES = {"lr_mp": 0, "lr_vision_backbone": 1, "lr_vision": 1, "lr_language_backbone": 2, "lr_language": 2}
"""Name -> its group in ``paramwise_cfg.groups`` of the recipe."""
_RATINGS = ("relevance", "image_correspondence", "visual_dependency", "formatting")
_RATING, _COUNT = "train_dataloader.dataset.filters.0", "train_dataloader.dataset.filters.1"
_EVALUATION = "python tools/evaluate.py {{checkpoint}} --lmms-tasks {tasks} --step {{step}} --out {{out}}"
_TASKS = "mmstar,mmmu_val,ocrbench,textvqa_val,docvqa_val,scienceqa,mme,infovqa_val,chartqa"
_WHY = {
    "val_size": "validation is a share of the records, not a number: val_dataloader.split",
    "num_gpus": "the launcher sets the number of processes",
}


def train_flags(command: Command) -> Draft:
    """Of ``train.py``, or a YAML file of the two configs' keys."""
    read_files(command)
    values = recipe("nanovlm_460m")
    values["model"] = {"type": "VLM", "pretrained": {"vit": _VIT, "llm": _LLM}, "pixel_shuffle_factor": 4}
    values["default_hooks"]["checkpoint"]["filename_tmpl"] = "step_{}"
    values["visualizer"] = {"run_name": "nanovlm", "vis_backends": [{"type": "WandbVisBackend", "project": "nanoVLM"}]}
    values["work_dir"] = "checkpoints/{run_name}"
    draft = Draft(values, command, what="nanoVLM's train.py")
    _rates(draft)
    _weights(draft)
    _lengths(draft)
    _data(draft)
    _evaluation(draft)
    _tracking(draft)
    draft.carry("train_dataloader.batch_size", "batch_size", kind=whole)
    draft.carry("optim_wrapper.accumulative_counts", "gradient_accumulation_steps", kind=whole)
    draft.carry("train_cfg.max_updates", "max_training_steps", "max_steps", kind=whole)
    draft.carry("optim_wrapper.clip_grad.max_norm", "max_grad_norm", kind=number)
    draft.carry("train_dataloader.num_workers", "num_workers", kind=whole)
    draft.carry("default_hooks.logger.statistics_interval", "stats_log_interval", kind=whole)
    draft.carry("world_size", "world_size", kind=whole)
    draft.carry("model.compile", "compile", kind=boolean)
    draft.carry("model.pixel_shuffle_factor", "mp_pixel_shuffle_factor", kind=whole)
    draft.finish(_WHY)
    return draft


def _rates(draft: Draft) -> None:
    """A learning rate of 0 or less freezes its part, here as there: ``lr=0``."""
    for name, group in _RATES.items():
        rate, one = draft.take(name, kind=number)
        if one is not None:
            draft.set(f"optim_wrapper.paramwise_cfg.groups.{group}.lr", max(rate, 0), of=one)


def _weights(draft: Draft) -> None:
    """Where the weights come from, and where checkpoints go: one name has both meanings there."""
    resumed, one = draft.take("resume_from_vlm_checkpoint", kind=boolean)
    path, folder = draft.take("vlm_checkpoint_path")
    if resumed and path:
        shown = f"{one.shown} {folder.shown}" if one and folder else ""
        draft.set("model", {"type": "VLM", "pretrained": path}, of=shown)
        draft.notes.append(
            "As in nanoVLM only the weights of that folder are read, and the training starts at 0. A checkpoint of this"
            f" project continues in full: resume={path!r} instead."
        )
    elif folder is not None:
        draft.set("work_dir", f"{path.rstrip('/')}/{{run_name}}", of=folder)
    if one is not None and not (resumed and path):
        draft.comments["model"] = one.shown
        if resumed:
            draft.notes.append(
                "resume_from_vlm_checkpoint is given without vlm_checkpoint_path: nothing is loaded from it."
            )
    for name, part in (("vit_model_type", "vit"), ("lm_model_type", "llm")):
        if isinstance(draft.get("model.pretrained"), Mapping):
            draft.carry(f"model.pretrained.{part}", name)
    draft.carry("tokenizer.path", "lm_tokenizer")


def _data(draft: Draft) -> None:
    path, one = draft.take("train_dataset_path")
    names, of = draft.take("train_dataset_name", kind=_names)
    dataset = draft.get("train_dataloader.dataset")
    if one is not None:
        dataset["data_path"] = path
        if is_hub_name(path):
            dataset["format"] = {"type": "huggingface"}
    for rating in _RATINGS:
        least, given = draft.take(f"{rating}_min_rating", kind=whole)
        if given is not None:
            draft.set(f"{_RATING}.{rating}_min_rating", least, of=given)
    draft.carry("train_dataloader.dataset.streaming", "stream_dataset", kind=boolean)
    if names:
        _several(draft, names, of)
    elif of is not None:
        draft.leave(of.shown, "it names no configuration")
    if one is not None:
        draft.comments["train_dataloader.dataset.data_path" if not names else "train_dataloader.dataset"] = ", ".join(
            given.shown for given in (one, of) if given is not None
        )
    else:
        draft.notes.append("train_dataset_path is not given: edit train_dataloader.dataset.data_path.")
    if draft.get("train_dataloader.dataset.streaming"):
        draft.remove("train_dataloader.dataset.index_workers")


def _several(draft: Draft, names: list[str], of: Given | None) -> None:
    """A data set for each configuration; one that cannot be opened is skipped, as there."""
    dataset = draft.get("train_dataloader.dataset")
    comments = {path: shown for path, shown in draft.comments.items() if path.startswith("train_dataloader.dataset.")}
    for path in comments:  # of the only data set; now of each
        del draft.comments[path]
    each = [
        {**dataset, "format": {"type": "huggingface", "config": name}, "on_error": "skip", "name": name}
        for name in names
    ]
    draft.values["train_dataloader"]["dataset"] = each
    draft.comments["train_dataloader.dataset"] = ", ".join([*comments.values(), of.shown if of else ""])


def _names(given: Any) -> list[str]:
    found = [*given] if isinstance(given, (list, tuple)) else text(given).replace(",", " ").split()
    if not all(isinstance(name, str) for name in found):
        raise Unusable("it is no list of names")
    return found


def _lengths(draft: Draft) -> None:
    draft.carry("train_dataloader.seq_length", "seq_length", "max_length", "lm_max_length", kind=whole)
    draft.carry("train_dataloader.max_sample_tokens", "max_sample_length", kind=whole)
    if (draft.get("train_dataloader.max_sample_tokens") or 0) > draft.get("train_dataloader.seq_length"):
        shown = draft.comments.pop("train_dataloader.max_sample_tokens")
        draft.remove("train_dataloader.max_sample_tokens")
        draft.leave(shown, "a sample has at most the tokens of a sequence: seq_length is smaller")
    draft.carry("train_dataloader.packing.window", "num_of_sequences", kind=whole)
    draft.carry("train_dataloader.packing.max_tiles", "max_images_per_knapsack", kind=whole)
    size = draft.carry("processor.max_image_size", "max_img_size", kind=whole)
    tiles = draft.carry(f"{_COUNT}.max_tiles", "max_images_per_example", kind=whole)
    if size and (size // 512) ** 2 + 1 > tiles:
        draft.notes.append(
            f"An image of {size} pixels has up to {(size // 512) ** 2 + 1} tiles, and both caps count tiles: with"
            f" ImageCountFilter(max_tiles={tiles}) such records are left out and counted; raise both"
        )


def _evaluation(draft: Draft) -> None:
    interval, one = draft.take("eval_interval", kind=whole)
    if one is not None:
        draft.set("custom_hooks.0.interval", interval, of=one)
        draft.set("default_hooks.checkpoint.interval", interval)
    wanted, given = draft.take("eval_in_epochs", kind=boolean)
    benchmarks, of = draft.take("use_lmms_eval", kind=boolean)
    tasks, tasks_of = draft.take("lmms_eval_tasks")
    if benchmarks:
        draft.values["custom_hooks"].append(
            {
                "type": "AsyncEvaluateHook",
                "command": _EVALUATION.format(tasks=tasks or _TASKS),
                "interval": 2 * draft.get("custom_hooks.0.interval"),
                "unit": "update",
            }
        )
    shown = ", ".join(one.shown for one in (of, tasks_of) if one is not None)
    if shown:
        draft.comments["custom_hooks.1" if benchmarks else "custom_hooks"] = shown
    if given is not None and not wanted:
        draft.comments["custom_hooks"] = ", ".join(
            filter(
                None,
                [draft.comments.get("custom_hooks"), given.shown, draft.comments.pop("custom_hooks.0.interval", "")],
            )
        )
        if benchmarks:
            draft.comments["custom_hooks.0"] = draft.comments.pop("custom_hooks.1")
        draft.values["custom_hooks"].pop(0)
        draft.values["val_dataloader"] = None
    elif given is not None:
        draft.comments["val_dataloader"] = given.shown


def _tracking(draft: Draft) -> None:
    off, one = draft.take("no_log_wandb", kind=boolean)
    on, of = draft.take("log_wandb", kind=boolean)
    shown = ", ".join(given.shown for given in (one, of) if given is not None)
    if off or on is False:
        draft.set("visualizer.vis_backends", [], of=shown)
    elif shown:
        draft.set("visualizer.vis_backends", draft.get("visualizer.vis_backends"), of=shown)
    entity, given = draft.take("wandb_entity")
    if given is not None and draft.get("visualizer.vis_backends"):
        draft.set("visualizer.vis_backends.0.entity", entity, of=given)
    elif given is not None:
        draft.leave(given.shown, "W&B is off")
    repo, of = draft.take("hf_repo_name")
    if of is not None and repo and repo != "None":
        draft.values["custom_hooks"].append({"type": "PushToHubHook", "repo": repo})
        draft.comments[f"custom_hooks.{len(draft.values['custom_hooks']) - 1}"] = of.shown
        if "/" not in repo:
            draft.notes.append("hf_repo_name has no owner: PushToHubHook needs 'OWNER/NAME'.")
    elif of is not None:
        draft.leave(of.shown, "nothing is uploaded without a name")
