"""Thousands of damaged records: each is read, or a ``DataError`` names it; no other exception. Fixed seeds."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.data.support import make_processor
from tests.end_to_end.robustness.cases import nodes, replaced
from unigen_ds.core.errors import DataError
from unigen_ds.data.index.planning import learnt
from unigen_ds.data.records.records import Layout
from unigen_ds.data.sources.base import Position
from unigen_ds.data.sources.json_lines import load_record, scan

GOOD: list[dict[str, Any]] = [
    {"text": "a document of nine words about nothing in particular"},
    {"text_prompt": "a red square", "image_path": "red.png"},
    {
        "conversations": [
            {"role": "system", "type": "text", "content": "be short"},
            {"role": "user", "type": "image", "image_path": "red.png"},
            {"role": "human", "type": "text", "content": "what is it?"},
            {"role": "gpt", "type": "text", "content": "a square"},
        ]
    },
]
WILD: list[Any] = [
    None, True, -1, 0, 1e308, "", " ", "\0", "a\0b", "\ud800", "x\udfff", "../" * 2000, "a" * 5000, [], {}, [[]],
    [None], {"role": None}, "\n", "\r\n", ".", "/", "\u2028", "NaN", "red.png/x", "~", "$HOME",
]  # fmt: skip
LITERALS = ["9" * 4300, "-" + "9" * 5000, "1" * 5000 + ".5", "1e999", "-1e999", "NaN", "Infinity", "[" * 20_000,
            '{"a":' * 10_000, "[" * 300 + "]" * 300, "[" * 5_000 + "]" * 5_000, '"\\ud800"', '"\\u0000"', "tru",
            '"\\x"', "'a'", "0x1", "01", "--1", '{"a":1,}', "//"]  # fmt: skip
"""Texts that replace a value; some are not valid JSON."""


def damaged(draw: random.Random) -> bytes:
    """One record: a value replaced, a key renamed, invalid JSON, or bytes changed."""
    record = draw.choice(GOOD)
    path = draw.choice(list(nodes(record)))
    how = draw.randrange(4)
    if how == 0:
        text = json.dumps(replaced(record, path, draw.choice(WILD))).encode()
    elif how == 1:
        text = json.dumps(replaced(record, path, "@@")).replace('"@@"', draw.choice(LITERALS)).encode()
    elif how == 2:
        key = draw.choice(["text", "role", "type", "content", "image_path", "conversations", "text_prompt", "image"])
        new = draw.choice([*WILD[4:11], "text", "image", "assistant"])
        text = json.dumps(record).replace(f'"{key}"', json.dumps(new if isinstance(new, str) else str(new))).encode()
    else:
        raw = bytearray(json.dumps(record).encode())
        for _ in range(draw.randrange(1, 6)):
            at = draw.randrange(len(raw))
            raw[at : at + draw.randrange(3)] = bytes(draw.randrange(256) for _ in range(draw.randrange(3)))
        text = bytes(raw)
    return text.replace(b"\n", b" ").replace(b"\r", b" ")


def outcomes(path: Path, root: Path) -> dict[str, int]:
    """How many records were read, and how many refused; other exceptions than ``DataError`` are not caught."""
    processor, found = make_processor(), {"read": 0, "named": 0}
    content = path.read_bytes()
    for offset, length in zip(*(array.tolist() for array in scan(path).values()), strict=True):
        try:
            position = Position(path, offset)
            record = load_record(content[offset : offset + length], position)
            processor.plan(learnt(record, position, Layout(root)), position)
            found["read"] += 1
        except DataError as error:
            found["named"] += 1
            assert f"{path.name}:" in str(error), error
            assert len(str(error)) < 2000, str(error)[:200]
            str(error).encode()  # a log file and a terminal can print it
    return found


@pytest.mark.parametrize("seed", range(2))
def test_a_damaged_record_is_read_or_named(tmp_path, seed):
    draw = random.Random(seed)
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\n".join(damaged(draw) for _ in range(1000)))
    found = outcomes(path, tmp_path)
    assert found["read"] > 100 and found["named"] > 300, found


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_array_is_read_or_named(tmp_path, seed):
    draw = random.Random(seed)
    path = tmp_path / "train.json"
    path.write_bytes(b"[" + b",".join(damaged(draw) for _ in range(5)) + b"]" * draw.randrange(2))
    try:
        outcomes(path, tmp_path)
    except DataError as error:  # of the file: brackets that do not close
        assert path.name in str(error)
