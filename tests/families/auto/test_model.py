"""Models of transformers by their own classes: loss and gradient are transformers' own on the same tokens."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.data.support import picture
from tests.families.tiny_transformers import write_images, write_language
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.data.batches.loader import pack_documents
from unigen_ds.data.records.records import Turn
from unigen_ds.data.samples.sample import Sample
from unigen_ds.data.text.tokenizers import ModelTokenizer
from unigen_ds.families.auto.family import AutoDirectory
from unigen_ds.families.auto.model import CausalLM, ImageTextToText
from unigen_ds.families.directories import published_format
from unigen_ds.runner.settings.tree import ModelSettings
from unigen_ds.runner.start.build import build_model, build_processor

LANGUAGE = ("qwen3", "mistral", "gemma2", "gemma3_text", "llama")
IMAGES = ("llava", "qwen2_5_vl", "smolvlm", "gemma3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for kind in LANGUAGE:
        write_language(root / kind, kind)
    for kind in IMAGES:
        write_images(root / kind, kind)
    for number, size in enumerate(((20, 14), (40, 24), (16, 16))):
        picture(root / f"{number}.png", *size, seed=number)
    return root


def open_kind(folder: Path, kind: str, **model: Any) -> tuple[Any, Any]:
    config = AutoDirectory(ImageTextToText if kind in IMAGES else CausalLM).config(folder / kind)
    settings = ModelSettings.of({**config, "model": {**config["model"], **model}})
    processor = build_processor(settings, seed=0)
    return build_model(settings, processor, seed=0), processor


def talks(folder: Path, kind: str) -> list[list[Turn]]:
    """Three conversations, one of two questions; with pictures of other sizes and in other positions."""
    words = [
        [("user", "what colour is it"), ("assistant", "red"), ("user", "is it a"), ("assistant", "blue")],
        [("user", "is it red"), ("assistant", "it is blue")],
        [("user", "what"), ("assistant", "green")],
    ]
    turns = [[Turn(role, "text", text) for role, text in talk] for talk in words]  # type: ignore[arg-type]
    if kind in IMAGES:
        turns[0][2:2] = [Turn("user", "image", str(folder / "1.png"))]
        turns[0][:0] = [Turn("user", "image", str(folder / "0.png"))]
        turns[1][1:1] = [Turn("user", "image", str(folder / "2.png"))]
    return turns


def batch_of(samples: Sequence[Sample], processor: Any) -> Any:
    return pack_documents([[split.load(processor, None) for split in s.splits] for s in samples], processor)


def tokens(sample: Sample) -> tuple[list[int], list[int]]:
    splits: Any = sample.splits
    return [i for s in splits for i in s.ids], [i for s in splits for i in s.labels]


def theirs(folder: Path, kind: str) -> Any:
    auto: Any = AutoModelForImageTextToText if kind in IMAGES else AutoModelForCausalLM
    return auto.from_pretrained(folder / kind, dtype=torch.float32).eval()


def call(model: Any, processor: Any, turns: Sequence[Turn], ids: list[int]) -> torch.Tensor:
    """transformers' logits of one conversation, from transformers' own processor where there are images."""
    images = [processor.read_image(turn.value).convert("RGB") for turn in turns if turn.kind == "image"]
    if processor.pictures is None:
        return model(input_ids=torch.tensor([ids])).logits[0]
    their = processor.pictures.processor
    messages: list[dict[str, Any]] = []
    for turn in turns:
        part = {"type": "image"} if turn.kind == "image" else {"type": "text", "text": turn.value}
        if not messages or messages[-1]["role"] != turn.role:
            messages.append({"role": turn.role, "content": []})
        messages[-1]["content"].append(part)
    text = processor.tokenizer.chat.apply_chat_template(messages, tokenize=False)
    image_lists = [images] if processor.pictures.by_sample or "Gemma" in type(their).__name__ else images
    inputs = their(text=[text], images=image_lists if images else None, return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == ids
    return model(**inputs).logits[0]


@pytest.mark.parametrize("kind", [*LANGUAGE, *IMAGES])
def test_loss_and_gradient_are_transformers_own(folder: Path, kind: str) -> None:
    """Of each conversation alone in transformers, of all in one batch here; packed where the model can, and in rows."""
    model, processor = open_kind(folder, kind)
    model.eval()  # no model has dropout in evaluation; gradients are the same
    turns = talks(folder, kind)
    samples = [processor.plan(each) for each in turns]
    batch = batch_of(samples, processor)
    their = theirs(folder, kind)
    parts = []
    for talk, sample in zip(turns, samples, strict=True):
        ids, labels = tokens(sample)
        logits = call(their, processor, talk, ids)
        parts.append(F.cross_entropy(logits.float(), torch.tensor(labels), ignore_index=-100, reduction="sum"))
    expected = torch.stack(parts).sum()
    expected.backward()
    gradients = {name: p.grad for name, p in their.named_parameters()}
    assert batch.target_counts()["text"] == sum(label >= 0 for s in samples for label in tokens(s)[1])
    for packing in (None, False):
        model.packing = packing
        model.zero_grad()
        loss = (terms := model(batch)).sums["text"]
        assert any(one is loss for one in torch.utils._pytree.tree_leaves(terms)), "where FSDP of an older torch looks"
        assert model.packing is (packing is None and kind != "gemma3")  # images that see themselves
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        loss.backward()
        for name, parameter in model.named_parameters():
            grad, other = parameter.grad, gradients[name]
            if grad is None or other is None:
                assert (grad is None or not grad.any()) and (other is None or not other.any()), name
            else:
                torch.testing.assert_close(grad, other, rtol=1e-3, atol=1e-4 * float(other.abs().max() + 1), msg=name)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "llava"])
def test_operations_are_those_of_torchs_counter(folder: Path, tmp_path: Path, kind: str) -> None:
    """Within 3 %, of one document; with images 20 %: what is between the tower and the text counts as the tower."""
    root: Path = folder
    if kind == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        root = write_language(tmp_path / kind, kind, **experts).parent
    model, processor = open_kind(root, kind)
    model.transformers_model.set_experts_implementation("eager")  # the counter does not know grouped products
    words = "is it red or blue " * 5
    turns = [Turn("user", "text", words), Turn("assistant", "text", words)]
    if kind in IMAGES:
        turns.insert(0, Turn("user", "image", str(folder / "1.png")))
    batch = batch_of([processor.plan(turns)], processor)
    model(batch)  # the check of packing
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model.train()(batch).sums["text"].backward()
    tolerance = 0.2 if kind in IMAGES else 0.03
    assert model.flops(batch) == pytest.approx(counter.get_total_flops(), rel=tolerance)


def test_a_model_that_cannot_keep_documents_apart_gets_rows(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by what it computes: here its attention ignores where documents begin."""
    monkeypatch.setattr(logging.getLogger("unigen_ds"), "propagate", True)
    model, processor = open_kind(folder, "llama", attention="sdpa")
    batch = batch_of([processor.plan(each) for each in talks(folder, "llama")], processor)
    expected = model(batch).sums["text"]
    assert model.packing
    model.packing = None
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)
    with caplog.at_level(logging.INFO, logger="unigen_ds"):
        loss = model(batch).sums["text"]
    assert not model.packing and "a document changes the one after it" in caplog.text
    torch.testing.assert_close(loss, expected)


