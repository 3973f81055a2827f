"""The models with pictures under every engine, in fp32 against one process: to 1e-5.

``vlm`` is the vision-language model with tied embeddings and tiles, ``flux`` the unified model with FLUX's autoencoder
and images of three sizes, ``llava`` transformers' own LLaVA. Ranks get micro-batches without any image, and others
without any text target.
"""

from __future__ import annotations

import pytest
from transformers import AutoModelForImageTextToText

from tests.end_to_end.engines.jobs import cases, model_cases
from tests.end_to_end.engines.launch import metric_deviation, unequal, want, weight_deviation

runs = want("models")
pytestmark = pytest.mark.timeout(3600)

BOUND = 1e-5
EVERYBODY = [job.name for job in model_cases.models(full=False) if not job.name.endswith("/single@1")]


@pytest.mark.parametrize("name", EVERYBODY)
def test_losses_norms_and_weights_are_those_of_one_process(name):
    run, single = runs().outcome(name), runs().outcome(name.partition("/")[0] + "/single@1")
    assert len(run.lines) == model_cases.MODEL_UPDATES and all(line["applied"] for line in run.lines)
    assert unequal({("", k): v for k, v in run.initial.items()}, {("", k): v for k, v in single.initial.items()}) == []
    assert metric_deviation(run, single) <= BOUND
    weights = weight_deviation(run.final, single.final)
    assert weights.relative_l2 <= BOUND, weights.where
    assert weights.absolute <= cases.LR * model_cases.MODEL_UPDATES


def test_a_model_of_transformers_starts_from_its_files_under_every_engine():
    """Renamed as transformers does, each process its own shard; merged, it is transformers' own state dict."""
    theirs = AutoModelForImageTextToText.from_pretrained(runs().out / "data" / "models" / "llava").state_dict()
    for name in (*(name for name in EVERYBODY if name.startswith("llava")), "llava/single@1"):
        run = runs().outcome(name)
        assert unequal({("", k): v for k, v in run.initial.items()}, {("", k): v for k, v in theirs.items()}) == []
        log = (run.folder / "train.log").read_text(encoding="utf-8")
        assert "LlavaForConditionalGeneration: documents share one row" in log


@pytest.mark.parametrize("model", model_cases.MODELS)
def test_ranks_really_lack_images_and_text_targets(model):
    """The premise: one rank has none while the other has some, of images and of text targets, either way round."""
    first, second = (runs().outcome(f"{model}/zero3@2").records(rank) for rank in (0, 1))
    assert len(first) == len(second) == 2 * model_cases.MODEL_UPDATES
    for key in ("images", "text_targets"):
        pairs = {(a[key] > 0, b[key] > 0) for a, b in zip(first, second, strict=True)}
        assert {(True, False), (False, True)} <= pairs, key
