"""A process of two that goes through many runs in which rank 1 is given something else. Writes what each raised."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from tests.data.support import write_jsonl
from tests.text_run import text_config, words
from unigen_ds.runner import Runner
from unigen_ds.runner.start import parts
from unigen_ds.system import dist

RECORDS: list[Any] = [{"text": words(3 + i % 4, i)} for i in range(96)]
CHANGED = [*RECORDS[:50], {"text": words(5, 1)}, *RECORDS[51:]]
VALIDATION = {"dataset": {"type": "UnifiedGenerationDataset", "data_path": "data.jsonl"}}
ADAPTERS = {"r": 2, "target_modules": "q_proj"}
TWO = [{"type": "UnifiedGenerationDataset", "data_path": "data.jsonl", "name": name, "weight": 1} for name in "ab"]
SOURCES = "train_dataloader.dataset"
FILTER = [{"type": "ImageCountFilter", "max_images": 0}]

Case = tuple[dict[str, Any], dict[str, Any]]
"""What both ranks are given, and what rank 1 is in addition: keys of a config, or what ``run`` takes out of it."""
DIFFERENT: dict[str, Case] = {
    "lr": ({}, {"optim_wrapper.optimizer.lr": 0.25}),
    "line": ({}, {"data": CHANGED}),
    "fewer": ({}, {"data": RECORDS[:90]}),
    "batch": ({}, {"train_dataloader.batch_size": 3}),
    "accumulation": ({}, {"optim_wrapper.accumulative_counts": 2}),
    "engine": ({}, {"backend": {"type": "deepspeed", "config": "zero2"}}),
    "limit": ({}, {"train_cfg": {"max_epochs": 7}}),
    "argument": ({}, {"max_updates": 5}),
    "mixture": ({SOURCES: TWO}, {SOURCES: [TWO[0], {**TWO[1], "weight": 3}]}),
    "sources": ({SOURCES: TWO}, {SOURCES: TWO[:1]}),
    "filters": ({}, {f"{SOURCES}.filters": FILTER}),
    "adapters": ({"lora": ADAPTERS}, {"lora.r": 4}),
    "tokenizer": ({}, {"tokenizer.words": ["zero", "one"]}),
    "hooks": ({}, {"custom_hooks": [{"type": "KeepBatches"}]}),
    "seed": ({}, {"randomness.seed": 9}),
    "validation": ({"val_dataloader": VALIDATION}, {"validation": CHANGED}),
    "version": ({}, {"version": {"torch": "2.6.0"}}),
    "code": ({}, {"digest": "0123456789abcdef"}),
}
SAME: dict[str, Case] = {
    "own": (
        {"val_dataloader": VALIDATION},
        {"work_dir": "elsewhere", "env.num_threads": 1, "env.log_level": "ERROR", "visualizer.run_name": "another",
         "folder": "another", f"{SOURCES}.cache_dir": "cache", "train_dataloader.num_workers": 1},
    )
}  # fmt: skip


def run(name: str, shared: Mapping[str, Any], other: Mapping[str, Any], *, rank: int, out: Path) -> str:
    """Train two updates. Returns what was raised."""
    settings: dict[str, Any] = {**shared, **(other if rank else {})}
    own = out / name / settings.pop("folder", "rank0" if rank == 0 else "rank1")
    training, validation = (settings.pop(key, RECORDS) for key in ("data", "validation"))
    most = settings.pop("max_updates", 2)
    versions, digest = settings.pop("version", {}), settings.pop("digest", None)
    path = write_jsonl(own / "files" / "data.jsonl", training)
    of_validation = write_jsonl(own / "validation" / "data.jsonl", validation)
    work_dir = str(own if settings.pop("work_dir", None) else out / name / "run")
    base: dict[str, Any] = {"backend": {"type": "fsdp"}, "custom_hooks": [], "env.dist_timeout_s": 60.0}
    text = json.dumps({**base, **settings}, default=str)
    options = json.loads(text.replace('"data.jsonl"', json.dumps(str(path))))
    if "val_dataloader" in options:
        options["val_dataloader"]["dataset"]["data_path"] = str(of_validation)
    options = {"train_dataloader.batch_size": 2, "work_dir": work_dir, **options}
    config = text_config(own, training, **{key.replace(".", "__"): value for key, value in options.items()})
    own_versions, code = {**parts.current_versions(), **versions}, digest or parts.source_digest()
    with (
        mock.patch.object(parts, "current_versions", lambda: own_versions),
        mock.patch.object(parts, "source_digest", lambda *file: code),
    ):
        try:
            Runner.from_cfg(config, max_updates=most).train()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def main(out: Path) -> None:
    rank, results = int(os.environ["RANK"]), {}
    for name, (shared, other) in {**DIFFERENT, **SAME}.items():
        results[name] = run(name, shared, other, rank=rank, out=out)
        if "RanksDiffer" not in results[name] and name in DIFFERENT:
            break  # the ranks may be at different places
    (out / f"found_{rank}.json").write_text(json.dumps(results, indent=1))
    dist.leave(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
