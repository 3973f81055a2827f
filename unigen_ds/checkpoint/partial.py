"""Weights for a model that is not the checkpoint's: names revised, vocabularies resized, the rest reported by name.

In: a checkpoint (its ``ShardReader`` and parameter table) and the tensors of the model. Out: a ``Fit``, which lists
tensor by tensor what is loaded and what is not, and a reader under the model's names. A range is read when an engine
needs it, from any layout, so nothing is converted first and every engine at any number of processes gets the same
numbers.

New rows of a vocabulary are the mean of all stored rows: a new token then has about the mean logit, while that of an
untrained row may be far above those of trained ones. transformers adds a noise of 1e-9 of their covariance; here new
rows are equal at first, and their gradients differ.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BeforeValidator, field_validator
from torch import Tensor

from unigen_ds.config.section import AS_LIST, Section
from unigen_ds.config.values import Choices, as_tuple
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.core.shards import BUFFER, MASTER, Fetch, Misfit, Shape, ShardReader, first_names, misfit

DIFFERENCES = ("missing", "unexpected", "reshaped", "sizes")
REPORT_FILE = "load_report.json"
_PIECE = 1 << 22

_Key = tuple[str, str]
"""(kind, name)."""
VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
"""Ends of the names of tensors that have a row for each token."""
Pair = Annotated[tuple[str, str], BeforeValidator(as_tuple)]
Difference = Literal["missing", "unexpected", "reshaped", "sizes"]


class LoadSettings(Section):
    """``load_cfg`` of a config, with ``load_from`` alone. By default nothing may differ."""

    revise_keys: Annotated[
        tuple[Pair, ...], AS_LIST, Choices(r"[(regex, replacement), ...], as in [(r'^module\.', '')]")
    ] = ()
    r"""`[(regex, replacement), ...]`, applied to the stored names in order, as in mmengine: `[(r'^module\.', '')]`."""
    allow: Annotated[tuple[Difference, ...], AS_LIST, Choices("a list of missing, unexpected, reshaped, sizes")] = ()
    """What may differ: a list of `'missing'`, `'unexpected'`, `'reshaped'`, `'sizes'`. Such tensors of the model keep
    their initial values, such ones of the checkpoint are left there; without it each is an error.
    [weights for another model](checkpoints/load_from.md)."""
    resize_vocab: bool | Literal["shrink"] = False
    """True: `*embed_tokens.weight` and `*lm_head.weight` may have more rows than the checkpoint's; `'shrink'`: fewer,
    too."""

    @field_validator("revise_keys")
    @classmethod
    def _compiles(cls, pairs: Any) -> Any:
        for pattern, replacement in pairs:
            try:
                re.sub(pattern, replacement, "")
            except (re.error, IndexError) as error:
                choices = r"[(regex, replacement), ...], as in [(r'^module\.', '')]"
                problem = f"load_cfg.revise_keys: {replacement!r} for {pattern!r}: {error}"
                raise ConfigError(problem, allowed=choices) from error
        return pairs

    def revise(self, name: str) -> str:
        for pattern, replacement in self.revise_keys:
            name = re.sub(pattern, replacement, name)
        return name

    def resizes(self, names: Sequence[str], old: Shape, shape: Shape) -> bool:
        """Whether a tensor of these names may be loaded with more rows, or with fewer."""
        same_rows = len(old) == len(shape) > 1 and old[1:] == shape[1:]
        may_resize = self.resize_vocab == "shrink" or (self.resize_vocab and old[0] <= shape[0])
        return same_rows and bool(may_resize) and any(name.endswith(VOCABULARY) for name in names)


class _Tensor(NamedTuple):
    kind: str
    name: str
    shape: Shape


@dataclass
class Fit(Misfit):
    """Which stored tensor is loaded into which of a model: ``missing`` and ``reshaped`` ones keep initial values."""

    sources: dict[_Key, _Key] = field(default_factory=dict)
    """(kind, name) in the model -> in the checkpoint."""
    resized: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    """Names of vocabularies, which are loaded -> (stored shape, the model's)."""
    sizes: list[str] = field(default_factory=list)
    """Sizes of the model that differ without changing a shape, in words."""

    @property
    def initial_names(self) -> frozenset[str]:
        """Names without a tensor in the checkpoint."""
        return frozenset((*self.missing, *self.reshaped))

    @property
    def renamed(self) -> dict[str, str]:
        """The model's name -> the stored one."""
        return {name: old for (_, name), (_, old) in self.sources.items() if old != name}

    def state_dict(self) -> dict[str, Any]:
        """Plain values, every name: ``load_report.json``."""
        kinds = ("renamed", "resized", *DIFFERENCES)
        return {"taken": len(self.sources), **{kind: getattr(self, kind) for kind in kinds}}

    def lines(self) -> Iterator[tuple[str, str]]:
        """(kind of difference, one line about it with the first names); nothing where there is none."""
        reshapes = [f"{name} was {[*was]} and is {[*now]}" for name, (was, now) in self.reshaped.items()]
        resizes = [f"{name} from {was[0]} to {now[0]} rows" for name, (was, now) in self.resized.items()]
        renames = [f"{old} is {name}" for name, old in self.renamed.items()]
        for kind, what, names in (
            ("renamed", "under another name", renames),
            ("resized", "with a resized vocabulary", resizes),
            ("missing", "missing in the checkpoint", self.missing),
            ("unexpected", "not in the model", self.unexpected),
            ("reshaped", "of another shape", reshapes),
            ("sizes", "sizes that no shape shows", self.sizes),
        ):
            if names:
                yield kind, f"{len(names)} {what}: {first_names(names, '; ')}"

    def check(self, cfg: LoadSettings, *, first: Sequence[str] = ()) -> None:
        """Raises ``CheckpointError`` for what is not allowed, or if nothing fits. ``first``: explanations, in words."""
        refusals = {kind: line for kind, line in self.lines() if kind in DIFFERENCES and kind not in cfg.allow}
        if refusals:
            rows = any(name.endswith(VOCABULARY) for name in self.reshaped)
            remedy = "load_cfg.revise_keys maps stored names to the model's; "
            remedy += "load_cfg.resize_vocab=True adds rows to a vocabulary, 'shrink' removes some; " if rows else ""
            remedy += "the model's config should state the stored sizes; " if self.sizes else ""
            remedy += f"load_cfg.allow={[*refusals]} leaves these as they are; {REPORT_FILE} has every name"
            raise CheckpointError(
                f"the checkpoint does not fit the model: {'; '.join([*first, *refusals.values()])}", remedy=remedy
            )
        if not self.sources:
            raise CheckpointError("nothing in the checkpoint has the name and shape of a tensor of the model",
                                  remedy="map its names with load_cfg.revise_keys")  # fmt: skip


def fit(
    reader: ShardReader,
    table: Sequence[Mapping[str, Any]],
    *,
    parameters: Sequence[Mapping[str, Any]],
    buffers: Mapping[str, int],
    cfg: LoadSettings,
    sizes: Sequence[str] = (),
) -> Fit:
    """Compare a checkpoint with a model, by name and shape; the same on every rank.

    Reads a tensor only where the checkpoint has two of what is one (tied) in the model: are they equal?

    Args:
        table: the checkpoint's parameter table: rows with ``name``, ``shape`` and ``tied`` (further names).
        parameters: the model's.
        buffers: elements of the model's buffers, by name.
        sizes: differences of the model that neither a name nor a shape shows, in words (``resume/finding.py``).

    A tensor is found by any of its names, so tied embeddings fill a model that does not tie them. Raises
    ``CheckpointError`` where two stored names become one.
    """
    by_name, result = _by_revised_name(reader, table, cfg), Fit(sizes=list(sizes))
    targets = [(MASTER, (row["name"], *row.get("tied", ())), tuple(row["shape"])) for row in parameters]
    targets += [(BUFFER, (name,), (numel,)) for name, numel in buffers.items()]
    loads, source_of = set(), {}
    for _, names, _ in targets:
        sources = list(dict.fromkeys(by_name[name] for name in names if name in by_name))
        if sources:
            source_of[names[0]] = source = sources[0]
            loads |= {(each.kind, each.name) for each in sources if each is source or _equal(reader, each, source)}
    differing = misfit({n: source.shape for n, source in source_of.items()}, {names[0]: s for _, names, s in targets})
    result.missing = differing.missing
    for kind, (name, *others), shape in targets:
        if name not in source_of:
            continue
        source = source_of[name]
        if name in differing.reshaped and cfg.resizes((name, *others), source.shape, shape):
            result.resized[name] = differing.reshaped[name]
        elif name in differing.reshaped and not (
            # of buffers only the number of elements is known, and plain weight files do not distinguish them
            BUFFER in (source.kind, kind) and math.prod(source.shape) == math.prod(shape)
        ):
            result.reshaped[name] = differing.reshaped[name]
            continue
        result.sources[kind, name] = source.kind, source.name
    tensors = dict.fromkeys((source.kind, source.name) for source in by_name.values())
    result.unexpected = [name for kind, name in tensors if (kind, name) not in loads]
    return result


def _by_revised_name(reader: ShardReader, table: Sequence[Mapping[str, Any]], cfg: LoadSettings) -> dict[str, _Tensor]:
    pairs = [((row["name"], *row.get("tied", ())), _Tensor(MASTER, row["name"], tuple(row["shape"]))) for row in table]
    pairs += [((name,), _Tensor(BUFFER, name, (reader.numel(BUFFER, name),))) for name in reader.names(BUFFER)]
    by_name: dict[str, _Tensor] = {}
    for names, tensor in pairs:
        for name in names:
            other = by_name.setdefault(cfg.revise(name), tensor)
            if other is not tensor:
                raise CheckpointError(
                    f"{other.name} and {tensor.name} of the checkpoint both become {cfg.revise(name)}",
                    remedy="make the patterns of load_cfg.revise_keys narrower",
                )
    return by_name


def _equal(reader: ShardReader, one: _Tensor, other: _Tensor) -> bool:
    """Whether two stored tensors are the same, bit by bit: a format without sharing has tied weights twice."""
    numel = math.prod(one.shape)
    return one.shape == other.shape and all(
        torch.equal(*(reader.read(each.kind, each.name, at, min(at + _PIECE, numel)) for each in (one, other)))
        for at in range(0, numel, _PIECE)
    )


class FittedReader(ShardReader):
    """A ``ShardReader`` under the model's names of the tensors that a ``Fit`` loads."""

    def __init__(self, reader: ShardReader, fit: Fit) -> None:
        super().__init__()
        for (kind, name), source in fit.sources.items():
            old, shape = fit.resized.get(name, ((reader.numel(*source),),) * 2)
            have, numel = math.prod(old), math.prod(shape)
            self.add(kind, name, 0, min(have, numel), partial(reader.read, *source))
            self.add(kind, name, have, max(numel - have, 0), _new_rows(reader, source, old))


def _new_rows(reader: ShardReader, source: _Key, old: Shape) -> Fetch:
    """Fetch from further rows of a tensor, each the mean of the stored ones."""
    width = math.prod(old[1:])

    @cache
    def mean() -> Tensor:
        """Read the rows in pieces, summed in fp64: the same on every rank."""
        total, step = torch.zeros(width, dtype=torch.float64), max(1, _PIECE // width)
        for first in range(0, old[0], step):
            piece = reader.read(*source, first * width, min(first + step, old[0]) * width)
            total += piece.reshape(-1, width).sum(0, dtype=torch.float64)
        return (total / old[0]).float()

    def fetch(start: int, stop: int) -> Tensor:
        column = start % width
        return mean().repeat(-(-(column + stop - start) // width))[column : column + stop - start]

    return fetch
