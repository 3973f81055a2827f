"""A config file -> mmengine's ``Config``, and the names at the top of its files that nothing reads.

YAML is read by a safe loader (mmengine's own would run ``!!python/object/apply``), also where another file has it as
its base. A Python file is the user's code and is executed; which of its names are read is taken from its syntax tree.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from mmengine.config import Config
from mmengine.fileio import load
from mmengine.fileio.handlers import YamlHandler, file_handlers

from unigen_ds.config.paths import PACKAGE
from unigen_ds.core.errors import ConfigError
from unigen_ds.system.files import encoding_problem

_BASE = "_base_"
_PLACEHOLDER = re.compile(r"\{\{\s*_base_\.(\w+)")
_OF_MMENGINE = re.compile(
    r"^\s*(from|import)\s+(xtuner|mm(?!engine)\w+|mmengine\.(dataset|optim|runner|model|visualization))\b"
    r"|^(default_scope|val_evaluator|test_evaluator)\s*=",
    re.MULTILINE,
)
_ALL_NAMES = {"globals", "locals", "vars", "eval", "exec"}
"""A file that calls one of these may read any of its names."""


class _Loader(yaml.SafeLoader):
    """Plain values, and tuples, which mmengine writes with a tag of Python's."""


def _tuple(loader: yaml.SafeLoader, node: Any) -> tuple[Any, ...]:
    return tuple(loader.construct_sequence(node, deep=True))


_Loader.add_constructor("tag:yaml.org,2002:python/tuple", _tuple)
# YAML 1.1 requires a point and a sign, and reads 1e-5 as a text
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789"))


class _SafeYaml(YamlHandler):
    def load_from_fileobj(self, file: Any, **kwargs: Any) -> Any:
        return yaml.load(file, Loader=_Loader)


def shipped() -> dict[str, Path]:
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
        if problem := encoding_problem(path):
            raise ConfigError(f"config {path} {problem[0]}", remedy=problem[1])
        with _mmengine():
            return _from_file(path)
    except yaml.constructor.ConstructorError as error:
        raise ConfigError(
            f"config {path} cannot be read: {error.problem}",
            remedy="YAML holds plain values: no tag may name Python code",
        ) from error
    except ConfigError:
        raise
    except Exception as error:  # a config is the user's code: whatever it raises, name the file
        raise ConfigError(f"config {path} cannot be read: {type(error).__name__}: {error}") from error


def is_of_mmengine(path: Path) -> bool:
    """Whether a Python file has names that configs of xtuner and mmengine have and those of this project have not."""
    return path.suffix == ".py" and _OF_MMENGINE.search(path.read_text(encoding="utf-8", errors="replace")) is not None


def _from_file(path: Path) -> Config:
    try:
        return Config.fromfile(str(path), import_custom_modules=False)  # Settings imports them, by its own rules
    except RuntimeError as error:
        if str(error):
            raise
        # mmengine treats a file with imports as one of its lazy style, where calling what is imported raises a bare
        # RuntimeError; such a file is ordinary Python.
        return Config.fromfile(str(path), lazy_import=False, import_custom_modules=False)


@dataclass(frozen=True)
class _Names:
    """How one Python file uses names."""

    bound: set[str]
    read: set[str]
    read_of_bases: set[str]
    bases: list[Path]


def unread_names(path: Path, *, read_above: frozenset[str] = frozenset()) -> set[str]:
    """Names that a config file or one of its bases defines at its top level and nothing reads.

    A name of a base counts as read where a file above it has ``_base_.name``. In YAML and JSON nothing can read a name.

    Args:
        path: the file.
        read_above: names that files above read of this one.
    """
    if path.suffix != ".py":
        found = plain_names(path) - read_above
        return found.union(*(unread_names(base, read_above=read_above) for base in bases_of(path)))
    names = _names(path)
    found = names.bound - names.read - read_above
    for base in names.bases:
        found |= unread_names(base, read_above=read_above | names.read_of_bases)
    return found


def plain_names(path: Path) -> set[str]:
    """Names at the top of a YAML or JSON file and of those of its bases that are such files, too."""
    if path.suffix == ".py":
        return set()
    with _mmengine():
        own = {*load(str(path))} - {_BASE}
    return own.union(*map(plain_names, bases_of(path)))


def bases_of(path: Path) -> list[Path]:
    """The files that a config file names as its bases, as far as that can be read without executing it."""
    if path.suffix == ".py":
        return _names(path).bases
    with _mmengine():
        given = load(str(path)).get(_BASE) or ()
    found = _bases(given, path.parent)
    return [base for base in found if base.is_file()]


def with_bases(path: Path) -> list[Path]:
    """A config file and all files below it, each once."""
    found = {path: None}
    for base in bases_of(path):
        found |= dict.fromkeys(with_bases(base))
    return [*found]


def _names(path: Path) -> _Names:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound = set() if read & _ALL_NAMES else _bound(tree.body)
    of_bases = set(_PLACEHOLDER.findall(text)) | {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == _BASE
    }
    bases: list[Path] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == _BASE:
            bases += _paths(node.value, path.parent)
        elif isinstance(node, ast.With):  # mmengine's lazy style: names of the base are names of this file
            of_bases |= read
            bases += [_module(inner, path.parent) for inner in node.body if isinstance(inner, ast.ImportFrom)]
    return _Names(bound - {_BASE}, read, of_bases, [base for base in bases if base.is_file()])


def _bound(statements: list[ast.stmt]) -> set[str]:
    """Names that statements at the top of a file assign to and do not delete again."""
    stored: set[str] = set()
    deleted: set[str] = set()

    def look(node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            return
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            return
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            stored.add(node.id)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del):
            deleted.add(node.id)
        for inner in ast.iter_child_nodes(node):
            look(inner)

    for statement in statements:
        look(statement)
    return stored - deleted


def _paths(value: ast.expr, folder: Path) -> list[Path]:
    """The files that ``_base_ = ...`` names, as far as they are string literals."""
    try:
        given = ast.literal_eval(value)
    except ValueError:
        return []
    return _bases(given, folder)


def _bases(given: Any, folder: Path) -> list[Path]:
    return [folder / Path(name).expanduser() for name in ([given] if isinstance(given, str) else given)]


def _module(node: ast.ImportFrom, folder: Path) -> Path:
    """The file of ``from .module import *`` inside ``with read_base()``."""
    for _ in range(node.level - 1):
        folder = folder.parent
    return folder / ((node.module or "").replace(".", "/") + ".py") if node.level else Path()
