"""Conversations with images as sequences of a vision-language model: plans, batches, truncation, bad records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.support import image, picture, talk, text, write_jsonl
from tests.data.text.chat_support import CONFIG, META, character_tokenizer
from unigen_ds.core.batch import CAUSAL
from unigen_ds.data.batches.loader import collate
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.data.images.image_files import open_image, patchify
from unigen_ds.data.images.tiles import GLOBAL_TOKEN, split_tiles, tile_token
from unigen_ds.data.order.order import Draw
from unigen_ds.data.text.tokenizers import ChatTokenizer
from unigen_ds.families.nanovlm.processor import TiledSplit, VLMProcessor

TILE, PATCH, FACTOR = 16, 4, 2
PER_TILE = (TILE // PATCH // FACTOR) ** 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    character_tokenizer().save_pretrained(folder)
    return ChatTokenizer(path=str(folder))


def make(tokenizer: ChatTokenizer, **changes: Any) -> VLMProcessor:
    sizes = {"tile_size": TILE, "vit_patch_size": PATCH, "pixel_shuffle_factor": FACTOR, "max_image_size": 48}
    return VLMProcessor(tokenizer, **{**sizes, **changes})


def dataset(folder: Path, processor: VLMProcessor, *records: Any) -> UnifiedGenerationDataset:
    return UnifiedGenerationDataset(write_jsonl(folder / "train.jsonl", list(records)), processor)


def test_ids_of_the_public_tokens(tokenizer) -> None:
    assert tokenizer.image_id == META["image_token_id"]
    assert tokenizer.chat.convert_tokens_to_ids(GLOBAL_TOKEN) == META["global_image_token_id"]
    assert tokenizer.chat.convert_tokens_to_ids(tile_token(0, 0)) == META["row_1_col_1_id"]
    assert (tokenizer.bos_id, tokenizer.eos_id) == (META["im_start_id"], META["eos_token_id"])


def test_a_batch_of_a_text_and_two_pictures(tmp_path, tokenizer) -> None:
    processor = make(tokenizer)
    wide, small = picture(tmp_path / "wide.png", 40, 20, seed=1), picture(tmp_path / "small.png", 10, 9, seed=2)
    data = dataset(
        tmp_path,
        processor,
        talk(text("user", "hi"), text("assistant", "yo")),
        talk(image("user", "wide.png"), image("user", "small.png"), text("user", "two?"), text("assistant", "ok")),
    )
    assert data.lengths()[1].tolist() == [0, 8]
    rows = [[Draw(0, 0, 0), Draw(0, 1, 0)]]
    batch = collate(rows, [data], processor, seq_length=400)
    assert list(batch.document_lengths) == data.lengths()[0].tolist()
    positions = [torch.arange(n) for n in batch.document_lengths]
    assert torch.equal(batch.position_ids, torch.cat(positions)) and (batch.split_modes == CAUSAL).all()
    expected = [split_tiles(processor.tiling.pixels(open_image(path)), TILE) for path in (wide, small)]
    assert torch.equal(batch.vit_patches, torch.cat([patchify(tile, PATCH) for tiles in expected for tile in tiles]))
    assert batch.vit_lengths == ((TILE // PATCH) ** 2,) * 8
    assert batch.vit_index.numel() == 8 * PER_TILE
    ids = torch.full((batch.num_tokens,), tokenizer.image_id)
    ids[batch.text_index] = batch.text_ids
    targets = tokenizer.chat.decode(ids[batch.text_target_index + 1])
    assert targets == "yo<|im_end|>\nok<|im_end|>\n"
    assert torch.equal(ids[batch.text_target_index + 1], batch.text_target_ids)
    content = tokenizer.chat.decode(ids[batch.document_lengths[0] :])
    first = "".join(["<|image|>"] * PER_TILE)
    assert content.startswith(f"<|im_start|>user\n<image: 0>{GLOBAL_TOKEN}{first}<row_1_col_1>{first}")
    assert f"<row_2_col_3>{first}<image: 1>{GLOBAL_TOKEN}{first}two?<|im_end|>\n" in content


def test_an_image_that_does_not_fit_goes_with_all_that_follows(tmp_path, tokenizer) -> None:
    picture(tmp_path / "a.png", 40, 40)
    data = dataset(tmp_path, make(tokenizer), talk(image("user", "a.png"), text("assistant", "no")))
    whole = data.sample(0)
    short = whole.truncate(whole.num_tokens - 40)
    assert any(isinstance(split, TiledSplit) for split in whole.splits)
    assert not any(isinstance(split, TiledSplit) for split in short.splits) and short.num_tokens < 10


def test_fingerprint_follows_what_changes_a_plan(tokenizer, tmp_path) -> None:
    one = make(tokenizer)
    tokenizer.chat.save_pretrained(tmp_path)
    other = ChatTokenizer(path=str(tmp_path), chat_template=CONFIG["lm_chat_template"] + " ")
    others = [make(tokenizer, max_image_size=32), make(tokenizer, pixel_shuffle_factor=1), make(other)]
    others.append(make(tokenizer, resize_to_max_side_len=True))
    assert make(tokenizer, seed=1).fingerprint == one.fingerprint
    assert len({p.fingerprint for p in (one, *others)}) == 5
