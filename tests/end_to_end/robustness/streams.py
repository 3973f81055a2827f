"""Damaged streamed data sets: shards of every format with changed bytes, servers that answer wrongly, files that change
while they are used. One case for each number, as ``cases.py``.

What a case must become is known from the files themselves: the records of a mapped data set of the same files, read
before anything is damaged, or of the damaged file. A streamed one has exactly these, or ends with an error that names
the shard; nothing in between.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa

from tests.data.support import make_processor
from tests.end_to_end.robustness.cases import (
    Case,
    changed_bytes,
    compressed,
    csv_bytes,
    csv_values,
    dumps,
    json_bytes,
    json_literals,
    json_values,
    pictures,
    plain,
    table_bytes,
    table_values,
    tar_case,
    text_files,
    write_table,
    write_tar,
)
from tests.end_to_end.robustness.outcome import LONGEST_S, watched
from tests.shard_server import ANSWERS, STATUSES, Fault, serving
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.data.batches.loader import collate
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.data.datasets.streamed import SPAN
from unigen_ds.data.order.order import Draw
from unigen_ds.data.sources import shard_files

FORMATS = ("jsonl", "json", "csv", "txt", "parquet", "arrow", "feather", "tar", "jsonl.gz", "jsonl.zst", "tar.gz")
_MOST_MESSAGE = 4000
_CONTENT = ((json_values, 5), (json_literals, 3), (json_bytes, 4), (csv_values, 3), (csv_bytes, 4), (text_files, 3),
            (table_bytes, 9), (table_values, 4), (tar_case, 9), (compressed, 6), (pictures, 4))  # fmt: skip
Records = list[list[tuple[Any, ...]]]
"""Of each shard what a model is given of each record; ``("skip",)`` where it is a counted skip."""


@dataclass
class StreamCase:
    """One damaged streamed data set."""

    kind: str
    data_path: list[str]
    names: Sequence[str]
    """Of which an error must have one."""
    allowed: Callable[[], list[Records | DataError]]
    """What may be read; none: it must be an error. Called after it was read."""
    options: dict[str, Any] = field(default_factory=dict)
    meanwhile: Callable[[], None] | None = None
    """What happens after the list of shards and the first of them were read."""
    again: Callable[[], None] | None = None
    """What happens after all was read, before all is read again."""
    skips: bool = False
    """Relative paths of images lead to nothing: such records are skips, whatever they are in the file."""


def good_shard(draw: random.Random, form: str, file: Path) -> Path:
    """A whole shard of some records; the same ones only with the same ``draw``."""
    texts = [f"{draw.choice(['one', 'two', 'three'])} {draw.randrange(10**6)}" for _ in range(draw.randrange(2, 9))]
    base, _, packing = form.partition(".")
    image = plain(draw)
    if base == "tar":
        members = [(f"{i:03}.{end}", content) for i, text in enumerate(texts)
                   for end, content in (("png", image), ("txt", text.encode()))]  # fmt: skip
        write_tar(file, members, 1)
    elif base in ("parquet", "arrow", "feather"):
        write_table(draw, pa.table({"image": [image] * len(texts), "text": texts}), file)
    else:
        text = {
            "jsonl": "".join(dumps({"text": text}) + "\n" for text in texts),
            "json": dumps([{"text": text} for text in texts]),
            "csv": "text,note\n" + "".join(f'"{text}",x\n' for text in texts),
            "tsv": "text\tnote\n" + "".join(f'"{text}"\tx\n' for text in texts),
        }.get(base, "\n\n".join(texts))
        file.write_text(text)
    if packing:
        raw = file.read_bytes()
        file.write_bytes(gzip.compress(raw) if packing == "gz" else pa.compress(raw, codec="zstd", asbytes=True))
    return file


def several(draw: random.Random, folder: Path) -> tuple[str, list[Path], dict[str, Any]]:
    """Whole shards of a format, and its settings."""
    form = draw.choice(FORMATS)
    paths = [good_shard(draw, form, folder / f"part-{k}.{form}") for k in range(draw.choice([1, 2, 3]))]
    divide = draw.choice(["file", "paragraph"])
    return form, paths, {"format": {"type": "text", "divide": divide}} if form == "txt" else {}


def records_of(data: UnifiedGenerationDataset, numbers: Sequence[int], processor: Any) -> list[tuple[Any, ...]]:
    made = []
    for number in numbers:
        batch: Any = collate([(Draw(0, number, 0),)], [data], processor, seq_length=10**9)
        if batch.skipped:
            assert batch.skipped[0]["why"] and len(batch.skipped[0]["why"]) < 3 * _MOST_MESSAGE
            made.append(("skip",))
            continue
        texts = batch.text_ids.tolist(), batch.text_target_index.tolist(), batch.position_ids.tolist()
        pixels = batch.vae_images.numpy().tobytes(), batch.vit_patches.numpy().tobytes()
        made.append((*texts, *pixels))
    return made


def mapped(paths: Sequence[Path], folder: Path, options: dict[str, Any]) -> Records | DataError:
    """The records of each file, by a data set that is not streamed; or why it cannot be read."""
    processor, made = make_processor(), []
    try:
        for path in paths:
            data = UnifiedGenerationDataset(path, processor, name="data", cache_dir=folder, **options)
            made.append(records_of(data, range(len(data)), processor))
    except (DataError, ConfigError) as error:
        return DataError(str(error))
    return made


def damaged_content(draw: random.Random, folder: Path, url: str) -> StreamCase:
    """One shard of three is damaged, as a file that is not streamed may be."""
    (folder / "small.png").write_bytes(plain(draw))
    if draw.random() < 0.4:
        form = draw.choice([form for form in FORMATS if form != "txt"])
        path = good_shard(draw, form, folder / f"train.{form}")
        path.write_bytes(changed_bytes(draw, path.read_bytes(), most=3))
        damaged = Case(f"{form}/bytes", path, (path.name,))
    else:
        make = draw.choices([one for one, _ in _CONTENT], [weight for _, weight in _CONTENT])[0]
        damaged = make(draw, folder)
    form = damaged.path.name.partition(".")[2]
    paths = [good_shard(draw, form, folder / f"{name}.{form}") for name in ("first", "last")]
    paths.insert(draw.randrange(3), damaged.path)
    way = draw.choice(["", "", "file://", f"{url}/"])
    names = [f"{way}{path.name if way.startswith('http') else path}" for path in paths]
    expected = mapped(paths, folder.parent / "mapped", damaged.options)
    return StreamCase(damaged.kind, names, damaged.names, lambda: [expected], damaged.options, skips=bool(way))


def wrong_answers(draw: random.Random, folder: Path, server: Any) -> StreamCase:
    """A server that answers some requests for a shard wrongly, once, twice or always."""
    form, paths, options = several(draw, folder)
    path = draw.choice(paths)
    name = str(draw.choice([*ANSWERS, *draw.sample(STATUSES, 6)]))
    methods = draw.choice([("GET",), ("GET",), ("HEAD",), ("HEAD", "GET")])
    fault = Fault(name, methods, draw.choice([1, 1, 2, -1]), after=draw.choice([0, 0, 0, 1]))
    if name == "cut" and "HEAD" in methods:
        fault.times = abs(fault.times)  # who is told the same lie each time reads it
    if name == "changed":
        fault.after = max(fault.after, int("HEAD" in methods))  # not before it is listed
    server.etags, server.kind = draw.random() < 0.7, draw.choice(["application/octet-stream", "text/plain"])
    server.faults[path.name] = [fault]
    if draw.random() < 0.4:  # the first transfer ends early, the fault is that of a later one
        server.faults[path.name].insert(0, Fault(draw.choice(["short", "reset"]), ("GET",), 1))
    first = path.read_bytes()
    server.later = first.translate(bytes.maketrans(b"0123456789", b"9876543210"))
    if form not in ("jsonl", "json", "csv", "txt"):
        (folder.parent / "other").mkdir()
        server.later = good_shard(draw, form, folder.parent / "other" / f"other.{form}").read_bytes()
    before = mapped(paths, folder.parent / "mapped", options)

    def allowed() -> list[Records | DataError]:
        """What was there at first; without versions also the file that took its place, whole."""
        if server.etags or path.read_bytes() == first:
            return [before]
        return [before, mapped(paths, folder.parent / "again", options)]

    urls = [f"{server.url}/{path.name}" for path in paths]
    return StreamCase(f"transfer/{name}", urls, [path.name], allowed, options)


def changing_files(draw: random.Random, folder: Path, url: str) -> StreamCase:
    """A local shard, or the local copy of one, that changes after the list was made, or between two starts."""
    _, paths, options = several(draw, folder)
    of_source = draw.random() < 0.7
    how = draw.choice(["cut", "bytes", "removed", "folder", "pipe", "empty", "loop", "longer"])
    damaged = draw.choice(paths)
    before = mapped(paths, folder.parent / "mapped", options)

    def damage() -> None:
        for path in [damaged] if of_source else [*(folder.parent / "cache").glob("streamed/shards/*/part-*")]:
            spoil(draw, path, how)

    def allowed() -> list[Records | DataError]:
        if of_source and how in ("cut", "bytes", "longer", "empty"):  # at a later start it is other data
            return [before, mapped(paths, folder.parent / "again", options)]
        return [before]

    names = [str(path) if of_source else f"{url}/{path.name}" for path in paths]
    found = StreamCase(f"file/{how}", names, [path.name for path in paths], allowed, options)
    if of_source and draw.random() < 0.5:
        found.meanwhile = damage
    else:
        found.again = damage
    return found


def spoil(draw: random.Random, path: Path, how: str) -> None:
    raw = path.read_bytes()
    if how in ("cut", "bytes", "empty", "longer"):
        content = {"cut": raw[: draw.randrange(len(raw))], "empty": b"", "longer": raw + raw}
        path.write_bytes(content.get(how) if how in content else changed_bytes(draw, raw, most=3))
        return
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "loop":
        path.symlink_to(path.name)


@contextlib.contextmanager
def stream_case(seed: int, number: int, folder: Path) -> Iterator[StreamCase]:
    """Case ``number``; always the same one of a seed. ``folder``: an empty one for its files."""
    draw, data = random.Random(f"streams {seed}/{number}"), folder / "data"
    data.mkdir()
    with serving(data) as server:
        kind = draw.choices(["content", "answers", "files"], [45, 40, 15])[0]
        if kind == "answers":
            yield wrong_answers(draw, data, server)
        else:
            yield {"content": damaged_content, "files": changing_files}[kind](draw, data, server.url)


def stream_ending_of(seed: int, number: int, folder: Path) -> tuple[str, str]:
    """(kind, ``sample``, ``skip`` or ``named``) of one case, in an empty folder."""
    with (
        mock.patch.object(shard_files, "_LONGEST_WAIT_S", 0.001),
        mock.patch.object(shard_files, "_SILENCE_S", 0.2),
        watched(folder),
        stream_case(seed, number, folder) as case,
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            return case.kind, ending(case, folder)
        finally:
            for thread in threading.enumerate():  # what fetches ahead writes into the folder
                if thread.name == "streamed-shards":
                    thread.join(LONGEST_S)


def ending(case: StreamCase, folder: Path) -> str:
    """Of one case. Raises ``AssertionError`` where it is not one of the three."""
    try:
        found = read_streamed(case, folder, case.meanwhile)
        if case.again is not None:
            case.again()
            found = read_streamed(case, folder)
    except (DataError, ConfigError) as error:
        text = str(error)
        text.encode()
        assert len(text) < _MOST_MESSAGE, f"a message of {len(text)} characters"
        assert any(name in text for name in case.names), f"no shard is named: {text}"
        return "named"
    allowed = [one for one in case.allowed() if not isinstance(one, DataError)]
    assert allowed, f"it was read as {[len(shard) for shard in found]} records, and is refused where it is mapped"
    assert any(agree(found, one, skips=case.skips) for one in allowed), "other records than those of the files"
    return "skip" if any(record == ("skip",) for shard in found for record in shard) else "sample"


def agree(found: Records, expected: Records, *, skips: bool) -> bool:
    if [len(shard) for shard in found] != [len(shard) for shard in expected]:
        return False
    pairs = [pair for both in zip(found, expected, strict=True) for pair in zip(*both, strict=True)]
    return all(one == other or (skips and one == ("skip",)) for one, other in pairs)


def read_streamed(case: StreamCase, folder: Path, meanwhile: Callable[[], None] | None = None) -> Records:
    """The records of all shards, through copies."""
    processor, streaming = make_processor(), {"attempts": 3, "mixed_shards": 2}
    data = UnifiedGenerationDataset(
        case.data_path, processor, name="data", cache_dir=folder / "cache", streaming=streaming, **case.options
    )
    assert data.shards is not None
    data.shards.fetches_ahead = len(case.kind) % 2 == 0
    if meanwhile is not None:
        meanwhile()
    every = range(len(data.shards))
    data.shards.prepare(list(every))
    return [records_of(data, [k * SPAN + i for i in range(len(data.shards.index(k)))], processor) for k in every]
