"""The average compared with a loop written by hand: first update, start, skipped updates, save and load."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.tiny import tiny_config
from unigen_ds.backends.single import SingleBackend
from unigen_ds.checkpoint.layouts.safetensors import SafetensorsReader
from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.progress import Geometry
from unigen_ds.core.shards import EMA, Shard, shard_key
from unigen_ds.hooks.base import Hook
from unigen_ds.hooks.evaluate.ema import ShardEMA, ema_of
from unigen_ds.optim.optimizer import OptimizerConfig, ParamGroup
from unigen_ds.runner import Runner


def backend_of(*shapes: tuple[int, ...]) -> SingleBackend:
    model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
    backend = SingleBackend()
    groups = [ParamGroup("all", 0.1, 0.0, tuple(n for n, _ in model.named_parameters()))]
    backend.check(geometry=Geometry(1), optimizer_cfg=OptimizerConfig())
    backend.prepare(model, groups)
    return backend


def by_hand(weights: Iterable[torch.Tensor], momentum: float) -> torch.Tensor:
    """The first value is used unchanged; then ``average = (1 - m) * average + m * weights``, in float64."""
    average: torch.Tensor | None = None
    for value in weights:
        value = value.double()
        average = value if average is None else (1 - momentum) * average + momentum * value
    assert average is not None
    return average


@pytest.mark.parametrize("momentum", [0.0001, 0.05, 0.5])
def test_it_follows_the_formula(momentum):
    backend = backend_of((3, 4), (5,), ())
    ema = ShardEMA(backend.master_shards(), momentum=momentum)
    history: list[list[torch.Tensor]] = []
    for _ in range(30):
        for shard in backend.master_shards():
            shard.data.add_(torch.randn_like(shard.data))
        ema.update(backend.master_data())
        history.append([shard.data.clone() for shard in backend.master_shards()])
    assert ema.num_updates == 30
    for index, shard in enumerate(ema.shards):
        expected = by_hand([weights[index] for weights in history], momentum)
        torch.testing.assert_close(shard.data.double(), expected, rtol=1e-5, atol=1e-6)


def shard(name: str, whole: torch.Tensor, start: int, stop: int) -> Shard:
    return Shard(name, tuple(whole.shape), start, whole.reshape(-1)[start:stop].clone())


def test_it_loads_by_name_from_any_shards(tmp_path):
    whole = torch.randn(4, 5)
    for rank, (start, stop) in enumerate([(0, 9), (9, 20)]):
        piece = {shard_key(EMA, "w", start): whole.reshape(-1)[start:stop].clone()}
        save_file(piece, tmp_path / f"rank{rank:05d}.safetensors")
    ema = ShardEMA([shard("w", torch.zeros(4, 5), 0, 6), shard("w", torch.zeros(4, 5), 6, 20)], momentum=0.1)
    ema.load(SafetensorsReader(tmp_path))
    assert torch.equal(torch.cat([s.data for s in ema.shards]), whole.reshape(-1))


def test_what_is_missing_or_reshaped_is_named(tmp_path):
    save_file({shard_key(EMA, "w", 0): torch.zeros(20)}, tmp_path / "rank00000.safetensors")
    reader = SafetensorsReader(tmp_path)
    with pytest.raises(CheckpointError, match="EMA does not fit the model: missing: v"):
        ShardEMA([shard("v", torch.zeros(3), 0, 3)], momentum=0.1).load(reader)
    with pytest.raises(CheckpointError, match=r"reshaped: w \(20,\) for \(12,\)"):
        ShardEMA([shard("w", torch.zeros(3, 4), 0, 12)], momentum=0.1).load(reader)


# ---- in a real run --------------------------------------------------------------------------------------------------


class Watch(Hook):
    """Keeps the weights after every update, and which updates were applied. Makes one gradient infinite on request."""

    def __init__(self, *, spoil: int | None = None) -> None:
        self.weights: list[torch.Tensor] = []
        self.applied: list[bool] = []
        self.spoil = spoil

    def after_train_iter(self, run, index, batch):
        if run.progress.updates == self.spoil:
            first = next(p for p in run.backend.model.parameters() if p.requires_grad)
            if first.grad is not None:
                first.grad.view(-1)[0] = torch.inf

    def after_update(self, run, result):
        self.weights.append(torch.cat([s.data for s in run.backend.master_shards()]).clone())
        self.applied.append(result.applied)


def train(work_dir: Path, data: Path, *, updates: int, spoil: int | None = None, **ema: Any) -> tuple[Runner, Watch]:
    config = tiny_config(
        work_dir, data, train_dataloader__batch_size=2, optim_wrapper__accumulative_counts=2, custom_hooks=[
            {"type": "EMAHook", "momentum": 0.1, **ema}
        ],
    )  # fmt: skip
    runner = Runner.from_cfg(config, max_updates=updates)
    watch = Watch(spoil=spoil)
    runner.hooks = [watch, *runner.hooks]
    runner.train()
    return runner, watch


def average_of(runner: Runner) -> torch.Tensor:
    hook = ema_of(runner)
    assert hook is not None
    return torch.cat([s.data for s in hook.average.shards]).double()


def test_until_begin_iter_the_average_is_the_weights(tmp_path, digits):
    """begin_iter=6 with 2 iterations per update: it starts with the update that completes iteration 6, the third."""
    runner, watch = train(tmp_path / "before", digits, updates=2, begin_iter=6)
    assert torch.equal(average_of(runner), watch.weights[-1].double())
    runner, watch = train(tmp_path / "after", digits, updates=6, begin_iter=6)
    hook = ema_of(runner)
    assert hook is not None and hook.average.num_updates == 4
    torch.testing.assert_close(average_of(runner), by_hand(watch.weights[2:], 0.1), rtol=1e-5, atol=1e-6)


def test_a_skipped_update_does_not_move_it(tmp_path, digits):
    runner, watch = train(tmp_path, digits, updates=5, spoil=2)
    assert watch.applied == [True, True, False, True, True]
    moves = [weights for weights, applied in zip(watch.weights, watch.applied, strict=True) if applied]
    torch.testing.assert_close(average_of(runner), by_hand(moves, 0.1), rtol=1e-5, atol=1e-6)
