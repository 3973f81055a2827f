"""JSON lines survive kills and resumes: torn lines are passed over, a resume voids what runs again."""

import json
from pathlib import Path

from unigen_ds.system.journals import JsonLines, read_lines, sample_digest


def write(path: Path, *records: dict[str, object]) -> None:
    lines = JsonLines(path)
    for record in records:
        lines.append(record)
    lines.close()


def test_a_resume_voids_later_updates_and_only_them(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"update": 1, "loss": 1.0}, {"update": 2, "loss": 2.0}, {"update": 3, "loss": 3.0})
    write(path, {"event": "resume", "updates": 2}, {"update": 3, "loss": 30.0}, {"note": "kept"})
    write(path, {"event": "resume", "updates": 1}, {"update": 2, "loss": 20.0})
    assert read_lines(path) == [{"update": 1, "loss": 1.0}, {"note": "kept"}, {"update": 2, "loss": 20.0}]


def test_a_torn_last_line_is_ended_and_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"update": 1})
    with path.open("a") as stream:
        stream.write('{"update": 2, "lo')
    assert read_lines(path) == [{"update": 1}]
    write(path, {"event": "resume", "updates": 1}, {"update": 2})
    assert read_lines(path) == [{"update": 1}, {"update": 2}]


def test_a_line_is_on_disk_at_once_and_non_finite_numbers_are_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    lines.append({"update": 1, "loss": float("nan"), "window": [1.0, float("nan")], "val": {"loss": float("inf")}})
    assert json.loads(path.read_text()) == {"update": 1, "loss": None, "window": [1.0, None], "val": {"loss": None}}
    lines.close()


def test_a_line_cut_inside_a_character_or_that_is_no_object_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"update": 1}\n12\n' + '{"update": 2, "text": "é'.encode()[:-1])
    assert read_lines(path) == [{"update": 1}]


def test_the_digest_of_samples_is_that_of_every_ledger_so_far() -> None:
    assert sample_digest(["b:0:0", "a:1:0"]) == "8a4c635d28abd4c1" != sample_digest(["a:1:0", "b:0:0"])
