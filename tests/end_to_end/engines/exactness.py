"""Whether a run consumed its data exactly, from the batches of its processes (``users.RecordHook``), against one
process never stopped. The package is asked for one thing alone: how many sequences each window of the packing has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.end_to_end.engines.jobs import users as users
from tests.end_to_end.engines.launch import Outcome
from tools.inspect_data import newest_manifest
from unigen_ds.runner.open.replayed import build_inspected
from unigen_ds.runner.settings.tree import load_config

Consumption = dict[int, dict[tuple[int, int], list[str]]]
"""Update -> (micro-batch, rank) -> ids of its samples."""


def sequences(single: Outcome) -> list[list[str]]:
    """The ids of each sequence of a run of one process, one sequence a micro-batch."""
    return [line["samples"] for line in single.records(0)]


def consumption_of(run: Outcome) -> Consumption:
    """What counts: of an update that a killed process began, too, that of the start which resumed before it."""
    ranks = range(len(list(run.folder.glob("record_*.jsonl"))))
    lines = [(rank, line) for rank in ranks for line in run.records(rank)]
    last: dict[int, int] = defaultdict(int)
    for _, line in lines:
        last[line["update"]] = max(last[line["update"]], line["begun"])
    by_update: Consumption = defaultdict(dict)
    for rank, line in lines:
        if line["begun"] == last[line["update"]]:
            assert (line["index"], rank) not in by_update[line["update"]], line
            by_update[line["update"]][line["index"], rank] = line["samples"]
    return by_update


def misdealt(run: Outcome, sequences: Sequence[Sequence[str]], *, per_update: int) -> list[str]:
    """Micro-batches with other samples than the sequences ``sequences`` that are theirs: rank r of w has every w-th."""
    by_update, problems = consumption_of(run), []
    if sorted(by_update) != list(range(1, len(by_update) + 1)):
        problems.append(f"updates {sorted(by_update)}")
    for update, parts in sorted(by_update.items()):
        counts, world = (max(numbers) + 1 for numbers in zip(*parts, strict=True))
        size = per_update // (counts * world)
        for index in range(counts):
            for rank in range(world):
                first = (update - 1) * per_update + index * size * world + rank
                expected = [sample for k in range(size) for sample in sequences[first + k * world]]
                if parts.get((index, rank)) != expected:
                    problems.append(f"update {update}, micro-batch {index} of rank {rank} of {world}")
    return problems


def into_windows(rows: Sequence[list[str]], work_dir: Path) -> list[list[list[str]]]:
    """The sequences of a run by window of its packing. The run may have ended within the last one."""
    manifest = newest_manifest(work_dir)
    _, data = build_inspected(load_config(work_dir / "config.py"), world_size=1, manifest=manifest)
    windows, start, at = list[list[list[str]]](), 0, (0, 0)
    while start < len(rows):
        epoch, window = at
        number = data.stream.window_count(epoch, window)
        windows.append(list(rows[start : start + number]))
        start += number
        at = (epoch, window + 1) if window + 1 < data.stream.num_windows(epoch) else (epoch + 1, 0)
    return windows


def inexact(windows: Sequence[Sequence[Sequence[str]]], units: Mapping[str, set[str]]) -> list[str]:
    """Where a pass over a source is not each of its units once, or begins before the one before it is complete.

    ``windows``: as of ``into_windows``. A window is packed as a whole: within it the order shows nothing.
    """
    windows_of: dict[tuple[str, int], list[int]] = defaultdict(list)
    uses: dict[tuple[str, int], list[str]] = defaultdict(list)
    for window, rows in enumerate(windows):
        for sample in (sample for row in rows for sample in row):
            name, index, number, *piece = sample.split(":")
            windows_of[name, int(number)].append(window)
            uses[name, int(number)].append(":".join([index, *piece]))
    problems = [f"the sources are {sorted({name for name, _ in uses})}"] * ({name for name, _ in uses} != set(units))
    for name in units.keys() & {name for name, _ in uses}:
        passes = sorted(number for source, number in uses if source == name)
        problems += [f"{name}: the passes are {passes}"] * (passes != list(range(len(passes))))
        for number in passes:
            indices, following = uses[name, number], windows_of.get((name, number + 1))
            problems += [f"{name}, pass {number}: a sample twice"] * (len(set(indices)) < len(indices))
            problems += [f"{name}, pass {number}: others than its records"] * (not set(indices) <= units[name])
            if following is not None:
                early = min(following) < max(windows_of[name, number])
                problems += [f"{name}: pass {number + 1} begins before pass {number} is complete"] * early
                missing = units[name] - set(indices)
                has_ended = min(following) == len(windows) - 1  # with the run, within that window
                problems += [f"{name}, pass {number}: {sorted(missing)} missing"] * (bool(missing) and not has_ended)
    return problems
