"""What a resume would change, before anything is started: ``(manifest, proposal) -> findings``. Pure; reads no file.

A finding states the stored value, the present one, why the difference matters and what to do. ``block``: training would
be another one without a message, or could not continue. ``warn``: it continues, and its results differ by more than
float rounding, or something is lost that a user may need. The ids are stable: scripts may rely on them. ``guide`` is
the point of the five-point checklist that a finding answers: 1 the checkpoint exists and is complete, 2 ``resume`` and
``load_from`` are set correctly, 3 batch size and accumulation as before or the same effective batch, 4 the learning
rate is sensible, 5 the log confirms the resumption.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.config.registry import RESUME_CHECKS
from unigen_ds.core.progress import Progress
from unigen_ds.core.shards import first_names
from unigen_ds.resume.finding import Finding, Proposal, Status, compare_sides, edited_settings, model_findings
from unigen_ds.resume.geometry import geometries_text
from unigen_ds.schedule.schedule import Schedules
from unigen_ds.system.files import size_text

POINTS_AHEAD = 5


def run(manifest: Manifest, proposal: Proposal) -> list[Finding]:
    """All findings, those of a user's own checks last. Another trainer's manifest is made of the present config: the
    stored side of ``_NOT_STORED`` is not known.
    """
    findings = []
    for check in (*_CHECKS, *RESUME_CHECKS.module_dict.values()):
        for finding in check(manifest, proposal):
            if proposal.unknown and finding.id in _NOT_STORED:
                now = _NOT_STORED[finding.id] or finding.now
                why = "the checkpoint does not have it, so no change would be noticed"
                finding = Finding(finding.id, "warn", "not known", now, why, guide=finding.guide)
            findings.append(finding)
    return findings


_NOT_STORED = {
    "checkpoint.complete": "its files have no hashes: damage is not noticed",
    "optimizer.type": "",
    "lr.curve": "",
    "config.edited": "the settings of this config",
    "data.unchanged": "the records, order and packing of this config",
    "rng": "seeded anew",
    "versions": "those of this machine",
}
"""What another trainer's checkpoint does not have, and what holds now, where the finding has other words for it."""


# ---- the checkpoint -------------------------------------------------------------------------------------------------


def check_checkpoint(manifest: Manifest, proposal: Proposal) -> Iterable[Finding]:
    what = "every byte" if proposal.hashed else "sizes"
    content = f"{len(manifest.files)} files, {manifest.size / 2**20:,.1f} MiB, {what} compared"
    yield Finding("checkpoint.complete", "ok", "complete", content, guide=1)
    was = f"iteration {manifest.iteration}, update {manifest.progress.updates}"
    now = f"full resume of weights, moments, schedule and data position from {proposal.checkpoint}"
    why = "resume=True loads the newest, resume=CKPT the named one; load_from alone would load weights only"
    yield Finding("resume.mode", "ok", was, now, why, guide=2)


def check_foreign(manifest: Manifest, proposal: Proposal) -> Iterable[Finding]:
    if proposal.unknown:
        engine, why = str(manifest.topology["engine"]), " ".join(proposal.unknown)
        yield Finding("checkpoint.foreign", "warn", engine, "read without a manifest", why)


def check_disk(manifest: Manifest, proposal: Proposal) -> Iterable[Finding]:
    if proposal.free_bytes is None:
        return
    fits = proposal.free_bytes // max(manifest.size, 1)
    keep = proposal.saves["max_keep_ckpts"]
    count = 2 if keep == -1 else keep + 1  # the new one is durable before the oldest is deleted
    count += proposal.saves["form"] == "full"  # made from the files of the engine, which are deleted then
    was = f"a checkpoint of {size_text(manifest.size)}"
    now = f"{size_text(proposal.free_bytes)} free: {fits} more would fit, {count} are needed at a time"
    if fits >= count:
        yield Finding("disk.free", "ok", was, now)
        return
    why = "the next checkpoints do not fit on the disk of the work dir"
    remedy = "free space, keep fewer with CheckpointHook(max_keep_ckpts=...), or move"
    yield Finding("disk.free", "warn" if fits else "block", was, now, why, remedy)


# ---- batch, position, schedule --------------------------------------------------------------------------------------


def check_batch(manifest: Manifest, proposal: Proposal) -> Iterable[Finding]:
    was, now, choice = manifest.geometry, proposal.geometry, proposal.on_batch_change
    status: Status = "ok"
    why = remedy = ""
    if was.global_batch_size == now.global_batch_size:
        pass
    elif choice in ("refuse", "keep-batch"):  # of another trainer's checkpoint the batch is not kept
        status, why = "block", "the effective batch size differs, and the learning rate was chosen for the old one"
        splits = geometries_text(was.global_batch_size, now.dp_size)
        remedy = f"{splits}; or choose how the learning rate changes: --on-batch-change keep-lr | linear | sqrt"
    else:
        factor = proposal.schedules.lr_scale / Schedules.from_state_dict(manifest.schedule).lr_scale
        status, why = "warn", f"--on-batch-change {choice}: learning rates are multiplied by {factor:.4g} from here on,"
        why += " and later resumes keep that"
    yield Finding("batch.effective", status, str(was), str(now), why, remedy, guide=3)


