"""Time of one move of an average of the weights (EMA): ours against ``torch._foreach_lerp_`` by hand.

In: nothing. Out: a table, and ``results/ema_<date>.json``. Accepted if the median ratio of the times is at most 1.

Both sides average the same weights of 500 tensors, in turns in one process, in an order that is reversed from turn to
turn; a turn is 20 moves, and pair k of turns has one ratio. There are two averages, which the sides exchange from turn
to turn: their addresses make a difference of 5 %. Ours is ``ShardEMA.update``, as ``EMAHook`` calls it after each
update; it calls the same function of torch, so the ratio is about 1. At the end both averages are compared bit by bit.

    python benchmarks/ema.py [--tensors 500] [--numel 20000] [--rounds 30]

Exit status: 1 if the limit is significantly exceeded (the whole confidence interval), otherwise 0.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from shared.record import RESULTS, interval, write_result

from unigen_ds.core.shards import Shard
from unigen_ds.hooks.evaluate.ema import ShardEMA

LIMIT, MOMENTUM = 1.0, 1e-4
MOVES = 20
"""Of one turn."""


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tensors", type=int, default=500)
    p.add_argument("--numel", type=int, default=20_000, help="elements of a tensor")
    p.add_argument("--rounds", type=int, default=30)
    p.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    options = p.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weights = [torch.randn(options.numel) for _ in range(options.tensors)]
    shards = [Shard(f"layers.{i}.weight", (options.numel,), 0, weight) for i, weight in enumerate(weights)]
    averages = [ShardEMA(shards, momentum=MOMENTUM) for _ in range(2)]
    for average in averages:
        average.update(weights)  # the first copies
    for weight in weights:
        weight.add_(1.0)
    data = [[shard.data for shard in average.shards] for average in averages]
    sides: dict[str, Callable[[int], None]] = {
        "ours": lambda i: averages[i].update(weights),
        "foreach_lerp": lambda i: torch._foreach_lerp_(data[1 - i], weights, MOMENTUM),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    load_before = os.getloadavg()
    for turn in range(options.rounds + 1):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            start = time.perf_counter()
            for _ in range(MOVES):
                sides[name](turn % 2)
            if turn:  # the first is a warm-up
                seconds[name].append((time.perf_counter() - start) / MOVES)
    same = all(map(torch.equal, *data))
    ratio = interval([a / b for a, b in zip(seconds["ours"], seconds["foreach_lerp"], strict=True)])
    record = {
        "limit": LIMIT, "tensors": options.tensors, "numel": options.numel, "same_average": same, "ratio": ratio,
        "seconds": {name: interval(values) for name, values in seconds.items()},
        "load_before": load_before, "load_after": os.getloadavg(),
    }  # fmt: skip
    for name, values in record["seconds"].items():
        print(f"{name:14}{1e3 * values['median']:9.3f} ms ({1e3 * values['low']:.3f} to {1e3 * values['high']:.3f})")
    print(f"ratio {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}), limit {LIMIT}; bit-equal: {same}")
    print(f"Written: {os.path.relpath(write_result('ema', record, folder=options.out))}")
    return int(ratio["low"] > LIMIT or not same)


if __name__ == "__main__":
    sys.exit(main())
