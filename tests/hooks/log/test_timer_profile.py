"""``tools/train.py --profile N``: a trace and a table, of a run that is otherwise the same."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from tests.support.processes import ENVIRONMENT, ROOT, run
from tests.text_run import text_config, words
from tools import report
from tools.train import main
from unigen_ds.hooks.log.timer import SECTIONS
from unigen_ds.system.journals import METRICS_FILE, read_lines

OPTIONS = ("--cfg-options", "custom_hooks=[]", "default_hooks.logger.interval=1", "--max-updates")


def numbers(folder: Path) -> list[tuple[float, float]]:
    return [(one["loss"], one["grad_norm"]) for one in read_lines(folder / METRICS_FILE) if "loss" in one]


def test_updates_are_profiled_and_change_no_number(tmp_path: Path) -> None:
    text_config(tmp_path, [{"text": words(4, k)} for k in range(40)])
    config, plain, run_dir = str(tmp_path / "config.py"), tmp_path / "plain", tmp_path / "run"
    assert main([config, "--work-dir", str(plain), *OPTIONS, "6"]) == 0
    (stale := run_dir / "profile" / "rank1.json.gz").parent.mkdir(parents=True)
    stale.touch()
    assert main([config, "--work-dir", str(run_dir), *OPTIONS, "4", "--profile", "2"]) == 0
    assert not stale.exists() and "Profile of 1 of 2 updates on 1 rank(s)" in (run_dir / "train.log").read_text()
    table = json.loads((run_dir / "profile" / "table.json").read_text())
    assert [(one["first"], one["last"]) for one in table] == [(4, 4)], "the run ends before the second one"
    for number in (1, 2):  # updates 5 and 6, then none
        assert main([config, "--work-dir", str(run_dir), *OPTIONS, "6", "--profile", "2", "--resume"]) == 0
        assert (run_dir / "train.log").read_text().count("No update is profiled") == number and not numbers(plain)[6:]
    assert numbers(run_dir) == numbers(plain)
    (rank,) = table
    assert rank["rank"] == 0 < rank["hooks"] and all(rank[name] > 0 for name in SECTIONS if name != "communication")
    assert sum(rank[name] for name in (*SECTIONS, "hooks", "other")) == pytest.approx(rank["update"], rel=0.05)
    trace = json.loads(gzip.decompress((run_dir / "profile" / "rank0.json.gz").read_bytes()))
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("forward_backward") == 1 and {"data", "step", "hook:logger", "aten::mm"} <= {*names}
    assert report.main([str(run_dir)]) == 0
    page = (run_dir / "report.html").read_text()
    assert ">Profile<" in page and ">forward backward<" in page
    (run_dir / "profile" / "table.json").write_text("[1]")
    assert report.main([str(run_dir)]) == 0 and "validation error" in (run_dir / "report.html").read_text()


@pytest.mark.slow
def test_every_rank_has_a_trace_and_a_row(tmp_path: Path) -> None:
    text_config(tmp_path, [{"text": words(4, k)} for k in range(80)])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "tools/train.py"]
    options = [tmp_path / "config.py", "--work-dir", tmp_path / "run", "--backend", "fsdp", *OPTIONS, "6"]
    for _ in range(2):  # the second one deletes the profile of the first
        process = run([*command, *options, "--profile", "2"], cwd=ROOT, env=ENVIRONMENT, text=True)
        assert process.returncode == 0, process.stderr
        options = [*options[:-1], "12", "--resume"]
    folder = tmp_path / "run" / "profile"
    table = json.loads((folder / "table.json").read_text())
    assert [(one["rank"], one["first"], one["last"]) for one in table] == [(0, 10, 11), (1, 10, 11)]
    assert all(one["communication"] > 0 for one in table)
    assert {path.name for path in folder.iterdir()} == {"rank0.json.gz", "rank1.json.gz", "table.json"}
