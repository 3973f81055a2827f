"""The name of a run from a template of its settings, and a folder of its own for each run.

``visualizer.run_name='nanovlm'`` is nanoVLM's own template. ``work_dir='checkpoints/{run_name}'`` makes a folder for
each run. Which folder a resume continues in is decided by the names of the folders that hold checkpoints:

===========================================================  ==============================================
all fields but the date are as in the config                 the newest of them
only ``gpus``, ``batch_size``, ``updates`` or rates differ   refused, with the command for each: which is meant?
others differ (model, seed, ...)                             another run: a new folder, with a warning
===========================================================  ==============================================
"""

from __future__ import annotations

import glob
import re
import string
from collections.abc import Collection, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.home import home_of, same
from unigen_ds.core.choices import AUTO
from unigen_ds.core.errors import CheckpointError, ConfigError, ResumeBlocked
from unigen_ds.core.progress import Geometry
from unigen_ds.resume.finding import format_first
from unigen_ds.runner.settings.tree import Settings

NANOVLM = "nanoVLM_{vit}_{max_image_size}_mp{mp}_{llm}_{gpus}xGPU_bs{batch_size}_{updates}_lr_{nanovlm_lrs}_{date}"
"""``nanoVLM_siglip2-base-patch16-512_2048_mp4_SmolLM2-360M-Instruct_8xGPU_bs128_40000_lr_..._1229-143022``."""
NANOVLM_PARTS = ("vision", "language", "connector")
"""Names of parameter groups, in the order of nanoVLM's name."""
FIELDS = (
    "model", "vit", "llm", "max_image_size", "mp", "gpus", "batch_size", "updates", "lr", "group_lrs", "nanovlm_lrs",
    "seed", "date",
)  # fmt: skip
_DOUBTFUL = frozenset(("date", "gpus", "batch_size", "updates", "lr", "group_lrs", "nanovlm_lrs"))
"""Fields in which the names of one experiment, and of two that are compared, may differ."""
PLACE = "{run_name}"


class _Anything:
    """A field of which every value matches, whatever its format."""

    def __format__(self, spec: str) -> str:
        return "*"


class Named(NamedTuple):
    """What a run is called."""

    name: str | None = None
    """None: not asked for."""
    folder: str | None = None
    """Where ``work_dir`` contains ``{run_name}``."""
    why: str | None = None
    """A warning: a resume did not find a run of this name, and a new one begins."""


def name_and_folder(settings: Settings, geometry: Geometry) -> Named:
    """The name of the run, and its folder where ``work_dir`` contains ``{run_name}``.

    Called on rank 0 alone: both contain the time. Raises ``ResumeBlocked`` where several runs, or a doubtful one, could
    be the one to resume.
    """
    template, folder = settings.visualizer.run_name, settings.work_dir or ""
    if template is None:
        return Named()
    template = NANOVLM if template == "nanovlm" else template
    name = name_from_template(template, settings, geometry, date=f"{datetime.now():%m%d-%H%M%S}")
    if PLACE not in folder:
        return Named(name)
    existing, why = _existing(folder, template, settings, geometry) if settings.resume else (None, None)
    if existing is None:
        return Named(name, folder.replace(PLACE, name), why)
    parts = map(re.escape, folder.split(PLACE, 1))
    match = re.fullmatch("(.+)".join(parts), existing)
    return Named(match[1] if match else name, existing, why)


def name_from_template(
    template: str, settings: Settings, geometry: Geometry, *, date: str = "", any_of: Collection[str] = ()
) -> str:
    """``template`` with the values of the settings, ``*`` for the fields ``any_of``. Raises ``ConfigError`` for another
    field.
    """
    names = {field for _, field, _, _ in string.Formatter().parse(template) if field is not None}
    if names - {*FIELDS}:
        raise ConfigError(
            f"visualizer.run_name has {', '.join(sorted(names - {*FIELDS}))}", allowed="fields " + ", ".join(FIELDS)
        )
    values = {**_values(settings, geometry), "date": date, **{field: _Anything() for field in any_of}}
    return re.sub(r"[/\\\s]+", "-", template.format(**values))


