"""Groups of sources (``train_dataloader.groups``) -> the weight of each source, and which groups are mandatory.

A group has its share of the samples, by its weight among the groups; its sources divide that by their own weights, or,
where these are left out, in proportion to their samples, so that every sample of the group comes equally often. A
mandatory group has a sample in every packed sequence, whatever its weight (``stream.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pydantic import Field

from unigen_ds.config.section import Section
from unigen_ds.config.values import Number
from unigen_ds.core.errors import ConfigError, DataError, suggestion
from unigen_ds.data.datasets.dataset import PlannedDataset, is_streamed
from unigen_ds.data.order.mixture import exact
from unigen_ds.data.order.order import Weight
from unigen_ds.data.samples.sample import Array

_KEY = "train_dataloader.groups"


class DataGroup(Section):
    """Sources that share a weight: those whose `group` is its name."""

    weight: Number = Field(gt=0, allow_inf_nan=False)
    """Share of the samples, relative to the other groups."""
    mandatory: bool = False
    """Every packed sequence has a sample of it: where its weight means too few, more."""


@dataclass(frozen=True)
class Blend:
    weights: tuple[Weight, ...] | None = None
    """Weight of each source; None: every record is used once an epoch."""
    mandatory: tuple[tuple[int, ...], ...] = ()
    """Numbers of the sources of each mandatory group."""
    names: tuple[str, ...] = ()
    facts: dict[str, Any] | None = None
    """Groups and sources as in the config, for the manifest; None: there are no groups."""


def blend(
    datasets: Sequence[PlannedDataset],
    sizes: Sequence[int],
    groups: Mapping[str, DataGroup],
    *,
    skips: Sequence[tuple[str, str | None]] = (),
) -> Blend:
    """Raises ``ConfigError`` where groups do not fit the sources, ``DataError`` where one has nothing but ``skips``."""
    of_sources = [getattr(dataset, "group", None) for dataset in datasets]
    for dataset, group in zip(datasets, of_sources, strict=True):
        if group not in groups and (group is not None or groups):
            raise ConfigError(
                f"the data set {dataset.name} has group={group!r}",
                allowed=f"a group of {_KEY}: {', '.join(groups)}" if groups else f"{_KEY}, which names the groups",
                remedy=suggestion(str(group), groups) or "group=... of that data set, or another name in the config",
            )
    if not groups:
        weights = dataset_weights(datasets)
        if weights is None and any(map(is_streamed, datasets)):
            weights = [1.0]
        return Blend(None if weights is None else tuple(weights))
    total = sum((exact(group.weight) for group in groups.values()), Fraction(0))
    shares: list[Weight] = [0.0] * len(datasets)
    members = {name: [k for k, group in enumerate(of_sources) if group == name] for name in groups}
    for name, sources in members.items():
        if names := [one for one, group in skips if group == name and not sources]:
            raise DataError(
                f"{_KEY}: every data set of the group {name} is skipped (on_error='skip'): {', '.join(names)}",
                remedy="see the warnings above; without its data the group has to be removed from the config",
            )
        if not sources:
            raise ConfigError(f"{_KEY}: no data set has group={name!r}", remedy="remove the group, or name it")
        own = dataset_weights([datasets[k] for k in sources])
        parts = [Fraction(sizes[k]) for k in sources] if own is None else [exact(weight) for weight in own]
        for k, part in zip(sources, parts, strict=True):
            shares[k] = str(exact(groups[name].weight) / total * part / sum(parts))
    mandatory = [name for name, group in groups.items() if group.mandatory]
    streams = [dataset.name for dataset in datasets if is_streamed(dataset)]
    if mandatory and streams:
        raise ConfigError(
            f"the group {mandatory[0]} is mandatory, which needs the lengths of all samples; {streams[0]} is streamed",
            remedy="mandatory=False, or data sets without streaming",
        )
    settings = {name: {"weight": float(group.weight), "mandatory": group.mandatory} for name, group in groups.items()}
    each = [[group, dataset.weight] for group, dataset in zip(of_sources, datasets, strict=True)]
    return Blend(
        tuple(shares), tuple(tuple(members[name]) for name in mandatory), tuple(mandatory),
        {"groups": settings, "sources": each},
    )  # fmt: skip


def dataset_weights(datasets: Sequence[PlannedDataset]) -> list[float] | None:
    """The weights of all, or None. Raises ``ConfigError`` for one that is missing beside others or is not positive."""
    weights = [dataset.weight for dataset in datasets if dataset.weight is not None]
    if weights and len(weights) < len(datasets):
        without = [dataset.name for dataset in datasets if dataset.weight is None]
        problem = f"data sets without a weight beside others with one: {', '.join(without)}"
        raise ConfigError(problem, remedy="give all of them a weight, or none")
    for dataset in datasets:
        if dataset.weight is not None and not 0 < dataset.weight < math.inf:
            raise ConfigError(
                f"the data set {dataset.name} has weight={dataset.weight}",
                allowed="a positive number",
                remedy=f"remove {dataset.name} from the list to train without it",
            )
    streams = [dataset.name for dataset in datasets if is_streamed(dataset)]
    if streams and not weights and len(datasets) > 1:
        raise ConfigError(
            f"{streams[0]} is streamed, so nobody knows how many records it has beside those of the other data sets",
            remedy="weight=... of each data set",
        )
    return weights or None


def check_mandatory(
    blend: Blend, tokens: Sequence[Array], tiles: Sequence[Array], *, packer: Any, seq_length: int
) -> None:
    """Raise ``ConfigError`` for a packer without mandatory groups, ``DataError`` where these leave too little space."""
    if not blend.mandatory:
        return
    title = f"the mandatory groups: {', '.join(blend.names)}"
    if not hasattr(packer, "plan_with"):
        kind = "None" if packer is None else type(packer).__name__
        problem = f"{title} must be in every sequence, and train_dataloader.packing is {kind}"
        raise ConfigError(problem, remedy="packing=dict(type='BestFitPacking'), or another packer that knows them")
    limits = [("tokens", tokens, seq_length, "a larger seq_length, or train_dataloader.max_sample_tokens")]
    if (max_tiles := getattr(packer, "max_tiles", None)) is not None:
        limits.append(("images", tiles, max_tiles, "a larger max_tiles of the packer"))
    for what, columns, limit, remedy in limits:
        most = [min(int(column.max(initial=0)), limit) for column in columns]
        reserve = sum(max(most[k] for k in group) for group in blend.mandatory)
        rest = max(limit - reserve, 0)
        beside = [column for k, column in enumerate(columns) if not any(k in group for group in blend.mandatory)]
        over = sum(int((column > rest).sum()) for column in beside)
        if reserve > limit or (over and reserve):
            raise DataError(
                f"{title} must be in every sequence, which needs up to {reserve:,} {what} of {limit:,}: {over:,}"
                f" samples of other groups have more than the {rest:,} {what} that are left",
                remedy=remedy,
            )
