"""Runs the checks: ``Asked`` in, a list of results out. Starts no training, writes and locks nothing of the run.

In a job of several processes rank 0 makes all checks, on its machine.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from unittest import mock

from unigen_ds.checks.dry_run.checks import BEFORE_CONFIG, CHECKS, Check
from unigen_ds.checks.dry_run.known import Asked, Checked, Known, Unknown, problems_of, unchecked
from unigen_ds.checks.resume import as_launched
from unigen_ds.config.registry import DRY_RUN_CHECKS
from unigen_ds.core.errors import ConfigError
from unigen_ds.runner.settings.tree import read_config


def dry_run(asked: Asked) -> list[Checked]:
    """All results. Raises ``ConfigError`` for a config that cannot be read and a check that there is not."""
    known = Known(asked, read_config(asked.config, asked.overrides))
    with mock.patch.dict(os.environ):  # checks set variables
        results = [*_results(known, CHECKS, BEFORE_CONFIG)]
        with as_launched(known.world_size, per_node=known.per_node):
            results += _results(known, CHECKS, ["config"])
            own = DRY_RUN_CHECKS.module_dict  # with those of the modules that the config imports
            if both := sorted(own.keys() & CHECKS.keys()):
                remedy = "register_module(name='...')"
                raise ConfigError(f"DRY_RUN_CHECKS has {', '.join(both)}, a name in use", remedy=remedy)
            checks = {**CHECKS, **own}
            if unknown := [name for name in asked.skip if name not in checks]:
                raise ConfigError(f"--skip {unknown[0]}", allowed=", ".join(checks))
            results += _results(known, checks, [name for name in checks if name not in (*BEFORE_CONFIG, "config")])
    listed: list[Checked] = []
    for result in results:  # a problem that an earlier check has found is not one again
        again = result.check != "paths" and any(path in result.text for path in known.missing_paths)
        if result.status == "problem" and (again or result.text in [one.text for one in listed]):
            result = replace(unchecked("ended at a problem that is listed above"), check=result.check)
        listed.append(result)
    return listed


def _results(known: Known, checks: Mapping[str, Check], names: Iterable[str]) -> Iterator[Checked]:
    """Results of the checks ``names``. Whatever a check raises is one of them."""
    for name in names:
        results: list[Checked] = []
        try:
            if name in known.asked.skip:
                results.append(unchecked("left out (--skip)"))
            else:
                for result in checks[name](known):
                    results.append(result)  # also of a check that raises later
        except Unknown as missing:
            results.append(unchecked(f"needs {missing}"))
        except Exception as error:  # of a user's own class, too: the other checks continue
            results += problems_of(error)
        yield from (replace(result, check=name) for result in results)


def lines(results: Sequence[Checked], *, title: str) -> Iterator[str]:
    """As text: all results, then the problems counted."""
    yield title
    width = max(len(result.check) for result in results)
    for result in results:
        first, *rest = result.text.splitlines()
        yield f"{result.status:<11}  {result.check:<{width}}  {first}"
        yield from (" " * (15 + width) + line for line in rest)
    number = Counter(result.status for result in results)
    yield (
        f"{number['problem']} problem(s), {number['warning']} warning(s), {number['not checked']} not checked."
        " The work dir is as it was."
    )
