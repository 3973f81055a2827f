"""Records by byte offset, and errors that name file, line and field."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.data.support import image, talk, text
from unigen_ds.core.errors import DataError
from unigen_ds.data.records.records import Turn, parse_record
from unigen_ds.data.sources.text_files import JsonSource, line_spans

RECORDS: list[Any] = [
    talk(text("user", 'brackets ]}[{ "quoted", commas, \\ and \n lines'), text("assistant", "größer 大 🙂")),
    {"text_prompt": "", "image_path": "a.png"},
    talk(image("human", "b.png"), text("gpt", "\\\\"), text("system", '\\"')),
]


def offsets(path: Path) -> list[int]:
    return list(JsonSource(path).scan()["offsets"].tolist())


def read_all(path: Path) -> list[Any]:
    source = JsonSource(path)
    source.use(source.scan())
    return [entry.record for entry in source.read(0, len(source))]


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("indent", [None, 2])
def test_json_and_jsonl_hold_the_same_records(tmp_path: Path, ascii_only: bool, indent: int | None) -> None:
    lines = tmp_path / "x.jsonl"
    lines.write_text("".join(json.dumps(r, ensure_ascii=ascii_only) + "\n" for r in RECORDS), encoding="utf-8")
    array = tmp_path / "x.json"
    array.write_text(json.dumps(RECORDS, ensure_ascii=ascii_only, indent=indent), encoding="utf-8")
    assert read_all(lines) == read_all(array) == RECORDS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no record"),
        ("[]", "holds no record"),
        ('[{"a": 1}', "not a complete JSON array"),
        ('[{"a": 1},]', "empty element"),
        ('[{"a": 1}] tail', "after the end"),
    ],
)
def test_broken_files(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        JsonSource(path).scan()


def test_a_line_that_is_no_json_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"a": 1}\n\n{"a": \n{"a": 3}\n[1]\n')
    source = JsonSource(path)
    source.use(source.scan())
    for number, message in ((1, r"train\.jsonl:3: no valid JSON"), (3, r"train\.jsonl:5: the record is \[1\]")):
        with pytest.raises(DataError, match=message):
            source.read(number, number + 1)[0].record  # noqa: B018


def test_lines_are_found_as_one_after_the_other_would(tmp_path: Path) -> None:
    draw, path = random.Random(1), tmp_path / "x.jsonl"
    pieces = [
        b'{"a":1}', b"", b" ", b'  {"b": 2} \t', b"\r", b'{"c":3}\r', b"\x0b{}\x0c", b"\x00x", b"x" * 200,
        b"\xef\xbb\xbf{}",
    ]  # fmt: skip
    for _ in range(60):
        lines = [draw.choice(pieces) + draw.choice([b"\n", b"\n\n", b"\r\n"]) for _ in range(draw.randrange(12))]
        content = draw.choice([b"", b"\xef\xbb\xbf"]) + b"".join(lines) + draw.choice([b"", b'{"z":9}', b'{"z":9} '])
        path.write_bytes(content)
        spans = [*line_spans(path)]
        cut_lines = [content[o : o + n] for o, n in spans]
        whole = content.removeprefix(b"\xef\xbb\xbf")
        assert cut_lines == [line.strip() for line in whole.split(b"\n") if line.strip()]
        assert spans == sorted({*spans})


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": ["x"]}, r"w: text is \['x'\]"),
        ({"text": "ab\ud83d"}, r"w: text, character 2 is '\\ud83d'.*without unpaired surrogates"),
        ({"text_prompt": "x"}, r"w: image_path is missing"),
        ({"image_path": "x"}, r"w: text_prompt is missing"),
        ({"conversations": []}, r"w: conversations is \[\]"),
        ({"conversations": ["x"]}, r"w: conversations\[0\] is 'x'"),
        (talk(text("user", "x"), {"type": "text", "content": "y"}), r"w: conversations\[1\]\.role is missing"),
        (talk(text("robot", "x")), r"w: conversations\[0\]\.role is 'robot'.*Allowed: user, human"),
        (talk({"role": "user", "content": "x"}), r"w: conversations\[0\]\.type is missing.*Allowed: text, image"),
        (talk({"role": "user", "type": "video"}), r"w: conversations\[0\]\.type is 'video'"),
        (talk({"role": "user", "type": "text"}), r"w: conversations\[0\]\.content is missing"),
        (talk({"role": "user", "type": "text", "content": 3}), r"w: conversations\[0\]\.content is 3"),
        (
            talk(text("user", "x"), text("user", "y"), {"role": "user", "type": "image"}),
            r"w: conversations\[2\]\.image_path is missing",
        ),
    ],
)
def test_malformed_records_name_the_field(record: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_record(record, "w")


def test_turns_and_image_paths() -> None:
    root = Path("/data")
    assert parse_record({"text_prompt": "p", "image_path": "i/a.png"}, "", image_root=root) == [
        Turn("user", "text", "p"),
        Turn("assistant", "image", "/data/i/a.png"),
    ]
    assert parse_record({"text": "t", "url": "u"}, "") == [Turn("assistant", "text", "t")]
    turns = parse_record(talk(image("human", "/abs.png"), text("gpt", "t"), text("system", "s")), "", image_root=root)
    assert turns == [Turn("user", "image", "/abs.png"), Turn("assistant", "text", "t"), Turn("system", "text", "s")]
