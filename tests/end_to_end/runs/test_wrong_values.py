"""Whatever stands at any place of a config: it is built, or an error of ours says what is wrong. No other exception."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_config
from unigen_ds.core.errors import UnigenError
from unigen_ds.runner import Runner

DELETED = object()
VALUES = (None, "x", -1, [], DELETED)
HOOKS = [{"type": "EMAHook", "momentum": 0.01}]


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key and every component of a list, at any depth."""
    inner = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, (list, tuple)) else ()
    for key, value in inner:
        if path or key != "work_dir":
            if isinstance(node, Mapping):
                yield (*path, key)
            yield from places(value, (*path, key))


EVERYWHERE = list(places(tiny_config(Path("run"), Path("data"), custom_hooks=HOOKS).to_dict()))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Any:
    return tiny_config(tmp_path_factory.mktemp("wrong") / "run", digits, custom_hooks=HOOKS)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder named ``x`` is written where the process stands."""
    monkeypatch.chdir(tmp_path)


def change_value(config: Any, path: tuple[Any, ...], value: Any) -> Any:
    result = copy.deepcopy(config)
    node = result._cfg_dict
    for key in path[:-1]:
        node = node[key]
    if value is DELETED:
        del node[path[-1]]
    else:
        node[path[-1]] = copy.deepcopy(value)
    return result


@pytest.mark.parametrize("path", EVERYWHERE, ids=lambda path: ".".join(map(str, path)))
def test_a_wrong_value_is_an_error_of_ours(config: Any, path: tuple[Any, ...]) -> None:
    count = 0
    for value in VALUES:
        try:
            Runner.from_cfg(change_value(config, path, value), max_updates=1)
        except UnigenError as error:
            assert str(error)
            count += 1
    assert count, "not one of these values was looked at"


def test_an_empty_default_hook_is_the_default_and_none_removes_it(config: Any) -> None:
    empty = Runner.from_cfg(change_value(config, ("default_hooks", "checkpoint"), {}), max_updates=1)
    none = Runner.from_cfg(change_value(config, ("default_hooks", "checkpoint"), None), max_updates=1)
    assert [hook.name for hook in empty.hooks].count("checkpoint") == 1
    assert [hook.name for hook in none.hooks].count("checkpoint") == 0
