"""One page about speed and size: a row for each promise, from the newest results that have its value.

In: ``results/*.json``. Out: ``results/summary.md``: value with its interval, peer, ratio, what is to reach, machine and
the file that it is from. A row that misses stays, marked, with its reason (``Row.why``) below the table; one without a
recorded value is "not measured".

    python benchmarks/summary.py [--results DIR]

A row names its file (``saving``: the newest ``saving_<date>.json``) and the path of its value, with keys between
slashes; ``side=zero2@2`` is the member of a list with that value, a number its index. Several paths are separated by
semicolons: the first that is there. A value is a number, an interval (``median``, ``low``, ``high``), or a list, of
which the median is meant.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
NOT_MEASURED = "not measured"
MISSES = "**misses**"


@dataclass(frozen=True)
class Row:
    """A promise. ``limit`` is of the ratio where ``ratio`` or ``peer`` is a path, else of the value."""

    title: str
    file: str
    value: str = ""
    most: float | None = None
    least: float | None = None
    unit: str = ""
    peer: str = ""
    """Path of the peer's value."""
    ratio: str = ""
    """Path of the ratio; without one it is the value divided by the peer's."""
    peer_name: str = ""
    why: str = ""
    """Why the limit is not reached; on the page only while the row misses."""


def _many_ranks(title: str, key: str, most: float, unit: str, **texts: str) -> Row:
    return Row(title, "many_ranks", f"values/{key}", most=most, unit=unit, **texts)


def _start(title: str, key: str, most: float, **texts: str) -> Row:
    return Row(title, "starts", f"medians/{key}/here/1", most=most, unit="s", **texts)


