"""Lines of numbers -> splits -> batches. A row has inputs, and a value and a label to learn that may be unknown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unigen_ds import DATASETS, Batch, DataError, Sample, ScannedDataset, Split, Tally


@dataclass(frozen=True)
class RowSplit(Split):
    """One row, as long as it has inputs."""

    inputs: tuple[float, ...]
    value: float = nan
    label: float = nan

    @property
    def num_tokens(self) -> int:
        return len(self.inputs)

    def count(self, tally: Tally) -> None:
        tally.other_targets += (not isnan(self.value)) + (not isnan(self.label))

    def load(self, processor: Any, key: tuple[object, ...] | None) -> RowSplit:
        return self

    def place(self, builder: RowsBuilder, position: int) -> int:
        builder.rows.append(self)
        builder.num_tokens += self.num_tokens
        return position + 1


@dataclass(frozen=True, kw_only=True)
class RowsBatch(Batch):
    inputs: Tensor  # [N, num_inputs] float32
    values: Tensor  # [N] float32, NaN where unknown
    labels: Tensor  # [N] 0.0 or 1.0, NaN where unknown

    @property
    def num_tokens(self) -> int:
        return self.inputs.numel()

    def target_counts(self) -> dict[str, float]:
        return {"value": fill_unknown(self.values)[1].sum().item(), "label": fill_unknown(self.labels)[1].sum().item()}


def fill_unknown(targets: Tensor) -> tuple[Tensor, Tensor]:
    """The targets with 0 for NaN, and 1.0 where they are known."""
    return targets.nan_to_num(), (~targets.isnan()).float()


class RowsBuilder:
    """Collects the rows of one micro-batch."""

    def __init__(self, num_inputs: int) -> None:
        self.num_inputs, self.num_tokens = num_inputs, 0
        self.rows: list[RowSplit] = []

    def add_document(self, loaded: Sequence[RowSplit]) -> None:
        for row in loaded:
            row.place(self, 0)

    def add_padding(self, num_tokens: int) -> None:
        self.add_document([RowSplit((0.0,) * self.num_inputs)])

    def batch(self, num_sequences: int, sample_ids: tuple[str, ...], skipped: tuple[dict[str, str], ...]) -> RowsBatch:
        inputs, values, labels = zip(*((row.inputs, row.value, row.label) for row in self.rows), strict=True)
        rows = {"inputs": torch.tensor(inputs), "values": torch.tensor(values), "labels": torch.tensor(labels)}
        samples = {"num_samples": len(sample_ids), "sample_ids": sample_ids, "skipped": skipped}
        return RowsBatch(**rows, num_sequences=num_sequences, **samples)


class RowsProcessor:
    """Reads a line such as ``[0.5, -1, 2, 3.5, 1]``: inputs, a value, a label; null is unknown."""

    def __init__(self, *, num_inputs: int, tokenizer: Any, seed: int) -> None:
        self.num_inputs, self.seed = num_inputs, seed

    def builder(self) -> RowsBuilder:
        return RowsBuilder(self.num_inputs)

    def split(self, line: str, where: str) -> RowSplit:
        try:
            numbers = [nan if number is None else float(number) for number in json.loads(line)]
            row = RowSplit(tuple(numbers[: self.num_inputs]), *numbers[self.num_inputs :])
        except (ValueError, TypeError) as error:
            raise DataError(f"{where} is {line!r}", allowed="a JSON list: inputs, value, label") from error
        if row.num_tokens < self.num_inputs:
            raise DataError(f"{where} has {row.num_tokens} inputs", allowed=str(self.num_inputs))
        return row


@DATASETS.register_module()
class RowsFile(ScannedDataset):
    """A text file with one row a line."""

    def __init__(self, path: str, processor: RowsProcessor, *, name: str | None = None) -> None:
        self.lines = Path(path).read_text(encoding="utf-8").splitlines()
        self.processor, self.name = processor, name or Path(path).stem

    def __len__(self) -> int:
        return len(self.lines)

    def sample(self, index: int, *, pass_number: int = 0) -> Sample:
        return Sample((self.processor.split(self.lines[index], f"{self.name}:{index + 1}"),))
