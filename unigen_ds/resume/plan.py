"""Which checkpoint a run resumes from, and whether it may.

docs/architecture.md (The checkpoint) has the table of ``resume`` and ``load_from``. ``load_cfg`` lists what may differ
where weights alone are loaded; ``True`` and CKPT refuse it. A bare ``--resume`` sets ``'auto'``: the same command
begins a run and continues it, also one that began with ``load_from``.
Called on rank 0, which sends the result to the others: a checkpoint is read completely, for its hashes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from unigen_ds.checkpoint import foreign, store
from unigen_ds.checkpoint.foreign import locate
from unigen_ds.checkpoint.home import home_of, run_of, same
from unigen_ds.checkpoint.manifest import FILE_NAME, Base, Manifest
from unigen_ds.checkpoint.partial import LoadSettings
from unigen_ds.config.hub import folder_of
from unigen_ds.core.choices import AUTO
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.core.progress import Skip, merged_skips
from unigen_ds.system.files import check_digests, read_line
from unigen_ds.system.journals import METRICS_FILE, last_update
from unigen_ds.system.log import notice

NOT_RESUMED = "Not resumed from"
"""First words of a message about a newer checkpoint that cannot be used."""


@dataclass(frozen=True)
class ResumePlan:
    """What will be loaded. ``messages`` are to be logged once logging is up."""

    mode: Literal["fresh", "resume", "weights"]
    checkpoint: Path | None = None
    manifest: Manifest | None = None
    """None with a checkpoint: it is of another trainer (``checkpoint/foreign.py``)."""
    messages: Sequence[str] = ()
    load_cfg: LoadSettings = field(default_factory=LoadSettings)
    """What may differ where weights alone are loaded."""
    seed: int = 0
    """Seed of the run: the config's; where that is None the checkpoint's on a resume, else one that was drawn."""
    precision: str | None = None
    """Precision of the run: the config's; where that is ``'auto'`` the one that rank 0 has chosen."""
    base: Base | None = None
    """Present files of the base model, where adapters are trained."""
    lineage: store.Lineage | None = None
    """What the folder of the checkpoints records once a resume has loaded its checkpoint."""


def plan_resume(
    work_dir: Path,
    *,
    resume: bool | str,
    load_from: str | None,
    load_cfg: LoadSettings | None = None,
    hashes: bool = True,
) -> ResumePlan:
    """Decide by that table, from files; without ``hashes`` by their sizes, not their content.

    Raises ``ConfigError`` for a fresh start over checkpoints, and ``CheckpointError`` where none can be used.
    """
    listing = store.list_checkpoints(work_dir)
    notes: tuple[str, ...] = ()
    if resume == AUTO:
        plan = _newest(work_dir, listing, hashes=hashes)
        if plan.mode == "resume":
            more = [f"load_from {load_from} is where this run began: it is not read again."] * (load_from is not None)
            return replace(plan, messages=(*plan.messages, *more))
        if load_from is None and not load_cfg:
            return plan
        resume, notes = False, (f"No checkpoint found in {work_dir}: training begins from load_from.",)
    if isinstance(resume, str) and load_from is not None:
        raise ConfigError(
            f"both resume={resume!r} and load_from={load_from!r} name a checkpoint",
            remedy="resume continues a run; load_from alone loads weights only",
        )
    if load_cfg and (resume or load_from is None):
        raise ConfigError(
            f"load_cfg is set, but {'the run is resumed, which is exact' if resume else 'load_from is not'}",
            allowed="load_cfg with load_from and without resume",
            remedy="--cfg-options load_cfg=null load_from=null",
        )
    settings = load_cfg or LoadSettings()
    if listing and not resume:
        names = ", ".join(checkpoint.path.name for checkpoint in listing[-3:])
        raise ConfigError(
            f"{work_dir} already holds checkpoints ({names}) but resume was not asked for",
            remedy="--resume continues that run; --work-dir NEW starts another one in its own folder",
        )
    name = resume if isinstance(resume, str) else load_from
    if name is None:
        return _newest(work_dir, listing, hashes=hashes) if resume else ResumePlan("fresh")
    if not resume:
        name = str(folder_of(name, where="load_from"))
    path = checkpoint_directory(name)
    if (path / FILE_NAME).is_file():
        manifest: Manifest | None = store.verify_manifest(path, hashes=hashes, listing=listing)
    elif path.is_dir() and (inside := listing if same(path, work_dir) else store.list_checkpoints(path)):
        of_run = _newest(path, inside, hashes=hashes)
        assert of_run.checkpoint is not None and of_run.manifest is not None, "else it raises"
        manifest = of_run.manifest
        notes += (*of_run.messages[:-1], f"{path} is the folder of a run: {of_run.checkpoint.name} is its newest.")
        path = of_run.checkpoint
    else:
        if hashes:
            check_digests(path)
        manifest = None
        notes += (f"{path} has no manifest: it is read as another trainer's checkpoint.",)
    if not resume:
        return ResumePlan("weights", path, manifest, notes, settings)
    lineage = store.continued_lineage(work_dir, path, listing)
    if manifest is None:
        return ResumePlan("resume", path, messages=notes, lineage=lineage)
    messages = [*notes, f"Resumed from the checkpoint {path}."]
    first = manifest.commit if store.is_inside(work_dir, path) else 0
    later = [f.path.name for f in listing if f.manifest and f.manifest.commit > first]
    if later:
        messages.append(
            f"It was named, so later checkpoints in {work_dir} are not used any more: {', '.join(later)}. To resume"
            " from the newest one, name none (no load_from, --resume alone)."
        )
    return ResumePlan("resume", path, manifest, tuple(messages), lineage=lineage)


