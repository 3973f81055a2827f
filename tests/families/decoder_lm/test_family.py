"""``DecoderLM`` compared with transformers' own models: logits, packing, loading and saving; the recipes' sizes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.data.support import ByteTokenizer
from unigen_ds.backends.single import SingleBackend
from unigen_ds.config.registry import MODELS, build
from unigen_ds.core.batch import PackedBatch
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.progress import Geometry
from unigen_ds.data.batches.loader import pack_documents
from unigen_ds.data.samples.splits import TextSplit
from unigen_ds.families.auto.loading import auto_config
from unigen_ds.families.bagel.processor import UnifiedProcessor
from unigen_ds.families.decoder_lm.family import DecoderLM
from unigen_ds.optim.optimizer import OptimizerConfig, ParamGroup
from unigen_ds.runner.settings.tree import load_config

SIZES: dict[str, Any] = dict(
    vocab_size=261, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": dict(model_type="llama", tie_word_embeddings=True, head_dim=8, **SIZES),
    "qwen2": dict(model_type="qwen2", **SIZES),
}
LENGTHS = (9, 30, 5, 8, 8, 31)


@pytest.fixture(scope="module", params=KINDS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as transformers writes it, in several files; the head of the tied one is not stored."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(auto_config(None, {**KINDS[request.param], "initializer_range": 0.3}))
    folder = tmp_path_factory.mktemp(request.param) / "model"
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def batch_of(lengths: Sequence[int], *, seed: int = 0) -> PackedBatch:
    """Documents of these numbers of bytes, which are targets, between begin and end."""
    ids = [
        torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(seed + i)) for i, n in enumerate(lengths)
    ]
    documents = [[TextSplit(tuple(some.tolist()), loss=True)] for some in ids]
    return pack_documents(documents, UnifiedProcessor(ByteTokenizer()))


def test_logits_are_those_of_transformers(directory: Path) -> None:
    model = DecoderLM(pretrained=str(directory)).eval()
    theirs = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa").eval()
    batch = batch_of([40])
    with torch.no_grad():
        expected = theirs(input_ids=batch.text_ids[None]).logits[0]
        assert (model.logits(batch) - expected).abs().max() <= 1e-6 * expected.abs().max()
        torch.testing.assert_close(model.next_token_logits(batch)[0], model.logits(batch)[-1])


def test_packed_is_as_alone(directory: Path) -> None:
    """Logits, loss and gradients; a token of another sample changes no bit."""
    model = DecoderLM(pretrained=str(directory))
    packed, alone = batch_of(LENGTHS), [batch_of([n], seed=i) for i, n in enumerate(LENGTHS)]
    logits = model.logits(packed)
    torch.testing.assert_close(logits, torch.cat([model.logits(each) for each in alone]), rtol=1e-5, atol=1e-5)
    loss = model(packed).sums["text"]
    torch.testing.assert_close(loss, torch.stack([model(each).sums["text"] for each in alone]).sum())
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    model.zero_grad()
    torch.stack([model(each).sums["text"] for each in alone]).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], rtol=1e-4, atol=1e-4, msg=name)
    packed.text_ids[1] += 1
    assert torch.equal(model.logits(packed)[LENGTHS[0] + 2 :], logits[LENGTHS[0] + 2 :])


def test_dropout_is_configurable_and_keeps_samples_apart() -> None:
    batch = batch_of(LENGTHS)
    for key in ("attention_dropout", "dropout"):
        llm = {**KINDS["llama"], **({key: 0.5} if key == "attention_dropout" else {})}
        model = DecoderLM(llm=llm, dropout=0.5 if key == "dropout" else 0.0)
        outcomes = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            outcomes.append(model.logits(batch))
        assert torch.equal(outcomes[0], outcomes[1]) and not torch.equal(outcomes[0], outcomes[2]), key
        torch.manual_seed(1)
        other = batch_of(LENGTHS)
        other.text_ids[1] += 1
        rest = slice(LENGTHS[0] + 2, None)
        assert torch.equal(model.logits(other)[rest], outcomes[0][rest]), key
        assert torch.equal(model.eval().logits(batch), model.logits(batch))
    with_scores = DecoderLM(llm={**KINDS["llama"], "attention_dropout": 1e-9})
    plain = DecoderLM(llm=KINDS["llama"])
    plain.load_state_dict(with_scores.state_dict())
    torch.testing.assert_close(with_scores.logits(batch), plain.logits(batch))


def fill(model: DecoderLM, *, seed: int = 0) -> DecoderLM:
    """A model on the meta device, filled as by the runner."""
    names = tuple(name for name, _ in model.named_parameters())
    reader, backend = model.initial_weights(seed=seed), SingleBackend()
    cfg = OptimizerConfig(type="AdamW", arguments={}, max_norm=None, precision="fp32")
    backend.check(geometry=Geometry(1, 1, 1), optimizer_cfg=cfg)
    backend.prepare(model, [ParamGroup("all", 1e-3, 0.0, names)])
    backend.load_tensors(reader, weights_only=True)
    return model


def test_read_into_a_model_without_memory(directory: Path) -> None:
    with torch.device("meta"):
        model = DecoderLM(pretrained=str(directory))
    assert all(p.is_meta for p in model.parameters())
    whole = DecoderLM(pretrained=str(directory))
    for (name, a), b in zip(fill(model).state_dict().items(), whole.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert (
        model.lm_head.weight is model.model.embed_tokens.weight
    ) == whole.transformers_model.config.tie_word_embeddings
    assert torch.equal(model.logits(batch_of([9, 7])), whole.logits(batch_of([9, 7])))


def test_initial_values() -> None:
    with torch.device("meta"):
        models = [DecoderLM(llm={**KINDS["qwen2"], "initializer_range": 0.1}) for _ in range(3)]
    states = [fill(model, seed=seed).state_dict() for model, seed in zip(models, (1, 1, 2), strict=True)]
    embedding = "model.embed_tokens.weight"
    assert torch.equal(states[0][embedding], states[1][embedding])
    assert not torch.equal(states[0][embedding], states[2][embedding])
    assert states[0][embedding].std() == pytest.approx(0.1, rel=0.05)
    assert (states[0]["model.norm.weight"] == 1).all()
    assert not states[0]["model.layers.0.self_attn.q_proj.bias"].any()


def test_what_cannot_work_is_refused(directory: Path) -> None:
    other = {"llama": "qwen2", "qwen2": "llama"}[json.loads((directory / "config.json").read_text())["model_type"]]
    for arguments, match in (
        ({"pretrained": str(directory), "llm": {"model_type": other}}, "the files have"),
        ({"llm": {**KINDS["llama"], "model_type": "mistral"}}, "model_type is 'mistral'"),
        ({"llm": {**KINDS["llama"], "num_layers": 3}}, "did you mean 'num_hidden_layers'"),
        ({"llm": {**KINDS["llama"], "hidden_size": "wide"}}, "hidden_size"),
        ({"llm": {**KINDS["llama"], "num_key_value_heads": 3}}, "multiple"),
        (
            {"llm": {**KINDS["llama"], "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}},
            "rope_type is 'dynamic'",
        ),
        ({"llm": KINDS["llama"], "freeze": ["vit"]}, r"freeze is \['vit'\]"),
    ):
        with pytest.raises(ConfigError, match=match):
            DecoderLM(**arguments)


@pytest.mark.parametrize(("name", "millions"), [("decoder_lm_90m", 90), ("decoder_lm_300m", 300)])
def test_the_recipes_have_the_size_of_their_name(name: str, millions: int) -> None:
    with torch.device("meta"):
        model = build(MODELS, load_config(name)["model"], where="model")
    numel = sum(p.numel() for p in model.parameters())
    assert abs(numel / 1e6 / millions - 1) < 0.03
    page = (Path(__file__).parents[3] / "docs" / "configs" / "model.md").read_text(encoding="utf-8")
    assert f"`{name}`" in page and f"{numel:,}" in page


def test_sizes_of_a_recipe_are_keys() -> None:
    changes = {
        "model.llm.max_position_embeddings": 32, "model.llm.num_hidden_layers": 3, "model.llm.hidden_size": 40,
        "model.llm.attention_dropout": 0.25, "model.dropout": 0.5, "train_dataloader.seq_length": 32,
    }  # fmt: skip
    config = load_config("decoder_lm_90m", changes)
    with torch.device("meta"):
        model = build(MODELS, config["model"], where="model")
    assert len(model.model.layers) == 3 == len(model.shard_units())
    assert model.model.layers[0].self_attn.o_proj.weight.shape == (40, 40)
    assert model.transformers_model.config.max_position_embeddings == config["train_dataloader"]["seq_length"] == 32
    assert model.model.layers[0].self_attn.attention_dropout == 0.25
