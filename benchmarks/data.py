"""What data costs: index, packing, loading, memory and the start of a resume, beside common alternatives.

In: nothing; all files are made in a temporary folder. Out: a table, and ``results/data_<date>.json``. Sections:

* ``texts``: texts of 5 to 15 words, as captions have, indexed a second: parse, tokenize, count and digest each
  record; beside ``datasets.map`` (``batched=True``), a plain loop that parses the file and calls the same tokenizer on
  1,000 texts at a time, and the tokenizer alone, without parsing, one thread per core.
* ``documents``: the same with 100 to 300 words.
* ``headers``: photographs indexed a second, beside a loop that opens each file with PIL for its size.
* ``packing``: samples planned a second, and how full the sequences of 4,096 tokens are, for long-tailed lengths, beside
  nanoVLM's packer: the longest sample first, each to the emptiest sequence that has space for it, buffer by buffer.
* ``loader``: photographs loaded at 256 px a second with 0, 1 and 2 workers, beside torch's ``DataLoader``; each batch
  is read once, as a training step reads it, and pixels are compared bit by bit.
* ``vlm``: tokens of conversations about pictures a second, from records to packed batches of one sequence of 4,096
  tokens, in this process, beside nanoVLM's way (``shared/data_peers.py``); tokens and pixels are compared.
* ``memory``: bytes a record that a process has of its own after it has opened an index which another one made.
* ``streaming``: rows of Parquet shards read a second by streaming, in the first pass of a first run and later, beside
  the same files as a source with random access, and as an ``IterableDataset`` of ``datasets``, tokenized by the same
  tokenizer.
* ``resume``: time from the index to the first sequences, at the end of a synthetic data set of 10^8 records and at its
  beginning, each in new processes.
* ``packed_start``: time from the index of 10^7 records that were never packed to the first packed sequence, in new
  processes, beside ``datasets`` that opens as many lengths, shuffles them and fills a sequence (it plans no other one).

Texts are passages of Python's own documentation and of the descriptions of installed packages; photographs are parts of
the two that scikit-learn has. All sides run in turns in one process; ratios are paired by round. Beside the time of the
clock the CPU time of the process and its workers is recorded, which other programs on the machine disturb less.

    pip install -e '.[bench]' -c constraints.txt
    python benchmarks/data.py [--only texts loader] [--rounds 5] [--records 100000000]

Exit status: 1 if a limit is not met, otherwise 0.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shared.data_peers import (
    PATCH,
    Pictures,
    Sides,
    emptiest_first,
    header_sides,
    image_processor,
    text_sides,
    vlm_sides,
    write_pictures,
)
from shared.record import RESULTS, interval, write_result
from shared.stream_peers import SHARDS, stream_sides

from unigen_ds.core.progress import Geometry
from unigen_ds.data.batches.loader import UpdateLoader
from unigen_ds.data.batches.stream import SequenceStream
from unigen_ds.data.cache import array_cache
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.data.index.index import Index
from unigen_ds.data.order.order import Cursor, GlobalOrder
from unigen_ds.data.order.packing import BestFitPacking
from unigen_ds.data.samples.sample import COLUMNS, Array, Counts
from unigen_ds.data.sources.text_files import JsonSource

SECTIONS = (
    "headers", "texts", "documents", "packing", "loader", "vlm", "memory", "resume", "packed_start", "streaming",
)  # fmt: skip
LIMITS = {
    "texts: ratio": 0.7,
    "documents: ratio": 0.8,
    "headers: ratio": 0.4,
    "packing: a second": 1_000_000.0,
    "packing: full": 0.995,
    "loader, 0 workers: ratio": 1.0,
    "loader, 1 workers: ratio": 1.2,
    "loader, 2 workers: ratio": 1.2,
    "vlm: ratio": 1.5,
    "memory: bytes a record": 16.0,
    "resume: ratio": 1.1,
    "packed_start: seconds": 3.0,
}
"""At least so much; of memory and starts at most. The ratios of an index are of CPU time, to a loop that only tokenizes
(reads headers), without digests, counts and checks."""
AT_MOST = ("memory: bytes a record", "resume: ratio", "packed_start: seconds")
BATCH, SEQ_LENGTH, WINDOW, BUFFER_SEQUENCES = 8, 4096, 8192, 8


def cpu_seconds() -> float:
    """Of this process and the processes it has waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in usages)