def _newest(work_dir: Path, listing: Sequence[store.Candidate], *, hashes: bool) -> ResumePlan:
    checkpoint, unusable = store.newest(work_dir, hashes=hashes, listing=listing)
    messages = [f"{NOT_RESUMED} {r.path}: {r.problem}" for r in unusable]
    if checkpoint is None and unusable:
        raise CheckpointError(
            f"{work_dir} holds {len(unusable)} checkpoint(s) and none is usable: " + "; ".join(messages),
            remedy="repair them, name the one to resume from with --resume CKPT, or remove them; a run never starts"
            " from scratch without a message",
        )
    update = checkpoint.manifest.progress.updates if checkpoint and checkpoint.manifest else 0
    num_lost = max(0, last_update(run_of(work_dir) / METRICS_FILE) - update)
    hint = read_line(work_dir / store.HINT)
    again = f"{num_lost:,} updates after update {update:,}, which {METRICS_FILE} has, are trained again."
    if hint is not None and not (work_dir / Path(hint).name).is_dir() and not Path(hint).is_dir():
        messages.append(f"{NOT_RESUMED} {hint}: {store.HINT} names it, and it is not there; {again}")
    elif num_lost:
        gone = f"{NOT_RESUMED} a newer checkpoint: none was completed, or it is gone; "
        messages.append((gone if hint is None else "The newest checkpoint is older than the log: ") + again)
    if checkpoint is None:
        fresh = f"No checkpoint found in {work_dir}: training starts from scratch."
        return ResumePlan("fresh", messages=(*messages, fresh))
    messages.append(f"Auto resumed from the latest checkpoint {checkpoint.path}.")
    lineage = store.continued_lineage(work_dir, checkpoint.path, listing)
    return ResumePlan("resume", checkpoint.path, checkpoint.manifest, tuple(messages), lineage=lineage)


def checkpoint_directory(text: str) -> Path:
    """The checkpoint that a path means: itself, that of a file in it, another trainer's, weights, a run's folder."""
    path = Path(text).expanduser().resolve()
    if not path.exists():
        raise store.missing(path)
    path = home_of(path)
    if path.name.startswith(store.NOT_FINITE):
        raise CheckpointError(
            f"{path} has a state that is not finite (NaN or infinite): nothing continues from it",
            remedy="--resume alone continues the newest checkpoint that is finite",
        )
    whole = store.STAGING not in path.name and not path.name.endswith(store.DELETING)
    if whole and (path / FILE_NAME).is_file():
        return path
    inside = [each.path.name for each in store.list_checkpoints(path)] if path.is_dir() else []
    if whole:
        location = locate(path)
        in_hint = location in [path / name for name in inside]  # by our own hint: a resume without a name uses it
        if not in_hint and ((location / FILE_NAME).is_file() or foreign.is_known(location)):
            return location
    if inside:
        return path
    if path.is_dir():
        inside = sorted(folder.name for folder in path.iterdir() if folder.is_dir() and foreign.is_known(folder))
    hint = f"it holds {', '.join(inside)}: name one of them" if inside else None
    raise CheckpointError(f"{path} is not a checkpoint of this project: it has no {FILE_NAME}", remedy=hint)


def join_skips(
    new: Iterable[Skip], manifest: Manifest | None, lineage: store.Lineage | None, *, end: float
) -> tuple[Skip, ...]:
    """All ranges that a run leaves out, in order: its checkpoint's, later starts', and new ones. A range already
    recorded may be asked for again, as in a repeated command.

    Raises ``ConfigError`` for a new range that begins before the checkpoint, or beyond the ``end`` of the run.
    """
    now = manifest.progress.sequences if manifest else 0
    old = [Skip(*skip) for skip in manifest.loader.get("skips", ())] if manifest else []
    # what only the lineage has and begins before was trained on in this line of checkpoints
    old += [skip for skip in lineage.skips if skip.first >= now] if lineage else []
    result = merged_skips(old)
    for skip in new:
        if any(one.first <= skip.first and skip.stop <= one.stop for one in result):
            continue
        if skip.first < now:
            raise ConfigError(
                f"sequences {skip} cannot be left out: this run continues at sequence {now:,}, and those before it are"
                " trained on",
                allowed=f"ranges from {now} on",
                remedy=f"--resume CKPT of a checkpoint at sequence {skip.first} or before",
            )
        if skip.first >= end:
            raise ConfigError(f"sequences {skip} cannot be left out: the run ends at sequence {end:,.0f}")
        for one in result:
            if skip.first < one.stop and one.first < skip.stop:
                notice(f"Sequences {skip} overlap {one}, which are left out already: each is left out once.")
        result = merged_skips([*result, skip])
    return result