def _values(settings: Settings, geometry: Geometry) -> dict[str, Any]:
    model, processor, limits = settings.model, settings.processor, settings.train_cfg
    pretrained = model.get("pretrained")
    vit = model.get("vit")
    side = vit.get("image_size", 512) if isinstance(vit, Mapping) else 512
    base, groups = settings.optim_wrapper.optimizer.lr, settings.optim_wrapper.paramwise_cfg.groups
    rates = [(g.name or g.pattern, g.lr if g.lr is not None else base * (g.lr_mult or 1.0)) for g in groups]
    of = dict(rates)
    return {
        "model": model.name,
        "vit": _part(pretrained, "vit"),
        "llm": _part(pretrained, "llm"),
        "max_image_size": processor.get("max_image_size") or 4 * side,
        "mp": model.get("pixel_shuffle_factor") or 4,
        "gpus": geometry.dp_size,
        "batch_size": geometry.global_batch_size,
        "updates": limits.max_updates
        or (limits.max_iters and limits.max_iters // geometry.accumulative_counts)
        or f"{limits.max_epochs or 0:g}epochs",
        "lr": f"{settings.optim_wrapper.optimizer.lr:g}",
        "group_lrs": "".join(f"{re.sub('[^A-Za-z0-9]+', '-', name)}_{rate:g}-" for name, rate in rates) + f"{base:g}",
        "nanovlm_lrs": "vision_{:g}-language_{:g}-{:g}".format(*(of.get(part, base) for part in NANOVLM_PARTS)),
        "seed": settings.randomness.seed,
    }


def _part(pretrained: Any, part: str) -> str:
    path = pretrained.get(part) if isinstance(pretrained, Mapping) else pretrained
    return Path(str(path)).name if path else part


def _existing(folder: str, template: str, settings: Settings, geometry: Geometry) -> tuple[str | None, str | None]:
    """The folder that a resume continues in (None: a new one), and a warning: see the table above."""

    def folders(fields: Collection[str]) -> list[str]:
        wild = folder.replace(PLACE, name_from_template(template, settings, geometry, any_of=fields))
        return sorted(path for path in glob.glob(glob.escape(wild).replace("[*]", "*")) if Path(path).is_dir())

    named = settings.load_from if settings.resume is True else settings.resume if settings.resume != AUTO else None
    if named:
        parent = Path(str(named)).expanduser().resolve().parent
        return next((path for path in folders(FIELDS) if same(_home(path), parent)), None), None
    own, every = folders({"date"}), folders(FIELDS)
    begun = [path for path in every if _checkpoints(path)]
    if candidates := [path for path in own if path in begun] or ([] if begun else own):
        return max(candidates, key=_age), None
    name = name_from_template(template, settings, geometry, date="<date>")
    if doubtful := [path for path in folders(_DOUBTFUL) if path in begun]:
        newest = {path: _checkpoints(path)[-1].path for path in doubtful}
        commands = [f"--resume {checkpoint} or --resume --work-dir {path}" for path, checkpoint in newest.items()]
        raise ResumeBlocked(
            f"no run is named {name}, and {len(doubtful)} of this template may be meant, whose name has other settings:"
            f" {format_first(doubtful)}",
            remedy=f"name the one to continue: {format_first(commands)}. Without --resume a new run begins",
        )
    why = None
    if begun:
        why = (
            f"Resume: no run is named {name}, so a new one begins. Others differ in more than a resume can change:"
            f" {format_first(begun)}."
        )
    return max(own, key=_age, default=None), why


def _home(folder: str) -> Path:
    """Where the checkpoints of the run in a work dir are, or were: those of another run may be gone."""
    try:
        return home_of(Path(folder))
    except CheckpointError:
        return Path(folder)


def _checkpoints(folder: str) -> list[store.Found]:
    return store.list_checkpoints(_home(folder))


def _age(path: str) -> float:
    return Path(path).stat().st_mtime
