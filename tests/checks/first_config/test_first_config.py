"""What a first config decides, where no machine of this kind is needed; and that recipes say how they differ."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

from unigen_ds.checks.dry_run.known import Hardware
from unigen_ds.checks.first_config import first_config
from unigen_ds.checks.first_config.first_config import FirstConfig
from unigen_ds.checks.first_config.inputs import KINDS, DataInput, ModelInput, task_of
from unigen_ds.checks.memory.planned import GIB
from unigen_ds.config.file import shipped_configs
from unigen_ds.core.choices import TASKS
from unigen_ds.core.errors import ConfigError
from unigen_ds.data.records.records import parse_record


@pytest.mark.parametrize("name", shipped_configs())
def test_a_recipe_states_how_it_differs_from_what_init_writes(name: str) -> None:
    lines = shipped_configs()[name].read_text(encoding="utf-8").splitlines()
    comments = []
    for line in lines:
        if not line.startswith("#"):
            break
        comments.append(line.removeprefix("# "))
    assert re.fullmatch(r"init\.py would write .+: differs because .+\.", " ".join(comments))


def config_on(memory: float, *, batch: int = 64) -> FirstConfig:
    hardware = Hardware(1, "a device", memory=int(memory * GIB))
    config = FirstConfig(ModelInput("m", "t", {}, False), DataInput({}, Counter(chat=9), 9), hardware)
    config.values |= {"model": {"type": "CausalLM"}, "optim_wrapper": {}}
    config.values["train_dataloader"] = {"batch_size": batch, "seq_length": 64}
    config.decide("model", "M with 1 parameters", "")
    return config


@pytest.mark.parametrize(
    ("memory", "batch", "recomputes"), [(80, 64, False), (30, 16, False), (11.5, 1, False), (10.5, 8, True)]
)
def test_the_batch_is_the_largest_power_of_two_for_which_there_is_memory(
    monkeypatch: pytest.MonkeyPatch, memory: float, batch: int, recomputes: bool
) -> None:
    """10 GiB, and for each sequence 1, or a 16th where layers are computed again. The update stays as it is."""
    batches = plan_by_batch(monkeypatch)
    config = config_on(memory)
    first_config._decide_batch(config)
    values = config.values
    assert values["train_dataloader"]["batch_size"] == batch
    assert values["optim_wrapper"]["accumulative_counts"] == 64 // batch
    assert values["model"].get("activation_checkpointing", False) is recomputes
    assert len(batches) <= 4 and config.decisions["batch"][0].startswith(f"{batch} of a device")


def plan_by_batch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Instead of a plan: bytes by the batch. Returns the batches that are planned."""
    batches: list[int] = []

    def plan(values: Any, **_: Any) -> int:
        batch = values["train_dataloader"]["batch_size"]
        batches.append(batch)
        return int((10 + batch / (16 if values["model"].get("activation_checkpointing") else 1)) * GIB)

    monkeypatch.setattr(first_config, "plan_memory", plan)

    def values(peak: int, _: object) -> dict[str, Any]:
        part = {"held": int(4 * GIB / 1.05), "masters": int(4 * GIB / 1.05)}
        return {"engines": [{"problem": None, "device": {"step": peak}, "traced": part}]}

    monkeypatch.setattr(first_config, "report_values", values)
    return batches


def test_what_does_not_fit_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_by_batch(monkeypatch)
    with pytest.raises(
        ConfigError, match=r"needs 10\.1 GiB of a device, and this machine has 5\.0.*--lora, a smaller model"
    ):
        first_config._decide_batch(config_on(5))


@pytest.mark.parametrize(
    ("lengths", "kind", "limit", "length", "reason"),
    [
        ([100] * 9 + [1100], "chat", 2048, 1152, "the longest record has 1,100 tokens"),
        ([100] * 999 + [9000], "chat", 2**31, 1024, "; 1 longer ones are left out"),
        ([100] * 9, "chat", 2048, 1024, "99 % at most 100"),
        ([3000] * 9, "pretrain", 2**31, 2048, "; 9 longer ones are split"),
        ([1500] * 9, "chat", 1000, 1000, "; 9 longer ones are left out; positions 1,000"),
    ],
)
def test_the_length_of_a_sequence(lengths: list[int], kind: str, limit: int, length: int, reason: str) -> None:
    """All records, unless few are much longer than the others; at most the positions of the model."""
    config = config_on(80)
    config.data.kinds.clear()
    config.data.kinds[kind] = 9
    assert first_config._sequence_length(config, np.asarray(lengths), limit=limit) == length
    assert reason in config.decisions["seq_length"][1]


RECORDS: dict[str, list[dict[str, Any]]] = {
    "chat": [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
             {"images": ["1.png"], "texts": [{"user": "a", "assistant": "b"}]}],
    "caption": [{"conversations": [{"role": "user", "type": "image", "image_path": "1.png"},
                                   {"role": "assistant", "type": "text", "content": "a"}]}],
    "draw": [{"text_prompt": "a", "image_path": "1.png"}, {"image": "1.png", "caption": "a"}],
    "edit": [{"instruction": "a", "input_images": ["1.png"], "output_images": ["2.png"]}],
    "pretrain": [{"text": "a"}],
}  # fmt: skip


def test_the_task_of_each_layout() -> None:
    assert [*RECORDS] == [*KINDS] == [*TASKS]
    for task, records in RECORDS.items():
        assert {task_of(parse_record(record, "here")) for record in records} == {task}
