"""Evaluate a model: ``python tools/evaluate.py CKPT [--data FILE] ...``; installed as ``unigen-evaluate``.

CKPT is a checkpoint of any engine or a work dir (its newest checkpoint), merged weights (with --config), or a published
directory (with --data). val/loss and its parts are those of EvaluateHook; the data are val_dataloader's of the
checkpoint's config. Started by torchrun, each process has the whole model and its share of the data.

    torchrun --nproc_per_node=4 tools/evaluate.py CKPT --out results.json
    python tools/evaluate.py --compare A.json B.json

Exit status: 0 done, 1 the checkpoint or the data cannot be read, a metric failed (all others are printed and stored),
or two results are unlike, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:
    import _path  # noqa: F401 - a script runs from a checkout without installation

from unigen_ds.core.errors import ConfigError, raise_any
from unigen_ds.system.pipes import add_source, ends_quietly, tool_parser


def parser() -> argparse.ArgumentParser:
    p = tool_parser("unigen-evaluate", __doc__)
    p.add_argument("model", type=Path, metavar="CKPT", nargs="?")
    p.add_argument("--data", metavar="FILE", help="a file of records to evaluate on, instead of val_dataloader's data")
    p.add_argument("--metrics", nargs="+", default=[], metavar="NAME",
                   help='further metrics: BLEU, or with arguments {"type": "BLEU", ...}')  # fmt: skip
    p.add_argument("--generation", nargs="+", default=[], metavar="K=V",
                   help="how the model answers for metrics, as EvaluateHook.generation: max_new_tokens=128\n"
                   "temperature=0.7 top_p=0.9 seed=1 flow.num_timesteps=26 flow.text_scale=4.0")  # fmt: skip
    p.add_argument("--max-samples", type=int, metavar="N", help="records of each kind that the model answers, at most")
    p.add_argument("--batch-size", type=int, metavar="N", help="of each process; default: val_dataloader's")
    p.add_argument(
        "--seq-length", type=int, metavar="N", help="tokens of a sequence at most; default: val_dataloader's"
    )
    p.add_argument("--max-batches", type=int, metavar="N", help="evaluate at most N batches; default: all records")
    p.add_argument("--ema", action="store_true", help="the average of the weights instead of the weights")
    p.add_argument("--out", type=Path, metavar="FILE", help="write the values with their provenance there, as JSON")
    p.add_argument("--lmms-tasks", nargs="?", const="", metavar="TASK,...",
                   help="run these tasks of lmms-eval instead; without names nanoVLM's nine")  # fmt: skip
    p.add_argument("--step", type=int, metavar="N", help="update to record in the file of --lmms-tasks")
    p.add_argument("--limit", type=int, metavar="N", help="samples of each task of --lmms-tasks at most")
    p.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="two files of --out: B minus A")
    add_source(p)
    return p


@ends_quietly
def main(argv: list[str] | None = None) -> int:
    p = parser()
    arguments = p.parse_args(argv)
    if (arguments.model is None) == (arguments.compare is None):
        p.error("name a checkpoint, or two files with --compare")
    if arguments.compare is not None:
        return compare(*arguments.compare)
    from unigen_ds.system import dist, log  # after parsing: --help does not wait for torch

    log.setup(rank=dist.env_rank())
    dist.init()
    failed = True
    try:
        status = evaluate(arguments) if arguments.lmms_tasks is None else benchmark(arguments)
        failed = False
    finally:
        dist.shutdown(after_error=failed)
    return status


def compare(a: Path, b: Path) -> int:
    """Print the differences; 1 if some values are unlike."""
    from unigen_ds.evaluation.provenance import compare_files

    pairs, refusals = compare_files(a, b)
    for name, (first, second) in pairs.items():
        print(f"{name}: {first:.6g} -> {second:.6g}, difference {second - first:+.6g}")
    for refusal in refusals:
        print(f"not compared: {refusal}", file=sys.stderr)
    return 1 if refusals else 0


def evaluate(arguments: argparse.Namespace) -> int:
    """Evaluate on validation data; return 1 if a metric has no value."""
    from unigen_ds.evaluation.provenance import write_results
    from unigen_ds.runner.open import evaluated as library
    from unigen_ds.runner.open.trained import source_of
    from unigen_ds.system import dist

    names = ("data", "batch_size", "seq_length", "max_batches", "max_samples", "ema")
    options = {name: getattr(arguments, name) for name in names}
    options["metrics"] = [metric(text) for text in arguments.metrics]
    options["generation"] = generation(arguments.generation)
    evaluation = library.evaluate(arguments.model, **options, **source_of(arguments))
    status = 1 if evaluation.failures else 0
    if not dist.is_main():
        return status
    for result in evaluation.results:
        show(result.values)
    if arguments.out is not None:
        write_results(arguments.out, evaluation.results)
    for name, why in evaluation.failures.items():
        print(f"error: the metric {name} has no value: {why}", file=sys.stderr)
    return status


def benchmark(arguments: argparse.Namespace) -> int:
    """Evaluate on tasks of lmms-eval."""
    import torch

    from unigen_ds.evaluation.jobs.lmms_eval import TASKS, run_tasks
    from unigen_ds.runner.open.trained import open_inferencer, source_of
    from unigen_ds.system import dist
    from unigen_ds.system.files import write_text_atomic

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = open_inferencer(arguments.model, device=device, dtype=dtype, raw=not arguments.ema, **source_of(arguments))
    results = run_tasks(
        model, arguments.lmms_tasks.split(",") if arguments.lmms_tasks else TASKS, limit=arguments.limit
    )
    if not dist.is_main():
        return 0
    show({f"{task}/{name}": value for task, values in results.items() for name, value in values.items()})
    if arguments.out is not None:
        step = {} if arguments.step is None else {"global_step": arguments.step}
        content = {**step, "checkpoint": str(arguments.model), "results": results}
        write_text_atomic(arguments.out, json.dumps(content, indent=1, default=str) + "\n")
    return 0


def generation(texts: Sequence[str]) -> dict[str, Any]:
    """``max_new_tokens=9 flow.num_timesteps=4`` as a mapping. Raises ``ConfigError``."""
    from mmengine.config import Config

    from unigen_ds.config.overrides import apply_overrides, parse_override, plain_values

    settings = Config()
    raise_any(apply_overrides(settings, dict(map(parse_override, texts))))
    return dict(plain_values(settings))


def metric(text: str) -> dict[str, Any]:
    """``BLEU``, or ``{"type": "BLEU", ...}``. Raises ``ConfigError``."""
    if not text.startswith("{"):
        return {"type": text}
    try:
        return dict(json.loads(text))
    except ValueError as error:
        raise ConfigError(f"--metrics {text} is no JSON: {error}", allowed='BLEU, or {"type": "BLEU", ...}') from error


def show(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        print(f"{name}  {value!r}")


if __name__ == "__main__":
    sys.exit(main())
