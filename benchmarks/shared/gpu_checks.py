"""The checks of ``benchmarks/gpu.py``: each is a function of a ``Check``, which it reports its figures to.

Runs are those of ``tools/train.py`` and of ``Runner``. On a device each check has a process of its own, so an error of
CUDA ends that check alone, and every run that is compared with another one has one, too. In a rehearsal (on a CPU, with
tiny sizes) all of them share the process that asks, and a figure's value is not a measurement.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from shared.gpu_models import (
    BILLION,
    MEDIUM,
    SEVEN_BILLION,
    TINY,
    Config,
    config_of,
    quick_weights,
    write_config,
)
from torch import Tensor, nn

from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.system.journals import METRICS_FILE, read_lines

ROOT = Path(__file__).resolve().parents[2]
NOT_MEASURED = "not measured"
ENGINES = ("single", "deepspeed:zero1", "deepspeed:zero2", "deepspeed:zero2_offload", "deepspeed:zero3",
           "deepspeed:zero3_offload", "fsdp:FULL_SHARD", "fsdp+offload")  # fmt: skip
SEVERAL = ("deepspeed:zero2", "deepspeed:zero3", "fsdp:FULL_SHARD", "fsdp:NO_SHARD")
"""Engines that are also checked on two devices, where there are two."""
BOUNDS = {"fp32": 1e-4, "bf16": 2e-2}
"""Relative difference of the losses from those of the CPU."""
_AT_ONCE, _RUN_S = 4, 120.0
"""Runs of a check at a time, and how long one may need."""


@dataclass
class Check:
    """What a check is asked, and what it has reported by now."""

    name: str
    folder: Path
    rehearse: bool
    result: Path | None = None
    """Where each figure is written at once: a check that is ended early has reported them."""
    figures: list[dict[str, Any]] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.rehearse else "cuda")

    def figure(self, name: str, value: float | None, unit: str = "", *, most: float | None = None,
               least: float | None = None) -> None:  # fmt: skip
        """Report a figure, with its limits. ``value`` is None where this device does not say it."""
        row: dict[str, Any] = {"name": name, "unit": unit, "most": most, "least": least, "value": value, "holds": None}
        if self.rehearse:
            row |= {"value": NOT_MEASURED, "rehearsed": value}
        elif value is not None and (most, least) != (None, None):
            row["holds"] = (most is None or value <= most) and (least is None or value >= least)
        self.figures.append(row)
        if self.result is not None:
            self.result.write_text(json.dumps(self.figures), encoding="utf-8")

    def train(self, config: Path, work_dir: Path, *options: str, on_cpu: bool = False, processes: int = 1) -> None:
        """``tools/train.py`` in a process of its own, or several of torchrun's; in a rehearsal in this one."""
        words = [str(config), "--work-dir", str(work_dir), *options]
        if self.rehearse:
            from tools.train import main

            with mock.patch.dict(os.environ):  # an engine sets the address of its process group
                if (status := main(words)) != 0:
                    raise RuntimeError(f"tools/train.py ended with {status}")
            return
        start = [sys.executable, str(ROOT / "tools" / "train.py")]
        if processes > 1:
            start[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        hidden = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if on_cpu else {}
        process = subprocess.run(
            [*start, *words], env={**os.environ, **hidden}, capture_output=True, text=True, timeout=_RUN_S
        )
        if process.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}:\n{process.stderr[-3000:]}")


def lines_of(work_dir: Path) -> list[dict[str, Any]]:
    """The lines of the updates of a run."""
    return [line for line in read_lines(work_dir / METRICS_FILE) if "loss" in line and "event" not in line]


def worst(work_dir: Path, reference: Path) -> float:
    """The largest relative difference of the losses of two runs."""
    pairs = zip(lines_of(work_dir), lines_of(reference), strict=True)
    return max(abs(one["loss"] - two["loss"]) / abs(two["loss"]) for one, two in pairs)


