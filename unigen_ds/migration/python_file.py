"""A config in Python, read without executing it: literals, ``dict(...)``, and names that the file assigns or imports.

What it imports need not be installed: an imported name is a ``Reference``, its dotted path. Any other expression is
``Computed``, its source: mmengine itself executes a file and writes one with the values, which ``DUMP`` does.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from unigen_ds.config.file import bases_of
from unigen_ds.core.errors import ConfigError

DUMP = "python -c \"from mmengine.config import Config; Config.fromfile('{}').dump('plain.py')\""
"""The command that executes a config and writes its values into a file, with its bases."""


class Reference(str):
    """The dotted path of something that a config imports: ``torch.optim.AdamW``."""

    @property
    def last(self) -> str:
        """Its last name."""
        return self.rpartition(".")[2]


class Computed(str):
    """The source of a value that only executing the file would give."""


def read_python(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the names at the top of the file with their values, and the source of each other statement.

    Raises ``ConfigError`` for a file that cannot be read, is no Python, or has bases.
    """
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        bases = bases_of(path)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"config {path} cannot be read: {error}") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"config {path} is no Python: {error}") from error
    if bases or "_base_" in source:
        remedy = f"give the whole of it, plain.py, which `{DUMP.format(path)}` writes"
        raise ConfigError(f"config {path} has bases, which only mmengine merges", remedy=remedy)
    names: dict[str, Any] = {}
    others: list[str] = []
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= _imports(node)
        elif isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets):
            value = _value(node.value, names)
            names |= {target.id: value for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Assign) and (pairs := _pairs(node)):
            names |= {name: _value(value, names) for name, value in pairs}
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            others.append(_source(node))
    return names, others


def _imports(node: ast.Import | ast.ImportFrom) -> dict[str, Reference]:
    if isinstance(node, ast.ImportFrom):
        return {one.asname or one.name: Reference(f"{node.module or ''}.{one.name}".strip(".")) for one in node.names}
    whole = {one.asname: one.name for one in node.names if one.asname}
    first = {one.name.partition(".")[0]: one.name.partition(".")[0] for one in node.names if not one.asname}
    return {name: Reference(path) for name, path in (whole | first).items()}


def _pairs(node: ast.Assign) -> list[tuple[str, ast.expr]]:
    """The names and values of ``a, b = 1, 2``; empty for anything else."""
    target = node.targets[0]
    if len(node.targets) > 1 or not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return []
    names = [one.id for one in target.elts if isinstance(one, ast.Name)]
    return [*zip(names, node.value.elts, strict=True)] if len(names) == len(node.value.elts) else []


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return the value, in which each part that only code could compute is ``Computed``."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        pass
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.Attribute) and isinstance(above := _value(node.value, names), Reference):
        return Reference(f"{above}.{node.attr}")
    if isinstance(node, (ast.List, ast.Tuple)) and not any(isinstance(one, ast.Starred) for one in node.elts):
        members = [_value(one, names) for one in node.elts]
        return members if isinstance(node, ast.List) else tuple(members)
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return {ast.literal_eval(key): _value(value, names) for key, value in pairs if key}
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict" and not node.args:
        arguments = {keyword.arg: keyword.value for keyword in node.keywords}
        if None not in arguments:
            return {key: _value(value, names) for key, value in arguments.items()}
    return Computed(_source(node))


def _source(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())
