"""Every metric over 4 ranks, then over 2, then over 1, in one launch of four processes. Rank 0 prints the results.

The shares are uneven: rank r of n has the samples whose number modulo 7 is in its range, and one rank may have none.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td

from tests.evaluation.tiny_models import WORDS, Convolution, noise
from unigen_ds.evaluation.metrics import Metric, base, evaluated, text_metrics
from unigen_ds.evaluation.metrics.picture_metrics import FID, CLIPScore, MultimodalConsistency
from unigen_ds.evaluation.metrics.text_metrics import BLEU, ROUGE, BERTScore, ExactMatch
from unigen_ds.system import dist

NUMBER = 23
SHARES = {4: ((0,), (1, 2, 3), (), (4, 5, 6)), 2: ((0, 1, 2, 3, 4), (5, 6)), 1: (tuple(range(7)),)}


def samples() -> list[dict[str, Any]]:
    """Texts, answers, losses and pictures, keyed in another order than they are made."""
    pictures, real = noise(NUMBER, size=16, seed=3), noise(NUMBER, size=16, seed=4, bright=220)
    rows = []
    for n in range(NUMBER):
        words = [WORDS[(n * k + k * k) % len(WORDS)] for k in range(3, 9)]
        other = [WORDS[(n * k + k) % len(WORDS)] if k % 3 and n % 4 else word for k, word in enumerate(words)]
        rows.append({"key": f"{n * 5 % NUMBER:03}", "text": " ".join(words), "reference": " ".join(other),
                      "made": pictures[n], "real": real[n]})  # fmt: skip
    return rows


def metrics(folder: Path) -> list[tuple[Metric, str, str]]:
    """Each with what of a sample is its prediction and its reference."""
    clip, extractor = str(folder / "clip"), Convolution()
    return [
        (BLEU(), "text", "reference"),
        (ROUGE(), "text", "reference"),
        (BERTScore(path=str(folder / "bert")), "text", "reference"),
        (ExactMatch(), "text", "reference"),
        (FID(extractor=extractor), "made", "real"),
        (CLIPScore(path=clip), "made", "text"),
        (MultimodalConsistency(path=clip), "both", "real"),
    ]


def values(folder: Path, *, rank: int, world_size: int, batch_size: int) -> dict[str, Any]:
    """Of this rank's share, three samples at a time; the same on every rank."""
    share = [one for n, one in enumerate(samples()) if n % 7 in SHARES[world_size][rank]]
    results: dict[str, Any] = {}
    base.BATCH_SIZE = text_metrics.BATCH_SIZE = batch_size
    for metric, prediction, reference in metrics(folder):
        for n in range(0, len(share), 3):
            part = share[n : n + 3]
            predictions = [(one["text"], one["made"]) if prediction == "both" else one[prediction] for one in part]
            metric.update(predictions, [one[reference] for one in part], [one["key"] for one in part])
        result = evaluated(metric, checkpoint="iter_8.pth")
        results |= result.values
        if batch_size == 1:
            results[f"result of {metric.name}"] = {"values": dict(result.values), "provenance": dict(result.provenance)}
    return results


def main(folder: Path, port_of_two: str) -> None:
    torch.set_num_threads(1)
    rank, results = int(os.environ["RANK"]), {}
    for world_size in (4, 2, 1):
        if rank >= world_size:
            break
        os.environ["WORLD_SIZE"] = str(world_size)
        dist.init()
        assert dist.world_size() == world_size
        for batch_size in (1, 16):
            result = values(folder, rank=rank, world_size=world_size, batch_size=batch_size)
            assert all(other == result for other in dist.gather_objects(result)), "the same on every rank"
            results[f"{world_size} ranks, batch size {batch_size}"] = result
        td.destroy_process_group()
        os.environ["MASTER_PORT"] = port_of_two
    if rank == 0:
        print("RESULTS " + json.dumps(results), flush=True)
    dist.leave(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