def backend_options(engine: str) -> list[str]:
    """Options of ``tools/train.py`` for an engine."""
    name, _, offload = engine.partition("+")
    return ["--backend", name, *(["--cfg-options", "backend.cpu_offload=true"] if offload else [])]


def synchronize(check: Check) -> None:
    if not check.rehearse:
        torch.cuda.synchronize()


# ---- results ---------------------------------------------------------------------------------------------------------


def losses(check: Check) -> None:
    """The losses of 20 updates of each engine, and of two devices where there are two, against those of the CPU."""
    updates, engines = (2, ("single", "fsdp:FULL_SHARD")) if check.rehearse else (20, ENGINES)
    config = write_config(check.folder / "config.py", config_of(check.folder, TINY))
    runs = [(engine, precision, 1) for engine in engines for precision in BOUNDS]
    if not check.rehearse and torch.cuda.device_count() > 1:
        runs += [(engine, precision, 2) for engine in SEVERAL for precision in BOUNDS]

    def train(engine: str, precision: str, processes: int, *, on_cpu: bool = False) -> Path:
        work_dir = check.folder / f"{engine.replace(':', '_')}_{precision}_{processes}{'_cpu' * on_cpu}"
        options = [*backend_options(engine), "--cfg-options", f"optim_wrapper.precision={precision}"]
        options += ["--max-updates", str(updates)]
        check.train(config, work_dir, *options, on_cpu=on_cpu, processes=processes)
        return work_dir

    def compare(one: tuple[str, str, int]) -> float | Exception:
        try:
            return worst(train(*one), references[one[1]])
        except Exception as error:  # the other engines are compared all the same
            return error

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        each: Any = map if check.rehearse else threads.map  # a rehearsal's runs are in this thread
        folders = each(lambda precision: train("single", precision, 1, on_cpu=True), BOUNDS)
        references = dict(zip(BOUNDS, folders, strict=True))
        problems = []
        for run, outcome in zip(runs, each(compare, runs), strict=True):
            title = f"{run[0]} on {run[2]}, {run[1]}: largest relative difference of a loss"
            if isinstance(outcome, Exception):
                problems.append(f"{title}: {outcome}")
            check.figure(title, None if isinstance(outcome, Exception) else outcome, most=BOUNDS[run[1]])
    if problems:
        raise RuntimeError("\n\n".join(problems))


def resume(check: Check) -> None:
    """A run that is stopped and resumed has the losses and gradient norms of one that is not, to the last bit."""
    first, last = (1, 2) if check.rehearse else (3, 6)
    config = {**config_of(check.folder, TINY), "env": {"deterministic": True}}
    path = write_config(check.folder / "config.py", config)
    engines = ("single", "deepspeed:zero2", "deepspeed:zero3", "fsdp:FULL_SHARD")
    for engine in engines[:1] if check.rehearse else engines:
        name = engine.replace(":", "_")
        straight, stopped = check.folder / f"{name}_straight", check.folder / f"{name}_resumed"
        options = backend_options(engine)
        check.train(path, straight, *options, "--max-updates", str(last))
        check.train(path, stopped, *options, "--max-updates", str(first))
        check.train(path, stopped, *options, "--max-updates", str(last), "--resume")
        pairs = [*zip(lines_of(straight), lines_of(stopped), strict=True)]
        assert len(pairs) == last, f"{len(pairs)} lines of {last} updates"
        different = sum(one[key] != two[key] for one, two in pairs for key in ("loss", "grad_norm"))
        check.figure(f"{engine}: values of {last} updates that differ after a resume", float(different), most=0)
    torch.use_deterministic_algorithms(False)  # in a rehearsal other checks follow in this process


