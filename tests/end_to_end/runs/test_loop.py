"""The life cycle of a run, seen by a user's own hooks: order of calls, counts, limits, skipped data, skipped updates.

Every run is a real one: a tiny model on the 297 digits of the validation split (594 records, drawing and reading in
turn), one record a sequence. Expected counts are worked out here from the records, not by the package.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_config
from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core.batch import PackedBatch
from unigen_ds.core.errors import DataError
from unigen_ds.core.progress import Progress
from unigen_ds.examples.digits.dataset import write_digits
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.runner import Runner
from unigen_ds.system.journals import read_lines

RECORDS = 594
BATCH, ACCUMULATE = 20, 2
GLOBAL = BATCH * ACCUMULATE
EPOCH = RECORDS // BATCH * BATCH
"""580: an epoch is 29 iterations, 14.5 updates; every second epoch begins in the middle of an update."""


class Recorder(Hook):
    """Writes down every call, and what each update said of itself."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.updates: list[tuple[Progress, UpdateResult]] = []
        self.batches: list[PackedBatch] = []
        self.error: BaseException | None = None

    def before_train_epoch(self, run: Run) -> None:
        self.calls.append(f"before_train_epoch {run.progress.epoch}")

    def before_train_iter(self, run: Run, index: int, batch: PackedBatch) -> None:
        self.calls.append(f"before_train_iter {index}")
        self.batches.append(batch)

    def after_train_iter(self, run: Run, index: int, batch: PackedBatch) -> None:
        self.calls.append(f"after_train_iter {index}")
        assert batch is self.batches[-1]

    def after_update(self, run: Run, result: UpdateResult) -> None:
        self.calls.append("after_update")
        self.updates.append((run.progress, result))

    def on_exception(self, run: Run, error: BaseException) -> None:
        self.calls.append("on_exception")
        self.error = error


for point in ("before_run", "after_load_checkpoint", "before_train", "before_update", "after_train_epoch",
              "before_save_checkpoint", "after_train", "after_run"):  # fmt: skip
    setattr(Recorder, point, lambda self, *_, point=point: self.calls.append(point))


@dataclasses.dataclass
class Outcome:
    runner: Runner
    recorder: Recorder
    work_dir: Path

    @property
    def progress(self) -> Progress:
        return self.runner.progress

    @property
    def lines(self) -> list[dict[str, Any]]:
        return read_lines(self.work_dir / "metrics.jsonl")

    @property
    def sample_ids(self) -> list[str]:
        return [i for _, result in self.recorder.updates for i in result.sample_ids]


def prepare(work_dir: Path, data: Path, *, hooks: tuple[Any, ...] = (), max_updates: int | None = None, **overrides):
    """A runner with a recorder among its custom hooks."""
    settings = {
        "train_dataloader__dataset__split": "val",
        "train_dataloader__packing": None,
        "train_dataloader__batch_size": BATCH,
        "optim_wrapper__accumulative_counts": ACCUMULATE,
        "processor__text_dropout": 0.0,
        "custom_hooks": [dict(type=Recorder), *hooks],
    }
    runner = Runner.from_cfg(tiny_config(work_dir, data, **{**settings, **overrides}), max_updates=max_updates)
    (recorder,) = (hook for hook in runner.hooks if isinstance(hook, Recorder))
    return Outcome(runner, recorder, work_dir)


def train_outcome(work_dir: Path, data: Path, **settings: Any) -> Outcome:
    outcome = prepare(work_dir, data, **settings)
    outcome.runner.train()
    return outcome


def limit(**train_cfg: float) -> dict[str, Any]:
    return {"train_cfg": train_cfg}


def checkpoints(work_dir: Path) -> list[Path]:
    return sorted(path for path in work_dir.iterdir() if path.is_dir() and store.is_checkpoint_name(path.name))


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory, digits) -> Outcome:
    return train_outcome(tmp_path_factory.mktemp("two_epochs"), digits, **limit(max_epochs=2))


# --- the order of calls -------------------------------------------------------------------------------------------

ONE_UPDATE = [
    "before_update",
    *(f"{when}_train_iter {i}" for i in range(ACCUMULATE) for when in ("before", "after")),
    "after_update",
]


def test_calls_come_in_the_documented_order(two_epochs):
    # Update 15 takes the last 20 sequences of epoch 0 and the first 20 of epoch 1: the epoch hooks follow it.
    assert two_epochs.recorder.calls == [
        "before_run",
        "before_train",
        "before_train_epoch 0",
        *ONE_UPDATE * 15,
        "after_train_epoch",
        "before_train_epoch 1",
        *ONE_UPDATE * 14,
        "before_save_checkpoint",  # the checkpoint hook saves the last update, after every hook has seen it
        "after_train_epoch",
        "after_train",
        "after_run",
    ]


