"""What a run notices of its data file: every changed byte before it continues, and texts that teach nothing."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.text_run import count_up, word_config, write_jsonl
from tools.inspect_data import main as inspect_data
from unigen_ds.core.errors import ResumeBlocked
from unigen_ds.runner import Runner
from unigen_ds.system.files import quick_digest

KIB = 1 << 10


def test_a_change_in_place_in_a_large_file_is_noticed(tmp_path: Path) -> None:
    """300 kB of 90 MiB, of equal length and with the old modification time: no size, head or tail shows it."""
    padding = "x" * (300 * KIB)
    records = [{"text": record["text"], "note": padding} for record in count_up(300)]
    path = write_jsonl(tmp_path / "train.jsonl", records)
    config = word_config(tmp_path)
    Runner.from_cfg(config, max_updates=2).train()
    manifest = json.loads((tmp_path / "run" / "iter_2.pth" / "manifest.json").read_text())
    content, times, quick = path.read_bytes(), os.stat(path), quick_digest(path)
    blocks = [(len(content) - 1024 * KIB) * i // 63 for i in range(64)]  # what a quick digest reads, 1 MiB each
    starts, start = [], 0
    for line in content.splitlines(keepends=True):
        if any(one + 1024 * KIB <= start and start + 300 * KIB <= two for one, two in pairwise(blocks)):
            starts.append(start)
        start += len(line)
    with path.open("r+b") as stream:
        line = content[starts[0] : starts[0] + 300 * KIB]  # the same words in reverse: as many bytes, as many tokens
        text = line.split(b'"')[3]
        assert len(text.split()) > 1
        stream.seek(starts[0])
        stream.write(line.replace(text, b" ".join(text.split()[::-1]), 1))
    assert quick_digest(path) == quick and path.stat().st_size == len(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ResumeBlocked, match="the records of train, their byte ranges or their processor changed"):
        Runner.from_cfg(word_config(tmp_path, resume=True))
    path.write_bytes(content)
    again = Runner.from_cfg(word_config(tmp_path, resume=True), max_updates=3)
    assert again._parts.start.data.stream.identity["fingerprint"] == manifest["loader"]["fingerprint"]
    again.train()


def test_unknown_words_and_empty_captions_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records: list[dict[str, Any]] = [{"text": "one two"}] * 6
    records += [{"text": "one eleven"}] * 2  # 4 tokens each, 1 of them unknown
    records += [{"text": "  "}, {"text": ""}, {"text": "three"}]
    write_jsonl(tmp_path / "train.jsonl", records)
    config = word_config(tmp_path)
    Runner.from_cfg(config, max_updates=1).train()
    log = (tmp_path / "run" / "train.log").read_text()
    assert "2 of 11 records (18 %): an empty text" in log
    assert "2 of 39 text tokens (5.1 %): words that the tokenizer does not have (<unk>)" in log
    capsys.readouterr()
    assert inspect_data([str(tmp_path / "config.py"), "--json"]) == 0
    (source,) = json.loads(capsys.readouterr().out)["sources"].values()
    assert source["unknown_tokens"] == 2 and source["unknown_token_share"] == pytest.approx(2 / 39)
    assert [one["number"] for one in source["noticed"]] == [2, 2]
    assert inspect_data([str(tmp_path / "config.py")]) == 0
    output = capsys.readouterr().out
    assert "  2 of 11 records (18 %): an empty text" in output and "  2 of 39 text tokens (5.1 %): words that" in output
