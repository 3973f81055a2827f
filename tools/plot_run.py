"""Plot the curves of a run, or of several over each other: ``python tools/plot_run.py WORK_DIR [WORK_DIR ...]
[--out FILE]``; installed as ``unigen-plot-run``.

Reads ``metrics.jsonl``, without the lines that a resume invalidated; ``val/loss`` is a dashed line beside the loss.
Prints the path of the image. Can be called while the run continues.
Exit status: 0 done, 1 nothing to plot, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

if not __package__:
    import _path  # noqa: F401 - a script runs from a checkout without installation

from unigen_ds.core.errors import ConfigError
from unigen_ds.system.journals import METRICS_FILE
from unigen_ds.system.pipes import ends_quietly, tool_parser

FORMATS = (".png", ".pdf", ".svg")


def parser() -> argparse.ArgumentParser:
    p = tool_parser("unigen-plot-run", __doc__)
    p.add_argument("work_dirs", type=Path, nargs="+", metavar="WORK_DIR", help="the output folder of a run")
    p.add_argument("--out", type=Path, metavar="FILE",
                   help="the image file; default WORK_DIR/curves.png; with several runs curves.png\n"
                   "in the present folder")  # fmt: skip
    return p


@ends_quietly
def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    from unigen_ds.report.reading import run_names  # after parsing: --help does not wait for torch

    folders: list[Path] = arguments.work_dirs
    out: Path = arguments.out or (folders[0] / "curves.png" if len(folders) == 1 else Path("curves.png"))
    draw({name: folder / METRICS_FILE for name, folder in run_names(folders).items()}, out)
    print(out.absolute())
    return 0


def draw(metrics_files: Mapping[str, Path], out: Path) -> None:
    """Write the image. Raises ``DataError`` if there is nothing to plot, ``ConfigError`` if it cannot be written."""
    if out.suffix not in FORMATS:
        raise ConfigError(f"--out {out}", allowed="a file ending in " + ", ".join(FORMATS))
    from unigen_ds.evaluation.plots import plot_curves

    try:
        plot_curves(metrics_files, out)
    except ImportError as error:
        raise ConfigError(f"curves need matplotlib: {error}", remedy="pip install 'unigen_ds[demo]'") from error
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
