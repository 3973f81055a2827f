"""Train a model: ``python tools/train.py CONFIG [--resume [CKPT]] ...``; installed as ``unigen-train``.

``--dry-run`` checks everything that can fail before the first update, and trains nothing (docs/dry_run.md).

Exit status: 0 done, 1 another error (an unexpected one: with a traceback), 2 wrong usage or config, 3 the resume is
blocked, 4 the last save failed, 143 stopped by a signal or before a time limit, after saving.

``--dry-run`` ends with 0 where it finds no problem, with 1 where it does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from typing import Any

if not __package__:
    import _path  # noqa: F401 - a script runs from a checkout without installation

from unigen_ds.core.choices import AUTO, LAUNCHERS
from unigen_ds.core.errors import ConfigError, UnigenError
from unigen_ds.system import machine
from unigen_ds.system.log import quiet_libraries
from unigen_ds.system.pipes import SIGNAL_STATUS, add_config, end_start, ends_quietly, positive, tool_parser


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = tool_parser("unigen-train", __doc__)
    add_config(p, backend=True, resume=True)
    p.add_argument("--resume", nargs="?", const=AUTO, default=None, metavar="CKPT",
                   help="continue from the newest valid checkpoint of the work dir, or from CKPT;\n"
                   "if there is none yet, start as the config states")  # fmt: skip
    p.add_argument("--skip-sequences", action="append", metavar="A:B",
                   help="leave sequences A .. B-1 of the run out, also in later resumes; may be repeated")  # fmt: skip
    p.add_argument("--load-from", metavar="CKPT", help="load only the weights of CKPT and start a new run")
    p.add_argument("--print-config", action="store_true",
                   help="print every key with its value and its origin, without training")  # fmt: skip
    p.add_argument("--seed", type=int, help="randomness.seed")
    p.add_argument("--launcher", choices=LAUNCHERS, help="how the processes were started")
    p.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    p.add_argument("--max-updates", type=int, metavar="N",
                   help="stop after N updates of the run; the length of the schedule does not change")  # fmt: skip
    p.add_argument("--profile", type=positive, metavar="N",
                   help="profile N updates after three others: a trace of each rank, and a table\n"
                   "of an update's parts, in WORK_DIR/profile (docs/report.md)")  # fmt: skip
    dry = p.add_argument_group("dry run")
    dry.add_argument("--dry-run", action="store_true", help="list all problems that a start would have; train nothing")
    dry.add_argument("--world-size", type=positive, metavar="N",
                     help="processes to plan for (default: those started, else world_size of the config)")  # fmt: skip
    dry.add_argument("--per-node", type=positive, metavar="N", help="of them on a node (default: 8, or all if fewer)")
    dry.add_argument("--batches", type=positive, metavar="N", dest="num_batches",
                     help="micro-batches of each rank to make (default 100)")  # fmt: skip
    dry.add_argument("--skip", nargs="+", action="extend", metavar="CHECK", help="checks to leave out")
    dry.add_argument("--json", action="store_true", help="print one JSON object")
    return p


DRY = ("world_size", "per_node", "num_batches", "skip")
"""Options that belong to ``--dry-run``: fields of ``checks.dry_run.known.Options``."""


@ends_quietly
def main(argv: list[str] | None = None) -> int:
    p = parser()
    arguments = p.parse_args(argv)
    rank = machine.env_number("RANK", machine.env_number("SLURM_PROCID", 0))
    quiet_libraries(rank)
    if argv is None:  # as a command
        signal.signal(signal.SIGUSR1, end_start)
    options = [name for name in DRY if getattr(arguments, name) is not None] + ["json"] * arguments.json
    if options and not arguments.dry_run:
        p.error(f"--{options[0].removeprefix('num_').replace('_', '-')} belongs to --dry-run")
    try:
        machine.check_packages()
    except ConfigError as error:
        reported = False
        if not arguments.dry_run and machine.env_number("WORLD_SIZE", 1) > 1:
            with contextlib.suppress(ImportError):  # other ranks may have these packages
                from unigen_ds.system import rank_errors

                reported = rank_errors.is_reported(rank_errors.explain(error, first=True))
        if not reported:
            print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    if arguments.dry_run:
        return print_dry_run(arguments, rank=rank)
    from unigen_ds.backends.memory import is_out_of_memory
    from unigen_ds.checks.resume import advice
    from unigen_ds.config.section import Component
    from unigen_ds.hooks.log.timer import ProfileHook
    from unigen_ds.runner import train_config
    from unigen_ds.runner.settings.tree import Settings, config_lines, read_config
    from unigen_ds.system import dist, rank_errors  # after parsing: --help does not wait for torch

    failed = True
    try:
        config = read_config(arguments.config, changes_of(arguments))
        settings = Settings.from_config(config)
        if arguments.resume == AUTO:
            settings = settings.with_resume(AUTO)
        if arguments.profile is not None:
            hook = Component(ProfileHook, {"num_updates": arguments.profile})  # records of the run keep its config
            settings = settings.model_copy(update={"custom_hooks": (*settings.custom_hooks, hook)})
        if arguments.print_config:
            print("\n".join(config_lines(settings, config)))
            return 0
        reason = train_config(settings, max_updates=arguments.max_updates)
        failed = False
    except Exception as error:
        if is_out_of_memory(error):
            print(advice(settings, sys.argv[1:] if argv is None else argv), file=sys.stderr)
        cause = rank_errors.explain(error, first=True)
        rank_errors.for_torchrun(cause)
        if not isinstance(cause, UnigenError):
            raise
        if not rank_errors.is_reported(cause):
            rank_errors.say(cause)
        status = cause.exit_status
    else:
        status = SIGNAL_STATUS if reason in ("signal", "time limit") else 0
    finally:
        dist.shutdown(after_error=failed)
    if argv is None:  # as a command
        dist.leave(status)
    return status


def print_dry_run(arguments: argparse.Namespace, *, rank: int) -> int:
    """Print the results of all checks, which rank 0 makes. Returns the exit status."""
    if rank != 0:
        return 0
    from unigen_ds.checks.dry_run.dry_run import dry_run, lines
    from unigen_ds.checks.dry_run.known import Options
    from unigen_ds.system import log

    log.setup(rank=0, level="WARNING")
    options = {name: value for name in DRY if (value := getattr(arguments, name)) is not None}
    auto = arguments.resume == AUTO
    try:
        results = dry_run(Options(arguments.config, changes_of(arguments), auto, **options))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    problems = any(result.status == "problem" for result in results)
    if arguments.json:
        print(json.dumps({"problems": problems, "results": [vars(result) for result in results]}, indent=1))
    else:
        print("\n".join(lines(results, title=f"Dry run of {arguments.config}")))
    return int(problems)


def changes_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Changes of the config by the command line."""
    from unigen_ds.config.overrides import overrides_of

    overrides = overrides_of(arguments, checkpoint=None if arguments.resume == AUTO else arguments.resume)
    return overrides if arguments.seed is None else {**overrides, "randomness.seed": arguments.seed}


if __name__ == "__main__":
    sys.exit(main())
