"""Packed weights of frozen parts: memory, error, refused settings; training, saving and export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.golden_files import BAGEL
from tests.tiny import tiny_config
from unigen_ds.core.batch import PackedBatch
from unigen_ds.core.errors import CheckpointError, ConfigError, ResumeBlocked
from unigen_ds.core.progress import Geometry
from unigen_ds.data.order.order import Cursor
from unigen_ds.families.bagel.model import UnifiedModel
from unigen_ds.families.bagel.published import EXPORT, FILES, BagelDirectory
from unigen_ds.families.nanovlm.model import VLM
from unigen_ds.models.flops import linear_flops
from unigen_ds.models.quantized import QuantizedLinear, plain_state_dict
from unigen_ds.runner import Runner
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.runner.start.build import build_data, build_loader, build_model
from unigen_ds.system.files import DIGESTS

pytest.importorskip("bitsandbytes")
FREEZE = ["vae", "vit", "llm"]
SCHEMES = ("nf4", "int8")
WIDEST_GAP = {"nf4": 1.0 - 0.6961928, "int8": 1 / 127}
"""Between neighbouring levels, where the largest weight of a block (nf4) or row (int8) is 1."""


def linear(rows: int, columns: int, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(columns, rows, bias=bias).requires_grad_(False)


def nbytes(layer: nn.Module) -> int:
    return sum(t.nbytes for t in layer.state_dict().values())


# --- one layer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(64, 128), (31, 13), (48, 32), (5, 80), (1, 1)])
def test_no_weight_is_off_by_more_than_half_a_gap(scheme: str, shape: tuple[int, int]) -> None:
    plain = linear(*shape)
    plain.weight.data.view(-1)[:7] *= 100  # rows and blocks of different magnitudes
    weight, packed = plain.weight, QuantizedLinear(plain, scheme)
    if scheme == "int8":
        largest = weight.abs().amax(1, keepdim=True).expand(shape)
    else:
        blocks = weight.flatten().abs().split(64)
        largest = torch.cat([block.max().expand(len(block)) for block in blocks]).view(shape)
    error = (packed.weight - weight).abs()
    assert packed.weight.shape == shape and packed.weight.dtype == torch.float32
    assert bool((error <= largest * (WIDEST_GAP[scheme] / 2 + 1e-5)).all())
    assert error.max() > 0 or weight.numel() == 1


@pytest.mark.parametrize(("scheme", "share"), [("nf4", 1 / 7.1), ("int8", 1 / 4)])
def test_the_memory_of_a_layer(scheme: str, share: float) -> None:
    plain = linear(256, 512, bias=False)
    packed = QuantizedLinear(plain, scheme)
    assert nbytes(packed) / nbytes(plain) == pytest.approx(share, rel=0.01)
    assert linear_flops(packed, input_grad=True) == linear_flops(plain.requires_grad_(False), input_grad=True)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_result_and_the_gradient_are_those_of_the_unpacked_weight(scheme: str, dtype: torch.dtype) -> None:
    packed = QuantizedLinear(linear(24, 40), scheme).to(dtype)
    weight, bias = packed.weight.to(dtype), packed.bias
    x = torch.randn(6, 40).to(dtype)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    y, expected = packed(ours), nn.functional.linear(theirs, weight, bias)
    assert y.dtype == dtype
    tolerance = 1e-6 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(y, expected, atol=tolerance, rtol=tolerance)
    for output in (y, expected):
        output.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=10 * tolerance, rtol=tolerance)
    assert not list(filter(lambda t: t.requires_grad, (*packed.parameters(), *packed.buffers())))
    assert packed(x[:0]).shape == (0, 24)


def saved_bytes(layer: nn.Module, x: Tensor) -> int:
    """Bytes that autograd keeps for the backward pass, without parameters and buffers of the layer."""
    own = {t.untyped_storage().data_ptr() for t in (x, *layer.parameters(), *layer.buffers())}
    sizes: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        layer(x).sum()
    return sum(size for address, size in sizes.items() if address not in own)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_unpacked_weight_is_not_kept_between_the_passes(scheme: str) -> None:
    x = torch.randn(2, 512, requires_grad=True)
    packed = QuantizedLinear(linear(512, 512), scheme)
    assert saved_bytes(packed, x) == 0
    unpacking = nn.Module()
    unpacking.forward = lambda x: x @ packed.weight.T  # type: ignore[method-assign]
    assert saved_bytes(unpacking, x) == 4 * 512 * 512  # the test would detect it


# --- models -------------------------------------------------------------------------------------------------------


def unified_model(**arguments: Any) -> UnifiedModel:
    torch.manual_seed(0)
    return UnifiedModel(pretrained=str(BAGEL), **{"freeze": FREEZE, **arguments})


def vlm(**arguments: Any) -> VLM:
    torch.manual_seed(0)
    llm = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
           "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
    vit = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
           "image_size": 16, "patch_size": 4}  # fmt: skip
    return VLM(llm=llm, vit=vit, **{"freeze": ["llm", "vit"], **arguments})


@pytest.mark.parametrize("build", [unified_model, vlm])
def test_every_linear_layer_of_the_part_but_the_output_head(build: Any) -> None:
    plain, packed = build(), build(quantize={"llm": "nf4", "vit": "int8"})
    for part, scheme in (("llm", "nf4"), ("vit", "int8"), ("connector", None)):
        before, after = plain.parts()[part], packed.parts()[part]
        names = {name for name, layer in before.named_modules() if isinstance(layer, nn.Linear)} - {"lm_head"}
        schemes = {name: layer.scheme for name, layer in after.named_modules() if isinstance(layer, QuantizedLinear)}
        assert names and schemes == (dict.fromkeys(names, scheme) if scheme else {})
        assert linear_flops(after, input_grad=True) == linear_flops(before, input_grad=True)
        for name in schemes:  # initial or pretrained weights are packed
            error = after.get_submodule(name).weight - before.get_submodule(name).weight
            assert error.norm() <= 0.12 * before.get_submodule(name).weight.norm()


def test_a_tied_embedding_is_left_alone() -> None:
    model = vlm(quantize={"llm": "nf4"})
    assert model.language_model.lm_head.weight is model.language_model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"quantize": {"connector": "nf4"}}, "add 'connector' to model.freeze"),
        ({"quantize": {"llm": "nf3"}}, "Allowed: 'nf4', 'int8' or None"),
        ({"quantize": {"lm": "nf4"}}, "did you mean 'llm'"),
        ({"quantize": "nf4"}, "dict"),
    ],
)
@pytest.mark.parametrize("build", [unified_model, vlm])
def test_what_cannot_work_is_refused(build: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**arguments)


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # Python then reports the module as not installed
    with pytest.raises(ConfigError, match=r"unigen_ds\[quantize\]"):
        vlm(quantize={"llm": "nf4"})
    vlm()  # it is not needed without this setting


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_published_directory_gets_plain_weights(scheme: str, tmp_path: Path) -> None:
    packed = unified_model(quantize={"llm": scheme, "vit": scheme})
    out, options = tmp_path / "out", {"dtype": torch.float32, "max_shard_size": ""}
    BagelDirectory().write(packed, None, out, source=None, **options)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*FILES, EXPORT, DIGESTS}
    again = UnifiedModel(pretrained=str(tmp_path / "out"))
    expected = plain_state_dict(packed)
    assert again.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())
    assert any(name.endswith("q_proj.weight") for name in expected)


# --- runs ---------------------------------------------------------------------------------------------------------

QUANTIZE = {"llm": "nf4", "vit": "int8"}


def settings(folder: Path, data: Path, **overrides: Any) -> Settings:
    return Settings.from_config(config(folder, data, **overrides))


def config(folder: Path, data: Path, **overrides: Any) -> Any:
    base = {"model__freeze": FREEZE, "model__quantize": QUANTIZE, "param_scheduler": []}
    return tiny_config(folder, data, **{**base, **overrides})


def train(cfg: Any, updates: int) -> Runner:
    runner = Runner.from_cfg(cfg, max_updates=updates)
    runner.train()
    return runner


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> tuple[Runner, Path]:
    folder = tmp_path_factory.mktemp("straight")
    return train(config(folder, digits), 4), folder


def test_other_parts_move_and_packed_bytes_do_not(straight: tuple[Runner, Path], digits: Path) -> None:
    runner, folder = straight
    own = settings(folder, digits)
    train_data = build_data(own, geometry=Geometry(12), ruler=None)
    initial = build_model(own, train_data.processor, seed=own.seed).state_dict()
    state = runner.backend.model.state_dict()
    assert initial.keys() == state.keys()
    same = {name for name, tensor in initial.items() if torch.equal(tensor, state[name])}
    frozen = ("language_model.", "vit_model.")
    assert {name for name in initial if name.startswith(frozen) or name.endswith("pos_embed")} == same
    assert sum(name.endswith((".packed", ".scales")) for name in same) > 30
    loader = build_loader(own.train_dataloader, train_data, geometry=Geometry(12), dp_rank=0, cursor=Cursor())
    batch: PackedBatch = next(iter(loader))[0].batch
    with torch.no_grad():
        before, after = (
            sum(model(batch).sums.values())
            for model in (build_model(own, train_data.processor, seed=own.seed), runner.backend.model)
        )
    assert after < before, "the loss of the same samples with the same noise"


@pytest.mark.parametrize(
    ("quantize", "message"),
    [({"vit": "int8"}, r"layers.0.self_attn.q_proj.weight is new"), ({**QUANTIZE, "llm": "int8"}, "llm was nf4")],
)
def test_other_packing_is_refused(
    straight: tuple[Runner, Path], digits: Path, tmp_path: Path, quantize: dict[str, str], message: str
) -> None:
    _, folder = straight
    with pytest.raises(ResumeBlocked, match=message):
        train(config(folder, digits, model__quantize=quantize, resume=True), 6)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        train(config(tmp_path, digits, model__quantize=quantize, load_from=str(folder / "iter_4.pth")), 6)
