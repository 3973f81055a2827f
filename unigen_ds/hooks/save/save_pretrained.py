"""Write the published directory of each checkpoint: what transformers, nanoVLM or BAGEL load directly.

Rank 0 exports to ``pretrained/<checkpoint>/`` beside the checkpoints once the checkpoint is complete; a folder is
deleted after its checkpoint. The other ranks wait for it in their next collective.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Literal

from unigen_ds.config.registry import HOOKS, checked
from unigen_ds.core.errors import ConfigError
from unigen_ds.evaluation.generation import trained_family
from unigen_ds.families.base import exported_format
from unigen_ds.hooks.base import Hook, Run
from unigen_ds.hooks.save.checkpoint import CheckpointHook
from unigen_ds.system import dist
from unigen_ds.system.files import delete_inside
from unigen_ds.system.log import logger

FOLDER = "pretrained"


Precision = Literal["fp32", "bf16", "fp16"]


class ExportHook(Hook):
    """Base of hooks that export checkpoints of the run, on rank 0: with the weights themselves instead of their average
    where ``raw``, as ``dtype``.
    """

    def __init__(self, *, raw: bool, dtype: Precision) -> None:
        self._raw, self._dtype = raw, dtype

    def before_run(self, run: Run) -> None:
        """Raises ``ConfigError`` where nothing would be exported."""
        if not any(isinstance(hook, CheckpointHook) for hook in run.hooks):
            raise ConfigError(f"{type(self).__name__} without a CheckpointHook", remedy="add the hook that saves")
        exported_format(*trained_family(run.backend))

    def export(self, run: Run, checkpoint: Path, out: Path) -> None:
        """Export ``checkpoint`` to ``out``, where nothing is."""
        out.parent.mkdir(exist_ok=True)
        run.export(checkpoint, out, raw=self._raw, dtype=self._dtype)


@HOOKS.register_module()
class SavePretrainedHook(ExportHook):
    """Beside each checkpoint the directory that ``tools/export.py`` would write of it. One that cannot be written is an
    error in the log.

    Args:
        raw: the weights themselves instead of their average (EMA).
        dtype: of the weights: ``'fp32'``, ``'bf16'`` or ``'fp16'``.
    """

    name = "save_pretrained"

    @checked()
    def __init__(self, *, raw: bool = False, dtype: Precision = "fp32") -> None:
        super().__init__(raw=raw, dtype=dtype)

    def after_save_checkpoint(self, run: Run, path: Path) -> None:
        if not dist.is_main():
            return
        out = _folder_of(path)
        try:
            _delete_without_checkpoint(run)
            delete_inside(out, path.parent)  # of the same update, before a resume
            self.export(run, path, out)
            logger().info("Wrote %s, which is loaded directly (%s).", out, path.name)
        except Exception as error:  # the checkpoint is complete, and training continues
            logger().error("%s was not written: %s: %s The checkpoint itself is complete.",
                           out, type(error).__name__, error)  # fmt: skip

    def after_run(self, run: Run) -> None:
        if dist.is_main():
            _delete_without_checkpoint(run)


def _folder_of(checkpoint: Path) -> Path:
    return checkpoint.parent / FOLDER / checkpoint.name.removesuffix(".pth")


def _delete_without_checkpoint(run: Run) -> None:
    """Exports whose checkpoint is not there any more; a folder with another name is a user's."""
    folder = run.checkpoint_dir / FOLDER
    exports = {_folder_of(path) for path in run.checkpoint_dir.iterdir() if path.is_dir()}
    names = [_folder_of(Path(hook.filename_tmpl)).name for hook in run.hooks if isinstance(hook, CheckpointHook)]
    own = re.compile("|".join(re.escape(name).replace(r"\{\}", r"\d+(_\d+)?") for name in names))
    for old in folder.iterdir() if folder.is_dir() else ():
        if old not in exports and own.fullmatch(old.name):
            with suppress(OSError):
                delete_inside(old, run.checkpoint_dir)
                logger().info("Deleted %s, whose checkpoint was deleted.", old)
