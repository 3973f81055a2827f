"""Packages that some formats need, imported when a file of such a format is opened."""

from __future__ import annotations

import importlib
from typing import Any

from unigen_ds.core.errors import DataError

EXTRA = "pip install 'unigen_ds[data]'"


def needed(module: str, what: str) -> Any:
    """The module. Raises ``DataError`` that names what needs it, and how it is installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(f"{what} needs the package {package}: {error}", remedy=EXTRA) from error
