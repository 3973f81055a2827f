"""Damaged streamed data sets: shards of every format with changed bytes, servers that answer wrongly, files that change
while they are used, iterations of a user that return anything. One case for each number, as ``cases.py``.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa

from tests.data.support import make_processor
from tests.end_to_end.robustness.cases import (
    WILD,
    Case,
    changed_bytes,
    compressed,
    csv_bytes,
    csv_values,
    dumps,
    json_bytes,
    json_literals,
    json_values,
    nested,
    pictures,
    plain,
    table_bytes,
    table_values,
    tar_case,
    text_files,
    write_table,
    write_tar,
)  # fmt: skip
from tests.end_to_end.robustness.faulty_server import FAULTS, STATUSES, Fault, File, server
from tests.end_to_end.robustness.outcome import LONGEST_S, watched
from unigen_ds.config.registry import SOURCES
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.data.batches.loader import collate
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.data.datasets.streamed import SPAN
from unigen_ds.data.order.order import Draw
from unigen_ds.data.sources.shards import spool, transfer
from unigen_ds.data.sources.shards.shard_list import IterableShards

FORMATS = ("jsonl", "json", "csv", "txt", "parquet", "arrow", "feather", "tar", "jsonl.gz", "jsonl.zst", "tar.gz")
_MOST_MESSAGE = 4000

Signature = tuple[Any, ...]
"""What a model is given of one record; the reason, where it is a counted skip."""


@dataclass
class StreamCase:
    """One damaged streamed data set."""

    kind: str
    data_path: Any
    names: Sequence[str]
    """Of which an error must have one."""
    allowed: Callable[[], list[list[list[Signature]]]]
    """Each list of shards of records that may be read; none: it must be an error. Called after it was read."""
    options: dict[str, Any] = field(default_factory=dict)
    meanwhile: Callable[[], None] | None = None
    """What happens after the list of shards and the first of them were read."""
    again: Callable[[], None] | None = None
    """What happens after all was read, before all is read again."""
    skips: bool = False
    """Relative paths of images lead to nothing: such records are skips, whatever they are in the file."""


# ---- shards that are whole ------------------------------------------------------------------------------------------


def good_shard(draw: random.Random, form: str, file: Path) -> Path:
    """A whole shard of some records; the same ones only with the same ``draw``."""
    texts = [f"{draw.choice(['one', 'two', 'three'])} {draw.randrange(10**6)}" for _ in range(draw.randrange(2, 9))]
    base = form.removesuffix(".gz").removesuffix(".zst")
    if base == "jsonl":
        raw = "".join(dumps({"text": text}) + "\n" for text in texts).encode()
    elif base == "json":
        raw = dumps([{"text": text} for text in texts]).encode()
    elif base == "csv":
        raw = ("text,note\n" + "".join(f'"{text}",x\n' for text in texts)).encode()
    elif base == "txt":
        raw = "\n\n".join(texts).encode()
    elif base == "tar":
        image = plain(draw)
        members = [(f"{i:03}.{end}", content) for i, text in enumerate(texts)
                   for end, content in (("png", image), ("txt", text.encode()))]  # fmt: skip
        write_tar(file, members, 1)
        raw = file.read_bytes()
    else:
        image = plain(draw)
        write_table(draw, pa.table({"image": [image] * len(texts), "text": texts}), file)
        raw = file.read_bytes()
    if form.endswith(".gz"):
        raw = gzip.compress(raw, mtime=0)
    elif form.endswith(".zst"):
        raw = pa.compress(raw, codec="zstd", asbytes=True)
    file.write_bytes(raw)
    return file


def options_of(draw: random.Random, form: str) -> dict[str, Any]:
    """Settings of a format."""
    return {"format": {"type": "text", "divide": draw.choice(["file", "paragraph"])}} if form == "txt" else {}


def signatures(found: UnifiedGenerationDataset, numbers: Sequence[int], processor: Any) -> list[Signature]:
    """Of some records."""
    made = []
    for number in numbers:
        batch: Any = collate([(Draw(0, number, 0),)], [found], processor, seq_length=10**9)
        if batch.skipped:
            assert batch.skipped[0]["why"] and len(batch.skipped[0]["why"]) < 3 * _MOST_MESSAGE
            made.append(("skip",))
            continue
        texts = batch.text_ids.tolist(), batch.text_target_index.tolist(), batch.position_ids.tolist()
        pixels = batch.vae_images.numpy().tobytes(), batch.vit_patches.numpy().tobytes()
        made.append((*texts, *pixels))
    return made


def mapped(paths: Sequence[Path], folder: Path, options: Mapping[str, Any]) -> list[list[Signature]] | DataError:
    """The records of each file, by a data set that is not streamed; or why it cannot be read."""
    processor, made = make_processor(), []
    try:
        for path in paths:
            found = UnifiedGenerationDataset(path, processor, name="data", cache_dir=folder, **options)
            made.append(signatures(found, range(len(found)), processor))
    except (DataError, ConfigError) as error:
        return DataError(str(error))
    return made


# ---- damaged content ------------------------------------------------------------------------------------------------

_CONTENT = ((json_values, 5), (json_literals, 3), (json_bytes, 4), (csv_values, 3), (csv_bytes, 4), (text_files, 3),
            (table_bytes, 9), (table_values, 4), (tar_case, 9), (compressed, 6), (pictures, 4))  # fmt: skip


def damaged_content(draw: random.Random, folder: Path) -> StreamCase:
    """One shard of three is damaged, as a file that is not streamed may be."""
    data = folder / "data"
    data.mkdir()
    (data / "small.png").write_bytes(plain(draw))
    if draw.random() < 0.4:
        form = draw.choice(FORMATS)
        path = good_shard(draw, form, data / f"train.{form}")
        path.write_bytes(changed_bytes(draw, path.read_bytes(), most=3))
        given = Case(f"{form}/bytes", path, (path.name,), options=options_of(draw, form))
    else:
        make = draw.choices([one for one, _ in _CONTENT], [weight for _, weight in _CONTENT])[0]
        given = make(draw, data)
    form = given.path.name.partition(".")[2]
    good = "txt" if form == "md" else "csv" if form == "tsv" else form
    others = [good_shard(draw, good, data / f"{name}.{form}") for name in ("first", "last")]
    if form == "tsv":
        for other in others:
            other.write_text(other.read_text().replace(",", "\t"))
    paths = list(others)
    paths.insert(draw.randrange(3), given.path)
    urls, way = served(draw, paths, folder)
    expected = mapped(paths, folder / "mapped", given.options)

    def allowed() -> list[list[list[Signature]]]:
        return [] if isinstance(expected, DataError) else [expected]

    return StreamCase(f"{given.kind} by {way}", urls, given.names, allowed, given.options, skips=way != "path")


def served(draw: random.Random, paths: Sequence[Path], folder: Path) -> tuple[list[str], str]:
    """Names by which files are streamed, and the way."""
    way = draw.choice(["path", "path", "file", "http"])
    if way == "path":
        return [str(path) for path in paths], way
    if way == "file":
        return [f"file://{path}" for path in paths], way
    url, files = server()
    for path in paths:
        files[f"/{folder.name}/{path.name}"] = File(path.read_bytes())
    return [f"{url}/{folder.name}/{path.name}" for path in paths], way


# ---- transfers ------------------------------------------------------------------------------------------------------


def wrong_answers(draw: random.Random, folder: Path) -> StreamCase:
    """A server that answers some requests for a shard wrongly, once, twice or always."""
    form = draw.choice(FORMATS)
    name = draw.choice([*FAULTS, *draw.sample(STATUSES, 6)])
    paths, urls, options = several(draw, folder, form)
    at = draw.randrange(len(paths))
    _, files = server()
    file = files[f"/{folder.name}/{paths[at].name}"]
    file.ranges, file.etag = draw.random() < 0.7, draw.random() < 0.7
    file.kind = draw.choice(["application/octet-stream", "text/plain", "application/gzip"])
    methods = draw.choice([("GET",), ("GET",), ("HEAD",), ("HEAD", "GET")])
    fault = Fault(str(name), methods, draw.choice([1, 1, 2, -1]), after=draw.choice([0, 0, 0, 1]))
    file.faults = [fault]
    if draw.random() < 0.4:  # the first transfer ends early, the fault is that of a later one
        file.faults.insert(0, Fault(draw.choice(["short", "reset"]), ("GET",), 1))
    if name == "cut" and "HEAD" in methods:
        fault.times = abs(fault.times)  # who is told the same lie each time reads it
    if name == "changed":
        fault.after = max(fault.after, int("HEAD" in methods))  # not before it is listed
        fault.ranged = draw.choice([None, True])
    file.later = changed_file(draw, form, file.content, folder)
    return transfers(f"{form} {name} {'once' if fault.times > 0 else 'always'}", folder, paths, at, urls, options)


def several(draw: random.Random, folder: Path, form: str) -> tuple[list[Path], list[str], dict[str, Any]]:
    """Whole shards, served."""
    data = folder / "data"
    data.mkdir()
    paths = [good_shard(draw, form, data / f"part-{k}.{form}") for k in range(draw.choice([1, 2, 3]))]
    url, files = server()
    for path in paths:
        files[f"/{folder.name}/{path.name}"] = File(path.read_bytes())
    return paths, [f"{url}/{folder.name}/{path.name}" for path in paths], options_of(draw, form)


def changed_file(draw: random.Random, form: str, content: bytes, folder: Path) -> bytes:
    """Another whole file of the format, of the same size where that is simple."""
    if form in ("jsonl", "json", "csv", "txt") and draw.random() < 0.7:
        return content.translate(bytes.maketrans(b"0123456789", b"9876543210"))
    other = folder / "data" / "other"
    other.mkdir()
    return good_shard(draw, form, other / f"other.{form}").read_bytes()


def transfers(
    kind: str, folder: Path, paths: Sequence[Path], at: int, urls: Sequence[str], options: dict[str, Any]
) -> StreamCase:
    """What was there at first; without versions also the file that took its place, whole."""
    before = mapped(paths, folder / "mapped", options)
    assert not isinstance(before, DataError), before
    file = server()[1][f"/{folder.name}/{paths[at].name}"]
    first = file.content

    def allowed() -> list[list[list[Signature]]]:
        if file.content == first or file.etag:
            return [before]
        paths[at].write_bytes(file.content)
        after = mapped(paths, folder / "again", options)
        assert not isinstance(after, DataError), after
        return [before, after]

    return StreamCase(f"transfer/{kind.split(' ', 1)[1]}", list(urls), [paths[at].name], allowed, options)


# ---- files that change ----------------------------------------------------------------------------------------------


def changing_files(draw: random.Random, folder: Path) -> StreamCase:
    """A local shard, or the local copy of one, that changes after the list was made, or between two starts."""
    form = draw.choice(FORMATS)
    paths, urls, options = several(draw, folder, form)
    target = draw.choice(["source", "source", "copy"])
    if target == "source":
        urls = [str(path) for path in paths]
    how = draw.choice(["cut", "bytes", "removed", "folder", "pipe", "empty", "loop", "longer"])
    at = draw.randrange(len(paths))
    before = mapped(paths, folder / "mapped", options)
    assert not isinstance(before, DataError), before

    def damage() -> None:
        found = [paths[at]] if target == "source" else [*(folder / "cache").glob("streamed/shards/*/part-*")]
        for path in found:
            spoilt(draw, path, how)

    def allowed() -> list[list[list[Signature]]]:
        if target == "source" and how in ("cut", "bytes", "longer", "empty"):  # at a later start it is other data
            after = mapped(paths, folder / "again", options)
            return [before] if isinstance(after, DataError) else [before, after]
        return [before]

    found = StreamCase(f"file/{target} {how}", urls, [path.name for path in paths], allowed, options)
    if target == "source" and draw.random() < 0.5:
        found.meanwhile = damage
    else:
        found.again = damage
    return found


def spoilt(draw: random.Random, path: Path, how: str) -> None:
    raw = path.read_bytes()
    if how == "cut":
        path.write_bytes(raw[: draw.randrange(len(raw))])
    elif how == "bytes":
        path.write_bytes(changed_bytes(draw, raw, most=3))
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "longer":
        path.write_bytes(raw + raw)
    else:
        path.unlink()
        if how == "folder":
            path.mkdir()
        elif how == "pipe":
            os.mkfifo(path)
        elif how == "loop":
            path.symlink_to(path.name)


# ---- iterations -----------------------------------------------------------------------------------------------------


class Broken(Exception):
    """Of a user's own code."""


