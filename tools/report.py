"""Write a report of one run or several: ``python tools/report.py WORK_DIR [WORK_DIR ...] [--out FILE]``; installed as
``unigen-report``.

One HTML file that needs no network: curves over all resumes, lost time and goodput, validation, previews, checkpoints,
findings, environment and config; for several runs their key numbers and the differences of their configs (their curves:
tools/plot_run.py). Can be called while a run continues. Files that are missing or damaged are named in the report.
Exit status: 0 done, 1 a folder that does not exist or is no run, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:
    import _path  # noqa: F401 - a script runs from a checkout without installation

from unigen_ds.system.pipes import ends_quietly


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="unigen-report", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    p.add_argument("work_dirs", type=Path, nargs="+", metavar="WORK_DIR", help="the output folder of a run")
    p.add_argument("--out", type=Path, metavar="FILE",
                   help="the HTML file; default WORK_DIR/report.html of the first run, with several runs report.html\n"
                   "in the present folder")  # fmt: skip
    p.add_argument("--max-pictures-mib", type=float, default=16.0, metavar="N",
                   help="most MiB of pictures in the file (default 16);\n"
                   "the report names how many are left out")  # fmt: skip
    return p


@ends_quietly
def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    from unigen_ds.report import write_report  # after parsing: --help does not wait for torch

    folders: list[Path] = arguments.work_dirs
    out: Path = arguments.out or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    if not 0 <= arguments.max_pictures_mib < 2**20:
        print("error: --max-pictures-mib; allowed: 0 or more", file=sys.stderr)
        return 2
    print(write_report(folders, out, max_pictures=int(arguments.max_pictures_mib * 2**20)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
