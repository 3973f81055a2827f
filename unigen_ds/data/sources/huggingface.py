"""Hugging Face data sets: folders of ``save_to_disk``, and what ``load_dataset`` finds by a name or makes of files.

All of them are Arrow files in the end, which are read as those are (``arrow``): nothing is decoded, and no code of a
data set is executed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unigen_ds.config.paths import is_hub_name
from unigen_ds.config.registry import SOURCES
from unigen_ds.core.errors import DataError
from unigen_ds.data.sources.base import Joined
from unigen_ds.data.sources.tables import ArrowSource
from unigen_ds.data.sources.unpacked import needed

STATE, SPLITS = "state.json", "dataset_dict.json"


def is_saved(folder: Path) -> bool:
    """Whether a folder was written by ``save_to_disk``."""
    return (folder / STATE).is_file() or (folder / SPLITS).is_file()


@SOURCES.register_module(name="huggingface")
class HuggingFaceSource(Joined):
    """One split of a data set.

    Args:
        path: a folder of ``save_to_disk``, a name of the hub, or the first argument of ``load_dataset``.
        split: one of its splits; None: ``train``, or the only one.
        config: the configuration's name (``name`` of ``load_dataset``).
        data_files: as of ``load_dataset``.
        revision: as of ``load_dataset``.

    Raises ``DataError`` where it cannot be loaded.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        label: str | None = None,
        folder: Path | None = None,
        split: str | None = None,
        config: str | None = None,
        data_files: Any = None,
        revision: str | None = None,
    ) -> None:
        if is_saved(Path(path)):
            files = _saved(Path(path), split)
        else:
            files = _loaded(str(path), split, {"name": config, "data_files": data_files, "revision": revision})
        name = label or str(path)
        labels = [name if len(files) == 1 else f"{name}/{file.name}" for file in files]
        super().__init__([ArrowSource(file, label=one) for file, one in zip(files, labels, strict=True)], str(path))


def _saved(folder: Path, split: str | None) -> list[Path]:
    """The Arrow files of a folder of ``save_to_disk``."""
    if (folder / SPLITS).is_file():
        splits = _names(folder / SPLITS, "splits", lambda content: content["splits"])
        folder = folder / chosen_split(split, splits, str(folder))
    if _json(folder / STATE).get("_indices_data_files"):
        raise DataError(
            f"{folder} was saved with a selection of its rows",
            remedy="dataset.flatten_indices().save_to_disk(...) writes the selected rows alone",
        )
    names = _names(folder / STATE, "files", lambda content: [file["filename"] for file in content["_data_files"]])
    return [folder / name for name in names]


def _names(path: Path, what: str, names_of: Callable[[Any], Any]) -> list[str]:
    """The names that a JSON file has of files or folders beside it. Raises ``DataError`` where they are none."""
    content = _json(path)
    try:
        names = list(names_of(content))
        if names and all(Path(name).name == name and (path.parent / name).exists() for name in names):
            return names
    except (LookupError, TypeError, ValueError, OSError):  # of another structure; a name that no file can have
        pass
    raise DataError(f"{path} names no {what} that are there", allowed="a folder that save_to_disk wrote")


def _json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, Mapping):
        raise DataError(f"{path} is no JSON object")
    return content


def chosen_split(split: str | None, splits: Sequence[str], what: str) -> str:
    if split is None and (len(splits) == 1 or "train" in splits):
        return "train" if "train" in splits else splits[0]
    if split is None or split not in splits:
        raise DataError(
            f"{what} has no split {split!r}" if split else f"{what} has several splits, and none of them is 'train'",
            allowed=", ".join(splits),
            remedy="format=dict(type='huggingface', split=...)",
        )
    return split


def _loaded(path: str, split: str | None, settings: Mapping[str, Any]) -> list[Path]:
    """The Arrow files that ``load_dataset`` has made."""
    what = f"the Hugging Face data set {path!r}"
    datasets, arrow = needed("datasets", what), needed("pyarrow", what)
    try:
        rows = datasets.load_dataset(path, split=split, **{k: one for k, one in settings.items() if one is not None})
        if isinstance(rows, Mapping):
            rows = rows[chosen_split(None, list(rows), path)]
    except DataError:
        raise
    except Exception as error:  # the package raises anything, also what its readers of files do
        text = str(error).splitlines()[0] if str(error) else ""
        raise DataError(
            f"{what} cannot be loaded: {type(error).__name__}: {text}",
            remedy=download_first(path) if is_hub_name(path) else None,
        ) from error
    files = [Path(file["filename"]) for file in rows.cache_files]
    number = sum(arrow.ipc.open_stream(arrow.memory_map(str(file))).read_all().num_rows for file in files)
    if not files or number != len(rows):
        raise DataError(
            f"{what}, split {split!r}, is {len(rows):,} of {number:,} rows",
            allowed="a whole split: 'train', not 'train[:100]'",
        )
    return files


def download_first(name: str) -> str:
    return f"where there is a network: hf download {name} --repo-type dataset --local-dir FOLDER; then name that folder"
