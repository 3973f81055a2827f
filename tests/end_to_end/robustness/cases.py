"""Damaged data files, one case for each number: ``case(seed, number, folder)`` writes and describes them.

A case is a small file of one format with a record, or a few bytes, changed. What a record must have that is read in
spite of it is found without the package's readers (``Case.read``).
"""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import os
import pickle
import random
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.end_to_end.robustness.pictures import broken_picture, plain, wild_picture

WILD: list[Any] = [
    None, True, False, -1, 0, 2**63, 10**300, 1e308, -0.0, "", " ", "\0", "a\0b", "\ud800", "x\udfff", "a" * 70_000,
    [], {}, [[]], [None], {"role": None}, "\n", "\r\n", ".", "/", "\u2028", "\u202e", "NaN", "~", "$HOME", "é" * 999,
    "<image>", "<|im_end|>", "\ufeff", "null", [1, 2], {"a": {"b": []}}, "0", float("nan"), float("inf"),
]  # fmt: skip
"""Values that replace another one."""
LITERALS = [
    "9" * 4300, "-" + "9" * 5000, "1" * 5000 + ".5", "1e999", "-1e999", "NaN", "Infinity", "-Infinity", "[" * 20_000,
    '{"a":' * 10_000, '"\\ud800"', '"\\u0000"', "tru", '"\\x"', "'a'", "0x1", "01", "--1", '{"a":1,}', "//", '"', "",
]  # fmt: skip
"""Texts that replace a value of a JSON; some are not valid."""
TEXT_KEYS = ("text", "text_prompt", "content", "value", "caption", "user", "assistant", "instruction", "prompt")
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
    picture: Path | None = None
    """A picture whose pixels are compared."""


def case(seed: int, number: int, folder: Path) -> Case:
    """Case ``number``; always the same one of a seed. ``folder``: an empty one for its files."""
    draw = random.Random(f"{seed}/{number}")
    make = draw.choices([one for one, _ in MAKERS], [weight for _, weight in MAKERS])[0]
    (folder / SMALL).write_bytes(plain(draw))
    return make(draw, folder)


# ---- values ---------------------------------------------------------------------------------------------------------


def good_records(draw: random.Random) -> list[dict[str, Any]]:
    """One of each layout, in any order."""
    given: list[dict[str, Any]] = [
        {"text": "a document of nine words about nothing in particular"},
        {"text_prompt": "a red square", "image_path": SMALL},
        {"conversations": [
            {"role": "system", "type": "text", "content": "be short"},
            {"role": "user", "type": "image", "image_path": SMALL},
            {"role": "human", "type": "text", "content": "what is it?"},
            {"role": "gpt", "type": "text", "content": "a square"}]},
        {"image": SMALL, "conversations": [{"from": "human", "value": "<image>\nwhat?"},
                                           {"from": "gpt", "value": "it"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": SMALL}},
                                                   {"type": "text", "text": "and this?"}]},
                      {"role": "assistant", "content": "a circle"}]},
        {"images": [SMALL], "texts": [{"user": "which colour?", "assistant": "red"}], "relevance_ratings": [4]},
        {"image": SMALL, "caption": "a green circle"},
        {"image": SMALL, "captions": dumps({"short": "one", "long": "one of many"})},
        {"image_list": [SMALL, SMALL], "instruction_list": [["make it blue"]]},
        {"instruction": "put <image> there", "input_images": [SMALL], "output_images": [SMALL]},
    ]  # fmt: skip
    draw.shuffle(given)
    return given


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in it."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from nodes(inner, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def nested(draw: random.Random) -> str:
    """What ``dumps`` writes as lists in lists: as deep as JSON may be read, or a little less."""
    depth = draw.choice([50, 300, 450, 600, 800, draw.randrange(860, 1000)])
    return f"@@{draw.choice(['lists', 'mixed'])}:{depth}@@"


def dumps(value: Any) -> str:
    """``json.dumps``, whose depth depends on who calls it, with ``nested`` values."""

    def written(match: re.Match[str]) -> str:
        first, last = ("[", "]") if match[1] == "lists" else ('[{"a":', "}]")
        return first * int(match[2]) + '"x"' + last * int(match[2])

    return re.sub(r'"@@(lists|mixed):(\d+)@@"', written, json.dumps(value))


