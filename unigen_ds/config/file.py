"""A config file -> mmengine's ``Config``, and the names at the top of its files that nothing reads.

YAML is read by a safe loader (mmengine's own would run ``!!python/object/apply``), also where another file has it as
its base. A Python file is the user's code and is executed; which of its names are read is taken from its syntax tree.
"""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from mmengine.config import Config
from mmengine.fileio import load
from mmengine.fileio.handlers import YamlHandler, register_handler

from unigen_ds.config.paths import PACKAGE
from unigen_ds.core.errors import ConfigError

_BASE = "_base_"
_OF_A_BASE = re.compile(r"_base_\.(\w+)")


class _Loader(yaml.SafeLoader):
    """Plain values."""


# YAML 1.1 requires a point and a sign, and reads 1e-5 as a text
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789"))


@register_handler(["yaml", "yml"])
class _SafeYaml(YamlHandler):
    """How mmengine reads YAML in this process, unless a caller names another loader."""

    def load_from_fileobj(self, file: Any, **kwargs: Any) -> Any:
        return yaml.load(file, **{"Loader": _Loader, **kwargs})


def shipped_configs() -> dict[str, Path]:
    """Name -> path of each config of the package, in the ``configs/`` of a family or an example."""
    return {p.stem: p for p in sorted(PACKAGE.glob("**/configs/*.py"), key=lambda p: p.stem)}


def read_file(path: Path) -> Config:
    """The file with its bases. Raises ``ConfigError`` that names it, whatever its code raises."""
    try:
        try:  # Settings imports custom modules, by its own rules
            return Config.fromfile(str(path), import_custom_modules=False)
        except RuntimeError as error:
            if str(error):
                raise
            # mmengine treats a file with imports as one of its lazy style, where calling what is imported raises a bare
            # RuntimeError; such a file is ordinary Python.
            return Config.fromfile(str(path), lazy_import=False, import_custom_modules=False)
    except yaml.constructor.ConstructorError as error:
        raise ConfigError(
            f"config {path} cannot be read: {error.problem}",
            remedy="YAML holds plain values: no tag may name Python code",
        ) from error
    except ConfigError:
        raise
    except Exception as error:  # a config is the user's code: whatever it raises, name the file
        raise ConfigError(f"config {path} cannot be read: {type(error).__name__}: {error}") from error


def unread_names(path: Path) -> set[str]:
    """Names that a config file or a base assigns to, and neither a file nor ``_base_.name`` reads; in YAML all."""
    unread, read_of_bases = set[str](), set[str]()
    for file in with_bases(path):
        text = file.read_text(encoding="utf-8")
        read_of_bases |= {*_OF_A_BASE.findall(text)}
        if file.suffix != ".py":
            unread |= {*load(str(file))}
            continue
        nodes = [*ast.walk(ast.parse(text))]
        names = [node for node in nodes if isinstance(node, ast.Name)]
        read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
        unread |= {node.id for node in names} - read
        if any(isinstance(node, ast.With) for node in nodes):  # mmengine's lazy style: a base's names are this file's
            read_of_bases |= read
    return unread - read_of_bases


def with_bases(path: Path) -> list[Path]:
    """A config file and all files below it, each once, as far as that can be read without executing any."""
    names: Any = ()
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == _BASE:
                with suppress(ValueError):  # computed
                    names = ast.literal_eval(node.value)
            elif isinstance(node, ast.With):  # mmengine's lazy style: ``with read_base(): from .base import *``
                imports = [one for one in node.body if isinstance(one, ast.ImportFrom) and one.level]
                names = ["../" * (one.level - 1) + f"{one.module or ''}".replace(".", "/") + ".py" for one in imports]
    else:
        names = load(str(path)).get(_BASE) or ()
    files = {path: None}
    for name in [names] if isinstance(names, str) else names:
        if (base := path.parent / Path(name).expanduser()).is_file():
            files |= dict.fromkeys(with_bases(base))
    return [*files]
