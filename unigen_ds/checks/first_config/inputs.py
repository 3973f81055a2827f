"""What a first config is made from: the sections of a model, the records of a data set and what they teach.

A model is a published directory or a name of the hub, as the families recognise it; a checkpoint of this project; or a
shipped recipe, whose model is new. A data set is a path, a name of ``data_registry.json``, or a name of the hub.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unigen_ds.config.file import shipped_configs
from unigen_ds.config.hub import folder_of
from unigen_ds.config.paths import is_hub_name
from unigen_ds.config.registry import MODELS, find
from unigen_ds.core.errors import CheckpointError, ConfigError, DataError, suggestion
from unigen_ds.core.json_values import stored_object
from unigen_ds.data.records.records import Layout, Turn, layout_of
from unigen_ds.data.samples.processor import is_document
from unigen_ds.data.sources.find import PATTERN, open_source
from unigen_ds.families.base import Family, family_of, read_statement
from unigen_ds.families.directories import formats
from unigen_ds.migration.draft import recipe
from unigen_ds.runner.open.trained import find_model, import_stored, self_contained

REGISTRY = "data_registry.json"
"""Beside the data: ``{"short name": "path", "other": {"data_path": "path", ...arguments of the data set}}``."""
_SECTIONS = ("custom_imports", "model", "tokenizer", "processor")
_NUM_SAMPLED = 1000
"""Records that are looked at, spread over all."""
_PICTURE_LAYOUTS = ("caption", "text")
"""Layouts of an image with a text, of which either may be learned from the other."""
KINDS = {
    "chat": "answers to a user",
    "caption": "texts of images",
    "draw": "images from texts",
    "edit": "images from images",
    "pretrain": "documents",
}
"""Task -> what a record of it teaches."""


@dataclass(frozen=True)
class ModelInput:
    name: str
    """As the user wrote it."""
    title: str
    """What it is, for messages."""
    sections: Mapping[str, Any]
    """``model``, ``tokenizer``, ``processor`` and what else the config must have for them."""
    kind: type
    family: Family

    @property
    def draws(self) -> bool:
        return "image" in self.family.terms

    @property
    def reads_images(self) -> bool:
        return bool(getattr(self.kind, "reads_images", True))


def find_input_model(name: str) -> ModelInput:
    """The model that a user names. Raises ``ConfigError`` for what no family recognises."""
    sections: dict[str, Any] = {}
    if name in shipped_configs() and not Path(name).exists():
        sections = {key: value for key, value in recipe(name).items() if key in _SECTIONS}
        title = f"a new model of the recipe {name}"
        import_stored(sections, Path(name), allow=True)
    else:
        folder = folder_of(name, where="--model")
        recognised = [one for one in formats() if one.recognises(folder)]
        if recognised:  # of several the general one: it has the chat template
            format_ = next((one for one in recognised if one.complete), recognised[-1])
            title, sections = format_.name, format_.config(folder)
            if not format_.pretrained:
                sections["model"] = {"type": sections["model"]["type"], "pretrained": str(folder)}
            for key, member in (("model", "pretrained"), ("tokenizer", "path")):
                if sections[key].get(member) == str(folder):
                    sections[key] = {**sections[key], member: name}
        else:
            title, sections = _of_checkpoint(name, folder)
    kind: Any = find(MODELS, sections["model"], where="model")
    return ModelInput(name, title, sections, kind, family_of(kind))


def _of_checkpoint(name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    try:
        directory, _, config = find_model(folder, tag=None, config=None, allow_custom_imports=False)
    except CheckpointError as error:
        stated = read_statement(folder / "config.json")
        has = f"its config.json has model_type {stated.get('model_type')!r}" if stated else error.problem
        raise ConfigError(
            f"--model {name} is no model that a family recognises: {has}",
            allowed=", ".join(dict.fromkeys(each.name for each in formats())) + ", a name of the hub, a checkpoint of"
            " this project, or for a new model a recipe: " + ", ".join(shipped_configs()),
            remedy=suggestion(name, shipped_configs()),
        ) from error
    if config.get("lora"):
        remedy = f"python tools/export.py {name} MERGED --merge; then --model MERGED"
        raise ConfigError(f"--model {name} has adapters alone", remedy=remedy)
    whole = self_contained(config, directory)
    return "a checkpoint", {**{key: whole[key] for key in _SECTIONS if whole.get(key)}, "load_from": name}


@dataclass(frozen=True)
class DataInput:
    dataset: Mapping[str, Any]
    """The section."""
    kinds: Mapping[str, int]
    """Task -> records of it, of those that were looked at."""
    with_images: int
    """Records, of those that were looked at, with an image that is read."""
    total: int

    @property
    def sampled(self) -> int:
        return sum(self.kinds.values())

    @property
    def draws(self) -> bool:
        """Whether an image is learned."""
        return bool({"draw", "edit"} & {*self.kinds})

    @property
    def main_kind(self) -> str:
        return max(self.kinds, key=lambda kind: self.kinds[kind])


def dataset_section(name: str) -> dict[str, Any]:
    """Arguments of the data set that a user names. Raises ``ConfigError`` where there is none of that name."""
    path = Path(name).expanduser()
    if path.exists() or PATTERN.search(name):
        return {"data_path": name}
    registry = path.parent / REGISTRY
    try:
        entries = stored_object(registry) if registry.is_file() else {}
    except CheckpointError as error:
        raise ConfigError(f"--data {name}: {error.problem}", remedy=f"mend {registry}") from error
    entry = entries.get(path.name)
    if entry is not None:
        entry = {"data_path": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, Mapping) or not isinstance(entry.get("data_path"), str):
            problem = f"{registry}: {path.name} is {entry!r}"
            raise ConfigError(problem, allowed="a path, or an object with data_path and arguments of the data set")
        paths = {key: str(path.parent / entry[key]) for key in ("data_path", "image_root") if key in entry}
        return {**entry, **paths}
    if is_hub_name(name) and not path.suffix and not PATTERN.search(name):
        return {"data_path": name, "format": "huggingface"}
    beside = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
    names = (
        f"has the names {', '.join(entries)}" if entries else "has no name" if registry.is_file() else "is not there"
    )
    raise ConfigError(
        f"--data {name}: there is no such file or folder, and {registry} {names}",
        allowed="a file, a folder, a pattern, OWNER/NAME of the hub, or a name of that file",
        remedy=suggestion(path.name, [*entries, *beside]),
    )


def find_input_data(name: str, *, task: str | None, model: ModelInput) -> DataInput:
    """The data set that a user names, and what its records teach ``model``.

    Raises ``ConfigError`` where ``task`` must be stated or does not fit the records or the model, and ``DataError``
    for records that no layout has.
    """
    section = dataset_section(name)
    columns = section.get("columns") or {}
    source = open_source(section["data_path"], format=section.get("format"), columns=columns)
    source.use(source.scan())
    total = len(source)
    rows = [row for i in _spread(total) for row in source.read(i, i + 1)]
    layout = Layout(None, section.get("captions") or source.captions, tuple(columns.items()))
    try:
        names = Counter(layout_of(layout.rename_keys(row.record, row.where), "generate") for row in rows)
        pictures = sum(names[one] for one in _PICTURE_LAYOUTS)
        if "captions" not in section and (pictures or (names["text_prompt"] and task == "caption")):
            captions = {"caption": "understand", "draw": "generate"}.get(task or "")
            if captions is None and not model.draws:
                captions = "understand"
            if captions is None:
                raise ConfigError(
                    f"{pictures:,} of {len(rows):,} records are an image with a text, and {model.kind.__name__} can"
                    " learn either from the other",
                    remedy="--task draw (the image is learned), or --task caption (the text is learned)",
                )
            section["captions"] = captions
            layout = Layout(None, captions, layout.columns)
        records = [layout.learned_turns(row.record, row.where) for row in rows]
    except DataError as error:
        remedy = f"{error.remedy or 'mend it'}; options of a data set (columns, on_record_error) are in {REGISTRY}"
        raise DataError(error.problem, allowed=error.allowed, remedy=remedy) from error
    kinds = Counter(map(task_of, records))
    with_images = sum(any(turn.kind == "image" and not turn.is_target for turn in turns) for turns in records)
    data = DataInput(section, kinds, with_images, total)
    _check_task(data, name, task, model)
    return data


def _spread(total: int) -> list[int]:
    return sorted({int(i) for i in np.linspace(0, total - 1, min(total, _NUM_SAMPLED))})


def task_of(turns: Sequence[Turn]) -> str:
    """The task of ``KINDS`` that a record is of."""
    inputs = {turn.kind for turn in turns if turn.role != "system" and not turn.is_target}
    if any(turn.is_target and turn.kind == "image" for turn in turns):
        return "edit" if "image" in inputs else "draw"
    if is_document(turns):
        return "pretrain"
    return "caption" if inputs == {"image"} else "chat"


def _check_task(data: DataInput, name: str, task: str | None, model: ModelInput) -> None:
    """Raise ``ConfigError`` where the records are not of the task, or the model cannot learn them."""
    number, kind = data.sampled, model.kind.__name__
    each = ", ".join(f"{count:,} {one} ({KINDS[one]})" for one, count in data.kinds.items())
    is_chat = task == "chat" and "caption" in data.kinds  # a chat about an image without a question
    if task is not None and task not in data.kinds and not is_chat:
        raise ConfigError(
            f"--task {task}: of {number:,} records of {name} none is of this kind", allowed=each,
            remedy=f"leave --task out, or --task {data.main_kind}; docs/data.md has the records of each",
        )  # fmt: skip
    to_draw = data.kinds.get("draw", 0) + data.kinds.get("edit", 0)
    if to_draw and not model.draws:
        raise ConfigError(
            f"{to_draw:,} of {number:,} records of {name} end with an image, which {kind} ({model.name}) cannot draw",
            allowed="a model that draws: BAGEL's directory, or a UnifiedModel",
            remedy="--task caption, if the texts of the images are to be learned",
        )
    if data.with_images and not model.reads_images:
        raise ConfigError(
            f"{data.with_images:,} of {number:,} records of {name} have an image, and {kind} ({model.name}) reads"
            " texts alone",
            remedy="a model that reads images, such as Qwen2.5-VL, LLaVA or nanoVLM; or records without images",
        )