def test_text_alone_trains_the_vision_tower_by_nothing(folder: Path) -> None:
    """A micro-batch without an image still runs the tower: its gradients are zeros, and no token of it counts."""
    model, processor = open_kind(folder, "llava")
    sample = processor.plan([Turn("user", "text", "what"), Turn("assistant", "text", "red")])
    batch = batch_of([sample], processor)
    assert batch.num_tokens == sample.num_tokens < batch.position_ids.numel() and batch.num_images == 0
    loss = model(batch).sums["text"]
    ids, labels = tokens(sample)
    logits = theirs(folder, "llava")(input_ids=torch.tensor([ids])).logits[0]
    torch.testing.assert_close(loss, F.cross_entropy(logits, torch.tensor(labels), reduction="sum"))
    loss.backward()
    projector = model.model.multi_modal_projector.linear_1.weight.grad
    assert projector is not None and not projector.any()


def test_older_names_are_renamed_as_transformers_does(folder: Path, tmp_path: Path) -> None:
    """LLaVA's published files have the names of an earlier version; a model without memory is filled from them."""
    tensors = load_file(folder / "llava" / "model.safetensors")
    assert any(name.startswith("language_model.model.") for name in tensors)
    model, _ = open_kind(folder, "llava")
    for name, tensor in theirs(folder, "llava").state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_experts_that_are_stored_one_by_one(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    """A rule that computes: transformers loads the whole model."""
    monkeypatch.setattr(logging.getLogger("unigen_ds"), "propagate", True)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    write_language(tmp_path / "moe", "qwen3_moe", **experts)
    with caplog.at_level(logging.INFO, logger="unigen_ds"):
        model, processor = open_kind(tmp_path, "moe")
    assert "transformers joins stored tensors" in caplog.text
    batch = batch_of([processor.plan(each) for each in talks(tmp_path, "moe")], processor)
    their = theirs(tmp_path, "moe")
    for name, tensor in their.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    parts = [their(input_ids=row[None]).logits[0] for row in batch.text_ids.split(batch.document_lengths)]
    torch.testing.assert_close(model.eval().logits(batch), torch.cat(parts), rtol=1e-4, atol=1e-4)


def test_rotary_frequencies_are_never_rounded(folder: Path) -> None:
    with torch.device("meta"):
        model = CausalLM(pretrained=str(folder / "llama"))
    assert all(p.is_meta for p in model.parameters()) and not any(b.is_meta for b in model.buffers())
    exact = model.model.rotary_emb.inv_freq.clone()
    assert torch.equal(model.bfloat16().model.rotary_emb.inv_freq, exact)
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_freezing_by_patterns(folder: Path) -> None:
    model, _ = open_kind(folder, "llava", freeze=["vision_tower", r"layers\.0\."])
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert "lm_head.weight" in names and not any("vision_tower" in name or ".layers.0." in name for name in names)
    assert any(".layers.1." in name for name in names)
    for patterns, match in (
        (["vit"], "matches no parameter"),
        (["("], "regular expression"),
        (["."], "leaves nothing"),
    ):
        with pytest.raises(ConfigError, match=match):
            CausalLM(pretrained=str(folder / "llama"), freeze=patterns)


def test_activation_checkpointing_changes_nothing(folder: Path) -> None:
    gradients = []
    for on in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # of a name that transformers has changed
            model, processor = open_kind(folder, "smolvlm", activation_checkpointing=on)
        batch = batch_of([processor.plan(each) for each in talks(folder, "smolvlm")], processor)
        model.train()(batch).sums["text"].backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_larger_vocabulary_must_be_asked_for(folder: Path) -> None:
    model, _ = open_kind(folder, "qwen3", config={"vocab_size": 100})
    weight = load_file(folder / "qwen3" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.lm_head.weight[:96], weight) and model.lm_head.weight[96:].abs().min() > 0
    again, _ = open_kind(folder, "qwen3", config={"vocab_size": 100})
    assert torch.equal(model.lm_head.weight, again.lm_head.weight)
    with pytest.raises(CheckpointError, match=r"does not fit the model: reshaped"):
        open_kind(folder, "qwen3", config={"vocab_size": 90})


def test_what_cannot_work_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither pretrained nor"):
        CausalLM()
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        CausalLM(pretrained=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"'llava' is no model of transformers' AutoModelForCausalLM"):
        CausalLM(pretrained=str(folder / "llava"))
    with pytest.raises(ConfigError, match="model_type is 'nothing'"):
        CausalLM(config={"model_type": "nothing"})
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_bytes((folder / "llama" / "config.json").read_bytes())
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors \(it holds pytorch_model\.bin\)"):
        CausalLM(pretrained=str(tmp_path / "pickled"))
    values = json.loads((folder / "llama" / "config.json").read_text())
    classes = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Mine"}
    own = {**values, "model_type": "mine", "auto_map": classes}
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(json.dumps(own))
    (tmp_path / "own" / "mine.py").write_text("raise AssertionError('executed')")
    save_file({"a": torch.zeros(1)}, tmp_path / "own" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.pretrained"):
        CausalLM(pretrained=str(tmp_path / "own"))


def test_which_format_a_folder_has(folder: Path, tmp_path: Path) -> None:
    """Llama and Qwen2 are a ``DecoderLM``'s, as ever."""
    for kind in (*LANGUAGE, *IMAGES):
        layout: Any = published_format(folder / kind)
        expected = "ImageTextToText" if kind in IMAGES else "DecoderLM" if kind == "llama" else "CausalLM"
        assert layout.config(folder / kind)["model"]["type"] == expected
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"]}))
    assert published_format(tmp_path) is None


def test_a_name_on_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only configs, tokenizer and safetensors are downloaded: neither code nor other weights. Offline it is refused."""
    requests: dict[str, list[str]] = {}

    def snapshot_download(name: str, *, allow_patterns: list[str], **_: object) -> str:
        requests[name] = allow_patterns
        if name != "someone/qwen3":
            raise OSError("offline")
        return str(folder / "qwen3")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    model = CausalLM(pretrained="someone/qwen3")
    assert torch.equal(model.lm_head.weight, theirs(folder, "qwen3").lm_head.weight)
    assert ModelTokenizer(path="someone/qwen3").eos_id == 3
    patterns = {pattern.rpartition(".")[2] for each in requests.values() for pattern in each}
    assert patterns <= {"json", "jinja", "txt", "model", "safetensors"}
    with pytest.raises(ConfigError, match=r"cannot be loaded from the hub: offline.*hf download someone/other"):
        CausalLM(pretrained="someone/other")