def changed_record(draw: random.Random, record: dict[str, Any]) -> Any:
    """With a value of another kind, a key less, one with another name, or one more."""
    path = draw.choice([*nodes(record)][1:] or [()])
    how = draw.randrange(6)
    if how <= 1:
        return replaced(record, path, draw.choice(WILD))
    if how == 2:
        return replaced(record, path, nested(draw))
    if how == 3 and path and isinstance(path[-1], str):
        parent: Any = record
        for key in path[:-1]:
            parent = parent[key]
        less = {key: value for key, value in parent.items() if key != path[-1]}
        if draw.random() < 0.5:
            less[draw.choice(["Text", "x", "", "image", "role", "text", "a\0"])] = parent[path[-1]]
        return replaced(record, path[:-1], less)
    if how == 4:
        return {**record, draw.choice(["id", "x", "text", "image", "messages"]): draw.choice([*WILD, nested(draw)])}
    return replaced(record, path, draw.choice(PATHS))


PATHS = ["../small.png", "/etc/hostname", "/", ".", "", "gone.png", "a\0.png", "x" * 5000, "small.png/", "/dev/null",
         "/dev/zero", "pipe.png", "folder.png", "data:image/png;base64,AAAA", "data:image/png;base64,%%", "http://a/b.png",
         "file:///etc/hostname", "small.png\n", "loop.png", "../" * 2000, "\udcff.png"]  # fmt: skip
"""Values of an image's path."""


def traps(folder: Path) -> None:
    """What some of ``PATHS`` name: a pipe, which nobody writes to, a folder and a link to itself."""
    os.mkfifo(folder / "pipe.png")
    (folder / "folder.png").mkdir()
    (folder / "loop.png").symlink_to("loop.png")


def changed_bytes(draw: random.Random, raw: bytes, *, most: int = 4) -> bytes:
    """A bit, a few bytes, a range, or the end changed."""
    data = bytearray(raw)
    how = draw.randrange(6)
    if how <= 1:
        for _ in range(draw.randrange(1, most)):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif how == 2:
        at = draw.randrange(len(data))
        data[at : at + draw.randrange(1, 9)] = draw.randbytes(draw.randrange(1, 9))
    elif how == 3:
        data = data[: draw.randrange(len(data))]
    elif how == 4:
        at = draw.randrange(len(data))
        data[at : at + 1] = draw.choice([b"\0", b"\xff", b"\n", b"\r", b'"', b"\xc3\x28", b"\xed\xa0\x80", b",", b"\\"])
    else:
        first, second = sorted(draw.randrange(len(data) + 1) for _ in range(2))
        data = data[:first] + data[second:] if draw.random() < 0.5 else data + data[first:second]
    return bytes(data)


def strings(value: Any, keys: Sequence[str] = TEXT_KEYS, key: str = "") -> Iterator[str]:
    """Texts of a record that a model must see, where it is read."""
    if isinstance(value, str):
        if key in keys:
            yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from strings(inner, keys, name)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner, keys, key)


# ---- JSON, CSV and text ---------------------------------------------------------------------------------------------


def json_values(draw: random.Random, folder: Path) -> Case:
    """One record of a JSONL file, or of an array, changed."""
    traps(folder)
    records: list[Any] = good_records(draw)[:4]
    at = draw.randrange(len(records))
    records[at] = changed_record(draw, records[at])
    array = draw.random() < 0.2
    path = folder / ("train.json" if array else "train.jsonl")
    texts = [dumps(record) for record in records]
    path.write_text("[\n" + ",\n".join(texts) + "\n]" if array else "\n".join(texts) + "\n", encoding="utf-8")
    return Case("json/values", path, (path.name,), f":{at + 1 + array}", len(records), lambda: json_lines(path))


def json_literals(draw: random.Random, folder: Path) -> Case:
    """A value of a JSONL's record as a text that may be no JSON."""
    records = good_records(draw)[:3]
    at = draw.randrange(len(records))
    path = draw.choice([*nodes(records[at])][1:])
    texts = [dumps(record) for record in records]
    texts[at] = dumps(replaced(records[at], path, "@@")).replace('"@@"', draw.choice(LITERALS))
    file = folder / "train.jsonl"
    file.write_text("\n".join(texts), encoding="utf-8")
    return Case("json/literals", file, (file.name,), f":{at + 1}", len(records), lambda: json_lines(file))


