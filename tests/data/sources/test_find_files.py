"""What a file, a folder or a pattern is read as, where its records are, and the messages about what cannot be read."""

from __future__ import annotations

import gzip
import json
import logging
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from docs.samples import make
from tests.data.support import make_processor, picture, write_jsonl, write_parquet
from tests.end_to_end.data.own_format import WordsSource
from unigen_ds.config.registry import SOURCES
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.data.images.image_files import StoredImage
from unigen_ds.data.sources import unpacked
from unigen_ds.data.sources.base import Row
from unigen_ds.data.sources.find import default_name, open_source
from unigen_ds.data.sources.unpacked import unpacked_file
from unigen_ds.system.files import size_text

TEXTS = [{"text": f"document {i} of some words"} for i in range(7)]


def texts_of(dataset: UnifiedGenerationDataset) -> list[str]:
    return [dataset.turns(i)[-1].value for i in range(len(dataset))]


def where(dataset: UnifiedGenerationDataset, number: int) -> str:
    return str(dataset.index.source.read(number, number + 1)[0].where)


def dataset(path: Any, **more: Any) -> UnifiedGenerationDataset:
    return UnifiedGenerationDataset(path, make_processor(), **more)


def capture_warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("unigen_ds"), "propagate", True)
    return caplog


# --- what is found ------------------------------------------------------------------------------------------------


def test_parts_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for k in (10, 9, 2):
        write_parquet(tmp_path / "data" / f"part-{k}.parquet", [{"text": f"{k} {i}"} for i in range(2)])
    expected = ["2 0", "2 1", "9 0", "9 1", "10 0", "10 1"]
    assert texts_of(dataset(tmp_path / "data")) == expected
    assert texts_of(dataset(str(tmp_path / "data" / "part-*.parquet"))) == expected
    subset = dataset([str(tmp_path / "data" / f"part-{k}.parquet") for k in (9, 2)])
    assert texts_of(subset) == expected[2:4] + expected[:2]
    assert where(subset, 2).endswith("/part-2.parquet row 1")
    with pytest.raises(DataError, match=r"no file matches .*none-\*"):
        dataset(str(tmp_path / "none-*.parquet"))


def test_several_json_files_and_folders_of_equal_names(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_jsonl(tmp_path / name / "train.jsonl", [{"text": f"{name} {i}"} for i in range(2)])
    both = dataset(tmp_path, name="both")
    assert texts_of(both) == ["a 0", "a 1", "b 0", "b 1"]
    assert where(both, 3).endswith("/b/train.jsonl:2")
    one = dataset(tmp_path / "a" / "train.jsonl")
    assert one.fingerprint != both.fingerprint and one.prefix_digest(2) == both.prefix_digest(2)
    write_jsonl(tmp_path / "b" / "train.jsonl", [{"text": "b 0"}, {"text": "b 9"}])
    assert dataset(tmp_path).fingerprint != both.fingerprint


@pytest.mark.parametrize(
    ("path", "name"),
    [("data/train.jsonl", "train"), ("train.jsonl.gz", "train"), ("data/train-*.parquet", "train"),
     ("data/*.tar", "data"), (["a/x.csv", "b/y.csv"], "x"), ("folder", "folder"), ("owner/name", "name")],
)  # fmt: skip
def test_the_name_in_sample_ids(path: Any, name: str) -> None:
    assert default_name(path) == name


def test_what_is_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "x" / "a.parquet", TEXTS)
    write_jsonl(tmp_path / "x" / "b.jsonl", TEXTS)
    with pytest.raises(DataError, match=r"files of several formats: 1 of \w+, 1 of \w+\. Remedy: format='"):
        open_source(tmp_path / "x")
    assert len(dataset(tmp_path / "x", format="parquet")) == 7
    with pytest.raises(DataError, match=r"several formats \(a.parquet: parquet, b.jsonl: json\)"):
        open_source([tmp_path / "x" / "a.parquet", tmp_path / "x" / "b.jsonl"])
    with pytest.raises(ConfigError, match=r"format is 'parket'.*Allowed: .*webdataset.*did you mean 'parquet'"):
        open_source(tmp_path / "x", format="parket")
    with pytest.raises(ConfigError, match=r"format has no key 'divid' \(TextSource\).*divide"):
        open_source(tmp_path / "x", format={"type": "text", "divid": "line"})
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"folder .* has no data file\. Allowed: .*\.parquet"):
        open_source(tmp_path / "empty")
    with pytest.raises(DataError, match="does not exist"):
        open_source(tmp_path / "none.csv")
    for kind in ("parquet", "arrow", "tar"):
        with pytest.raises(DataError, match=rf"none\.{kind}"):
            dataset(tmp_path / f"none.{kind}")


