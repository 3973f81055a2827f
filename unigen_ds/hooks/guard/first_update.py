"""What the first update of a fine-tune shows: whether the published weights compute what they were trained to compute.

A run that starts from published weights (``model.pretrained``) or from a checkpoint's weights (``load_from``) can train
for days from weights that are of no use to it: names that did not match, another tokenizer, latents of another scale.
Its first losses show that. Before the first update the values of the loaded tensors are looked at as well. One warning
for each problem; the training itself is not changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated

import torch
from annotated_types import Gt

from unigen_ds.config.registry import HOOKS, MODELS, checked, find
from unigen_ds.families.base import family_of
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.system import dist
from unigen_ds.system.log import logger

KNOWS = 0.9
"""A loaded model whose first loss is more than this share of chance knows nothing of its task."""
LARGEST, SMALLEST = 10.0, 1e-5
"""Root mean square of a weight matrix; those of published models are between 0.005 and 1."""
PAGE = "docs/checkpoints.md#the-first-update"


@HOOKS.register_module()
class FirstUpdateHook(Hook):
    """Compares the first losses of a fine-tune with chance and with recorded ones, and looks at what was loaded.

    Args:
        expected: loss terms of the published model, as ``dict(text=0.9, image=0.4)``, for example those of a first
            update that was known to be good; None: no comparison but with chance.
        factor: a first loss of more than so many times the expected one is a warning.

    Chance is ``Family.chance_level``; a term of which the family states none is not compared with it. A run that begins
    from random weights, and a resume, are not looked at.
    """

    name = "first_update"

    @checked()
    def __init__(self, *, expected: Mapping[str, float] | None = None, factor: Annotated[float, Gt(1)] = 1.5) -> None:
        self.expected, self.factor = dict(expected or {}), factor
        self._begins = False

    def before_train(self, run: Run) -> None:
        loads = run.config.get("load_from") or (run.config.get("model") or {}).get("pretrained")
        self._begins = run.progress.updates == 0 and bool(loads)
        if self._begins:
            number, problems = _tensors(run)
            if dist.is_main():
                logger().info("First update: the values of %s tensors are looked at.", f"{number:,}")
                for problem in problems:
                    logger().warning("First update: %s", problem)

    def after_update(self, run: Run, result: UpdateResult) -> None:
        if not self._begins:
            return
        self._begins = False
        names = sorted(result.local_sums)
        totals = dist.sum_floats([float(result.local_sums[name]) for name in names])
        losses = {n: total / result.counts[n] for n, total in zip(names, totals, strict=True) if result.counts.get(n)}
        if not dist.is_main():
            return
        family = family_of(find(MODELS, run.config["model"], where="model"))
        levels = family.chance_level(run.processor) if family is not None else {}
        chance = {name: level for name, level in levels.items() if name in losses}
        texts = [", ".join(f"{name} {value:.4g}" for name, value in each.items()) for each in (losses, chance)]
        logger().info("First update: losses %s", "; chance is ".join(filter(None, texts)) + ".")
        problems = [*self._loss_problems(losses, chance)]
        for problem in problems:
            logger().warning("First update: %s", problem)
        if problems:
            logger().warning("First update: the likely causes are in %s", PAGE)

    def _loss_problems(self, losses: Mapping[str, float], chance: Mapping[str, float]) -> Iterator[str]:
        """A sentence for each loss that a trained model would not have."""
        for name, loss in losses.items():
            if not math.isfinite(loss):
                yield f"the loss {name} is {loss}"
            elif loss >= KNOWS * chance.get(name, math.inf):
                yield (
                    f"the loss {name} is {loss:.4g}, and chance is {chance[name]:.4g}: the task is new to the loaded"
                    " weights, or they are not the trained ones"
                )
            elif loss > self.factor * self.expected.get(name, math.inf):
                expected = f"{self.factor:g} times the expected {self.expected[name]:.4g}"
                yield f"the loss {name} is {loss:.4g}, more than {expected} (FirstUpdateHook.expected)"
        if missing := ", ".join(sorted(set(self.expected) - set(losses))):
            yield f"FirstUpdateHook.expected has {missing}, of which this update had no targets"


@torch.no_grad()
def _tensors(run: Run) -> tuple[int, list[str]]:
    """The number of tensors, and what is wrong with their values. Collective; the same for every engine."""
    backend, config = run.backend, run.config
    names = [*backend.trainable_sizes(), *backend.frozen_sizes()]
    at = {name: i for i, name in enumerate(names)}
    sums = torch.zeros(len(names), 2, dtype=torch.float64)  # of squares, and elements: replicas count in both
    for shard in (*backend.master_shards(), *backend.frozen_shards()):
        if shard.data.is_floating_point():
            norm = float(torch.linalg.vector_norm(shard.data, dtype=torch.float64)) if shard.data.numel() else 0.0
            sums[at[shard.name]] += torch.tensor([norm**2, shard.data.numel()])
    whole = torch.tensor(dist.sum_floats(sums.flatten().tolist())).view(-1, 2)
    scale = {name: math.sqrt(square / number) for name, (square, number) in zip(names, whole.tolist(), strict=True)
             if number}  # fmt: skip
    layers = (torch.nn.Linear, torch.nn.Embedding, torch.nn.modules.conv._ConvNd)
    matrices = {f"{name}.weight" for name, module in backend.model.named_modules() if isinstance(module, layers)}
    compared = {name: value for name, value in scale.items() if name in matrices and math.isfinite(value)}
    # where not all weights were read, some keep their initial values, which may be zeros
    parts = not isinstance((config.get("model") or {}).get("pretrained"), str | None)
    missing = "missing" in ((config.get("load_cfg") or {}).get("allow") or ())
    complete = not parts and not config.get("lora") and not missing
    kinds = {
        "are not finite": [name for name, value in scale.items() if not math.isfinite(value)],
        "of weight matrices are all zeros": [name for name, value in compared.items() if value == 0 and complete],
        f"of weight matrices have a root mean square of more than {LARGEST:g} or less than {SMALLEST:g}": [
            name for name, value in compared.items() if value > 0 and not SMALLEST <= value <= LARGEST
        ],
    }
    return len(names), [
        f"{len(some):,} of {len(names):,} tensors {what}, such as {', '.join(some[:3])}. Likely causes: a damaged or"
        " incomplete file, or names of weights that did not match."
        for what, some in kinds.items()
        if some
    ]
