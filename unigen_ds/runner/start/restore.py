"""The state that a run begins with: the weights of a checkpoint and, on a resume, everything else that it contains.

In: ``Parts``, whose plan names the checkpoint, and the hooks. The state is loaded into the engine and the hooks; only
the argument of ``after_load_checkpoint`` is returned. Collective.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from logging import INFO, WARNING
from typing import Any

from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.foreign import read_foreign
from unigen_ds.checkpoint.partial import DIFFERENCES, REPORT_FILE, FittedReader, fit
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.shards import ShardReader
from unigen_ds.hooks.base import Hook
from unigen_ds.resume.finding import model_findings, other_model, other_sizes, refuse
from unigen_ds.runner.start.parts import Parts
from unigen_ds.system import dist
from unigen_ds.system.files import write_text_atomic
from unigen_ds.system.log import logger
from unigen_ds.system.seeding import derive_seed, seed_everything


def restore(parts: Parts, hooks: Sequence[Hook]) -> dict[str, Any] | None:
    """Load what the plan names: weights; on a resume also moments, hook states and, last, the random generators.

    Returns the argument of ``after_load_checkpoint``; None where the run is no resume. Raises ``CheckpointError`` or
    ``ResumeBlocked`` where the checkpoint does not fit.
    """
    checkpoint, manifest = parts.plan.checkpoint, parts.start.manifest
    if checkpoint is None:
        return None
    if parts.plan.manifest is not None:
        reader: ShardReader = store.open_reader(checkpoint, parts.plan.manifest)
        stored, stored_config = parts.plan.manifest.parameters, parts.plan.manifest.config
    else:
        foreign = read_foreign(checkpoint)
        reader, stored, stored_config = foreign.reader, foreign.parameters, {"model": foreign.sizes}
    if manifest is None:
        fit_weights(parts, reader, stored, stored_config)
        return None
    refuse(model_findings(manifest, parameters=parts.parameters, config=parts.plain_config))
    parts.backend.load_tensors(reader, keep=parts.backend.left_out)
    states, readers = store.read_hook_states(checkpoint, manifest), store.open_shards(checkpoint, manifest)
    for hook in hooks:
        if hook.name in states:
            hook.load_state_dict(states[hook.name])
        hook.load_shards(readers)
    if dropped := sorted(set(states) - {hook.name for hook in hooks}):
        logger().warning("State of hooks that this config does not have is dropped: %s.", ", ".join(dropped))
    if not store.restore_rng(checkpoint, manifest):
        seed = derive_seed(parts.settings.seed, "resume", manifest.progress.updates)
        seed_everything(seed, rank=dist.rank())
        logger().warning("The checkpoint is of another number of processes: network dropout is seeded anew.")
    home, lineage = parts.plan.home, parts.plan.lineage
    assert lineage is not None, "planned with a resume"
    dist.on_main(lambda: store.continue_from(home, checkpoint, lineage))
    findings = [finding.state_dict() for finding in parts.findings]
    return {**manifest.state_dict(), "path": str(checkpoint), "findings": findings}


def fit_weights(
    parts: Parts, reader: ShardReader, stored: Sequence[Mapping[str, Any]], stored_config: Mapping[str, Any]
) -> None:
    """Weights for another model, as ``load_cfg`` allows. Differences are logged, or refused; ``load_report.json`` has
    every name. ``stored`` is the checkpoint's parameter table, ``stored_config`` what is known of its config.
    """
    sizes = other_sizes(stored_config, parts.plain_config, hidden=True)
    cfg, report_file = parts.plan.load_cfg, parts.settings.folder / REPORT_FILE
    base = parts.backend.left_out
    if parts.settings.lora is not None and (parts.plan.manifest is None or not parts.plan.manifest.config.get("lora")):
        raise ConfigError(
            f"load_from is {parts.plan.checkpoint}, which has no adapters, and lora is set",
            remedy="adapters need a published directory: tools/export.py CHECKPOINT DIR, then model.pretrained='DIR'",
        )
    stored, own = ([row for row in rows if row["name"] not in base] for rows in (stored, parts.parameters))
    buffers = {name: buffer.numel() for name, buffer in parts.backend.buffers().items() if name not in base}
    fitted = fit(reader, stored, parameters=own, buffers=buffers, cfg=cfg, sizes=sizes)
    report = {"checkpoint": str(parts.plan.checkpoint), **fitted.state_dict()}
    dist.on_main(lambda: write_text_atomic(report_file, json.dumps(report, indent=1) + "\n"))
    fitted.check(cfg, first=other_model(stored_config, parts.plain_config))
    if dist.is_main():
        for kind, line in fitted.lines():
            logger().log(WARNING if kind in DIFFERENCES else INFO, "Weights: %s.", line)
        numbers = len(fitted.sources), len(fitted.kept)
        logger().info("Weights: %d tensors are the checkpoint's, %d stay as initialised. What differs: %s.",
                      *numbers, report_file)  # fmt: skip
    parts.backend.load_tensors(FittedReader(reader, fitted), weights_only=True, keep={*fitted.kept, *base})
    logger().info("Loaded weights only from %s; progress starts at zero.", parts.plan.checkpoint)
