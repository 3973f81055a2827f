"""Planned against counted memory: every engine, three models, with and without activation checkpointing, on the CPU.

    python -m benchmarks.plan_memory [PART ...]      # only cases whose name has one of the texts

Each case trains three updates of two micro-batches on real processes (gloo), which count the bytes of all tensors
operation by operation, the engine's flat buffers included (``engines/jobs/users.py``), and is planned by
``unigen_ds/checks/memory``. All records of a case are the same, so that its largest micro-batch is the one that is
trained. The largest count of all ranks is compared: the bounds are 5 % above and 2 % below. Results:
``benchmarks/results``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}  # torch reads them

import torch

from tests.end_to_end.engines import launch
from tests.end_to_end.engines.jobs import cases, model_cases
from tests.tiny import tiny_config
from unigen_ds.checks.memory.planned import plan_memory
from unigen_ds.system.machine import description

ENGINES = ("single@1", "zero1@2", "zero2@2", "zero2_offload@2", "zero3@2", "FULL_SHARD@2", "SHARD_GRAD_OP@2",
           "NO_SHARD@2", "HYBRID_SHARD@4", "FULL_SHARD_offload@2")  # fmt: skip
_LARGER = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
           "num_key_value_heads": 2}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "unified": ({**{f"model__llm__{key}": value for key, value in _LARGER.items()}, "model__freeze": ["vae", "vit"]},
                "digits/mixed.jsonl"),
    "vlm": ({**model_cases.VLM, "model": {**model_cases.VLM["model"], "llm": {**_LARGER, "tie_word_embeddings": True}}},
            "talks/mixed.jsonl"),
    "decoder": ({"model": {"type": "DecoderLM", "llm": {**_LARGER, "vocab_size": 61, "model_type": "llama"}},
                 "processor": None},
                "digits/text.jsonl"),
}  # fmt: skip
RESULTS = Path(__file__).parent / "results" / "plan_memory_2026-11-23.json"
BUCKETS = {"reduce_bucket_size": 20000, "allgather_bucket_size": 20000}


def job(model: str, engine: str, *, recompute: bool) -> cases.Job:
    kind, _, world = engine.partition("@")
    overrides, data = MODELS[model]
    config = cases.config(kind, int(world), geometry=(1, 2), **overrides)
    config |= {"backend": cases.with_buckets(cases.ALL[kind], BUCKETS), "custom_hooks": [{"type": "CountedBytesHook"}]}
    if "model" in config:
        config["model"] = {**config["model"], "activation_checkpointing": recompute}
    else:
        config["model__activation_checkpointing"] = recompute
    phase = cases.Phase(int(world), config, 3, data=str(Path(data).with_name("same.jsonl")))
    return cases.Job(f"{model}{'-recompute' * recompute}/{engine}", [phase])


def write_same(data: Path) -> None:
    """One record of each model's data, 48 times."""
    for _, name in MODELS.values():
        path = data / name
        lines = path.read_text(encoding="utf-8").splitlines()
        with_image = [line for line in lines if "image" in line]
        one = min(with_image, key=len) if with_image else max(lines, key=len)
        path.with_name("same.jsonl").write_text(f"{one}\n" * 48, encoding="utf-8")


def plan_values(one: cases.Job, out: Path) -> dict[str, Any]:
    phase = one.phases[0]
    overrides = json.loads(json.dumps(phase.config).replace("{data}", str(out / "data")))
    overrides["custom_hooks"] = []
    source = {"type": "UnifiedGenerationDataset", "data_path": str(out / "data" / phase.data)}
    config = tiny_config(out / "plan", out, train_cfg__max_epochs=2, train_dataloader__dataset=source, **overrides)
    report = plan_memory(config, world_size=phase.world, alternatives=False)
    plan = report.plans[0]
    return {"problem": plan.problem} if plan.memory is None else {
        "problem": None, "peak": plan.memory.peak["step"], "held": plan.memory.held
    }  # fmt: skip


def main() -> None:
    words = sys.argv[1:]
    jobs = [job(m, e, recompute=r) for m in MODELS for r in (False, True) for e in ENGINES]
    jobs = [one for one in jobs if not words or any(text in one.name for text in words)]
    out = Path(tempfile.mkdtemp(prefix="plan-"))
    launch.LaunchedRuns(out, []).finish()  # writes the data
    write_same(out / "data")
    runs, rows = launch.LaunchedRuns(out, jobs).finish(), []
    for one in jobs:
        problem = runs.results[one.name]["problem"]
        ranks = [] if problem else runs.outcome(one.name).counted_bytes()
        plan = plan_values(one, out)
        row: dict[str, Any] = {"case": one.name, "problem": problem or plan["problem"]}
        for key in ("peak", "held") if row["problem"] is None else ():
            most = max(rank[key] for rank in ranks)
            row |= {f"counted_{key}": most, f"planned_{key}": plan[key], f"{key}_off": plan[key] / most - 1}
        rows.append(row)
        print(json.dumps(row), flush=True)
    write(rows)


def write(rows: list[dict[str, Any]]) -> None:
    """Into the results, in place of former ones of the same cases."""
    former = json.loads(RESULTS.read_text(encoding="utf-8"))["cases"] if RESULTS.exists() else []
    by_case = {row["case"]: row for row in (*former, *rows)}
    good = [row for row in by_case.values() if row["problem"] is None and -0.02 <= row["peak_off"] <= 0.05]
    machine = {key: value for key, value in description().items() if key != "command"}
    result = {"machine": machine, "torch": torch.__version__, "within_bounds": f"{len(good)} of {len(by_case)}",
              "cases": [by_case[case] for case in sorted(by_case)]}  # fmt: skip
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(by_case)))
    print(result["within_bounds"])


def table(by_case: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """How far each plan is off, for docs/planning.md: without and with activation checkpointing."""
    lines = ["| engine@processes |" + "".join(f" {model} |" for model in MODELS), "|---|" + "---|" * len(MODELS)]
    for engine in ENGINES:
        cells = []
        for model in MODELS:
            both = [by_case.get(f"{model}{more}/{engine}") for more in ("", "-recompute")]
            valid_rows = [row for row in both if row is not None and row["problem"] is None]
            cells.append(", ".join(f"{100 * row['peak_off']:.2f} %" for row in valid_rows))
        lines.append(f"| `{engine}` | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    main()
