"""A format of a user's own, as ``docs/extending/data.md`` shows it."""

from __future__ import annotations

import numpy as np

from unigen_ds import SOURCES, Arrays, RecordSource, Row


@SOURCES.register_module(name="words")
class WordsSource(RecordSource):
    """One word a line."""

    suffixes = (".words",)  # recognised in files and folders; format='words' names it

    def scan(self) -> Arrays:  # once for each change of the file; the arrays are cached, and use() receives them
        ends = [i + 1 for i, byte in enumerate(self.path.read_bytes()) if byte == 10]
        return {"bounds": np.asarray([0, *ends])}

    def use(self, arrays: Arrays) -> None:
        self.bounds = arrays["bounds"].tolist()

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def read(self, start: int, stop: int) -> list[Row]:
        content = self.path.read_bytes()
        spans = zip(self.bounds[start:stop], self.bounds[start + 1 : stop + 1], strict=True)
        return [Row({"text": content[a:b].decode().strip()}, f"{self.label}, byte {a}") for a, b in spans]
