"""Write a report of one run or several: ``python tools/report.py WORK_DIR [WORK_DIR ...] [--out FILE]``; installed as
``unigen-report``.

One HTML file that needs no network: curves over all resumes, lost time and goodput, validation, previews, checkpoints,
findings, environment and config; for several runs their key numbers and the differences of their configs. Can be called
while a run continues. Files that are missing or damaged are named in the report.
``--serve`` shows the same page in a browser, on 127.0.0.1 alone, and renews it while the run continues, until Ctrl-C.

Exit status: 0 done, 1 a folder that does not exist or is no run, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:
    import _path  # noqa: F401 - a script runs from a checkout without installation

from unigen_ds.system.pipes import ends_quietly, tool_parser


def parser() -> argparse.ArgumentParser:
    p = tool_parser("unigen-report", __doc__)
    p.add_argument("work_dirs", type=Path, nargs="+", metavar="WORK_DIR", help="the output folder of a run")
    p.add_argument("--out", type=Path, metavar="FILE",
                   help="the HTML file; default WORK_DIR/report.html of the first run, with several runs report.html\n"
                   "in the present folder")  # fmt: skip
    p.add_argument("--serve", action="store_true",
                   help="write no file: show the report on 127.0.0.1, renewed while the run continues")  # fmt: skip
    p.add_argument("--port", type=int, metavar="N", help=f"of --serve; default {PORT}; 0: a free one")
    p.add_argument("--max-pictures-mib", type=float, default=16.0, metavar="N",
                   help="most MiB of pictures in the file (default 16);\n"
                   "the report names how many are left out")  # fmt: skip
    return p


PORT = 8600


@ends_quietly
def main(argv: list[str] | None = None) -> int:
    p = parser()
    arguments = p.parse_args(argv)
    if arguments.port is not None and not (arguments.serve and 0 <= arguments.port < 65536):
        p.error("--port belongs to --serve; allowed: 0 to 65535")
    if arguments.serve and arguments.out:
        p.error("--serve writes no file: leave --out out")
    from unigen_ds.report import write_report  # after parsing: --help does not wait for torch
    from unigen_ds.report.serve import serve_report

    folders: list[Path] = arguments.work_dirs
    out: Path = arguments.out or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    if not 0 <= arguments.max_pictures_mib < 2**20:
        print("error: --max-pictures-mib; allowed: 0 or more", file=sys.stderr)
        return 2
    max_pictures = int(arguments.max_pictures_mib * 2**20)
    if arguments.serve:
        port = PORT if arguments.port is None else arguments.port
        serve_report(folders, port=port, max_pictures=max_pictures,
              ready=lambda address: print(f"{address} (Ctrl-C ends it)", flush=True))  # fmt: skip
        return 0
    print(write_report(folders, out, max_pictures=max_pictures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
