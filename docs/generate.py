"""Writes the tables of keys in ``docs/configs.md`` from the settings: ``make docs``.

A table is between ``<!-- keys: PREFIX ... -->`` and ``<!-- end -->``; everything else of the page is written by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from annotated_types import Ge, Gt, Le, Lt  # noqa: E402 - a script runs from a checkout
from pydantic.fields import FieldInfo  # noqa: E402

from unigen_ds.core.settings import Section, section_of  # noqa: E402
from unigen_ds.core.values import described  # noqa: E402
from unigen_ds.runner.settings import Settings  # noqa: E402

LIMITS = (Ge, Gt, Le, Lt)
PAGE = ROOT / "docs" / "configs.md"
_TABLE = re.compile(r"(<!-- keys: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def rows(section: type[Section], prefix: str) -> Iterator[str]:
    """A row for each key of a section, those of the sections below it included."""
    for name, info in section.model_fields.items():
        inner = section_of(info)
        default = "required" if info.is_required() else f"`{info.get_default(call_default_factory=True)!r}`"
        default = "section" if inner is not None and not info.is_required() else default
        yield f"| `{prefix}.{name}` | {default} | {meaning(info)} |"
        if inner is not None and inner.model_config.get("extra") == "forbid":
            yield from rows(inner, f"{prefix}.{name}")


def meaning(info: FieldInfo) -> str:
    """The description, and the limits of a number."""
    limits = described(info.annotation, info.metadata) if any(isinstance(one, LIMITS) for one in info.metadata) else ""
    return (info.description or "").replace("|", "\\|") + (f" ({limits})" if limits else "")


def table(keys: str) -> str:
    """Of sections or single keys at the top of a config, by name."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key in keys.split():
        info = Settings.model_fields[key]
        section = section_of(info)
        if section is not None and info.description and key in ("load_cfg", "custom_imports"):
            lines.append(f"| `{key}` | section | {meaning(info)} |")
        if section is not None:
            lines += rows(section, key)
        else:
            lines.append(f"| `{key}` | `{info.get_default(call_default_factory=True)!r}` | {meaning(info)} |")
    return "\n".join(lines) + "\n"


def updated(page: str) -> str:
    """The page with every table as the settings have it."""
    return _TABLE.sub(lambda found: found[1] + table(found[2]) + found[3], page)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