_START = (
    "ours also checks the config, indexes the data and saves durably, in 0.4 s with its own modules; two processes"
    " share the two cores here, after `torchrun` has imported torch"
)
_IMPORTS = "the import of torch and transformers, which a model or its tokenizer needs, is 2.0 s (to generate 4.3) here"
_ASYNC = (
    "listing and pickling 1,000 tensors is 12 ms of Python beside a copy of 130 ms; two trainings fill the two cores"
    " here, and a process that only writes the same bytes beside them adds 0.27 s with the copy, ours 0.71 with"
    " archives, digests and the look for NaN; DCP's `async_save` waits 3 to 5 times, and adds 6 times, as long"
)
_CORES = "cpu_seconds/{}"
ROWS = (
    _many_ranks("FSDP save at 1,024 ranks: what rank 0 gathers", "gathered_mb", 10, "MB",
                peer_name="ZeRO's layout, 0.4 MB"),
    _many_ranks("FSDP save at 1,024 ranks: what rank 0 does alone", "commit_s", 2, "s"),
    _many_ranks("load at 1,024 ranks", "load_s", 5, "s"),
    _many_ranks("list of 1,000 checkpoints", "list_cpu_s", 1, "s of CPU time",
                why="manifests of 94 KB (500 parameters): JSON 0.6 of 2.4 s, digests 0.7, checks of values 0.3; digests"
                    " of the text would break the format and leave 1.2 s, and a cache would be a second truth"),
    Row("metrics of 100 resumes, the lines in effect", "run_files", _CORES.format("read_lines"), most=1.4, unit="s",
        peer=_CORES.format("json.loads"), ratio="ratio/read_lines", peer_name="json.loads"),
    Row("metrics of 100 resumes, the report", "run_files", _CORES.format("report"), most=2.9, unit="s",
        peer=_CORES.format("json.loads"), ratio="ratio/report", peer_name="json.loads"),
    Row("update of 20 ms, 1 process, hooks of a real run: added", "peers", "real_hooks_ms/ours", most=0.9, unit="ms",
        peer_name="mmengine +0.95, HF Trainer +1.7, Lightning +2.7"),
    Row("update of 20 ms, default hooks: added to a bare loop", "peers", "runner_ms", most=1.0, unit="ms",
        peer_name="a bare loop over our loader"),
    *(Row(f"update of 20 ms, against {name}", "peers", "ms/ours", most=1.0, unit="ms", peer=f"ms/{key}", peer_name=name)
      for name, key in (("a bare loop over torch's DataLoader", "bare"), ("HF Trainer", "trainer"),
                        ("mmengine's Runner", "mmengine"), ("Lightning", "lightning"))),
    *(Row(f"2 processes, {engine}, hooks of a real run", f"overhead_{engine}", "results/processes=2/ours_ms", most=most,
          unit="ms", peer="results/processes=2/theirs_ms", ratio="results/processes=2/ratio",
          peer_name="a hand-written loop")
      for engine, most in (("fsdp", 1.03), ("zero2", 1.05))),
    Row("1 process, single, default hooks", "overhead_single", "results/num_workers=0/ours_ms", most=1.03, unit="ms",
        peer="results/num_workers=0/theirs_ms", ratio="results/num_workers=0/ratio", peer_name="a hand-written loop"),
    Row("1 process, fsdp, default hooks", "overhead_fsdp", "results/num_workers=0/ours_ms", most=1.03, unit="ms",
        peer="results/num_workers=0/theirs_ms", ratio="results/num_workers=0/ratio", peer_name="a hand-written loop"),
    Row("1 process, zero2, default hooks", "overhead_zero2", "results/num_workers=0/ours_ms", most=1.03, unit="ms",
        peer="results/num_workers=0/theirs_ms", ratio="results/num_workers=0/ratio", peer_name="a hand-written loop"),
    Row("FSDP on 2 processes, 70 M parameters: memory", "scaling", "rows/fsdp@2/peak", most=0.75, unit="bytes",
        peer="rows/ddp@2/peak", ratio="rows/fsdp@2/memory_to_ddp", peer_name="DistributedDataParallel"),
    *(Row(f"{title} indexed", "data", f"{key}/per_second_of_cpu_time/ours", least=least, unit="in a second of CPU time",
          peer=f"{key}/per_second_of_cpu_time/{peer}", ratio=f"{key}/ours_to_of_cpu_time/{peer}", peer_name=name)
      for title, key, least, peer, name in (
          ("texts of 5 to 15 words", "texts", 0.7, "batches of 1,000", "a loop that only tokenizes"),
          ("texts of 100 to 300 words", "documents", 0.8, "batches of 1,000", "a loop that only tokenizes"),
          ("photographs", "headers", 0.4, "a loop of Image.open", "a loop of Image.open"))),
    Row("samples packed, 4,096 tokens", "data", "packing/per_second_of_cpu_time/ours", least=1.0,
        unit="in a second of CPU time", peer="packing/per_second_of_cpu_time/nanoVLM's packer",
        ratio="packing/ours_to_of_cpu_time/nanoVLM's packer", peer_name="nanoVLM's packer"),
    Row("data path of a VLM alone, 4,096 tokens", "data", "vlm/per_second/ours", least=1.5, unit="tokens/s",
        peer="vlm/per_second/nanoVLM", ratio="vlm/ours_to/nanoVLM", peer_name="nanoVLM",
        why="decoding, both resizes, floats and the tokenizer, alike on both sides, are 7.0 of our 9.8 ms a sample; at"
        " 1.5 all else would have 1.8 ms"),
    *(Row(f"loader, 256 -> 256 px, {number} workers", "data", f"loader/{number} workers/per_second/ours", least=least,
          unit="images/s", peer=f"loader/{number} workers/per_second/torch's DataLoader",
          ratio=f"loader/{number} workers/ours_to/torch's DataLoader", peer_name="torch's DataLoader",
          why="decoding and resizing are 2.1 of the peer's 2.5 ms an image; ours also reads, parses and counts each"
          " record, in 0.35 ms")
      for number, least in ((0, 1.0), (1, 1.2), (2, 1.2))),
    *(_start(f"start to first update and exit, {name}", f"train {key}", most, peer="medians/hand loop/here/1",
             ratio=f"ratios/train {key}", peer_name="a hand-written loop of one process", why=_START)
      for name, key, most in (("single", "single", 1.02), ("fsdp on 2", "fsdp@2", 1.2),
                              ("zero2 on 2", "zero2@2", 1.39))),
    Row("`checkpoints.py list`", "run_files", _CORES.format("list"), most=0.3, unit="s of CPU time",
        peer_name="import torch, 1.8 s"),
    _start("`plan.py`, a model of 2 layers", "plan", 8,
           why="torch's FakeTensor computes the shapes of ten engines, in 1.4-2.2 s of processor time each; to fill its"
           " private cache once for all would save 2 s"),
    _start("`resume.py`", "resume", 2, why=_IMPORTS),
    _start("`inspect_data.py`", "inspect_data", 3, why=_IMPORTS),
    _start("`report.py`, 100,000 lines", "report", 3),
    *(Row(f"generation, {size}", "generation", f"results/{size}/tokens_per_second/ours", least=1.2, unit="tokens/s",
          peer=f"results/{size}/tokens_per_second/transformers", ratio=f"results/{size}/ratio/wall",
          peer_name="transformers",
          why="83 % of the time is in transformers' own layers on both sides; more needs a kernel of our own")
      for size in ("tiny, 1 prompt", "tiny, 8 prompts", "90 M, 1 prompt")),
    _start("`generate.py`, 10 prompts", "generate", 3, why=_IMPORTS),
    Row("bytes of a ZeRO-2 save", "saving", "runs/side=zero2@2/bytes;runs/engine=deepspeed/bytes", most=1.02,
        unit="bytes", peer="runs/side=single@1/bytes;runs/engine=single/bytes", peer_name="the state",
        why="DeepSpeed's own `load_checkpoint` wants `module` beside the fp32 partitions, else `Missing key(s)`"),
    Row("first packed start over 10 M records", "data", "packed_start/cpu_seconds/ours", most=3, unit="s of CPU time",
        peer_name="HF 6.1 s",
        why="the whole first epoch is planned, so that epochs and schedules are exact, and the peer plans one sequence:"
        " best fit is 60 % of it, sorting and the order 25 %; more needs a kernel of our own"),
    Row("resume at the end of 10^8 records", "data", "resume/cpu_seconds/end", most=0.5, unit="s of CPU time"),
    *(Row(f"tokens/s of a VLM, {name}", "tokens_per_second", "sides/ours/tokens_per_second", least=1.6,
          unit="useful tokens/s", peer=f"sides/{key}/tokens_per_second", ratio=f"ratios/{key}/wall",
          peer_name="nanoVLM's rows")
      for name, key in (("packed", "packed"), ("padded to the longest", "longest"))),
    *(Row(f"save, {side}", "saving", most=1.5, peer_name="write + fsync",
          ratio=f"runs/side={side}/ratios/blocking;runs/engine={engine}/ratio")
      for side, engine in (("single@1", "single"), ("fsdp@2", "fsdp"), ("zero2@2", "deepspeed"))),
    *(Row(f"asynchronous save, {side}: {title}", "saving", ratio=f"runs/side={side}/ratios/{key}", most=most,
          peer_name=peer, why=_ASYNC)
      for side in ("single@1", "fsdp@2", "zero2@2", "zero3@2")
      for title, key, most, peer in (("training waits", "wait", 1.1, "a copy of the same bytes"),
                                     ("all added time", "added", 0.4, "a blocking save"))),
    *(Row(f"load of {tensors:,} tensors", "reading", f"results/tensors={tensors}/seconds/weights", most=1.5, unit="s",
          peer=f"results/tensors={tensors}/seconds/torch.load", ratio=f"results/tensors={tensors}/ratio/weights",
          peer_name="torch.load")
      for tensors in (50, 5000)),
    Row("verification", "saving", "runs/side=single@1/verify_gib_per_s;runs/engine=single/verify_gib_per_s", least=6.7,
        unit="GiB/s"),
    *(Row(f"merge of {number} parameters, ZeRO-3", "merge", f"results/{index}/seconds/ours", most=0.7, unit="s",
          peer=f"results/{index}/seconds/theirs", ratio=f"results/{index}/wall_ratio/ours",
          peer_name="DeepSpeed's zero_to_fp32")
      for number, index in (("0.3 billion", 1), ("1.2 billion", 3))),
    Row("merge of 1.2 billion parameters, ZeRO-3: memory", "merge", "results/3/peak_bytes/ours", most=0.25,
        unit="bytes", peer="results/3/peak_bytes/theirs", peer_name="DeepSpeed's zero_to_fp32"),
    Row("EMA of 500 tensors", "ema", "seconds/ours", most=1.0, unit="s", peer="seconds/foreach_lerp",
        ratio="ratio", peer_name="`_foreach_lerp_` by hand",
        why="it calls the same function of torch: the ratio is 1 within the noise"),
)  # fmt: skip


