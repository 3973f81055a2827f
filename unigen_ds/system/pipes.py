"""What all tools share: their parser, the options of several, and how they end: in one line, or quietly in a pipe."""

from __future__ import annotations

import argparse
import functools
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from unigen_ds.core.choices import BATCH_CHOICES, DATA_CHOICES, SHIPPED_NAMES
from unigen_ds.core.errors import UnigenError

READER_GONE = 141
"""Exit status where nobody reads the output any more: what a shell reports of a program that SIGPIPE ended."""
SIGNAL_STATUS = 143
"""Exit status of a training that can continue: ``scripts/train_slurm.sh`` puts the job back into the queue."""


def end_start(number: int, frame: FrameType | None) -> None:
    """Handler of SIGUSR1 before the first update: end at once with SIGTERM's status, and let the other ranks know."""
    error = UnigenError(f"{signal.Signals(number).name} received outside of the training: there is nothing to save")
    error.exit_status = SIGNAL_STATUS
    os.write(2, f"{error}\n".encode())
    if (module := sys.modules.get("unigen_ds.system.rank_errors")) is not None:
        module.explain(error)
    os._exit(SIGNAL_STATUS)


def ends_quietly(main: Callable[..., int]) -> Callable[..., int]:
    """Decorator of a tool's ``main``: an error is one line and its exit status, and no traceback for a closed pipe."""

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        try:
            try:
                return main(argv)
            except UnigenError as error:
                print(f"error: {error}", file=sys.stderr)
                return error.exit_status
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            poll = select.poll()
            for stream in (sys.stdout, sys.stderr):
                poll.register(stream.fileno(), select.POLLOUT)
            closed_pipes = [number for number, event in poll.poll(0) if event & select.POLLERR]
            if not closed_pipes:  # another pipe, which is an error
                raise
            for number in closed_pipes:  # Python writes what is left when it ends
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            return READER_GONE

    return run


def tool_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The parser of a tool: ``doc`` is its module's docstring."""
    return argparse.ArgumentParser(prog=name, description=doc, formatter_class=argparse.RawTextHelpFormatter)


def add_config(p: argparse.ArgumentParser, *, backend: bool = False, resume: bool = False) -> None:
    """The config and ``--cfg-options``; ``--backend``; and the options of a run that may be resumed."""
    p.add_argument("config", help=f"a config file, or the name of a shipped config: {SHIPPED_NAMES}")
    p.add_argument(
        "--cfg-options", nargs="+", action="extend", default=[], metavar="K=V", help="override config values"
    )
    if backend:
        p.add_argument("--backend", help="single | deepspeed[:zero1|zero2|zero3|...|FILE.json] | fsdp[:FULL_SHARD|...]")
    if resume:
        p.add_argument("--work-dir", help="output folder of the run; default work_dirs/<config name>")
        p.add_argument("--checkpoint-dir", metavar="DIR", help="folder of the checkpoints; default: the work dir")
        p.add_argument("--base", metavar="DIR",
                       help="of adapters (lora): folder of the base's files, in place of model.pretrained")  # fmt: skip
        p.add_argument("--on-batch-change", choices=BATCH_CHOICES,
                       help="how the learning rate changes when a resume has another effective batch\n"
                       "(default: refuse)")  # fmt: skip
        p.add_argument("--on-data-change", choices=DATA_CHOICES,
                       help="how a resume treats changed data (default: refuse)")  # fmt: skip


def add_source(p: argparse.ArgumentParser) -> None:
    """How a checkpoint is opened: ``source_of``."""
    p.add_argument("--tag", help="name of the checkpoint's folder below the first argument")
    p.add_argument("--config", help="config of the training, if the checkpoint does not contain it")
    p.add_argument("--base", metavar="DIR", help="of adapters: the folder of the base's files")
    p.add_argument("--allow-custom-imports", action="store_true",
                   help="import (and so execute) the modules that the checkpoint's config names")  # fmt: skip


def sequence_range(text: str) -> tuple[int, int]:
    """``0:12`` -> (0, 12)."""
    first, separator, last = text.partition(":")
    if not (separator and first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range: give A:B with A < B, for example 0:12")
    return int(first), int(last)


# Sizes and shares as a command line has them: ``80GiB``, ``5%``.


def size(text: str) -> int:
    """``80GiB`` -> bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(?:([KMGT])(I?)B)?", text.strip().upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: 80GiB, 24GB, 512MiB, or a number of bytes")
    number, power, binary = match.groups()
    return round(float(number) * (1024 if binary else 1000) ** (1 + "KMGT".index(power) if power else 0))


def share(text: str) -> float:
    """``5%`` -> 0.05."""
    try:
        value = float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: 5%, or a number from 0 to below 1")
    return value


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: a whole number of at least 1")
    return int(text)
