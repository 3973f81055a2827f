"""How far a run is: geometry, progress, durations, and the ruler that turns user units into data."""

from __future__ import annotations

import itertools

import pytest

from unigen_ds.core.errors import ConfigError
from unigen_ds.core.progress import Duration, Geometry, Progress, Ruler

BIG = Geometry(batch_size=64, accumulative_counts=2, dp_size=2)


def run(geometry: Geometry, updates: int, start: Progress | None = None) -> list[Progress]:
    """Progress before the first and after every update."""
    history = [start or Progress()]
    for _ in range(updates):
        size = geometry.global_batch_size
        history.append(history[-1].advance(sequences=size, samples=size, tokens=10 * size, epoch=0, applied=True))
    return history


class TestGeometry:
    def test_100_000_samples_on_two_gpus(self) -> None:
        """64 x 2 accumulated twice: effective batch 256, 781 iterations an epoch, 6,248 iterations = 3,124 updates."""
        assert BIG.sequences_per_iteration == 128 and BIG.global_batch_size == 256
        assert str(BIG) == "64 per device x 2 process(es) x 2 accumulated = 256"
        assert Progress(sequences=15).iteration(Geometry(8)) == 1
        iterations_per_epoch = 100_000 // BIG.sequences_per_iteration
        assert iterations_per_epoch == 781
        ruler = Ruler(BIG, iterations_per_epoch * BIG.sequences_per_iteration)
        assert ruler.sequences_per_epoch == 99_968
        total = ruler.to_sequences(8, "epoch")
        assert total / BIG.sequences_per_iteration == 6248 and total / BIG.global_batch_size == 3124
        end = run(BIG, 3124)[-1]
        assert end.sequences == total and end.iteration(BIG) == 6248 and end.updates == 3124
        assert Duration(total).reached(end) and not Duration(total).reached(run(BIG, 3123)[-1])

    @pytest.mark.parametrize("value", [0, 2.0, True])
    @pytest.mark.parametrize("field", ["batch_size", "accumulative_counts", "dp_size"])
    def test_refuses(self, field: str, value) -> None:
        with pytest.raises(ConfigError, match=f"{field} is {value!r}"):
            Geometry(**{"batch_size": 1, field: value})


class TestDuration:
    def test_every_is_crossing_safe(self) -> None:
        """interval=100 iterations, accumulation 3: it fires at 102, 201, 300, 402, ...: once per multiple."""
        geometry = Geometry(batch_size=4, accumulative_counts=3)
        interval = Ruler(geometry, 4000).duration(100, "iteration")
        history = run(geometry, 200)
        iterations = [b.iteration(geometry) for a, b in itertools.pairwise(history) if interval.every(b, a)]
        assert iterations == [102, 201, 300, 402, 501, 600]

    def test_every_survives_a_change_of_geometry(self) -> None:
        """100 iterations of the first geometry stay 800 sequences, although the new update jumps over the multiple."""
        interval = Ruler(Geometry(8), 8000).duration(100, "iteration")
        before = run(Geometry(8), 95)[-1]
        history = run(Geometry(56), 30, start=before)
        positions = [b.sequences for a, b in itertools.pairwise(history) if interval.every(b, a)]
        assert positions == [816, 1600, 2440]


class TestRuler:
    RULER = Ruler(BIG, 99_968)

    def test_refuses(self) -> None:
        with pytest.raises(ConfigError, match="epoch, iteration, update, sequence"):
            self.RULER.to_sequences(1, "step")
        with pytest.raises(ConfigError, match=r"a duration of 0 iteration\(s\)"):
            self.RULER.duration(0, "iteration")

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
