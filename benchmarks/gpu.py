"""Everything that needs a GPU, checked by one command in at most eight minutes, on any CUDA device.

    python benchmarks/gpu.py [--minutes 8] [--only CHECK ...]
    python benchmarks/gpu.py --rehearse      # the same code on a CPU, tiny: every figure is "not measured"

In: nothing; models start from random weights, data is made. Out: ``results/gpu_<date>.json`` and a page beside it. Each
check (``shared/gpu_checks.py``) has a process and a time budget of its own; one that fails, or that there is no time
for, is reported as such, and the next one begins. Those that are not timed run beside each other, three at a time.

It needs torch >= 2.6 with CUDA, and the packages of ``pip install -e .``; peft for the adapters. What is missing is
named first. Exit status: 0 every limit holds, 1 one does not, or a check has failed, had no time or no peft, 2 another
package is missing or the command line is wrong, 3 there is no CUDA device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
NEEDED = ("torch", "transformers", "numpy", "mmengine", "pydantic", "safetensors", "huggingface_hub", "jinja2", "rich",
          "xxhash", "filelock", "packaging", "pillow", "wandb", "deepspeed")  # fmt: skip
"""Those of ``setup.py``: without one of them no check can run."""
OPTIONAL = ("peft",)
LEAST_TORCH = (2, 6)
LEAST_S = 15.0
"""A check is not begun with less time."""
AT_ONCE = 3


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--minutes", type=float, default=8.0, help="time for all checks (default 8); a rehearsal needs less")
    p.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny sizes: whether the checks can run")
    p.add_argument("--only", nargs="+", metavar="CHECK", help="these checks alone")
    p.add_argument("--out", type=Path, help="folder of both files (default benchmarks/results; a rehearsal's:"
                   " work_dirs/gpu_rehearsal)")  # fmt: skip
    p.add_argument("--check", help=argparse.SUPPRESS)  # one check, in this process
    p.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = p.parse_args(argv)
    if not arguments.minutes > 0:
        p.error(f"--minutes {arguments.minutes:g}; allowed: more than 0")
    return arguments


def missing_packages() -> list[str]:
    """What is not installed, or too old, without an import."""
    missing = []
    for package in (*NEEDED, *OPTIONAL):
        try:
            present = version(package)
        except PackageNotFoundError:
            missing.append(f"{package}{' (checks of adapters)' * (package in OPTIONAL)}")
            continue
        if package == "torch" and tuple(int(part) for part in present.split(".")[:2]) < LEAST_TORCH:
            missing.append(f"torch >= {'.'.join(map(str, LEAST_TORCH))} (it is {present})")
    return missing


def run_here(name: str, folder: Path, *, rehearse: bool) -> tuple[list[dict[str, Any]], str]:
    """Run a check in this process. Returns its figures, and the traceback where it fails."""
    from shared.gpu_checks import CHECKS, Check, quiet

    folder.mkdir(parents=True, exist_ok=True)
    check, problem = Check(name, folder, rehearse, folder / "figures.json"), ""
    try:
        with quiet():
            CHECKS[name].run(check)
    except BaseException as error:
        problem = traceback.format_exc()
        if isinstance(error, KeyboardInterrupt):
            raise
    return check.figures, problem


def run_apart(name: str, folder: Path, seconds: float) -> tuple[list[dict[str, Any]], str, bool]:
    """Run a check in a process of its own, for ``seconds`` at most. The third value: whether they were over."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--check", name, "--folder", str(folder)]
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "compiled")}  # what one check compiles, others find
    with (folder / "log.txt").open("w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **cache}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status, over = process.wait(timeout=seconds), False
        except subprocess.TimeoutExpired:
            status, over = None, True
        finally:
            with contextlib.suppress(ProcessLookupError):  # it, and the processes that it started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        text = log.read()[-6000:]
    file = folder / "figures.json"
    figures = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    return figures, text if status or over else "", over


def result_of(name: str, folder: Path, deadline: float, *, rehearse: bool, missing: list[str]) -> dict[str, Any]:
    """Run a check, if there is time."""
    from shared.gpu_checks import CHECKS

    entry, begin = CHECKS[name], time.monotonic()
    figures, problem, over = list[dict[str, Any]](), "", False
    absent = [package for package in entry.packages if any(package in one for one in missing)]
    left = min(entry.seconds, deadline - begin)
    if absent:
        status, text = "error", f"not run: {', '.join(absent)} is missing"
    elif left < LEAST_S and not rehearse:
        status, text = "time", "not run: no time was left"
    else:
        if rehearse:
            figures, problem = run_here(name, folder, rehearse=True)
        else:
            figures, problem, over = run_apart(name, folder, left)
        holds = [one["holds"] for one in figures if one["holds"] is not None]
        text = f"not complete after {left:.0f} s" if over else "failed" if problem else "rehearsed" if rehearse else ""
        status = "time" if over else "error" if problem else "rehearsed" if rehearse else ""
        if not status:
            status = text = "holds" if all(holds) else "misses"
    seconds = time.monotonic() - begin
    print(f"{name:16}{seconds:7.1f} s  {text}", flush=True)
    for one in figures:
        value = one["value"] if isinstance(one["value"], str) or one["value"] is None else f"{one['value']:.4g}"
        print(f"{'':16}{value}  {one['unit']}  {one['name']}{'  MISSES' if one['holds'] is False else ''}", flush=True)
    return {"check": name, "title": entry.title, "status": status, "text": text, "seconds": seconds,
            "figures": figures, "problem": problem}  # fmt: skip


def run_all(arguments: argparse.Namespace, missing: list[str]) -> dict[str, Any]:
    """All checks: those that are not timed beside each other, then the others one by one."""
    import torch
    from shared.gpu_checks import CHECKS

    begin = time.monotonic()
    names = arguments.only or list(CHECKS)
    deadline = begin + 60 * arguments.minutes
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as folder:

        def run(name: str) -> None:
            results[name] = result_of(name, Path(folder) / name, deadline, rehearse=arguments.rehearse, missing=missing)

        together = [name for name in names if not CHECKS[name].alone and not arguments.rehearse]
        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(run, together))
        for name in names:
            if name not in together:
                run(name)
    number = 0 if arguments.rehearse else torch.cuda.device_count()
    return {"minutes": arguments.minutes, "seconds": time.monotonic() - begin, "rehearsed": arguments.rehearse,
            "num_devices": number, "missing": missing, "checks": [results[name] for name in names]}  # fmt: skip


