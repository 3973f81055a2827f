"""Exports on rank 0: beside each checkpoint what others load directly, and at the end the model to the hub."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Literal

from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.best_record import best_of
from unigen_ds.config.hub import LOGIN, HubRepo
from unigen_ds.config.registry import HOOKS, checked
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.evaluation.generation import trained_family
from unigen_ds.families.base import exported_format
from unigen_ds.hooks.base import Hook, Run
from unigen_ds.hooks.save.best import EarlyStoppingHook
from unigen_ds.hooks.save.checkpoint import CheckpointHook
from unigen_ds.system import dist
from unigen_ds.system.files import delete_inside
from unigen_ds.system.log import logger

_FOLDER = "pretrained"
Precision = Literal["fp32", "bf16", "fp16"]


class ExportHook(Hook):
    """Base of hooks that export checkpoints, on rank 0, as ``dtype``; ``raw``: the weights instead of their average."""

    @checked()
    def __init__(self, *, raw: bool = False, dtype: Precision = "fp32") -> None:
        self._raw, self._dtype = raw, dtype

    def before_run(self, run: Run) -> None:
        """Raises ``ConfigError`` where nothing would be exported."""
        if not any(isinstance(hook, CheckpointHook) for hook in run.hooks):
            raise ConfigError(f"{type(self).__name__} without a CheckpointHook", remedy="add the hook that saves")
        exported_format(*trained_family(run.backend))

    def export(self, run: Run, checkpoint: Path, out: Path) -> None:
        """Export ``checkpoint`` to ``out``; what is there is deleted first."""
        delete_inside(out, out.parent.parent)
        run.export(checkpoint, out, raw=self._raw, dtype=self._dtype)


@HOOKS.register_module()
class SavePretrainedHook(ExportHook):
    """Beside each checkpoint, in ``pretrained/<checkpoint>/``, the directory that ``tools/export.py`` would write of
    it. One that cannot be written is an error in the log. It is deleted after its checkpoint.

    Args:
        raw: the weights themselves instead of their average (EMA).
        dtype: of the weights: ``'fp32'``, ``'bf16'`` or ``'fp16'``.
    """

    name = "save_pretrained"

    def after_save_checkpoint(self, run: Run, path: Path) -> None:
        if not dist.is_main():
            return
        out = _folder_of(path)
        try:
            self.after_run(run)
            self.export(run, path, out)
            logger().info("Wrote %s, which is loaded directly (%s).", out, path.name)
        except Exception as error:  # the checkpoint is complete, and training continues
            logger().error("%s was not written: %s: %s The checkpoint itself is complete.",
                           out, type(error).__name__, error)  # fmt: skip

    def after_run(self, run: Run) -> None:
        """Delete exports whose checkpoint is not there any more; a folder with another name is a user's."""
        folder = run.checkpoint_dir / _FOLDER
        if not dist.is_main() or not folder.is_dir():
            return
        exports = {_folder_of(path) for path in run.checkpoint_dir.iterdir() if path.is_dir()}
        names = [_folder_of(Path(hook.filename_tmpl)).name for hook in run.hooks if isinstance(hook, CheckpointHook)]
        own = re.compile("|".join(re.escape(name).replace(r"\{\}", r"\d+(_\d+)?") for name in names))
        for old in folder.iterdir():
            if old not in exports and own.fullmatch(old.name):
                with suppress(OSError):
                    delete_inside(old, run.checkpoint_dir)
                    logger().info("Deleted %s, whose checkpoint was deleted.", old)


def _folder_of(checkpoint: Path) -> Path:
    return checkpoint.parent / _FOLDER / checkpoint.name.removesuffix(".pth")


@HOOKS.register_module()
class PushToHubHook(ExportHook):
    """Exports the model to ``published/<checkpoint>/`` of the work dir and uploads it, once the training is complete
    (or was stopped early); not after another stop. It is after the last collective of the run: other ranks end without
    it. A failure is an error in the log with the command that does it by hand, and changes nothing else.

    Args:
        repo: ``OWNER/NAME``, created where it does not exist.
        private: make the repository a private one; nothing is uploaded to one that exists and is public.
        which: ``'best'`` by ``EvaluateHook(save_best=...)``, and the last where there is none; or ``'last'``.
        revision: the branch, created where it does not exist; None: the main one.
        raw: the weights themselves instead of their average (EMA).
        dtype: of the weights: ``'fp32'``, ``'bf16'`` or ``'fp16'``.
    """

    name = "push_to_hub"

    @checked()
    def __init__(
        self,
        repo: str,
        *,
        private: bool = False,
        which: Literal["best", "last"] = "best",
        revision: str | None = None,
        raw: bool = False,
        dtype: Precision = "fp32",
    ) -> None:
        super().__init__(raw=raw, dtype=dtype)
        self.repo = HubRepo(repo, private=private, revision=revision)
        self._which = which

    def before_run(self, run: Run) -> None:
        from huggingface_hub import get_token

        super().before_run(run)
        if dist.is_main() and get_token() is None:
            logger().warning("PushToHubHook: this machine has no token for %s. Remedy: %s, before the training ends.",
                             self.repo.name, LOGIN)  # fmt: skip

    def after_run(self, run: Run) -> None:
        if not dist.is_main():
            return
        if not run.finished and not any(isinstance(hook, EarlyStoppingHook) and hook.stopped for hook in run.hooks):
            logger().info("Nothing is pushed to %s: the training is not complete.", self.repo.name)
            return
        checkpoint, out, complete = run.work_dir, run.work_dir / "published", False
        try:
            checkpoint = self._choose(run)
            out = out / checkpoint.name.removesuffix(".pth")
            self.export(run, checkpoint, out)
            complete = True
            logger().info("Pushing %s, exported to %s, to %s.", checkpoint, out, self.repo.name)
            logger().info("Pushed to %s.", self.repo.upload(out))
        except Exception as error:  # the run is complete, and must not end with an error because of its copy elsewhere
            options = ["--dtype", self._dtype, *(["--raw"] if self._raw else [])]
            export = self.repo.export_command(checkpoint, out, *options)
            logger().error("The model was not pushed to %s: %s: %s. The training itself is complete. By hand: %s",
                           self.repo.name, type(error).__name__, str(error).rstrip("."),
                           self.repo.command(out) if complete else export)  # fmt: skip

    def _choose(self, run: Run) -> Path:
        """The checkpoint to export. Raises ``CheckpointError`` where there is none."""
        if self._which == "best":
            problem = "no evaluation chose one (EvaluateHook(save_best=...))"
            try:
                if (best := best_of(run.checkpoint_dir)) is not None:
                    return best[0]
            except CheckpointError as error:
                problem = str(error)
            logger().warning("There is no best checkpoint to push: %s. The last one is pushed.", problem.rstrip(". "))
        newest, _ = store.newest(run.checkpoint_dir, hashes=False)
        if newest is None:
            raise CheckpointError(f"no complete checkpoint found in {run.checkpoint_dir}")
        return newest.path
