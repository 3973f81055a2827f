"""Which modules of the package four journeys enter: they are traced while they really happen.

    python -m tests.journeys [--json]    # the modules and their functions, in the order of their first call

A short training of the digits is resumed: its config is loaded, a batch made, a checkpoint saved and restored.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import unigen_ds
from unigen_ds import Runner, load_config
from unigen_ds.checkpoint import saver
from unigen_ds.runner.loop import runner as loop

PACKAGE = Path(unigen_ds.__file__).parent
Modules = dict[str, list[str]]
"""Module -> its functions that were called."""


@contextmanager
def tracing(modules: Modules) -> Iterator[None]:
    """Adds to ``modules`` what this thread calls inside; the collector, which closes old generators, does not run."""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)) and code.co_name != "<module>":
            names = modules.setdefault(str(Path(code.co_filename).relative_to(PACKAGE)), [])
            if code.co_name not in names and not code.co_name.startswith("<"):
                names.append(code.co_name)
        if before is not None:
            before(frame, event, _)

    gc.collect()
    gc.disable()
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)
        gc.enable()


def trace(call: Callable[..., Any], modules: Modules) -> Callable[..., Any]:
    """``call``, which adds what it calls to ``modules``."""

    def wrapper(*args: Any, **keywords: Any) -> Any:
        with tracing(modules):
            return call(*args, **keywords)

    return wrapper


def journeys(folder: Path) -> dict[str, Modules]:
    """The modules that each journey enters. ``folder`` is the work dir of the training."""
    overrides = {"work_dir": str(folder), "train_cfg.max_epochs": 1, "train_dataloader.num_workers": 0}
    load_config("unified_digits", overrides)  # imports
    config, record, save, whole_save, restore = (Modules() for _ in range(5))
    settings = trace(load_config, config)("unified_digits", overrides)

    runner = Runner.from_cfg(settings, max_updates=3)
    updates = iter(runner._parts.loader)
    next(updates)
    trace(next, record)(updates)

    runner = Runner.from_cfg(settings, max_updates=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "save", trace(saver.save, save))
        patch.setattr(Runner, "save_checkpoint", trace(Runner.save_checkpoint, whole_save))
        runner.train()
        patch.setattr(loop, "restore", trace(loop.restore, restore))
        Runner.from_cfg(load_config("unified_digits", {**overrides, "resume": True}), max_updates=4).train()
    return {
        "load_config": config,
        "a record on its way to a packed row": record,
        "a save, from the copy to the commit": save,
        "a save with what hooks do before and after it": whole_save,
        "a restore": restore,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        results = journeys(Path(temporary))
    if "--json" in sys.argv:
        print(json.dumps(results))
    else:
        for title, modules in results.items():
            print(
                f"{title}: {len(modules)} modules",
                *(f"    {name}: {', '.join(calls)}" for name, calls in modules.items()),
                sep="\n",
            )
