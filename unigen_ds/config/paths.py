"""Where the project's data files and tools are, in a checkout or an installed wheel; and the paths in a config."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from unigen_ds.core.errors import ConfigError

PACKAGE = Path(__file__).resolve().parent.parent

PATH_KEYS = frozenset((
    "work_dir", "checkpoint_dir", "load_from", "resume", "data_path", "image_root", "cache_dir", "root", "path",
    "pretrained", "config", "save_dir", "base",
))  # fmt: skip
"""Keys of a config whose texts are paths, at any depth."""
_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")


def expand(path: str, *, where: str) -> str:
    """``~`` and environment variables replaced. Raises ``ConfigError`` naming a variable that is not set."""
    full_path = os.path.expanduser(os.path.expandvars(path))
    missing = _VARIABLE.search(full_path)
    if missing and not os.path.exists(full_path):
        raise ConfigError(
            f"{where} is {path!r}, and the environment variable {missing[1].strip('{}')} is not set",
            remedy="set it, or write the path out",
        )
    return full_path


def paths_in(
    config: Any, keys: Collection[str] = PATH_KEYS, *, where: str = "", is_path: bool = False
) -> Iterator[tuple[Any, Any, str]]:
    """(mapping or list, its key, dotted name) of every text below one of ``keys``, at any depth."""
    for key, value in [*(config.items() if hasattr(config, "items") else enumerate(config))]:
        name, below = f"{where}.{key}" if where else str(key), is_path or key in keys
        if isinstance(value, (Mapping, list, tuple)):
            yield from paths_in(value, keys, where=name, is_path=below)
        elif below and isinstance(value, str):
            yield config, key, name


def expand_paths(config: Any) -> None:
    """``expand`` every path of a config, in place; nothing else does."""
    for node, key, name in paths_in(config):
        if not isinstance(node, tuple):
            node[key] = expand(node[key], where=name)


def is_hub_name(path: str) -> bool:
    """Whether a text can be ``organisation/name`` on the Hugging Face hub and is no path here."""
    return path.count("/") == 1 and not path.startswith(("/", ".", "~")) and not Path(path).parent.is_dir()


def download_remedy(name: str, *, data: bool = False) -> str:
    """What to do where a name of the hub, of a model or of ``data``, was given and nothing can be downloaded."""
    kind = " --repo-type dataset" if data else ""
    return f"where there is a network: hf download {name}{kind} --local-dir FOLDER; then name that folder instead"


def tool(name: str) -> list[str]:
    """What follows ``python`` to run a tool: its file in a checkout, its module where only the wheel is installed."""
    script = PACKAGE.parent / "tools" / f"{name}.py"
    return [str(script)] if script.is_file() else ["-m", f"unigen_ds_tools.{name}"]


def command(name: str, *arguments: str, processes: int = 1) -> str:
    """The command line that starts a tool, in so many processes of this node."""
    words = [*tool(name), *arguments]
    if Path(words[0]).is_relative_to(Path.cwd()):
        words[0] = os.path.relpath(words[0])
    launcher = ["python"] if processes == 1 else ["torchrun", "--nproc_per_node", str(processes)]
    return shlex.join([*launcher, *words])


def ds_configs_dir() -> Path:
    """The folder of the shipped DeepSpeed configs (``zero2.json`` and others)."""
    of_wheel = PACKAGE / "ds_configs"
    return of_wheel if of_wheel.is_dir() else PACKAGE.parent / "ds_configs"
