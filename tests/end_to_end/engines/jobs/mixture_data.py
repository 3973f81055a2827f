"""Three formats for the mixture of the engine tests: what is written, and what the filters must leave, by reading the
files as anybody would (``json``, ``pyarrow``, ``tarfile``, PIL), without the package's own readers.
"""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

from PIL import Image

from tests.data.support import picture, write_jsonl
from tests.end_to_end.engines.jobs.cases import OWN_RECORDS
from unigen_ds.config.registry import FILTERS as REGISTRY
from unigen_ds.data.datasets.filters import CheckedRecord, RecordFilter

NUM_ROWS, NUM_PICTURES, NUM_DOCUMENTS, NUM_USED = 64, 48, 96, 80
"""Records of each file; ``NUM_USED``: of the documents, ``num_used_data``."""
LONG, LONG_WORDS, MAX_SAMPLE = 9, 60, 40
"""The number of a document of so many words: with begin and end more than ``max_sample_tokens``, two pieces."""
MIN_RATING, MAX_RATIO, MIN_CHARACTERS = 3, 2.0, 6
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

FILTERS: dict[str, list[dict[str, Any]]] = {
    "rows": [
        {"type": "RatingFilter", "relevance_min_rating": MIN_RATING},
        {"type": "ImageCountFilter", "max_images": 1},
    ],
    "pictures": [{"type": "NotWide"}],
    "documents": [{"type": "NotBrief"}, {"type": "NotNineFirst"}],
}


@REGISTRY.register_module()
class NotWide(RecordFilter):
    def keeps(self, record: CheckedRecord) -> bool:
        return all(max(size) <= MAX_RATIO * min(size) for size in record.image_sizes)


@REGISTRY.register_module()
class NotBrief(RecordFilter):
    def keeps(self, record: CheckedRecord) -> bool:
        return len(record.texts[0]) >= MIN_CHARACTERS


@REGISTRY.register_module()
class NotNineFirst(RecordFilter):
    def keeps(self, record: CheckedRecord) -> bool:
        return not record.texts[0].startswith("nine")


def write_sources(folder: Path) -> None:
    """``rows.jsonl`` (nanoVLM's rows with ratings), ``pictures.parquet`` (images with captions), ``documents.tar``."""
    sizes = ((8, 8), (10, 10), (24, 8))
    names = [picture(folder / f"{i}.png", width, height, seed=i).name for i, (width, height) in enumerate(sizes)]
    write_jsonl(folder / "rows.jsonl", [_row(i, names) for i in range(NUM_ROWS)])
    _write_pictures(folder / "pictures.parquet", [(folder / name).read_bytes() for name in names])
    with tarfile.open(folder / "documents.tar", "w") as archive:
        for i in range(NUM_DOCUMENTS):
            content = _spoken(i, LONG_WORDS if i == LONG else 1 + i * 5 % 19).encode()
            info = tarfile.TarInfo(f"{i:04d}.txt")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def _spoken(i: int, number: int) -> str:
    return " ".join(_WORDS[(i * 7 + k * (i % 5 + 1)) % 10] for k in range(number))


def _row(i: int, names: list[str]) -> dict[str, Any]:
    """Every seventh is rated too low, of every fifth the second question is; every eleventh has two images."""
    texts = [{"user": "this is", "assistant": _spoken(i, 1 + i * 5 % 7)}]
    ratings = [1 if i % 7 == 3 else 4]
    if i % 5 == 0:
        texts, ratings = [*texts, {"user": "this is", "assistant": "nine"}], [*ratings, 2]
    return {"images": names[: 1 + (i % 11 == 5)], "texts": texts, "relevance_ratings": ratings}


def _write_pictures(path: Path, images: list[bytes]) -> None:
    """Every fourth image is too wide."""
    import pyarrow as pa
    import pyarrow.parquet

    cells = [{"bytes": images[2 if i % 4 == 1 else i % 2], "path": None} for i in range(NUM_PICTURES)]
    table = pa.table({"image": cells, "text": [f"draw a {_WORDS[i % 10]}" for i in range(NUM_PICTURES)]})
    pa.parquet.write_table(table, path, row_group_size=16)


def removals(folder: Path) -> dict[str, dict[str, set[int]]]:
    """Of each source the numbers of the records that each of its filters removes: the first one that does."""
    import pyarrow.parquet

    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    low_ratings = {i for i, row in enumerate(rows) if max(row["relevance_ratings"]) < MIN_RATING}
    many_images = {i for i, row in enumerate(rows) if len(row["images"]) > 1} - low_ratings
    images = [row["image"]["bytes"] for row in pyarrow.parquet.read_table(folder / "pictures.parquet").to_pylist()]
    sides = [sorted(Image.open(io.BytesIO(image)).size) for image in images]
    wide = {i for i, (short, long) in enumerate(sides) if long > MAX_RATIO * short}
    texts = _texts(folder)[:NUM_USED]
    brief = {i for i, text in enumerate(texts) if len(text) < MIN_CHARACTERS}
    nine = {i for i, text in enumerate(texts) if text.startswith("nine")} - brief
    return {
        "rows": {"RatingFilter": low_ratings, "ImageCountFilter": many_images},
        "pictures": {"NotWide": wide},
        "documents": {"NotBrief": brief, "NotNineFirst": nine},
    }


def units(folder: Path) -> dict[str, set[str]]:
    """Of each source what a pass over it has: ``index``, and ``index:piece`` of a document that is split."""
    numbers = {"rows": NUM_ROWS, "pictures": NUM_PICTURES, "documents": NUM_USED}
    out = {name: set().union(*rules.values()) for name, rules in removals(folder).items()}
    records = {name: {str(i) for i in range(number) if i not in out[name]} for name, number in numbers.items()}
    for i, text in enumerate(_texts(folder)[:NUM_USED]):
        tokens = len(text.split()) + 2
        if str(i) in records["documents"] and tokens > MAX_SAMPLE:
            pieces = -(-tokens // MAX_SAMPLE)
            records["documents"] = records["documents"] - {str(i)} | {f"{i}:{piece}" for piece in range(pieces)}
    return {**records, "OwnDataset": {str(i) for i in range(OWN_RECORDS)}}


def _texts(folder: Path) -> list[str]:
    with tarfile.open(folder / "documents.tar") as archive:
        files = [archive.extractfile(member) for member in archive.getmembers()]
        return [file.read().decode() for file in files if file is not None]
