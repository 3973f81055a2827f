"""Records that cannot be trained on, through the real entry: all in one error, or left out, counted and listed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.data.support import image, make_processor, picture, talk, text
from tests.text_run import count_up, word_config
from tests.tiny import tiny_config
from tools import inspect_data
from unigen_ds.core.errors import DataError
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.data.records.unusable import exceeds
from unigen_ds.examples.digits.dataset import write_digits
from unigen_ds.runner import Runner
from unigen_ds.system.journals import read_lines

BAD = {
    3: '{"id": "r3", "txt": "one"}',
    30: '{"id": 30, "text": 3}',
    31: '{"conversations": [{"role": "robot", "type": "text", "content": "one"}]}',
    77: "no JSON",
}


def write(path: Path, bad: dict[int, str], number: int = 100) -> Path:
    lines = [bad.get(i, json.dumps(record)) for i, record in enumerate(count_up(number))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def config(folder: Path, name: str, **changes: Any) -> Any:
    changes = {"train_dataloader__max_skipped_fraction": 0.05, "train_cfg": {"max_updates": 30}, **changes}
    skip = {"train_dataloader__dataset__on_record_error": "skip"}
    return word_config(folder, work_dir=str(folder / name), **{**skip, **changes})


def test_one_error_lists_the_bad_records_of_all_kinds(tmp_path: Path) -> None:
    picture(tmp_path / "good.png", 16, 16)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"0" * 40)
    drawings = [talk(text("user", "draw"), image("assistant", name)) for name in ("good.png", "broken.png", "gone.png")]
    bad = [json.loads(line) for line in BAD.values() if line.startswith("{")]
    records = [*drawings, *bad, *[{"text": "one"}] * 20, *[{"text": None}] * 30]
    for i, record in enumerate(records):
        record.setdefault("id", f"own{i}")
    path = tmp_path / "all.json"
    path.write_text(json.dumps(records), encoding="utf-8")  # in one line
    with pytest.raises(
        DataError, match=r"35 of 56 records cannot be used.*on_record_error='skip'.*The first 20:"
    ) as error:
        UnifiedGenerationDataset(path, make_processor())
    lines = str(error.value).splitlines()[1:]
    assert len(lines) == 20
    expected = {1: "Truncated File Read", 2: "No such file", 3: "no layout fits the keys", 4: "text is 3",
                5: "conversations[0].role is 'robot'", 26: "text is missing"}  # fmt: skip
    for line, (index, reason) in zip(lines, expected.items(), strict=False):
        assert line.startswith(f"  index {index}, id {records[index]['id']!r}, {path}:1: ") and reason in line, line


def test_left_out_by_choice_and_exact_over_a_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "train.jsonl", BAD)
    with pytest.raises(DataError, match=r"train: 4 of 100 .* Allowed: a share of 0\.01 .* They are:"):
        Runner.from_cfg(config(tmp_path, "run", train_dataloader__max_skipped_fraction=0.01))
    with pytest.raises(DataError, match=r"4 of 100 records cannot be used"):
        Runner.from_cfg(config(tmp_path, "run", train_dataloader__dataset__on_record_error="error"))
    Runner.from_cfg(config(tmp_path, "straight")).train()
    Runner.from_cfg(config(tmp_path, "run"), max_updates=9).train()
    Runner.from_cfg(config(tmp_path, "run", resume=True)).train()
    straight, run = (list(read_lines(tmp_path / name / "ledger.jsonl")) for name in ("straight", "run"))
    digests = [[line["digest"] for line in lines if "digest" in line] for lines in (straight, run)]
    assert len(digests[0]) == 30 and digests[0] == digests[1]
    entries = list(map(json.loads, (tmp_path / "run" / "left_out.jsonl").read_text(encoding="utf-8").splitlines()))
    assert [(line["index"], line["id"], line["sample"]) for line in entries] == [
        (3, "r3", "train:3"), (30, 30, "train:30"), (31, None, "train:31"), (77, None, "train:77"),
    ]  # fmt: skip
    assert all(
        line["file"] == str(tmp_path / "train.jsonl") and ":4: no layout" in entries[0]["reason"] for line in entries
    )
    log = (tmp_path / "run" / "train.log").read_text(encoding="utf-8")
    assert "WARNING Data, train: on_record_error='skip' leaves out 4 of 100 records (4.0%): see left_out.jsonl." in log
    assert inspect_data.main([str(tmp_path / "run" / "config.py"), "--sequences", "0:96"]) == 0
    samples = {line.split()[1] for line in capsys.readouterr().out.splitlines()[:96]}
    assert samples == {f"train:{i}:0" for i in range(100) if i not in BAD}
    assert inspect_data.main([str(tmp_path / "run" / "config.py"), "--html", str(tmp_path / "page.html")]) == 0
    assert "cannot be trained on (on_record_error=" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_items_of_an_own_data_set_that_are_left_out(tmp_path: Path) -> None:
    """As records of files are: listed in the error, counted, refused above the limit, the same after a resume."""
    spec = {"type": "tests.data.datasets.adapted.WithBadItems", "reads": str(tmp_path / "reads")}

    def config_of(name: str, **changes: Any) -> Any:
        source = {"type": "DatasetAdapter", "dataset": spec, "on_record_error": "skip"}
        limit = {"train_dataloader__max_skipped_fraction": 0.2}
        return config(tmp_path, name, train_dataloader__dataset=source, **{**limit, **changes})

    error = {"type": "DatasetAdapter", "dataset": {**spec, "type": "tests.data.datasets.adapted.BadItems"}}
    with pytest.raises(DataError, match="BadItems: 5 of 40 records cannot be used") as data_error:
        Runner.from_cfg(config(tmp_path, "run", train_dataloader__dataset=error))
    lines = str(data_error.value).splitlines()[1:]
    assert lines[0].startswith("  index 3, ") and "OSError: torn" in lines[0] and "4, 3 and 4 positions" in lines[1]
    assert len(lines) == 5
    with pytest.raises(DataError, match=r"WithBadItems: 5 of 40 records .* Allowed: a share of 0\.1 "):
        Runner.from_cfg(config_of("run", train_dataloader__max_skipped_fraction=0.1))
    Runner.from_cfg(config_of("straight")).train()
    Runner.from_cfg(config_of("run"), max_updates=9).train()
    Runner.from_cfg(config_of("run", resume=True)).train()
    straight, run = (list(read_lines(tmp_path / name / "ledger.jsonl")) for name in ("straight", "run"))
    assert [line.get("digest") for line in straight] == [line.get("digest") for line in run if "digest" in line] != []
    entries = list(map(json.loads, (tmp_path / "run" / "left_out.jsonl").read_text(encoding="utf-8").splitlines()))
    assert [line["sample"] for line in entries] == [f"WithBadItems:{i}" for i in range(3, 40, 8)]
    log = (tmp_path / "run" / "train.log").read_text(encoding="utf-8")
    assert "WithBadItems: on_record_error='skip' leaves out 5 of 40 records (12.5%): see left_out.jsonl." in log


def test_the_choice_changes_no_good_data_and_bad_records_may_be_appended(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", {}, 40)
    either = [
        Runner.from_cfg(config(tmp_path, "run", train_dataloader__dataset__on_record_error=one), max_updates=3)
        for one in ("error", "skip")
    ]
    first, second = (runner._parts.start.data.stream.identity for runner in either)
    assert first == second
    either[0].train()
    assert not (tmp_path / "run" / "left_out.jsonl").exists()
    with path.open("a", encoding="utf-8") as stream:
        stream.write('{"text": 3}\n' + json.dumps({"text": "one two"}) + "\n")
    Runner.from_cfg(config(tmp_path, "run", resume=True, on_data_change="append"), max_updates=14).train()
    assert [line["sample"] for line in read_lines(tmp_path / "run" / "left_out.jsonl")] == ["train:40"]


def test_a_streamed_source_lists_what_each_shard_leaves_out(tmp_path: Path) -> None:
    for k in range(3):
        write(tmp_path / f"part-{k}.jsonl", {5 + k: '{"text": 3}'} if k else {}, 60)
    options = {
        "train_dataloader__dataset__data_path": str(tmp_path / "part-{0..2}.jsonl"),
        "train_dataloader__dataset__streaming": {"mixed_shards": 1},
        "train_cfg": {"max_updates": 60},
    }
    (tmp_path / "train.jsonl").write_text("")
    Runner.from_cfg(config(tmp_path, "run", **options), max_updates=20).train()
    Runner.from_cfg(config(tmp_path, "run", resume=True, **options)).train()
    entries = list(read_lines(tmp_path / "run" / "left_out.jsonl"))
    assert sorted((line["file"], line["index"]) for line in entries) == [("part-1.jsonl", 6), ("part-2.jsonl", 7)]
    with pytest.raises(DataError, match=r"records cannot be used"):
        Runner.from_cfg(
            config(tmp_path, "other", train_dataloader__dataset__on_record_error="error", **options)
        ).train()


def test_an_image_that_was_repaired_is_read_at_the_next_start(tmp_path: Path) -> None:
    """A resume keeps the data of its run, also where the image can be read now."""
    root = write_digits(tmp_path / "digits")
    lines = (root / "val.jsonl").read_text(encoding="utf-8").splitlines()[:24]
    (root / "few.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    names = [turn["image_path"] for turn in json.loads(lines[7])["conversations"] if turn["type"] == "image"]
    file = root / names[0]
    content = file.read_bytes()
    file.write_bytes(content[:10])

    def start(name: str, **more: Any) -> Runner:
        source = {"type": "UnifiedGenerationDataset", "data_path": str(root / "few.jsonl")}
        settings = {"train_dataloader__dataset": source, "train_dataloader__max_skipped_fraction": 1.0, **more}
        return Runner.from_cfg(tiny_config(tmp_path / name, root, **settings), max_updates=more.get("resume", 0) + 1)

    def unreadable(runner: Runner) -> int:
        return int((runner._parts.start.data.stream.sources[0].counts().unreadable > 0).sum())

    run = start("run")
    count = unreadable(run)
    run.train()
    assert count and unreadable(start("again")) == count
    file.write_bytes(content)
    second = start("run", resume=True)
    second.train()
    assert (unreadable(second), second.progress.updates) == (count, 2)
    assert unreadable(start("fresh")) == 0
    index = list((root / ".unigen_index").glob("few.jsonl-*.arrays"))
    times = [path.stat().st_mtime_ns for path in index]
    assert unreadable(start("fresh again")) == 0 and [path.stat().st_mtime_ns for path in index] == times


@pytest.mark.parametrize("limit", [0.01, 0.2])
def test_half_of_the_limit_never_stops_a_run_and_twice_does(limit: float) -> None:
    for seed in range(100):
        draw, count = random.Random(seed), 0
        for samples in range(1, 3000):
            count += draw.random() < limit / 2
            assert samples < 100 or not exceeds(count, samples, limit), (seed, count, samples)
    count, draw = 0, random.Random(1)
    for samples in range(1, 6000):
        count += draw.random() < 2 * limit
        if samples >= 100 and exceeds(count, samples, limit):
            break
    assert samples < 4000
    assert exceeds(1, 100, 0.0) and not exceeds(0, 100, 0.0) and not exceeds(100, 100, 1.0)
