"""lmms-eval's tasks with any model of this project that answers in text: a wrapper with lmms-eval's own interface.

In: an inferencer (``Family.inferencer``) and names of tasks. Out: numbers by task. The package ``lmms_eval`` is
imported here only, when it is used; its abstract class (``lmms_eval.api.model.lmms``) has the three methods below. An
answer ends at the first of the task's ``until`` texts.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from PIL import Image

from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.system import dist
from unigen_ds.system.machine import import_optional
from unigen_ds.system.seeding import derive_seed

TASKS = ("mmstar", "mmmu_val", "ocrbench", "textvqa_val", "docvqa_val", "scienceqa", "mme", "infovqa_val", "chartqa")
"""nanoVLM's."""
INSTALL = "lmms-eval (in an environment of its own where its dependencies replace those of the training)"


def run_tasks(inferencer: Any, tasks: Sequence[str] = TASKS, *, limit: int | None = None) -> dict[str, Any]:
    """Task -> metric -> number, of at most ``limit`` samples. Collective. Raises ``ConfigError`` without lmms-eval."""
    evaluator, api, manager = (
        import_optional(f"lmms_eval.{name}", "--lmms-tasks", install=INSTALL)
        for name in ("evaluator", "api.model", "tasks")
    )
    results = evaluator.simple_evaluate(
        model=model_class(api.lmms)(inferencer),
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
    """A subclass of lmms-eval's abstract class ``base`` that calls ``unified_generate`` for each request."""

    class UnigenModel(base):  # type: ignore[misc, valid-type]
        is_simple = True

        def __init__(self, inferencer: Any) -> None:
            super().__init__()
            self.inferencer = inferencer
            self._rank, self._world_size = dist.rank(), dist.world_size()
            self.accelerator = Namespace(wait_for_everyone=dist.barrier)  # what versions before 0.4 call

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            answers: list[str] = []
            for context, options, visuals_of, doc, task, split in (request.args for request in requests):
                images: list[Image.Image] = []
                parts = visuals_of(self.task_dict[task][split][doc]) or []
                while parts:  # one list, whatever lists there are in it
                    first, *parts = parts
                    if isinstance(first, (list, tuple)):
                        parts = [*first, *parts]
                    elif isinstance(first, Image.Image):
                        images.append(first.convert("RGB"))
                    else:
                        raise DataError(f"a task of lmms-eval shows {type(first).__name__}", allowed="images")
                answer = self.inferencer.unified_generate(
                    context.replace("<image>", "").strip(),
                    images=images,
                    understand=True,
                    max_length=int(options.get("max_new_tokens") or 1024),
                    temperature=float(options.get("temperature") or 0.0) if options.get("do_sample") else 0.0,
                    seed=derive_seed(0, task, split, doc),
                )
                text, ends = answer.text or "", options.get("until") or ()
                for end in [ends] if isinstance(ends, str) else ends:
                    text = text.split(end)[0] if end else text
                answers.append(text.strip())
            return answers

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            raise ConfigError("a task of lmms-eval asks for likelihoods", allowed="tasks of one generated text")

        def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
            raise ConfigError("a task of lmms-eval asks for several rounds", allowed="tasks of one generated text")

    return UnigenModel
