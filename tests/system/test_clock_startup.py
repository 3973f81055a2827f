"""The time of a start: of the whole process for a command, from building on for everything else."""

from __future__ import annotations

import time

import psutil
import pytest

from unigen_ds.system import clock


def test_the_age_of_a_process_is_that_of_the_system() -> None:
    age = clock.process_age()
    if age is None:
        pytest.skip("no /proc")
    assert age == pytest.approx(time.time() - psutil.Process().create_time(), abs=1.5)


def test_a_start_is_counted_once() -> None:
    clock.seconds()
    assert clock.seconds() is None
    clock.begin()
    time.sleep(0.02)
    assert 0.02 <= (clock.seconds() or 0) < 5
    clock.begin(whole_process=True)
    clock.begin()
    whole, age = clock.seconds(), clock.process_age()
    assert whole is not None and (age is None or whole == pytest.approx(age, abs=1.0))
    clock.begin()
    assert (clock.seconds() or 0) < 1.0
