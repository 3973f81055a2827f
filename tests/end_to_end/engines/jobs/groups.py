"""Which jobs there are, by group; ``full`` is the whole matrix, else the part that ``make test`` has time for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tests.end_to_end.engines.jobs import cases, feature_cases, lora_cases, mixture_cases, model_cases
from tests.end_to_end.engines.jobs.cases import Job

GROUPS: dict[str, Callable[..., list[Job]]] = {
    "equivalence": cases.equivalence,
    "resume": lambda full: [
        *cases.resume(full=full),
        *model_cases.resume(full=full),
        *feature_cases.adapter(),
        *feature_cases.fused_zero(),
    ],
    "killed": model_cases.killed_jobs,
    "mixture": mixture_cases.mixtures,
    "elastic": cases.elastic,
    "faulty": cases.faulty,
    "full_disk": cases.full_disk,
    "packed": cases.packed,
    "odd": cases.odd,
    "recompute": cases.recompute,
    "published": cases.published_jobs,
    "decoder": cases.decoder,
    "lora": lambda full: [*lora_cases.lora(full=full), *lora_cases.others()],
    "memory": lambda full: cases.memory(),
    "layouts": lambda full: cases.layouts(),
    "partial": lambda full: cases.partial(),
    "watched": feature_cases.watched_jobs,
    "mmengine_hooks": feature_cases.mmengine_hooks,
    "evaluated": feature_cases.evaluated_jobs,
    "structure": feature_cases.structure,
    "compiled": feature_cases.compiled,
    "optimizers": feature_cases.optimizers,
    "plugin": feature_cases.plugin,
    "best": lambda full: feature_cases.best(),
    "models": model_cases.models,
    "auto": model_cases.auto,
    "models_bf16": model_cases.models_bf16,
    "parts": model_cases.parts,
}


def jobs_of(groups: Iterable[str], *, full: bool) -> list[Job]:
    """All jobs of some groups, in the order of ``GROUPS``."""
    return [job for name in GROUPS if name in set(groups) for job in GROUPS[name](full=full)]