def attention(check: Check) -> None:
    """FlexAttention, outputs and gradients, against SDPA on the CPU in fp32, on packed sequences with pictures."""
    from unigen_ds.models.attention import plan_attention
    from unigen_ds.runner.settings.tree import Settings
    from unigen_ds.runner.start.build import read_sequences
    from unigen_ds.runner.start.stages import build_engine, continue_data

    settings = Settings.from_config(config_of(check.folder, TINY))
    data, *_ = continue_data(settings, None, geometry=build_engine(settings)[1], on_change="refuse")
    batch: Any = read_sequences(settings, data, 0, 1)[0].batch
    torch.manual_seed(0)
    plain = [torch.randn(batch.num_tokens, heads, 32, requires_grad=True) for heads in (4, 2, 2)]
    expected = plan_attention(batch, use_flex=False)(*plain)
    gradient = torch.randn_like(expected)
    reference = [expected.detach(), *torch.autograd.grad(expected, plain, gradient)]
    on_device = batch.to(check.device)
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        inputs = [x.detach().to(check.device, dtype).requires_grad_(not check.rehearse) for x in plain]
        output = plan_attention(on_device, use_flex=True)(*inputs)
        values = [output.detach()]
        if not check.rehearse:  # on a CPU it has no backward pass
            values += torch.autograd.grad(output, inputs, gradient.to(check.device, dtype))
        scale = max(float(one.abs().max()) for one in reference)
        difference = max(float((a.float().cpu() - b).abs().max()) for a, b in zip(values, reference, strict=False))
        title = f"{str(dtype).removeprefix('torch.')}: largest difference, relative to the largest value"
        check.figure(title, difference / scale, most=bound)


def compiled(check: Check) -> None:
    """``model.compile``: the losses of the model that is not compiled, and the time of an update."""
    updates, config = (2 if check.rehearse else 20), config_of(check.folder, TINY if check.rehearse else MEDIUM)
    path = write_config(check.folder / "config.py", config)
    for name in ("eager", "compiled"):
        compile_ = str(name == "compiled" and not check.rehearse).lower()  # a rehearsal waits for no compiler
        options = [f"model.compile={compile_}", "default_hooks.timer.window=5"]
        check.train(path, check.folder / name, "--cfg-options", *options, "--max-updates", str(updates))
    eager, fast = (lines_of(check.folder / name) for name in ("eager", "compiled"))
    check.figure("largest relative difference of a loss", worst(check.folder / "compiled", check.folder / "eager"),
                 most=1e-3)  # fmt: skip
    check.figure("time of an update, compiled / not", fast[-1]["time/update"] / eager[-1]["time/update"], most=1.05)


def optimizer(check: Check) -> None:
    """Fused AdamW, which the engines use: the result of the one that is not, and its time."""
    number, size = (4, 64) if check.rehearse else (200, 500)
    torch.manual_seed(0)
    values = [torch.randn(size, size, device=check.device) for _ in range(number)]
    gradients = [torch.randn(size, size, device=check.device) for _ in range(number)]
    ends, seconds = [], []
    for kind in ({"fused": True}, {"foreach": True}):
        parameters = [nn.Parameter(value.clone()) for value in values]
        one = torch.optim.AdamW(parameters, lr=1e-3, **kind)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        one.step()
        synchronize(check)
        begin = time.perf_counter()
        for _ in range(10):
            one.step()
        synchronize(check)
        seconds.append(time.perf_counter() - begin)
        ends.append(parameters)
    difference = max(float((a - b).detach().abs().max()) for a, b in zip(*ends, strict=True))
    check.figure("largest difference of a weight of Normal(0, 1) after 11 steps", difference, most=1e-5)
    check.figure("time of a step, fused / foreach", seconds[0] / seconds[1], most=1.0)


# ---- memory and waiting ----------------------------------------------------------------------------------------------


class Peak(Hook):
    """The most bytes that tensors have on the device, up to the end of each update."""

    priority = 1  # type: ignore[assignment]

    def __init__(self) -> None:
        self.most: int | None = None

    def before_train(self, run: Run) -> None:
        if run.backend.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def after_update(self, run: Run, result: UpdateResult) -> None:
        if run.backend.device.type == "cuda":
            self.most = torch.cuda.max_memory_allocated()


