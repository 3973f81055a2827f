"""What is reported about data that cannot be read, by the tool: what was given, what is allowed, and the remedy."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from tests.support.processes import ROOT
from tests.text_run import text_config
from tests.tiny import tiny_config
from tools.inspect_data import main as inspect_data
from unigen_ds.config.overrides import plain_values
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.families.nanovlm.processor import VLMProcessor
from unigen_ds.runner import Runner
from unigen_ds.system.pipes import READER_GONE, ends_quietly


def jsonl(path: Path, *records: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def save(path: Path, content: bytes | str) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def picture(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8), 90).save(path)
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("config")
    values: dict[str, Any] = plain_values(tiny_config(folder / "run", folder))
    return values


@pytest.fixture
def inspect(plain: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """(exit status, all that is written) of the tool, with that data set."""

    def run(data_path: Any = None, _processor: Any = None, **more: Any) -> tuple[int, str]:
        spec = {"type": "UnifiedGenerationDataset", **({"data_path": data_path} if data_path else {}), **more}
        config = {**plain, "train_dataloader": {**plain["train_dataloader"], "dataset": spec}}
        config["processor"] = {**plain["processor"], **(_processor or {})}
        file = tmp_path / "config.json"
        file.write_text(json.dumps(config))
        status = inspect_data([str(file)])
        output = capsys.readouterr()
        return status, output.out + output.err

    return run


def binary_texts(path: Path) -> str:
    """As programs write it that know no kind of text."""
    pq.write_table(pa.table({"text": [b"one", b"two"]}), path)
    return str(path)


BROKEN: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "semicolon": (lambda f: save(f / "a.csv", "image;caption\n1.png;a\n"), {},
                  "Remedy: format=dict(type='csv', delimiter=';')"),
    "a url": (lambda f: "http://127.0.0.1:1/wds-{0000..0001}.tar", {}, "Remedy: streaming=True"),
    "role and content": (lambda f: jsonl(f / "a.jsonl", {"conversations": [{"role": "user", "content": "x"}]}), {},
                         "columns={'conversations': 'messages'}"),
    "key misspelt": (lambda f: jsonl(f / "a.jsonl", {"text_promt": "a", "image_path": "1.png"}), {},
                     "text_prompt is missing (the record has: text_promt, image_path). Allowed: a text. "
                     "Remedy: another name: columns={'name in the file': 'text_prompt'}"),
    "Parquet": (lambda f: save(f / "a.jsonl", b"PAR1...."), {}, "is a Parquet file. Allowed: "),
    "last line": (lambda f: save(f / "a.jsonl", '{"text": "a"}\n{"text": "b'), {}, "Remedy: the record ends early"),
    "Latin-1": (lambda f: save(f / "a.jsonl", b'{"text": "caf\xe9"}\n'), {}, "no UTF-8. Remedy: convert it: iconv"),
    "binary texts": (lambda f: binary_texts(f / "a.parquet"), {},
                     "a.parquet row 1: text has bytes. Allowed: a text (UTF-8)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_data_that_cannot_be_read(case: str, inspect: Callable[..., Any], tmp_path: Path) -> None:
    make, more, message = BROKEN[case]
    status, output = inspect(make(tmp_path), **more)
    assert status in (1, 2) and message in output and "Traceback" not in output


@pytest.mark.parametrize("first", ["[![badge](a.svg)](b)\n\n# Title\n", "# Title\n"])
def test_markdown_is_text_whatever_it_begins_with(first: str, inspect: Callable[..., Any], tmp_path: Path) -> None:
    for name, text in (("1.md", first), ("2.md", "# Two\n")):
        (tmp_path / name).write_text(text)
    assert inspect(str(tmp_path / "*.md"))[0] == inspect(str(tmp_path / "1.md"))[0] == 0


def test_metadata_of_image_folders(inspect: Callable[..., Any], tmp_path: Path) -> None:
    """Other names of its columns, and two folders, whose names begin in each."""
    rows = {"a": ["filename,label", "0.png,a circle"], "b": ["filename,label", "1.png,a square"]}
    for name, lines in rows.items():
        picture(tmp_path / "top" / name / lines[1].partition(",")[0])
        (tmp_path / "top" / name / "metadata.csv").write_text("\n".join(lines) + "\n")
    one, columns = str(tmp_path / "top" / "a"), {"filename": "file_name", "label": "caption"}
    status, output = inspect(one)
    assert status == 1 and "file_name is missing" in output and "columns={'name in the file': 'file_name'}" in output
    assert "columns={'name in the file': 'text'}" in inspect(one, columns={"filename": "file_name"})[1]
    status, output = inspect(one, columns=columns)
    assert status == 0 and "unreadable" not in output
    status, output = inspect([one, str(tmp_path / "top" / "b")], columns=columns)
    assert status == 0 and "unreadable" not in output, "each has its own images"


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a size as a change": ({"augment": [{"type": "ImageTransform", "max_size": 8, "min_size": 8, "stride": 4}]}, {},
                           "processor.augment[0].type is ImageTransform, which sets the size of an image. Allowed: "),
    "a change as a size": ({"vae_transform": {"type": "RandomFlip"}}, {},
                           "processor.vae_transform.type is RandomFlip, which changes images at random"),
    "side": ({"vit_transform": {"type": "ImageTransform", "max_size": 64, "min_size": 8, "stride": 4, "mode": "L"}}, {},
             "vit_transform.max_size 64 allows up to 16 patches a side"),
    "keys of a base": ({}, {"type": "DatasetAdapter", "data_path": "x.jsonl", "dataset": {"type": "a.B"}},
                       "has no key 'data_path' (DatasetAdapter). Remedy: valid: dataset, group"),
    "a path of a class": ({}, {"type": "DatasetAdapter", "dataset": "my.Data"}, "Remedy: dataset=dict(type='my.Data')"),
    "the name of a filter": ({}, {"data_path": "x.jsonl", "filters": "ImageCountFilter"},
                             "Allowed: a list of dict(type='...', ...), or one of them."),
}  # fmt: skip


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_cannot_work(case: str, inspect: Callable[..., Any]) -> None:
    processor, data, message = SETTINGS[case]
    status, output = inspect(_processor=processor, **(data or {"data_path": "x.jsonl"}))
    assert status == 2 and message in output and "Traceback" not in output
    assert "valid: " not in output or "processor" not in output.partition("valid: ")[2]


def test_a_reader_that_ends_first(plain: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``| head``: no traceback, in any tool; a broken pipe to something else remains an error."""
    data = jsonl(tmp_path / "a.jsonl", {"text": "a b"})
    spec = {"type": "UnifiedGenerationDataset", "data_path": data}
    config = {**plain, "train_dataloader": {**plain["train_dataloader"], "dataset": spec}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        assert inspect_data([str(tmp_path / "config.json")]) == READER_GONE

    @ends_quietly
    def other(argv: Any = None) -> int:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        other()
    tools = [path for path in (ROOT / "tools").glob("*.py") if not path.name.startswith("_")]
    assert tools and all("@ends_quietly\ndef main(" in path.read_text() for path in tools)


def test_a_vlm_has_no_images_as_tensors() -> None:
    """The start reads the items, and refuses the first image; it was an error of the first update."""
    processor = object.__new__(VLMProcessor)
    with pytest.raises(DataError, match=r"data\[0\].* the model is a VLM\. Allowed: items of text alone"):
        processor.ready_image(torch.zeros(3, 8, 8), "vit", "data[0].padded_images[0]")


def test_files_of_a_folder_that_are_not_read(
    inspect: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("1.md", "2.txt", "3.rst", "4.rst", "README", "5.png"):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text("a b")
    with caplog.at_level("INFO"):
        assert inspect(str(tmp_path / "in"), format="text")[0] == 0
    (line,) = [one.getMessage() for one in caplog.records if "others are not" in one.getMessage()]
    assert "in: 2 files are read, 3 others are not: 2 .rst, 1 without a suffix." in line


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"format": "jsn"}, "format is 'jsn'"),
        ({"format": {"type": "csv", "delimiter": "ab"}}, "format.delimiter is 'ab'"),
        ({"streaming": {"mixed_shard": 2}}, "unknown config key 'streaming.mixed_shard'"),
    ],
)
def test_an_error_of_a_mixture_names_its_data_set(more: dict[str, Any], problem: str, tmp_path: Path) -> None:
    data = jsonl(tmp_path / "a.jsonl", {"text": "one two"})
    kind = "UnifiedGenerationDataset"
    sources = [{"type": kind, "data_path": data, "weight": 1, **options} for options in ({}, more)]
    config = tiny_config(tmp_path / "run", tmp_path, train_dataloader__dataset=sources)
    with pytest.raises(ConfigError) as error:
        Runner.from_cfg(config)
    assert str(error.value).startswith(f"train_dataloader.dataset[1]: {problem}")