# --- limits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train_cfg", "updates"),
    [
        ({"max_updates": 3}, 3),
        ({"max_iters": 6}, 3),
        ({"max_iters": 7}, 3),  # a fourth update would be 8 iterations
        ({"max_epochs": 0.5}, 7),  # 290 sequences; an eighth update would be 320
        ({"max_epochs": 1, "max_updates": 2}, 2),  # whichever comes first
    ],
)
def test_a_run_never_trains_on_more_than_asked(tmp_path, digits, train_cfg, updates):
    outcome = train_outcome(tmp_path, digits, **limit(**train_cfg))
    assert outcome.progress.updates == len(outcome.recorder.updates) == updates
    assert outcome.progress.sequences == updates * GLOBAL == len(outcome.sample_ids)
    assert outcome.runner.finished and outcome.runner.stop_reason is None


def test_max_updates_stops_hard_and_leaves_the_curve_alone(two_epochs, tmp_path, digits):
    short = train_outcome(tmp_path, digits, max_updates=5, **limit(max_epochs=2))
    assert short.progress.updates == 5 and not short.runner.finished
    assert [line["lr"] for line in short.lines] == [line["lr"] for line in two_epochs.lines[:5]]
    assert [line["loss"] for line in short.lines] == [line["loss"] for line in two_epochs.lines[:5]]
    (checkpoint,) = checkpoints(tmp_path)
    manifest, whole = (Manifest.read(path) for path in (checkpoint, *checkpoints(two_epochs.work_dir)))
    assert checkpoint.name == "iter_10.pth" and manifest.progress == short.progress
    text = (checkpoint / "config.py").read_text()
    assert compile(text, "config.py", "exec") and f"from {__name__} import Recorder" in text, "a class is imported"
    assert manifest.schedule == whole.schedule and manifest.schedule["total_sequences"] == 2 * EPOCH


# --- samples that cannot be decoded -------------------------------------------------------------------------------

DAMAGED = (3, 40, 41, 250)
"""Places of digits in the split; each is the image of two records."""


@pytest.fixture(scope="module")
def damaged_digits(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """The digits with four files cut off behind their header; and {record: file} of what was lost."""
    root = write_digits(tmp_path_factory.mktemp("damaged") / "digits")
    records = [json.loads(line) for line in (root / "val.jsonl").read_text().splitlines()]
    bad = {}
    for digit in DAMAGED:
        for index in (2 * digit, 2 * digit + 1):
            (file,) = {turn["image_path"] for turn in records[index]["conversations"] if turn.get("image_path")}
            bad[f"digits_val:{index}:0"] = file
        (root / file).write_bytes((root / file).read_bytes()[:45])
    return root, bad


def tokens_of(runner: Runner, sample_id: str) -> int:
    """Even records: four words and 4 x 4 latent patches; odd ones: an image and four words; begin and end tokens."""
    vit_side = 8 // runner.config["model"]["vit"]["patch_size"]
    patches = 16 if int(sample_id.split(":")[1]) % 2 == 0 else vit_side**2
    return (patches + 2) + (4 + 2)


def test_undecodable_samples_are_counted_and_named(damaged_digits, tmp_path):
    root, bad = damaged_digits
    outcome = train_outcome(tmp_path, root, train_dataloader__max_skipped_fraction=0.05, **limit(max_epochs=1))
    updates = {i: n for n, (_, result) in enumerate(outcome.recorder.updates, 1) for i in result.sample_ids if i in bad}
    records = read_lines(tmp_path / "skipped_samples.jsonl")
    assert len(updates) >= 6, "an epoch without its last 34 records meets nearly all of them"
    assert {record["sample"]: record["update"] for record in records} == updates and len(records) == len(updates)
    assert all(record["path"].endswith(bad[record["sample"]]) and record["why"] for record in records)
    ledger = read_lines(tmp_path / "ledger.jsonl")
    assert [line["skipped"] for line in ledger] == [list(updates.values()).count(line["update"]) for line in ledger]
    assert outcome.progress.samples == outcome.progress.sequences, "a skipped sample is consumed"
    assert outcome.progress.tokens == sum(tokens_of(outcome.runner, i) for i in outcome.sample_ids), "as is its length"
    assert outcome.progress.skipped_updates == 0


def test_too_many_of_them_stop_the_run(damaged_digits, tmp_path):
    root, bad = damaged_digits
    outcome = prepare(tmp_path, root, train_dataloader__max_skipped_fraction=0.0001, **limit(max_epochs=1))
    with pytest.raises(DataError, match=r"\d+ of \d+ samples could not be decoded.*max_skipped_fraction = 0\.0001"):
        outcome.runner.train()
    assert isinstance(outcome.recorder.error, DataError)
    assert outcome.progress.samples >= 100, "a share of fewer samples says nothing"
    names = {record["sample"] for record in read_lines(tmp_path / "skipped_samples.jsonl")}
    ids = [i for batch in outcome.recorder.batches for i in batch.sample_ids]
    assert names == set(ids) & set(bad) and len(names) / outcome.progress.samples > 0.002
    (checkpoint,) = checkpoints(tmp_path)
    assert Manifest.read(checkpoint).progress == outcome.progress, "nothing that was trained is lost"
    more = {"resume": True, "train_dataloader__max_skipped_fraction": 0.1}
    assert train_outcome(tmp_path, root, **more, **limit(max_epochs=1)).progress.updates > outcome.progress.updates