def run_with(config: Config, hooks: Sequence[Hook], *, updates: int) -> Any:
    """A whole run in this process, with further hooks."""
    from unigen_ds.runner.loop.runner import Runner

    runner = Runner.from_cfg(config, max_updates=updates)
    runner.hooks = sorted([*runner.hooks, *hooks], key=lambda hook: hook.priority)
    runner.train()
    return runner


def memory(check: Check) -> None:
    """``tools/plan.py`` against the allocator's own count, of an update with records that are all alike."""
    config = config_of(check.folder, TINY if check.rehearse else MEDIUM, alike=True)
    config["optim_wrapper"]["precision"] = "bf16"
    path, peak = write_config(check.folder / "config.py", config), Peak()
    words = [str(path), "--only", "--json", "--world-size", "1"]
    if check.rehearse:
        from tools.plan import main

        with contextlib.redirect_stdout(io.StringIO()) as output:
            main(words)
        text = output.getvalue()
    else:
        command = [sys.executable, str(ROOT / "tools" / "plan.py"), *words]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    traced = json.loads(text)["engines"][0]["traced"]["device"]["step"]
    run_with(config, [peak], updates=2 if check.rehearse else 4)
    check.figure("planned", traced / 2**20, "MiB")
    check.figure("max_memory_allocated", None if peak.most is None else peak.most / 2**20, "MiB")
    off = None if peak.most is None else traced / peak.most - 1
    check.figure("planned / allocated, less 1", off, most=0.05, least=-0.05)


class Waits(Hook):
    """Points of the forward and backward pass of a micro-batch where the host waits for the device, by torch's own
    ``set_sync_debug_mode``. The optimizer's step reads one value, and is not in it."""

    priority = 10_000  # type: ignore[assignment]

    def __init__(self) -> None:
        self.messages: list[str] = []
        self._caught: Any = None
        self._context: Any = None

    def before_train_iter(self, run: Run, index: int, batch: Any) -> None:
        if run.progress.updates < 2 or index + 1 == run.geometry.accumulative_counts:
            return  # the first updates compile; the last micro-batch of an update ends with the step
        self._context = warnings.catch_warnings(record=True)
        self._caught = self._context.__enter__()
        warnings.simplefilter("always")
        if run.backend.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")

    def after_train_iter(self, run: Run, index: int, batch: Any) -> None:
        if self._context is None:
            return
        if run.backend.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        self._context.__exit__(None, None, None)
        self._context = None
        self.messages += [str(one.message) for one in self._caught if "synchronizing" in str(one.message)]


def waits(check: Check) -> None:
    """The host waits for the device in no micro-batch."""
    for precision in BOUNDS:
        config, hook = config_of(check.folder, TINY), Waits()
        config["optim_wrapper"]["precision"] = precision
        config["work_dir"] = str(check.folder / precision)
        run_with(config, [hook], updates=3 if check.rehearse else 8)
        check.figure(f"{precision}: waits in the micro-batches before the last", float(len(hook.messages)), most=0)
        if hook.messages:
            raise RuntimeError("\n".join(sorted({*hook.messages})))


class Stalls(Hook):
    """Seconds that the checkpoint hook needs after each update, once the device has nothing left to do."""

    priority = 69  # type: ignore[assignment]

    def __init__(self, check: Check) -> None:
        self._check, self._before = check, 0.0
        self.seconds: list[float] = []

    def after_update(self, run: Run, result: UpdateResult) -> None:
        synchronize(self._check)
        total = run.clock.totals.get("hook:checkpoint", 0.0)
        self.seconds.append(total - self._before)
        self._before = total