def test_the_tool_shows_what_a_log_would_have(inspect: Callable[..., Any], tmp_path: Path) -> None:
    """Files that are given twice, and others of a folder."""
    data = jsonl(tmp_path / "a" / "a.jsonl", {"text": "one two"})
    save(tmp_path / "a" / "b.log", "x")
    logging.getLogger("unigen_ds").handlers.clear()
    assert f"note: data_path has {data} 2 times: its records are used as often." in inspect(data_path=[data, data])[1]
    assert "1 files are read, 1 others are not: 1 .log." in inspect(data_path=str(tmp_path / "a"))[1]


def test_captions_with_a_suffix_in_capitals(inspect: Callable[..., Any], tmp_path: Path) -> None:
    picture(tmp_path / "in" / "0.PNG")
    (tmp_path / "in" / "0.TXT").write_text("a circle")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for path in sorted((tmp_path / "in").iterdir()):
            tar.add(path, path.name)
    for data in (tmp_path / "in", tmp_path / "a.tar"):
        assert inspect(str(data))[0] == 0
    shutil.copy(tmp_path / "in" / "0.PNG", tmp_path / "in" / "1.PNG")
    (tmp_path / "in" / "1.txt").write_text("a square")
    status, output = inspect(str(tmp_path / "in"))
    assert status == 0 and "in: 2 records, 2 used" in output


def test_keys_of_images_of_a_model_of_texts(tmp_path: Path) -> None:
    """They were accepted without effect."""
    model = {"type": "DecoderLM", "llm": {"model_type": "llama", "hidden_size": 8}}
    config = text_config(tmp_path, [{"text": "one"}], model=model)
    for key, value in (("augment", [{"type": "RandomFlip"}]), ("vit_dropout", 0.1)):
        with pytest.raises(ConfigError, match=rf"processor sets {key}, and DecoderLM reads texts alone.*text_dropout"):
            Runner.from_cfg({**config, "processor": {key: value}})
