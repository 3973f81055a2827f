"""Talk to a model in a web page: ``python tools/app.py CKPT``; installed as ``unigen-app``. Needs the extra ``app``.

CKPT is a checkpoint of any layout, a work dir (the page has all of its checkpoints), or a published directory. With
several, two can be compared. The page offers what the model's family can do: answers to texts and pictures,
drawing, editing. It listens on this machine alone (127.0.0.1) unless --host names another address.

Exit status: 0 stopped, 1 the model cannot be loaded, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

if not __package__:
    import _path  # noqa: F401 - a script runs from a checkout without installation

from unigen_ds.core.choices import DTYPE_NAMES
from unigen_ds.system import log
from unigen_ds.system.pipes import add_source, ends_quietly, tool_parser


def parser() -> argparse.ArgumentParser:
    p = tool_parser("unigen-app", __doc__)
    p.add_argument("models", type=Path, nargs="+", metavar="CKPT")
    p.add_argument("--host", default="127.0.0.1", help="address to listen on; default: 127.0.0.1; 0.0.0.0: all")
    p.add_argument("--port", type=int, default=7860, help="default: 7860")
    p.add_argument(
        "--raw", action="store_true", help="begin with the weights themselves instead of their average (EMA)"
    )
    add_source(p)
    p.add_argument("--device", help="default: cuda if available, otherwise cpu")
    p.add_argument("--dtype", choices=DTYPE_NAMES, help="default: bf16 on a GPU, fp32 on a CPU")
    return p


@ends_quietly
def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    log.setup(rank=0)
    from unigen_ds.app.page import serve_page  # after parsing: --help and a wrong argument do not wait for torch
    from unigen_ds.runner.open.trained import source_of

    names = ("host", "port", "raw", "device", "dtype")
    options = {name: getattr(arguments, name) for name in names}
    with contextlib.suppress(KeyboardInterrupt):
        serve_page(arguments.models, **options, **source_of(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