@SOURCES.register_module(name="wild", force=True)
class Wild(IterableShards):
    """Shards of texts, one of which has a record that is something else."""

    def __init__(self, path: Path, *, label: str | None = None, folder: Path | None = None, number: int = 0) -> None:
        super().__init__(path, label=label, folder=folder)
        self.number = number

    def shards(self) -> list[str]:
        return ["day-1", "day-2"]

    def records(self, shard: str) -> Iterator[Any]:
        draw = random.Random(f"{self.number} {shard}")
        for i in range(3):
            yield {"text": f"text {i} of {shard}"}
        if shard == "day-2":
            yield from wild_record(draw)


def wild_record(draw: random.Random) -> Iterator[Any]:
    """A record of any kind, or an error."""
    how = draw.randrange(9)
    if how == 0:
        raise Broken("the service \ud800 ended\n" * draw.choice([1, 1000]))
    if how == 1:
        yield draw.choice([None, [], "text", 5, b"x", ("text",), object()])
    elif how == 2:
        yield {"text": draw.choice([object(), {1, 2}, 1j, b"\xff", range(3), open])}
    elif how == 3:
        yield {"text": "x", "more": draw.choice(WILD)}
    elif how == 4:
        yield {draw.choice(["text", "image", "messages", "x"]): draw.choice(WILD)}
    elif how == 5:
        yield {1: "one", "1": "other", "text": "x"}
    elif how == 6:
        yield {
            "text": "x",
            "more": draw.choice([{"unigen:bytes": "%%"}, {"unigen:bytes": 5}, {"unigen:bytes": "QUJD"}]),
        }
    elif how == 7:
        deep: Any = "x"
        for _ in range(draw.choice([50, 900, 3000])):
            deep = [deep]
        yield {"text": "x", "more": deep}
    else:
        yield {
            "image": draw.choice([b"", b"\xff\xd8", plain(draw), bytearray(b"GIF89a"), memoryview(b"xx")]),
            "text": nested(draw),
        }


