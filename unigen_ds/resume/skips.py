"""Which sequences a run leaves out: those that its checkpoint records, those of a start after it, and new ones."""

from __future__ import annotations

from collections.abc import Iterable

from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.checkpoint.store import Lineage
from unigen_ds.core.errors import ConfigError
from unigen_ds.data.order.order import Skip, merged_skips
from unigen_ds.system.log import notice


def settled_skips(
    wanted: Iterable[Skip], manifest: Manifest | None, lineage: Lineage | None, *, end: float
) -> tuple[Skip, ...]:
    """All ranges, in their order. One that is recorded may be asked for again, as in a command that is repeated.

    Raises ``ConfigError`` for a new range that begins before the checkpoint, or beyond the ``end`` of the run.
    """
    done = manifest.progress.sequences if manifest else 0
    stored = [Skip(*skip) for skip in manifest.loader.get("skips", ())] if manifest else []
    # what only the lineage has and begins before was trained on in this line of checkpoints
    stored += [skip for skip in lineage.skips if skip.first >= done] if lineage else []
    known = merged_skips(stored)
    for skip in wanted:
        if any(one.first <= skip.first and skip.stop <= one.stop for one in known):
            continue
        if skip.first < done:
            raise ConfigError(
                f"sequences {skip} cannot be left out: this run continues at sequence {done:,}, and those before it are"
                " trained on",
                allowed=f"ranges from {done} on",
                remedy=f"--resume CKPT of a checkpoint at sequence {skip.first} or before",
            )
        if skip.first >= end:
            raise ConfigError(f"sequences {skip} cannot be left out: the run ends at sequence {end:,.0f}")
        for one in known:
            if skip.first < one.stop and one.first < skip.stop:
                notice(f"Sequences {skip} overlap {one}, which are left out already: each is left out once.")
        known = merged_skips([*known, skip])
    return known
