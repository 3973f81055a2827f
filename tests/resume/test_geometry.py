"""Splits of an update, and the plans of memory."""

from __future__ import annotations

from unigen_ds.backends.deepspeed.deepspeed import DeepSpeedBackend
from unigen_ds.backends.single import SingleBackend
from unigen_ds.core.progress import Geometry
from unigen_ds.data.settings import TrainDataloader
from unigen_ds.resume.geometry import equal_geometries, geometries_text, memory_plans


def test_every_cut_keeps_the_total_and_the_smallest_memory_is_first():
    cuts = equal_geometries(256, 2)
    assert [(g.batch_size, g.accumulative_counts) for g in cuts] == [
        (1, 128), (2, 64), (4, 32), (8, 16), (16, 8), (32, 4), (64, 2), (128, 1),
    ]  # fmt: skip
    assert {g.global_batch_size for g in cuts} == {256}
    assert equal_geometries(256, 3) == []


def test_an_indivisible_total_names_the_nearest():
    text = geometries_text(256, 3)
    assert "256 cannot be split over 3 processes; the nearest effective batches are 255 and 258" in text
    assert "1 x 128, 2 x 64" in geometries_text(256, 2)
    assert geometries_text(256, 1).endswith("64 x 4, 128 x 2 and 1 more")


SOURCE = {"type": "DatasetAdapter", "dataset": []}
LOADER = TrainDataloader.parse({"batch_size": 64, "dataset": SOURCE})


def test_the_plans_keep_the_effective_batch(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    a, b, c, d = memory_plans(
        Geometry(64, 2, 2), backend=DeepSpeedBackend(config="zero2"), loader=LOADER, recomputes=False
    )
    assert (a.geometry, b.geometry, c.geometry) == (Geometry(32, 4, 2), Geometry(32, 2, 4), Geometry(16, 4, 4))
    assert d.geometry == Geometry(64, 2, 2)
    assert a.overrides == {"optim_wrapper.accumulative_counts": 4, "train_dataloader.batch_size": 32}
    assert d.overrides == {"model.activation_checkpointing": True} and d.backend == "deepspeed:zero3"
    assert {plan.geometry.global_batch_size for plan in (a, b, c, d)} == {256}


def test_plans_of_one_process_and_of_an_odd_batch():
    _, b, c, d = memory_plans(Geometry(4), backend=SingleBackend(), loader=LOADER, recomputes=None)
    assert (b.backend, c.backend, d.backend) == ("deepspeed:zero2", "deepspeed:zero2", "deepspeed:zero2_offload")
    a, *_ = memory_plans(Geometry(9, 1), backend=SingleBackend(), loader=LOADER, recomputes=None)
    assert a.geometry == Geometry(3, 3), "by its smallest factor"


def test_a_global_batch_size_stays_the_users():
    loader = TrainDataloader.parse({"global_batch_size": 64, "dataset": SOURCE})
    a, *_ = memory_plans(Geometry(64), backend=SingleBackend(), loader=loader, recomputes=None)
    assert a.overrides == {"optim_wrapper.accumulative_counts": 2}