def iterations(draw: random.Random, folder: Path) -> StreamCase:
    """What a user's iteration returns. It is only known where its record is plain: see ``_check_wild``."""
    number = draw.randrange(10**9)
    options = {"format": {"type": "wild", "number": number}}
    return StreamCase("iteration/record", "days", ["day-2", "Wild"], list, options)


# ---- all of them ----------------------------------------------------------------------------------------------------

MAKERS: list[tuple[Callable[[random.Random, Path], StreamCase], float]] = [
    (damaged_content, 45), (wrong_answers, 35), (changing_files, 14), (iterations, 6),
]  # fmt: skip


def stream_case(seed: int, number: int, folder: Path) -> StreamCase:
    """Case ``number``; always the same one of a seed. ``folder``: an empty one for its files."""
    draw = random.Random(f"streams {seed}/{number}")
    make = draw.choices([one for one, _ in MAKERS], [weight for _, weight in MAKERS])[0]
    return make(draw, folder)


def stream_ending_of(seed: int, number: int, folder: Path) -> tuple[str, str]:
    """(kind, ``sample``, ``skip`` or ``named``) of one case, in an empty folder."""
    try:
        with watched(folder), quick_transfers():
            given = stream_case(seed, number, folder)
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                return given.kind, ending(given, folder)
    finally:
        for thread in threading.enumerate():  # what fetches ahead writes into the folder
            if thread.name == "streamed-shards":
                thread.join(LONGEST_S)
        files = server()[1]
        for path in [path for path in files if path.startswith(f"/{folder.name}/")]:
            del files[path]