def saving(check: Check) -> None:
    """How long training waits for an asynchronous save, against a copy of the same bytes into page-locked memory."""
    every, saves = (2, 2) if check.rehearse else (80, 4)
    config, stalls = config_of(check.folder, TINY if check.rehearse else MEDIUM), Stalls(check)
    config["default_hooks"]["checkpoint"] = {"interval": every, "unit": "update", "async_save": True,
                                             "max_keep_ckpts": 1}  # fmt: skip
    runner = run_with(config, [stalls], updates=every * (saves + 1) - 1)
    cycles = [stalls.seconds[number * every : (number + 1) * every] for number in range(2, saves + 1)]
    stall = statistics.median(map(sum, cycles))  # without the first save, which starts the process that writes
    tensors = [tensor.detach() for tensor in runner.backend.trained_tensors()]
    size, times = sum(tensor.nbytes for tensor in tensors), []
    host = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=not check.rehearse) for tensor in tensors]
    for _ in range(3):
        synchronize(check)
        begin = time.perf_counter()
        for one, tensor in zip(host, tensors, strict=True):
            one.copy_(tensor, non_blocking=True)
        synchronize(check)
        times.append(time.perf_counter() - begin)
    copy = statistics.median(times)
    check.figure("bytes that are saved", size / 2**30, "GiB")
    check.figure("training waits", stall, "s")
    check.figure("copy into page-locked memory", copy, "s")
    check.figure("wait / copy", stall / copy, most=1.5)


# ---- speed -----------------------------------------------------------------------------------------------------------


class Pace(Hook):
    """Seconds, tokens and operations of the updates after the first ones."""

    priority = 10_000  # type: ignore[assignment]

    def __init__(self, check: Check, warm_up: int) -> None:
        self._check, self._warm_up, self._since = check, warm_up, 0.0
        self.seconds = self.tokens = self.operations = 0.0

    def before_train_iter(self, run: Run, index: int, batch: Any) -> None:
        if run.progress.updates >= self._warm_up:
            self.operations += run.model.flops(batch)  # type: ignore[operator]

    def after_update(self, run: Run, result: UpdateResult) -> None:
        synchronize(self._check)
        if run.progress.updates > self._warm_up:
            self.tokens += result.tokens
            self.seconds = time.perf_counter() - self._since
        else:
            self._since = time.perf_counter()


