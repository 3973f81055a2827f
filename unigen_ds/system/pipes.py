"""How a tool ends: with an error in one line, and quietly where the program that reads its output has ended first
(``tools/inspect_data.py CONFIG | head``).
"""

from __future__ import annotations

import functools
import os
import select
import sys
from collections.abc import Callable, Sequence

from unigen_ds.core.errors import UnigenError

READER_GONE = 141
"""Exit status where nobody reads the output any more: what a shell reports of a program that SIGPIPE ended."""


def ends_quietly(main: Callable[..., int]) -> Callable[..., int]:
    """Decorator of a tool's ``main``: an error of the project is one line and its exit status; where the reader of the
    output has gone, the tool ends without a traceback.
    """

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
            gone = [number for number, event in poll.poll(0) if event & select.POLLERR]
            if not gone:  # another pipe, which is an error
                raise
            for number in gone:  # Python writes what is left when it ends
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            return READER_GONE

    return run