@contextlib.contextmanager
def quick_transfers() -> Iterator[None]:
    """No waiting between attempts, and little for a server that is silent; a transfer is continued from any byte."""
    with (
        mock.patch.object(spool, "_LONGEST_WAIT_S", 0.001),
        mock.patch.object(transfer, "_SILENCE_S", 0.2),
        mock.patch.object(transfer, "_BLOCK", 64),
    ):
        yield


def ending(given: StreamCase, folder: Path) -> str:
    """Of one case. Raises ``AssertionError`` where it is not one of the three."""
    try:
        found = read_streamed(given, folder, given.meanwhile)
        if given.again is not None:
            given.again()
            found = read_streamed(given, folder)
    except (DataError, ConfigError) as error:
        text = str(error)
        text.encode()
        assert len(text) < _MOST_MESSAGE, f"a message of {len(text)} characters"
        assert any(name in text for name in given.names), f"no shard is named: {text}"
        return "named"
    if given.kind.startswith("iteration"):
        assert [len(shard) for shard in found] == [3, 4], "a record is lost"
    else:
        allowed = given.allowed()
        assert allowed, f"it was read as {[len(shard) for shard in found]} records, and is refused where it is mapped"
        assert any(agree(found, one, skips=given.skips) for one in allowed), (
            f"other records than those of the files: {shapes(found)}, not {[shapes(one) for one in allowed]}"
        )
    return "skip" if any(record == ("skip",) for shard in found for record in shard) else "sample"


def shapes(found: Sequence[Sequence[Signature]]) -> list[list[int]]:
    """For a message: tokens of each record, 0 for a skip."""
    return [[len(record[0]) if len(record) > 1 else 0 for record in shard] for shard in found]


def agree(found: Sequence[Sequence[Signature]], expected: Sequence[Sequence[Signature]], *, skips: bool) -> bool:
    if [len(shard) for shard in found] != [len(shard) for shard in expected]:
        return False
    pairs = [pair for both in zip(found, expected, strict=True) for pair in zip(*both, strict=True)]
    return all(one == other or (skips and one == ("skip",)) for one, other in pairs)


def read_streamed(
    given: StreamCase, folder: Path, meanwhile: Callable[[], None] | None = None
) -> list[list[Signature]]:
    """The records of all shards, through copies."""
    processor = make_processor()
    found = UnifiedGenerationDataset(
        given.data_path,
        processor,
        name="data",
        cache_dir=folder / "cache",
        streaming={"attempts": 3, "mixed_shards": 2},
        **given.options,
    )
    assert found.shards is not None
    found.shards.fetches_ahead = len(given.kind) % 2 == 0
    if meanwhile is not None:
        meanwhile()
    every = range(len(found.shards))
    found.shards.prepare(list(every))
    numbers = [[k * SPAN + i for i in range(len(found.shards.index(k)))] for k in every]
    return [signatures(found, some, processor) for some in numbers]