@pytest.mark.parametrize(("divide", "number"), [("file", 1), ("line", 4)])
def test_documents_of_a_text_file(divide: str, number: int, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_bytes(b"\xef\xbb\xbf# Title\r\nline two\r\n \r\n\r\nthree \xf0\x9f\x99\x82\n  four\n\n")
    texts = texts_of(dataset(tmp_path / "a.md", format={"type": "text", "divide": divide}))
    assert len(texts) == number and texts[0].startswith("# Title") and "four" in texts[-1]
    assert all(text == text.strip() for text in texts) or divide == "file"


def test_csv_cells(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfid,text\r\n1,"a, ""b""\r\nc"\r\n\r\n2,plain\r\n3,')
    table = dataset(tmp_path / "a.csv")
    assert texts_of(table) == ['a, "b"\r\nc', "plain", ""] and where(table, 1).endswith("/a.csv:5")
    messages = json.dumps([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}])
    make.rows(tmp_path / "b.csv", [{"messages": messages}])
    assert [turn.value for turn in dataset(tmp_path / "b.csv").turns(0)] == ["q", "a"]


def test_columns_of_other_names(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [{"body": "one", "text": "never"}])
    assert texts_of(dataset(path, columns={"body": "text"})) == ["one"]
    assert dataset(path).fingerprint != dataset(path, columns={"body": "text"}).fingerprint
    with pytest.raises(DataError, match=r"a\.parquet row 1: columns names bodi, and the record has: body, text"):
        dataset(path, columns={"bodi": "text"})


def test_what_captions_teach(tmp_path: Path) -> None:
    record = {"image": picture(tmp_path / "a.png", 8, 8).name, "text": "a word"}
    path = write_jsonl(tmp_path / "a.jsonl", [record])
    assert dataset(path).counts().images.tolist() == [0], "in JSON it always was a document"
    for captions, kind in (("generate", "image"), ("understand", "text")):
        turns = dataset(path, captions=captions).turns(0)
        assert [turn.role for turn in turns] == ["user", "assistant"] and turns[-1].kind == kind
    parquet = write_parquet(tmp_path / "a.parquet", [record])
    assert dataset(parquet).sample(0).splits == dataset(path, captions="generate").sample(0).splits


def test_one_of_several_captions_is_used_and_the_others_are_counted(tmp_path: Path) -> None:
    image = picture(tmp_path / "a.png", 8, 8).read_bytes()
    records = [{"image": image, "captions": json.dumps({f"c{k}": f"text {i} {k}" for k in range(3)})} for i in range(9)]
    path = write_parquet(tmp_path / "a.parquet", records)
    texts = [dataset(path).turns(i)[0].value for i in range(9)]
    assert len({text[-1] for text in texts}) > 1, "not always the first"
    assert texts == [dataset(path).turns(i)[0].value for i in range(9)]
    assert dataset(path).index.unused_texts.tolist() == [2] * 9


def test_a_table_of_questions(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 8, 8)
    make.rows(tmp_path / "a.csv", [{"image": "a.png", "question": "What?", "answer": "one"}])
    turns = dataset(tmp_path / "a.csv").turns(0)
    assert [(one.role, one.kind) for one in turns] == [("user", "image"), ("user", "text"), ("assistant", "text")]
    assert turns[0].value == str(tmp_path / "a.png") and [one.value for one in turns[1:]] == ["What?", "one"]


# --- where a record is --------------------------------------------------------------------------------------------


def test_errors_name_file_and_row(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [{"text": "x"}, {"text": "x"}, {"text": None}], row_group_size=1)
    make.rows(tmp_path / "a.csv", [{"text": "x\ny", "messages": "[]"}, {"text": "x", "messages": "["}])
    (tmp_path / "b.csv").write_text("a,b\n1,2\n3\n")
    (tmp_path / "c.csv").write_bytes(b"text\nx\n\xff\n")
    image = picture(tmp_path / "a.png", 8, 8).read_bytes()
    make.tar(tmp_path / "a.tar", [("x/1.png", image), ("x/1.txt", b"a"), ("x/2.json", b"[1]"), ("x/2.png", image)])
    write_parquet(tmp_path / "n.parquet", [{"images": [image], "texts": [{"user": "q", "assistant": None}]}])
    write_jsonl(tmp_path / "o.jsonl", [{"messages": [{"role": "tool", "content": "x"}]}])
    write_jsonl(tmp_path / "p.jsonl", [{"images": ["a.png"], "messages": [{"role": "assistant", "content": "x"}]}])
    for name, message in (
        ("a.parquet", " row 3: text is missing"),
        ("a.csv", ":4: messages is no valid JSON"),
        ("b.csv", r":3: the row has 1 cells\. Allowed: 2"),
        ("c.csv", ":3: byte 0 of the line is no UTF-8.*iconv"),
        ("a.tar", r" sample x/2: json: the record is \[1\]\. Allowed: a JSON object"),
        ("n.parquet", r" row 1: texts\[0\]\.assistant is missing"),
        ("o.jsonl", r":1: messages\[0\]\.role is 'tool'"),
        ("p.jsonl", ":1: the messages ask for 0 images and the record has 1"),
    ):
        with pytest.raises(DataError, match=rf", /.*/{re.escape(name)}{message}"):
            dataset(tmp_path / name)


def test_a_stored_image_that_is_none_is_a_counted_skip(tmp_path: Path) -> None:
    good = picture(tmp_path / "a.png", 8, 8).read_bytes()
    records = [{"image": {"bytes": b, "path": None}, "text": "t"} for b in (good, b"no image", good)]
    rows = dataset(write_parquet(tmp_path / "a.parquet", records))
    assert rows.counts().unreadable.tolist() == [0, 1, 0]
    (split,) = [split for split in rows.sample(1).splits if split.error]
    assert f"image {tmp_path}/a.parquet row 2: image cannot be read" in split.error
    source = pickle.loads(pickle.dumps(split.source))
    assert source == f"{tmp_path}/a.parquet row 2: image" and type(source) is str, "a worker sends no bytes with it"


def test_changed_pixels_inside_a_container_are_a_change(tmp_path: Path) -> None:
    digests = []
    for seed in (1, 2):
        image = picture(tmp_path / "a.png", 8, 8, seed=seed).read_bytes()
        make.tar(tmp_path / "a.tar", [("1.png", image), ("1.txt", b"a")])
        tar = dataset(tmp_path / "a.tar")
        digests.append((tar.prefix_digest(1), tar.fingerprint, int(tar.content_digests()[0])))
    assert all(one != two for one, two in zip(*digests, strict=True))


# --- tar ----------------------------------------------------------------------------------------------------------


class _Harmful:
    def __reduce__(self) -> Any:
        return (open, (_Harmful.path, "w"))

    path = ""


@pytest.mark.parametrize("suffix", ["pyd", "pkl", "pickle", "pth", "pt"])
def test_pickled_members_are_never_loaded(
    suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog = capture_warnings(caplog, monkeypatch)
    _Harmful.path = str(tmp_path / "executed")
    content = pickle.dumps(_Harmful())
    make.tar(tmp_path / "a.tar", [("1.txt", b"one"), (f"1.{suffix}", content), (f"2.{suffix}", content)])
    tar = dataset(tmp_path / "a.tar")
    assert texts_of(tar) == ["one"] and not (tmp_path / "executed").exists()
    assert f"members that are not read: 2 of another kind (.{suffix}), never loaded" in caplog.text


def test_members_of_a_tar(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog = capture_warnings(caplog, monkeypatch)
    image = picture(tmp_path / "a.png", 8, 8).read_bytes()
    long = "d/" * 60 + "x"
    members = [("b/1.txt", b"one"), (f"{long}.png", image), ("a/1.txt", b"two"), (".hidden", b""), ("README", b""),
               ("a/1.cls", b"3"), (f"{long}.txt", b"long"), ("a/1.npy", b"")]  # fmt: skip
    make.tar(tmp_path / "a.tar", members)
    tar = dataset(tmp_path / "a.tar")
    assert [tar.turns(i)[0].value for i in range(3)] == ["one", "long", "two"]
    assert where(tar, 1) == f"{tmp_path}/a.tar sample {long}" and tar.counts().images.tolist() == [0, 1, 0]
    left_out = "2 without a suffix, 1 of another kind (.cls), never loaded, 1 of another kind (.npy)"
    assert f"members that are not read: {left_out}" in caplog.text
    content = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "b.tar").write_bytes(content[: content.index(b"long")])
    with pytest.raises(DataError, match=r"b\.tar (is no whole tar file|ends within)"):
        dataset(tmp_path / "b.tar")
    make.tar(tmp_path / "c.tar", [("1.txt", b"one"), ("1.txt", b"two")])
    with pytest.raises(DataError, match=r"c\.tar has the member 1\.txt twice"):
        dataset(tmp_path / "c.tar")
    make.tar(tmp_path / "d.tar", [("1.cls", b"1")])
    with pytest.raises(DataError, match=r"d\.tar holds no record: 1 of another kind \(\.cls\)"):
        dataset(tmp_path / "d.tar")


@pytest.mark.parametrize(
    "name", ["1.jpg", "./1.jpg", "images/1.jpg", "/data/images/1.jpg", "jpg", "2.jpg", "images/jpg"]
)
def test_an_image_that_the_json_of_a_tar_names(tmp_path: Path, name: str) -> None:
    """Its member, whatever folder the name has; any other name is a path, as in every file."""
    image = picture(tmp_path / "a.jpg", 8, 8).read_bytes()
    make.tar(tmp_path / "a.tar", [("1.jpg", image), ("1.json", json.dumps({"image": name, "caption": "one"}).encode())])
    (image_turn,) = [turn.value for turn in dataset(tmp_path / "a.tar").turns(0) if turn.kind == "image"]
    assert isinstance(image_turn, StoredImage) == (name not in ("2.jpg", "images/jpg"))
    assert not isinstance(image_turn, StoredImage) or image_turn.read() == image


# --- unpacked copies ----------------------------------------------------------------------------------------------


def test_a_compressed_file_is_unpacked_once_and_is_the_plain_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog = capture_warnings(caplog, monkeypatch)
    caplog.set_level(logging.INFO)
    plain = write_jsonl(tmp_path / "plain" / "train.jsonl", TEXTS)
    packed = tmp_path / "train.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    first = dataset(packed)
    assert first.fingerprint == dataset(plain).fingerprint and first.name == "train"
    assert where(first, 6) == f"{tmp_path}/train.jsonl.gz:7" and first.image_root == tmp_path
    assert caplog.text.count("was unpacked once into") == 1 and size_text(plain.stat().st_size) in caplog.text
    monkeypatch.setattr(unpacked.gzip, "open", lambda *_: pytest.fail("unpacked again"))
    assert texts_of(dataset(packed)) == texts_of(first)
    monkeypatch.undo()
    packed.write_bytes(gzip.compress(plain.read_bytes()[:-20]))
    with pytest.raises(DataError, match=r"train\.jsonl\.gz:7: no valid JSON"):
        dataset(packed)


def test_a_copy_needs_space_and_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"x" * 1000))
    with pytest.raises(DataError, match=r"must be unpacked, and its folder is not writable\. Remedy: cache_dir"):
        unpacked_file(path, None)
    usage = shutil.disk_usage(tmp_path)._replace(free=64 << 20)
    monkeypatch.setattr(unpacked.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DataError, match=r"about \d+ B are needed and 64.0 MiB are free\. Remedy: make space"):
        dataset(path)


