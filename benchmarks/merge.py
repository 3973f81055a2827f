"""Time and memory of merging: ``tools/zero_to_fp32.py`` compared with DeepSpeed's script on the same checkpoints.

In: nothing. Out: a table, and ``results/merge_<date>.json``. Accepted if the median ratio of wall times is at most 0.7,
the peak of anonymous memory is at most 0.25 of DeepSpeed's at the largest model, and differs by at most 10 % between
the sizes.

The checkpoints are ZeRO-2 and ZeRO-3 of 2 processes, written here file by file in DeepSpeed's own layout: a decoder of
the given width, fp32 masters and both moments, a bf16 module, tied embeddings, a frozen tower, a buffer. Before the
measurement the same generator writes the small model of the tests, and its files are compared, name by name and bit by
bit, with those of a real engine (``tests/checkpoint/plain_deepspeed.py``).

All sides run in new processes, in turns and in both orders, so that other work of the machine affects them equally.
Before each turn the weights are read into the page cache, and all pending writes are flushed. The checkpoint has a
manifest, so all of ours hash every file before they read it, moments included, and what they write. ``theirs``: the
script of the installed DeepSpeed. ``ours``: the tool, which flushes its files to disk, unlike DeepSpeed; ``ours,
verified``: every bit is also read again. Peaks are of ``RssAnon``, read every 10 ms:
memory that the kernel cannot drop, unlike mapped files.

    python benchmarks/merge.py [--millions 300 1200] [--rounds 3] [--folder DIR]

It needs about 18 bytes of disk and 16 of memory per parameter (the page cache, and DeepSpeed's own). Exit status: 1 if
a limit is exceeded, otherwise 0.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shared.record import RESULTS, ROOT, interval, write_result
from shared.zero_files import Model, decoder, write_checkpoint
from shared.zero_files import compare as differences_of

from unigen_ds.checkpoint.layouts.deepspeed import DeepSpeedReader
from unigen_ds.checkpoint.manifest import FILE_NAME, FileEntry
from unigen_ds.core.shards import MASTER
from unigen_ds.system.files import DIGESTS, file_digest

WALL, PEAK, FLAT = 0.7, 0.25, 1.10
STAGES = (2, 3)
THEIRS, OURS = "theirs", "ours"
SIDES = (THEIRS, OURS)


def command(side: str, source: Path, out: Path) -> list[str]:
    ours = [str(ROOT / "tools" / "zero_to_fp32.py"), str(source), str(out)]
    arguments = {
        THEIRS: ["-m", "deepspeed.utils.zero_to_fp32", str(source), str(out)],
        OURS: ours,
    }
    return [sys.executable, *arguments[side]]


def measure(side: str, source: Path, out: Path) -> dict[str, float]:
    """Seconds of wall time and the peak of anonymous memory, in bytes, of one merge."""
    os.sync()  # pending writes of the previous side must not be measured here
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryFile() as log:
        start = time.perf_counter()
        process = subprocess.Popen(command(side, source, out), env=environment, stdout=log, stderr=log)
        peak = 0
        while process.poll() is None:
            peak = max(peak, anonymous(process.pid))
            time.sleep(0.01)
        seconds = time.perf_counter() - start
        if process.returncode:
            log.seek(0)
            raise SystemExit(f"error: {side} failed on {source}:\n{log.read().decode()[-3000:]}")
    return {"seconds": seconds, "peak": peak}


def anonymous(pid: int) -> int:
    """``RssAnon`` of a process, in bytes; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def warm(source: Path) -> None:
    """Read the input of a merge into the page cache: the weights, not the moments, which may not fit in addition."""
    (folder,) = (path for path in source.iterdir() if path.is_dir())
    reader = DeepSpeedReader(folder)
    for (kind, name), shape in reader.shapes.items():
        for part in reader.parts(kind, name, 0, math.prod(shape)):
            part[::512].max()
    for path in folder.glob("*model_states.pt"):
        with path.open("rb") as stream:
            while stream.read(1 << 24):
                pass


