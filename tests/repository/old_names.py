"""The names that users of the five old guides know: ``tests/data/old_names.tsv``, and how it follows from the list."""

from __future__ import annotations

import csv
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "data" / "old_names.tsv"
SOURCE = ROOT.parent / "shared" / "OLD_NAMES.md"
"""Not in the repository: only where the project is developed."""
GUIDES = {
    "S0": "unified_fsdp", "S1": "unified_generation", "S2": "decoder_fsdp", "S3": "xtuner", "S4": "nanovlm",
}  # fmt: skip


def old_names() -> list[tuple[str, str, str]]:
    """(section, kind, name) of each."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [(row["section"], row["kind"], row["name"]) for row in rows]


def rows_of(text: str) -> list[tuple[str, str, str]]:
    """The same of the list itself: what is in backticks in the first cell of each row and after "Commands:", else the
    whole cell.
    """
    section, in_commands, rows = "", False, list[tuple[str, str, str]]()
    for line in text.splitlines():
        if heading := re.match(r"## (S\d) ", line):
            section, in_commands = heading[1], False
        elif line.startswith(("Commands:", "Note:")):
            in_commands = line.startswith("Commands:")
        elif in_commands and line.startswith("- "):
            rows += [(section, "command", one) for one in re.findall(r"`([^`]+)`", line)]
        elif section and line.startswith("| ") and not line.startswith("| name |"):
            cell, kind = (one.strip() for one in line.removeprefix("| ").split(" | ")[:2])
            rows += [(section, kind, one) for one in re.findall(r"`([^`]+)`", cell) or [cell]]
    return [*dict.fromkeys(rows)]
