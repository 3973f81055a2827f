"""The three tutorials from beginning to end: files of a page are written and its commands are run, as a reader does.

Pages that run until Ctrl-C (``--serve``, ``tools/app.py``) are left out: they have tests of their own.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.processes import ENVIRONMENT, ROOT, run
from unigen_ds.system.journals import read_lines

MOST_LINES = 100


def follow(page: str, folder: Path) -> str:
    """All output of the page's commands, in ``folder``. A block in Python begins with the name of its file."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    (folder / "tools").symlink_to(ROOT / "tools")
    output = ""
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S):
        if language == "python":
            name = re.match(r"# (\S+\.py)", body)
            assert name is not None, body
            (folder / name[1]).write_text(body, encoding="utf-8")
        for line in body.splitlines() if language == "bash" else ():
            words = shlex.split(line, comments=True)
            if words and "--serve" not in words and "tools/app.py" not in words and words[0] != "pip":
                assert words[0] == "python", line
                result = run([sys.executable, *words[1:]], cwd=folder, env=ENVIRONMENT, text=True)
                assert result.returncode == 0, f"{line}\n{result.stdout}{result.stderr}"
                output += result.stdout + result.stderr
    return output


def values_of(work_dir: Path, metric: str) -> list[float]:
    """The values of a metric in all evaluations, in their order."""
    return [line[metric] for line in read_lines(work_dir / "metrics.jsonl") if line.get("event") == "evaluation"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_first_text_model(tmp_path: Path) -> None:
    output = follow("first_text_model.md", tmp_path)
    losses = values_of(tmp_path / "work_dirs" / "first_text", "val/loss")
    assert losses[0] > 5 and min(losses) == losses[-1] < 3.8, losses
    assert "0 problem(s)" in output and "Everything is in work_dirs/first_text: " in output
    texts = [json.loads(line)["text"] for line in (tmp_path / "generated" / "results.jsonl").read_text().splitlines()]
    assert len(texts) == 2 and all(len(text) > 100 for text in texts)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_first_vision_language_model(tmp_path: Path) -> None:
    output = follow("first_vlm.md", tmp_path)
    shares = values_of(tmp_path / "work_dirs" / "first_vlm", "val/exact_match")
    assert max(shares) == shares[-1] > 0.8, shares
    assert "exact_match" in output and (tmp_path / "work_dirs" / "first_vlm" / "previews" / "1000.png").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_first_unified_model(tmp_path: Path) -> None:
    follow("first_unified_model.md", tmp_path)
    shares = values_of(tmp_path / "work_dirs" / "first_unified", "val/exact_match")
    assert shares[-1] > 0.9, shares
    answers = [json.loads(line) for line in (tmp_path / "generated" / "results.jsonl").read_text().splitlines()]
    assert (
        len(answers) == 17
        and answers[-1]["text"] == "this is a six"
        and (tmp_path / "generated" / "grid-00000.png").is_file()
    )
