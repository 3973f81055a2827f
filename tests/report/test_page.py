"""Reports of real runs, one of them killed and resumed with another batch: parsed, and their numbers compared."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.processes import ENVIRONMENT, ROOT, run
from tests.tiny import tiny_config
from tools.report import main
from unigen_ds.checkpoint.store import Lineage
from unigen_ds.core.progress import Skip
from unigen_ds.evaluation.provenance import REQUIRED_KEYS, Result, write_results
from unigen_ds.report.charts import MOST_POINTS, moving_average, reduce_points
from unigen_ds.report.goodput import PARTS, spent_by_start
from unigen_ds.report.reading import mask_secrets, read_work_dir
from unigen_ds.runner import Runner

SAVES = {"default_hooks__checkpoint__interval": 3, "default_hooks__checkpoint__by_epoch": False}
KILLED = """
import sys
from pathlib import Path
from tests.end_to_end.evaluation.test_validation import KillOnce
from tests.report.test_page import SAVES
from tests.tiny import tiny_config
from unigen_ds.runner import Runner

runner = Runner.from_cfg(tiny_config(Path(sys.argv[1]), Path(sys.argv[2]), **SAVES))
runner.hooks = [*runner.hooks, KillOnce(at_update=5)]
runner.train()
"""
VOID = {"meta", "img", "br", "path", "line", "rect"}


class Page(HTMLParser):
    """The elements of a page by section; fails where tags are not balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str | None] = [None]
        self.tables: dict[str | None, list[list[list[str]]]] = {}
        self.texts: dict[str | None, str] = {}
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag in VOID:
            return
        self.open.append(tag)
        if tag == "section":
            self.ids.append(dict(attrs).get("id") or self.ids[-1])
        tables = self.tables.setdefault(self.ids[-1], [])
        if tag == "table":
            tables.append([])
        elif tag == "tr":
            tables[-1].append([])
        elif tag in ("td", "th"):
            tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "section":
            self.ids.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            return
        self.texts[self.ids[-1]] = self.texts.get(self.ids[-1], "") + re.sub(r"\s+", " ", data)
        if "td" in self.open or "th" in self.open:
            self.tables[self.ids[-1]][-1][-1][-1] += data

    def loads_nothing(self) -> set[str | None]:
        """The targets of its links: all are on the page, and no element loads a file or runs a script."""
        for tag, attributes in self.attributes:
            assert tag not in ("link", "iframe", "object", "base")
            for name in ("src", "href", "srcset", "action"):
                assert (attributes.get(name) or "#").startswith(("#", "data:image/")), (tag, attributes)
            assert not [name for name in attributes if name.startswith("on")]
        targets = {a["href"] for tag, a in self.attributes if tag == "a"}
        assert targets <= {f"#{a['id']}" for _, a in self.attributes if "id" in a}
        return targets

    def classes(self, tag: str) -> list[str]:
        return [attributes.get("class") or "" for name, attributes in self.attributes if name == tag]


@dataclass(frozen=True)
class Runs:
    first: Path
    other: Path
    pages: dict[Path, Page] = field(default_factory=dict)


