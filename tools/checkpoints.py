"""Inspect checkpoints: ``python tools/checkpoints.py list|verify|show|best DIR``; installed as ``unigen-checkpoints``.

list    a table of all checkpoints of a work dir
verify  read every byte and compare it with the hashes of the save
show    the manifest of a checkpoint (of a work dir: of the newest one) as text
best    path, metric, value and update of the best checkpoint of a work dir

DIR is a work dir or one checkpoint. Exit status: 0 done, 1 a checkpoint is damaged or none exists, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:
    import _path  # noqa: F401 - a script runs from a checkout without installation

from unigen_ds.system.pipes import ends_quietly, tool_parser


def parser() -> argparse.ArgumentParser:
    p = tool_parser("unigen-checkpoints", __doc__)
    p.add_argument("action", choices=("list", "verify", "show", "best"))
    p.add_argument("directory", type=Path, metavar="DIR", help="a work dir, or one checkpoint")
    return p


@ends_quietly
def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    from unigen_ds.checkpoint import listing  # after parsing: --help does not wait for its imports

    if arguments.action != "verify":
        lines = {"list": listing.table, "show": listing.describe_checkpoint, "best": listing.best}[arguments.action]
        print("\n".join(lines(arguments.directory)))
        return 0
    problems = []
    for checkpoint in listing.find_checkpoints(arguments.directory):
        problems.append(listing.problems(checkpoint))
        print(f"{checkpoint.path.name}  {problems[-1] or 'complete, every hash agrees'}", flush=True)
    return 1 if any(problems) else 0


if __name__ == "__main__":
    sys.exit(main())
