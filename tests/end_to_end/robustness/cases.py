"""Damaged data files, one case for each number: ``case(seed, number, folder)`` writes and describes them.

A case is a small file of one format (``FORMATS``) with a value of a record, or a few bytes, changed. What a record must
have that is read in spite of it is found without the package's readers (``Case.read``).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import pickle
import random
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
from PIL import Image

WILD: list[Any] = [
    None, True, -1, 2**63, 1e308, float("nan"), "", " ", "a\0b", "\ud800", "a" * 70_000, [], {}, [[]], [None],
    {"role": None}, "\r\n", "/", "\u2028", "\u202e", "<image>", "<|im_end|>", "\ufeff", [1, 2], {"a": {"b": []}},
]  # fmt: skip
"""Values that replace another one."""
PATHS = ["../small.png", "/etc/hostname", "/", "gone.png", "a\0.png", "x" * 5000, "/dev/zero", "pipe.png", "folder.png",
         "data:image/png;base64,AAAA", "data:image/png;base64,%%", "http://a/b.png", "loop.png"]  # fmt: skip
"""Values of an image's path."""
LITERALS = ["9" * 5000, "-1e999", "NaN", "[" * 20_000, '{"a":' * 10_000, '"\\ud800"', "tru", "'a'", '{"a":1,}', '"', ""]
"""Texts that replace a value of a JSON; some are not valid."""
SMALL = "small.png"
"""A picture that is beside every data file."""


@dataclass
class Case:
    """One damaged data set."""

    kind: str
    """Format and damage: ``csv/bytes``."""
    path: Path
    """What ``data_path`` is."""
    names: tuple[str, ...]
    """Of the files, one of which an error must name."""
    row: str = ""
    """What an error about the damaged record names besides: ``:2``. Empty: the damage is of the file."""
    records: int | None = None
    """How many there are if it is read; None: it depends on the damage."""
    read: Callable[[], list[Any]] | None = None
    """The records as another reader has them; called where the package has read them."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the data set."""


# ---- pictures -------------------------------------------------------------------------------------------------------


def plain(draw: random.Random) -> bytes:
    """A small PNG of noise."""
    stream = io.BytesIO()
    Image.frombytes("RGB", (8, 8), draw.randbytes(8 * 8 * 3)).save(stream, "PNG")
    return stream.getvalue()


def broken_picture(draw: random.Random, content: bytes) -> bytes:
    """Bits changed, or a part missing."""
    data, how = bytearray(content), draw.randrange(4)
    if how == 0:
        return bytes(data[: draw.randrange(len(data))])
    if how == 1:
        return b""
    if how == 2:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    else:
        at = draw.randrange(len(data))
        data[at : at + 8] = draw.randbytes(8)
    return bytes(data)


# ---- records --------------------------------------------------------------------------------------------------------

RECORDS: list[dict[str, Any]] = [
    {"text": "a document of nine words about nothing in particular"},
    {"text_prompt": "a red square", "image_path": SMALL},
    {"conversations": [
        {"role": "system", "type": "text", "content": "be short"},
        {"role": "user", "type": "image", "image_path": SMALL},
        {"role": "gpt", "type": "text", "content": "a square"}]},
    {"image": SMALL, "conversations": [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "it"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": SMALL}},
                                               {"type": "text", "text": "and this?"}]},
                  {"role": "assistant", "content": "a circle"}]},
    {"images": [SMALL], "texts": [{"user": "which colour?", "assistant": "red"}], "relevance_ratings": [4]},
    {"image": SMALL, "caption": "a green circle"},
    {"image": SMALL, "captions": json.dumps({"short": "one", "long": "one of many"})},
    {"image": SMALL, "question": "which shape?", "answer": "a circle"},
    {"image_list": [SMALL, SMALL], "instruction_list": [["make it blue"]]},
    {"instruction": "put <image> there", "input_images": [SMALL], "output_images": [SMALL]},
]  # fmt: skip
"""One of each layout."""


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in it."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from nodes(inner, (*path, key))


