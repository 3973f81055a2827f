"""Filters of a data set through real runs: what is left out, that it is counted, and what a resume knows of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.support import make_processor, write_jsonl
from tests.tiny import tiny_config
from tools.inspect_data import main as inspect_data
from unigen_ds.config.overrides import plain_values
from unigen_ds.config.registry import FILTERS
from unigen_ds.core.errors import DataError, ResumeBlocked
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.data.datasets.filters import CheckedRecord, RecordFilter
from unigen_ds.data.datasets.subset import apply_filters, filtering_of, first_records, record_number, whole_of
from unigen_ds.runner import Runner
from unigen_ds.system.journals import read_lines

SIZES = {"small.png": (8, 8), "wide.png": (32, 8), "large.png": (48, 40)}
LIMITS: list[dict[str, Any]] = [
    {"type": "RatingFilter", "relevance_min_rating": 3, "formatting_min_rating": 2},
    {"type": "NotLong"},
    {"type": "MostCharacters", "most": 60},
    {"type": "NotNine"},
]
REMOVED = {"RatingFilter": 2, "NotLong": 1, "MostCharacters": 1, "NotNine": 2}
KEPT = [0, 2, 6, 7, 8, 9, 10]


@FILTERS.register_module()
class NotNine(RecordFilter):
    def keeps(self, record: CheckedRecord) -> bool:
        return "nine" not in " ".join(record.texts)


@FILTERS.register_module()
class NotLong(RecordFilter):
    def keeps(self, record: CheckedRecord) -> bool:
        return all(width <= 3 * height for width, height in record.image_sizes)


class NotFour(RecordFilter):
    """``NotNine`` after an edit: as many, and not the same."""

    settings = "NotNine()"

    def keeps(self, record: CheckedRecord) -> bool:
        return "four" not in " ".join(record.texts)


@FILTERS.register_module()
class AtLeastTwoTurns(RecordFilter):
    """Another one, with a setting."""

    def __init__(self, *, turns: int) -> None:
        self.turns = turns

    def keeps(self, record: CheckedRecord) -> bool:
        return len(record.turns) >= self.turns


def row(image: str, *answers: str, **ratings: Any) -> dict[str, Any]:
    texts = [{"user": "this is", "assistant": answer} for answer in answers]
    return {"images": [image], "texts": texts, **{f"{name}_ratings": rating for name, rating in ratings.items()}}


def rows() -> list[dict[str, Any]]:
    return [
        row("small.png", "one", "two", relevance=[5, 2], formatting=[2, 1]),  # its second question
        row("small.png", "two", relevance=[1]),  # removed
        row("small.png", "three", formatting=[None]),
        row("wide.png", "four"),  # its image
        row("small.png", " ".join(["five"] * 20)),  # its text
        row("small.png", "six", "seven", relevance=[3, 2], formatting=[1, 5]),  # both questions
        *(row("large.png", name, relevance=[4], formatting=[2]) for name in ("one", "two", "three", "four", "five")),
        row("small.png", "nine"),
        row("small.png", "nine nine"),
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filters")
    for number, (name, (width, height)) in enumerate(SIZES.items()):
        pixels = np.random.default_rng(number).integers(0, 256, (height, width), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    return write_jsonl(folder / "talks.jsonl", rows())


def source(path: Path, **more: Any) -> dict[str, Any]:
    return {"type": "UnifiedGenerationDataset", "data_path": str(path), "name": "talks", **more}


def config(folder: Path, path: Path, *, resume: Any = False, val: Any = None, **more: Any) -> Any:
    settings = tiny_config(folder, folder, train_dataloader__batch_size=1, resume=resume)
    settings["train_dataloader"]["dataset"] = source(path, **more)
    if val is not None:
        settings["val_dataloader"] = val
    return settings


def losses(folder: Path) -> list[Any]:
    return [(line["update"], line["loss"]) for line in read_lines(folder / "metrics.jsonl") if "loss" in line]


def test_what_is_left_out_is_counted_and_keeps_its_number(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Runner.from_cfg(config(tmp_path / "straight", data, filters=LIMITS), max_updates=4).train()
    log = (tmp_path / "straight" / "train.log").read_text()
    assert "filters remove 6 of 13 records (46.2%): RatingFilter 2, NotLong 1, MostCharacters 1, NotNine 2" in log
    assert (
        "4 of 11 questions by their ratings: relevance 3, image_correspondence 0, visual_dependency 0, formatting 1"
        in log
    )
    Runner.from_cfg(config(tmp_path / "cut", data, filters=LIMITS), max_updates=2).train()
    Runner.from_cfg(config(tmp_path / "cut", data, filters=LIMITS, resume=True), max_updates=4).train()
    assert losses(tmp_path / "cut") == losses(tmp_path / "straight")
    file = tmp_path / "config.py"
    settings = plain_values(config(tmp_path / "straight", data, filters=LIMITS))
    file.write_text("".join(f"{key} = {value!r}\n" for key, value in settings.items()))
    assert inspect_data([str(file), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["sources"]["talks"]
    assert report["filters"]["removed"] == REMOVED and report["filters"]["records"] == 13 and report["records"] == 7
    assert inspect_data([str(file), "--sequences", "0:8"]) == 0
    output = capsys.readouterr().out
    assert {int(word.split(":")[1]) for word in output.split() if word.startswith("talks:")} == {*KEPT}
    assert inspect_data([str(file), "--ledger", str(tmp_path / "cut" / "ledger.jsonl")]) == 0
    assert "every digest agrees" in capsys.readouterr().out
    assert inspect_data([str(file)]) == 0 and "  filters remove 6 of 13 records" in capsys.readouterr().out


def test_samples_are_those_of_a_file_without_what_is_left_out(data: Path) -> None:
    rest = rows()
    rest[0]["texts"] = rest[0]["texts"][:1]
    for record in rest:
        record.pop("relevance_ratings", None), record.pop("formatting_ratings", None)
    plain = write_jsonl(data.parent / "plain.jsonl", [rest[number] for number in KEPT])
    processor = make_processor()
    subset = apply_filters(UnifiedGenerationDataset(data, processor, filters=LIMITS))
    expected = UnifiedGenerationDataset(plain, processor)
    assert len(subset) == len(expected) == 7 and subset.numbers.tolist() == KEPT
    assert [subset.sample(i) for i in range(7)] == [expected.sample(i) for i in range(7)]
    assert np.array_equal(subset.counts().tokens, expected.counts().tokens)


def test_other_limits_are_another_data_set_and_no_limits_none(data: Path, tmp_path: Path) -> None:
    processor = make_processor()
    without = UnifiedGenerationDataset(data, processor)
    assert apply_filters(without) is without and filtering_of(without) is None
    all_kept = apply_filters(UnifiedGenerationDataset(data, processor, filters={"type": "AtLeastTwoTurns", "turns": 2}))
    assert len(all_kept) == len(without) and all_kept.fingerprint != without.fingerprint
    Runner.from_cfg(config(tmp_path, data, filters=LIMITS), max_updates=1).train()
    weaker = [{**LIMITS[0], "relevance_min_rating": 2}, *LIMITS[1:]]
    with pytest.raises(ResumeBlocked) as error:
        Runner.from_cfg(config(tmp_path, data, filters=weaker, resume=True), max_updates=2).train()
    assert "the filters of talks were RatingFilter(formatting_min_rating=2" in str(error.value)
    assert "relevance_min_rating=2" in str(error.value)
    assert "talks had 7 records and has 8" in str(error.value)


def test_a_filter_that_was_edited_is_changed_data_where_it_keeps_others(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name and version are as before, and so is the number of records that are left."""
    limits = [{"type": "NotNine"}]
    Runner.from_cfg(config(tmp_path, data, filters=limits), max_updates=1).train()
    monkeypatch.setitem(FILTERS.module_dict, "NotNine", NotFour)
    with pytest.raises(ResumeBlocked, match="their processor or what its filters keep changed"):
        Runner.from_cfg(config(tmp_path, data, filters=limits, resume=True), max_updates=2).train()


