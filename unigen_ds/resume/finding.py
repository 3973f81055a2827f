"""The result of a check (``Finding``), its input (``Proposal``), and what differs between a checkpoint and the run that
would continue it: the model, the optimizer, edits of a config that nothing else shows. Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core.errors import ResumeBlocked
from unigen_ds.core.json_values import dotted_name, leaves
from unigen_ds.core.progress import Geometry
from unigen_ds.core.shards import first_names, misfit
from unigen_ds.data.batches.change import DataChange
from unigen_ds.resume.geometry import MemoryPlan
from unigen_ds.schedule.schedule import Schedules

BUILT_KEY = "built"
"""Key of a stored config: what the config left to ``pretrained`` and to defaults, as the model was built."""
_SIZES = (
    "model.llm.", "model.vit.", "model.vae.", "model.pixel_shuffle_factor", "model.latent_patch_size",
    "lora.r", "lora.alpha", "lora.use_", "lora.quantize",
)  # fmt: skip
_IN_SHAPES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "image_size", "patch_size", "num_channels",
    "channels", "base_channels", "channel_multipliers", "num_blocks", "latent_channels", "latent_patch_size",
    "pixel_shuffle_factor", "r", "use_dora", "tie_word_embeddings", "layer_types", "max_window_layers",
)  # fmt: skip
"""Sizes that the names and shapes of the weights show."""
_SECTIONS = ("model", "lora", "processor", "loss_weights", "optim_wrapper", "custom_hooks")
_ELSEWHERE = (
    "model.activation_checkpointing", "model.compile", "model.freeze", "model.quantize", "model.pretrained",
    "model.copy_init_moe", "optim_wrapper.accumulative_counts", "optim_wrapper.precision",
    "optim_wrapper.optimizer.type", "custom_hooks[EvaluateHook]",
)  # fmt: skip
"""Keys that change no number, or that another finding reports, as it does every learning rate."""

Status = Literal["ok", "warn", "block"]


@dataclass(frozen=True)
class Finding:
    id: str
    status: Status
    was: str
    now: str
    why: str = ""
    remedy: str = ""
    guide: int | None = None


def compare_sides(
    id: str, was: str, now: str, why: str, remedy: str = "", *, same: bool | None = None, otherwise: Status = "warn"
) -> Finding:
    """A finding that is ``ok`` where both are the ``same`` (None: have equal texts), and ``otherwise`` where not."""
    same = was == now if same is None else same
    return Finding(id, "ok", was, now) if same else Finding(id, otherwise, was, now, why, remedy)


SAVES = {"interval": -1, "by_epoch": True, "unit": None, "max_keep_ckpts": -1, "form": "sharded"}
"""When checkpoints are saved, and how many are kept: arguments of ``CheckpointHook``, as they are without a hook."""


@dataclass(frozen=True)
class Proposal:
    """The run as it would continue: everything that a finding depends on, from files alone."""

    checkpoint: str
    config: Mapping[str, Any]
    """Plain values, as given."""
    geometry: Geometry
    topology: Mapping[str, Any]
    schedules: Schedules
    parameters: Sequence[Mapping[str, Any]]
    """Rows as in the manifest: name, shape, trainable, group."""
    data: DataChange
    versions: Mapping[str, str]
    complete: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    """Fills in the defaults of a config, this one or the checkpoint's."""
    saves: Mapping[str, Any] = field(default_factory=SAVES.copy)
    averages: bool = False
    """Whether an average of the weights (EMA) would be kept."""
    on_batch_change: str = "refuse"
    on_data_change: str = "refuse"
    free_bytes: int | None = None
    """Where the next checkpoints go; None: not known."""
    hashed: bool = False
    """Whether the content of the checkpoint's files was compared, not only their sizes."""
    unknown: Sequence[str] = ()
    """What another trainer's checkpoint does not state."""


def refuse(findings: Iterable[Finding]) -> None:
    """Raise ``ResumeBlocked`` naming every finding that blocks."""
    blocks = [finding for finding in findings if finding.status == "block"]
    if blocks:
        raise ResumeBlocked(
            "; ".join(f"{f.why} (was: {f.was}; now: {f.now})" for f in blocks),
            remedy="; ".join(dict.fromkeys(f.remedy for f in blocks if f.remedy)) or None,
        )


def finding_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """One line for each finding, and one more for its reason and its remedy."""
    for f in findings:
        title = f.id + (f" ({f.guide} of 5)" if f.guide else "")
        yield f"{f.status:<5}  {title:<22}  {f.was}" + (f"  ->  {f.now}" if f.now != f.was else "")
        for part in (f.why, f.remedy and f"remedy: {f.remedy}"):
            if part:
                yield f"       {part}"


def plans(geometries: Sequence[Geometry], memory: Sequence[MemoryPlan]) -> Iterator[str]:
    """The splits of the batch that keep the effective batch, and the plans for a device that is too small."""
    if geometries:
        total, ranks = geometries[0].global_batch_size, geometries[0].dp_size
        yield f"Splits of {total} sequences over {ranks} process(es), smallest memory first:"
        yield "  " + ", ".join(f"batch_size {g.batch_size} x {g.accumulative_counts} accumulated" for g in geometries)
    if memory:
        yield "If memory runs out (the effective batch stays):"
        for plan in memory:
            yield f"  plan {plan.name}: {plan.words}: {plan.geometry}"


# What differs.


