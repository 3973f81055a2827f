"""The time of a start: of the whole process for a command, from building on for everything else."""

from __future__ import annotations

import time

import psutil
import pytest

from unigen_ds.core import startup


def test_the_age_of_a_process_is_that_of_the_system() -> None:
    age = startup.process_age()
    if age is None:
        pytest.skip("no /proc")
    assert age == pytest.approx(time.time() - psutil.Process().create_time(), abs=1.5)


def test_a_start_is_counted_once() -> None:
    startup.seconds()
    assert startup.seconds() is None
    startup.begin()
    time.sleep(0.02)
    assert 0.02 <= (startup.seconds() or 0) < 5
    startup.begin(whole_process=True)
    startup.begin()
    whole, age = startup.seconds(), startup.process_age()
    assert whole is not None and (age is None or whole == pytest.approx(age, abs=1.0))
    startup.begin()
    assert (startup.seconds() or 0) < 1.0
