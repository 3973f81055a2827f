"""Where the project's data files and tools lie: the same call works from a checkout and from an installed wheel.

``ds_configs/`` stands beside the package in a checkout, where users edit it; the wheel carries it inside the package.
"""

from __future__ import annotations

from pathlib import Path

from unigen_ds.core.errors import ConfigError

PACKAGE = Path(__file__).resolve().parent.parent


def tool(name: str) -> list[str]:
    """What follows ``python`` to run a tool: its file in a checkout, its module where only the wheel is installed."""
    script = PACKAGE.parent / "tools" / f"{name}.py"
    return [str(script)] if script.is_file() else ["-m", f"unigen_ds_tools.{name}"]


def ds_configs_dir() -> Path:
    """The folder of the shipped DeepSpeed configs (``zero2.json`` and others)."""
    candidates = (PACKAGE / "ds_configs", PACKAGE.parent / "ds_configs")
    for folder in candidates:
        if any(folder.glob("*.json")):
            return folder
    raise ConfigError(
        "the shipped DeepSpeed configs were not found in " + " or ".join(map(str, candidates)),
        remedy="re-install unigen_ds, or give the path of a JSON file",
    )
