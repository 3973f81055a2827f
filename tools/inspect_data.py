"""Show the training data of a config: ``python tools/inspect_data.py CONFIG``; installed as ``unigen-inspect-data``.

Without options it prints statistics; ``--sequences A:B`` lists the samples of a range of the run's sequences;
``--ledger WORK_DIR/ledger.jsonl`` recomputes every line of a run's ledger from the config and compares;
``--html OUT.html`` writes one page that needs no network: lengths, balance of texts and images, packing, what is left
out, and the first sequences as the model has them. Neither a GPU nor several processes are needed.

Exit status: 0 done (the ledger agrees), 1 the ledger disagrees, or the data cannot be read or would be refused by a
start, 2 wrong usage or config.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:
    import _path  # noqa: F401 - a script runs from a checkout without installation

from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.core.progress import Skip, merged_skips
from unigen_ds.system.journals import read_lines, sample_digest
from unigen_ds.system.pipes import add_config, ends_quietly, positive, sequence_range, tool_parser

if TYPE_CHECKING:
    from unigen_ds.data.batches.stream import SequenceStream
    from unigen_ds.data.order.order import Cursor
    from unigen_ds.runner.settings.tree import Settings
    from unigen_ds.runner.start.build import Data

NUM_SEQUENCES, MOST_SEQUENCES = 8, 64
"""That a page shows."""


def parser() -> argparse.ArgumentParser:
    p = tool_parser("unigen-inspect-data", __doc__)
    add_config(p)
    what = p.add_mutually_exclusive_group()
    what.add_argument("--sequences", type=sequence_range, metavar="A:B",
                      help="the sample ids of sequences A .. B-1 of the run")  # fmt: skip
    what.add_argument("--ledger", type=Path, metavar="FILE", help="check every valid line of a run's ledger.jsonl")
    p.add_argument("--html", type=Path, metavar="OUT", help="write the page; with --sequences it shows those")
    p.add_argument("--num", type=positive, metavar="N",
                   help=f"sequences that the page shows, 1 to {MOST_SEQUENCES} (default {NUM_SEQUENCES})")  # fmt: skip
    p.add_argument("--work-dir", type=Path, metavar="DIR",
                   help="folder of the run (default: the ledger's): its newest checkpoint stores the length of an\n"
                   "unpacked epoch, and the positions where data was appended or replaced")  # fmt: skip
    p.add_argument("--world-size", type=int, default=1, metavar="N",
                   help="processes of the run's first start (an unpacked epoch is rounded to it; default 1);\n"
                   "not needed if the run's folder contains a checkpoint")  # fmt: skip
    p.add_argument("--json", action="store_true", help="print one JSON object")
    return p


@ends_quietly
def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    _check(arguments)
    from unigen_ds.data.batches.statistics import derive, describe_data  # after parsing: --help does not wait for torch
    from unigen_ds.runner.open.replayed import build_inspected
    from unigen_ds.runner.start.stages import data_errors
    from unigen_ds.system.log import pending_notices

    config = data_sections(arguments.config, arguments.cfg_options)
    work_dir = arguments.work_dir or (arguments.ledger.parent if arguments.ledger else None)
    manifest = newest_manifest(work_dir) if work_dir else None
    settings, data = build_inspected(config, world_size=arguments.world_size, manifest=manifest)
    stream = data.stream
    for text in pending_notices():
        print(f"note: {text}", file=sys.stderr)
    if arguments.html:
        first = stream.phases[0].first_sequence or 0
        sequences = arguments.sequences or (first, first + (arguments.num or NUM_SEQUENCES))
        report = write_html(settings, data, arguments.html, sequences, arguments.config)
    elif arguments.ledger:
        report = check_ledger(stream, arguments.ledger, manifest=manifest)
    elif arguments.sequences:
        rows = derive(stream, *arguments.sequences)
        digest = sample_digest(id for row in rows for id in row)
        report = {"sequences": [*arguments.sequences], "samples": rows, "digest": digest}
    else:
        report = {**describe_data(stream), "skipped_sources": [asdict(one) for one in data.skipped_sources]}
        report["refused"] = [str(error) for error in data_errors(settings, data.parts)]
    print(json.dumps(report) if arguments.json else "\n".join(lines_of(report)))
    return 0 if report.get("agrees", True) and not report.get("refused") else 1


def _check(arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for options that contradict each other, and ``DataError`` where the run does not exist."""
    ledger, sequences, num = arguments.ledger, arguments.sequences, arguments.num
    problem = None
    if arguments.html is None and num:
        problem = "--num N is the number of sequences of a page: give --html OUT, too"
    elif arguments.html is not None and ledger is not None:
        problem = "--html and --ledger are two questions: ask one after the other"
    elif arguments.html is not None and sequences is not None and num is not None:
        problem = "--num and --sequences both choose the sequences of the page: give one of them"
    elif max(num or 0, sequences[1] - sequences[0] if arguments.html and sequences else 0) > MOST_SEQUENCES:
        problem = f"a page shows at most {MOST_SEQUENCES} sequences"
    if problem:
        raise ConfigError(problem)
    if ledger and not ledger.is_file():
        remedy = "name the ledger.jsonl of a run that trained"
        raise DataError(f"--ledger {ledger}: there is no such file", remedy=remedy)
    if arguments.work_dir and not arguments.work_dir.is_dir():
        raise DataError(f"--work-dir {arguments.work_dir}: there is no such folder", allowed="the folder of a run")


