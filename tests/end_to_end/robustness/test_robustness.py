"""Some hundred damaged data sets of every format; ``make robustness`` runs 10,000."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import pytest

from tests.end_to_end.robustness.outcome import ending_of, scratch

NUM, SEED = 300, 1


@pytest.mark.parametrize("part", range(3))
def test_damaged_data_is_read_skipped_and_counted_or_named(part: int) -> None:
    endings: Counter[str] = Counter()
    for number in range(part, NUM, 3):
        with tempfile.TemporaryDirectory(dir=scratch()) as folder:
            try:
                endings[ending_of(SEED, number, Path(folder))[1]] += 1
            except BaseException as error:
                error.add_note(f"python benchmarks/robustness.py --seed {SEED} --only {number}")
                raise
    assert endings["named"] > 30 and endings["sample"] > 10 and endings["skip"] > 3, endings
