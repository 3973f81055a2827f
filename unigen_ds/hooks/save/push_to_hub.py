"""Upload the trained model to the Hugging Face Hub when the training is complete.

Rank 0 exports the best or the last checkpoint to ``published/<checkpoint>/`` of the work dir and uploads it, after the
last collective of the run: other ranks end without it. The run is complete by then, so a failure is an error in the log
with the command that does it by hand, and changes nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.best_record import best_of
from unigen_ds.checkpoint.manifest import FILE_NAME
from unigen_ds.checkpoint.saver import CONFIG_FILE
from unigen_ds.config.hub import LOGIN, HubRepo, has_token
from unigen_ds.config.registry import HOOKS, checked
from unigen_ds.core.errors import CheckpointError
from unigen_ds.hooks.base import Run
from unigen_ds.hooks.guard.early_stopping import EarlyStoppingHook
from unigen_ds.hooks.save.save_pretrained import ExportHook, Precision
from unigen_ds.system import dist
from unigen_ds.system.files import delete_inside
from unigen_ds.system.log import logger

FOLDER = "published"


@HOOKS.register_module()
class PushToHubHook(ExportHook):
    """Exports the model and uploads it once the training is complete (or was stopped early); not after another stop.

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
        super().before_run(run)
        if dist.is_main() and not has_token():
            logger().warning("PushToHubHook: this machine has no token for %s. Remedy: %s, before the training ends.",
                             self.repo.name, LOGIN)  # fmt: skip

    def after_run(self, run: Run) -> None:
        if not dist.is_main():
            return
        early = any(isinstance(hook, EarlyStoppingHook) and hook.stopped for hook in run.hooks)
        if run.finished or early:
            self._push(run)
        else:
            logger().info("Nothing is pushed to %s: the training is not complete.", self.repo.name)

    def _push(self, run: Run) -> None:
        """Export and upload. Whatever fails is an error in the log."""
        checkpoint, out, complete = run.work_dir, run.work_dir / FOLDER, False
        try:
            checkpoint = self._chosen(run)
            out = out / checkpoint.name.removesuffix(".pth")
            if out.exists():
                logger().info("%s is exported anew: the former export is deleted.", out)
                delete_inside(out, run.work_dir)
            self.export(run, checkpoint, out)
            complete = True
            logger().info("Pushing %s, exported to %s, to %s.", checkpoint, out, self.repo.name)
            logger().info("Pushed to %s.", self.repo.upload(out))
        except Exception as error:  # the run is complete, and must not end with an error because of its copy elsewhere
            command = self.repo.command(out) if complete else self._export_command(checkpoint, out)
            logger().error("The model was not pushed to %s: %s The training itself is complete. By hand: %s",
                           self.repo.name, _text(error), command)  # fmt: skip

    def _export_command(self, checkpoint: Path, out: Path) -> str:
        options = ["--dtype", self._dtype, *(["--raw"] if self._raw else [])]
        if (checkpoint / CONFIG_FILE).is_file() and not (checkpoint / FILE_NAME).is_file():  # weights alone
            options += ["--config", str(checkpoint / CONFIG_FILE)]
        return self.repo.export_command(checkpoint, out, *options)

    def _chosen(self, run: Run) -> Path:
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


def _text(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if text.endswith(".") else f"{type(error).__name__}: {text}."
