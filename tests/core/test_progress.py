"""How far a run is: geometry, progress, durations, and the ruler that turns user units into data."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest

from unigen_ds.core.errors import ConfigError
from unigen_ds.core.progress import UNITS, Duration, Geometry, Progress, Ruler

BIG = Geometry(batch_size=64, accumulative_counts=2, dp_size=2)


def run(geometry: Geometry, updates: int, start: Progress | None = None) -> list[Progress]:
    """Progress before the first and after every update."""
    seen = [start or Progress()]
    for _ in range(updates):
        size = geometry.global_batch_size
        seen.append(seen[-1].advance(sequences=size, samples=size, tokens=10 * size, epoch=0, applied=True))
    return seen


class TestGeometry:
    def test_100_000_samples_on_two_gpus(self) -> None:
        """64 x 2 accumulated twice: effective batch 256, 781 iterations an epoch, 6,248 iterations = 3,124 updates."""
        assert BIG.sequences_per_iteration == 128 and BIG.global_batch_size == 256
        iterations_per_epoch = 100_000 // BIG.sequences_per_iteration
        assert iterations_per_epoch == 781
        ruler = Ruler(BIG, iterations_per_epoch * BIG.sequences_per_iteration)
        assert ruler.sequences_per_epoch == 99_968
        total = ruler.to_sequences(8, "epoch")
        assert total / BIG.sequences_per_iteration == 6248 and total / BIG.global_batch_size == 3124
        end = run(BIG, 3124)[-1]
        assert end.sequences == total and end.iteration(BIG) == 6248 and end.updates == 3124
        assert Duration(total).reached(end) and not Duration(total).reached(run(BIG, 3123)[-1])

    def test_text_names_all_three(self) -> None:
        assert str(BIG) == "64 per device x 2 process(es) x 2 accumulated = 256"

    @pytest.mark.parametrize("value", [0, -1, 2.0, "8", True, None])
    @pytest.mark.parametrize("field", ["batch_size", "accumulative_counts", "dp_size"])
    def test_refuses(self, field: str, value) -> None:
        with pytest.raises(ConfigError, match=f"{field} is {value!r}"):
            Geometry(**{"batch_size": 1, field: value})


class TestProgress:
    def test_advance_counts_one_update_and_is_a_new_value(self) -> None:
        before = Progress(sequences=8, samples=9, tokens=100, updates=1, skipped_updates=0, epoch=0)
        after = before.advance(sequences=8, samples=11, tokens=90, epoch=1, applied=False)
        assert after == Progress(sequences=16, samples=20, tokens=190, updates=2, skipped_updates=1, epoch=1)
        assert before.sequences == 8
        assert after.advance(sequences=1, samples=1, tokens=1, epoch=1, applied=True).skipped_updates == 1
        with pytest.raises(dataclasses.FrozenInstanceError):
            before.sequences = 0  # type: ignore[misc]

    def test_an_iteration_is_a_view(self) -> None:
        progress = Progress(sequences=3000 * 256)
        assert progress.iteration(Geometry(128, 1, 2)) == 3000
        assert progress.iteration(Geometry(64, 2, 2)) == 6000
        assert progress.iteration(Geometry(128, 1, 4)) == 1500
        assert Progress(sequences=15).iteration(Geometry(8)) == 1

    def test_state_round_trip(self) -> None:
        progress = Progress(1, 2, 3, 4, 5, 6)
        assert Progress.from_state_dict(json.loads(json.dumps(progress.state_dict()))) == progress
        with pytest.raises(KeyError):
            Progress.from_state_dict({"sequences": 1})

    def test_count(self) -> None:
        progress = Progress(sequences=1, samples=2, tokens=3, updates=4, epoch=5)
        counts = {unit: progress.count(unit) for unit in UNITS if unit != "iteration"}
        assert counts == {"sequence": 1, "sample": 2, "token": 3, "update": 4, "epoch": 5}
        with pytest.raises(ConfigError, match="unit 'iteration'"):
            progress.count("iteration")


class TestDuration:
    def test_every_is_crossing_safe(self) -> None:
        """interval=100 iterations, accumulation 3: it fires at 102, 201, 300, 402, ...: once per multiple."""
        geometry = Geometry(batch_size=4, accumulative_counts=3)
        interval = Ruler(geometry, 4000).duration(100, "iteration")
        seen = run(geometry, 200)
        fired = [b.iteration(geometry) for a, b in itertools.pairwise(seen) if interval.every(b, a)]
        assert fired == [102, 201, 300, 402, 501, 600]

    def test_every_survives_a_change_of_geometry(self) -> None:
        """100 iterations of the first geometry stay 800 sequences, although the new update jumps over the multiple."""
        interval = Ruler(Geometry(8), 8000).duration(100, "iteration")
        before = run(Geometry(8), 95)[-1]
        seen = run(Geometry(56), 30, start=before)
        fired = [b.sequences for a, b in itertools.pairwise(seen) if interval.every(b, a)]
        assert fired == [816, 1600, 2440]

    def test_one_fire_for_several_multiples(self) -> None:
        interval = Duration(10, "update")
        assert interval.every(Progress(updates=35), Progress(updates=9))
        assert not interval.every(Progress(updates=39), Progress(updates=35))
        assert interval.every(Progress(updates=40), Progress(updates=39))
        assert not interval.every(Progress(updates=0), Progress(updates=0))

    @pytest.mark.parametrize("unit", ["sample", "token", "update", "epoch"])
    def test_counts_its_own_unit(self, unit: str) -> None:
        field = {"sample": "samples", "token": "tokens", "update": "updates", "epoch": "epoch"}[unit]
        duration = Duration(5, unit)
        assert duration.reached(Progress(**{field: 5})) and not duration.reached(Progress(**{field: 4}))

    @pytest.mark.parametrize("value", [0, -1, math.nan, "3", None])
    def test_refuses(self, value) -> None:
        with pytest.raises(ConfigError, match="a positive number"):
            Duration(value, "sequence")

    def test_refuses_an_iteration(self) -> None:
        """Only a ruler knows what an iteration is."""
        with pytest.raises(ConfigError, match="unit 'iteration'"):
            Duration(3, "iteration").reached(Progress())


class TestRuler:
    RULER = Ruler(BIG, 99_968)

    @pytest.mark.parametrize(
        ("value", "unit", "sequences"),
        [(1, "iteration", 128), (3, "update", 768), (0.5, "epoch", 49_984), (7, "sequence", 7), (2.5, "update", 640)],
    )
    def test_to_sequences(self, value: float, unit: str, sequences: float) -> None:
        assert self.RULER.to_sequences(value, unit) == sequences
        assert self.RULER.duration(value, unit) == Duration(sequences, "sequence")

    @pytest.mark.parametrize("unit", ["sample", "token"])
    def test_samples_and_tokens_stay(self, unit: str) -> None:
        assert self.RULER.duration(1000, unit) == Duration(1000, unit)
        with pytest.raises(ConfigError, match=f"unit '{unit}' cannot be expressed"):
            self.RULER.to_sequences(1000, unit)

    def test_refuses(self) -> None:
        with pytest.raises(ConfigError, match="epoch, iteration, update, sequence"):
            self.RULER.to_sequences(1, "step")
        with pytest.raises(ConfigError, match=r"a duration of 0 iteration\(s\)"):
            self.RULER.duration(0, "iteration")

    def test_state_round_trip(self) -> None:
        assert Ruler.from_state_dict(json.loads(json.dumps(self.RULER.state_dict()))) == self.RULER
