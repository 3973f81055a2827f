"""What must be equal on all ranks, compared when they have joined: first the settings and versions, since what follows
waits for the same collectives; then, once each rank has read it, the data.

A rank with other values would train something else, or wait for ever. Paths on the disks of a node may differ; what is
found there may not. So may what only rank 0 uses, and how a process computes (``_OWN``).
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unigen_ds.checkpoint.manifest import current_versions
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.json_values import as_text, json_values
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.runner.start.build import Data, locate_pretrained
from unigen_ds.system import dist
from unigen_ds.system.machine import source_digest

_OWN = (
    "work_dir", "checkpoint_dir", "launcher", "visualizer", "env.num_threads", "env.cuda_allocator",
    "env.tokenizers_parallelism", "env.peak_tflops", "env.log_level",
)  # fmt: skip
_OWN_LAST = ("cache_dir", "num_workers", "index_workers", "prefetch_factor", "pin_memory")
_NAMED_ABOVE = ("names", "sizes", "digests", "records", "units")
_LONGEST, _MOST = 80, 10
"""Characters of a value, and keys, that the error shows."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".json")


class RanksDiffer(ConfigError):
    """Ranks have other settings, data, versions or code."""

    everywhere = True


def check_settings(settings: Settings, *, max_updates: int | None) -> None:
    """Raise ``RanksDiffer`` on all ranks where one has other settings, packages or code. Collective."""
    if dist.world_size() == 1:
        return
    facts: dict[str, Any] = {}
    for key, value in _leaves(json_values(Settings.completed(settings.given), _as_name)):
        if not (key.startswith(_OWN) or key.endswith(_OWN_LAST) or _is_local(value)):
            facts[key] = value
        elif key == "backend.config" and Path(value).is_file():
            facts[key] = Path(value).read_text(encoding="utf-8", errors="replace")
    for name in settings.custom_imports.imports:  # modules that register a user's own classes; of a package all files
        path = getattr(sys.modules.get(name), "__file__", None)
        facts[f"code of {name}"] = None if path is None else source_digest(Path(path))
    facts |= {f"version of {name}": version for name, version in current_versions().items()}
    _compare({**facts, "max_updates": max_updates, "code of unigen_ds": source_digest()})


def check_data(settings: Settings, data: Data, *, total_sequences: float) -> None:
    """The same for the data that each rank has read, and for the files of published weights. Collective."""
    if dist.world_size() == 1:
        return
    facts: dict[str, Any] = {"total_sequences": total_sequences}
    parts: list[tuple[str, Any]] = [("data", data.stream)]
    parts += [(f"validation data {one.name}".rstrip(), one) for one in data.validation]
    for kind, part in parts:
        for name, dataset in zip(part.names, part.datasets, strict=True):
            facts[f"{kind} {name}: records"] = len(dataset)
            facts[f"{kind} {name}: fingerprint"] = dataset.fingerprint
    identity = data.stream.identity
    order = {key: value for key, value in identity["facts"].items() if key not in _NAMED_ABOVE}
    facts |= _leaves({"order": order, "phases": identity["phases"]})
    for key, value in _leaves({"pretrained": locate_pretrained(settings.model.spec).get("pretrained")}):
        facts[f"model.{key}: files"] = _files(Path(value).expanduser()) if isinstance(value, str) else value
    _compare(facts)


def _compare(own: Mapping[str, Any]) -> None:
    texts = {key: json.dumps(value, sort_keys=True, default=str) for key, value in own.items()}
    number = int.from_bytes(hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).digest()[:6], "big")
    highest, lowest = dist.max_floats([number, -number])
    if highest == -lowest:
        return
    short = {
        key: text if len(text) <= _LONGEST else
        f"{text[:_LONGEST]}... ({len(text)} characters, digest {hashlib.sha256(text.encode()).hexdigest()[:8]})"
        for key, text in texts.items()
    }  # fmt: skip
    ranks = dist.gather_objects(short)
    lines: list[str] = []
    everywhere = set.intersection(*map(set, ranks))
    for key in sorted({key for one in ranks for key in one}, key=lambda key: (key not in everywhere, key)):
        having: dict[str, list[int]] = defaultdict(list)
        for rank, one in enumerate(ranks):
            having[one.get(key, "not there")].append(rank)
        if len(having) > 1:
            values = []
            for text, of_text in having.items():
                rest = f" and {len(of_text) - 8} more" if len(of_text) > 8 else ""
                values.append(f"rank {', '.join(map(str, of_text[:8]))}{rest}: {text}")
            lines.append(f"{key}: {'; '.join(values)}")
    more = f"\n  and {len(lines) - _MOST} more" if len(lines) > _MOST else ""
    raise RanksDiffer(
        "the processes differ:\n  " + "\n  ".join(lines[:_MOST]) + more,
        remedy="start all of them with the same config, files, packages and code",
    )


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted paths with the values that are no mapping, and no list of mappings."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, value


def _as_name(value: Any) -> Any:
    """A class or a function by its name: the text of an object has its address."""
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", text) if isinstance(text := as_text(value), str) else text


def _is_local(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(map(_is_local, value))
    return isinstance(value, str) and value.startswith(("/", "~", "./", "../"))


def _files(path: Path) -> dict[str, int]:
    """Names and sizes of the files of weights: to read them all would need minutes."""
    paths = [path] if path.is_file() else sorted(path.rglob("*"))
    sizes = {str(one.relative_to(path)): one.stat().st_size for one in paths if one.suffix in _WEIGHTS}
    return {name: size for name, size in sizes.items() if not name.startswith(".cache")}