def report(*folders: Path, more: tuple[str, ...] = (), out: Path | None = None) -> Page:
    out = out or folders[0] / "report.html"
    assert main([*map(str, folders), "--out", str(out), *more]) == 0
    return Page(out.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    first, other = folder / "killed", folder / "other"
    Runner.from_cfg(tiny_config(other, digits, optim_wrapper__optimizer__lr=0.5e-3), max_updates=3).train()
    process = run([sys.executable, "-c", KILLED, str(first), str(digits)], cwd=ROOT, env=ENVIRONMENT, text=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    batch = {"train_dataloader__batch_size": 6, "on_batch_change": "sqrt"}
    Runner.from_cfg(tiny_config(first, digits, resume=True, **SAVES, **batch), max_updates=9).train()
    return Runs(first, other)


def copy_run(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


NO_REPORT = """
import sys
from pathlib import Path
from tests.tiny import tiny_config
import unigen_ds.examples.digits.report_hook
from unigen_ds.runner import Runner

hooks = [dict(type="EvaluateHook", interval=1, unit="update", max_batches=1)]
config = tiny_config(Path(sys.argv[1]), Path(sys.argv[2]), custom_hooks=hooks)
config["val_dataloader"] = {key: config["train_dataloader"][key] for key in ("batch_size", "seq_length", "dataset")}
Runner.from_cfg({**config.to_dict(), "backend": {"type": "deepspeed", "config": "zero2"}}, max_updates=1).train()
sys.exit(", ".join(n for n in sys.modules if n.startswith(("unigen_ds.report", "torch._inductor.compile_fx"))) or None)
"""


def test_a_training_imports_no_module_of_the_report_and_no_compiler(digits: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-B", "-c", NO_REPORT, str(tmp_path / "run"), str(digits)]
    process = run(command, cwd=ROOT, env=ENVIRONMENT, text=True)
    assert process.returncode == 0, process.stderr


# ---- what the run records -------------------------------------------------------------------------------------------


def test_the_timeline_has_starts_saves_and_ends(runs: Runs) -> None:
    lines = lines_of(runs.first / "timeline.jsonl")
    assert [(line["event"], line["update"]) for line in lines] == [
        ("start", 0), ("time", 3), ("start", 3), ("time", 9), ("end", 9)
    ]  # fmt: skip
    first, second = lines[0], lines[2]
    assert first["checkpoint"] is None and first["findings"] == []
    assert second["checkpoint"] == str(runs.first / "iter_3.pth")
    assert [start["geometry"]["batch_size"] for start in (first, second)] == [12, 6]
    assert first["topology"]["engine"] == "single" and first["config"]["train_dataloader"]["batch_size"] == 12
    assert 0 < second["start_up"] < 120
    assert "torch" in second["versions"] and second["machine"]["processes"] == 1
    commit = second["git"].get("package", {}).get("commit")
    assert commit is None or (len(commit) == 40 and commit in report(runs.first).texts["environment"])
    statuses = {finding["id"]: finding["status"] for finding in second["findings"]}
    assert statuses["batch.effective"] == "warn" and "ok" in statuses.values()
    for line in (lines[1], *lines[3:]):
        sections = line["sections"]
        assert {"data", "forward_backward", "step", "hook:checkpoint"} <= set(sections)
        assert 0 < sum(sections.values()) <= line["seconds"] + 0.01
    assert lines[-1]["reason"] == "stopped" and lines[-1]["seconds"] >= lines[-2]["seconds"]


def test_an_error_ends_the_timeline_with_its_reason(tmp_path: Path, digits: Path) -> None:
    runner = Runner.from_cfg(tiny_config(tmp_path / "run", digits), max_updates=3)
    update = runner.train_update

    def fail(updates: Any) -> None:
        update(updates)
        raise ValueError("the disk is gone")

    runner.train_update = fail  # type: ignore[method-assign]
    with pytest.raises(ValueError):
        runner.train()
    last = lines_of(tmp_path / "run" / "timeline.jsonl")[-1]
    assert last["event"] == "end" and last["reason"] == "ValueError: the disk is gone" and last["update"] == 1
    assert "ended with an error" in "".join(report(tmp_path / "run").texts.values())


# ---- the page -------------------------------------------------------------------------------------------------------


def test_the_page_is_complete_and_needs_no_network(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(runs.first)]) == 0
    assert capsys.readouterr().out.strip() == str(runs.first / "report.html")
    page = Page((runs.first / "report.html").read_text(encoding="utf-8"))
    assert set(page.texts) >= {"time", "curves", "validation", "previews", "checkpoints", "resumes", "skipped",
                               "environment", "config"}  # fmt: skip
    assert len(page.loads_nothing()) == 9
    style = (runs.first / "report.html").read_text(encoding="utf-8").partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style and "@import" not in style and "prefers-color-scheme:dark" in style


def test_kills_resumes_and_changes_are_shown(runs: Runs) -> None:
    page = report(runs.first)
    ((head, *starts),) = page.tables["time"]
    assert [(row[0], row[2], row[3]) for row in starts] == [("1", "0 – 5", "killed"), ("2", "3 – 9", "stopped")]
    assert head[4] == "Goodput" and all(row[4].endswith(" %") for row in starts)
    assert starts[0][10] != "0.00 s" or read_work_dir(runs.first).starts[0].end_update == 5
    marks = [css for css in page.classes("line") if css.startswith("mark")]
    assert marks and set(marks) == {"mark batch"}
    assert "made void by a resume" in page.texts["curves"]
    changes = {row[0]: row[1:] for row in page.tables["resumes"][0][1:]}
    assert changes["geometry.batch_size"] == ["12", "6"]
    assert changes["config.train_dataloader.batch_size"] == ["12", "6"]
    warnings = {row[1] for row in page.tables["resumes"][1][1:]}
    assert "batch.effective" in warnings
    numbers = page.tables["curves"][-1]
    lines = read_work_dir(runs.first).updates
    assert [row[0] for row in numbers[1:]] == [str(line["update"]) for line in lines] and len(lines) > 5
    assert [float(row[3]) for row in numbers[1:]] == pytest.approx([line["loss"] for line in lines], rel=1e-3)


def test_checkpoints_with_parents_and_the_best(runs: Runs, tmp_path: Path) -> None:
    folder = copy_run(runs.first, tmp_path / "run")
    (folder / "best_checkpoint").write_text("iter_12.pth\n")
    (folder / "lineage.json").write_text('{"start": null, "abandoned": [1], "last_commit": 3}')
    shutil.copytree(folder / "iter_12.pth", folder / "iter_18.pth")
    (folder / "iter_18.pth" / "hooks.json").write_text("{")
    rows = {row[0]: row for row in report(folder).tables["checkpoints"][0][1:]}
    assert set(rows) == {"iter_3.pth", "iter_12.pth", "iter_18.pth"}
    assert rows["iter_3.pth"][6] == "fresh start" and rows["iter_3.pth"][-1] == "abandoned"
    assert rows["iter_12.pth"][2] == "6 = 6 × 1 × 1" and rows["iter_12.pth"][6] == "iter_3.pth"
    assert "best" in rows["iter_12.pth"][-1] and "newest" in rows["iter_12.pth"][-1]
    assert rows["iter_18.pth"][-1] == "damaged"


def test_validation_metrics_and_their_provenance(runs: Runs, tmp_path: Path) -> None:
    folder = copy_run(runs.first, tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as stream:
        for update, loss in ((3, 2.5), (6, 1.25), (9, 1.75)):
            line = {"event": "evaluation", "update": update, "val/loss": loss, "val/loss/text": loss / 2}
            stream.write(json.dumps(line) + "\n")
    results = folder / "eval_results" / "run"
    results.mkdir(parents=True)
    result = {"values": {"val/fid": 31.25}, "provenance": {"metric": "FID", "samples": 500, "model": {"hash": "abc"}}}
    (results / "step_6.json").write_text(json.dumps(result))
    (results / "step_9.json").write_text("{")
    provenance = dict.fromkeys(REQUIRED_KEYS, "known")
    write_results(results / "step_8.json", [Result({"bleu": 12.5}, provenance), Result({"rouge": 0.25}, provenance)])
    page = report(folder)
    rows = {row[0]: row[1:] for row in page.tables["validation"][0][1:]}
    assert rows["bleu"][:5] == ["1", "12.5", "12.5", "12.5", "8"] and rows["rouge"][1] == "0.25"
    assert rows["val/loss"][:5] == ["3", "1.25", "2.5", "1.75", "9"]
    assert rows["val/fid"] == ["1", "31.25", "31.25", "31.25", "6", "eval_results/run/step_6.json"]
    for text in ("FID", "500", "model.hash", "abc"):
        assert text in page.texts["validation"]
    everything = "".join(page.texts.values())
    assert "step_9.json" in everything and "1.25update 6" in everything


def test_everything_from_files_is_escaped(runs: Runs, tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'"
    folder = copy_run(runs.first, tmp_path / "run <b>&")
    with (folder / "skipped_samples.jsonl").open("a") as stream:
        stream.write(json.dumps({"update": 2, "sample": evil, "why": evil + "\x00\ud800"}) + "\n")
    with (folder / "metrics.jsonl").open("a") as stream:
        for update in (3, 9):
            values = {f"val/{evil}": 1.0 / update, "val/loss": 1.0}
            stream.write(json.dumps({"event": evil, "update": update, **values, "provenance": {evil: evil}}) + "\n")
        stream.write(json.dumps({"update": 10, "loss": 1.0, f"own/{evil}": 1.0}) + "\n")
    with (folder / "timeline.jsonl").open("a") as stream:
        stream.write(json.dumps({"event": "end", "update": 9, "seconds": 9.0, "reason": evil}) + "\n")
    (folder / "config.py").write_text(evil)
    page, clean = report(folder), report(runs.first)
    assert page.classes("script").count("") - clean.classes("script").count("") == 3, "numbers of three more charts"
    assert not [a for tag, a in page.attributes if tag == "img"]
    for part in ("skipped", "validation", "config", "time"):
        assert "<script>alert(1)" in page.texts[part], part
    assert "run <b>&" in page.texts[None]


def test_samples_that_were_skipped(runs: Runs, tmp_path: Path) -> None:
    folder = copy_run(runs.first, tmp_path / "run")
    lines = [{"update": n, "sample": f"a:{n}:0", "why": "truncated" if n % 2 else "no such file"} for n in range(1, 8)]
    (folder / "skipped_samples.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [*lines, {"event": "resume", "updates": 3}, lines[3]])
    )
    Lineage(skips=(Skip(64, 66, "spike at <update> 33"),)).write(folder)
    page = report(folder)
    left_out, reasons = page.tables["skipped"]
    assert left_out[1:] == [["64:66", "spike at <update> 33"]]
    assert {row[0]: row[1] for row in reasons[1:]} == {"truncated": "2", "no such file": "2"}
    assert "4 samples could not be decoded" in page.texts["skipped"]


def test_previews_are_inside_up_to_a_limit(runs: Runs, tmp_path: Path) -> None:
    folder = copy_run(runs.first, tmp_path / "run")
    (folder / "previews").mkdir()
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    for update in range(1, 10):
        Image.fromarray(noise).save(folder / "previews" / f"{update}.png")
    page = report(folder)
    alts = [a["alt"] for tag, a in page.attributes if tag == "img"]
    assert alts == [f"update {n} of run" for n in range(1, 10)]
    limit = 4.5 * (folder / "previews" / "1.png").stat().st_size / 2**20
    page = report(folder, more=("--max-pictures-mib", str(limit)))
    alts = [a["alt"] for tag, a in page.attributes if tag == "img"]
    assert alts == [f"update {n} of run" for n in range(6, 10)]
    assert "The first 5 pictures of 9 left out" in page.texts["previews"]


# ---- lost time ------------------------------------------------------------------------------------------------------


def timeline(folder: Path, *lines: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ledger = [{"update": n} for n in range(1, 8)]
    ledger += [{"event": "resume", "updates": 4}, *({"update": n} for n in range(5, 11))]
    for name in ("ledger.jsonl", "metrics.jsonl"):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in ledger))
    return folder


def event(kind: str, update: int, seconds: float = 0.0, **sections: float) -> dict[str, Any]:
    by_name = {name.replace("_", ":"): value for name, value in sections.items()}
    return {"event": kind, "update": update, "seconds": seconds, "sections": by_name, "reason": "complete"}


FIRST = {"event": "start", "update": 0, "start_up": 10.0, "time": "2026-01-01T00:00:10+00:00"}
SECOND = {"event": "start", "update": 4, "start_up": 5.0, "time": "2026-01-01T00:01:30+00:00"}


def test_goodput_of_known_events(tmp_path: Path) -> None:
    """Killed at update 7, recorded until 6 (5 s an update); resumed from 4: 20 s count, 10 + 5 s are repeated."""
    folder = timeline(
        tmp_path / "run", FIRST, event("time", 4, 20.0, data=4.0, hook_checkpoint=2.0),
        event("time", 6, 30.0, data=5.0, hook_checkpoint=2.0),
        SECOND, event("end", 10, 30.0, data=3.0, hook_checkpoint=1.0, hook_evaluate=4.0, hook_mine=2.0, hook_ema=1.0),
    )  # fmt: skip
    run = read_work_dir(folder)
    first, second = spent_by_start(run.starts)
    assert [getattr(first, part) for part in PARTS] == [14.0, 4.0, 2.0, 0.0, 10.0, 15.0]
    assert [getattr(second, part) for part in PARTS] == [20.0, 3.0, 1.0, 6.0, 5.0, 0.0]
    assert first.estimated and not second.estimated
    assert (first + second).goodput == pytest.approx(34 / 80)
    page = report(folder)
    text = page.texts["time"]
    assert "Goodput 42.5 %" in text and "of 1 min 20 s" in text
    for share in ("42.5 %", "8.8 %", "3.8 %", "7.5 %", "18.8 %"):
        assert share in text
    widths = [a["style"] for tag, a in page.attributes if tag == "span" and "width" in (a.get("style") or "")]
    assert widths[0] == "width:42.500%" and widths[-1] == "width:18.750%"


# ---- damage ---------------------------------------------------------------------------------------------------------

DAMAGES = [
    b"",
    b"\x00\xff\xfe{[",
    b"[1, 2]\n",
    b"{}\n",
    b'{"event": "resume"}\n{"update": "a", "loss": 1}\n',
    b'{"event": "start", "update": 3, "config": 3, "findings": {"a": 1}, "git": [], "machine": 1, "start_up": "x"}\n'
    b'{"event": "time", "update": 4, "seconds": "x", "sections": 5}\n'
    b'{"event": "end", "update": 1, "seconds": 1}\n',
    b'{"event": "start", "update": 0, "geometry": {"a": "b"}, "findings": [1, {}], "git": {"package": 1}, "time": 5}\n',
    b'{"update": 1, "loss": 1e400, "lr": [], "time/update": {}, "sequences": -1}\n',
    b'{"update": 2, "loss": 1' + b"0" * 400 + b"}\n",
    b'{"a": ' * 3000,
]


def test_damaged_and_missing_files_leave_the_rest(runs: Runs, tmp_path: Path) -> None:
    folder = copy_run(runs.first, tmp_path / "run")
    names = ["metrics.jsonl", "ledger.jsonl", "timeline.jsonl", "skipped_samples.jsonl", "lineage.json", "config.py",
             "best_checkpoint", "last_checkpoint", "results.json",
             "iter_12.pth/manifest.json", "iter_12.pth/hooks.json", "eval_results/1.json"]  # fmt: skip
    (folder / "eval_results").mkdir()
    before = {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}
    for round_ in range(len(DAMAGES)):  # all files at once, each with another damage
        for number, name in enumerate(names):
            (folder / name).write_bytes(DAMAGES[(number + round_) % len(DAMAGES)])
        assert report(folder).tables, round_
    for name in names:
        (folder / name).unlink()
    assert report(folder).tables
    for name, content in before.items():
        (folder / name).write_bytes(content)
    lines = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(lines[:-10] + b"\n")
    (folder / "gone.png").symlink_to("nowhere")
    text = report(folder).texts[None]
    assert "gone.png is missing" in text
    number = len(lines.splitlines())
    assert f"metrics.jsonl 1 of {number} lines are damaged and left out" in text
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.py").touch()
    page = report(empty)
    assert "no checkpoint" in page.texts["checkpoints"] and "there is no curve" in page.texts["curves"]


def test_wrong_arguments(tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none")]) == 1
    assert "is not a directory" in capsys.readouterr().err
    parent = runs.other.parent
    assert main([str(parent)]) == 1 and not (parent / "report.html").exists()
    assert f"{parent} is no run. Allowed: a folder with metrics.jsonl, " in capsys.readouterr().err
    assert main([str(runs.other), str(runs.other)]) == 2
    assert "given twice" in capsys.readouterr().err
    assert main([str(runs.other), "--out", str(tmp_path / "no" / "such" / "file.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert main([str(runs.other), "--max-pictures-mib", "-1"]) == 2


# ---- several runs ---------------------------------------------------------------------------------------------------


def test_several_runs_are_compared(runs: Runs, tmp_path: Path) -> None:
    page = report(runs.first, runs.other, out=tmp_path / "both.html")
    table, differences = page.tables["comparison"]
    assert [row[:2] for row in table[1:]] == [["killed", "9"], ["other", "3"]]
    rows = {row[0]: row[1:] for row in differences[1:]}
    assert differences[0] == ["Key", "killed", "other"]
    assert rows["optim_wrapper.optimizer.lr"] == ["0.002", "0.0005"]
    assert rows["train_dataloader.batch_size"] == ["6", "12"] and "model.llm.hidden_size" not in rows


def test_components_of_two_configs_are_paired_by_type_and_name(runs: Runs, tmp_path: Path) -> None:
    """A hook more at the front moves no other one."""
    ema, evaluate = {"type": "EMAHook", "momentum": 0.1}, {"type": "EvaluateHook", "name": "held", "interval": 5}
    lists = {
        "a": [ema, evaluate, {"type": "EvaluateHook", "interval": 2}, {"type": "LedgerHook"}, {"type": "LedgerHook"}],
        "b": [{"type": "LedgerHook"}, evaluate, {**ema, "momentum": 0.2}, {"type": "EvaluateHook", "interval": 3}],
    }
    for name, hooks in lists.items():
        (path := copy_run(runs.other, tmp_path / name) / "timeline.jsonl")
        first, *rest = lines_of(path)
        first["config"]["custom_hooks"] = hooks
        path.write_text("".join(json.dumps(line) + "\n" for line in [first, *rest]))
    page = report(tmp_path / "a", tmp_path / "b", out=tmp_path / "both.html")
    rows = {row[0]: row[1:] for row in page.tables["comparison"][1][1:]}
    assert rows == {
        "custom_hooks[EMAHook].momentum": ["0.1", "0.2"], "custom_hooks[EvaluateHook].interval": ["2", "3"],
        "custom_hooks[LedgerHook#2].type": ["LedgerHook", "not given"],
    }  # fmt: skip


# ---- small parts ----------------------------------------------------------------------------------------------------


def test_secrets_are_masked(runs: Runs, tmp_path: Path) -> None:
    config = {"tokenizer": {"path": "x"}, "writers": [{"api_key": "abc", "name": "n"}], "hub": {"password": None}}
    assert mask_secrets(config) == {**config, "writers": [{"api_key": "***", "name": "n"}]}
    folder = copy_run(runs.other, tmp_path / "run")
    start, *rest = lines_of(folder / "timeline.jsonl")
    start["config"]["writer"] = {"api_key": "hidden-value"}
    (folder / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [start, *rest]))
    (folder / "config.py").write_text("api_key = 'hidden-value'")
    report(folder)
    text = (folder / "report.html").read_text()
    assert "hidden-value" not in text and "***" in text


def test_neither_a_report_nor_a_list_of_checkpoints_waits_for_torch(runs: Runs) -> None:
    code = "import sys; from tools import checkpoints, report; report.main([sys.argv[1]])"
    code += "; checkpoints.main(['list', sys.argv[1]]); print({'torch', 'transformers', 'mmengine'} & {*sys.modules})"
    process = run([sys.executable, "-B", "-c", code, str(runs.first)], cwd=ROOT, env=ENVIRONMENT, text=True)
    assert process.stdout.endswith("set()\n"), (process.stdout, process.stderr)


def test_long_curves_keep_their_extremes() -> None:
    points = np.stack((xs := np.arange(10.0 * MOST_POINTS), np.ones_like(xs)), axis=1)
    points[1234, 1], points[4321, 1] = 9.0, -9.0
    result = reduce_points(points).tolist()
    assert len(result) <= MOST_POINTS + 2 and all(points[i].tolist() in result for i in (0, -1, 1234, 4321))
    assert result == sorted(result) and np.allclose(moving_average(line := np.stack((xs, 2 * xs), axis=1)), line)
