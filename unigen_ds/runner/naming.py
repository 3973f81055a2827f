"""The name of a run from a template of its settings, and a folder of its own for each run.

``visualizer.run_name='nanovlm'`` is nanoVLM's own template. ``work_dir='checkpoints/{run_name}'`` makes a folder for
each run; a resume finds the newest folder of the same settings, whatever its date.
"""

from __future__ import annotations

import glob
import re
import string
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from unigen_ds.core.choices import AUTO
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.progress import Geometry
from unigen_ds.runner.settings import Settings

NANOVLM = "nanoVLM_{vit}_{max_image_size}_mp{mp}_{llm}_{gpus}xGPU_bs{batch_size}_{updates}_{lr}_{date}"
"""``nanoVLM_siglip2-base-patch16-512_2048_mp4_SmolLM2-360M-Instruct_8xGPU_bs128_40000_lr_..._1229-143022``."""
FIELDS = ("model", "vit", "llm", "max_image_size", "mp", "gpus", "batch_size", "updates", "lr", "seed", "date")
PLACE = "{run_name}"


def name_and_folder(settings: Settings, geometry: Geometry) -> tuple[str | None, str | None]:
    """The name of the run, and its folder where ``work_dir`` contains ``{run_name}``; None where none is asked for.

    Called on rank 0 alone: both contain the time.
    """
    template, folder = settings.visualizer.run_name, settings.work_dir or ""
    if template is None and PLACE not in folder:
        return None, None
    template = NANOVLM if template in (None, "nanovlm") else template
    name = filled(template, settings, geometry, date=f"{datetime.now():%m%d-%H%M%S}")
    if PLACE not in folder:
        return name, None
    existing = _existing(folder, filled(template, settings, geometry, date="*"), settings)
    if existing is None:
        return name, folder.replace(PLACE, name)
    parts = map(re.escape, folder.split(PLACE, 1))
    found = re.fullmatch("(.+)".join(parts), existing)
    return found[1] if found else name, existing


def filled(template: str, settings: Settings, geometry: Geometry, *, date: str) -> str:
    """``template`` with the values of the settings. Raises ``ConfigError`` for another field."""
    given = {field for _, field, _, _ in string.Formatter().parse(template) if field is not None}
    if given - {*FIELDS}:
        raise ConfigError(
            f"visualizer.run_name has {', '.join(sorted(given - {*FIELDS}))}", allowed="fields " + ", ".join(FIELDS)
        )
    values = {**_values(settings, geometry), "date": date}
    return re.sub(r"[/\\\s]+", "-", template.format(**values))


def _values(settings: Settings, geometry: Geometry) -> dict[str, Any]:
    model, processor, limits = settings.model, settings.processor, settings.train_cfg
    pretrained = model.get("pretrained")
    vit = model.get("vit")
    side = vit.get("image_size", 512) if isinstance(vit, Mapping) else 512
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
        "lr": _rates(settings),
        "seed": settings.randomness.seed,
    }


def _part(pretrained: Any, part: str) -> str:
    path = pretrained.get(part) if isinstance(pretrained, Mapping) else pretrained
    return Path(str(path)).name if path else part


def _rates(settings: Settings) -> str:
    """``lr_vision_5e-05-language_5e-05-0.00512``: that of each group, then the others'."""
    base = settings.optim_wrapper.optimizer.lr
    groups = settings.optim_wrapper.paramwise_cfg.groups
    rates = [(g.name or g.pattern, g.lr if g.lr is not None else base * (g.lr_mult or 1.0)) for g in groups]
    return "lr_" + "-".join([*(f"{re.sub('[^A-Za-z0-9]+', '-', name)}_{rate:g}" for name, rate in rates), f"{base:g}"])


def _existing(folder: str, pattern: str, settings: Settings) -> str | None:
    """The folder that a resume continues in: that of the named checkpoint, else the newest of these settings."""
    if not settings.resume:
        return None
    wild = folder.replace(PLACE, pattern)
    found = [path for path in glob.glob(glob.escape(wild).replace("[*]", "*")) if Path(path).is_dir()]
    named = settings.load_from if settings.resume is True else settings.resume if settings.resume != AUTO else None
    if named:
        parent = Path(str(named)).resolve().parent
        return next((path for path in found if Path(path).resolve() == parent), None)
    return max(found, key=lambda path: Path(path).stat().st_mtime, default=None)
