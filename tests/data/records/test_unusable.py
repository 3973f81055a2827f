"""What a file has and no record is made of is counted: keys of other layouts, members of a tar, files of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from docs.samples import make
from tests.data.support import make_processor, picture, write_jsonl, write_parquet
from tests.tiny import tiny_config
from tools.inspect_data import main as inspect_data
from unigen_ds.config.overrides import plain_values
from unigen_ds.core.errors import DataError
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.data.records.unusable import OTHER_IMAGE, unused_records
from unigen_ds.runner import Runner, train_config

TALK = [{"from": "human", "value": "this is"}, {"from": "gpt", "value": "two"}]
MESSAGES = [{"role": "user", "content": "this is"}, {"role": "assistant", "content": "two"}]
RECORDS: list[tuple[dict[str, Any], list[tuple[str, str]]]] = [
    ({"image": "1.png", "caption": "one", "text": "this is two"}, [("document", "image"), ("document", "caption")]),
    ({"text": "this is one", "messages": MESSAGES}, [("document", "messages")]),
    ({"file_name": "1.png", "text": "this is two"}, [("document", "file_name")]),
    ({"conversations": TALK, "system": "this is", "id": 7, "image": None}, [("llava", "system")]),
    ({"conversations": TALK, "messages": MESSAGES, "images": []}, [("llava", "messages")]),
    ({"instruction": "this", "input_image": "1.png", "input_images": ["1.png", "1.png"], "output_image": "1.png"},
     [("instruction", "input_image")]),
    ({"image": "1.png", "caption": "one", "captions": ["two"]}, [("caption", "caption")]),
    ({"image": "1.png", "caption": "one", "question": "this is"}, [("caption", "question")]),
    ({"text_prompt": "one", "image_path": "1.png", "image": "1.png"}, [("text_prompt", "image")]),
    ({"text": "this is one", "system": "linux", "id": 1}, []),
    ({"picture": "1.png", "question": "this is", "answer": 2}, [("question", OTHER_IMAGE)]),
]  # fmt: skip


def config(work_dir: Path, data: Path, **more: Any) -> Any:
    settings = tiny_config(work_dir, work_dir, train_dataloader__batch_size=1, train_dataloader__packing__window=8)
    settings["train_dataloader"]["dataset"] = {"type": "UnifiedGenerationDataset", "data_path": str(data), **more}
    return settings


def inspect(settings: Any, folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    (folder / "config.json").write_text(json.dumps(plain_values(settings)))
    capsys.readouterr()
    return inspect_data([str(folder / "config.json"), *options]), capsys.readouterr().out


def words(layout: str, key: str) -> str:
    return f"{key if ' ' in key else f'`{key}`'}, which the layout `{layout}` does not use"


def count_unused(dataset: UnifiedGenerationDataset) -> dict[str, int]:
    return {text: len(records) for text, records in unused_records(dataset.index.unused_codes).items()}


def test_keys_of_another_layout_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture(tmp_path / "1.png", 8, 8)
    data = write_jsonl(tmp_path / "rows.jsonl", [record for record, _ in RECORDS for _ in range(2)])
    settings = config(tmp_path / "run", data)
    Runner.from_cfg(settings, max_updates=1).train()
    expected = {words(*one) for _, keys in RECORDS for one in keys}
    status, out = inspect(settings, tmp_path, capsys)
    log = (tmp_path / "run" / "train.log").read_text()
    assert status == 0 and all(f"2 of 22 records (9.1 %): {text}" in page for text in expected for page in (log, out))
    report = json.loads(inspect(settings, tmp_path, capsys, "--json")[1])
    notices = {one["reason"]: one["number"] for one in report["sources"]["rows"]["noticed"]}
    assert {text for text, number in notices.items() if "does not use" in text and number == 2} == expected
    status, _ = inspect(settings, tmp_path, capsys, "--html", str(tmp_path / "page.html"))
    assert "which the layout `document` does not use" in (tmp_path / "page.html").read_text()


def test_a_renamed_key_and_captions_decide_what_is_used(tmp_path: Path) -> None:
    picture(tmp_path / "1.png", 8, 8)
    record = {"image": "1.png", "caption": "one", "text": "this is two"}
    data = write_jsonl(tmp_path / "rows.jsonl", [record])
    parquet = write_parquet(tmp_path / "rows.parquet", [record, {"text": "alone"}])
    drawings = UnifiedGenerationDataset(data, make_processor(), captions="generate")
    assert count_unused(drawings) == {words("text", "caption"): 1}
    assert count_unused(UnifiedGenerationDataset(parquet, make_processor())) == count_unused(drawings)
    other = UnifiedGenerationDataset(data, make_processor(), columns={"text": "long"})
    assert not count_unused(other) and other.turns(0)[0].value == "one"


@pytest.mark.parametrize(
    "record",
    [{"messages": [*MESSAGES[:1], {**MESSAGES[1], "weight": 0}]},
     {"conversations": [*TALK[:1], {**TALK[1], "weight": 0}]},
     {"conversations": [{"role": "user", "type": "text", "content": "this is"},
                        {"role": "assistant", "type": "text", "content": "two", "weight": 0}]}],
)  # fmt: skip
def test_a_record_of_which_nothing_is_to_be_learned_is_refused(record: dict[str, Any], tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", [record])
    with pytest.raises(DataError, match=r"rows.jsonl:1: no assistant turn has a weight other than 0"):
        Runner.from_cfg(config(tmp_path / "run", data), max_updates=1)
    key = next(iter(record))
    half = [{**turn, "weight": 0.5} for turn in record[key]]
    with pytest.raises(DataError, match=r"(messages|conversations)\[1\].weight is 0.5. Allowed: 1: .* or 0: "):
        UnifiedGenerationDataset(write_jsonl(tmp_path / "half.jsonl", [{key: half}]), make_processor())
    data = write_jsonl(tmp_path / "weighted.jsonl", [{key: [{**turn, "weight": 1} for turn in record[key]]}])
    assert UnifiedGenerationDataset(data, make_processor()).turns(0)[-1].value == "two"


def test_texts_of_a_sample_of_a_tar_that_are_not_read(tmp_path: Path) -> None:
    image = picture(tmp_path / "1.png", 8, 8).read_bytes()
    members = {
        "a.png": image, "a.txt": b"one", "a.json": b'{"caption": "two"}',
        "b.png": image, "b.txt": b"one", "b.caption": b"two",
        "c.png": image, "c.txt": b"one", "c.json": b'{"caption": " one", "url": "x"}',
        "d.0.png": image, "d.1.png": image, "d.json": b'{"text_prompt": "one", "image_path": "d.1.png"}',
        "e.png": image, "e.txt": b"one", "e.json": b'{"image_path": "png", "text_prompt": "one"}',
    }  # fmt: skip
    make.tar(tmp_path / "some.tar", [*members.items()])
    dataset = UnifiedGenerationDataset(tmp_path / "some.tar", make_processor())
    assert [dataset.turns(i)[0].value for i in range(5)] == ["one"] * 5
    left_out = {text.partition(", which")[0]: number for text, number in count_unused(dataset).items()}
    assert left_out.pop("an image that the .json does not name") == 1, "of d, not of e, whose image is named"
    left_out.pop("`caption`")
    assert [(key.split()[0], number) for key, number in left_out.items()] == [("another", 1)]


def test_turns_of_role_and_type(tmp_path: Path) -> None:
    """An image that one of them names is used, also of a sample of a tar."""
    question = {"role": "user", "type": "text", "content": "one"}
    image = picture(tmp_path / "1.png", 8, 8).read_bytes()
    drawings = [{"role": "assistant", "type": "image", "image_path": name} for name in ("0.png", "1.1.png")]
    lines = [json.dumps({"conversations": [question, turn]}).encode() for turn in drawings]
    members = {"0.png": image, "0.json": lines[0], "1.0.png": image, "1.1.png": image, "1.json": lines[1]}
    make.tar(tmp_path / "some.tar", [*members.items()])
    tar = UnifiedGenerationDataset(tmp_path / "some.tar", make_processor())
    assert count_unused(tar) == {words("conversations", "images"): 1}


def test_files_of_an_image_folder_that_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    picture(folder / "x.png", 8, 8)
    (folder / "y.heic").write_bytes(b"heic")
    (folder / "z.png").symlink_to(folder / "none.png")
    for name in "xyz":
        (folder / f"{name}.txt").write_text(name)
    settings = config(tmp_path / "run", folder)
    Runner.from_cfg(settings, max_updates=1).train()
    log = (tmp_path / "run" / "train.log").read_text()
    (line,) = [one for one in log.splitlines() if "files that are not read: " in one]
    assert set(line.rpartition("read: ")[2].split(", ")) == {
        "1 .heic", "2 .txt", "1 .png (a link to a file that is not there)",
    }  # fmt: skip


# --- what a run leaves out, and what it would refuse --------------------------------------------------------------


def missing(folder: Path, *names: str) -> Path:
    """Images with captions, of which those with the given names are there."""
    for name in names:
        picture(folder / name, 8, 8)
    records = [{"image": name, "caption": "one"} for name in ("gone.png", "1.png", "2.png", "3.png")]
    return write_jsonl(folder / "rows.jsonl", records)


def test_the_last_line_counts_updates_and_samples(tmp_path: Path) -> None:
    settings = config(tmp_path / "run", missing(tmp_path, "1.png", "2.png", "3.png"))
    settings["train_dataloader"] |= {"max_skipped_fraction": 1.0, "packing": None, "batch_size": 1}
    train_config(settings, max_updates=8)
    (line,) = [one for one in (tmp_path / "run" / "train.log").read_text().splitlines() if " updates skipped)" in one]
    assert "after 8 updates (0 updates skipped), 8 samples (2 samples skipped), 8 sequences" in line


def test_what_a_start_refuses_is_in_the_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = missing(tmp_path, "1.png")
    limit = {"filters": [{"type": "RatingFilter", "relevance_min_rating": 3}]}
    status, out = inspect(config(tmp_path / "run", data, **limit), tmp_path, capsys)
    assert status == 0 and "the first: rows:" in out and "A start is refused" not in out
    assert "RatingFilter does nothing: no record has ratings" in out
    (tmp_path / "1.png").unlink()
    status, out = inspect(config(tmp_path / "run", data), tmp_path, capsys)
    assert status == 1 and "A start is refused: rows: none of its 4 images can be read" in out and "gone.png" in out
    with pytest.raises(DataError, match="none of its 4 images can be read"):
        Runner.from_cfg(config(tmp_path / "run", data))


def test_a_source_without_a_readable_image_is_skipped_and_its_group_named(tmp_path: Path) -> None:
    cfg = config(tmp_path / "run", missing(tmp_path), name="drawn", on_error="skip")
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"text": "this is one"}] * 4)
    dataset = [cfg["train_dataloader"]["dataset"], {"type": "UnifiedGenerationDataset", "data_path": str(texts)}]
    cfg["train_dataloader"]["dataset"] = dataset
    assert Runner.from_cfg(cfg)._parts.start.data.stream.names == ("texts",)
    log = (tmp_path / "run" / "train.log").read_text()
    assert "data set drawn is skipped (on_error='skip'): drawn: none of its 4 images can be read" in log
    cfg["train_dataloader"]["dataset"] = [{**one, "group": group} for one, group in zip(dataset, "ab", strict=True)]
    cfg["train_dataloader"]["groups"] = {"a": {"weight": 1.0}, "b": {"weight": 1.0}}
    with pytest.raises(DataError, match=r"every data set of the group a is skipped \(on_error='skip'\): drawn"):
        Runner.from_cfg(cfg)
