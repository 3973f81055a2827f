"""Whether a checkpoint fits the model and the optimizer, by the names of the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core.fitting import Shape, misfit, refuse_misfit
from unigen_ds.resume.edited import other_model, other_sizes
from unigen_ds.resume.finding import Finding, shown


def model_findings(
    manifest: Manifest, *, parameters: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> list[Finding]:
    """The findings on model and optimizer, by parameter names: computed again for the real model once it is built."""
    number = f"{len(manifest.parameters)} parameters"
    other = other_sizes(manifest.config, config) + _other_packing(manifest.config, config)
    if shapes := other_shapes(manifest.parameters, parameters):
        other += [*_other_layers(manifest.config, config), *shapes]
    if other:
        other = other_model(manifest.config, config) + other
    frozen = _other_training(manifest, parameters)
    kinds = optimizer_type(manifest.config), optimizer_type(config)
    groups = _groups(manifest.parameters), _groups(parameters)
    findings = [
        Finding("model.structure", "ok", number, "the same names and shapes"),
        Finding("model.trainable", "ok", number, "the same ones are trained"),
        Finding("optimizer.type", "ok", kinds[0], kinds[1]),
        Finding("optimizer.groups", "ok", groups[0], groups[1]),
    ]
    for index, differences in enumerate((other, frozen)):
        if differences:
            findings[index] = replace(
                findings[index],
                status="block",
                now=shown(differences),
                why="the model differs from that of the checkpoint",
                remedy="set model back; --load-from CKPT starts another training from the weights, if they fit",
            )
    if kinds[0] != kinds[1]:
        findings[2] = replace(
            findings[2],
            status="block",
            why="the optimizer is another one, which cannot use the stored state",
            remedy=f"set optim_wrapper.optimizer.type back to {kinds[0]}, or start anew with --load-from CKPT",
        )
    if groups[0] != groups[1]:
        why = "moments follow the parameters by name into the new groups"
        findings[3] = replace(findings[3], status="warn", why=why)
    return findings


def _other_training(manifest: Manifest, parameters: Sequence[Mapping[str, Any]]) -> list[str]:
    trained = {row["name"]: row["trainable"] for row in parameters}
    return [
        f"{row['name']} {'is frozen now' if row['trainable'] else 'was frozen and is trained'}"
        for row in manifest.parameters
        if trained.get(row["name"], row["trainable"]) != row["trainable"]
    ]


def _other_packing(stored: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Parts whose weights are packed in another way. (Packed or not, that is another set of parameters.)"""
    was, now = ((c.get("model") or {}).get("quantize") or {} for c in (stored, config))
    return [f"{part} was {was[part]} and is {now[part]}" for part in was if now.get(part, was[part]) != was[part]]


def _other_layers(stored: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """The patterns that choose other layers for adapters; other ones may choose the same."""
    was, now = ((c.get("lora") or {}).get("target_modules") for c in (stored, config))
    same = was == now or None in (was, now) or [*_listed(was)] == [*_listed(now)]
    return [] if same else [f"lora.target_modules was {was!r} and is {now!r}"]


def _listed(patterns: Any) -> Sequence[str]:
    return [patterns] if isinstance(patterns, str) else patterns


def _groups(parameters: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(sorted({str(row["group"]) for row in parameters if row["group"]}))


def check_weights(stored: Sequence[Mapping[str, Any]], *, parameters: Sequence[Mapping[str, Any]]) -> None:
    """Refuse weights that do not fit. Raises ``CheckpointError`` naming what differs.

    Engines compare numbers of elements when they load; a transposed matrix has as many.
    """
    refuse_misfit("the checkpoint", misfit(_shapes(stored), _shapes(parameters)))


def other_shapes(stored: Sequence[Mapping[str, Any]], parameters: Sequence[Mapping[str, Any]]) -> list[str]:
    """Parameters that are new, gone or reshaped, in words."""
    found = misfit(_shapes(stored), _shapes(parameters))
    words = [f"{name} is new" for name in found.missing] + [f"{name} is gone" for name in found.unexpected]
    return words + [f"{name} was {[*was]} and is {[*now]}" for name, (was, now) in found.reshaped.items()]


def _shapes(rows: Sequence[Mapping[str, Any]]) -> dict[str, Shape]:
    return {row["name"]: tuple(row["shape"]) for row in rows}


def optimizer_type(config: Mapping[str, Any]) -> str:
    """``AdamW``, also where the config had the class and its text was stored."""
    kind = str(((config.get("optim_wrapper") or {}).get("optimizer") or {}).get("type", "AdamW"))
    return kind.removeprefix("<class '").removesuffix("'>").rpartition(".")[2]
