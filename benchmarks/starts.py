"""Time from the command line to the end: a training of one update with each engine, and the tools of configs and runs.

In: nothing; a decoder of two layers, its documents and a run of it are made in a temporary folder. Out: a table of CPU
and wall time, and ``results/starts_<date>.json``. All commands run in turns, each in processes of its own; the first
round is not counted. Limits are of the median wall time on two quiet cores; trainings have a second one, of the ratio
to a hand-written loop (``shared/hand_start.py``), which is measured with them.

    python benchmarks/starts.py [--only train resume] [--rounds 5] [--against TREE]

``--against``: another checkout, in the same turns. Exit status: 1 if a limit is not met, otherwise 0.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shared.record import RESULTS, ROOT, interval, write_result

WORDS = tuple(f"word{i}" for i in range(500))
RUN = "{folder}/run"
PROMPTS = [part for word in WORDS[:10] for part in ("--prompt", word)]
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
ONE_UPDATE = ("tools/train.py", "{config}", "--max-updates", "1", "--work-dir", "{new}")
COMMANDS = {
    "import torch": ("-c", "import torch"),
    "hand loop": ("{root}/benchmarks/shared/hand_start.py", "{folder}/train.jsonl", "{new}.pt"),
    "train single": ONE_UPDATE,
    "train fsdp@2": (*TORCHRUN, *ONE_UPDATE, "--backend", "fsdp"),
    "train zero2@2": (*TORCHRUN, *ONE_UPDATE, "--backend", "deepspeed:zero2"),
    "resume": ("tools/resume.py", "{config}", "--work-dir", RUN),
    "inspect_data": ("tools/inspect_data.py", "{config}"),
    "plan": ("tools/plan.py", "{config}"),
    "generate": ("tools/generate.py", RUN, *PROMPTS, "--max-length", "20", "--out", "{new}"),
    "report": ("tools/report.py", "{folder}/long", "--out", "{new}.html"),
}
LIMITS = {
    "train single": 5.5, "train fsdp@2": 6.5, "train zero2@2": 7.5, "resume": 2.0, "inspect_data": 3.0, "plan": 8.0,
    "generate": 3.0, "report": 3.0,
}  # fmt: skip
"""Seconds."""
RATIOS = {"train single": 1.02, "train fsdp@2": 1.2, "train zero2@2": 1.39}
"""To the wall time of the hand-written loop of one process, by round: what the seconds are where it needs 5.4."""
REPORT_LINES = 100_000


def write_files(folder: Path) -> Path:
    """The config of a decoder of two layers, its documents, and metrics of a long run for the report."""
    lines = [{"text": " ".join(WORDS[(7 * i + k) % 500] for k in range(20 + i % 80))} for i in range(4000)]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    config = {
        "model": {"type": "DecoderLM", "llm": {
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        }},
        "tokenizer": {"type": "WordTokenizer", "words": WORDS},
        "train_dataloader": {
            "batch_size": 4, "num_workers": 0, "seq_length": 256, "packing": {"type": "BestFitPacking", "window": 512},
            "dataset": {"type": "UnifiedGenerationDataset", "data_path": str(folder / "train.jsonl")},
        },
        "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 1e-3}},
        "train_cfg": {"max_updates": 100},
    }  # fmt: skip
    path = folder / "config.py"
    path.write_text("".join(f"{key} = {value!r}\n" for key, value in config.items()), encoding="utf-8")
    (folder / "long").mkdir()
    with (folder / "long" / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for update in range(1, REPORT_LINES + 1):
            values = {
                "loss": 1 + 100 / (update + 10),
                "lr": 1e-3,
                "grad_norm": 1.0,
                "tokens_per_second": 1000.0 + update % 7,
            }
            file.write(
                json.dumps({"update": update, "sequences": 4 * update, "tokens": 1000 * update, **values}) + "\n"
            )
    start = {"event": "start", "update": 0, "start_up": 5.0, "config": {}}
    (folder / "long" / "timeline.jsonl").write_text(json.dumps(start) + "\n", encoding="utf-8")
    return path


def measure(command: list[str], tree: Path) -> tuple[float, float]:
    """CPU and wall seconds of a command and all its processes."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    variables = {**os.environ, "PYTHONPATH": str(tree)}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)  # with it each process would compile the package anew
    process = subprocess.run([sys.executable, *command], cwd=tree, env=variables, capture_output=True, text=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise SystemExit(f"{command} failed:\n{process.stdout}{process.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", nargs="+", metavar="NAME", help=f"first words of a command's name: {', '.join(COMMANDS)}")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--against", type=Path, metavar="TREE", help="another checkout")
    p.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    arguments = p.parse_args()
    names = [name for name in COMMANDS if arguments.only is None or name.startswith(tuple(arguments.only))]
    if set(RATIOS) & set(names):
        names = ["hand loop", *(name for name in names if name != "hand loop")]
    trees = {"here": ROOT, **({"there": arguments.against.resolve()} if arguments.against else {})}
    cpu: dict[str, dict[str, list[float]]] = {name: {tree: [] for tree in trees} for name in names}
    wall: dict[str, dict[str, list[float]]] = {name: {tree: [] for tree in trees} for name in names}
    with tempfile.TemporaryDirectory(prefix="starts-") as temporary:
        folder = Path(temporary)
        config, number = write_files(folder), 0
        measure(["tools/train.py", str(config), "--max-updates", "2", "--work-dir", f"{folder}/run"], ROOT)
        for turn in range(arguments.rounds + 1):
            for name in names:
                for label, tree in trees.items():
                    number += 1
                    parts = {"folder": folder, "config": config, "new": folder / f"new{number}", "root": ROOT}
                    seconds = measure([part.format(**parts) for part in COMMANDS[name]], tree)
                    if turn:  # the first fills caches
                        cpu[name][label].append(seconds[0])
                        wall[name][label].append(seconds[1])
    checks, medians = {}, {}
    for name in names:
        medians[name] = {tree: [interval(times[name][tree])["median"] for times in (cpu, wall)] for tree in trees}
        texts = [f"{tree} {values[0]:6.2f} s CPU, {values[1]:6.2f} s" for tree, values in medians[name].items()]
        if name in LIMITS:
            checks[f"{name} <= {LIMITS[name]} s"] = medians[name]["here"][1] <= LIMITS[name]
        print(f"{name:14} {'   '.join(texts)}   {'' if name not in LIMITS else f'limit {LIMITS[name]} s'}")
    ratios = {}
    for name in [name for name in RATIOS if name in names]:
        pairs = zip(wall[name]["here"], wall["hand loop"]["here"], strict=True)
        ratios[name] = interval([ours / peer for ours, peer in pairs])
        checks[f"{name} <= {RATIOS[name]} of the hand loop"] = ratios[name]["median"] <= RATIOS[name]
        print(f"{name:14} {ratios[name]['median']:.2f} of the hand loop   limit {RATIOS[name]}")
    record = {"verdict": checks, "medians": medians, "ratios": ratios, "cpu_seconds": cpu, "wall_seconds": wall}
    path = write_result("starts", {"load": os.getloadavg(), **record}, folder=arguments.out)
    print(f"Written: {os.path.relpath(path)}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