def test_a_parquet_file_is_copied_once_as_arrow(tmp_path: Path) -> None:
    records = [{"text": f"{i} " + "word " * 200} for i in range(3000)]
    path = write_parquet(tmp_path / "a.parquet", records)
    rows = dataset(path)
    (copy,) = (tmp_path / ".unigen_index" / "unpacked").glob("a.parquet-*.arrow")
    assert [rows.turns(i)[0].value for i in (0, 1500, 2999)] == [records[i]["text"] for i in (0, 1500, 2999)]
    assert where(rows, 2999) == f"{tmp_path}/a.parquet row 3000"
    before = copy.stat().st_mtime_ns
    dataset(path)
    assert copy.stat().st_mtime_ns == before


# --- Hugging Face -------------------------------------------------------------------------------------------------


def test_data_sets_of_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    whole = datasets.Dataset.from_list(TEXTS)
    datasets.DatasetDict({"train": whole, "test": whole.select([1])}).save_to_disk(tmp_path / "splits")
    assert texts_of(dataset(tmp_path / "splits")) == [record["text"] for record in TEXTS]
    test = {"type": "huggingface", "split": "test"}
    assert texts_of(dataset(tmp_path / "splits", format=test)) == [TEXTS[1]["text"]]
    with pytest.raises(DataError, match=r"has no split 'val'\. Allowed: train, test"):
        dataset(tmp_path / "splits", format={"type": "huggingface", "split": "val"})
    whole.save_to_disk(tmp_path / "sharded", num_shards=3)
    assert texts_of(dataset(tmp_path / "sharded")) == [record["text"] for record in TEXTS]
    files = str(write_jsonl(tmp_path / "x.jsonl", TEXTS))
    rows = dataset("json", format={"type": "huggingface", "data_files": files}, name="x")
    assert texts_of(rows) == [record["text"] for record in TEXTS]
    assert where(rows, 2) == "json row 3"
    with pytest.raises(DataError, match=r"is 2 of 7 rows\. Allowed: a whole split"):
        dataset("json", format={"type": "huggingface", "data_files": files, "split": "train[:2]"})
    with pytest.raises(DataError, match="data set 'json' cannot be loaded: FileNotFoundError"):
        dataset("json", format={"type": "huggingface", "data_files": str(tmp_path / "none")})


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "a.parquet", TEXTS)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"a\.parquet needs the package pyarrow.*pip install 'unigen_ds\[data\]'"):
        dataset(path)


