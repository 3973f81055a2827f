"""Writing on from key/value caches gives what computing the whole documents again gives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.families.nanovlm.test_model_golden import CONFIG, NANOVLM, Ids
from unigen_ds.data.samples.sample import Loaded
from unigen_ds.data.samples.splits import DroppedImage, TokenSplit
from unigen_ds.families.nanovlm.model import VLM
from unigen_ds.families.nanovlm.processor import LoadedTiles, TiledSplit, VLMProcessor
from unigen_ds.families.nanovlm.published import vlm_arguments
from unigen_ds.inference.continuation import continue_prompts, likeliest

NEW, NEVER = 6, 10**6


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
def prompts(processor: VLMProcessor) -> list[list[Loaded]]:
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


def written(
    model: VLM, processor: VLMProcessor, prompts: Sequence[Sequence[Loaded]], *, max_positions: int
) -> tuple[list[list[int]], list[Tensor]]:
    """The ids, and the logits that they were chosen by."""
    seen: list[Tensor] = []

    def choose(logits: Tensor, documents: Sequence[int]) -> Sequence[int]:
        seen.append(logits)
        return likeliest(logits)

    ids = continue_prompts(model, processor, prompts, max_new_tokens=NEW, max_positions=max_positions, choose=choose)
    return ids, seen


def test_as_computed_again(model, processor, prompts) -> None:
    cached, again = (written(model, processor, prompts, max_positions=n) for n in (NEVER, 0))
    assert cached[0] == again[0] and [len(ids) for ids in cached[0]] == [NEW] * 3
    for a, b in zip(cached[1], again[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_one_that_ends_does_not_disturb_the_others(model, processor, prompts) -> None:
    together = written(model, processor, prompts, max_positions=NEVER)[0]
    ending = together[0][2]  # what the first says third is made the end
    tokenizer = processor.tokenizer
    kept, tokenizer.eos_id = tokenizer.eos_id, ending
    try:
        ids, logits = written(model, processor, prompts, max_positions=NEVER)
    finally:
        tokenizer.eos_id = kept
    for mine, longer in zip(ids, together, strict=True):
        assert mine == (longer[: longer.index(ending) + 1] if ending in longer else longer)
    assert len(logits[0]) == 3 and len(logits[3]) < 3


def test_a_token_costs_its_own_row(model, processor, prompts, monkeypatch) -> None:
    sizes: list[int] = []
    forward = model.language_model.model.forward
    monkeypatch.setattr(
        model.language_model.model, "forward", lambda x, *rest: sizes.append(len(x)) or forward(x, *rest)
    )
    written(model, processor, prompts, max_positions=NEVER)
    whole = 9 + 4 + 1 + 2 * processor.tokens_per_tile + 5 + 1
    assert sizes == [whole, *[len(prompts)] * (NEW - 1)]