def newest_manifest(work_dir: Path) -> Manifest | None:
    """The manifest of the last committed checkpoint of a run, if it has one."""
    from unigen_ds.checkpoint.store import list_checkpoints

    manifests = [checkpoint.manifest for checkpoint in list_checkpoints(work_dir) if checkpoint.manifest is not None]
    return manifests[-1] if manifests else None


def data_sections(name: str, options: Sequence[str]) -> dict[str, Any]:
    """The sections of a config that decide its data. Others are not checked; an unknown name is a note."""
    from unigen_ds.runner.settings.custom_imports import import_custom
    from unigen_ds.runner.settings.tree import DATA_SECTIONS, read_config
    from unigen_ds.system.log import notice

    read = read_config(name, options)
    for problem in read.problems:
        notice(str(problem))
    config = read.values
    sections = {key: config[key] for key in DATA_SECTIONS if key in config}
    try:
        import_custom(sections)
    except ConfigError as error:
        notice(str(error))
        sections.pop("custom_imports")
    return sections


def write_html(settings: Settings, data: Data, out: Path, sequences: tuple[int, int], config: str) -> dict[str, Any]:
    """The page with these sequences as the loader of the run makes them: each in a micro-batch of its own."""
    from unigen_ds.report.data_page import write_data_page
    from unigen_ds.runner.start.build import read_sequences

    batches, title, skips = read_sequences(settings, data, *sequences), Path(config).stem, len(data.skipped_sources)
    write_data_page(
        out, title=title, stream=data.stream, processor=data.processor, batches=batches, skipped_sources=skips
    )
    return {"html": str(out), "sequences": [*sequences]}


def check_ledger(stream: SequenceStream, path: Path, *, manifest: Manifest | None) -> dict[str, Any]:
    """Recompute every valid line. ``problem`` describes the first that differs, is missing or occurs twice.

    Lines from before the data was replaced are only counted: their samples no longer exist.
    """
    from unigen_ds.data.batches.change import compare

    lines = [line for line in read_lines(path) if "event" not in line]
    if not lines:
        raise DataError(f"{path} holds no update that counts", remedy="name the ledger.jsonl of a run that trained")
    old_lines = [line for line in lines if line["sequences"][0] < (stream.phases[0].first_sequence or 0)]
    lines = lines[len(old_lines) :] or lines
    report: dict[str, Any] = {"ledger": str(path), "updates": len(lines), "replaced": len(old_lines), "samples": 0}
    report["sequences"] = [lines[0]["sequences"][0], lines[-1]["sequences"][1]]
    left_out = merged_skips(Skip(*one) for line in lines for one in line.get("left_out", ()))
    report["left_out"] = [*map(list, left_out)]
    stream = stream.skipping(left_out)
    report["same_data"] = manifest is None or not compare(manifest.loader, stream).obstacles
    start = lines[0]["sequences"][0]
    rows = stream.rows(stream.seek(start))
    before: Mapping[str, Any] = {"update": lines[0]["update"] - 1, "sequences": [start, start]}
    if old_lines:
        before = old_lines[-1]
    for line in lines:
        problem, samples = _check_line(line, before, rows, stream.names)
        if problem:
            return {**report, "agrees": False, "update": line["update"], "problem": problem}
        report["samples"] += samples
        before = line
    return {**report, "agrees": True}


def _check_line(
    line: Mapping[str, Any],
    before: Mapping[str, Any],
    rows: Iterator[tuple[Sequence[Any], Cursor]],
    names: Sequence[str],
) -> tuple[str | None, int]:
    """The problem of a line, or None, and its number of samples. Consumes the line's sequences of ``rows``."""
    first, stop = line["sequences"]
    if line["update"] != before["update"] + 1:
        return f"update {line['update']} follows update {before['update']}", 0
    if first != before["sequences"][1]:
        what = "repeated" if first < before["sequences"][1] else "skipped"
        return f"its sequences begin at {first}, the line before ends at {before['sequences'][1]}: some were {what}", 0
    ids = []
    for row, cursor in rows:
        ids += [draw.sample_id(names) for draw in row]
        if cursor.sequences >= stop:
            break
    if sample_digest(ids) != line["digest"]:
        first_ids = ", ".join(ids[:3])
        present = f"the config results in {sample_digest(ids)} ({first_ids}, ...)"
        return f"the ledger has digest {line['digest']}, {present}", len(ids)
    return None, len(ids)