def results_of(folder: Path, file: str) -> list[tuple[str, dict[str, Any]]]:
    """The results of a name, the newest first."""
    pattern = re.compile(rf"{re.escape(file)}_(\d{{4}}-\d\d-\d\d)(?:_(\d+))?\.json")
    matches = [
        (match[1], int(match[2] or 1), path) for path in folder.iterdir() if (match := pattern.fullmatch(path.name))
    ]
    return [(path.name, json.loads(path.read_text(encoding="utf-8"))) for *_, path in sorted(matches, reverse=True)]


def find(record: Any, path: str) -> Any:
    """The value at the first path that is there; None where none is."""
    for alternative in path.split(";"):
        value = record
        for step in alternative.split("/"):
            value = _member(value, step)
        if value is not None:
            return value
    return None


def _member(record: Any, key: str) -> Any:
    if isinstance(record, list):
        name, separator, text = key.partition("=")
        if separator:
            return next((one for one in record if isinstance(one, Mapping) and str(one.get(name)) == text), None)
        return record[int(key)] if key.isdigit() and int(key) < len(record) else None
    return record.get(key) if isinstance(record, Mapping) else None


def middle(value: Any) -> float | None:
    """The one number of a value."""
    if isinstance(value, Mapping):
        value = value.get("median")
    if isinstance(value, list) and value:
        value = statistics.median(value)
    return float(value) if isinstance(value, int | float) else None