# --- a source of one's own ----------------------------------------------------------------------------------------


def test_a_format_of_a_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in ``docs/extending/data.md``: by suffix, by name, and with a setting, which is in the fingerprint."""

    class Louder(WordsSource):
        def __init__(self, path: Path, *, ending: str = "", **more: Any) -> None:
            super().__init__(path, **more)
            self.ending = ending

        def read(self, start: int, stop: int) -> list[Row]:
            return [Row({"text": row.record["text"] + self.ending}, row.where) for row in super().read(start, stop)]

    (tmp_path / "a.words").write_text("one\ntwo\n")
    assert texts_of(dataset(tmp_path / "a.words")) == ["one", "two"] == texts_of(dataset(tmp_path, format="words"))
    monkeypatch.setitem(SOURCES.module_dict, "words", Louder)
    quiet, loud = (dataset(tmp_path / "a.words", format={"type": "words", "ending": end}) for end in ("", "!"))
    assert texts_of(loud) == ["one!", "two!"] and texts_of(quiet) == ["one", "two"]
    assert where(loud, 1) == f"{tmp_path}/a.words, byte 4"


def test_the_samples_are_those_of_their_script(tmp_path: Path) -> None:
    make.write(tmp_path / "new")
    for path in (tmp_path / "new").rglob("*"):
        if path.suffix in (".jsonl", ".json", ".csv", ".tsv", ".txt", ".md", ".gz") and "saved" not in str(path):
            assert path.read_bytes() == (make.FOLDER / path.relative_to(tmp_path / "new")).read_bytes(), path
