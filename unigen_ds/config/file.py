"""A config file -> mmengine's ``Config``, and the names at the top of its files that nothing reads.

YAML is read by a safe loader (mmengine's own would run ``!!python/object/apply``), also where another file has it as
its base. A Python file is the user's code and is executed; which of its names are read is taken from its syntax tree.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from mmengine.config import Config
from mmengine.fileio import load
from mmengine.fileio.handlers import YamlHandler, file_handlers

from unigen_ds.config.paths import PACKAGE
from unigen_ds.core.errors import ConfigError

_BASE = "_base_"
_PLACEHOLDER = re.compile(r"\{\{\s*_base_\.(\w+)")
_ALL_NAMES = {"globals", "locals", "vars", "eval", "exec"}
"""A file that calls one of these may read any of its names."""


class _Loader(yaml.SafeLoader):
    """Plain values."""


# YAML 1.1 requires a point and a sign, and reads 1e-5 as a text
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789"))


class _SafeYaml(YamlHandler):
    def load_from_fileobj(self, file: Any, **kwargs: Any) -> Any:
        return yaml.load(file, Loader=_Loader)


def shipped_configs() -> dict[str, Path]:
    """Name -> path of each config of the package, in the ``configs/`` of a family or an example."""
    return {p.stem: p for p in sorted(PACKAGE.glob("**/configs/*.py"), key=lambda p: p.stem)}


@contextmanager
def _mmengine() -> Iterator[None]:
    """Inside, mmengine reads YAML by the safe loader."""
    kept = {name: file_handlers[name] for name in ("yaml", "yml")}
    file_handlers.update(dict.fromkeys(kept, _SafeYaml()))
    try:
        yield
    finally:
        file_handlers.update(kept)


def read_file(path: Path) -> Config:
    """The file with its bases. Raises ``ConfigError`` that names it, whatever its code raises."""
    try:
        with _mmengine():
            try:
                return Config.fromfile(
                    str(path), import_custom_modules=False
                )  # Settings imports them, by its own rules
            except RuntimeError as error:
                if str(error):
                    raise
                # mmengine treats a file with imports as one of its lazy style, where calling what is imported raises a
                # bare RuntimeError; such a file is ordinary Python.
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
    """Names that a config file or one of its bases assigns to and nothing reads.

    A name of a base counts as read where a file has ``_base_.name``. In YAML and JSON nothing can read a name.
    """
    unread, read_of_bases = set[str](), set[str]()
    for file in with_bases(path):
        if file.suffix != ".py":
            unread |= {*_values(file)}
            continue
        text = file.read_text(encoding="utf-8")
        nodes = [*ast.walk(ast.parse(text))]
        names = [node for node in nodes if isinstance(node, ast.Name)]
        read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
        unread |= {node.id for node in names} - read if not read & _ALL_NAMES else set()
        read_of_bases |= {*_PLACEHOLDER.findall(text)}
        attributes = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
        read_of_bases |= {
            node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == _BASE
        }
        if any(isinstance(node, ast.With) for node in nodes):  # mmengine's lazy style: a base's names are this file's
            read_of_bases |= read
    return unread - read_of_bases - {_BASE}


def with_bases(path: Path) -> list[Path]:
    """A config file and all files below it, each once."""
    files = {path: None}
    for base in bases_of(path):
        files |= dict.fromkeys(with_bases(base))
    return [*files]


def bases_of(path: Path) -> list[Path]:
    """The files that a config file names as its bases, as far as that can be read without executing it."""
    if path.suffix == ".py":
        tree = ast.parse(path.read_text(encoding="utf-8"))
        bases = [base for node in ast.walk(tree) for base in _bases_in(node, path.parent)]
    else:
        bases = _paths(_values(path).get(_BASE) or (), path.parent)
    return [base for base in bases if base.is_file()]


def _values(path: Path) -> dict[str, Any]:
    with _mmengine():
        return dict(load(str(path)))


def _bases_in(node: ast.AST, folder: Path) -> list[Path]:
    """The files that ``_base_ = ...`` names as text, or that are imported ``with read_base()``."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == _BASE:
        with suppress(ValueError):
            return _paths(ast.literal_eval(node.value), folder)
    if isinstance(node, ast.With):
        imports = [inner for inner in node.body if isinstance(inner, ast.ImportFrom) and inner.level]
        above = [folder, *folder.parents]
        return [above[one.level - 1] / ((one.module or "").replace(".", "/") + ".py") for one in imports]
    return []


def _paths(names: Any, folder: Path) -> list[Path]:
    return [folder / Path(name).expanduser() for name in ([names] if isinstance(names, str) else names)]
