"""A manifest for a checkpoint of another trainer: from its files as far as they state it, else from the config.

The order of its data is not known, so the run continues after as many sequences as the checkpoint was trained on, in
the order of this project. Everything that could not be determined is in ``Foreign.unknown`` and in the checklist.
"""

from __future__ import annotations

import shlex

import torch

from unigen_ds.checkpoint.foreign import Foreign
from unigen_ds.checkpoint.manifest import FileEntry, Manifest
from unigen_ds.checkpoint.partial import fit
from unigen_ds.checkpoint.settings import LoadSettings
from unigen_ds.core.errors import ResumeBlocked, UnigenError
from unigen_ds.core.progress import Geometry, Progress, Ruler
from unigen_ds.core.shards import persistent_buffers
from unigen_ds.data.batches.stream import SequenceStream
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.runner.start.build import (
    build_limits,
    build_model,
    build_processor,
    named_parameters,
    parameter_table,
    total_sequences,
)
from unigen_ds.schedule.schedule import Schedules


def geometry_of(foreign: Foreign, settings: Settings) -> Geometry:
    """The geometry it was trained with. Raises ``ResumeBlocked``: it cannot be resumed, with the command that loads its
    weights; or what to pass with ``--assume``.
    """
    if foreign.updates is None:
        raise ResumeBlocked(
            f"{foreign.directory} ({foreign.writer}) cannot be resumed: of such files the weights alone are read",
            remedy=f"a new run with them: --load-from {shlex.quote(str(foreign.directory))}"
            f" {_renaming(foreign, settings)} --work-dir NEW".replace("  ", " "),
        )
    if foreign.geometry is None:
        raise ResumeBlocked(
            f"{foreign.directory} has no manifest, and its files do not state the whole effective batch size:"
            f" {' '.join(line for line in foreign.unknown if '--assume' in line)}"
        )
    return foreign.geometry


def _renaming(foreign: Foreign, settings: Settings) -> str:
    """The further option with which its names are the model's, where they are not and one prefix changes them all."""
    try:
        with torch.device("meta"):
            model = build_model(settings, build_processor(settings, seed=0), seed=0)
        parameters = parameter_table(named_parameters(model), ())
        buffers = {name: buffer.numel() for name, buffer in persistent_buffers(model).items()}
        return fit(
            foreign.reader, foreign.parameters, parameters=parameters, buffers=buffers, cfg=LoadSettings()
        ).option
    except UnigenError:  # it is reported when it is loaded
        return ""


def adopt(foreign: Foreign, settings: Settings, stream: SequenceStream) -> Manifest:
    """A manifest for ``--resume``. ``stream`` is built with the geometry of ``geometry_of``."""
    geometry, sequences = geometry_of(foreign, settings), foreign.sequences or 0
    ruler = Ruler(geometry, stream.sequences_per_epoch)
    cursor = stream.seek(sequences)
    optimizer = settings.optim_wrapper.optimizer
    schedules = Schedules.from_cfg(
        settings.param_scheduler,
        ruler=ruler,
        base=[{"name": "default", "lr": optimizer.lr}],
        total_sequences=total_sequences(build_limits(settings.train_cfg, ruler), geometry, stream.tokens_per_sequence),
    )
    return Manifest(
        commit=0,
        parent=None,
        progress=Progress(
            sequences=sequences,
            samples=round(sequences * stream.samples_per_sequence),
            tokens=round(sequences * stream.tokens_per_sequence),
            updates=foreign.updates or 0,
            skipped_updates=foreign.skipped_updates or 0,
            epoch=cursor.epoch,
        ),
        geometry=geometry,
        ruler=ruler,
        topology={"engine": foreign.writer, "dp_size": geometry.dp_size, "precision": foreign.precision},
        schedule=schedules.state_dict(),
        loader={"cursor": cursor.state_dict(), **stream.identity},
        parameters=foreign.parameters,
        config={"optim_wrapper": {"optimizer": {"type": optimizer.type}}},
        versions={},
        layout=foreign.layout,
        files=[FileEntry(p.name, p.stat().st_size, "") for p in sorted(foreign.directory.iterdir()) if p.is_file()],
    )