def test_appended_records_and_a_share_for_validation(data: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(data.parent, tmp_path / "data", ignore=shutil.ignore_patterns(".*"))) / data.name
    val = {"split": 0.4}
    Runner.from_cfg(config(tmp_path / "run", path, filters=LIMITS, val=val), max_updates=1).train()
    path.write_text(path.read_text() + "".join(json.dumps(one) + "\n" for one in rows()[:3]))
    with pytest.raises(ResumeBlocked, match="talks"):
        Runner.from_cfg(config(tmp_path / "run", path, filters=LIMITS, val=val, resume=True), max_updates=2).train()
    settings = config(tmp_path / "run", path, filters=LIMITS, val=val, resume=True)
    settings["on_data_change"] = "append"
    Runner.from_cfg(settings, max_updates=3).train()
    assert "filters remove 7 of 16 records" in (tmp_path / "run" / "train.log").read_text()


def test_a_filter_that_leaves_nothing(data: Path) -> None:
    filters = [{"type": "MostCharacters", "most": 0}]
    with pytest.raises(DataError, match="all 13 records are left out"):
        apply_filters(UnifiedGenerationDataset(data, make_processor(), filters=filters))


@pytest.mark.parametrize(("ratings", "text"), [([3], r"\[3\]"), ([3, True], r"\[3, True\]"), ([3, "5"], r"\[3, .5.\]")])
def test_ratings_that_do_not_fit_their_questions(ratings: list[Any], text: str, data: Path) -> None:
    path = write_jsonl(data.parent / "wrong.jsonl", [row("small.png", "one", "two", relevance=ratings)])
    with pytest.raises(DataError, match=f"wrong.jsonl:1: relevance_ratings is {text}. Allowed: 2 numbers or null"):
        apply_filters(UnifiedGenerationDataset(path, make_processor(), filters=LIMITS))


def test_ratings_that_no_record_has_are_a_warning(data: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "talks.jsonl", [{"text": f"this is {word}"} for word in ("one", "two", "three")])
    Runner.from_cfg(config(tmp_path / "run", path, filters=LIMITS[:1]), max_updates=1).train()
    assert "RatingFilter does nothing: no record has ratings" in (tmp_path / "run" / "train.log").read_text()


def test_records_of_too_many_images(data: Path) -> None:
    processor = make_processor()
    images = [{"images": ["small.png"] * number, "texts": [{"user": "a", "assistant": "b"}]} for number in (1, 2, 5)]
    path = write_jsonl(data.parent / "many.jsonl", images)
    for limit in ({"max_tiles": 2}, {"max_images": 2}):
        rest = apply_filters(UnifiedGenerationDataset(path, processor, filters=[{"type": "ImageCountFilter", **limit}]))
        assert rest.numbers.tolist() == [0, 1] and rest.choice.report["removed"] == {"ImageCountFilter": 1}


def test_the_first_records_are_counted_in_the_file_and_filtered_then(data: Path, tmp_path: Path) -> None:
    Runner.from_cfg(config(tmp_path, data, filters=LIMITS, num_used_data=8), max_updates=2).train()
    assert "filters remove 4 of 8 records" in (tmp_path / "train.log").read_text()
    subset = apply_filters(
        first_records(UnifiedGenerationDataset(data, make_processor(), filters=LIMITS, num_used_data=8))
    )
    assert [record_number(subset, i) for i in range(len(subset))] == [0, 2, 6, 7] and whole_of(subset).name == "talks"
