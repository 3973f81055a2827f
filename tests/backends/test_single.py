"""The contract of ``Backend``, on the engine that the others are compared with."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.checkpoint.support import write_state
from unigen_ds.backends.base import Backend, StepResult
from unigen_ds.backends.single import SingleBackend
from unigen_ds.checkpoint.layouts.safetensors import SafetensorsReader
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.core.progress import Geometry
from unigen_ds.core.shards import EXP_AVG, EXP_AVG_SQ, shard_key
from unigen_ds.optim.optimizer import LossScale, OptimizerConfig, ParamGroup


class RunningNorm(nn.LayerNorm):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.running_var: torch.Tensor
        self.register_buffer("running_var", torch.ones(width))
        self.num_calls: torch.Tensor
        self.register_buffer("num_calls", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.num_calls += 1
            self.running_var.lerp_(x.detach().float().var(0), 0.1)
        return super().forward(x)


class Net(nn.Module):
    """Trained matrices, a frozen one, a buffer, and a parameter that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = RunningNorm(7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.last = nn.Linear(7, 3)
        self.sometimes = nn.Parameter(torch.ones(3))

    def forward(self, x, *, all_of_it: bool = True):
        x = x.to(self.first.weight.dtype)  # a model follows its weights' precision
        y = self.last(self.frozen(self.norm(self.first(x)).relu()))
        return y * self.sometimes if all_of_it else y


def make(*, precision: str = "fp32", max_norm: float | None = None, seed: int = 0):
    torch.manual_seed(seed)
    net = Net()
    names = [name for name, p in net.named_parameters() if p.requires_grad]
    groups = [
        ParamGroup("most", 1e-2, 0.1, tuple(n for n in names if not n.startswith("last"))),
        ParamGroup("last", 1e-3, 0.0, tuple(n for n in names if n.startswith("last"))),
    ]
    backend = SingleBackend()
    cfg = OptimizerConfig("AdamW", {"betas": (0.9, 0.95)}, max_norm=max_norm, precision=precision)
    backend.check(geometry=Geometry(1), optimizer_cfg=cfg)
    backend.prepare(net, groups)
    return backend


def inputs(number: int, rows: int = 8, *, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(number)).to(device)


def train(backend: Backend, *numbers: int, scale: float = 1.0, all_of_it: bool = True):
    """One update for each number. Returns the last one's result."""
    result = StepResult(0.0, True)
    for number in numbers:
        with backend.accumulate(last=True):
            output = backend.model(inputs(number, device=backend.device), all_of_it=all_of_it)
            loss = output.float().square().sum() * scale
            backend.backward(loss)
        result = backend.step()
    return result


def state(backend: SingleBackend) -> dict[str, torch.Tensor]:
    tensors = {name: t.detach().clone() for name, t in backend.model.state_dict().items()}
    for name, parameter in backend.model.named_parameters():
        for kind, value in backend._optimizer.state.get(parameter, {}).items():
            tensors[f"{kind}|{name}"] = value.detach().clone()
    return tensors


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert set(one) == set(other)
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert different == []


# ---- one update -----------------------------------------------------------------------------------------------------


def test_an_update_is_torchs_own(monkeypatch):
    backend, twin = make(max_norm=0.5), make().model
    groups = [
        {"params": [p for n, p in twin.named_parameters() if p.requires_grad and not n.startswith("last")], "lr": 1e-2,
         "weight_decay": 0.1},
        {"params": [p for n, p in twin.named_parameters() if n.startswith("last")], "lr": 1e-3, "weight_decay": 0.0},
    ]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    for number in range(3):
        result = train(backend, number)
        twin(inputs(number)).square().sum().backward()
        norm = nn.utils.clip_grad_norm_([p for p in twin.parameters() if p.requires_grad], 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert result.applied and float(result.grad_norm) == float(norm) > 0.5
    for (name, mine), theirs in zip(backend.model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize(("precision", "rel", "atol"), [("fp32", 1e-6, 1e-6), ("bf16", 0.05, 2e-2)])
def test_gradients_of_micro_batches_add_up(precision, rel, atol):
    backend, whole = make(precision=precision), make(precision=precision)
    for net in (backend.model, whole.model):
        net.eval()  # batch statistics would see the cut
    for i, part in enumerate(inputs(1, 8).split(2)):
        with backend.accumulate(last=i == 3):
            backend.backward(backend.model(part).square().sum())
    with whole.accumulate(last=True):
        whole.backward(whole.model(inputs(1, 8)).square().sum())
    norms = float(backend.step().grad_norm), float(whole.step().grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=rel)
    for mine, theirs in zip(backend.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=atol)


def test_each_kind_of_state_is_one_buffer():
    """Which an asynchronous save copies in one piece, where the C library writes past the caches."""
    backend = make()
    train(backend, 0)
    for kind in (EXP_AVG, EXP_AVG_SQ):
        shards = backend.moments(kind)
        assert len(shards) == 7 and len({shard.data.untyped_storage().data_ptr() for shard in shards}) == 1
        assert {shard.data.data_ptr() % 64 for shard in shards} == {0}


def test_an_absent_gradient_counts_as_zero():
    """As a sharding engine sees it: moments decay, weight decay applies, whichever modality a batch holds."""
    backend, zeros = make(), make()
    train(backend, 0)
    train(zeros, 0)
    train(backend, 1, all_of_it=False)
    with zeros.accumulate(last=True):
        zero = zeros.model.sometimes.sum() * 0.0  # type: ignore[union-attr,operator]
        zeros.backward(zeros.model(inputs(1), all_of_it=False).square().sum() + zero)
    zeros.step()
    assert_equal(state(backend), state(zeros))


# ---- precision ------------------------------------------------------------------------------------------------------


def test_bf16_computes_low_and_keeps_fp32():
    backend, full = make(precision="bf16"), make()
    before = {shard.name: shard.data.clone() for shard in full.master_shards()}
    assert all(torch.equal(shard.data, before[shard.name]) for shard in backend.master_shards()), "not rounded"
    with backend.accumulate(last=True):
        output = backend.model(inputs(0), all_of_it=False)
        backend.backward(output.square().sum())
    assert output.dtype == torch.bfloat16
    sums = {master.grad.dtype for master in backend._masters.values() if master.grad is not None}
    assert sums == {torch.float32}
    result = backend.step()
    reference = train(full, 0, all_of_it=False)
    assert float(result.grad_norm) == pytest.approx(float(reference.grad_norm), rel=0.05)
    assert {shard.data.dtype for shard in backend.master_shards()} == {torch.float32}
    copies = dict(backend.model.named_parameters())
    for shard in backend.master_shards():
        assert not torch.equal(shard.data, before[shard.name]), "the update moved it"
        assert torch.equal(shard.data.bfloat16(), copies[shard.name].detach().view(-1)), "and its copy with it"
    assert backend.topology()["precision"] == "bf16"


def test_fp16_overflow_halves_the_scale_and_skips():
    backend = make(precision="fp16")
    scale = backend._scale
    assert scale is not None and scale.scale == 65536.0
    before = state(backend)
    backend.model.eval()
    result = train(backend, 0, scale=1e4)
    assert result.applied is False and scale.scale == 32768.0
    assert_equal(state(backend), before)
    while not train(backend, 0, scale=1e4).applied:
        pass
    scale_before = scale.scale
    result = train(backend, 0, scale=1e4)
    exact = make()
    exact.model.load_state_dict(backend.model.state_dict())
    assert result.applied and scale.scale == scale_before < 32768.0
    assert not torch.equal(state(backend)["first.weight"], before["first.weight"])


CLIP = 0.005


def clipped_update(precision: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Norm and weights of one update by SGD, whose step follows the length of the gradient (Adam's does not)."""
    torch.manual_seed(0)
    net = Net()
    names = tuple(name for name, p in net.named_parameters() if p.requires_grad)
    backend = SingleBackend()
    cfg = OptimizerConfig("SGD", {}, max_norm=CLIP, precision=precision)
    backend.check(geometry=Geometry(1), optimizer_cfg=cfg)
    backend.prepare(net, [ParamGroup("all", 1.0, 0.0, names)])
    backend.model.eval()
    norm = float(train(backend, 0, scale=1e-3).grad_norm)
    return norm, {shard.name: shard.data.clone() for shard in backend.master_shards()}


def test_fp16_is_clipped_after_the_scale_is_taken_out():
    """Clipped before it, an update would be 65,536 times as small. FSDP's updates are made by the same function."""
    (norm, expected), (half_norm, half) = clipped_update("fp32"), clipped_update("fp16")
    assert norm > 2 * CLIP and half_norm == pytest.approx(norm, rel=0.01), "clipped, and the norm is without the scale"
    begin = {name: p.detach().view(-1) for name, p in make().model.named_parameters()}
    for name, value in expected.items():
        change, by_half = value - begin[name], half[name] - begin[name]
        assert float((change - by_half).norm()) < 0.02 * float(change.norm()), name


def test_the_scale_doubles_with_the_last_update_of_its_interval():
    scale = LossScale(scale=8.0, growth_interval=3)
    for expected in (8.0, 8.0, 16.0, 16.0, 16.0, 32.0):
        scale.record(applied=True)
        assert scale.scale == expected
    for applied, expected in ((True, 32.0), (True, 32.0), (False, 16.0), (True, 16.0), (True, 16.0), (True, 32.0)):
        scale.record(applied=applied)  # an overflow begins the interval anew
        assert scale.scale == expected


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="started with 2 processes"):
        SingleBackend()


# ---- other weights for a while --------------------------------------------------------------------------------------


def others(backend: Backend):
    from dataclasses import replace

    return [replace(shard, data=shard.data * 2 + 1) for shard in backend.master_shards()]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, ValueError])
def test_swapped_restores_after_an_error(error):
    """Also one of the copy itself, half way: a shard is missing."""
    backend = make()
    before, shards = state(backend), others(backend)
    with pytest.raises(error), backend.swapped(shards[:-1] if error is ValueError else shards):
        raise error("evaluation failed")
    assert_equal(state(backend), before)


# ---- save and load --------------------------------------------------------------------------------------------------


def test_before_the_first_applied_update_there_are_no_moments(tmp_path):
    backend, other = make(), make(seed=1)
    write_state(backend, tmp_path)
    other.load_tensors(SafetensorsReader(tmp_path, parameters=[n for n, _ in other.model.named_parameters()]))
    train(backend, 0), train(other, 0)
    assert_equal(state(other), state(backend))


def test_everything_that_does_not_fit_is_named_and_nothing_is_loaded(tmp_path):
    backend = make()
    train(backend, 0)
    tensors = dict(backend.model.state_dict())
    del tensors["first.weight"], tensors["norm.running_var"]
    tensors["last.bias"] = torch.zeros(5)
    tensors["extra"] = torch.zeros(1)
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "model.safetensors")
    moments = {
        shard_key(EXP_AVG, n, 0): torch.zeros(1) for n, _ in backend.model.named_parameters() if n != "sometimes"
    }
    save_file(moments, tmp_path / "optimizer.safetensors")
    parameters = [*(name for name, _ in backend.model.named_parameters()), "extra"]
    before = state(backend)
    with pytest.raises(CheckpointError) as error:
        backend.load_tensors(SafetensorsReader(tmp_path, parameters=parameters))
    for message in (
        "model: missing: first.weight; unexpected: extra; reshaped: last.bias (5,) for (3,)",
        "missing: norm.running_var",
        "of exp_avg: missing: sometimes; reshaped: ",
        "first.bias (1,) for (7,)",
    ):
        assert message in str(error.value), message
    assert_equal(state(backend), before)