def replace_at(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replace_at(value[path[0]], path[1:], new)
    return copy


def changed_record(draw: random.Random, record: dict[str, Any]) -> Any:
    """With a value of another kind, a key less, or one more."""
    path = draw.choice([*nodes(record)][1:])
    how = draw.randrange(4)
    if how == 0:
        key = draw.choice([*record])
        less = {name: value for name, value in record.items() if name != key}
        return less if draw.random() < 0.5 else {**less, draw.choice(["Text", "x", "", "a\0"]): record[key]}
    if how == 1:
        return {**record, draw.choice(["id", "x", "text", "image", "messages"]): draw.choice(WILD)}
    return replace_at(record, path, draw.choice(WILD if how == 2 else PATHS))


def traps(folder: Path) -> None:
    """What some of ``PATHS`` name: a pipe, which nobody writes to, a folder and a link to itself."""
    os.mkfifo(folder / "pipe.png")
    (folder / "folder.png").mkdir()
    (folder / "loop.png").symlink_to("loop.png")


def changed_bytes(draw: random.Random, raw: bytes) -> bytes:
    """A bit, a few bytes, a range, or the end changed."""
    data = bytearray(raw)
    how, at = draw.randrange(5), draw.randrange(len(data))
    if how == 0:
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif how == 1:
        data[at : at + draw.randrange(1, 9)] = draw.randbytes(draw.randrange(1, 9))
    elif how == 2:
        data = data[:at]
    elif how == 3:
        data[at : at + 1] = draw.choice([b"\0", b"\xff", b"\n", b"\r", b'"', b"\xc3\x28", b"\xed\xa0\x80", b",", b"\\"])
    else:
        first, second = sorted(draw.randrange(len(data) + 1) for _ in range(2))
        data = data[:first] + data[second:] if draw.random() < 0.5 else data + data[first:second]
    return bytes(data)


# ---- formats --------------------------------------------------------------------------------------------------------


def write_json(file: Path, records: list[Any]) -> None:
    lines = [json.dumps(record) for record in records]
    text = "[\n" + ",\n".join(lines) + "\n]" if file.suffix == ".json" else "\n".join(lines) + "\n"
    file.write_text(text, encoding="utf-8")


def read_json(file: Path) -> list[Any]:
    raw = file.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if raw.strip().startswith(b"["):
        return list(json.loads(raw))
    return [json.loads(line) for line in raw.split(b"\n") if line.strip()]


def write_csv(file: Path, records: list[Any]) -> None:
    stream = io.StringIO()
    writer = csv.writer(stream, delimiter="\t" if file.suffix == ".tsv" else ",", lineterminator="\n")
    writer.writerow(records[0])
    writer.writerows(
        [value if isinstance(value, str) else json.dumps(value) for value in record.values()] for record in records
    )
    file.write_bytes(stream.getvalue().encode("utf-8", "replace"))


def read_csv(file: Path) -> list[Any]:
    text = io.StringIO(file.read_bytes().decode("utf-8-sig"), newline="")
    rows = [row for row in csv.reader(text, delimiter="\t" if file.suffix == ".tsv" else ",") if row]
    records = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    return [{k: json.loads(v) if k in ("images", "texts") else v for k, v in row.items()} for row in records]


def write_table(file: Path, records: list[Any]) -> None:
    table = pa.Table.from_pylist(records)
    if file.suffix == ".parquet":
        pq.write_table(table, file, row_group_size=2)
    elif file.suffix == ".feather":
        feather.write_feather(table, str(file), compression="lz4")
    else:
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, 2)


def read_table(file: Path) -> list[Any]:
    if file.suffix == ".parquet":
        return list(pq.ParquetFile(file).read().to_pylist())
    with file.open("rb") as stream:
        is_file = stream.read(6) == b"ARROW1"
    reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file.open("rb"))
    return list(reader.read_all().to_pylist())


def write_packed(file: Path, records: list[Any]) -> None:
    write_json(file, records)
    raw = file.read_bytes()
    file.write_bytes(gzip.compress(raw) if file.suffix == ".gz" else pa.compress(raw, codec="zstd", asbytes=True))


