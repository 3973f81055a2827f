"""The checklist as pure functions of a manifest and a proposal, in the numbers of the guide; every finding there is."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.checkpoint.support import make_manifest, schedules_of
from unigen_ds.checkpoint.manifest import FileEntry, Manifest
from unigen_ds.core.progress import Geometry, Progress, Ruler
from unigen_ds.data.batches.change import DataChange
from unigen_ds.resume.checklist import learning_rates, run
from unigen_ds.resume.finding import SAVES, Finding, Proposal
from unigen_ds.schedule.schedule import Schedules

SAMPLES, EPOCHS = 100_000, 8
FIRST = Geometry(128, 1, 2)
CURVE = [
    {"type": "LinearLR", "start_factor": 1e-5, "by_epoch": True, "begin": 0, "end": 0.24,
     "convert_to_iter_based": True},
    {"type": "CosineAnnealingLR", "eta_min": 0.0, "by_epoch": True, "begin": 0.24, "end": EPOCHS,
     "convert_to_iter_based": True},
]  # fmt: skip


def schedules(ruler: Ruler, *, curve: Any = CURVE, epochs: int = EPOCHS, lr: float = 1e-4) -> Schedules:
    base = [{"name": "default", "lr": lr}]
    return schedules_of(curve, ruler=ruler, base=base, total_sequences=epochs * ruler.sequences_per_epoch)


def manifest_of(geometry: Geometry = FIRST, *, iterations: int = 1500, **values: Any) -> Manifest:
    """A run of 100,000 samples over 8 epochs, drop-last, at ``iterations`` of ``geometry``."""
    first = Ruler(FIRST, SAMPLES // FIRST.sequences_per_iteration * FIRST.sequences_per_iteration)
    sequences = iterations * geometry.sequences_per_iteration
    fields: dict[str, Any] = dict(
        progress=Progress(sequences=sequences, samples=sequences, tokens=9 * sequences, updates=iterations),
        geometry=geometry,
        ruler=first,
        schedule=schedules(first).state_dict(),
        loader={"facts": {"sizes": [SAMPLES], "packing": None, "weights": None}},
        files=[FileEntry("model.safetensors", 1000, "0" * 32), FileEntry("ema/0.safetensors", 500, "0" * 32)],
        config={
            "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 1e-4}},
            "default_hooks": {"checkpoint": {"interval": 100, "by_epoch": False, "max_keep_ckpts": 2}},
            "custom_hooks": [{"type": "EMAHook"}],
        },
        versions={"torch": "2.13.0"},
    )
    return make_manifest(**{**fields, **values})


def proposal(manifest: Manifest, geometry: Geometry, **values: Any) -> Proposal:
    fields: dict[str, Any] = dict(
        checkpoint="/runs/a/iter_1500.pth",
        config=manifest.config,
        geometry=geometry,
        topology={**manifest.topology, "dp_size": geometry.dp_size},
        schedules=Schedules.from_state_dict(manifest.schedule),
        parameters=manifest.parameters,
        data=DataChange(),
        versions=manifest.versions,
        saves={**SAVES, "interval": 100, "by_epoch": False, "max_keep_ckpts": 2},
        averages=True,
        free_bytes=10_000,
    )
    return Proposal(**{**fields, **values})


def check(manifest: Manifest, proposal: Proposal) -> dict[str, Finding]:
    findings = run(manifest, proposal)
    assert len({f.id for f in findings}) == len(findings), "an id is unique"
    return {f.id: f for f in findings}


# ---- 128 x 1 x 2 -> 64 x 2 x 2 at iteration 1500 -------------------------------------------------------------------


def test_the_guides_change_of_batch_in_its_own_numbers():
    """390 iterations an epoch, 3.85 epochs, 48.1 %; iteration 1500 becomes 3000. Read bare it would be 24.0 %."""
    manifest = manifest_of()
    position = check(manifest, proposal(manifest, Geometry(64, 2, 2)))["progress.position"]
    assert position.was == "iteration 1,500 of 3,120 (390 an epoch): 3.85 epochs, 48.1%"
    assert position.now == "iteration 3,000 of 6,240 (780 an epoch): 3.85 epochs, 48.1%"
    assert "1500 read at 781 iterations an epoch would be 1.92 epochs (24.0%)" in position.why
    assert position.status == "ok"


def test_twice_the_processes_are_another_batch():
    """Batch size and accumulation as before: the number of processes alone changes the effective batch."""
    manifest = manifest_of()
    batch = check(manifest, proposal(manifest, Geometry(FIRST.batch_size, 1, 2 * FIRST.dp_size)))["batch.effective"]
    assert batch.status == "block" and "effective batch size differs" in batch.why
    assert batch.was.endswith("= 256") == batch.now.endswith("= 512"), (batch.was, batch.now)


def test_the_learning_rate_is_the_same_function_of_data_after_it():
    manifest = manifest_of()
    findings = check(manifest, proposal(manifest, Geometry(64, 2, 2)))
    assert findings["lr.curve"].status == "ok" and findings["lr.curve"].was == findings["lr.curve"].now
    assert findings["batch.effective"].status == "ok"
    points = learning_rates(manifest, Schedules.from_state_dict(manifest.schedule))
    assert len(points) == 6 and points[0][0] == pytest.approx(1500 / 390) and points[-1][0] == pytest.approx(8)
    # in closed form: half a cosine over what is left of 7.76 epochs after the warm-up
    expected = 1e-4 * 0.5 * (1 + math.cos(math.pi * (1500 / 390 - 0.24) / (8 - 0.24)))
    assert points[0][1]["default"] == pytest.approx(expected, rel=2e-3)  # mmengine's own off-by-one update is kept


# ---- another effective batch ----------------------------------------------------------------------------------------


def test_two_to_three_processes_names_the_nearest():
    manifest = manifest_of()
    batch = check(manifest, proposal(manifest, Geometry(85, 1, 3)))["batch.effective"]
    assert batch.status == "block" and "255 and 258" in batch.remedy


# ---- edited configs -------------------------------------------------------------------------------------------------


def test_a_complete_run_says_so():
    manifest = manifest_of(iterations=3120)
    findings = check(manifest, proposal(manifest, FIRST))
    finding = findings["progress.left"]
    assert finding.status == "warn" and "nothing is left to train" in finding.why
    assert "log.confirmation" not in findings, "no update follows"


def test_a_learning_rate_of_zero_for_the_rest_is_no_sensible_schedule():
    manifest = manifest_of()
    ends = [{"type": "LinearLR", "start_factor": 1.0, "end_factor": 0.0, "by_epoch": True, "begin": 0, "end": 3,
             "convert_to_iter_based": True}]  # fmt: skip
    curve = check(manifest, proposal(manifest, FIRST, schedules=schedules(manifest.ruler, curve=ends)))["lr.curve"]
    assert curve.status == "warn" and curve.guide == 4 and "every learning rate is 0" in curve.why


# ---- surroundings ---------------------------------------------------------------------------------------------------

CHANGED: dict[str, tuple[dict[str, Any], str, str]] = {
    "precision": ({"topology": {"engine": "single", "dp_size": 2, "precision": "bf16"}}, "warn", "rounding"),
    "rng": ({"topology": {"engine": "single", "dp_size": 3, "precision": "fp32"}}, "warn", "seeded anew"),
    "engine": ({"topology": {"engine": "other", "dp_size": 2, "precision": "fp32"}}, "ok", "float rounding"),
    "ema": ({"averages": False}, "warn", "dropped with the next checkpoint"),
    "config.edited": (
        {"config": {"loss_weights": {"text": 0.5}, "custom_hooks": [{"type": "EMAHook"}]}},
        "warn",
        "holds from here on",
    ),
    "versions": ({"versions": {"torch": "9.9"}}, "warn", "last bits"),
    "disk.free": ({"free_bytes": 1499}, "block", "do not fit"),
    "model.structure": ({"parameters": []}, "block", "the model differs"),
    "data.unchanged": ({"data": DataChange((("sizes", "a had 3 records and has 4"),))}, "block", "repeated or skipped"),
}


@pytest.mark.parametrize("id", CHANGED)
def test_what_a_change_means(id):
    values, status, why = CHANGED[id]
    finding = check(manifest_of(), proposal(manifest_of(), FIRST, **values))[id]
    assert finding.status == status and why in finding.why
    assert status != "block" or finding.remedy


def test_one_checkpoint_of_room_is_a_warning():
    assert check(manifest_of(), proposal(manifest_of(), FIRST, free_bytes=1501))["disk.free"].status == "warn"


@pytest.mark.parametrize(
    ("choice", "obstacles", "status"),
    [("append", (), "warn"), ("append", ("a was edited",), "block"), ("restart", ("a was edited",), "warn")],
)
def test_changed_data_by_choice(choice, obstacles, status):
    change = DataChange((("sizes", "a had 3 records and has 4"),), obstacles)
    values = {"data": change, "on_data_change": choice}
    assert check(manifest_of(), proposal(manifest_of(), FIRST, **values))["data.unchanged"].status == status
