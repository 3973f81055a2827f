"""Key/value caches write what whole documents computed again write; a token is drawn by temperature, top-p and seed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.families.nanovlm.test_model_golden import CONFIG, NANOVLM, Ids
from unigen_ds.core.errors import ConfigError
from unigen_ds.data.samples.sample import LoadedSplit
from unigen_ds.data.samples.splits import DroppedImage, TokenSplit
from unigen_ds.families.nanovlm.model import VLM
from unigen_ds.families.nanovlm.processor import LoadedTiles, TiledSplit, VLMProcessor
from unigen_ds.families.nanovlm.published import vlm_arguments
from unigen_ds.inference.answers import continue_prompts, likeliest, sample
from unigen_ds.inference.prompts import Sampling
from unigen_ds.system.seeding import generator

NEW = 6


class Endless(Ids):
    """No token is the end."""

    eos_id = -1


@pytest.fixture(scope="module")
def model() -> VLM:
    return VLM(pretrained=str(NANOVLM)).eval()


@pytest.fixture(scope="module")
def processor() -> VLMProcessor:
    sizes = VLM.processor_sizes(vlm_arguments(CONFIG))
    return VLMProcessor(Endless(), **sizes, max_image_size=CONFIG["max_img_size"])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def prompts(processor: VLMProcessor) -> list[list[LoadedSplit]]:
    """Of several lengths, one with a picture of two tiles, one with a position that no token has."""
    random = torch.Generator().manual_seed(1)

    def text(length: int) -> TokenSplit:
        ids = torch.randint(3, CONFIG["lm_base_vocab_size"], (length,), generator=random).tolist()
        return TokenSplit(tuple(ids), (-100,) * length)

    patches = torch.rand(
        2 * (CONFIG["vit_img_size"] // CONFIG["vit_patch_size"]) ** 2,
        3 * CONFIG["vit_patch_size"] ** 2,
        generator=random,
    )
    tiles = TiledSplit("", (Ids.image_start_id, *[Ids.image_id] * 2 * processor.tokens_per_tile), Ids.image_id, 2)
    return [[text(9)], [text(4), LoadedTiles(tiles, patches), text(5)], [DroppedImage(), text(1)]]


def answer_all(
    model: VLM, processor: VLMProcessor, prompts: Sequence[Sequence[LoadedSplit]]
) -> tuple[list[list[int]], list[Tensor]]:
    """The ids, and the logits that they were chosen by."""
    all_logits: list[Tensor] = []

    def choose(logits: Tensor, documents: Sequence[int]) -> Sequence[int]:
        all_logits.append(logits)
        return likeliest(logits)

    ids = continue_prompts(model, processor, prompts, max_new_tokens=NEW, choose=choose)
    return ids, all_logits


def test_as_computed_again(model, processor, prompts, monkeypatch) -> None:
    first = answer_all(model, processor, prompts)
    monkeypatch.setattr(VLM, "squeezes_beyond", 0)
    again = answer_all(model, processor, prompts)
    assert first[0] == again[0] and [len(ids) for ids in first[0]] == [NEW] * 3
    for a, b in zip(first[1], again[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_one_that_ends_does_not_disturb_the_others(model, processor, prompts) -> None:
    together = answer_all(model, processor, prompts)[0]
    ending = together[0][2]  # what the first says third is made the end
    tokenizer = processor.tokenizer
    end_id, tokenizer.eos_id = tokenizer.eos_id, ending
    try:
        ids, logits = answer_all(model, processor, prompts)
    finally:
        tokenizer.eos_id = end_id
    for mine, longer in zip(ids, together, strict=True):
        assert mine == (longer[: longer.index(ending) + 1] if ending in longer else longer)
    assert len(logits[0]) == 3 and len(logits[3]) < 3


LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def counts(sampling: Sampling) -> Counter[int]:
    random = generator("test")
    return Counter(sample(LOGITS, sampling, random) for _ in range(4000))


@pytest.mark.parametrize(
    ("top_p", "ids"),
    [(1.0, {0, 1, 2, 3}), (0.4, {0}), (0.5, {0}), (0.6, {0, 1}), (0.9, {0, 1, 2}), (0.96, {0, 1, 2, 3})],
)
def test_top_p_keeps_the_likeliest_up_to_that_probability(top_p: float, ids: set[int]) -> None:
    numbers = counts(Sampling(1.0, top_p))
    assert set(numbers) == ids
    assert abs(numbers[0] / 4000 - 0.5 / sum((0.5, 0.3, 0.15, 0.05)[i] for i in ids)) < 0.03


@pytest.mark.parametrize(
    "values", [(-1.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (1.0, 0.0), (1.0, 1.1), (1.0, math.nan), (0.0, 0.5)]
)
def test_refused(values: tuple[float, float]) -> None:
    with pytest.raises(ConfigError):
        Sampling(*values)
