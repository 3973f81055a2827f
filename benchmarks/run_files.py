"""Time to read what a run wrote: lines of metrics, the report of them, and a list of checkpoints.

In: nothing. Out: a table, and ``results/run_files_<date>.json``. Accepted if, in CPU time, the lines in effect need at
most 1.4 times as long as ``json.loads`` of the same lines and the report at most 2.9 times, and if a list of
checkpoints needs at most 0.25 times as long as ``import torch``. Everything runs in turns, each in a process of its
own, so that other work affects all of them equally.

    python benchmarks/run_files.py [--lines 300000] [--resumes 100] [--rounds 3]

A million lines need about 4 GB of memory. Exit status: 1 if a limit is exceeded, otherwise 0.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shared.record import RESULTS, ROOT, interval, write_result

from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core.progress import Geometry, Progress, Ruler

KEYS = ("lr", "loss", "loss/text", "grad_norm", "time/update", "time/data", "tokens_per_second", "samples_per_second",
        "tokens_per_second_per_device", "tflops", "memory")  # fmt: skip
METHODS = {
    "json.loads": "import json; lines = [json.loads(line) for line in open({0!r} + '/metrics.jsonl')]",
    "read_lines": "from unigen_ds.system.journals import read_lines; from pathlib import Path; "
    "read_lines(Path({0!r}) / 'metrics.jsonl')",
    "report": "from tools.report import main; main([{0!r}])",
    "import torch": "import torch",
    "list": "from tools.checkpoints import main; main(['list', {0!r}])",
}
LIMITS = {"read_lines": ("json.loads", 1.4), "report": ("json.loads", 2.9), "list": ("import torch", 0.25)}


def write_run(folder: Path, lines: int, resumes: int) -> None:
    """A run that was resumed at intervals, each time a little before its last update; and 20 small checkpoints."""
    numbers, update, between = random.Random(0), 0, lines // (resumes + 1)
    with (folder / "metrics.jsonl").open("w") as metrics, (folder / "timeline.jsonl").open("w") as timeline:
        for start in range(resumes + 1):
            if start:
                update -= between // 50
                metrics.write(json.dumps({"event": "resume", "updates": update}) + "\n")
            timeline.write(json.dumps({"event": "start", "update": update, "start_up": 5.0, "config": {}}) + "\n")
            for _ in range(between):
                update += 1
                counts = {"update": update, "iteration": update, "epoch": update / 4990, "sequences": 4 * update}
                values = {key: numbers.random() for key in KEYS}
                metrics.write(json.dumps({**counts, "tokens": 2048 * update, "applied": True, **values}) + "\n")
    for commit in range(1, 21):
        geometry, path = Geometry(4), folder / f"iter_{commit}.pth"
        path.mkdir()
        manifest = Manifest(
            commit=commit, parent=None, progress=Progress(sequences=4 * commit, updates=commit), geometry=geometry,
            ruler=Ruler(geometry, 100), topology={}, schedule={}, loader={}, parameters=[], files=[],
            config={}, layout="safetensors",
        )  # fmt: skip
        (path / "manifest.json").write_text(manifest.to_json())


def cpu_seconds(code: str) -> float:
    code += "; import resource, sys; used = resource.getrusage(resource.RUSAGE_SELF); "
    code += "print(used.ru_utime + used.ru_stime, file=sys.stderr)"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return float(process.stderr.split()[-1])


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--lines", type=int, default=300_000)
    p.add_argument("--resumes", type=int, default=100)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    arguments = p.parse_args()
    times: dict[str, list[float]] = {name: [] for name in METHODS}
    with tempfile.TemporaryDirectory(prefix="run_files-") as folder:
        write_run(Path(folder), arguments.lines, arguments.resumes)
        for _ in range(arguments.rounds):
            for name, code in METHODS.items():
                times[name].append(cpu_seconds(code.format(folder)))
    ratios, checks = {}, {}
    for name, (peer, limit) in LIMITS.items():
        ratios[name] = interval([a / b for a, b in zip(times[name], times[peer], strict=True)])
        checks[f"{name} <= {limit} {peer}"] = ratios[name]["median"] <= limit
        print(
            f"{name:12} {sorted(times[name])[len(times[name]) // 2]:7.2f} s  {ratios[name]['median']:5.2f} times {peer}"
        )
    for text, ok in checks.items():
        print(f"{text:32} {'met' if ok else 'NOT MET'}")
    sizes = {"lines": arguments.lines, "resumes": arguments.resumes}
    path = write_result(
        "run_files", {**sizes, "verdict": checks, "cpu_seconds": times, "ratio": ratios}, folder=arguments.out
    )
    print(f"Written: {os.path.relpath(path)}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