def read_packed(file: Path) -> list[Any]:
    if file.suffix == ".gz":
        raw = gzip.decompress(file.read_bytes())
    else:
        with pa.CompressedInputStream(pa.OSFile(str(file)), "zstd") as stream:
            raw = stream.read()
    (file.parent / "reference").write_bytes(raw)
    return read_json(file.parent / "reference")


Writer, Reader = Callable[[Path, list[Any]], None], Callable[[Path], list[Any]]
FORMATS: dict[str, tuple[Writer, Reader, str, float]] = {
    "jsonl": (write_json, read_json, ":", 20),
    "json": (write_json, read_json, ":", 6),
    "csv": (write_csv, read_csv, ":", 6),
    "tsv": (write_csv, read_csv, ":", 3),
    "parquet": (write_table, read_table, "row", 8),
    "feather": (write_table, read_table, "row", 5),
    "arrow": (write_table, read_table, "row", 5),
    "jsonl.gz": (write_packed, read_packed, ":", 4),
    "jsonl.zst": (write_packed, read_packed, ":", 3),
}
"""Suffix -> what writes it, another reader of it, how messages name a record, and the share of the cases."""


def of_format(draw: random.Random, folder: Path) -> Case:
    """A file with a changed record, changed bytes, or a text in a JSON that is none."""
    traps(folder)
    suffix = draw.choices([*FORMATS], [share for *_, share in FORMATS.values()])[0]
    write, read, row, _ = FORMATS[suffix]
    file, how = folder / f"train.{suffix}", draw.choice(["value", "bytes", "literal"])
    records: list[Any] = draw.sample(RECORDS, 3)
    if not suffix.startswith("json"):  # of one layout: columns
        record = draw.choice([RECORDS[0], RECORDS[1], RECORDS[5], RECORDS[6]])
        records = [{**record, "note": f"{i}"} for i in range(3)]
    if how == "value":
        at = draw.randrange(3)
        records[at] = changed_record(draw, records[at])
    try:
        write(file, records)
    except (pa.ArrowException, csv.Error, ValueError, OverflowError, TypeError):  # the format has no such value
        records[at], how = records[at - 1], "bytes"
        write(file, records)
    if how == "bytes" or (how == "literal" and suffix not in ("json", "jsonl")):
        how = "bytes"
        file.write_bytes(changed_bytes(draw, file.read_bytes()))
    elif how == "literal":
        at, key = draw.randrange(3), "@@"
        records[at] = replace_at(records[at], draw.choice([*nodes(records[at])][1:]), key)
        write(file, records)
        file.write_text(file.read_text().replace('"@@"', draw.choice(LITERALS)), encoding="utf-8")
    number = None if how == "bytes" else 3
    row_name = "" if how == "bytes" else row
    return Case(f"{suffix}/{how}", file, ("train.jsonl", file.name), row_name, number, lambda: read(file))


def text_file(draw: random.Random, folder: Path) -> Case:
    """A plain text with changed bytes, as one document or by lines."""
    divide = draw.choice(["file", "line"])
    file = folder / draw.choice(["notes.txt", "notes.md"])
    file.write_bytes(changed_bytes(draw, "first line\nsecond \u00e9\u4e2d\n\n \nthird\r\n\nfourth".encode()))
    read = (lambda: [{"text": file.read_bytes().decode("utf-8-sig")}]) if divide == "file" else None
    return Case("text/bytes", file, (file.name,), read=read, options={"format": {"type": "text", "divide": divide}})


@dataclass
class FolderMaker:
    """Writes a file where it is unpickled."""

    target: str

    def __reduce__(self) -> tuple[Any, tuple[str, int]]:
        return os.mkdir, (self.target, 0o777)


