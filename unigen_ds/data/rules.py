"""Versions of the rules by which records become tokens and pixels, and are mixed.

There is one version of each, that of 1.0. They are part of the keys of indices and of the data facts in every manifest,
so a checkpoint whose data was read by other rules is refused. The fingerprints of the data contain a version only where
its rule changes a record ("touches" it): one that it does not touch reads the same without the rule.

=================  ===  ===========================================================================================
overflow           1    a long text is split, any other long record is left out, or as ``train_dataloader.overflow``
images             1    upright by EXIF, 16-bit grey by its upper 8 bits, transparency as the model's family reads it
special_tokens     1    a text that spells a special token is ordinary text
image_folders      1    relative image paths start at the folder of their own data file
mixture            1    weighted sources: at every position within one sample of the share, over all epochs
=================  ===  ===========================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from unigen_ds.core.errors import CheckpointError

TOUCH_BITS = {"images": 1, "special_tokens": 2, "image_folders": 4}
"""Bit of each rule in the index column ``touched``: rules whose effect on a record follows from the record and its file
alone."""


@dataclass(frozen=True)
class DataRules:
    """The version of each rule."""

    overflow: int = 1
    images: int = 1
    special_tokens: int = 1
    mixture: int = field(default=1, repr=False)
    """Of the order, not of the records: no part of the index key, which is made of the representation."""
    image_folders: int = field(default=1, repr=False)
    """Part of the index key of what it can change (``Index.build``)."""


RULES = DataRules()
RULE_VERSIONS: Mapping[str, int] = asdict(RULES)
"""As a manifest has them."""


def check_rules(facts: Mapping[str, Any]) -> None:
    """Raise ``CheckpointError`` where the data of a checkpoint (``facts`` of its manifest's ``loader``) was read by
    other rules than those of this package.
    """
    stored = facts.get("rules")
    if stored != RULE_VERSIONS:
        raise CheckpointError(
            f"the checkpoint's data follows the rules {stored!r}",
            allowed=f"{dict(RULE_VERSIONS)} (docs/data.md)",
            remedy="continue it with the unigen_ds that wrote it (versions.unigen_ds in its manifest.json)",
        )


def marks(touched: int) -> tuple[tuple[str, int], ...]:
    """(rule, version) of each rule that changes what has the bits ``touched``; part of its fingerprint."""
    if not touched:  # called for every record
        return ()
    return tuple((name, RULE_VERSIONS[name]) for name, bit in TOUCH_BITS.items() if touched & bit)
