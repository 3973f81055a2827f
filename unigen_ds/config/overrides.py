"""Config files: mmengine's ``Config`` (text style, ``_base_``, YAML, JSON), overrides, and names that nothing reads.

mmengine's own ``merge_from_dict`` creates whatever key it is given, so a mistyped override is silently ignored
there; here an override without an effect is an error that names the nearest valid key. A Python file may have helper
variables of any name at its top; a setting there that nothing reads is an error. Which keys there are is passed as a
nested mapping (``config/section.py: keys``), and ``runner/settings/tree.py: load_config`` puts everything together.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from mmengine.config import Config, ConfigDict

from unigen_ds.config.file import plain_names, read_file, shipped, unread_names
from unigen_ds.config.registry import registered_name
from unigen_ds.config.translation import SETTINGS, hint, is_setting, is_translated
from unigen_ds.core.errors import ConfigError, UnknownKey, close, nearest, suggestion


class OfFamily(dict[str, Any]):
    """Keys of a section that a family of models may add to."""


class MayBeSeveral(dict[str, Any]):
    """Keys of a section in place of which a config may have several sections by name."""


def config_path(name: str | Path) -> Path:
    """A path that exists, or the shipped config of that name, in the ``configs/`` of a family or an example."""
    path = Path(name)
    if path.suffix in (".py", ".yaml", ".yml", ".json") and path.exists():
        return path.resolve()
    found = shipped()
    if str(name) in found:
        return found[str(name)]
    what = f"has the suffix {path.suffix!r}" if path.is_file() else "is neither a file nor a shipped config"
    raise ConfigError(
        f"config {str(name)!r} {what}",
        allowed="a .py, .yaml or .json file, or one of " + ", ".join(found),
        remedy=suggestion(path.stem, found),
    )


def read(name: str | Path) -> Config:
    """The file with its bases, as it is, and a work dir. Raises ``ConfigError`` for a missing or broken file."""
    path = config_path(name)
    try:
        config = _without_means(read_file(path))
    except ImportError as error:  # of a name that mmengine imports when it is first used
        raise ConfigError(f"config {path} cannot be read: {error}") from error
    if config.get("work_dir") is None:
        config["work_dir"] = str(Path("work_dirs") / path.stem)
    return config


class LoadedConfig(Config):
    """What ``load_config`` returns: keys of mmengine are translated in it."""


def plain_values(config: Any) -> Any:
    """A config, or a part of it, as plain dicts, lists and tuples: a copy."""
    if isinstance(config, _NODES):
        return {key: plain_values(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return type(config)(map(plain_values, config))
    return config


def _without_means(config: Config) -> Config:
    """Without imported names and functions of a config, which are helpers, not settings."""
    settings = config.to_dict()  # mmengine leaves out what a config of the lazy style imported
    for name in [*config]:
        if name not in settings or isinstance(settings[name], (type, FunctionType)):
            config.pop(name)
    for section in (config.get("model"), _inside(config.get("optim_wrapper"), "optimizer")):
        kind = _inside(section, "type")
        if isinstance(kind, type):  # by name, as checkpoints and comparisons have it
            torchs = kind.__module__.startswith("torch.optim")
            section["type"] = kind.__name__ if torchs else registered_name(kind) or kind
    return config


def _inside(section: Any, key: str) -> Any:
    return section.get(key) if isinstance(section, Mapping) else None


def parse_override(text: str) -> tuple[str, Any]:
    """``'a.b=3'`` -> ``('a.b', 3)``; the value is a Python literal, ``true``/``false``/``null``, else a string."""
    dotted, separator, raw = text.partition("=")
    if not separator or not dotted.strip():
        raise ConfigError(f"override {text!r}", allowed="KEY=VALUE, as in optim_wrapper.optimizer.lr=1e-4")
    words = {"true": True, "false": False, "null": None, "none": None}
    if raw.lower() in words:
        return dotted.strip(), words[raw.lower()]
    try:
        return dotted.strip(), _literal(ast.parse(raw.strip(), mode="eval").body)
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: thousands of brackets
        return dotted.strip(), raw


def override_path(dotted: str) -> list[str]:
    """The steps of an override's key; a list's member is ``.0`` or, as ``--print-config`` shows it, ``[0]``."""
    return re.sub(r"\[(\d+)\]", r".\1", dotted).split(".")


def _literal(node: ast.expr) -> Any:
    """A literal, in which ``dict(a=1)`` is one, too. Raises ``ValueError`` for anything else."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        if any(keyword.arg is None for keyword in node.keywords):
            raise ValueError("dict(**...)")
        return {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}
    if isinstance(node, (ast.List, ast.Tuple)):
        members = map(_literal, node.elts)
        return [*members] if isinstance(node, ast.List) else (*members,)
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {_literal(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    return ast.literal_eval(node)


DELETE = "_delete_"
"""mmengine's key of a section that replaces, where others are merged into what is there."""
_NODES: Any = (Mapping, Config)  # mmengine's Config behaves like a mapping but is none


def overrides_of(given: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Dotted path -> value, without ``_delete_``. Raises ``ConfigError`` for a text without a value."""
    found = dict(given) if isinstance(given, Mapping) else dict(map(parse_override, given))
    return {dotted: without_delete(value) for dotted, value in _replaced(found).items()}


def without_delete(value: Any) -> Any:
    """An override's value without ``_delete_=True``: it replaces what the config has anyway."""
    if type(value) in (list, tuple):
        return type(value)(map(without_delete, value))
    if not isinstance(value, dict):
        return value
    return {key: without_delete(one) for key, one in value.items() if (key, one) != (DELETE, True)}


def _replaced(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """With ``a._delete_=True``, ``a`` is the one override that the others below ``a`` make."""
    found = dict(overrides)
    for dotted, value in overrides.items():
        *section, last = override_path(dotted)
        if last != DELETE or dotted not in found:
            continue
        if not section or value is not True:
            given = "" if section else " for the whole config"
            remedy = "without it the section is changed key by key" if section else "another CONFIG replaces the whole"
            raise ConfigError(f"override {dotted}={value!r}{given}", allowed="SECTION._delete_=True", remedy=remedy)
        new: dict[str, Any] = {}
        below = [key for key in found if key != dotted and override_path(key)[: len(section)] == section]
        for key in below:
            _put(new, override_path(key)[len(section) :], found[key], key)
        name = ".".join(section)
        merged: dict[str, Any] = {}
        for key, one in found.items():  # at the position of the first of them
            if key == dotted or key in below:
                merged.setdefault(name, new)
            else:
                merged[key] = one
        found = merged
    return found


def _put(section: dict[str, Any], path: Sequence[str], value: Any, dotted: str) -> None:
    """Set a value of a section that begins empty."""
    allowed = "keys of the new section; a list as one value"
    for key in path:
        if key.isdigit() or not isinstance(section, dict):
            raise ConfigError(f"override {dotted!r} is of a section that {DELETE}=True replaces", allowed=allowed)
        parent, section = section, section.setdefault(key, {})
    parent[path[-1]] = value


def as_in_the_file(config: Config, overrides: Mapping[str, Any]) -> list[ConfigError]:
    """Set each value at its path, as if the file had it: missing sections are made, and any key is accepted."""
    errors: list[ConfigError] = []
    for dotted, value in overrides.items():
        *parents, last = override_path(dotted)
        node: Any = config
        for key in parents:
            if isinstance(node, _NODES) and node.get(key) is None:
                node[key] = ConfigDict()
            node = node.get(key) if isinstance(node, _NODES) else None
        if isinstance(node, _NODES):
            node[last] = value
        else:
            errors.append(ConfigError(f"override {dotted!r}: {'.'.join(parents)} has no keys"))
    return errors


def apply_overrides(config: Config, overrides: Mapping[str, Any], schema: Mapping[str, Any]) -> list[ConfigError]:
    """Set each value at its path. Returns an error for each path that does not exist; a key of mmengine's need not."""
    errors: list[ConfigError] = []
    for dotted, value in overrides.items():
        if is_translated(override_path(dotted)):
            errors += as_in_the_file(config, {dotted: value})
            continue
        try:
            _apply(config, dotted, value, schema)
        except ConfigError as error:
            errors.append(error)
    return errors


def _apply(config: Any, dotted: str, value: Any, whole: Mapping[str, Any]) -> None:
    path: list[str] = []
    node: Any = config
    schema: Any = whole
    of_component = False  # its arguments, and what they contain, are checked with it
    *parents, last = override_path(dotted)
    if not parents and last not in whole and (last in SETTINGS or (last in config and not last.startswith("_"))):
        raise ConfigError(
            f"override {dotted!r} would have no effect: the config read this helper while it was loaded",
            remedy=hint(last, whole) or f"override the key that {last!r} was used for",
        )
    for key in parents:
        if not (isinstance(schema, MayBeSeveral) and key not in schema):  # else the name of one of several sections
            schema = schema.get(key) if isinstance(schema, Mapping) else None
        if isinstance(node, _NODES) and node.get(key) is None and isinstance(schema, Mapping):
            node[key] = ConfigDict()  # a section with known keys that is left out, or None
        of_component = of_component or (isinstance(node, _NODES) and "type" in node)
        node = _step(node, key, path, dotted)
        path.append(key)
    if isinstance(node, list):
        node[_list_index(node, last, dotted)] = value
        return
    if not isinstance(node, _NODES):
        raise ConfigError(f"override {dotted!r}: {'.'.join(path)} is {node!r} and has no keys")
    known = set(node) | set(schema if isinstance(schema, Mapping) else ())
    if last not in known and not (of_component or "type" in node or isinstance(schema, OfFamily)):
        problem = f"override {dotted!r}: no key {last!r} there"
        advice, section = hint(dotted, whole), ".".join(parents)
        raise UnknownKey(last, section=section, valid=known if parents else whole, hint=advice, problem=problem)
    node[last] = value


def _step(node: Any, key: str, path: list[str], dotted: str) -> Any:
    if isinstance(node, list):
        return node[_list_index(node, key, dotted)]
    if not isinstance(node, _NODES) or key not in node:
        valid = node if isinstance(node, _NODES) else ()
        if isinstance(node, _NODES) and "type" in node and suggestion(key, valid) is None:
            inner, rest = ".".join([*path, key]), dotted.split(".")[len(path) + 1 :]
            raise ConfigError(
                f"override {dotted!r}: {'.'.join(path)} has no {key!r} yet",
                remedy=f'if {node["type"]} has it: {inner}="dict({"=dict(".join(rest)}=...{")" * len(rest)}"',
            )
        raise ConfigError(f"override {dotted!r}: no key {key!r} in {'.'.join(path) or 'the config'}",
                          remedy=nearest(key, valid))  # fmt: skip
    return node[key]


def _list_index(node: list[Any], key: str, dotted: str) -> int:
    if not key.isdigit() or int(key) >= len(node):
        raise ConfigError(f"override {dotted!r}: {key!r} is not an index of a list of {len(node)}")
    return int(key)


def top_problems(
    config: Iterable[str], schema: Mapping[str, Any], *, file: str | None = None, overrides: Collection[str] = ()
) -> list[ConfigError]:
    """Names at the top that are no section. In a Python file only those that nothing reads and that mean something,
    and those of ``overrides``. A name that begins with an underscore is the user's own.
    """
    names = [str(key) for key in config if key not in schema and not str(key).startswith("_")]
    path = Path(file or "")
    is_file = bool(names) and path.is_file()
    stated = {override_path(dotted)[0] for dotted in overrides}
    plain = {*names} & (plain_names(path) | stated) if is_file else {*names}
    errors: list[ConfigError] = [
        UnknownKey(name, section="", valid=schema, hint=hint(name, schema)) for name in names if name in plain
    ]
    unread = unread_names(path) - plain if is_file else set()
    for name in sorted(unread & {*names}, key=names.index):
        meant = close(name, schema, cutoff=0.8)
        if is_setting(name, schema):
            problem = f"{name!r} at the top of the config has no effect"
            advice = "nothing reads it there; " + (hint(name, schema) or "use it in the file, or delete it")
            errors.append(UnknownKey(name, section="", valid=schema, hint=advice, problem=problem))
        elif meant:
            advice = f"did you mean '{meant}'? A helper variable of your own may begin with '_'"
            errors.append(UnknownKey(name, section="", valid=schema, hint=advice))
    return errors