def plain_loop(
    check: Check, model: Any, batches: Sequence[Any], weights: Mapping[str, float], *, warm_up: int
) -> float:
    """Seconds of a hand-written loop, the same batches: fp32 masters of a model in bf16, clipping, fused AdamW."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = [nn.Parameter(parameter.detach().float().clone()) for parameter in trained]
    one, begin = torch.optim.AdamW(masters, lr=1e-5, fused=True), 0.0
    for number, batch in enumerate(batches):
        if number == warm_up:
            synchronize(check)
            begin = time.perf_counter()
        terms = model(batch.to(check.device))
        terms.weighted_sum(weights, batch.target_counts()).backward()
        for master, parameter in zip(masters, trained, strict=True):
            master.grad = torch.zeros_like(master) if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_(masters, 1.0)
        one.step()
        one.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_(trained, masters)
    synchronize(check)
    return time.perf_counter() - begin


def speed(check: Check, size: Config, length: int) -> None:
    """Tokens a second and the share of the device's peak, beside a loop by hand with the same model and batches."""
    from unigen_ds.families.decoder_lm.family import DecoderLM
    from unigen_ds.hooks.log.timer import device_peak_tflops
    from unigen_ds.models.weights import PretrainedModel
    from unigen_ds.runner.start.build import read_sequences

    warm_up, timed = (1, 1) if check.rehearse else (3, 8)
    config = config_of(check.folder, size, length=length)
    config["work_dir"] = str(check.folder / "run")
    config["optim_wrapper"] |= {"precision": "bf16", "accumulative_counts": 1}
    config["train_dataloader"] |= {"global_batch_size": 1, "num_workers": 0 if check.rehearse else 2}
    config["default_hooks"] = {"checkpoint": None, "logger": {"interval": 10}}
    pace = Pace(check, warm_up)
    with mock.patch.object(PretrainedModel, "initialise", quick_weights), mock.patch.object(
        DecoderLM, "initialise", quick_weights
    ):  # fmt: skip
        runner = run_with(config, [pace], updates=warm_up + timed)
    settings, data = runner._parts.settings, runner._parts.start.data
    batches = [one.batch for one in read_sequences(settings, data, 0, warm_up + timed)]
    if not check.rehearse:
        batches = [batch.map_tensors(Tensor.pin_memory) for batch in batches]
    parameters = sum(parameter.numel() for parameter in runner.model.parameters())
    model, weights = runner.model, settings.term_weights
    runner = settings = data = None  # masters and moments are freed
    gc.collect()
    seconds = plain_loop(check, model, batches, weights, warm_up=warm_up)
    tokens = sum(batch.num_tokens for batch in batches[warm_up:])
    peak = None if check.rehearse else device_peak_tflops(torch.cuda.get_device_name())
    check.figure("parameters", parameters / 1e9, "billion")
    check.figure("tokens a second", pace.tokens / pace.seconds, "1/s")
    check.figure("10^12 operations a second", pace.operations / pace.seconds / 1e12)
    check.figure("share of the device's peak (MFU)", peak and pace.operations / pace.seconds / 1e12 / peak)
    check.figure("tokens a second of the loop by hand", tokens / seconds, "1/s")
    check.figure("tokens a second / the loop's", pace.tokens / pace.seconds / (tokens / seconds), least=0.95)
    if not check.rehearse:
        check.figure("max_memory_allocated, both", torch.cuda.max_memory_allocated() / 2**30, "GiB")


def unified(length: int) -> Callable[[Check], None]:
    return lambda check: speed(check, TINY if check.rehearse else BILLION, TINY["length"] if check.rehearse else length)


def adapters(length: int) -> Callable[[Check], None]:
    tiny = {"llm": TINY["llm"], "words": TINY["words"], "length": TINY["length"]}
    return lambda check: speed(check, tiny if check.rehearse else SEVEN_BILLION,
                               TINY["length"] if check.rehearse else length)  # fmt: skip


# ---- all of them -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A check, its time budget, and what it needs besides."""

    title: str
    run: Callable[[Check], None]
    seconds: float
    alone: bool = True
    """Whether it is timed, or fills the device, so that nothing else may run meanwhile."""
    packages: tuple[str, ...] = ()


CHECKS = {
    "attention": Entry("FlexAttention against the reference", attention, 90, alone=False),
    "losses": Entry("losses of each engine against the CPU", losses, 200, alone=False, packages=("deepspeed",)),
    "waits": Entry("the host waits for the device in no micro-batch", waits, 60, alone=False),
    "resume": Entry("a resume is bit-equal", resume, 150, alone=False, packages=("deepspeed",)),
    "memory": Entry("tools/plan.py against the allocator", memory, 90, alone=False),
    "unified_4096": Entry("1 B unified model, 4,096 tokens", unified(4096), 90),
    "adapters_4096": Entry("7 B with adapters, 4,096 tokens", adapters(4096), 150, packages=("peft",)),
    "saving": Entry("asynchronous save: wait / copy into page-locked memory", saving, 60),
    "optimizer": Entry("fused AdamW", optimizer, 20),
    "unified_16384": Entry("1 B unified model, 16,384 tokens", unified(16384), 90),
    "adapters_16384": Entry("7 B with adapters, 16,384 tokens", adapters(16384), 150, packages=("peft",)),
    "compiled": Entry("torch.compile", compiled, 90),
}  # fmt: skip
"""By importance: where time is short, the last ones are left out, and are reported as such."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the log of the runs."""
    import logging

    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)