def digests(out: Path) -> dict[str, str]:
    """The output of a merge: each file's name, and each tensor's dtype, shape and hash."""
    values = {path.name: "" for path in out.iterdir() if path.name != DIGESTS}
    for file in [name for name in values if name.endswith(".bin")]:
        for name, tensor in torch.load(out / file, weights_only=True, mmap=True).items():
            content = hashlib.blake2b(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
            values[f"{file}: {name}"] = f"{tensor.dtype} {tuple(tensor.shape)} {content}"
    return values


def check_generator(folder: Path) -> None:
    """Compare the generator's files of the tests' small model with those of a real engine. Exits if they differ."""
    from tests.checkpoint import plain_deepspeed

    real = plain_deepspeed.checkpoints()
    for stage in STAGES:
        case = real / f"zero{stage}-bf16" / f"global_step{plain_deepspeed.STEPS}"
        small = folder / f"small{stage}"
        write_checkpoint(small, Model.of_checkpoint(case), stage=stage)
        differences = differences_of(small / "global_step1", case)
        if differences:
            raise SystemExit("error: the generated files are not like a real engine's:\n" + "\n".join(differences))


def write_manifest(folder: Path) -> None:
    """As of a checkpoint of a run."""
    from tests.checkpoint.support import make_manifest

    reader = DeepSpeedReader(folder)
    rows = [{"name": name, "shape": list(shape), "trainable": name not in reader.frozen}
            for (kind, name), shape in reader.shapes.items() if kind == MASTER]  # fmt: skip
    files = [FileEntry(path.name, path.stat().st_size, file_digest(path)) for path in folder.iterdir()]
    manifest = make_manifest(layout="deepspeed", parameters=rows, files=files)
    (folder / FILE_NAME).write_text(manifest.to_json())


def compare(millions: int, stage: int, *, rounds: int, folder: Path) -> dict[str, Any]:
    source = folder / "checkpoint"
    model = decoder(millions * 10**6)
    write_checkpoint(source, model, stage=stage)
    write_manifest(source / "global_step1")
    measures: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    outputs: dict[str, dict[str, str]] = {}
    load_before = os.getloadavg()
    for turn in range(rounds):
        for side in SIDES if turn % 2 == 0 else SIDES[::-1]:
            warm(source)
            measures[side].append(measure(side, source, folder / "out"))
            if turn == 0:
                outputs[side] = digests(folder / "out")
            shutil.rmtree(folder / "out")
    for path in folder.iterdir():
        shutil.rmtree(path)
    return {
        "parameters": model.numel,
        "stage": stage,
        "bit_equal": all(outputs[side] == outputs[THEIRS] for side in SIDES),
        "seconds": {side: statistics.median(r["seconds"] for r in runs) for side, runs in measures.items()},
        "peak_bytes": {side: max(r["peak"] for r in runs) for side, runs in measures.items()},
        "wall_ratio": {
            side: interval([a["seconds"] / b["seconds"] for a, b in zip(measures[side], measures[THEIRS], strict=True)])
            for side in SIDES[1:]
        },
        "load_before": load_before,
        "load_after": os.getloadavg(),
        "runs": measures,
    }


def verdict(results: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Each limit, and whether it is met."""
    largest = max(r["parameters"] for r in results)
    checks = {f"wall <= {WALL}": all(r["wall_ratio"][OURS]["median"] <= WALL for r in results)}
    checks[f"peak <= {PEAK} at the largest"] = all(
        r["peak_bytes"][OURS] <= PEAK * r["peak_bytes"][THEIRS] for r in results if r["parameters"] == largest
    )
    for stage in sorted({r["stage"] for r in results}):
        peaks = [r["peak_bytes"][OURS] for r in results if r["stage"] == stage]
        checks[f"ZeRO-{stage}: peaks within {FLAT - 1:.0%}"] = max(peaks) <= FLAT * min(peaks)
    checks["bit-equal"] = all(r["bit_equal"] for r in results)
    return checks


def show(results: Sequence[Mapping[str, Any]]) -> None:
    for r in results:
        print(f"ZeRO-{r['stage']}, {r['parameters'] / 1e6:,.0f} M parameters, bit-equal: {r['bit_equal']}")
        for side in SIDES:
            ratio = "" if side == THEIRS else f"   {r['wall_ratio'][side]['median']:.2f} of theirs"
            print(f"  {side:18} {r['seconds'][side]:7.2f} s  {r['peak_bytes'][side] / 2**20:8.0f} MiB{ratio}")


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--millions", type=int, nargs="+", default=[300, 1200], help="parameters of the models")
    p.add_argument("--stages", type=int, nargs="+", default=list(STAGES), choices=STAGES)
    p.add_argument("--rounds", type=int, default=3, help="merges of each side")
    p.add_argument("--folder", type=Path, help="temporary folder for the checkpoints; default: the system's")
    p.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    return p.parse_args()


def main() -> int:
    arguments = parse()
    results = []
    with tempfile.TemporaryDirectory(prefix="merge-", dir=arguments.folder) as folder:
        check_generator(Path(folder))
        for path in Path(folder).iterdir():
            shutil.rmtree(path)
        for millions in arguments.millions:
            for stage in arguments.stages:
                results.append(compare(millions, stage, rounds=arguments.rounds, folder=Path(folder)))
                show(results[-1:])
    checks = verdict(results)
    for limit, ok in checks.items():
        print(f"{limit:34} {'met' if ok else 'NOT MET'}")
    record = {"limits": {"wall": WALL, "peak": PEAK, "flat": FLAT}, "verdict": checks, "results": results}
    print(f"Written: {os.path.relpath(write_result('merge', record, folder=arguments.out))}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
