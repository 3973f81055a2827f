"""``custom_imports``: a user's own modules, which register their classes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from unigen_ds.config.file import with_bases
from unigen_ds.config.overrides import ConfigValues
from unigen_ds.config.section import AS_LIST, Section
from unigen_ds.core.errors import ConfigError
from unigen_ds.system.log import logger


class CustomImports(Section):
    imports: Annotated[tuple[str, ...], BeforeValidator(lambda names: (names,) if isinstance(names, str) else names),
                       AS_LIST] = Field(default=(), description="names of modules, as Python imports them")  # fmt: skip
    allow_failed_imports: bool = Field(default=False, description="True: a module that cannot be imported is a warning")


def importable(config: ConfigValues) -> None:
    """Find ``custom_imports`` beside the config and its bases, too: for this process and its workers."""
    for file in with_bases(config.path.resolve()) if config.values.get("custom_imports") else ():
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))


def import_custom(config: Mapping[str, Any]) -> None:
    section = CustomImports.parse(config.get("custom_imports"), where="custom_imports")
    for name in section.imports:
        try:
            importlib.import_module(name)
        except ImportError as error:
            problem = f"custom_imports: {name!r} cannot be imported: {error}"
            if not section.allow_failed_imports:
                remedy = "put it beside the config, or start with PYTHONPATH=FOLDER"
                raise ConfigError(problem, remedy=remedy) from error
            logger().warning(problem)
        except KeyError as error:
            if "is already registered" not in str(error):
                raise
            raise ConfigError(
                f"custom_imports: {name!r} registers a name that is in use: {error.args[0]}",
                remedy="another name for your class, or register_module(name='...')",
            ) from error
