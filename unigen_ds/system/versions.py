"""The versions of packages that the project works with. Nothing large is imported: a start checks them before torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.specifiers import SpecifierSet

from unigen_ds.core.errors import ConfigError, raise_any

ALLOWED = {"torch": ">=2.6", "transformers": ">=5"}
"""Package -> its versions. ``setup.py`` has the same; DeepSpeed's are in ``backends/deepspeed/deepspeed_config.py``."""


def installed(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def source_digest(file: Path = Path(__file__).parents[1] / "__init__.py") -> str:
    """Return a digest of a module's source, or of all sources of a package: equal for equal code, wherever it is."""
    folder, digest = file.parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")) if file.name == "__init__.py" else [file]:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def version_problems(allowed: Mapping[str, str] = ALLOWED) -> Iterator[ConfigError]:
    """An error for each package that is missing or has another version."""
    for package, versions in allowed.items():
        present = installed(package)
        if present is None or not SpecifierSet(versions).contains(present, prereleases=True):
            yield ConfigError(
                f"{package} {present} is installed" if present else f"{package} is not installed",
                allowed=f"{package} {versions}",
                remedy=f"pip install '{package}{versions}'",
            )


def check_versions() -> None:
    """Raises one ``ConfigError`` for all packages of another version."""
    raise_any([*version_problems()])
