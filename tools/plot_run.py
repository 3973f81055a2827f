"""Plot the curves of a run: ``python tools/plot_run.py WORK_DIR [--out FILE]``; installed as ``unigen-plot-run``.

Reads ``metrics.jsonl``, without the lines that a resume invalidated. Can be called while the run continues.
Exit status: 0 done, 1 nothing to plot, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:
    import _path  # noqa: F401 - a script runs from a checkout without installation

from unigen_ds.core.errors import ConfigError, UnigenError
from unigen_ds.core.metrics import METRICS_FILE
from unigen_ds.evaluation.plots import plot_curves

FORMATS = (".png", ".pdf", ".svg")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="unigen-plot-run", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    p.add_argument("work_dir", type=Path, help="the output folder of a run")
    p.add_argument("--out", type=Path, metavar="FILE", help="the image file; default WORK_DIR/curves.png")
    return p


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    out: Path = arguments.out or arguments.work_dir / "curves.png"
    try:
        draw(arguments.work_dir / METRICS_FILE, out)
    except UnigenError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    print(out)
    return 0


def draw(metrics_file: Path, out: Path) -> None:
    """Write the image. Raises ``DataError`` if there is nothing to plot, ``ConfigError`` if it cannot be written."""
    if out.suffix not in FORMATS:
        raise ConfigError(f"--out {out}", allowed="a file ending in " + ", ".join(FORMATS))
    try:
        plot_curves(metrics_file, out)
    except ImportError as error:
        raise ConfigError(f"curves need matplotlib: {error}", remedy="pip install 'unigen_ds[demo]'") from error
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