def lines_of(report: Mapping[str, Any]) -> Iterator[str]:
    """A report as readable text."""
    if "html" in report:
        yield report["html"]
    elif "ledger" in report:
        first, stop = report["sequences"]
        what = f"{report['ledger']}: {report['updates']:,} updates, sequences {first}:{stop}"
        if number := report["replaced"]:
            yield f"{report['ledger']}: {number:,} updates before the data was replaced cannot be recomputed."
        for first, stop, why in report["left_out"]:
            yield f"{report['ledger']}: sequences {first}:{stop} were left out: {why}."
        if report["agrees"]:
            yield f"{what}, {report['samples']:,} samples: each occurs once, every digest agrees."
            return
        yield f"{what}. Update {report['update']}: {report['problem']}."
        if not report["same_data"]:
            yield "The data, processor, packing or seed is not that of the checkpoint in the ledger's folder."
    elif "digest" in report:
        first, stop = report["sequences"]
        yield from (f"{n}: {' '.join(row) or '(empty)'}" for n, row in enumerate(report["samples"], start=first))
        yield f"digest of {first}:{stop}: {report['digest']}"
    else:
        yield from _statistics_lines(report)


def _statistics_lines(report: Mapping[str, Any]) -> Iterator[str]:
    from unigen_ds.data.batches.statistics import group_line
    from unigen_ds.data.datasets.overflow import overflow_line
    from unigen_ds.data.datasets.subset import removal_line

    for name, source in report["sources"].items():
        records = source["records"]
        weight = "" if source["weight"] is None else f", weight {source['weight']:g}"
        of, about = _measured_part(source)
        yield f"{name}: {records:,} records{of}, {about}{source['draws_per_epoch']:,} used per epoch{weight}"
        if of:
            yield f"  streamed from {source['streamed']['shards']:,} shards: every number below is{of}"
        if "num_used_data" in source:
            first = source["num_used_data"]
            yield f"  num_used_data: the first {first['used']:,} of {first['records']:,} records"
        if "filters" in source:
            yield "  " + removal_line(source["filters"])
        yield _row("with images", source["records_with_images"], records)
        yield _row("text only", source["records_text_only"], records)
        yield _row("text tokens", source["text_tokens"], source["tokens"])
        yield _row("image tokens", source["image_tokens"], source["tokens"])
        targets = source["text_targets"] + source["image_targets"] + source["other_targets"]
        yield _row("text targets", source["text_targets"], targets)
        yield _row("image targets", source["image_targets"], targets)
        if source["other_targets"]:
            yield _row("other targets", source["other_targets"], targets)
        yield "  " + overflow_line(source["overflow"])
        for one in source["noticed"]:
            yield f"  {one['text']}"
            yield f"    the first: {', '.join(one['first'])}"
    for skip in report["skipped_sources"]:
        yield f"{skip['name']} is skipped (on_error='skip'): {skip['why']}"
    yield from (group_line(name, group) for name, group in report.get("groups", {}).items())
    lengths = report["lengths"]
    part = any(_measured_part(source)[0] for source in report["sources"].values())
    of = " (of streamed sources: of the shards named above)" * part
    yield f"tokens per record{of}: " + "  ".join(f"{key} {value:,.4g}" for key, value in lengths.items())
    yield f"sequences: {report['sequences_per_epoch']:,} per epoch of at most {report['seq_length']:,} tokens"
    how = "packed" if report["packed"] else "not packed"
    yield f"{how}: {report['samples_per_sequence']:.2f} samples per sequence, {report['utilisation']:.1%} used"
    yield f"fingerprint: {report['fingerprint']}"
    yield from (f"A start is refused: {why}" for why in report["refused"])


def _measured_part(source: Mapping[str, Any]) -> tuple[str, str]:
    """The part of a streamed source that its numbers are of, and how exact those of an epoch are; else nothing."""
    stream = source.get("streamed")
    if stream is None or stream["exact"]:
        return "", ""
    names = stream["measured"]["shards"]
    return f" of shard {', '.join(names)} ({len(names):,} of {stream['shards']:,})", "about "


def _row(name: str, value: int, whole: int) -> str:
    return f"  {name:<17}{value:>14,}  {value / max(whole, 1):>6.1%}"


if __name__ == "__main__":
    sys.exit(main())
