"""Runs the checks: ``Asked`` in, a list of results out. Starts no training, writes and locks nothing of the run.

In a job of several processes each makes the checks of its own machine, rank 0 all others; they meet once, over gloo.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from unittest import mock

import torch.distributed as td

from unigen_ds.checks.dry_run.checks import LOCAL, all_checks
from unigen_ds.checks.dry_run.context import Asked, Known, Unknown
from unigen_ds.checks.dry_run.result import Checked, problem, problems_of, unchecked
from unigen_ds.checks.resume import announced
from unigen_ds.core.errors import ConfigError
from unigen_ds.system import dist, log
from unigen_ds.system.machine import wrong_numbers

_JOIN_S = 300.0
"""How long the processes of a job wait for each other."""


def dry_run(asked: Asked) -> list[Checked] | None:
    """All results; None on a rank other than 0, whose results rank 0 has. Raises ``ConfigError`` for a check that there
    is not.
    """
    with mock.patch.dict(os.environ):  # checks set variables
        known = Known(asked, wrong_numbers(os.environ))
        for error in known.wrong_numbers:
            del os.environ[error.variable]
        own = [*_results(known, LOCAL)]
        checks = all_checks()  # with those of the modules that the config imports
        for name in asked.skip:
            if name not in checks:
                raise ConfigError(f"--skip {name}", allowed=", ".join(checks))
        if dist.env_world_size() > 1 and known.world_size == dist.env_world_size():
            gathered = _gathered(own)
            if dist.env_rank() != 0:
                return None
            own += gathered
        with announced(known.world_size, per_node=known.per_node):
            own += _results(known, (name for name in checks if name not in LOCAL))
    return own


def _results(known: Known, names: Iterable[str]) -> Iterator[Checked]:
    for name in names:
        results = [*_of_check(known, name)]
        new = [one for one in results if not (one.status == "problem" and _is_listed(known, name, one.text))]
        if results and not new:
            new = [unchecked("ended at a problem that is listed above")]
        yield from (replace(one, check=name) for one in new)


def _is_listed(known: Known, name: str, text: str) -> bool:
    """Whether an earlier check has the same problem: a check adds what it has found."""
    named = name != "paths" and any(path in text for path in known.paths)
    repeated = text in known.problems
    known.problems.add(text)
    return named or repeated


def _of_check(known: Known, name: str) -> Iterator[Checked]:
    """Whatever a check raises is one of its results."""
    if name in known.asked.skip:
        yield unchecked("left out (--skip)")
        return
    try:
        yield from all_checks()[name](known)
    except Unknown as missing:
        yield unchecked(f"needs {missing}")
    except Exception as error:  # of a user's own class, too: the other checks continue
        yield from problems_of(error)


def _gathered(own: list[Checked]) -> list[Checked]:
    """What other ranks have found on their machines, with their rank; on rank 0, else nothing. Collective."""
    if dist.env_rank() == 0:
        log.logger().warning(
            "Waits for the other %d process(es) of the job, at most %.0f s.", dist.env_world_size() - 1, _JOIN_S
        )
    try:
        td.init_process_group("gloo", timeout=timedelta(seconds=_JOIN_S))
    except Exception as error:  # of the network: many kinds
        text = (str(error).splitlines() or [""])[0]
        return [
            replace(problem(f"the processes could not join in {_JOIN_S:.0f} s: {text}",
                            remedy="see MASTER_ADDR and MASTER_PORT, and that all processes were started"), check="job")
        ]  # fmt: skip
    try:
        of_ranks = dist.gather_to_main((platform.node(), own)) or []
    finally:
        td.destroy_process_group()
    known = {(result.check, result.text) for result in own}
    others: list[Checked] = []
    for rank, (host, results) in enumerate(of_ranks):
        others += [
            replace(result, text=f"rank {rank} on {host}: {result.text}")
            for result in results
            if (result.check, result.text) not in known
        ]
    return others
