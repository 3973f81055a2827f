"""A config in Python, read from its syntax tree: nothing of it is executed, and what it imports need not be installed.

Understood: assignments, literals, ``dict(...)``, names, arithmetic, ``int``, ``float``, ``str``, ``len``, ``min``,
``max``, ``os.path.join``, f-strings, conditions, ``section.update(...)``, ``hooks.append(...)``, ``_base_`` and
``with read_base()``. An imported name is a
``Reference``, its dotted path; everything else that only code could compute is ``Computed``, its source.
"""

from __future__ import annotations

import ast
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from unigen_ds.core.errors import ConfigError

_MOST_ITEMS, _LARGEST, _LARGEST_POWER = 100_000, 1e30, 16
"""Of what arithmetic may give: a file could double a text line by line."""
_MOST_BASES = 32
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "int": int, "float": float, "str": str, "bool": bool, "len": len, "min": min, "max": max, "round": round,
    "abs": abs, "list": list, "tuple": tuple, "os.path.join": os.path.join,
}  # fmt: skip


class Reference(str):
    """The dotted path of something that a config imports: ``torch.optim.AdamW``."""

    @property
    def last(self) -> str:
        """Its last name."""
        return self.rpartition(".")[2]


class Computed(str):
    """The source of a value that only executing the file would give."""


class _Unknown(Exception):
    """A value that only code can compute."""


