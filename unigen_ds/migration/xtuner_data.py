"""Data sets of xtuner: their files and lengths; the rest follows from the model here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from unigen_ds.migration.draft import Draft
from unigen_ds.migration.static_config import Reference
from unigen_ds.migration.xtuner_values import (
    MASKS,
    NOT_CARRIED_OVER,
    drop,
    is_ours,
    last_name,
    shown,
)


def translate_data(draft: Draft) -> None:
    given = draft.get("train_dataloader.dataset")
    kind = given.get("type") if isinstance(given, Mapping) else None
    if not isinstance(kind, Reference) or is_ours(kind):
        return
    if kind.last in ("concat_datasets", "ConcatDataset"):
        members = given.get("datasets_list") or given.get("datasets") or []
    else:
        members = [given]
    found = [one for index, member in enumerate(members) if (one := _one_dataset(draft, member, index)) is not None]
    if not found:
        found = [{"type": "UnifiedGenerationDataset", "data_path": "train.jsonl"}]
        draft.notes.append("None of the data sets has a counterpart: edit train_dataloader.dataset.data_path.")
    draft.set("train_dataloader.dataset", found[0] if len(found) == 1 else found)
    sampler = draft.get("train_dataloader.sampler.type")
    if isinstance(sampler, Reference) and sampler.last == "LengthGroupedSampler":
        drop(
            draft,
            "train_dataloader.sampler",
            "the order follows from randomness.seed; packing fills rows: BestFitPacking",
        )
    if isinstance(draft.get("train_dataloader.collate_fn.type"), Reference):
        drop(draft, "train_dataloader.collate_fn", "the model's processor makes a batch")


def _one_dataset(draft: Draft, given: Any, index: int) -> dict[str, Any] | None:
    """One data set of LLaVA's records or of Hugging Face's ``datasets``."""
    kind = given.get("type") if isinstance(given, Mapping) else None
    path = f"train_dataloader.dataset[{index}]" if index else "train_dataloader.dataset"
    name = last_name(kind)
    if name not in ("LLaVADataset", "process_hf_dataset", "LLaVAProxyEvalDataset"):
        draft.leave(
            shown(path, given), MASKS if name in ("PNGDataset", "RefCocoDataset") else "no such data set is known"
        )
        return None
    found: dict[str, Any] = {"type": "UnifiedGenerationDataset"}
    for key, value in given.items():
        if key == "data_path":
            found["data_path"] = value
        elif key == "image_folder":
            found["image_root"] = value
        elif key == "dataset":
            found |= _loaded(draft, value, f"{path}.dataset")
        elif key == "max_length" and isinstance(value, int):
            _max_length(draft, value)
        elif key == "pack_to_max_length":
            if value:
                draft.set("train_dataloader.packing", {"type": "BestFitPacking"}, of=f"{path}.{key} = {value}")
        elif key != "type":
            draft.leave(
                shown(f"{path}.{key}", value),
                NOT_CARRIED_OVER.get(key, "UnifiedGenerationDataset has no such argument"),
            )
    return {"data_path": "train.jsonl", **found}


def _loaded(draft: Draft, given: Any, path: str) -> dict[str, Any]:
    """``load_dataset(path=..., name=...)``."""
    if not isinstance(given, Mapping) or last_name(given.get("type")) != "load_dataset":
        draft.leave(shown(path, given), "it is no load_dataset(path=...)")
        return {}
    for key, value in given.items():
        if key not in ("type", "path", "data_files", "name", "split"):
            draft.leave(shown(f"{path}.{key}", value), "it is no argument of format='huggingface'")
    if given.get("path") == "json" and isinstance(given.get("data_files"), (str, dict)):
        files = given["data_files"]
        return {"data_path": files if isinstance(files, str) else files.get("train", "train.jsonl")}
    form = {"type": "huggingface", "config": given.get("name"), "split": given.get("split")}
    return {"data_path": given.get("path"), "format": {key: value for key, value in form.items() if value is not None}}


def _max_length(draft: Draft, length: int) -> None:
    """xtuner's counts texts; images are inserted after the truncation, and count here."""
    grid = re.search(r"patch(\d+)-(\d+)", draft.comments.get("model.pretrained", ""))
    image = (int(grid[2]) // int(grid[1])) ** 2 if grid else 0
    draft.set(
        "train_dataloader.seq_length",
        length + image,
        of=f"max_length={length}" + f", and {image} of an image" * bool(image),
    )
    draft.set("train_dataloader.overflow", "truncate")
