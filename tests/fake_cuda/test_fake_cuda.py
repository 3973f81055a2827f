"""Training on a pretended CUDA device (``worker.py``): what the host waits for, where tensors are."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda import cases
from tests.fake_cuda.device import compile_shim
from tests.support.processes import ENVIRONMENT, ROOT, run

LIMIT_S, AT_ONCE = 900, 2
pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]


SHARDED = [name for name, case in cases.CASES.items() if case.world > 1]
Report = dict[str, Any]
Reports = Callable[[str], Report]

READ_NORM = "value read"
LOG = {
    ("value read", "hooks/log/logger.py:<listcomp>"), ("value read", "hooks/log/logger.py:_read_norms"),
}  # fmt: skip
"""At a log line, and after the first update from published weights: the loss terms, those of each source, the norm."""
EPOCH = {("value read", "hooks/log/logger.py:settle")}
"""At the end of an epoch: the sums of its losses."""
SAVE = {
    *EPOCH, ("value read", "runner/loop/updates.py:losses"),
    ("value read", "hooks/guard/spikes.py:_decide"), ("value read", "hooks/log/logger.py:_read_norms"),
    ("cuda.get_rng_state", "system/seeding.py:rng_state"), ("cuda.set_rng_state", "system/seeding.py:set_rng_state"),
}  # fmt: skip
"""At a save: the losses of the last update at its new weights, which leave the generators as they are, the sums of the
epoch so far, and losses and gradient norms since the last look or log line."""


PACKING = {
    ("value read", "families/auto/model.py:_cannot_pack"),
    ("copy cpu -> cuda from pageable memory", "core/batch.py:<lambda>"),
}  # fmt: skip
"""Once in a run, of a model of transformers: whether documents can share a row."""
IMAGE_TOKENS = ("value read", "families/auto/model.py:_call (import_utils.py:torch_compilable_check)")
"""LLaVA's own code compares the number of image tokens with that of images, in every forward pass."""


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Runs the cases that the chosen tests of this file name, two at a time."""
    folder = tmp_path_factory.mktemp("fake_cuda")
    library = compile_shim(folder)
    cases.write_data(folder / "data")
    names = sorted({item.callspec.params["name"] for item in request.session.items if item.path == request.path})

    def start(name: str, *library: Path) -> str:
        command = [sys.executable, "-m", "tests.fake_cuda.worker", name, folder, *library]
        process = run(command, cwd=ROOT, text=True, timeout=LIMIT_S, env=ENVIRONMENT)
        return process.stderr[-3000:] if process.returncode else ""

    with ThreadPoolExecutor(AT_ONCE) as threads:
        failures = [*threads.map(start, [name for name in names if name.endswith("-resume")])]
        assert not any(failures), failures
        errors = dict(zip(names, threads.map(lambda name: start(name, library), names), strict=True))

    @cache
    def report(name: str) -> Report:
        assert not errors[name], errors[name]
        report: Report = json.loads((folder / f"{name}.json").read_text())
        return report

    return report


def waits(report: Report, phase: str) -> dict[tuple[str, str], int]:
    """Of the phases whose names begin so: (what, where) -> how often."""
    numbers: dict[tuple[str, str], int] = {}
    for at, what, where, number in report["waits"]:
        if at.startswith(phase):
            numbers[what, where] = numbers.get((what, where), 0) + number
    return numbers


def allowance(report: Report, case: cases.Case) -> dict[str, dict[tuple[str, str], int]]:
    """Every wait of an update that neither logs nor saves, by phase."""
    if not case.offload:
        return {"step": {(READ_NORM, "backends/torch_optimizer.py:step"): 1}}
    # FSDP2 copies the gradients of the first micro-batch without waiting, and adds those of later ones on the host
    number = len(report["tensors"]["trainable"])
    copies = {
        ("copy cuda -> cpu", "no line of the project (_fsdp_collectives.py:foreach_reduce)"): number,
        ("event.synchronize", "no line of the project (_fsdp_param_group.py:finalize_backward)"): number,
    }
    return {"micro-batch 1": copies}


@pytest.mark.parametrize("name", cases.CASES)
def test_the_host_waits_once_an_update(reports: Reports, name: str) -> None:
    report, case = reports(name), cases.CASES[name]
    first = cases.RESUMED_AT + 1 if case.kind == "resume" else 1
    expected = allowance(report, case)
    for update in range(first, cases.UPDATES + 1):
        for phase in ("micro-batch 0", "micro-batch 1", "step"):
            numbers = waits(report, f"update {update}, {phase}")
            if case.model in cases.TRANSFORMERS and (update, phase) == (1, "micro-batch 0"):
                numbers = {wait: number for wait, number in numbers.items() if wait not in PACKING}
            if case.model == "llava":
                numbers.pop(IMAGE_TOKENS, None)
            assert numbers == expected.get(phase, {}), (update, phase)
    of_epoch = LOG | EPOCH if case.kind == "hybrid" else set()  # its updates have more sequences than an epoch
    assert set(waits(report, f"update {first}, hooks")) <= LOG | of_epoch
    replay = {IMAGE_TOKENS} if case.model == "llava" else set()
    assert set(waits(report, f"update {cases.UPDATES}, hooks")) <= LOG | SAVE | replay
    if first == 1:
        assert set(waits(report, "update 2, hooks")) <= of_epoch
    assert report["updates"] == cases.UPDATES and (case.model in cases.TRANSFORMERS or report["attention_calls"] > 0)


@pytest.mark.parametrize("name", cases.CASES)
def test_device_and_dtype_of_everything(reports: Reports, name: str) -> None:
    report, case = reports(name), cases.CASES[name]
    tensors = report["tensors"]
    kinds = {kind: set(values.values()) for kind, values in tensors.items()}
    master_kind, moment_kind = ("cpu float32 pinned", "cpu float32") if case.offload else ("cuda float32",) * 2
    low = "cuda bfloat16" if case.kind == "single" else moment_kind
    assert kinds["parameters"] <= {low, master_kind}
    assert kinds["masters"] == {master_kind} and set(report["saved"]["masters"]) == {master_kind}
    assert kinds["moments"] == kinds["ema"] == {moment_kind} and report["saved"]["hooks"] == {"ema": [moment_kind]}
    assert kinds["steps"] == {moment_kind if report["fused"] else "cpu float32"}
    names = set(tensors["trainable"])
    assert set(tensors["masters"]) == set(tensors["ema"]) <= names and names == set(tensors["steps"])
    assert {key.partition("|")[2] for key in tensors["moments"]} == names
    numbers = {"cuda int64"} if case.model == "llava" else set()  # the positions of its vision tower
    assert kinds["buffers"] | kinds["other"] <= {"cuda float32"} | numbers
    if case.model == "unified":
        assert any(key.startswith("vae.") for key in tensors["buffers"])
    assert report["stale"] == (0 if case.offload else None)
    if case.kind == "resume":
        assert report["fused"] and report["restored"] == cases.RESUMED_AT


@pytest.mark.parametrize("name", SHARDED)
def test_gradient_collectives(reports: Reports, name: str) -> None:
    """One a unit and micro-batch where gradients are sharded at once; one a unit and update where that is promised."""
    report, case = reports(name), cases.CASES[name]
    units = len(report["whole_parameters"])
    per_phase = {
        at.removeprefix("update 2, "): number
        for at, what, number in report["collectives"]
        if at.startswith("update 2, ") and what == ("_reduce_scatter_base_ cuda" if case.kind != "no_shard" else REDUCE)
    }
    once = case.kind == "no_shard"
    assert units >= 3
    assert per_phase == ({"micro-batch 1": units} if once else {"micro-batch 0": units, "micro-batch 1": units})


REDUCE = "allreduce_ cuda"


@pytest.mark.parametrize("name", SHARDED)
def test_processes_and_groups(reports: Reports, name: str) -> None:
    """A rank makes its own groups, whatever the number of processes; no unit is whole on the device with another."""
    report, case = reports(name), cases.CASES[name]
    expected = {"backend": "cpu:gloo,cuda:nccl", "device_id": "None", "timeout": "0:01:17"}
    assert report["init_process_group"] == expected
    assert report["groups"] == {"no_shard": 1, "hybrid": 2}.get(case.kind, 0)
    assert "group_timeout" not in report or report["group_timeout"] == "0:01:17"
    assert set(report["whole_parameters"]) == {0}


_OBJECTS = ("broadcast_ ", "gather_ ", "allgather_ ", "scatter_ ")
"""Collectives of ``torch.distributed``'s functions for objects; FSDP gathers tensors by ``_allgather_base_``."""


@pytest.mark.parametrize("name", SHARDED)
def test_objects_are_sent_from_the_host(reports: Reports, name: str) -> None:
    """Over gloo, beside NCCL: the plan of the start, names, outcomes; so are the counts of every update."""
    calls = {what for _, what, _ in reports(name)["collectives"]}
    objects = {what for what in calls if what.startswith(_OBJECTS)}
    assert objects and {what.partition(" ")[2] for what in objects} == {"cpu"}, objects
    assert "allreduce_ cpu" in calls