def read_static(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The names at the top of the file with their values, and the source of each statement that is not understood.

    Raises ``ConfigError`` for a file that cannot be read or is no Python.
    """
    reader = _Reader(path, depth=0)
    return reader.whole(), reader.statements


class _Reader:
    """One file."""

    def __init__(self, path: Path, *, depth: int) -> None:
        try:
            self.source = path.read_text(encoding="utf-8")
            self.tree = ast.parse(self.source)
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"config {path} cannot be read: {error}") from error
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ConfigError(f"config {path} is no Python: {error}") from error
        if depth > _MOST_BASES:
            raise ConfigError(f"config {path} is the {depth}th base below another one: they form a circle")
        self.path, self.depth = path, depth
        self.names: dict[str, Any] = {}
        self.base: dict[str, Any] = {}
        self.statements: list[str] = []

    def whole(self) -> dict[str, Any]:
        """The names of the file over those of its bases."""
        for statement in self.tree.body:
            try:
                self._statement(statement)
            except RecursionError:
                self._not_understood(statement)
        own = {name: value for name, value in self.names.items() if name != "_base_"}
        return _merged(self.base, own)

    # ---- statements -------------------------------------------------------------------------------------------------

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            self._assign(node, node.targets[0], node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node, node.target, node.value)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, (ast.Name, ast.Subscript, ast.Attribute)):
            read = ast.parse(ast.unparse(node.target), mode="eval").body
            value = ast.copy_location(ast.BinOp(read, node.op, node.value), node)
            self._assign(node, node.target, ast.fix_missing_locations(value))
        elif isinstance(node, ast.If) and not isinstance(chosen := self._value(node.test), Computed):
            for inner in node.body if chosen else node.orelse:
                self._statement(inner)
        elif isinstance(node, ast.With) and "read_base" in ast.unparse(node.items[0]):
            for base in node.body:
                self._import_base(base)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                self._delete(node, target)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and self._changed(node.value):
            pass
        elif not (isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))):
            self._not_understood(node)

    def _not_understood(self, node: ast.stmt) -> None:
        """What it changes is not known any more."""
        self.statements.append(self._source(node))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            return
        for inner in ast.walk(node):
            changed = isinstance(inner, ast.Name) and (isinstance(inner.ctx, ast.Store) or inner.id in self.names)
            if isinstance(inner, ast.Name) and changed and not isinstance(self.names.get(inner.id), Reference):
                self.names[inner.id] = Computed(self._source(node))

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.Import):
                name = alias.asname or alias.name.partition(".")[0]
                self.names[name] = Reference(alias.name if alias.asname else name)
            else:
                self.names[alias.asname or alias.name] = Reference(f"{node.module or ''}.{alias.name}".strip("."))

    def _assign(self, node: ast.stmt, target: ast.expr, source: ast.expr) -> None:
        value = self._value(source)
        if isinstance(target, ast.Name):
            self.names[target.id] = value
            if target.id == "_base_":
                given = [value] if isinstance(value, str) else value if isinstance(value, (list, tuple)) else [""]
                for name in given:
                    found = self._read_base(self.path.parent / Path(str(name)).expanduser(), node)
                    self.base = _merged(self.base, found)
                self.names["_base_"] = self.base
        elif isinstance(target, ast.Tuple) and isinstance(value, (list, tuple)) and len(value) == len(target.elts):
            for one, inner in zip(target.elts, value, strict=True):
                if not isinstance(one, ast.Name):
                    self._not_understood(node)
                    return
                self.names[one.id] = inner
        elif isinstance(target, (ast.Subscript, ast.Attribute)):
            holder, key = self._place(target)
            if isinstance(holder, dict) or (isinstance(holder, list) and isinstance(key, int) and key < len(holder)):
                holder[key] = value
            else:
                self._not_understood(node)
        else:
            self._not_understood(node)

    def _import_base(self, node: ast.stmt) -> None:
        """``from .base import *``, or some of its names, inside of ``with read_base():``."""
        if not isinstance(node, ast.ImportFrom) or not node.level:
            self.statements.append(f"{self._source(node)}: of a package that is not read; give its settings here")
            return
        folder = self.path.parent
        for _ in range(node.level - 1):
            folder = folder.parent
        imported = {alias.name: alias.asname or alias.name for alias in node.names}
        found = self._read_base(folder / ((node.module or "").replace(".", "/") + ".py"), node)
        if "*" not in imported:
            found = {imported[name]: value for name, value in found.items() if name in imported}
        self.names |= found  # as in mmengine: what the file assigns replaces it, and is not merged

    def _read_base(self, path: Path, node: ast.stmt) -> dict[str, Any]:
        if not path.is_file() or path.suffix != ".py":
            self.statements.append(f"{self._source(node)}: there is no config {path}")
            return {}
        reader = _Reader(path, depth=self.depth + 1)
        found = reader.whole()
        self.statements += reader.statements
        return found

    def _delete(self, node: ast.stmt, target: ast.expr) -> None:
        """``del name``, ``del section['key']``."""
        if isinstance(target, ast.Name):
            self.names.pop(target.id, None)
            return
        holder, key = self._place(target)
        if isinstance(holder, dict) and key in holder:
            del holder[key]
        else:
            self._not_understood(node)

    def _place(self, target: ast.expr) -> tuple[Any, Any]:
        """The section and the key of ``section['key']`` and ``section.key``; None: it is no section."""
        if isinstance(target, ast.Attribute):
            return self._value(target.value), target.attr
        if isinstance(target, ast.Subscript):
            key = self._value(target.slice)
            return (None if isinstance(key, (Computed, dict, list)) else self._value(target.value)), key
        return None, None

    def _changed(self, call: ast.Call) -> bool:
        """``section.update(...)``, ``hooks.append(...)``: done. False for another call, or another object."""
        if not isinstance(call.func, ast.Attribute) or any(keyword.arg is None for keyword in call.keywords):
            return False
        holder, name = self._value(call.func.value), call.func.attr
        given = [self._value(one) for one in call.args]
        named = {keyword.arg: self._value(keyword.value) for keyword in call.keywords}
        if isinstance(holder, dict) and name == "update" and all(isinstance(one, dict) for one in given):
            for one in [*given, named]:
                holder.update(one)
        elif isinstance(holder, dict) and name in ("pop", "setdefault") and given and isinstance(given[0], str):
            getattr(holder, name)(*given, *([None] if len(given) == 1 else []))
        elif isinstance(holder, list) and name == "append" and len(given) == 1:
            holder.append(given[0])
        elif isinstance(holder, list) and name == "extend" and len(given) == 1 and isinstance(given[0], (list, tuple)):
            holder.extend(given[0])
        elif isinstance(holder, list) and name == "insert" and len(given) == 2 and isinstance(given[0], int):
            holder.insert(*given)
        else:
            return False
        return True

    # ---- values -----------------------------------------------------------------------------------------------------

    def _source(self, node: ast.AST) -> str:
        return " ".join((ast.get_source_segment(self.source, node) or ast.unparse(node)).split())

    def _value(self, node: ast.expr) -> Any:
        """The value; ``Computed`` where only code could compute it."""
        try:
            return self._known(node)
        except (_Unknown, ArithmeticError, TypeError, ValueError, LookupError, AttributeError):
            return Computed(self._source(node))

    def _plain(self, node: ast.expr) -> Any:
        """A value that is computed with: nothing of it may be unknown."""
        found = self._known(node)
        if any(isinstance(part, (Computed, Reference)) for part in _parts(found)):
            raise _Unknown
        return found

    def _known(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            if node.id not in self.names:
                raise _Unknown
            return self.names[node.id]
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, (ast.List, ast.Tuple)):
            members = [*self._members(node)]
            return members if isinstance(node, ast.List) else tuple(members)
        if isinstance(node, ast.Dict):
            return self._dict(node)
        if isinstance(node, ast.Subscript):
            return self._known(node.value)[self._plain(node.slice)]
        return self._computed(node)

    def _computed(self, node: ast.expr) -> Any:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _limited(type(node.op), self._known(node.left), self._known(node.right))
        if isinstance(node, ast.UnaryOp):
            value = self._plain(node.operand)
            return not value if isinstance(node.op, ast.Not) else -value if isinstance(node.op, ast.USub) else +value
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return _COMPARISONS[type(node.ops[0])](self._plain(node.left), self._plain(node.comparators[0]))
        if isinstance(node, ast.IfExp):
            return self._known(node.body if self._plain(node.test) else node.orelse)
        if isinstance(node, ast.BoolOp):
            found = [self._plain(value) for value in node.values]
            wanted = isinstance(node.op, ast.Or)
            return next((value for value in found if bool(value) == wanted), found[-1])
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.FormattedValue) else part for part in node.values]
            if any(isinstance(part, ast.FormattedValue) and part.format_spec for part in node.values):
                raise _Unknown
            return "".join(str(self._plain(part)) for part in parts)
        raise _Unknown

    def _attribute(self, node: ast.Attribute) -> Any:
        holder = self._known(node.value)
        if isinstance(holder, Reference):
            return Reference(f"{holder}.{node.attr}")
        if isinstance(holder, Mapping):
            return holder[node.attr]
        raise _Unknown

    def _call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Name) and node.func.id == "dict" and "dict" not in self.names:
            found = {} if not node.args else dict(self._known(node.args[0]))
            for keyword in node.keywords:
                found |= {keyword.arg: self._value(keyword.value)} if keyword.arg else self._known(keyword.value)
            return found
        if isinstance(node.func, ast.Name) and node.func.id not in self.names:
            name = node.func.id
        else:
            name = str(self._known(node.func)) if isinstance(node.func, (ast.Name, ast.Attribute)) else ""
        if name not in _FUNCTIONS or node.keywords:
            raise _Unknown
        return _FUNCTIONS[name](*map(self._plain, node.args))

    def _members(self, node: ast.List | ast.Tuple) -> Iterator[Any]:
        for member in node.elts:
            if isinstance(member, ast.Starred):
                yield from self._known(member.value)
            else:
                yield self._value(member)

    def _dict(self, node: ast.Dict) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            found |= {self._plain(key): self._value(value)} if key is not None else self._known(value)
        return found


def _limited(kind: type[ast.operator], left: Any, right: Any) -> Any:
    """Arithmetic with numbers, and with texts and lists of a limited length."""
    numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
    added = kind is ast.Add and type(left) is type(right) and isinstance(left, (str, list, tuple))
    repeated = kind is ast.Mult and isinstance(left, (str, list)) and isinstance(right, int)
    if isinstance(left, (Computed, Reference)) or isinstance(right, (Computed, Reference)):
        raise _Unknown
    length = len(left) + len(right) if added else len(left) * right if repeated else 0
    if not (numbers or added or repeated) or length > _MOST_ITEMS or (kind is ast.Pow and abs(right) > _LARGEST_POWER):
        raise _Unknown
    found = _OPERATORS[kind](left, right)
    if numbers and abs(found) > _LARGEST:
        raise _Unknown
    return found


def _parts(value: Any) -> Iterator[Any]:
    yield value
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    for one in inside:
        yield from _parts(one)


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """As mmengine merges a config into its base: sections key by key, unless they have ``_delete_=True``."""
    found = dict(base)
    for key, value in own.items():
        if isinstance(value, Mapping):
            under = found.get(key)
            kept = under if isinstance(under, Mapping) and value.get("_delete_") is not True else {}
            found[key] = _merged(kept, {name: one for name, one in value.items() if name != "_delete_"})
        else:
            found[key] = value
    return found
