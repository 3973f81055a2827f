"""Records of a user's own that can only be iterated, as ``docs/extending.md`` shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unigen_ds import SOURCES, IterableShards


def ask_the_service(day: str) -> Iterator[str]:
    """Instead of a service. ``FAILURES``: how many of its answers still end early."""
    for i in range(int(day[-1]) % 5 + 3):
        if FAILURES and i == 2:
            raise ConnectionResetError(FAILURES.pop())
        yield " ".join(("one", "two", "three", "four", "five", "six", "seven")[: 1 + (i + int(day[-1])) % 7])


FAILURES: list[str] = []


@SOURCES.register_module(name="crawl")
class Crawl(IterableShards):
    """Records of a service, day after day."""

    def __init__(self, path: Path, *, label: str | None = None, folder: Path | None = None, days: int = 7) -> None:
        super().__init__(path, label=label, folder=folder)
        self.days = days

    def shards(self) -> list[str] | None:  # parts that can be iterated on their own; None: they are unknown
        return [f"2024-01-{day:02}" for day in range(1, self.days + 1)]

    def records(self, shard: str) -> Iterator[dict[str, Any]]:  # always the same ones in the same order
        for title in ask_the_service(shard):
            yield {"text": title}