def json_bytes(draw: random.Random, folder: Path) -> Case:
    array = draw.random() < 0.3
    file = folder / ("train.json" if array else "train.jsonl")
    records = good_records(draw)[:3]
    text = dumps(records) if array else "\n".join(map(dumps, records)) + "\n"
    file.write_bytes(changed_bytes(draw, text.encode()))
    return Case("json/bytes", file, (file.name,), read=lambda: json_lines(file))


def json_lines(file: Path) -> list[Any]:
    """By Python's own reader."""
    raw = file.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if raw.strip().startswith(b"["):
        return list(json.loads(raw))
    return [json.loads(line) for line in raw.split(b"\n") if line.strip()]


def csv_values(draw: random.Random, folder: Path) -> Case:
    """A cell of a CSV or TSV file changed, or a row with another number of cells."""
    traps(folder)
    tab = draw.random() < 0.3
    file = folder / ("train.tsv" if tab else "train.csv")
    kind = draw.randrange(3)
    rows: list[list[str]] = [
        [["text"], ["one"], ["two, three"], ['fo"ur\nfive']],
        [["image", "caption"], [SMALL, "a circle"], [SMALL, "a square"]],
        [["images", "texts"], *([dumps([SMALL]), dumps([{"user": "a", "assistant": f"b{i}"}])] for i in (1, 2))],
    ][kind]  # fmt: skip
    rows = [list(row) for row in rows]
    at, column = draw.randrange(1, len(rows)), draw.randrange(len(rows[0]))
    new = draw.choice([*(w for w in WILD if isinstance(w, str)), *PATHS, *LITERALS, dumps(nested(draw))])
    new = new.encode(errors="replace").decode()
    how = draw.randrange(4)
    if how == 0 and len(rows[at]) > 1:
        del rows[at][column]
    elif how == 1:
        rows[at].append(new)
    else:
        rows[at][column] = new
    stream = io.StringIO()
    csv.writer(stream, delimiter="\t" if tab else ",", lineterminator="\n").writerows(rows)
    file.write_text(stream.getvalue(), encoding="utf-8", newline="")
    return Case("csv/values", file, (file.name,), ":", None, lambda: csv_rows(file))


def csv_bytes(draw: random.Random, folder: Path) -> Case:
    file = folder / "train.csv"
    file.write_bytes(changed_bytes(draw, b'text,note\none,1\n"two, ""three""\nfour",2\nfive,\n'))
    return Case("csv/bytes", file, (file.name,), read=lambda: csv_rows(file))


def csv_rows(file: Path) -> list[Any]:
    """By Python's own reader, nested columns as JSON."""
    text = file.read_bytes().decode("utf-8-sig")
    rows = [
        row for row in csv.reader(io.StringIO(text, newline=""), delimiter="\t" if ".tsv" in file.name else ",") if row
    ]
    found: list[dict[str, Any]] = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    return [{k: json.loads(v) if k in ("images", "texts") else v for k, v in row.items()} for row in found]


def text_files(draw: random.Random, folder: Path) -> Case:
    """A plain text with changed bytes, as one document, by lines or by paragraphs."""
    divide = draw.choice(["file", "line", "paragraph"])
    raw = "first line\nsecond \u00e9\u4e2d\n\n \nthird\r\n\nfourth".encode()
    file = folder / draw.choice(["notes.txt", "notes.md"])
    file.write_bytes(draw.choice([b"\0" * 9, b"\xff\xfea\0", raw[:0], b"\x80"]) if draw.random() < 0.1
                     else changed_bytes(draw, raw))  # fmt: skip
    read = (lambda: [{"text": file.read_bytes().decode("utf-8-sig")}]) if divide == "file" else None
    return Case("text/bytes", file, (file.name,), read=read, options={"format": {"type": "text", "divide": divide}})


# ---- containers -----------------------------------------------------------------------------------------------------


def table(draw: random.Random) -> Any:
    """A table of one layout, with images inside."""
    import pyarrow as pa

    image = plain(draw)
    stored = [{"bytes": image, "path": None}] * 3
    given: list[dict[str, Any]] = [
        {"text": ["one", "two three", "four"], "note": ["x" * 40, None, "y"]},
        {"image": stored, "text": ["a circle", "a square", "a dot"]},
        {"image": [image] * 3, "captions": [dumps([f"dot {i}"]) for i in range(3)]},
        {"images": [stored[:1]] * 3, "texts": [[{"user": "what?", "assistant": f"it {i}"}] for i in range(3)]},
        {"image_list": [[image, image]] * 3, "instruction_list": [[[f"turn {i}"]] for i in range(3)]},
    ]
    return pa.table(draw.choice(given))


