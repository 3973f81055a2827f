"""Writes the small files of every format beside this script: ``python docs/samples/make.py``.

Four kinds of records, each in several formats: ``captions`` (a text and its image), ``talks`` (questions about images),
``texts`` (documents) and ``edits``. Files of one kind hold the same records, and a run trains on them bit-equally
(``tests/data/test_sources.py``). Needs the extra ``data``.
"""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import shutil
import sys
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

FOLDER = Path(__file__).resolve().parent
WORDS = ("zero", "one", "two", "three", "four", "five")
CAPTIONS = [f"draw a handwritten {word}" for word in WORDS]
TEXTS = ["zero one two", "three four five six", "this is a\n\nhandwritten seven", "eight nine", "draw a zero", "one"]
RATINGS = ("relevance_ratings", "image_correspondence_ratings", "visual_dependency_ratings", "formatting_ratings")


def picture(number: int) -> bytes:
    """A PNG of grey stripes."""
    rows = np.arange(12)[:, None] * (number + 1) + np.arange(12) * (7 - number)
    stream = io.BytesIO()
    Image.fromarray((rows * 9 % 256).astype(np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def rows(path: Path, records: list[dict[str, Any]], delimiter: str = ",") -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(records[0]), delimiter=delimiter, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)


def tar(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def captions(folder: Path, images: list[bytes]) -> None:
    import pyarrow as pa
    import pyarrow.feather
    import pyarrow.parquet

    names = [f"images/{word}.png" for word in WORDS]
    lines(folder / "captions.jsonl",
          [{"text_prompt": text, "image_path": name} for text, name in zip(CAPTIONS, names, strict=True)])  # fmt: skip
    rows(folder / "captions.csv", [{"image": n, "caption": t} for t, n in zip(CAPTIONS, names, strict=True)])
    stored = [{"bytes": image, "path": None} for image in images]
    table = pa.table({"image": stored, "text": CAPTIONS})
    pa.parquet.write_table(table, folder / "captions.parquet", row_group_size=4)
    pa.feather.write_feather(table, str(folder / "captions.feather"), compression="uncompressed")
    t2i = pa.table({"image": images, "captions": [json.dumps({"caption": text}) for text in CAPTIONS]})
    pa.parquet.write_table(t2i, folder / "captions_bagel_t2i.parquet")
    members = [(f"{word}.{end}", content) for word, text, image in zip(WORDS, CAPTIONS, images, strict=True)
               for end, content in (("png", image), ("txt", text.encode()))]  # fmt: skip
    tar(folder / "captions.tar", members)
    (folder / "captions_folder").mkdir()
    (folder / "captions_metadata").mkdir()
    for i, (word, text, image) in enumerate(zip(WORDS, CAPTIONS, images, strict=True)):
        (folder / "captions_folder" / f"{i}_{word}.png").write_bytes(image)
        (folder / "captions_folder" / f"{i}_{word}.txt").write_text(text + "\n", encoding="utf-8")
        (folder / "captions_metadata" / f"{word}.png").write_bytes(image)
    rows(folder / "captions_metadata" / "metadata.csv",
         [{"file_name": f"{word}.png", "text": text} for word, text in zip(WORDS, CAPTIONS, strict=True)])  # fmt: skip
    saved(folder / "captions_saved", {"image": stored, "text": CAPTIONS})


def saved(folder: Path, columns: dict[str, Any]) -> None:
    """As ``save_to_disk`` of a data set with images."""
    from datasets import Dataset, disable_progress_bars
    from datasets import Image as ImageFeature

    disable_progress_bars()
    Dataset.from_dict(columns).cast_column("image", ImageFeature(decode=False)).save_to_disk(folder)


def talks(folder: Path, images: list[bytes]) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    asked, answers, names = "this is a", [f"a handwritten {word}" for word in WORDS], [f"images/{w}.png" for w in WORDS]
    lines(folder / "talks.jsonl", [
        {"conversations": [{"role": "user", "type": "image", "image_path": name},
                           {"role": "user", "type": "text", "content": asked},
                           {"role": "assistant", "type": "text", "content": answer}]}
        for name, answer in zip(names, answers, strict=True)])  # fmt: skip
    llava = [{"image": name, "conversations": [{"from": "human", "value": f"<image>\n{asked}"},
                                               {"from": "gpt", "value": answer}]}
             for name, answer in zip(names, answers, strict=True)]  # fmt: skip
    (folder / "talks_llava.json").write_text(json.dumps(llava, indent=1) + "\n", encoding="utf-8")
    urls = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images]
    lines(folder / "talks_openai.jsonl", [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}},
                                                   {"type": "text", "text": asked}]},
                      {"role": "assistant", "content": answer}]}
        for url, answer in zip(urls, answers, strict=True)])  # fmt: skip
    texts = [[{"user": asked, "assistant": answer, "source": "sample"}] for answer in answers]
    ratings = {name: [[5]] * len(answers) for name in RATINGS}
    table = pa.table({"images": [[{"bytes": image, "path": None}] for image in images], "texts": texts, **ratings})
    pa.parquet.write_table(table, folder / "talks_nanovlm.parquet")
    conversation = [{"from": "human", "value": f"<image>\n{asked}"}]
    members = [(f"{word}.{end}", content) for word, answer, image in zip(WORDS, answers, images, strict=True)
               for end, content in (
                   ("json", json.dumps({"image": f"{word}.png", "conversations":
                                        [*conversation, {"from": "gpt", "value": answer}]}).encode()),
                   ("png", image))]  # fmt: skip
    tar(folder / "talks.tar", members)