def tar_file(draw: random.Random, folder: Path) -> Case:
    """A tar of which a member, bytes, a header or the end are changed, or with a pickled member."""
    image, members = plain(draw), list[tuple[str, bytes]]()
    for i in range(3):
        record = {**RECORDS[3], "image": f"{i}.png"}
        beside = draw.choice([(f"{i}.txt", f"caption {i}".encode()), (f"{i}.json", json.dumps(record).encode())])
        members += [(f"{i}.png", image), beside]
    file, row, how = folder / "train.tar", "", draw.choice(["member", "pickled", "bytes", "cut", "header", "appended"])
    if how == "member":
        at = draw.randrange(len(members))
        name, content = members[at]
        row = name.partition(".")[0]
        if name.endswith(".json"):
            content = json.dumps(changed_record(draw, json.loads(content))).encode()
        else:
            content = broken_picture(draw, content) if name.endswith(".png") else changed_bytes(draw, content)
        members[at] = (name, content)
    elif how == "pickled":
        new = draw.choice(["1.PKL", "9.pth", "a.pyd", "9.pickle", "../1.txt", "1.txt", "\udcff.txt", "n" * 90 + ".txt"])
        members.append((new, pickle.dumps(FolderMaker(str(folder / "unpickled")))))
    write_tar(file, members, draw.choice([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
    raw = file.read_bytes()
    if how == "bytes":
        raw = changed_bytes(draw, raw.rstrip(b"\0") + bytes(1024))
    elif how == "cut":
        raw = raw[: draw.randrange(0, len(raw.rstrip(b"\0")) + 512)]
    elif how == "header":
        raw = crafted_header(draw, raw)
    elif how == "appended":
        raw += draw.choice([raw, b"x" * 512, bytes(512), draw.randbytes(700)])
    file.write_bytes(raw)
    number = 3 if how in ("member", "bytes", "cut", "appended") else None
    return Case(f"tar/{how}", file, (file.name, *(name for name, _ in members)), row, number)


def write_tar(file: Path, members: Sequence[tuple[str, bytes]], form: int) -> None:
    with tarfile.open(file, "w", format=form) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def crafted_header(draw: random.Random, raw: bytes) -> bytes:
    """A field of a header changed, with the right sum: sizes that are negative or huge, other types."""
    data = bytearray(raw)
    at = draw.choice([at for at in range(0, len(data) - 512, 512) if data[at + 257 : at + 262] == b"ustar"])
    offset, new = draw.choice([
        (124, b"\xff" * 12), (124, b"\x80" + b"\x7f" * 11), (124, b"77777777777\0"), (124, b"abcdefghijk\0"),
        (156, draw.choice([b"1", b"2", b"3", b"5", b"L", b"x", b"g", b"S", b"\0"])), (0, b"\xff" * 8), (257, b"\0" * 8),
    ])  # fmt: skip
    data[at + offset : at + offset + len(new)] = new
    data[at + 148 : at + 156] = b" " * 8
    data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    return bytes(data)


def image_folder(draw: random.Random, folder: Path) -> Case:
    """A caption, a picture or a row of the metadata changed."""
    data = folder / "pictures"
    data.mkdir()
    for i in range(3):
        (data / f"{i}.png").write_bytes(plain(draw))
        (data / f"{i}.txt").write_text(f"caption {i}", encoding="utf-8")
    traps(data)
    at, how = draw.randrange(3), draw.choice(["captions", "pictures", "rows"])
    if how == "captions":
        (data / f"{at}.txt").write_bytes(draw.choice([b"", b"\xff", b"a\0b", b"\xef\xbb\xbfx", b"y" * 70_000, b"\n\n"]))
    elif how == "pictures":
        (data / f"{at}.png").write_bytes(broken_picture(draw, plain(draw)))
    else:
        rows: list[Any] = [{"file_name": f"{i}.png", "text": f"caption {i}"} for i in range(3)]
        rows[at] = changed_record(draw, rows[at])
        write_json(data / "metadata.jsonl", rows)
        return Case("folder/rows", data, ("metadata.jsonl",), f":{at + 1}", 3)
    return Case(f"folder/{how}", data, (f"{at}.txt", f"{at}.png"), records=3)


MAKERS: list[tuple[Callable[[random.Random, Path], Case], float]] = [
    (of_format, 60), (text_file, 5), (tar_file, 12), (image_folder, 15),
]  # fmt: skip


def case(seed: int, number: int, folder: Path) -> Case:
    """Case ``number``; always the same one of a seed. ``folder``: an empty one for its files."""
    draw = random.Random(f"{seed}/{number}")
    make = draw.choices([one for one, _ in MAKERS], [weight for _, weight in MAKERS])[0]
    (folder / SMALL).write_bytes(plain(draw))
    return make(draw, folder)
