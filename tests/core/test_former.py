"""Module paths and component names of former versions still work, and the log says what they are now."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys

import pytest

from unigen_ds.core import former, log
from unigen_ds.core.registry import REGISTRIES


def found(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("module", former.MODULES)
def test_a_former_module_has_the_names_of_the_present_one(module: str) -> None:
    old, new = importlib.import_module(module), importlib.import_module(former.MODULES[module])
    assert old is not new, "a module that exists needs no row"
    own = [name for name, value in vars(new).items() if getattr(value, "__module__", None) == new.__name__]
    assert all(getattr(old, name) is getattr(new, name) for name in own)
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'nothing'"):
        _ = old.nothing


@pytest.mark.parametrize("path", former.NAMES)
def test_a_former_name_is_the_present_one(path: str) -> None:
    assert path.rpartition(".")[0] in former.MODULES, "the name's module needs a row, too"
    assert found(path) is found(former.NAMES[path])


@pytest.mark.parametrize("path", former.MOVED)
def test_a_name_that_has_left_its_module_is_still_found_there(path: str) -> None:
    assert found(path) is found(f"{former.MOVED[path]}.{path.rpartition('.')[2]}")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        found(f"{path.rpartition('.')[0]}.nothing")


@pytest.mark.parametrize("name", former.COMPONENTS)
def test_a_former_component_is_registered_under_its_present_name(name: str) -> None:
    cls = former.component(name, where="w")
    assert cls is found(former.COMPONENTS[name]) and cls is not None
    assert any(cls is kind for registry in REGISTRIES for kind in registry.module_dict.values())


def test_a_former_import_is_one_line_in_the_log() -> None:
    """In a process of its own: a module is made once."""
    code = (
        "from unigen_ds.core import log; log.setup(rank=0)\n"
        "from unigen_ds.hooks.writers import SafeWriter, WandbVisBackend\n"
        "import unigen_ds.hooks.writers as again\n"
        "from unigen_ds.tracking import wandb, writer\n"
        "assert SafeWriter is writer.SafeWriter is again.SafeWriter and WandbVisBackend is wandb.WandbVisBackend"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "is now" in line]
    assert len(said) == 1 and "unigen_ds.hooks.writers is now unigen_ds.tracking.writer" in said[0], done.stderr


def test_a_path_that_never_was_is_no_module() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"unigen_ds\.hooks\.nothing"):
        importlib.import_module("unigen_ds.hooks.nothing")


def test_a_package_of_which_nothing_is_left_still_leads_to_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(former, "MODULES", {"unigen_ds.gone.deeper.thing": "unigen_ds.core.errors"})
    for name in ("unigen_ds.gone", "unigen_ds.gone.deeper", "unigen_ds.gone.deeper.thing"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    from unigen_ds.core.errors import ConfigError

    assert found("unigen_ds.gone.deeper.thing.ConfigError") is ConfigError
    for name in ("unigen_ds.gone", "unigen_ds.gone.deeper", "unigen_ds.gone.deeper.thing"):
        sys.modules.pop(name)


def test_what_is_noticed_before_the_log_is_set_up_is_in_it(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_waiting", {})
    monkeypatch.setattr(log, "_shown", set())
    own = logging.getLogger("test_former")
    monkeypatch.setattr(log, "NAME", own.name)
    path = tmp_path_factory.mktemp("log") / "train.log"
    log.notice("first")
    log.notice("first")
    log.setup(rank=0, log_file=path)
    log.notice("second")
    log.notice("second")
    for handler in [*own.handlers]:
        own.removeHandler(handler)
        handler.close()
    lines = [line.split(" ", 2)[2] for line in path.read_text().splitlines()]
    assert [line.split(" ")[-1] for line in lines] == ["first", "second"]
