"""An update of a run once more: its sequences bit-equal, the loss and gradient norm of each sample, and a page of them.

In: a work dir and the number of an update, or a range of sequences. The data is built as the newest checkpoint's config
has it, and the ledger's digest is compared. Losses are of each sample alone, with the weights of the nearest checkpoint
at or before the update, on one device in fp32 without dropout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.home import home_of, run_of
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core.errors import CheckpointError, ConfigError, DataError
from unigen_ds.core.progress import Skip
from unigen_ds.data.batches.loader import MicroBatch, collate
from unigen_ds.report.data_page import write_data_page
from unigen_ds.runner.open.trained import import_stored, open_model
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.runner.start.build import Data, build_geometry, connect, read_sequences
from unigen_ds.runner.start.stages import continue_data
from unigen_ds.system.journals import LEDGER_FILE, read_lines, sample_digest

MOST_SEQUENCES = 64
"""That a page shows: those with the samples of the highest loss."""


@dataclass(frozen=True)
class Replay:
    title: str
    settings: Settings
    data: Data
    batches: Sequence[MicroBatch]
    """One for each sequence."""
    checkpoint: Path | None
    """The nearest at or before the update; None: there is none."""
    facts: Mapping[str, Any]

    def samples(self) -> list[dict[str, Any]]:
        """A row for each sample: sequence and id, without a loss."""
        names = self.data.stream.names
        return [
            {"sequence": one.cursor.sequences - 1, "sample": draw.sample_id(names), "loss": None}
            for one in self.batches for draw in one.rows[0]
        ]  # fmt: skip

    def losses(self, checkpoint: Path, *, device: str, allow_custom_imports: bool = False) -> list[dict[str, Any]]:
        """``samples`` with the mean of each loss term, ``loss`` (None: no target) and ``grad_norm``."""
        model, _ = open_model(checkpoint, raw=True, allow_custom_imports=allow_custom_imports)
        connect(model.to(device).eval(), self.data.processor)
        stream, weights, samples = self.data.stream, self.settings.term_weights, self.samples()
        draws = [draw for one in self.batches for draw in one.rows[0]]
        for sample, draw in zip(samples, draws, strict=True):
            length = stream.sample_length
            batch = collate([(draw,)], stream.sources, self.data.processor, seq_length=length, names=stream.names)
            model.zero_grad()
            counts, terms = batch.target_counts(), model(batch.to(device))
            sample["terms"] = {name: value.item() / counts[name] for name, value in terms.sums.items() if counts[name]}
            if sample["terms"]:
                loss = terms.weighted_sum(weights, counts)
                loss.backward()
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                sample |= {"loss": loss.item(), "grad_norm": float(torch.nn.utils.get_total_norm(gradients))}
        return samples

    def write_page(self, out: Path, samples: Sequence[Mapping[str, Any]]) -> Path:
        """The page of ``tools/inspect_data.py --html`` with these sequences, and the losses of their samples."""
        by_loss = sorted(samples, key=lambda one: -(one["loss"] or 0.0))
        first = [*dict.fromkeys(one["sequence"] for one in by_loss)][:MOST_SEQUENCES]
        batches = [one for one in self.batches if one.cursor.sequences - 1 in first]
        texts = {
            one["sample"]: f"loss {one['loss']:.4g}, gradient norm {one['grad_norm']:.4g}"
            for one in samples
            if one["loss"] is not None
        }
        stream, processor, num_skipped = self.data.stream, self.data.processor, len(self.data.skipped_sources)
        options: dict[str, Any] = {"batches": batches, "skipped_sources": num_skipped, "notes": texts}
        return write_data_page(out, title=self.title, stream=stream, processor=processor, **options)


def build_inspected(config: Mapping[str, Any], *, world_size: int, manifest: Manifest | None) -> tuple[Settings, Data]:
    """Settings and data of a run: of its manifest, without records appended later; without one, of a first start."""
    settings = Settings.of_data(config)
    if settings.randomness.seed is None:
        if manifest is None:
            remedy = "name the run's folder with --work-dir, its checkpoint has it; or --cfg-options randomness.seed=N"
            raise ConfigError("randomness.seed is None: the run draws it", remedy=remedy)
        settings = settings.with_choices(seed=int(manifest.loader["seed"]))
    geometry = manifest.ruler.geometry if manifest else build_geometry(settings, dp_size=world_size)
    data, *_ = continue_data(settings, manifest, geometry=geometry, on_change="append", check=False)
    return settings, data


def replay(
    work_dir: Path,
    *,
    update: int | None = None,
    sequences: tuple[int, int] = (0, 0),
    allow_custom_imports: bool = False,
) -> Replay:
    """Build the sequences of an update, or of a range. Raises ``DataError`` or ``CheckpointError`` where it cannot."""
    home = home_of(work_dir)
    listing = store.current(store.list_checkpoints(home))
    if not listing:
        problem = f"{home} has no complete checkpoint, whose config and data order would be used"
        raise CheckpointError(problem, remedy="name the work dir of a run that has saved")
    newest = listing[-1]
    assert newest.manifest is not None
    line: Mapping[str, Any] = {"sequences": sequences} if update is None else _line(run_of(home) / LEDGER_FILE, update)
    first, stop = line["sequences"]
    import_stored(newest.manifest.config, newest.path, allow=allow_custom_imports)
    settings, data = build_inspected(newest.manifest.config, world_size=1, manifest=newest.manifest)
    left_out = [Skip(*skip) for skip in line.get("left_out", ())]
    data = dataclasses.replace(data, stream=data.stream.skipping(left_out))
    batches = read_sequences(settings, data, first, stop)
    digest = sample_digest(draw.sample_id(data.stream.names) for one in batches for draw in one.rows[0])
    if digest != line.get("digest", digest):
        raise DataError(
            f"update {update} was trained on other samples: the ledger has the digest {line['digest']}, the data of now"
            f" results in {digest}",
            remedy="restore the data, its packing and the seed (tools/inspect_data.py CONFIG --ledger FILE)",
        )
    before = [one for one in listing if one.manifest and one.manifest.progress.sequences <= first]
    title = f"{work_dir.name}, sequences {first}:{stop}" if update is None else f"{work_dir.name}, update {update}"
    facts = {"update": update, "sequences": [first, stop], "left_out": [*map(list, left_out)], "digest": digest}
    return Replay(title, settings, data, batches, before[-1].path if before else None, facts)


def _line(ledger: Path, update: int) -> dict[str, Any]:
    lines = {line["update"]: line for line in read_lines(ledger) if "event" not in line}
    if update not in lines:
        choices = f"updates {min(lines)} to {max(lines)}" if lines else "none"
        problem = f"{ledger} has no valid line of update {update}"
        raise DataError(problem, allowed=choices, remedy="of an update that a resume made void: --sequences A:B")
    return lines[update]
