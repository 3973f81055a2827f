"""Loss spikes: the run goes back to the checkpoint before one, and leaves out the data with which it began.

As PaLM was trained (arXiv 2204.02311, section 5.1). Losses stay on the device until ``interval`` updates are complete
or a checkpoint is to be saved: no update waits for them, and no checkpoint has a spike that was not found. They are
summed over the ranks, and rank 0 decides.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Annotated, Any

from annotated_types import Ge, Gt

from unigen_ds.checkpoint import store
from unigen_ds.config.registry import HOOKS, checked
from unigen_ds.core.errors import TrainingError
from unigen_ds.core.progress import Skip
from unigen_ds.core.shards import first_names
from unigen_ds.hooks.base import GoBack, Hook, Run, UpdateResult
from unigen_ds.hooks.log.logger import losses_of_updates
from unigen_ds.system import dist
from unigen_ds.system.log import logger

_FEWEST = 20
"""Updates before the first spike: a loss that falls fast at the start has no usual range."""
SMALLEST = 0.01
"""Share of the median that a standard deviation has at least: a loss that hardly changes has no spikes of noise."""
NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
WHY = "spike"


@HOOKS.register_module()
class SpikeHook(Hook):
    """Where the loss of an update is far above recent ones, the run goes back to the newest checkpoint before it and
    continues without the sequences of the spike.

    Args:
        z: a loss of more than so many standard deviations above the median of the last `window` updates is a spike; the
            deviation is 1.4826 times the median absolute one, and at least 1 % of the median.
        window: updates that are compared with; before the 20th there is no spike.
        interval: updates between two looks at the losses; before each save there is one, too.
        skip_updates: updates from the spike's first one on whose sequences are left out, at least; of a spike of more
            updates, up to the look that finds it, all.
        max_rollbacks: a further spike ends the run with an error; 0: the first one does.
    """

    name = "spike"
    state_attributes = ("recent",)

    @checked()
    def __init__(
        self,
        *,
        z: Annotated[float, Gt(0)] = 6.0,
        window: Annotated[int, Ge(_FEWEST)] = 100,
        interval: Annotated[int, Ge(1)] = 10,
        skip_updates: Annotated[int, Ge(1)] = 1,
        max_rollbacks: Annotated[int, Ge(0)] = 3,
    ) -> None:
        self.z, self.window, self.interval = z, window, interval
        self.skip_updates, self.max_rollbacks = skip_updates, max_rollbacks
        self.recent: list[float] = []
        """Losses of the last updates that are no spikes: on rank 0."""
        self._pending: list[tuple[int, UpdateResult]] = []

    def after_update(self, run: Run, result: UpdateResult) -> None:
        self._pending.append((run.progress.updates, result))
        if len(self._pending) >= self.interval:
            self._look(run)

    def before_save_checkpoint(self, run: Run, metrics: dict[str, float]) -> None:
        self._look(run)

    def _look(self, run: Run) -> None:
        """Collective. Raises ``GoBack``, or ``TrainingError`` where that is not possible."""
        pending, self._pending = self._pending, []
        if pending:
            losses = [one["loss"] for one in losses_of_updates([result for _, result in pending])]
            back: GoBack | None = dist.on_main(lambda: self._decide(run, pending, losses))
            if back is not None:
                raise back

    def _decide(self, run: Run, pending: Sequence[tuple[int, UpdateResult]], losses: Sequence[Any]) -> GoBack | None:
        """Return to which checkpoint the run goes back, as rank 0 decides; None: it continues."""
        spike, text = list[tuple[int, UpdateResult]](), ""
        for (update, result), loss in zip(pending, losses, strict=True):
            if not result.applied or loss is None or not math.isfinite(loss):
                continue  # the NanGuardHook's, or an update without targets
            if above := self._above(loss):
                spike, text = [*spike, (update, result)], text or above
            elif spike:
                break
            else:
                self.recent = [*self.recent, loss][-self.window :]
        return self._back(run, spike, text) if spike else None

    def _above(self, loss: float) -> str:
        """How far a loss is above what is usual; empty where it is not."""
        if len(self.recent) < _FEWEST:
            return ""
        median = statistics.median(self.recent)
        usual = NORMAL * statistics.median(abs(one - median) for one in self.recent)
        z = (loss - median) / max(usual, SMALLEST * abs(median), 1e-12)
        if z <= self.z:
            return ""
        return (
            f"the loss is {loss:.4g}, {z:.1f} standard deviations above {median:.4g}, the median of the last"
            f" {len(self.recent)} updates ({self.z:g} are allowed)"
        )

    def _back(self, run: Run, spike: Sequence[tuple[int, UpdateResult]], text: str) -> GoBack:
        (update, first), (last_update, last) = spike[0], spike[-1]
        start, count = first.sequences[0], sum(skip.why.startswith(WHY) for skip in run.skips)
        stop = max(last.sequences[1], start + self.skip_updates * run.geometry.global_batch_size)
        updates = f"update {update}" if update == last_update else f"updates {update} to {last_update}"
        skip = Skip(start, stop, f"{WHY} at update {update}: {text}")
        samples = first_names([name for _, result in spike for name in result.sample_ids])
        problem = f"a loss spike in {updates} (sequences {start}:{last.sequences[1]}, samples {samples}): {text}"
        look = f"`python tools/replay.py {run.work_dir} --update {update}` shows the data"
        if count >= self.max_rollbacks:
            raise TrainingError(
                f"{problem}. The run went back {count} times",
                allowed=f"SpikeHook.max_rollbacks={self.max_rollbacks}",
                remedy=f"{look}; lower the learning rate; or continue without it: --resume --skip-sequences {skip}",
            )
        listing = store.list_checkpoints(run.checkpoint_dir)
        earlier = [one for one in listing if one.manifest and one.manifest.progress.sequences <= start]
        checkpoint, _ = store.newest(run.checkpoint_dir, hashes=False, listing=earlier)
        if checkpoint is None:
            raise TrainingError(
                f"{problem}, and there is no checkpoint before it",
                remedy=f"{look}; save earlier (CheckpointHook.interval), or begin again in another --work-dir with"
                f" --skip-sequences {skip}",
            )
        logger().warning(
            "Spike: %s. The run goes back to %s and leaves out sequences %s, %d in all (rollback %d of %d)."
            " `python tools/replay.py %s --sequences %s` shows the data.",
            problem, checkpoint.path, skip, stop - start, count + 1, self.max_rollbacks, run.work_dir, skip,
        )  # fmt: skip
        return GoBack(checkpoint.path, skip)
