"""The versions of packages that the project works with. Nothing large is imported: a start checks them before torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from unigen_ds.core.errors import ConfigError, raise_any

ALLOWED = {"torch": ">=2.6", "transformers": ">=5"}
"""Package -> its versions. ``setup.py`` has the same; DeepSpeed's are in ``backends/deepspeed_config.py``."""


def installed(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def version_problems(allowed: Mapping[str, str] = ALLOWED) -> Iterator[ConfigError]:
    """An error for each package that is missing or has another version."""
    for package, versions in allowed.items():
        found = installed(package)
        if found is None or not SpecifierSet(versions).contains(found, prereleases=True):
            yield ConfigError(
                f"{package} {found} is installed" if found else f"{package} is not installed",
                allowed=f"{package} {versions}",
                remedy=f"pip install '{package}{versions}'",
            )


def check_versions() -> None:
    """Raises one ``ConfigError`` for all packages of another version."""
    raise_any([*version_problems()])