def text_of(value: Any, unit: str = "") -> str:
    """``0.87 (0.81 to 0.93)``; an empty text where there is no number."""
    number = middle(value)
    if number is None:
        return ""
    form = "{:,.0f}" if abs(number) >= 1000 else "{:.4g}"
    extent = isinstance(value, Mapping) and None not in (value.get("low"), value.get("high"))
    spread = f" ({form.format(value['low'])} to {form.format(value['high'])})" if extent else ""
    return f"{form.format(number)}{spread}{f' {unit}' if unit else ''}"


def cells(row: Row, folder: Path) -> list[str]:
    """The cells of a row."""
    bound = f"at most {row.most:g}" if row.least is None else f"at least {row.least:g}"
    relative = bool(row.peer or row.ratio)
    bound += "" if relative else f" {row.unit}"
    for name, record in results_of(folder, row.file):
        value, peer = find(record, row.value), find(record, row.peer) if row.peer else None
        ratio: Any = find(record, row.ratio) if row.ratio else None
        if ratio is None and peer is not None and middle(value) is not None:
            ratio = (middle(value) or 0.0) / (middle(peer) or 1.0)
        number = middle(ratio if relative else value)
        if number is None:
            continue
        holds = (row.most is None or number <= row.most) and (row.least is None or number >= row.least)
        peer_text = ", ".join(filter(None, (row.peer_name, text_of(peer, row.unit))))
        machine = f"{record.get('cpu') or record.get('machine')}, {record.get('cores', '?')} cores"
        if record.get("device") not in (None, "cpu"):
            machine = str(record["device"])
        state = "holds" if holds else MISSES
        return [row.title, text_of(value, row.unit), peer_text, text_of(ratio), bound, state, machine, f"`{name}`"]
    return [row.title, NOT_MEASURED, row.peer_name, "", bound, NOT_MEASURED, "", f"`{row.file}_*.json`"]


def gpu_rows(folder: Path) -> list[list[str]]:
    """A row for each figure of the newest ``benchmarks/gpu.py`` that has a limit, and for each check without one."""
    for name, record in results_of(folder, "gpu"):
        rows = []
        for check in record["checks"]:
            figures = [one for one in check["figures"] if (one["most"], one["least"]) != (None, None)]
            for one in figures:
                bound = " and ".join(f"at {kind} {one[kind]:g}" for kind in ("most", "least") if one[kind] is not None)
                state = {True: "holds", False: MISSES, None: NOT_MEASURED}[one["holds"]]
                value = text_of(one["value"], one["unit"]) or NOT_MEASURED
                rows.append(
                    [f"{check['title']}: {one['name']}", value, "", "", bound, state, record["device"], f"`{name}`"]
                )
            if not figures or check["status"] in ("error", "time"):
                state = "holds" if check["status"] == "holds" else MISSES
                rows.append([check["title"], check["text"], "", "", "", state, record["device"], f"`{name}`"])
        return rows
    return [
        ["all that `benchmarks/gpu.py` checks on a GPU", NOT_MEASURED, "", "", "", NOT_MEASURED, "", "`gpu_*.json`"]
    ]


def reasons(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each reason of the rows that miss."""
    titles: dict[str, list[str]] = {}
    for row, (title, *_, state, _, _) in zip(ROWS, rows, strict=False):
        if state == MISSES:
            titles.setdefault(row.why or "no reason is recorded", []).append(title)
    return [f"* {'; '.join(some)}: {why}." for why, some in titles.items()]


def summary(folder: Path) -> str:
    """The page."""
    rows = [cells(row, folder) for row in ROWS] + gpu_rows(folder)
    states = [row[5] for row in rows]
    counts = f"{states.count('holds')} hold, {states.count(MISSES)} miss, {states.count(NOT_MEASURED)} not measured"
    head = ["", "here", "peer", "ratio", "to reach", "", "machine", "result"]
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    intro = [
        "Made by `python benchmarks/summary.py`, with which `make bench` ends, from the newest result of each name",
        "that has the value; intervals are of 95 %. A ratio is ours to the peer's: of rates (tokens, images) more is",
        "better, of times and bytes less. Where both are measured in turns it is the median of the turns' ratios, and",
        "need not be that of the two medians beside it.",
    ]
    page = ["# Summary of the benchmarks", "", *intro, "", f"{len(rows)} rows: {counts}.", "", *lines]
    if why := reasons(rows):
        page += ["", "Why rows miss:", "", *why]
    return "\n".join(page) + "\n"


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--results", type=Path, default=RESULTS, help="folder of the results, and of summary.md")
    folder: Path = p.parse_args(argv).results
    path = folder / "summary.md"
    path.write_text(summary(folder), encoding="utf-8")
    print(f"Written: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