def other_sizes(old: Mapping[str, Any], config: Mapping[str, Any], *, hidden: bool = False) -> list[str]:
    """Sizes of the model that both state, differently; ``hidden``: only those that leave every shape as it was."""
    if all(old.get(key) == config.get(key) for key in ("model", "lora", BUILT_KEY)):
        return []
    was, now = _sizes(old), _sizes(config)
    return [
        f"{key} was {was[key]!r} and is {value!r}"
        for key, value in now.items()
        if was.get(key, value) != value and not (hidden and key.rpartition(".")[2] in _IN_SHAPES)
    ]


def other_model(old: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Report another kind of model: this explains all other differences, so it is the first."""
    was, now = ((side.get("model") or {}).get("type") for side in (old, config))
    return [f"model.type was {was!r} and is {now!r}"] if None not in (was, now) and was != now else []


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> size: as given; where nothing is given, as the model was built."""
    as_built = (config.get(BUILT_KEY) or {}).get("model")
    sizes = {**dict(_leaves(as_built, "model")), **dict(_leaves(config.get("model"), "model"))}
    sizes |= dict(_leaves(config.get("lora"), "lora"))
    # transformers 5 writes rope_theta into rope_parameters, transformers 4 beside the other sizes
    return {key.replace("rope_parameters.rope_theta", "rope_theta"): v for key, v in sizes.items() if _is_size(key)}


def edited_settings(old: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Everything else that changes what is learned."""
    was, now = (
        {key: value for section in _SECTIONS for key, value in _leaves(side.get(section), section)}
        for side in (old, config)
    )
    as_built = dict(_leaves((old.get(BUILT_KEY) or {}).get("model"), "model"))
    was = {**{key: as_built[key] for key in now.keys() & as_built.keys()}, **was}  # a default that is made explicit
    elsewhere = {*filter(_is_size, was.keys() & now.keys()), *_ELSEWHERE}
    edits = []
    for key in dict.fromkeys((*was, *now)):
        same = was.get(key) == now.get(key) and isinstance(was.get(key), bool) == isinstance(now.get(key), bool)
        without_name = re.sub(r"[:#][^]]*", "", key)
        if same or key.endswith(".lr") or any(key == one or without_name.startswith(one + ".") for one in elsewhere):
            continue
        before, after = (repr(side[key]) if key in side else "not given" for side in (was, now))
        edits.append(f"{key} was {before} and is {after}")
    return edits


def _is_size(key: str) -> bool:
    return key.startswith(_SIZES) and not key.endswith(("dropout", "initializer_range", "max_position_embeddings"))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all that is given and no section; a component in a list is ``[name]``."""
    for leaf, one in leaves(value, (path,), names=True):
        if one is not None and one != {}:
            yield dotted_name(leaf), list(one) if isinstance(one, tuple) else one


def model_findings(
    manifest: Manifest, *, parameters: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> list[Finding]:
    """The findings on model and optimizer, by parameter names: computed again for the real model once it is built."""
    earlier, was = manifest.parameters, manifest.config
    model = other_sizes(was, config)
    quantized, now = ((side.get("model") or {}).get("quantize") or {} for side in (was, config))
    model += [f"{part} was {way} and is {now[part]}" for part, way in quantized.items() if now.get(part, way) != way]
    shapes = misfit(*({row["name"]: tuple(row["shape"]) for row in rows} for rows in (earlier, parameters)))
    if shapes:
        first, second = ((side.get("lora") or {}).get("target_modules") for side in (was, config))
        lists = [[value] if isinstance(value, str) else [*(value or ())] for value in (first, second)]
        if None not in (first, second) and lists[0] != lists[1]:  # other ones may choose the same layers
            model.append(f"lora.target_modules was {first!r} and is {second!r}")
        model += [f"{name} is new" for name in shapes.missing] + [f"{name} is gone" for name in shapes.unexpected]
        model += [f"{name} was {[*before]} and is {[*after]}" for name, (before, after) in shapes.reshaped.items()]
    trainable = {row["name"]: row["trainable"] for row in parameters}
    frozen = [
        f"{row['name']} {'is frozen now' if row['trainable'] else 'was frozen and is trained'}"
        for row in earlier
        if trainable.get(row["name"], row["trainable"]) != row["trainable"]
    ]
    number = f"{len(earlier)} parameters"
    structure = first_names(model and other_model(was, config) + model, "; ") or "the same names and shapes"
    training = first_names(frozen, "; ") or "the same ones are trained"
    why = "the model differs from that of the checkpoint"
    remedy = "set model back; --load-from CKPT starts another training from the weights, if they fit"
    kind, kind_now = optimizer_type(was), optimizer_type(config)
    of_optimizer = "the optimizer is another one, which cannot use the stored state"
    back = f"set optim_wrapper.optimizer.type back to {kind}, or start anew with --load-from CKPT"
    before, after = (", ".join(sorted({str(r["group"]) for r in rows if r["group"]})) for rows in (earlier, parameters))
    return [
        compare_sides("model.structure", number, structure, why, remedy, same=not model, otherwise="block"),
        compare_sides("model.trainable", number, training, why, remedy, same=not frozen, otherwise="block"),
        compare_sides("optimizer.type", kind, kind_now, of_optimizer, back, otherwise="block"),
        compare_sides("optimizer.groups", before, after, "moments follow the parameters by name into the new groups"),
    ]


def optimizer_type(config: Mapping[str, Any]) -> str:
    """``AdamW``, also where the config had the class and its text was stored."""
    kind = str(((config.get("optim_wrapper") or {}).get("optimizer") or {}).get("type", "AdamW"))
    return kind.removeprefix("<class '").removesuffix("'>").rpartition(".")[2]
