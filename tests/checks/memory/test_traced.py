"""The trace without memory counts what the same code counts with memory, to the byte."""

from __future__ import annotations

import gc
from dataclasses import asdict
from typing import Any

import pytest
import torch

from tests.end_to_end.engines.jobs.pictures import write_talks
from tests.end_to_end.engines.jobs.users import write_mixed
from tests.families.tiny_transformers import write_language
from tests.tiny import tiny_config
from unigen_ds.checks.memory import traced
from unigen_ds.checks.memory.counted import CountedBytes
from unigen_ds.checks.memory.planned import largest_batches, trace_engines
from unigen_ds.checks.memory.traced import trace
from unigen_ds.core.errors import UnigenError
from unigen_ds.runner.settings.tree import Settings, load_config
from unigen_ds.runner.start.build import build_data
from unigen_ds.runner.start.stages import build_engine


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    source = {"type": "UnifiedGenerationDataset", "data_path": str(write_mixed(folder))}
    overrides = {
        "train_dataloader__dataset": source, "train_dataloader__batch_size": 2, "train_dataloader__packing": None,
        "optim_wrapper__precision": "bf16", "custom_hooks": [{"type": "EMAHook", "momentum": 0.1}],
        "model__llm__num_hidden_layers": 1, "optim_wrapper__accumulative_counts": 2,
    }  # fmt: skip
    return Settings.from_config(tiny_config(folder / "run", folder, **overrides)).with_choices(seed=0)


@pytest.mark.slow
def test_every_phase_without_memory_is_what_it_is_with_memory(settings):
    geometry = build_engine(settings)[1]
    data = build_data(settings, geometry=geometry, ruler=None)
    largest = largest_batches(data, geometry)
    assert len(largest.batches) > 1, "the longest micro-batch is not that with the most images"
    backend = build_engine(settings)[0]
    plan, real = (
        asdict(trace(settings, engine, data.processor, largest.batches, geometry=geometry, fake=fake))
        for engine, fake in ((backend, True), (build_engine(settings)[0], False))
    )
    assert plan == real
    assert plan["held"] < plan["peak"]["step"] and plan["peak"]["load"] < plan["peak"]["evaluate"]
    masters = plan["masters"]
    assert masters == 4 * plan["trainable"]
    frozen = 4 * sum(backend.frozen_sizes().values())
    low = masters // 2 + frozen // 2
    assert plan["held"] == pytest.approx(4 * masters + frozen + low, rel=0.02)  # weights, two moments, average; copies


def test_a_trace_that_fails_is_no_plan(settings, monkeypatch):
    monkeypatch.setattr(traced, "one_update", _fails)
    geometry = build_engine(settings)[1]
    data = build_data(settings, geometry=geometry, ruler=None)
    plan = trace_engines({"single": settings}, data.processor, largest_batches(data, geometry), geometry, jobs=1)[
        "single"
    ]
    assert plan.memory is None and plan.problem == "no memory for this."


def _fails(*args: Any, **kwargs: Any) -> None:
    raise UnigenError("no memory for this")


@pytest.mark.slow
def test_a_model_of_transformers_is_planned(tmp_path):
    """That it packs inside of documents is taken for granted: values alone could show it. Given, bytes are exact."""
    write_talks(tmp_path / "talks")
    write_language(tmp_path / "qwen3", "qwen3")

    def of_model(packing: bool | None, *, fake: bool) -> dict[str, Any]:
        changes = {
            "model.pretrained": str(tmp_path / "qwen3"), "tokenizer.path": str(tmp_path / "qwen3"),
            "train_dataloader.dataset.data_path": str(tmp_path / "talks" / "texts.jsonl"), "val_dataloader": None,
            "train_dataloader.seq_length": 224, "train_dataloader.num_workers": 0, "backend": {"type": "single"},
            "train_dataloader.dataset.index_workers": 0, "work_dir": str(tmp_path / "run"), "model.packing": packing,
        }  # fmt: skip
        settings = Settings.from_config(load_config("qwen_sft", changes)).with_choices(seed=0)
        backend, geometry = build_engine(settings)
        data = build_data(settings, geometry=geometry, ruler=None)
        batches = largest_batches(data, geometry).batches
        return asdict(trace(settings, backend, data.processor, batches, geometry=geometry, fake=fake))

    default, plan, real = of_model(None, fake=True), of_model(True, fake=True), of_model(True, fake=False)
    assert plan == real and plan["masters"] > 0
    assert default["held"] == plan["held"] and default["peak"]["step"] < plan["peak"]["step"], "no mask of all pairs"


def test_the_largest_micro_batch_is_the_longest_of_all_ranks(settings):
    geometry = build_engine(settings)[1]
    data = build_data(settings, geometry=geometry, ruler=None)
    largest = largest_batches(data, geometry)
    rows = data.stream.rows()
    lengths = []
    for _ in range(data.stream.sequences_per_epoch // 2):
        two = [next(rows)[0] for _ in range(2)]
        lengths.append(sum(int(data.stream.sources[d.source].lengths()[0][d.index]) for row in two for d in row))
    assert largest.tokens == max(lengths)
    assert largest.tokens - 4 <= largest.batches[0].num_tokens <= largest.tokens  # a condition may be dropped
    assert largest_batches(data, geometry, most=4).tokens == max(lengths[:2])


def test_bytes_are_counted_until_they_are_freed():
    with CountedBytes() as memory:
        a = torch.zeros(1000)
        view = a.view(10, 100)
        b = a + 1
        _shape_alone = torch.empty(1000, device="meta")
        assert memory.now == 8000
        del a
        assert memory.now == 8000, "a view keeps it"
        del view
        b.untyped_storage().resize_(0)
        gc.collect()
        assert (memory.now, memory.peak) == (0, 8000)
        assert memory.begin() == 0 == memory.peak
