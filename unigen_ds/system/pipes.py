"""How a tool ends: with an error in one line, and quietly where the program that reads its output has ended first
(``tools/inspect_data.py CONFIG | head``).
"""

from __future__ import annotations

import functools
import os
import select
import sys
from collections.abc import Callable, Sequence
from typing import Any

from unigen_ds.core.errors import UnigenError

READER_GONE = 141
"""Exit status where nobody reads the output any more: what a shell reports of a program that SIGPIPE ended."""
Main = Callable[..., int]


def ends_quietly(main: Main) -> Main:
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
            gone = [stream for stream in (sys.stdout, sys.stderr) if _reader_gone(stream)]
            if not gone:  # another pipe, which is an error
                raise
            for stream in gone:  # Python writes what is left when it ends
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            return READER_GONE

    return run


def _reader_gone(stream: Any) -> bool:
    try:
        number = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))