def in_turns(sides: Sides, number: int | Mapping[str, int], rounds: int, *, same: bool = True) -> dict[str, Any]:
    """Units a second of each side, by clock and by CPU time, and the ratios of ours to each other one.

    ``number``: of units; where sides have different ones, ``same`` is False.
    """
    numbers = dict.fromkeys(sides, number) if isinstance(number, int) else number
    results = {name: side() for name, side in sides.items()}  # warm, and the same work
    assert not same or len(set(results.values())) == 1, results
    clock: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            start, cpu_before = time.perf_counter(), cpu_seconds()
            sides[name]()
            clock[name].append(numbers[name] / (time.perf_counter() - start))
            cpu[name].append(numbers[name] / max(cpu_seconds() - cpu_before, 1e-9))
    result: dict[str, Any] = {"number": number}
    for label, rates in (("", clock), ("_of_cpu_time", cpu)):
        result[f"per_second{label}"] = {name: float(np.median(values)) for name, values in rates.items()}
        result[f"ours_to{label}"] = {
            name: interval([a / b for a, b in zip(rates["ours"], values, strict=True)])
            for name, values in rates.items()
            if name != "ours"
        }
    return result


def texts(folder: Path, rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    return in_turns(text_sides(folder, options.texts, short=True), options.texts, rounds)


def documents(folder: Path, rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    return in_turns(text_sides(folder, options.documents, short=False), options.documents, rounds)


def headers(folder: Path, rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    return in_turns(header_sides(folder, options.headers), options.headers, rounds)


def packing(folder: Path, rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    lengths = np.minimum(draw.lognormal(5.5, 1.1, options.packed).astype(np.int64) + 8, SEQ_LENGTH)
    first = lengths[: options.packed_by_peer]  # of the slower one

    def ours() -> int:
        packer = BestFitPacking(WINDOW)
        parts = [lengths[i : i + WINDOW] for i in range(0, len(lengths), WINDOW)]
        return sum(len(packer.plan(part, np.zeros_like(part), SEQ_LENGTH, 1)) for part in parts)

    def nanovlm() -> int:
        """A buffer is as many tokens as 8 sequences have."""
        count, buffer, total = 0, list[int](), 0
        for length in first.tolist():
            buffer.append(length)
            total += length
            if total >= BUFFER_SEQUENCES * SEQ_LENGTH:
                count += len(emptiest_first(buffer, SEQ_LENGTH))
                buffer, total = [], 0
        return count + len(emptiest_first(buffer, SEQ_LENGTH))

    inputs = {"ours": lengths, "nanoVLM's packer": first}
    sides: Sides = {"ours": ours, "nanoVLM's packer": nanovlm}
    result = in_turns(sides, {name: len(some) for name, some in inputs.items()}, rounds, same=False)
    full = {name: int(inputs[name].sum()) / (side() * SEQ_LENGTH) for name, side in sides.items()}
    return {"packer": BestFitPacking(WINDOW).fingerprint, **result, "full": full}


def loader(folder: Path, rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    number, processor = options.pictures, image_processor(folder)
    paths, records = write_pictures(folder, number)
    data = UnifiedGenerationDataset(records, processor)
    stream = SequenceStream([data], GlobalOrder([number], seed=0), packer=None, seq_length=4096)

    def ours(workers: int, last: dict[int, torch.Tensor] | None = None) -> int:
        """``last``: for the patches of the last batch, by record."""
        # an update is one batch: the peer does not keep its batches either
        loading = UpdateLoader(stream, processor=processor, geometry=Geometry(BATCH, 1, 1), num_workers=workers)
        count = 0
        for [micro] in islice(loading, number // BATCH):
            patches = micro.batch.vit_patches.view(BATCH, -1, PATCH * PATCH * 3)
            count += read(patches)
        if last is not None:
            last |= {int(name.split(":")[1]): patches[i] for i, name in enumerate(micro.batch.sample_ids)}
        loading.close()
        return count

    def theirs(workers: int) -> int:
        return sum(map(read, DataLoader(Pictures(paths), batch_size=BATCH, shuffle=True, num_workers=workers)))

    pixels: dict[int, torch.Tensor] = {}
    ours(0, pixels)
    for index, patches in pixels.items():
        assert torch.equal(patches, Pictures(paths)[index]), f"other pixels of picture {index}"
    result: dict[str, Any] = {}
    for workers in (0, 1, 2):
        sides: Sides = {"ours": partial(ours, workers), "torch's DataLoader": partial(theirs, workers)}
        result[f"{workers} workers"] = in_turns(sides, number, rounds)
    return result


def vlm(folder: Path, rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    sides = vlm_sides(folder, options.talks, seq_length=SEQ_LENGTH, buffer_sequences=BUFFER_SEQUENCES)
    return in_turns(sides, {name: side() for name, side in sides.items()}, rounds, same=False)


def read(patches: torch.Tensor) -> int:
    """As a training step does: memory that another process has filled is mapped then."""
    assert patches.sum().isfinite()
    return len(patches)


def private_bytes() -> int:
    """Memory of this process that is in no file: the pages of a mapped file are those of all processes."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_Dirty")) * 1024


def in_new_process(argument: str, folder: Path, *more: str) -> dict[str, float]:
    """What ``main`` prints for a hidden section."""
    command = [sys.executable, __file__, "--inside", argument, str(folder), *more]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(process.stderr)
    return dict(json.loads(process.stdout.splitlines()[-1]))


def memory(folder: Path, rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    processor = image_processor(folder)
    small, large = 1_000, options.indexed
    for number in (small, large):
        lines = (json.dumps({"text": f"record {i}"}) + "\n" for i in range(number))
        path = folder / f"records-{number}.jsonl"
        with path.open("w") as stream:
            stream.writelines(lines)
        Index.build(JsonSource(path), processor)
    sizes = [in_new_process("memory", folder, str(number))["bytes"] for number in (small, large)]
    return {"records": large, "bytes_a_record": (sizes[1] - sizes[0]) / (large - small)}


def inside_memory(folder: Path, records: str) -> dict[str, float]:
    """What opening an index, fitting it and reading a window add to this process."""
    number, processor = int(records), image_processor(folder)
    before = private_bytes()
    data = UnifiedGenerationDataset(folder / f"records-{number}.jsonl", processor)
    packer = BestFitPacking(64)
    stream = SequenceStream([data], GlobalOrder([number], seed=0), packer=packer, seq_length=64, sequences_per_epoch=9)
    assert list(islice(stream.rows(), 3)) and stream.identity
    return {"bytes": private_bytes() - before}


class Synthetic:
    """A data set of which there is only the index."""

    name, weight = "synthetic", None

    def __init__(self, folder: Path, number: int) -> None:
        def fill(new: array_cache.ArrayFile) -> None:
            draw = np.random.default_rng(0)
            for name in COLUMNS:
                new.add(name, number)
            for start in range(0, number, 1 << 20):
                lengths = draw.lognormal(5.5, 1.1, min(1 << 20, number - start)).astype(np.int64) + 8
                new.put("tokens", start, np.minimum(lengths, SEQ_LENGTH))

        self.cache_folder = folder
        arrays = array_cache.load_or_fill(folder / "synthetic.arrays", str(number), fill)
        self._counts = Counts(*(arrays[name] for name in COLUMNS))
        self.fingerprint = f"synthetic-{number}"

    def __len__(self) -> int:
        return len(self._counts.tokens)

    def lengths(self) -> tuple[Array, Array]:
        return self._counts.tokens, self._counts.tiles

    def counts(self) -> Counts:
        return self._counts

    def sample(self, index: int, *, pass_number: int = 0) -> Any:
        raise NotImplementedError

    def prefix_digest(self, number: int) -> str:
        return f"{self.fingerprint}-{number}"


def resume(folder: Path, rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    Synthetic(folder, options.records)
    times: dict[str, list[float]] = {"begin": [], "end": []}
    for turn in range(rounds + 1):
        for where in list(times)[:: 1 if turn % 2 else -1]:
            result = in_new_process("resume", folder, where, str(options.records))
            if turn:  # the first fills the page cache
                times[where].append(result["cpu_seconds"])
    ratio = interval([end / begin for begin, end in zip(times["begin"], times["end"], strict=True)])
    return {"records": options.records, "cpu_seconds": times, "end_to_begin": ratio}


def inside_resume(folder: Path, where: str, records: str) -> dict[str, float]:
    """From the index to the first sequences."""
    start, cpu_before, number = time.perf_counter(), cpu_seconds(), int(records)
    data = Synthetic(folder, number)
    packer = BestFitPacking(WINDOW)
    stream = SequenceStream(
        [data], GlobalOrder([number], seed=0), packer=packer, seq_length=SEQ_LENGTH, sequences_per_epoch=number // 9
    )
    last = number // WINDOW - 1
    rows = list(islice(stream.rows(Cursor(0, last if where == "end" else 0, 3, 3)), 64))
    assert len(rows) == 64 and stream.identity
    return {"seconds": time.perf_counter() - start, "cpu_seconds": cpu_seconds() - cpu_before}


def packed_start(folder: Path, rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    folder = folder / "never_packed"
    folder.mkdir()
    data, sides = Synthetic(folder, options.unpacked), ["ours"]
    try:
        import datasets
    except ImportError:
        print("not installed: datasets (pip install -e '.[bench]' -c constraints.txt)")
    else:
        datasets.disable_progress_bars()
        datasets.Dataset.from_dict({"length": np.array(data.counts().tokens)}).save_to_disk(str(folder / "lengths"))
        sides.append("datasets")
    results: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for turn in range(rounds + 1):
        for side in sides[:: 1 if turn % 2 else -1]:
            for path in [*folder.glob("plan-*"), *(folder / "lengths").glob("cache-*")]:
                path.unlink()
            result = in_new_process("packed_start", folder, side, str(options.unpacked))
            if turn:  # the first fills the page cache
                results[side].append(result)
    times = {key: {side: [one[key] for one in some] for side, some in results.items()}
             for key in ("seconds", "cpu_seconds")}  # fmt: skip
    return {"records": options.unpacked, **times}


def inside_packed_start(folder: Path, side: str, records: str) -> dict[str, float]:
    """From an index, or a data set of lengths, to the first sequence; imports do not count."""
    number, packer = int(records), BestFitPacking(WINDOW)
    if side == "datasets":
        import datasets

        datasets.disable_progress_bars()
    start, cpu_before = time.perf_counter(), cpu_seconds()
    if side == "ours":
        stream = SequenceStream(
            [Synthetic(folder, number)], GlobalOrder([number], seed=0), packer=packer, seq_length=SEQ_LENGTH
        )
        row, _ = next(stream.rows())
        assert len(row) > 1 and stream.sequences_per_epoch > number // 50
    else:
        total = 0
        for one in datasets.load_from_disk(str(folder / "lengths")).shuffle(seed=0):
            total += one["length"]
            if total >= SEQ_LENGTH:
                break
    return {"seconds": time.perf_counter() - start, "cpu_seconds": cpu_seconds() - cpu_before}


def streaming(folder: Path, rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    number = options.rows - options.rows % (SHARDS * BATCH)
    folder = folder / "streaming"
    folder.mkdir()
    passes = {"first pass": True, "later passes": False}
    return {name: in_turns(stream_sides(folder, number, cold=cold), number, rounds) for name, cold in passes.items()}


def values_of(results: dict[str, Any]) -> dict[str, float]:
    """The values that have a limit."""
    values = {}
    for name, peer in (
        ("texts", "batches of 1,000"),
        ("documents", "batches of 1,000"),
        ("headers", "a loop of Image.open"),
    ):
        if name in results:
            values[f"{name}: ratio"] = results[name]["ours_to_of_cpu_time"][peer]["median"]
    if "packing" in results:
        values["packing: a second"] = results["packing"]["per_second_of_cpu_time"]["ours"]
        values["packing: full"] = results["packing"]["full"]["ours"]
    for workers, part in results.get("loader", {}).items():
        values[f"loader, {workers}: ratio"] = part["ours_to"]["torch's DataLoader"]["median"]
    if "vlm" in results:
        values["vlm: ratio"] = results["vlm"]["ours_to"]["nanoVLM"]["median"]
    if "memory" in results:
        values["memory: bytes a record"] = results["memory"]["bytes_a_record"]
    if "resume" in results:
        values["resume: ratio"] = results["resume"]["end_to_begin"]["median"]
    if "packed_start" in results:
        values["packed_start: seconds"] = float(np.median(results["packed_start"]["cpu_seconds"]["ours"]))
    return values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=200_000)
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--headers", type=int, default=50_000)
    parser.add_argument("--packed", type=int, default=409_600)
    parser.add_argument("--packed-by-peer", type=int, default=24_576)
    parser.add_argument("--pictures", type=int, default=2_400)
    parser.add_argument("--talks", type=int, default=300, help="conversations of the section vlm")
    parser.add_argument("--indexed", type=int, default=300_000)
    parser.add_argument("--rows", type=int, default=20_480)
    parser.add_argument("--records", type=int, default=100_000_000)
    parser.add_argument("--unpacked", type=int, default=10_000_000, help="records of the section packed_start")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--inside", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.inside:
        what, folder, *more = options.inside
        inside = {"memory": inside_memory, "resume": inside_resume, "packed_start": inside_packed_start}
        print(json.dumps(inside[what](Path(folder), *more)))
        return 0
    before, results = os.getloadavg()[0], {}
    with tempfile.TemporaryDirectory(prefix="data-") as name:
        for section in filter(options.only.__contains__, SECTIONS):
            results[section] = globals()[section](Path(name), options.rounds, options)
            print(section, json.dumps(results[section], indent=1))
    values = values_of(results)
    verdict = {name: (value <= LIMITS[name]) == (name in AT_MOST) for name, value in values.items()}
    for name, value in values.items():
        print(f"{name:28} {value:12,.3f}  limit {LIMITS[name]:12,.3f}  {'met' if verdict[name] else 'NOT MET'}")
    load = {"load_before": before, "load_after": os.getloadavg()[0]}
    record = {"limits": LIMITS, "reached": values, "verdict": verdict, **results, **load}
    print(write_result("data", record, folder=options.out))
    return 0 if all(verdict.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
