"""lmms-eval's tasks with any model of this project that answers in text: a wrapper with lmms-eval's own interface.

In: an inferencer (``Family.inferencer``) and names of tasks. Out: numbers by task. The package ``lmms_eval`` is
imported here only, when it is used; its abstract class (``lmms_eval.api.model.lmms``) has the three methods below. A
task's images are passed on losslessly, as PNG files; an answer ends at the first of the task's ``until`` texts.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from PIL import Image

from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.system import dist
from unigen_ds.system.seeding import derive_seed

TASKS = ("mmstar", "mmmu_val", "ocrbench", "textvqa_val", "docvqa_val", "scienceqa", "mme", "infovqa_val", "chartqa")
"""nanoVLM's."""
INSTALL = "pip install lmms-eval (in an environment of its own where its dependencies replace those of the training)"
_PLACEHOLDER = "<image>"
_MAX_NEW_TOKENS = 1024


def run_tasks(
    inferencer: Any, tasks: Sequence[str] = TASKS, *, limit: int | None = None, seed: int = 0
) -> dict[str, Any]:
    """Task -> metric -> number, as lmms-eval computes them. Collective where there are several processes.

    ``limit``: samples of each task at most. Raises ``ConfigError`` where lmms-eval is not installed.
    """
    try:
        evaluator, api, manager = (import_module(f"lmms_eval.{name}") for name in ("evaluator", "api.model", "tasks"))
    except ImportError as error:
        raise ConfigError(f"lmms-eval cannot be imported: {error}", remedy=INSTALL) from error
    results = evaluator.simple_evaluate(
        model=model_class(api.lmms)(inferencer, seed=seed),
        model_args="",
        tasks=list(tasks),
        batch_size=1,
        limit=limit,
        log_samples=False,
        task_manager=manager.TaskManager(),
        cli_args=Namespace(process_with_media=True, output_path=None),
    )
    return dict(results["results"]) if results else {}  # lmms-eval returns it on rank 0 alone


def model_class(base: type) -> type:
    """The wrapper, as a subclass of lmms-eval's abstract class ``base``."""

    class UnigenModel(base):  # type: ignore[misc, valid-type]
        """Calls ``unified_generate`` of an inferencer for each request."""

        is_simple = True

        def __init__(self, inferencer: Any, *, seed: int = 0) -> None:
            super().__init__()
            self.inferencer, self.seed = inferencer, seed
            self._rank, self._world_size = dist.rank(), dist.world_size()
            self.accelerator = Namespace(wait_for_everyone=dist.barrier)  # what versions before 0.4 call

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            """The answer to each request, in their order."""
            return [self._answer(*request.args) for request in requests]

        def _answer(
            self, context: str, options: Mapping[str, Any], visuals_of: Any, doc: Any, task: str, split: str
        ) -> str:
            visuals = visuals_of(self.task_dict[task][split][doc]) or []
            with tempfile.TemporaryDirectory() as folder:
                answer = self.inferencer.unified_generate(
                    context.replace(_PLACEHOLDER, "").strip(),
                    images=[_as_file(visual, Path(folder), n) for n, visual in enumerate(_flat(visuals))],
                    understand=True,
                    max_length=int(options.get("max_new_tokens") or _MAX_NEW_TOKENS),
                    temperature=float(options.get("temperature") or 0.0) if options.get("do_sample") else 0.0,
                    seed=derive_seed(self.seed, task, split, doc),
                )
            return _until(answer.text or "", options.get("until") or ())

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            raise ConfigError(
                "a task of lmms-eval asks for likelihoods", allowed="tasks whose output is generated text"
            )

        def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
            raise ConfigError(
                "a task of lmms-eval asks for several rounds", allowed="tasks with one answer for a record"
            )

    return UnigenModel


def _flat(visuals: Any) -> list[Any]:
    return [one for part in visuals for one in (_flat(part) if isinstance(part, (list, tuple)) else [part])]


def _as_file(visual: Any, folder: Path, number: int) -> str:
    """The path of an image. Raises ``DataError`` for what is none, such as a video or a sound."""
    if isinstance(visual, Image.Image):
        path = folder / f"{number}.png"
        visual.convert("RGB").save(path)
        return str(path)
    if isinstance(visual, (str, Path)):
        return str(visual)
    raise DataError(f"a task of lmms-eval shows {type(visual).__name__}", allowed="images")


def _until(text: str, ends: str | Sequence[str]) -> str:
    """``text`` up to the first of ``ends``."""
    for end in [ends] if isinstance(ends, str) else ends:
        text = text.split(end)[0] if end else text
    return text.strip()
