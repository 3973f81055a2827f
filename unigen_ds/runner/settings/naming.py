"""The name of a run from a template of its settings, and a folder of its own for each run.

``visualizer.run_name='nanovlm'`` is nanoVLM's own template. ``work_dir='checkpoints/{run_name}'`` makes a folder for
each run. A resume continues in the newest folder of the same name but for the date; where only runs with other
settings have checkpoints, it is refused with the command for each.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Collection, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.home import home_of, same
from unigen_ds.core.choices import AUTO
from unigen_ds.core.errors import CheckpointError, ConfigError, ResumeBlocked
from unigen_ds.core.progress import Geometry
from unigen_ds.core.shards import first_names
from unigen_ds.runner.settings.tree import Settings

NANOVLM = "nanoVLM_{vit}_{max_image_size}_mp{mp}_{llm}_{gpus}xGPU_bs{batch_size}_{updates}_lr_{nanovlm_lrs}_{date}"
"""``nanoVLM_siglip2-base-patch16-512_2048_mp4_SmolLM2-360M-Instruct_8xGPU_bs128_40000_lr_..._1229-143022``."""
NANOVLM_PARTS = ("vision", "language", "connector")
"""Names of parameter groups, in the order of nanoVLM's name."""
_FIELDS = (
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


def name_and_folder(settings: Settings, geometry: Geometry) -> tuple[str | None, str | None]:
    """The run's name, or None; its folder where ``work_dir`` has ``{run_name}``. On rank 0 alone: both have the time.
    Raises ``ResumeBlocked`` where another run could be the one to resume.
    """
    template, folder = settings.visualizer.run_name, settings.work_dir or ""
    if template is None:
        return None, None
    template = NANOVLM if template == "nanovlm" else template
    name = name_from_template(template, settings, geometry, date=f"{datetime.now():%m%d-%H%M%S}")
    if PLACE not in folder:
        return name, None
    existing = _existing(folder, template, settings, geometry) if settings.resume else None
    if existing is None:
        return name, folder.replace(PLACE, name)
    match = re.fullmatch("(.+)".join(map(re.escape, folder.split(PLACE, 1))), existing)
    return match[1] if match else name, existing


def name_from_template(
    template: str, settings: Settings, geometry: Geometry, *, date: str = "", any_of: Collection[str] = ()
) -> str:
    """``template`` with the settings' values, ``*`` for ``any_of``. Raises ``ConfigError`` for another field."""
    values = {**_values(settings, geometry), "date": date, **{field: _Anything() for field in any_of}}
    try:
        return re.sub(r"[/\\\s]+", "-", template.format_map(values))
    except (LookupError, ValueError) as error:
        problem = f"visualizer.run_name has {str(error).strip(chr(39))}"
        raise ConfigError(problem, allowed="fields " + ", ".join(_FIELDS)) from error


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


def _existing(folder: str, template: str, settings: Settings, geometry: Geometry) -> str | None:
    """The folder that a resume continues in; None: a new one."""

    def folders(fields: Collection[str]) -> list[str]:
        wild = folder.replace(PLACE, name_from_template(template, settings, geometry, any_of=fields))
        paths = glob.glob(glob.escape(wild).replace("[*]", "*"))
        return sorted((path for path in paths if Path(path).is_dir()), key=lambda path: Path(path).stat().st_mtime)

    def home(path: str) -> Path:
        try:
            return home_of(Path(path))
        except CheckpointError:  # the checkpoints of another run may be gone
            return Path(path)

    checkpoint = settings.load_from if settings.resume is True else settings.resume
    if checkpoint and checkpoint != AUTO:
        parent = Path(str(checkpoint)).expanduser().resolve().parent
        return next((path for path in folders(_FIELDS) if same(home(path), parent)), None)
    own = folders({"date"})
    if runs := [path for path in own if store.list_checkpoints(home(path))]:
        return runs[-1]
    doubtful = {path: saves[-1].path for path in folders(_DOUBTFUL) if (saves := store.list_checkpoints(home(path)))}
    if doubtful:
        name = name_from_template(template, settings, geometry, date="<date>")
        commands = [f"--resume {newest} or --resume --work-dir {path}" for path, newest in doubtful.items()]
        raise ResumeBlocked(
            f"no run is named {name}, and {len(doubtful)} of this template may be meant, whose name has other settings:"
            f" {first_names([*doubtful], '; ')}",
            remedy=f"name the one to continue: {first_names(commands, '; ')}. Without --resume a new run begins",
        )
    return own[-1] if own else None