def write(record: Mapping[str, Any], folder: Path, name: str) -> Path:
    """The JSON file, and the page beside it."""
    from shared.gpu_page import page
    from shared.record import write_result

    path = write_result(name, record, folder=folder)
    path.with_suffix(".html").write_text(page(json.loads(path.read_text(encoding="utf-8"))), encoding="utf-8")
    return path


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.check:
        _, problem = run_here(arguments.check, arguments.folder, rehearse=False)
        print(problem, file=sys.stderr)
        sys.stdout.flush()
        os._exit(int(bool(problem)))  # an ordinary exit with DeepSpeed sometimes aborts
    missing = missing_packages()
    for one in missing:
        print(f"missing: {one}")
    if any(one.split()[0] not in OPTIONAL for one in missing):
        print("error: install what is missing: torch for your CUDA version first, then pip install -e '.[lora]'")
        return 2
    if arguments.rehearse:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}  # torch reads them
    import torch
    from shared.gpu_checks import CHECKS
    from shared.record import RESULTS

    if unknown := sorted({*(arguments.only or ())} - {*CHECKS}):
        print(f"error: --only {' '.join(unknown)}; allowed: {', '.join(CHECKS)}")
        return 2
    if not arguments.rehearse and not torch.cuda.is_available():
        print("There is no CUDA device: nothing is measured. --rehearse runs the code of the checks on this CPU.")
        return 3
    record = run_all(arguments, missing)
    name = "gpu_rehearsal" if arguments.rehearse else "gpu"
    folder = arguments.out or (ROOT / "work_dirs" / name if arguments.rehearse else RESULTS)
    path = write(record, folder, name)
    print(f"Written: {path} and {path.with_suffix('.html').name}")
    return int(any(check["status"] not in ("holds", "rehearsed") for check in record["checks"]))


if __name__ == "__main__":
    sys.exit(main())
