"""The vision-language model compared with numbers from the public nanoVLM code (``tests/golden/README.md``), in fp32.

With public packing the samples of a row attend to each other; here such a row is one document, and a pad between
samples only increases the rotary position. Every size, id and setting is read from the files of ``UNIGEN_GOLDEN``.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.golden_files import GOLDEN, NANOVLM, read_json
from unigen_ds.core.batch import PackedBatch
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.data.batches.loader import pack_documents
from unigen_ds.data.images.image_files import patchify
from unigen_ds.data.samples.sample import LoadedSplit
from unigen_ds.data.samples.splits import DroppedImage, TokenSplit
from unigen_ds.families.nanovlm.model import VLM
from unigen_ds.families.nanovlm.processor import LoadedTiles, TiledSplit, VLMProcessor
from unigen_ds.families.nanovlm.published import EXTRA_TOKENS, save_nanovlm, to_nanovlm, vlm_arguments
from unigen_ds.inference.answers import continue_prompts

META, CONFIG = read_json(NANOVLM / "golden.json"), read_json(NANOVLM / "config.json")
Document = list[LoadedSplit]


class Ids:
    bos_id, eos_id, pad_id = META["im_start_id"], META["eos_token_id"], META["pad_token_id"]
    image_id = image_end_id = META["image_token_id"]
    image_start_id = META["global_image_token_id"]


@pytest.fixture(scope="module")
def tolerance() -> dict[str, float]:
    values = read_json(GOLDEN / "tolerance.json")
    own = {k.removeprefix("nanovlm/"): v for k, v in values.items() if k.startswith("nanovlm/")}
    return {name: value.get("suggested_atol", 0) for name, value in own.items()}


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(NANOVLM / "golden.safetensors")


@pytest.fixture(scope="module")
def model() -> VLM:
    return VLM(pretrained=str(NANOVLM))


@pytest.fixture(scope="module")
def processor() -> VLMProcessor:
    sizes = VLM.processor_sizes(vlm_arguments(CONFIG))
    processor = VLMProcessor(Ids(), **sizes, max_image_size=CONFIG["max_img_size"])  # type: ignore[arg-type]
    assert processor.tokens_per_tile == CONFIG["mp_image_token_length"]
    return processor


def documents(
    ids: Tensor, mask: Tensor, tiles: Tensor | None, processor: VLMProcessor, targets: Tensor | None = None
) -> list[list[Document]]:
    """Row by row its samples: the runs of real tokens. Pads after a sample belong to the start of the next."""
    rest = list(tiles) if tiles is not None else []
    rows = []
    for row in range(len(ids)):
        samples: list[Document] = []
        gap: Document = []
        labels = (targets if targets is not None else torch.full_like(ids, -100))[row].tolist()
        pieces = torch.split(
            torch.arange(ids.shape[1]), torch.unique_consecutive(mask[row], return_counts=True)[1].tolist()
        )
        for indices in (piece.tolist() for piece in pieces):
            if not mask[row, indices[0]]:
                gap = [DroppedImage()] * len(indices)
                continue
            samples.append([*gap, *splits(ids[row, indices].tolist(), [labels[p] for p in indices], rest, processor)])
        rows.append(samples)
    assert not rest, "tiles without an image token"
    return rows


def splits(ids: list[int], labels: list[int], rest: list[Tensor], processor: VLMProcessor) -> Document:
    """Text before the image, all its tiles (removed from ``rest``), text after it."""
    indices = [i for i, token in enumerate(ids) if token == Ids.image_id]
    if not indices:
        return [TokenSplit(tuple(ids), tuple(labels))]
    first, last = indices[0] - 1, indices[-1] + 1
    number = len(indices) // processor.tokens_per_tile
    part, rest[:number] = rest[:number], []
    patches = torch.cat([patchify(tile, processor.vit_patch_size) for tile in part])
    return [
        TokenSplit(tuple(ids[:first]), tuple(labels[:first])),
        LoadedTiles(TiledSplit("", tuple(ids[first:last]), Ids.image_id, number), patches),
        TokenSplit(tuple(ids[last:]), tuple(labels[last:])),
    ]


def shared(rows: list[list[Document]], processor: VLMProcessor) -> PackedBatch:
    """The public packing: the samples of a row are one document."""
    return pack_documents([[split for sample in row for split in sample] for row in rows], processor)


@pytest.fixture(scope="module")
def rows(golden, processor) -> list[list[Document]]:
    return documents(golden["input_ids"], golden["attention_mask"], golden["images"], processor, golden["targets"])


def _close(actual, expected, atol):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


@torch.no_grad()
def test_vision_and_connector(model, rows, processor, golden, tolerance):
    batch = shared(rows, processor)
    vision = model.vision_model(batch.vit_patches, batch.vit_position_ids, batch.vit_lengths)
    _close(vision, golden["mid.vit_out"].flatten(0, 1), tolerance["mid.vit_out"])
    _close(model.connector(vision), golden["mid.mp_out"].flatten(0, 1), tolerance["mid.mp_out"])


@torch.no_grad()
def test_logits(model, rows, processor, golden, tolerance):
    expected = golden["out.logits"][golden["attention_mask"] == 1]
    _close(model.logits(shared(rows, processor)), expected, tolerance["logits (attention_mask==1)"])


@torch.no_grad()
@pytest.mark.parametrize("name", ["lm", "lm_long"])
def test_language_model_alone(model, processor, golden, tolerance, name):
    """``lm_long`` is longer than the table of positions."""
    ids, expected = golden[f"{name}.ids"], golden[f"{name}.logits"]
    assert (ids.shape[1] > CONFIG["lm_max_position_embeddings"]) == (name == "lm_long")
    batch = pack_documents([[TokenSplit(tuple(row), (-100,) * len(row))] for row in ids.tolist()], processor)
    logits = model.logits(batch).unflatten(0, ids.shape)[:, -expected.shape[1] :]
    _close(logits, expected, tolerance[f"{name}.logits"])


def test_loss_and_gradients(model, rows, processor, golden, tolerance):
    batch = shared(rows, processor)
    count = batch.target_counts()["text"]
    assert count == META["n_targets"]
    model.zero_grad()
    loss = model(batch).sums["text"] / count
    _close(loss, torch.tensor(META["loss"]), tolerance["loss"])
    loss.backward()
    ours = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(ours) == len(list(model.parameters()))
    grads = to_nanovlm(ours, patch_size=CONFIG["vit_patch_size"])
    assert set(grads) == set(META["grad_norm"])
    for name in META["grad_full"]:
        _close(grads[name], golden["grad." + name], tolerance["grad (full tensors)"])
    for name, norm in META["grad_norm"].items():
        if norm > 1e-3:
            assert abs(grads[name].norm().item() / norm - 1) < tolerance["grad_norm (relative, norms > 1e-3)"], name


@pytest.mark.parametrize("case", sorted(META["generate"]))
def test_greedy_generation(model, processor, golden, tolerance, case):
    name, settings = f"gen_{case}", META["generate"][case]
    ids, mask = golden[f"{name}.input_ids"], golden[f"{name}.attention_mask"]
    prompts = [row[0] for row in documents(ids, mask, golden.get(f"{name}.images"), processor)]
    limits = {"max_new_tokens": settings["max_new_tokens"]}
    answers = continue_prompts(model, processor, prompts, **limits)
    for row, (ours, theirs) in enumerate(zip(answers, golden[f"{name}.generated_ids"].tolist(), strict=True)):
        end = theirs.index(Ids.eos_id) + 1 if Ids.eos_id in theirs else len(theirs)
        assert ours == theirs[:end]
        longer = [prompts[row] + [TokenSplit(tuple(ours[:n]), (-100,) * n)] for n in range(len(ours))]
        with torch.no_grad():
            logits = model.next_token_logits(pack_documents(longer, processor))
        _close(logits, golden[f"{name}.logits"][:end, row], tolerance[f"{name}.logits"])


def test_packed_equals_alone(model, rows, processor, tolerance):
    """For each sample, logits in the pack are those of the sample in a batch of its own, without other samples."""
    samples = [sample for row in rows for sample in row]
    with torch.no_grad():
        packed = model.logits(pack_documents(samples, processor))
        alone = [model.logits(pack_documents([sample], processor)) for sample in samples]
    assert len(samples) > len(rows)
    atol = tolerance["logits (attention_mask==1)"]
    _close(packed, torch.cat(alone), atol)
    other = model.logits(shared(rows, processor))
    assert not torch.allclose(packed, other, atol=5 * atol), "the public rows are shared"


def test_every_parameter_takes_part_without_an_image(model, rows, processor):
    texts = [[split for split in sample if isinstance(split, TokenSplit)] for row in rows for sample in row]
    batch = pack_documents(texts, processor)
    assert batch.target_counts()["text"] > 0
    model.zero_grad()
    model(batch).sums["text"].backward()
    assert all(p.grad is not None for p in model.parameters())
    assert all(not p.grad.any() for p in model.vision_model.parameters())
    empty = pack_documents([[TokenSplit((Ids.pad_id,), (-100,))]], processor)
    loss = model(empty).sums["text"]
    assert loss.item() == 0.0 and loss.requires_grad


def test_directory_in_and_out(tmp_path, golden):
    model, config = VLM(pretrained=str(NANOVLM)), CONFIG
    save_nanovlm(model, tmp_path, config=config)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / name).read_bytes() == (NANOVLM / name).read_bytes(), name


def test_directories_that_do_not_fit_are_refused(tmp_path):
    model, config = VLM(pretrained=str(NANOVLM)), CONFIG
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        VLM(pretrained=str(tmp_path))
    save_nanovlm(model, tmp_path, config=config)
    (tmp_path / "config.json").write_text(json.dumps({**config, "lm_n_blocks": config["lm_n_blocks"] + 1}))
    with pytest.raises(CheckpointError, match=rf"does not fit the model: missing: .*layers\.{config['lm_n_blocks']}\."):
        VLM(pretrained=str(tmp_path))
    with pytest.raises(ConfigError, match="lm_hidden_dim"):
        save_nanovlm(model, tmp_path, config={**config, "lm_hidden_dim": 2 * config["lm_hidden_dim"]})
    for wrong in ({"vit_cls_flag": True}, {"lm_attn_scaling": 2.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            vlm_arguments({**config, **wrong})


def test_from_a_vision_tower_and_a_language_model(tmp_path, caplog, monkeypatch):
    """As nanoVLM's initial model: its parts, published under transformers' names; 66 more words, the rest random."""
    whole, side = VLM(pretrained=str(NANOVLM)), CONFIG["vit_patch_size"]
    extra = {} if CONFIG["extra_token_amount"] == EXTRA_TOKENS else {"vocab_size": CONFIG["lm_vocab_size"]}
    settings: dict[str, Any] = {"pixel_shuffle_factor": CONFIG["mp_pixel_shuffle_factor"], "llm": extra}
    parts = {part: tmp_path / part for part in ("vit", "llm")}
    state = whole.state_dict()
    vit_state = {name: t for name, t in state.items() if name.startswith("vision_model.")}
    patches = "vision_model.embeddings.patch_embedding.weight"
    vit_state[patches] = vit_state[patches].unflatten(1, (side, side, -1)).permute(0, 3, 1, 2).contiguous()
    vit_state |= {"logit_scale": torch.ones(1), "text_model.head.bias": torch.ones(1)}
    text = {n.removeprefix("language_model."): t for n, t in state.items() if n.startswith("language_model.model.")}
    words = text["model.embed_tokens.weight"][: CONFIG["lm_base_vocab_size"]].clone()
    text["model.embed_tokens.weight"] = words
    llm = {**whole.llm_config, "vocab_size": CONFIG["lm_base_vocab_size"], "model_type": "llama"}
    for part, config, tensors in (("vit", {"vision_config": whole.vit_config}, vit_state), ("llm", llm, text)):
        parts[part].mkdir()
        (parts[part] / "config.json").write_text(json.dumps(config))
        save_file(tensors, parts[part] / "model.safetensors")
    folders = {part: str(path) for part, path in parts.items()}
    monkeypatch.setattr(logging.getLogger("unigen_ds"), "propagate", True)
    with caplog.at_level(logging.INFO, "unigen_ds"):
        new = VLM(pretrained=folders, **settings)
    assert (new.llm_config, new.vit_config) == (whole.llm_config, whole.vit_config)
    for name, tensor in new.state_dict().items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            assert torch.equal(tensor[: len(words)], words) and tensor[len(words) :].std() == pytest.approx(0.02, 0.1)
        elif not name.startswith("connector."):
            assert torch.equal(tensor, state[name]), name
    assert new.language_model.lm_head.weight is new.language_model.model.embed_tokens.weight
    for line in ("more rows than stored: language_model.model.embed_tokens.weight", "initialised: connector.proj",
                 "not used: logit_scale"):  # fmt: skip
        assert line in caplog.text
    with pytest.raises(CheckpointError, match=r"reshaped: .*embed_tokens"):
        VLM(pretrained=folders, **{**settings, "llm": {"vocab_size": CONFIG["lm_base_vocab_size"] - 1}})
    (parts["llm"] / "config.json").write_text(json.dumps({**llm, "rope_scaling": {"rope_type": "llama3"}}))
    with pytest.raises(ConfigError, match=r"llm/config\.json: rope_type is 'llama3'"):
        VLM(pretrained=folders, **settings)


def test_default_trio() -> None:
    """SigLIP2-base-patch16-512, factor 4, SmolLM2-360M: 512 x 512 pixels are 64 tokens, 768 numbers become 960."""
    with torch.device("meta"):
        model = VLM()
    assert model.connector.proj.weight.shape == (960, 768 * 4**2)
    assert model.connector(torch.empty(32 * 32, 768, device="meta")).shape == (64, 960)
    processor = VLMProcessor(Ids(), **VLM.processor_sizes({}))  # type: ignore[arg-type]
    assert processor.tokens_per_tile == 64
    vision = sum(p.numel() for p in model.vision_model.parameters())
    language = sum(p.numel() for p in model.language_model.parameters())
    assert (round(vision / 1e6), round(language / 1e6)) == (86, 362)