def write_table(draw: random.Random, found: Any, file: Path) -> None:
    import pyarrow as pa
    import pyarrow.feather
    import pyarrow.parquet

    if file.suffix == ".parquet":
        pa.parquet.write_table(found, file, row_group_size=draw.choice([1, 2, 3]),
                               compression=draw.choice(["snappy", "none", "zstd", "gzip"]),
                               use_dictionary=draw.random() < 0.5)  # fmt: skip
    elif file.suffix == ".feather":
        pa.feather.write_feather(found, str(file), compression=draw.choice(["uncompressed", "lz4", "zstd"]))
    else:
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, found.schema) as writer:
            for batch in found.to_batches(max_chunksize=2):
                writer.write_batch(batch)


def table_bytes(draw: random.Random, folder: Path) -> Case:
    """A parquet or Arrow file with changed bytes, or cut."""
    file = folder / f"train.{draw.choice(['parquet', 'feather', 'arrow'])}"
    found = table(draw)
    write_table(draw, found, file)
    file.write_bytes(changed_bytes(draw, file.read_bytes(), most=3))
    return Case(f"{file.suffix[1:]}/bytes", file, (file.name,), read=lambda: table_rows(file))


def table_values(draw: random.Random, folder: Path) -> Case:
    """A column of another type: numbers, times, nested values, nulls, names that occur twice."""
    import datetime

    import pyarrow as pa

    file = folder / f"train.{draw.choice(['parquet', 'feather', 'arrow'])}"
    found = table(draw)
    name, how = draw.choice(found.column_names), draw.randrange(14)
    rows, ends = found.num_rows, pa.py_buffer(np.arange(4, dtype="<i4").tobytes())
    stored_type = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns: list[Callable[[], Any]] = [
        lambda: pa.array([1, 2, None]), lambda: pa.array([float("nan"), 1e308, None]), lambda: pa.nulls(rows),
        lambda: pa.array([b"\xff\xfe", b"", b"x"]), lambda: pa.array([[], None, [None]], pa.list_(pa.string())),
        lambda: pa.array([{"bytes": None, "path": None}] * rows, stored_type),
        lambda: pa.array([2**62, -(2**62), 0], pa.timestamp("us")), lambda: pa.array(["", " ", "a\0b"]),
        lambda: pa.array([datetime.date(1, 1, 1)] * rows), lambda: pa.array(["a", "b", "a"]).dictionary_encode(),
        lambda: pa.array([[("k", b"v")]] * rows, pa.map_(pa.string(), pa.binary())), lambda: pa.array([True] * rows),
        lambda: pa.StringArray.from_buffers(3, ends, pa.py_buffer(b"\xff\xfe\x80")),
        lambda: pa.array([2**40, 5, 6], pa.duration("s")),
    ]  # fmt: skip
    changed = found.set_column(found.column_names.index(name), name, columns[how]())
    if draw.random() < 0.1:
        changed = changed.append_column(name, pa.array(["twice"] * rows))
    try:
        write_table(draw, changed, file)
    except (pa.ArrowException, ValueError):  # parquet has no such type
        write_table(draw, found, file)
    read = None if how in (6, 12, 13) else lambda: table_rows(file)
    return Case(f"{file.suffix[1:]}/values", file, (file.name,), "row", read=read)


def table_rows(file: Path) -> list[Any]:
    """By pyarrow's own reader."""
    import pyarrow as pa
    import pyarrow.feather
    import pyarrow.parquet

    if file.suffix == ".parquet":
        return list(pa.parquet.ParquetFile(file).read().to_pylist())
    with file.open("rb") as stream:
        is_file = stream.read(6) == b"ARROW1"
    opened = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file.open("rb"))
    return list(opened.read_all().to_pylist())


@dataclass
class Pickled:
    """Writes a file where it is unpickled."""

    target: str

    def __reduce__(self) -> tuple[Any, tuple[str, int]]:
        return os.mkdir, (self.target, 0o777)


