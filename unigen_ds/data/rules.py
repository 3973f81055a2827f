"""Versions of the rules by which records become tokens and pixels, and are mixed: an old run keeps those it began with.

A rule that changes gets a new version here. The versions are part of the index key and of the data facts in every
manifest; the fingerprints of the data contain a version only where its rule changes a record ("touches" it), so data
that no rule touches keeps its fingerprint. A resume reads with the checkpoint's versions: bit-equal.

=================  ===  ===========================================================================================
overflow           0    every record longer than ``seq_length`` is truncated, without a message
images             0    as PIL decodes: EXIF orientation ignored, 16-bit grey clipped, transparency on white
                   1    upright by EXIF, 16-bit grey by its upper 8 bits, transparency as the model's family reads it
special_tokens     0    a text that spells a special token becomes that token
image_folders      0    of several data files in different folders: relative image paths start at the first one's folder
                   1    ... at the folder of their own data file
mixture            0    ``mixture-1``: weighted sources have their shares in each epoch, shuffled within it
                   1    ``mixture-2``: at every position within one sample of the share, over all epochs (mixture.py)
=================  ===  ===========================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from unigen_ds.core.errors import CheckpointError

TOUCH_BITS = {"images": 1, "special_tokens": 2, "image_folders": 4}
"""Bit of each rule in the index column ``touched``: rules whose effect on a record follows from the record and its file
alone."""


@dataclass(frozen=True)
class DataRules:
    """The version of each rule; the defaults are the current ones."""

    overflow: int = 1
    images: int = 1
    special_tokens: int = 1
    mixture: int = field(default=1, repr=False)
    """Of the order, not of the records: no part of the index key."""
    image_folders: int = field(default=1, repr=False)
    """Part of the index key of what it can change (``Index.build``)."""

    @classmethod
    def stored(cls, facts: Mapping[str, Any]) -> DataRules:
        """Those of a checkpoint (``facts`` of its manifest's ``loader``): version 0 of each where it has none.

        Raises ``CheckpointError`` for a version that this package does not have.
        """
        given, current = facts.get("rules") or {}, CURRENT
        names = [one.name for one in fields(cls)]
        if not isinstance(given, Mapping) or not all(type(given.get(name, 0)) is int for name in names):
            raise CheckpointError(f"the rules of the data are {given!r}", allowed="whole numbers by name")
        for name in names:
            if not 0 <= given.get(name, 0) <= getattr(current, name):
                raise CheckpointError(
                    f"the checkpoint follows version {given[name]} of the data rule {name!r}",
                    allowed=f"up to {getattr(current, name)}",
                    remedy="use a newer unigen_ds",
                )
        return cls(**{name: given.get(name, 0) for name in names})

    def state_dict(self) -> dict[str, int]:
        """Plain values, as in a manifest."""
        return asdict(self)

    def marks(self, touched: int) -> tuple[tuple[str, int], ...]:
        """(rule, version) of each rule that changes what has the bits ``touched``; part of its fingerprint.

        Version 0 changes nothing, so it leaves no mark.
        """
        if not touched:  # called for every record
            return ()
        versions = asdict(self)
        return tuple((name, versions[name]) for name, bit in TOUCH_BITS.items() if touched & bit and versions[name])

    def outdated(self) -> dict[str, tuple[int, int]]:
        """(this version, the current one) of each rule that has a newer one."""
        own, current = asdict(self), asdict(CURRENT)
        return {name: (own[name], current[name]) for name in own if own[name] != current[name]}


CURRENT = DataRules()
