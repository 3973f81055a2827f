"""What a first config is made from: the sections of a model, and the records of a data set with what they teach.

A model is a published directory or a name of the hub, as the families recognise it, or a shipped recipe: a new model.
A data set is a path, a name of ``data_registry.json``, or a name of the hub.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unigen_ds.checkpoint.foreign import HINTS
from unigen_ds.checkpoint.manifest import FILE_NAME
from unigen_ds.config.file import shipped_configs
from unigen_ds.config.hub import folder_of
from unigen_ds.config.paths import is_hub_name
from unigen_ds.config.registry import MODELS, find
from unigen_ds.core.errors import ConfigError, DataError, suggestion
from unigen_ds.core.json_values import stored_object
from unigen_ds.data.records.records import Layout, Turn, layout_of
from unigen_ds.data.samples.processor import is_document
from unigen_ds.data.sources.find import PATTERN, open_source
from unigen_ds.families.base import family_of, read_statement
from unigen_ds.families.directories import formats
from unigen_ds.migration.draft import recipe
from unigen_ds.models.weights import stored_tensors
from unigen_ds.runner.open.trained import import_stored

REGISTRY = "data_registry.json"
"""Beside the data: ``{"short name": "path", "other": {"data_path": "path", ...arguments of the data set}}``."""
KINDS = {
    "chat": "answers to a user", "caption": "texts of images", "draw": "images from texts",
    "edit": "images from images", "pretrain": "documents",
}  # fmt: skip
"""Task -> what a record of it teaches."""
_SECTIONS = ("custom_imports", "model", "tokenizer", "processor")
_SMALL = "a small model of your own: docs/first_text_model.md, docs/first_vlm.md, docs/first_unified_model.md"
_NUM_SAMPLED = 1000
"""Records that are looked at, spread over all."""


@dataclass(frozen=True)
class ModelInput:
    name: str
    title: str
    """What it is, for messages."""
    sections: Mapping[str, Any]
    """``model``, ``tokenizer``, ``processor`` and what else the config must have for them."""
    is_new: bool
    """Whether its weights have learned nothing yet."""

    @property
    def kind(self) -> Any:
        return find(MODELS, self.sections["model"], where="model")

    @property
    def draws(self) -> bool:
        return "image" in family_of(self.kind).terms


def find_input_model(name: str) -> ModelInput:
    """The model that a user names. Raises ``ConfigError`` for what no family recognises."""
    if name in shipped_configs() and not Path(name).exists():
        sections = {key: value for key, value in recipe(name).items() if key in _SECTIONS}
        import_stored(sections, Path(name), allow=True)
        return ModelInput(name, f"a new model of the recipe {name}", sections, True)
    folder = folder_of(name, where="--model")
    if folder.is_file():  # of weights
        folder, name = folder.parent, str(folder.parent)
    recognised = [one for one in formats() if one.recognises(folder)]
    if not recognised:
        of_type = read_statement(folder / "config.json").get("model_type")
        names, remedy = [*shipped_configs(), *(one.name for one in folder.parent.glob("*"))], "another model"
        what = f"its config.json has model_type {of_type!r}" if of_type else "no family recognises it"
        if any((folder / one).is_file() for one in (FILE_NAME, *HINTS)):
            what = "it is a checkpoint, which has no form for others"
            remedy = f"python tools/export.py {name} OUT (adapters: --merge); then --model OUT"
        elif not folder.exists():
            what, remedy = "there is no such folder", suggestion(folder.name, names) or _SMALL
        raise ConfigError(
            f"--model {name}: {what}",
            allowed="a directory of BAGEL, nanoVLM or a model of transformers that writes texts (config.json,"
            f" tokenizer, weights), OWNER/NAME of the hub, or for a new model a recipe: {', '.join(shipped_configs())}",
            remedy=remedy,
        )
    format_ = next((one for one in recognised if one.complete), recognised[-1])  # the general one has chat templates
    sections = format_.config(folder)
    if not format_.pretrained:
        sections["model"] = {"type": sections["model"]["type"], "pretrained": str(folder)}
    for key in ("model", "tokenizer"):
        sections[key] = {key: name if value == str(folder) else value for key, value in sections[key].items()}
    is_new = _are_new(folder)
    return ModelInput(name, f"{format_.name}{', whose weights are random' * is_new}", sections, is_new)


def _are_new(folder: Path) -> bool:
    """Whether weights are as a constructor makes them: each vector, such as that of a norm, has one value."""
    tensors = stored_tensors(folder) if any(folder.glob("*.safetensors")) else {}
    vectors = [one for one in tensors.values() if len(one.shape) == 1]
    return bool(vectors) and all(len(one.flat(0, one.numel).unique()) == 1 for one in vectors)


@dataclass(frozen=True)
class DataInput:
    dataset: Mapping[str, Any]
    """Arguments of the data set."""
    kinds: Counter[str]
    """Task -> records of it, of those that were looked at."""
    total: int

    @property
    def draws(self) -> bool:
        return bool({"draw", "edit"} & {*self.kinds})

    @property
    def is_text(self) -> bool:
        """Whether most records are documents."""
        return self.kinds.most_common(1)[0][0] == "pretrain"


def dataset_arguments(name: str) -> dict[str, Any]:
    """Arguments of the data set that a user names. Raises ``ConfigError`` where there is none of that name."""
    path = Path(name).expanduser()
    if path.exists() or PATTERN.search(name):
        return {"data_path": name}
    registry = path.parent / REGISTRY
    entries = stored_object(registry) if registry.is_file() else {}
    if path.name in entries:
        entry = entries[path.name]
        entry = {"data_path": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, Mapping) or not isinstance(entry.get("data_path"), str):
            problem = f"{registry}: {path.name} is {entry!r}"
            raise ConfigError(problem, allowed="a path, or an object with data_path and arguments of the data set")
        return {**entry, **{k: str(path.parent / entry[k]) for k in ("data_path", "image_root") if k in entry}}
    if is_hub_name(name) and not path.suffix:
        return {"data_path": name, "format": "huggingface"}
    raise ConfigError(
        f"--data {name}: there is no such file or folder, and {registry}"
        + (f" has the names {', '.join(entries)}" if entries else " is not there"),
        allowed="a file, a folder, a pattern, OWNER/NAME of the hub, or a name of that file",
        remedy=suggestion(path.name, [*entries, *(one.name for one in path.parent.glob("*"))]),
    )


def find_input_data(name: str, *, task: str | None, model: ModelInput) -> DataInput:
    """The data set that a user names, and what its records teach ``model``.

    Raises ``ConfigError`` where ``task`` must be stated or does not fit the records or the model, and ``DataError``
    for records that no layout has.
    """
    arguments = dataset_arguments(name)
    columns = arguments.get("columns") or {}
    source = open_source(arguments["data_path"], format=arguments.get("format"), columns=columns)
    source.use(source.scan())
    numbers = {int(i) for i in np.linspace(0, len(source) - 1, min(len(source), _NUM_SAMPLED))}
    layout = Layout(None, arguments.get("captions") or source.captions, tuple(columns.items()))
    try:
        rows = [row for i in sorted(numbers) for row in source.read(i, i + 1)]
        names = Counter(layout_of(layout.rename_keys(row.record, row.where), "generate") for row in rows)
        pictures = names["caption"] + names["text"]  # either may be learned from the other
        if "captions" not in arguments and (pictures or (names["text_prompt"] and task == "caption")):
            captions = {"caption": "understand", "draw": "generate"}.get(task or "")
            arguments["captions"] = captions or ("generate" if model.draws else "understand")
            if captions is None and model.draws:
                raise ConfigError(
                    f"{pictures:,} of {len(rows):,} records are an image with a text: either may be learned",
                    remedy="--task draw (the image), or --task caption (the text)",
                )
            layout = Layout(None, arguments["captions"], layout.columns)
        records = [layout.learned_turns(row.record, row.where) for row in rows]
    except DataError as error:
        more = f"options of a data set (columns, on_record_error) are in {REGISTRY}: docs/first_config.md"
        raise DataError(error.problem, allowed=error.allowed, remedy=f"{error.remedy or 'mend it'}; {more}") from error
    kinds = Counter(map(task_of, records))
    if task is not None and task not in kinds and (task, *kinds) != ("chat", "caption"):
        each = ", ".join(f"{number:,} {one} ({KINDS[one]})" for one, number in kinds.items())
        problem = f"--task {task}: {name} has no record of it, of {len(rows):,} that were looked at"
        raise ConfigError(problem, allowed=each, remedy="leave it out; docs/data/records.md has all records")
    drawn_images = sum(any(turn.is_target and turn.kind == "image" for turn in turns) for turns in records)
    read_images = sum(any(not turn.is_target and turn.kind == "image" for turn in turns) for turns in records)
    of_rows, kind = f"of {len(rows):,} records of {name}", f"{model.kind.__name__} ({model.name})"
    if drawn_images and not model.draws:
        remedy = "a model that draws (BAGEL's directory), or --task caption: the texts of images are learned"
        raise ConfigError(f"{drawn_images:,} {of_rows} end with an image, which {kind} cannot draw", remedy=remedy)
    if read_images and not getattr(model.kind, "reads_images", True):
        remedy = "a model that reads images (Qwen2.5-VL, LLaVA, nanoVLM), or records without images"
        raise ConfigError(f"{read_images:,} {of_rows} have an image, and {kind} reads texts alone", remedy=remedy)
    return DataInput(arguments, kinds, len(source))


def task_of(turns: Sequence[Turn]) -> str:
    """The task of ``KINDS`` that a record is of."""
    inputs = {turn.kind for turn in turns if turn.role != "system" and not turn.is_target}
    if any(turn.is_target and turn.kind == "image" for turn in turns):
        return "edit" if "image" in inputs else "draw"
    return "pretrain" if is_document(turns) else "caption" if inputs == {"image"} else "chat"