def texts(folder: Path) -> None:
    lines(folder / "texts.jsonl", [{"text": text} for text in TEXTS])
    content = (folder / "texts.jsonl").read_bytes()
    (folder / "texts.jsonl.gz").write_bytes(gzip.compress(content, mtime=0))
    import pyarrow as pa

    (folder / "texts.jsonl.zst").write_bytes(pa.compress(content, codec="zstd", asbytes=True))
    rows(folder / "texts.csv", [{"text": text} for text in TEXTS])
    rows(folder / "texts.tsv", [{"text": text} for text in TEXTS], delimiter="\t")
    (folder / "texts_folder").mkdir()
    for i, text in enumerate(TEXTS):
        (folder / "texts_folder" / f"{i}.{'md' if i % 2 else 'txt'}").write_text(text, encoding="utf-8")


def edits(folder: Path, images: list[bytes]) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    chains = [(0, 1), (1, 2, 3), (4, 5)]
    lines(folder / "edits.jsonl", [
        {"conversations": [{"role": "user", "type": "image", "image_path": f"images/{WORDS[chain[0]]}.png"}] + [
            turn for k in chain[1:] for turn in (
                {"role": "user", "type": "text", "content": f"draw a {WORDS[k]}"},
                {"role": "assistant", "type": "image", "image_path": f"images/{WORDS[k]}.png"})]}
        for chain in chains])  # fmt: skip
    asked = [[[f"draw a {WORDS[k]}"] for k in chain[1:]] for chain in chains]
    table = pa.table({"image_list": [[images[k] for k in chain] for chain in chains], "instruction_list": asked})
    pa.parquet.write_table(table, folder / "edits_bagel.parquet")


def write(folder: Path) -> None:
    """All of them, into a folder that has none."""
    (folder / "images").mkdir(parents=True)
    images = [picture(i) for i in range(len(WORDS))]
    for word, image in zip(WORDS, images, strict=True):
        (folder / "images" / f"{word}.png").write_bytes(image)
    captions(folder, images)
    talks(folder, images)
    texts(folder)
    edits(folder, images)


if __name__ == "__main__":
    new = FOLDER / "new"
    write(new)
    for old in FOLDER.iterdir():
        if old.name not in (new.name, Path(__file__).name):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    for made in new.iterdir():
        made.rename(FOLDER / made.name)
    new.rmdir()
    sys.exit(0)
