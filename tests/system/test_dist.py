"""How a process ends."""

from __future__ import annotations

import os
import sys

import pytest

from tests.support.processes import run
from unigen_ds.core.errors import ConfigError
from unigen_ds.system import dist

CODE = """
import atexit, threading, time
from unigen_ds.system import dist
atexit.register(print, "registered before", flush=True)
threading.Thread(target=time.sleep, args=(2,)).start()  # an ordinary exit would wait for it
dist.leave(3)
print("still here")
"""


@pytest.mark.parametrize(("world", "status", "message"), [("2", 3, ""), ("1", 0, "still here")])
def test_one_of_several_processes_leaves_at_once(world: str, status: int, message: str) -> None:
    variables = {"WORLD_SIZE": world, "RANK": "0", "LOCAL_RANK": "0"}
    process = run([sys.executable, "-c", CODE], env={**os.environ, **variables}, text=True)
    assert process.returncode == status, process.stderr
    assert process.stdout.split("\n") == ["registered before", ""] if world == "2" else message in process.stdout


def test_a_variable_of_a_launcher_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="environment variable WORLD_SIZE is 'two'"):
        dist.env_world_size()
