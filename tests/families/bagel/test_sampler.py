"""Drawing with a small model that was really trained for a few updates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny import tiny_config
from unigen_ds.examples.digits.dataset import draw_prompt
from unigen_ds.families.bagel.flow_settings import RENORMS, FlowSettings
from unigen_ds.families.bagel.inference import InterleaveInferencer
from unigen_ds.inference.prompts import Prompt
from unigen_ds.runner import Runner

PROMPTS = [draw_prompt(digit) for digit in (3, 8, 1)]


@pytest.fixture(scope="module")
def inferencer(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> InterleaveInferencer:
    config = tiny_config(tmp_path_factory.mktemp("sampler") / "run", digits, param_scheduler=[])
    runner = Runner.from_cfg(config, max_updates=40)
    runner.train()
    return InterleaveInferencer(runner.backend.model.eval(), runner.processor)


def sample(inferencer: Any, prompts: list[str], *, seeds: Sequence[int], **flow: Any) -> list[np.ndarray]:
    pairs = zip(prompts, seeds, strict=True)
    requests: list[Any] = [inferencer.request(Prompt(prompt), seed=seed, size=(8, 8)) for prompt, seed in pairs]
    settings = FlowSettings(num_timesteps=4, **flow)
    answers = inferencer.complete(requests, max_new_tokens=1, flow=settings, together=True)
    return [np.array(one.images[0]).astype(int) for one in answers]


def difference(one: np.ndarray, other: np.ndarray) -> int:
    return int(np.abs(one - other).max())


@pytest.mark.parametrize("renorm", RENORMS)
def test_an_image_does_not_depend_on_how_many_are_drawn_together(inferencer: Any, renorm: str) -> None:
    """Within one of 255: fp32 sums of few rows and of many are rounded differently."""
    flow: dict[str, Any] = {"text_scale": 2.0, "image_scale": 1.5, "renorm": renorm}
    together = sample(inferencer, PROMPTS, seeds=(4, 5, 4), **flow)
    for prompt, seed, picture in zip(PROMPTS, (4, 5, 4), together, strict=True):
        [alone] = inferencer.unified_generate(prompt, seed=seed, size=(8, 8), flow={"num_timesteps": 4, **flow,
                                              "timestep_shift": 1.0, "interval": (0.0, 1.0)}).images  # fmt: skip
        assert difference(np.array(alone).astype(int), picture) <= 1
    assert difference(together[0], together[1]) > 10 and difference(together[0], together[2]) > 0
    [other_seed] = sample(inferencer, PROMPTS[:1], seeds=(1,), **flow)
    assert difference(other_seed, together[0]) > 10
