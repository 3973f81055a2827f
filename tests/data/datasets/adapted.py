"""A user's map-style data sets for ``test_adapter.py``; a process of torchrun imports them by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

NUMBER = 40


class Items:
    """Texts of several lengths; every reading of an item is a line of ``reads``."""

    def __init__(self, reads: str, extra: int = 0) -> None:
        self.reads, self.extra = Path(reads), extra

    def __len__(self) -> int:
        return NUMBER

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self.reads.open("a") as stream:
            stream.write(f"{os.getpid()} {index}\n")
        ids = [1 + (index * 7 + k) % 9 for k in range(3 + index % 5 + self.extra)]
        return {"input_ids": ids, "labels": ids}


class WithLengths(Items):
    def lengths(self) -> list[int]:
        return [3 + index % 5 for index in range(NUMBER)]


class BadItems(Items):
    """The same, of which each eighth is malformed, in two ways."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = super().__getitem__(index)
        if index % 8 == 3:
            item["labels"] = item["labels"][1:]
        if index % 16 == 3:
            raise OSError("torn")
        return item


class WithBadItems(BadItems, WithLengths):
    """The same, with lengths, which do not show them."""


class Edits:
    def __init__(self, measured: bool = False) -> None:
        if measured:
            self.lengths = self._lengths

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = [1, 2, 3]
        images = [torch.full((1, 8, 4 * (1 + index % 2) if k < 2 else 8), k / 4) for k in range(3)]
        return {"input_ids": ids, "labels": ids, "padded_images": images,
                "image_roles": ["target", "edited", "condition"]}  # fmt: skip

    def _lengths(self) -> list[Any]:
        sides = [4 * (1 + index % 2) for index in range(6)]
        return [(3, [(8, side, "target"), (8, side, "edited"), (8, 8, "condition")]) for side in sides]


class Wrong(Items):
    """Items of which number 3 is changed; ``every``: all are. ``change``: values of keys, or what is done."""

    def __init__(self, reads: str, change: Any, every: bool = False, number: int = NUMBER) -> None:
        super().__init__(reads)
        self.change, self.every, self.number = change, every, number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = super().__getitem__(index)
        if index != 3 and not self.every:
            return item
        if self.change == "raise":
            raise ValueError("no such file")
        if self.change == "uint8":
            return {**item, "padded_images": torch.full((1, 8, 8), 200, dtype=torch.uint8)}
        if self.change == "bytes":
            return {**item, "padded_images": torch.full((1, 8, 8), 200.0)}
        if self.change == "unlearned":
            return {**item, "labels": [-100] * len(item["labels"])}
        return {**item, **self.change}


class TypedItems(Items):
    """As a tokenizer of transformers makes them; of one item the types are not 0."""

    def __init__(self, reads: str, second: int = -1) -> None:
        super().__init__(reads)
        self.second = second

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = super().__getitem__(index)
        types = [0] * len(item["input_ids"])
        return {**item, "token_type_ids": torch.tensor(types) + (index == self.second)}
