"""A damaged checkpoint folder never prevents the use of a valid one: hundreds of damaged manifests, fixed seeds."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.support import make_manifest, save
from tests.end_to_end.robustness.cases import nodes
from tools.checkpoints import main
from unigen_ds.checkpoint import listing, store
from unigen_ds.checkpoint.manifest import FILE_NAME
from unigen_ds.resume.plan import plan_resume
from unigen_ds.system.files import read_line

DAMAGED = "iter_99.pth"
TEXTS: dict[str, bytes] = {
    "200,000 brackets": b"[" * 200_000,
    "200,000 objects": b'{"format_version":' * 200_000,
    "closed brackets": b"[" * 50_000 + b"]" * 50_000,
    "brackets inside": b'{"format_version": 2, "config": ' + b"[" * 400 + b"]" * 400 + b"}",
    "1e999": b'{"format_version": 1e999}',
    "-1e999": b'{"format_version": -1e999, "digest": null}',
    "NaN": b'{"format_version": NaN}',
    "5,000 digits": b'{"format_version": ' + b"9" * 5000 + b"}",
    "a bool": b"true",
    "a list": b"[1]",
    "a text": b'"\\ud800"',
    "a surrogate name": b'{"format_version": 2, "\\ud800": 1}',
    "UTF-16": '{"format_version": 2}'.encode("utf-16"),
    "bytes": bytes(range(256)),
    "nothing": b"",
}
WILD: list[Any] = [
    None, True, -1, 0, 1.5, 1e308, float("inf"), float("nan"), 10**4000, "", "\0", "\ud800", "../..", [], {}, [[]],
    [None], {"path": 5}, "x" * 5000, [{"path": "\0", "size": "1", "digest": None}], [{"path": "a" * 5000, "size": 1}],
]  # fmt: skip


@pytest.fixture
def work_dir(tmp_path) -> Path:
    """A valid checkpoint, and a folder whose manifest the test writes."""
    save(tmp_path, "iter_12.pth")
    (tmp_path / DAMAGED).mkdir()
    return tmp_path


def examine(work_dir: Path) -> store.Candidate:
    """Everything that reads a work dir: list, choose, print, plan. Returns the entry of the damaged folder."""
    checkpoints = {f.path.name: f for f in store.list_checkpoints(work_dir)}
    assert checkpoints["iter_12.pth"].problem is None
    store.next_commit(work_dir)
    newest, _ = store.newest(work_dir)
    assert newest is not None
    if checkpoints[DAMAGED].problem is not None:
        assert newest.path.name == "iter_12.pth"
        assert plan_resume(work_dir, resume=True, load_from=None).checkpoint == work_dir / "iter_12.pth"
        assert len(checkpoints[DAMAGED].problem) < 2000
    "\n".join(listing.table(work_dir)).encode()  # a terminal can print it
    return checkpoints[DAMAGED]


@pytest.mark.parametrize("name", TEXTS)
def test_a_manifest_that_is_none_is_passed_over(work_dir, name, capsys):
    (work_dir / DAMAGED / FILE_NAME).write_bytes(TEXTS[name])
    assert examine(work_dir).problem
    assert main(["list", str(work_dir)]) == 0
    assert "iter_12.pth" in capsys.readouterr().out
    assert main(["verify", str(work_dir)]) == 1
    assert main(["show", str(work_dir)]) == 0
    assert "iter_12.pth" in capsys.readouterr().out


def sign(state: dict[str, Any]) -> bytes:
    digest = hashlib.blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=16).hexdigest()
    return json.dumps(state | {"digest": digest}).encode()


def wrong(draw: random.Random, good: dict[str, Any]) -> bytes:
    """A value replaced or removed, with a correct digest; or bytes changed."""
    state = json.loads(json.dumps(good))
    path = draw.choice([p for p in nodes(state) if p])
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    how = draw.randrange(3)
    if how == 0:
        inner[path[-1]] = draw.choice(WILD)
    elif how == 1:
        del inner[path[-1]]
    else:
        raw = bytearray(sign(state))
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(raw))
            raw[at : at + draw.randrange(4)] = bytes(draw.randrange(256) for _ in range(draw.randrange(4)))
        return bytes(raw)
    return sign(state)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("created", 5), ("config", []), ("commit", "x"), ("parameters", [1]), ("metrics", [1]),
        ("files", [{"path": "a", "size": 1, "digest": 2}]),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_where_the_manifest_is_read(work_dir, key, value):
    good = json.loads(make_manifest(7, updates=9).to_json())
    del good["digest"]
    (work_dir / DAMAGED / FILE_NAME).write_bytes(sign(good))
    assert "damaged" not in (examine(work_dir).problem or "")
    (work_dir / DAMAGED / FILE_NAME).write_bytes(sign(good | {key: value}))
    assert f"{FILE_NAME} is damaged: " in examine(work_dir).problem


@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_manifest_is_named_or_read(work_dir, seed):
    draw, count = random.Random(seed), 0
    good = json.loads(make_manifest(7, updates=9).to_json())
    del good["digest"]
    for _ in range(120):
        content = wrong(draw, good)
        (work_dir / DAMAGED / FILE_NAME).write_bytes(content)
        try:
            count += examine(work_dir).problem is not None
        except Exception as error:
            raise AssertionError(content[:3000]) from error
    assert count > 40


def test_a_damaged_hint_is_no_hint(work_dir):
    (work_dir / "last_checkpoint").write_bytes(b"\xff\xfe\x00")
    assert read_line(work_dir / store.HINT) is None
    (work_dir / DAMAGED).rmdir()
    assert store.newest(work_dir)[0] is not None