def tar_case(draw: random.Random, folder: Path) -> Case:
    """A tar whose bytes, headers or members are changed."""
    image = plain(draw)
    members: list[tuple[str, bytes]] = []
    kind = draw.randrange(3)
    for i in range(3):
        key = f"{i:04d}"
        if kind == 0:
            members += [(f"{key}.png", image), (f"{key}.txt", f"caption {i}".encode())]
        elif kind == 1:
            record = {"image": f"{key}.png", "conversations": [{"from": "human", "value": "<image>\nwhat?"},
                                                                {"from": "gpt", "value": f"it {i}"}]}  # fmt: skip
            members += [(f"{key}.json", dumps(record).encode()), (f"{key}.png", image)]
        else:
            members += [(f"{key}.txt", f"text {i}".encode())]
    how = draw.randrange(7)
    file, row = folder / "train.tar", ""
    options: dict[str, Any] = {}
    records: int | None = 3
    if how == 0:
        at = draw.randrange(len(members))
        name, content = members[at]
        row = name.partition(".")[0]
        if name.endswith(".json"):
            content = dumps(changed_record(draw, json.loads(content))).encode()
        elif name.endswith(".png"):
            content = broken_picture(draw, content)
        else:
            content = changed_bytes(draw, content)
        members[at] = (name, content)
    elif how == 1:
        new = draw.choice(["0001.PKL", "9.pth", "a.pyd", "9.pickle", "x", ".txt", "../0001.txt", "0001.txt",
                           "a/b.c.txt",
                           "\udcff.txt", "n" * 300 + ".txt", "0001.npy"])  # fmt: skip
        members.append((new, pickle.dumps(Pickled(str(folder / "unpickled")))))
        options = {"format": {"type": "webdataset", "pickled": "skip"}} if draw.random() < 0.5 else {}
        records = None
    write_tar(file, members, draw.choice([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
    raw = file.read_bytes()
    if how == 2:
        raw = changed_bytes(draw, raw.rstrip(b"\0") + bytes(1024), most=3)
    elif how == 3:
        raw = raw[: draw.randrange(0, len(raw.rstrip(b"\0")) + 512)]
    elif how == 4:
        raw = crafted(draw, raw)
        records = None
    elif how == 5:
        raw = raw[: draw.randrange(1, len(raw) // 512) * 512]
    elif how == 6:
        raw += draw.choice([raw, b"x" * 512, bytes(512), draw.randbytes(700)])
    file.write_bytes(raw)
    names = [members[0][0], *(name for name, _ in members)]
    kind_of = ("member", "extra", "bytes", "cut", "header", "cut blocks", "appended")[how]
    return Case(f"tar/{kind_of}", file, (file.name, *names),
                row, records, options=options)  # fmt: skip


def write_tar(file: Path, members: Sequence[tuple[str, bytes]], form: int) -> None:
    with tarfile.open(file, "w", format=form) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name[:90] if form == tarfile.USTAR_FORMAT else name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def crafted(draw: random.Random, raw: bytes) -> bytes:
    """A field of a header changed, with the right sum: sizes that are negative or huge, other types."""
    data = bytearray(raw)
    starts = [at for at in range(0, len(data) - 512, 512) if data[at + 257 : at + 262] == b"ustar"]
    at = draw.choice(starts)
    offset, new = draw.choice([
        (124, b"\xff" * 12), (124, b"\xff" * 11 + b"\0"), (124, b"\x80" + b"\x7f" * 11), (124, b"77777777777\0"),
        (124, b"00000000000\0"), (124, b"abcdefghijk\0"),
        (156, draw.choice([b"1", b"2", b"3", b"5", b"6", b"L", b"K", b"x",
        b"g", b"S", b"Z", b"\0"])), (0, b"\0" * 8), (0, b"\xff" * 8), (257, b"\0" * 8), (136, b"\xff" * 12),
    ])  # fmt: skip
    data[at + offset : at + offset + len(new)] = new
    data[at + 148 : at + 156] = b" " * 8
    data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    return bytes(data)


def compressed(draw: random.Random, folder: Path) -> Case:
    """A compressed JSONL with changed bytes, or cut."""
    import pyarrow as pa

    raw = "\n".join(map(dumps, good_records(draw)[:4])).encode()
    packed = draw.random() < 0.5
    file = folder / f"train.jsonl.{'gz' if packed else 'zst'}"
    content = gzip.compress(raw, mtime=0) if packed else pa.compress(raw, codec="zstd", asbytes=True)
    file.write_bytes(changed_bytes(draw, content, most=3))

    def read() -> list[Any]:
        whole = gzip.decompress(file.read_bytes()) if packed else unpacked(file)
        (folder / "reference.jsonl").write_bytes(whole)
        return json_lines(folder / "reference.jsonl")

    return Case(f"{file.suffix[1:]}/bytes", file, ("train.jsonl",), read=read)


def unpacked(file: Path) -> bytes:
    """A whole zstd stream, by pyarrow's codec, which must know its size."""
    import pyarrow as pa

    with pa.CompressedInputStream(pa.OSFile(str(file)), "zstd") as stream:
        return bytes(stream.read())


def image_folder(draw: random.Random, folder: Path) -> Case:
    """Captions or metadata changed."""
    data = folder / "pictures"
    data.mkdir()
    for i in range(3):
        (data / f"{i}.png").write_bytes(plain(draw))
    traps(data)
    how = draw.randrange(4)
    if how == 0:
        for i in range(3):
            (data / f"{i}.txt").write_text(f"caption {i}", encoding="utf-8")
        at = draw.randrange(3)
        (data / f"{at}.txt").write_bytes(draw.choice([b"", b"\xff", b"a\0b", b"\xef\xbb\xbfx", b"y" * 70_000, b"\n\n"]))
        return Case("folder/captions", data, (f"{at}.txt",), records=3)
    if how == 1:
        for i in range(2):
            (data / f"{i}.txt").write_text(f"caption {i}", encoding="utf-8")
        (data / "0.png").write_bytes(broken_picture(draw, plain(draw)))
        return Case("folder/pictures", data, ("0.png", "0.txt"), records=2)
    rows: list[dict[str, Any]] = [{"file_name": f"{i}.png", "text": f"caption {i}"} for i in range(3)]
    if how == 2:
        at = draw.randrange(3)
        rows[at] = changed_record(draw, rows[at])
        file = data / "metadata.jsonl"
        file.write_text("\n".join(map(dumps, rows)), encoding="utf-8")
        return Case("folder/jsonl", data, (file.name,), f":{at + 1}", 3)
    file = data / "metadata.csv"
    text = "file_name,text\n" + "\n".join(f"{row['file_name']},{row['text']}" for row in rows)
    file.write_bytes(changed_bytes(draw, text.encode()))
    return Case("folder/csv", data, (file.name,))


# ---- images ---------------------------------------------------------------------------------------------------------


def pictures(draw: random.Random, folder: Path) -> Case:
    """One image of any mode, format, size and orientation, whole or damaged; as a file, or inside of one."""
    traps(folder)
    content, name, whole = wild_picture(draw)
    role, image = draw.choice(["generate", "understand"]), folder / f"image{draw.choice(['.png', name, ''])}"
    image.write_bytes(content)
    compared = image if whole else None
    if draw.random() < 0.6:
        record = {"image": image.name, "caption": "a picture"}
        if draw.random() < 0.2:
            record["image"], compared = draw.choice(PATHS), None
        elif draw.random() < 0.2:
            url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
            record = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]},
                {"role": "assistant", "content": "a picture"}]}  # fmt: skip
        file = folder / "train.jsonl"
        file.write_text(dumps(record) + "\n" + dumps({"image": SMALL, "caption": "another"}) + "\n")
    else:
        import pyarrow as pa

        file = folder / "train.parquet"
        write_table(
            draw, pa.table({"image": [content, (folder / SMALL).read_bytes()], "text": ["a picture", "another"]}), file
        )
    return Case(f"image/{'whole' if whole else 'broken'}", file, (file.name, image.name), records=2, picture=compared,
                options={"captions": role})  # fmt: skip


MAKERS: list[tuple[Callable[[random.Random, Path], Case], float]] = [
    (json_values, 20), (json_literals, 5), (json_bytes, 8), (csv_values, 7), (csv_bytes, 5), (text_files, 4),
    (table_bytes, 12), (table_values, 6), (tar_case, 10), (compressed, 5), (image_folder, 5),
    (pictures, 16),
]  # fmt: skip
