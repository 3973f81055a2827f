"""Whether a run consumed its data exactly, from the batches of its processes (``users.RecordHook``), against one
process never stopped. The package is asked for one thing alone: how many sequences each window of the packing has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.end_to_end.engines import users as users
from tests.end_to_end.engines.launch import Outcome
from tools.inspect_data import newest_manifest
from unigen_ds.runner.open.replayed import build_inspected
from unigen_ds.runner.settings.tree import load_config

Consumed = dict[int, dict[tuple[int, int], list[str]]]
"""Update -> (micro-batch, rank) -> ids of its samples."""


def sequences(single: Outcome) -> list[list[str]]:
    """The ids of each sequence of a run of one process, one sequence a micro-batch."""
    return [line["samples"] for line in single.records(0)]


def consumed(run: Outcome) -> Consumed:
    """What counts: of an update that a killed process began, too, that of the start which resumed before it."""
    ranks = range(len(list(run.folder.glob("record_*.jsonl"))))
    lines = [(rank, line) for rank in ranks for line in run.records(rank)]
    last: dict[int, int] = defaultdict(int)
    for _, line in lines:
        last[line["update"]] = max(last[line["update"]], line["begun"])
    found: Consumed = defaultdict(dict)
    for rank, line in lines:
        if line["begun"] == last[line["update"]]:
            assert (line["index"], rank) not in found[line["update"]], line
            found[line["update"]][line["index"], rank] = line["samples"]
    return found


def misdealt(run: Outcome, wanted: Sequence[Sequence[str]], *, per_update: int) -> list[str]:
    """Micro-batches with other samples than the sequences ``wanted`` that are theirs: rank r of w has every w-th."""
    found, problems = consumed(run), []
    if sorted(found) != list(range(1, len(found) + 1)):
        problems.append(f"updates {sorted(found)}")
    for update, parts in sorted(found.items()):
        counts, world = (max(numbers) + 1 for numbers in zip(*parts, strict=True))
        size = per_update // (counts * world)
        for index in range(counts):
            for rank in range(world):
                first = (update - 1) * per_update + index * size * world + rank
                expected = [sample for k in range(size) for sample in wanted[first + k * world]]
                if parts.get((index, rank)) != expected:
                    problems.append(f"update {update}, micro-batch {index} of rank {rank} of {world}")
    return problems


def windowed(rows: Sequence[list[str]], work_dir: Path) -> list[list[list[str]]]:
    """The sequences of a run by window of its packing. The run may have ended within the last one."""
    manifest = newest_manifest(work_dir)
    _, data = build_inspected(load_config(work_dir / "config.py"), world_size=1, manifest=manifest)
    found, begun, at = list[list[list[str]]](), 0, (0, 0)
    while begun < len(rows):
        epoch, window = at
        number = data.stream.window_count(epoch, window)
        found.append(list(rows[begun : begun + number]))
        begun += number
        at = (epoch, window + 1) if window + 1 < data.stream.num_windows(epoch) else (epoch + 1, 0)
    return found


def inexact(windows: Sequence[Sequence[Sequence[str]]], units: Mapping[str, set[str]]) -> list[str]:
    """Where a pass over a source is not each of its units once, or begins before the one before it is complete.

    ``windows``: as of ``windowed``. A window is packed as a whole: within it the order shows nothing.
    """
    windows_of: dict[tuple[str, int], list[int]] = defaultdict(list)
    seen: dict[tuple[str, int], list[str]] = defaultdict(list)
    for window, rows in enumerate(windows):
        for sample in (sample for row in rows for sample in row):
            name, index, number, *piece = sample.split(":")
            windows_of[name, int(number)].append(window)
            seen[name, int(number)].append(":".join([index, *piece]))
    problems = [f"the sources are {sorted({name for name, _ in seen})}"] * ({name for name, _ in seen} != set(units))
    for name in units.keys() & {name for name, _ in seen}:
        passes = sorted(number for source, number in seen if source == name)
        problems += [f"{name}: the passes are {passes}"] * (passes != list(range(len(passes))))
        for number in passes:
            found, following = seen[name, number], windows_of.get((name, number + 1))
            problems += [f"{name}, pass {number}: a sample twice"] * (len(set(found)) < len(found))
            problems += [f"{name}, pass {number}: others than its records"] * (not set(found) <= units[name])
            if following is not None:
                early = min(following) < max(windows_of[name, number])
                problems += [f"{name}: pass {number + 1} begins before pass {number} is complete"] * early
                missing = units[name] - set(found)
                ended = min(following) == len(windows) - 1  # with the run, within that window
                problems += [f"{name}, pass {number}: {sorted(missing)} missing"] * (bool(missing) and not ended)
    return problems