def check_position(manifest: Manifest, proposal: Proposal) -> Iterable[Finding]:
    total, ruler = Schedules.from_state_dict(manifest.schedule).total_sequences, manifest.ruler
    end, size = proposal.schedules.total_sequences, proposal.geometry.sequences_per_iteration
    position = manifest.progress.sequences
    was, now = (
        f"iteration {manifest.progress.iteration(geometry):,} of {last / geometry.sequences_per_iteration:,.0f}"
        f" ({ruler.sequences_per_epoch / geometry.sequences_per_iteration:,.6g} an epoch):"
        f" {position / ruler.sequences_per_epoch:.2f} epochs, {position / last:.1%}"
        for geometry, last in ((manifest.geometry, total), (proposal.geometry, end))
    )
    why = ""
    if manifest.geometry.sequences_per_iteration != size:
        facts = manifest.loader.get("facts") or {}
        unpacked = "sizes" in facts and not facts.get("packing") and not facts.get("weights")
        samples = sum(facts.get("units", facts["sizes"])) if unpacked else ruler.sequences_per_epoch
        per_epoch = max(1, samples // size)  # as a run that began so would count: the last partial one dropped
        epochs = manifest.iteration / per_epoch
        why = (
            f"sequences are counted, so nothing moves; the bare number {manifest.iteration} read at {per_epoch}"
            f" iterations an epoch would be {epochs:.2f} epochs ({epochs * ruler.sequences_per_epoch / total:.1%})"
        )
    yield Finding("progress.position", "ok", was, now, why)
    rest, was, now = end - position, f"{total:,.0f} sequences in all", f"{end:,.0f}"
    if rest < proposal.geometry.global_batch_size:
        why = "the run is complete: nothing is left to train"
        yield Finding("progress.left", "warn", was, now, why, "raise train_cfg.max_epochs (or its other limits)")
    elif total != end:
        why = "train_cfg was edited: training ends at another point"
        yield Finding("progress.left", "warn", was, f"{now}: {rest:,.0f} are left", why)


def learning_rates(manifest: Manifest, schedules: Schedules) -> list[tuple[float, dict[str, float]]]:
    """(position in epochs, learning rate by group) now and at ``POINTS_AHEAD`` points up to the end."""
    progress, end = manifest.progress, schedules.total_sequences
    rates_ahead = []
    for k in range(POINTS_AHEAD + 1):
        sequences = progress.sequences + max(0.0, end - progress.sequences) * k / POINTS_AHEAD
        growth = sequences / progress.sequences if progress.sequences else 1.0
        there = Progress(int(sequences), int(progress.samples * growth), int(progress.tokens * growth))
        rates = {group["name"]: group["lr"] for group in schedules.at(there)}
        rates_ahead.append((sequences / manifest.ruler.sequences_per_epoch, rates))
    return rates_ahead


def check_learning_rate(manifest: Manifest, proposal: Proposal) -> Iterable[Finding]:
    old, new = Schedules.from_state_dict(manifest.schedule), proposal.schedules
    was, now = learning_rates(manifest, old), learning_rates(manifest, new)
    why = "the same function of the data consumed"
    if was != now:
        reasons = ["param_scheduler was edited"] * (not old.same_curves(new))
        reasons += ["a learning rate was edited"] * (old.base != new.base)
        reasons += ["the length of training was edited"] * (old.total_sequences != new.total_sequences)
        reasons += [f"lr_scale was {old.lr_scale:.4g} and is {new.lr_scale:.4g}"] * (old.lr_scale != new.lr_scale)
        why = " and ".join(reasons) + ": the new curve is followed from the present progress on"
    flat = all(rate == 0 for _, rates in now for rate in rates.values())
    if flat:
        why = "every learning rate is 0 from here on: nothing would be learned"
    before, after = (  # the curve of all groups where they are equal, else of the first
        ", ".join(f"{next(iter(rates.values())):.4g} at {epoch:.2f}" for epoch, rates in points)
        + f" (epochs; group {next(iter(points[0][1]))})"
        for points in (was, now)
    )
    yield Finding("lr.curve", "ok" if was == now and not flat else "warn", before, after, why, guide=4)


def check_edited(manifest: Manifest, proposal: Proposal) -> Iterable[Finding]:
    edits = edited_settings(proposal.complete(manifest.config), proposal.complete(proposal.config))
    now = first_names(edits, "; ") if edits else "no other setting that changes what is learned"
    why = "it holds from here on; nothing else in this list shows it"
    yield compare_sides("config.edited", "as stored", now, why, same=not edits)


def check_intervals(manifest: Manifest, proposal: Proposal) -> Iterable[Finding]:
    saves, was, now = proposal.saves, manifest.ruler.geometry, proposal.geometry
    unit, interval = saves["unit"] or ("epoch" if saves["by_epoch"] else "iteration"), saves["interval"]
    sizes = "global_batch_size" if unit == "update" else "sequences_per_iteration"
    ratio = getattr(was, sizes) / getattr(now, sizes)
    if ratio != 1 and interval > 0 and unit != "epoch":
        texts = f"{interval:,} {unit}s of the first start", f"{interval * ratio:,.6g} of now"
        why = "iterations, updates and epochs of a config keep the size they had at the first start"
        yield Finding("hooks.intervals", "ok", *texts, why)


# ---- the data -------------------------------------------------------------------------------------------------------


def check_data(manifest: Manifest, proposal: Proposal) -> Iterable[Finding]:
    change, choice, progress = proposal.data, proposal.on_data_change, manifest.progress
    length = f"{manifest.ruler.sequences_per_epoch:,} sequences an epoch"
    if not change.differences:
        yield Finding("data.unchanged", "ok", length, "the same records, order and packing")
        return
    words = first_names([text for _, text in change.differences], "; ")
    if choice == "restart" or (choice == "append" and change.only_appended):
        then = "a new epoch of the new data begins" if choice == "restart" else "they join from the next epoch on"
        if change.holds_out_trained:
            then += (
                f"; the {progress.updates:,} updates ({progress.samples:,} samples) before this split may have trained"
                " on records that it holds out now: val/loss is lower than on records that were never seen"
            )
        yield Finding("data.unchanged", "warn", length, words, f"--on-data-change {choice}: {then}")
        return
    why = "the training data differs from that of the checkpoint, so sequences would be repeated or skipped"
    remedy = "restore the data; or, where records were only added, --on-data-change append; or --on-data-change"
    remedy += " restart, or another run with --load-from"
    if change.division is not None:  # a changed split: its remedy is offered first
        was = change.division[0]
        leave = "leave val_dataloader.split out, as before (data of its own may be evaluated at any time)"
        before = leave if was is None else f"set val_dataloader.split back to {was['share']:g} (seed {was['seed']})"
        remedy = f"{before}; {remedy}"
    yield Finding("data.unchanged", "block", length, words, why, remedy)


# ---- numbers and surroundings ---------------------------------------------------------------------------------------


def check_engine(manifest: Manifest, proposal: Proposal) -> Iterable[Finding]:
    was, now = dict(manifest.topology), dict(proposal.topology)
    old, precision = was.pop("precision", None), now.pop("precision", "fp32")
    why = "masters and moments are fp32 in all; results differ by its rounding"
    yield compare_sides("precision", old or "not known", precision, why, same=old == precision)
    why = "bit-equal" if was == now else "loaded by parameter name; equal to float rounding, not to the bit"
    before, after = (
        ", ".join(f"{key} {value}" for key, value in sorted(side.items()) if value not in (None, False, [], ()))
        for side in (was, now)
    )
    yield Finding("engine", "ok", before, after, why)
    why = "each process keeps its own generator: a network's own dropout is seeded anew"
    yield compare_sides("rng", f"{was.get('dp_size')} process(es)", f"{now.get('dp_size')} process(es)", why)


def check_ema(manifest: Manifest, proposal: Proposal) -> Iterable[Finding]:
    was, now = ("kept" if averages else "none" for averages in (manifest.files_in("ema"), proposal.averages))
    why = "the average is dropped with the next checkpoint"
    if proposal.averages:
        why = "the average starts at the present weights"
    yield compare_sides("ema", was, now, why)


def check_versions(manifest: Manifest, proposal: Proposal) -> Iterable[Finding]:
    names = sorted(set(manifest.versions) & set(proposal.versions))
    other = [name for name in names if manifest.versions[name] != proposal.versions[name]]
    was = ", ".join(f"{name} {manifest.versions[name]}" for name in other or names)
    now = ", ".join(f"{name} {proposal.versions[name]}" for name in other) or "the same"
    why = "results may differ in the last bits, or by what those versions changed"
    yield compare_sides("versions", was, now, why, same=not other)


def check_log(manifest: Manifest, proposal: Proposal) -> Iterable[Finding]:
    updates, (first, *_) = manifest.progress.updates, proposal.schedules.at(manifest.progress)
    if proposal.schedules.total_sequences - manifest.progress.sequences < proposal.geometry.global_batch_size:
        return  # nothing is left to train
    then = f"'resumed from' {proposal.checkpoint}, then update {updates + 1:,} with lr {first['lr']:.4g}"
    yield Finding("log.confirmation", "ok", f"update {updates:,}", f"look for: {then}", guide=5)


_CHECKS: tuple[Callable[[Manifest, Proposal], Iterable[Finding]], ...] = (
    check_checkpoint,
    check_foreign,
    lambda manifest, proposal: model_findings(manifest, parameters=proposal.parameters, config=proposal.config),
    check_batch,
    check_position,
    check_learning_rate,
    check_edited,
    check_intervals,
    check_data,
    check_engine,
    check_ema,
    check_versions,
    check_disk,
    check_log,
)
