"""Files ``<update>.*`` of a folder after a resume that went back: those of later updates belong to no run any more."""

from __future__ import annotations

from pathlib import Path

from unigen_ds.core.log import logger

ABANDONED = "abandoned"


def set_aside(folder: Path, *, after: int) -> None:
    """Move files of later updates to ``abandoned``, so that nothing shows them among the others. Rank 0."""
    later = [path for path in folder.glob("*.*") if path.stem.isdigit() and int(path.stem) > after]
    if not later:
        return
    try:
        (folder / ABANDONED).mkdir(exist_ok=True)
        for path in later:
            path.replace(folder / ABANDONED / path.name)
    except OSError as error:
        logger().warning("Files after update %d could not be moved to %s: %s", after, folder / ABANDONED, error)
    else:
        logger().info("%s: %d file(s) after update %d are moved to %s.", folder.name, len(later), after, ABANDONED)
