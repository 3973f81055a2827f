"""Runs the checks: ``Asked`` in, a list of results out. Starts no training, writes and locks nothing of the run.

In a job of several processes each makes the checks of its own machine, rank 0 all others; they meet once, over gloo.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from unittest import mock

import torch.distributed as td

from unigen_ds.checks.dry_run.checks import LOCAL, all_checks
from unigen_ds.checks.dry_run.known import Asked, Checked, Known, Unknown, problem, problems_of, unchecked
from unigen_ds.checks.resume import as_launched
from unigen_ds.core.errors import ConfigError
from unigen_ds.system import dist, log

_JOIN_S = 300.0
"""How long the processes of a job wait for each other."""


def dry_run(asked: Asked) -> list[Checked] | None:
    """All results; None on a rank other than 0, whose results rank 0 has. Raises ``ConfigError`` for a check that there
    is not.
    """
    with mock.patch.dict(os.environ):  # checks set variables
        known = Known(asked)
        own = [*_results(known, LOCAL)]
        checks = all_checks()  # with those of the modules that the config imports
        if unknown := [name for name in asked.skip if name not in checks]:
            raise ConfigError(f"--skip {unknown[0]}", allowed=", ".join(checks))
        if dist.env_world_size() > 1 and known.world_size == dist.env_world_size():
            gathered = _gather_from_ranks(own)
            if dist.env_rank() != 0:
                return None
            own += gathered
        with as_launched(known.world_size, per_node=known.per_node):
            own += _results(known, (name for name in checks if name not in LOCAL))
    return own


def _results(known: Known, names: Iterable[str]) -> Iterator[Checked]:
    """Results of checks. Whatever a check raises is one of them; a problem that an earlier one has found is not."""
    for name in names:
        results: list[Checked] = []
        try:
            results += [unchecked("left out (--skip)")] if name in known.asked.skip else ()
            for result in () if name in known.asked.skip else all_checks()[name](known):
                results.append(result)  # also of a check that raises later
        except Unknown as missing:
            results.append(unchecked(f"needs {missing}"))
        except Exception as error:  # of a user's own class, too: the other checks continue
            results += problems_of(error)
        new = [one for one in results if one.status != "problem" or not _is_listed(known, name, one.text)]
        if results and not new:
            new = [unchecked("ended at a problem that is listed above")]
        yield from (replace(one, check=name) for one in new)


def _is_listed(known: Known, name: str, text: str) -> bool:
    is_listed = text in known.problems or (name != "paths" and any(path in text for path in known.missing_paths))
    known.problems.add(text)
    return is_listed


def _gather_from_ranks(own: list[Checked]) -> list[Checked]:
    """What other ranks have found on their machines, with their rank; on rank 0, else nothing. Collective."""
    if dist.env_rank() == 0:
        others = dist.env_world_size() - 1
        log.logger().warning("Waits for the other %d process(es) of the job, at most %.0f s.", others, _JOIN_S)
    try:
        td.init_process_group("gloo", timeout=timedelta(seconds=_JOIN_S))
    except Exception as error:  # of the network: many kinds
        text = f"the processes could not join in {_JOIN_S:.0f} s: {(str(error).splitlines() or [''])[0]}"
        remedy = "see MASTER_ADDR and MASTER_PORT, and that all processes were started"
        return [replace(problem(text, remedy=remedy), check="job")]
    try:
        of_ranks = dist.gather_to_main((platform.node(), own)) or []
    finally:
        td.destroy_process_group()
    listed = {(result.check, result.text) for result in own}
    return [
        replace(result, text=f"rank {rank} on {host}: {result.text}")
        for rank, (host, results) in enumerate(of_ranks)
        for result in results
        if (result.check, result.text) not in listed
    ]


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
