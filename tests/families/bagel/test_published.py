"""The published directory in and out, and starting from a language model, a vision tower and an autoencoder."""

from __future__ import annotations

import json
import logging
import math
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import SiglipConfig, SiglipModel, SiglipVisionConfig, SiglipVisionModel

from tests.support.golden_files import BAGEL, BAGEL_META, BAGEL_VAE, atol
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.families.bagel.model import UnifiedModel
from unigen_ds.families.bagel.published import EXPORT, FILES, BagelDirectory, read_pretrained
from unigen_ds.families.nanovlm import published as nanovlm
from unigen_ds.models.layers import sincos_2d
from unigen_ds.models.weights import stored_tensors
from unigen_ds.system.files import DIGESTS

CONFIGS, WEIGHTS = FILES[:2], FILES[2:]


def write(model: UnifiedModel, out: Path, *, source: Path | None = None, dtype: torch.dtype = torch.float32) -> None:
    BagelDirectory().write(model, None, out, source=source, dtype=dtype, max_shard_size="")


@pytest.fixture(scope="module")
def model() -> UnifiedModel:
    return UnifiedModel(pretrained=str(BAGEL))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "published").mkdir()
    for name in FILES:
        shutil.copyfile(BAGEL / name, tmp_path / "published" / name)
    (tmp_path / "published" / "tokenizer.json").write_text("{}")
    return tmp_path / "published"


def test_every_size_is_read_from_the_files(model: UnifiedModel) -> None:
    vae, other = BAGEL_META["vae_params"], BAGEL_META["bagel_config"]
    assert model.sizes["vae"] == {
        "type": "FluxAutoencoder",
        "base_channels": vae["ch"],
        "channel_multipliers": vae["ch_mult"],
        "num_blocks": vae["num_res_blocks"],
        "latent_channels": vae["z_channels"],
        "channels": vae["in_channels"],
    }
    for key in ("latent_patch_size", "max_latent_size"):
        assert model.sizes[key] == other[key]
    assert model.sizes["vit_max_patches_per_side"] == other["vit_max_num_patch_per_side"]
    sizes = UnifiedModel.processor_sizes({"pretrained": str(BAGEL)})
    assert sizes["vit_max_patches_per_side"] == other["vit_max_num_patch_per_side"]
    assert (sizes["vae_spatial_downsample"], sizes["latent_patch_size"]) == (
        vae["downsample"],
        other["latent_patch_size"],
    )


def test_scale_and_shift_are_set_in_addition_to_the_directory() -> None:
    """No published file contains them: ``model.vae`` overrides FLUX's values; all sizes are read from the files."""
    golden = load_file(BAGEL / "vae.safetensors")
    options = {"pretrained": str(BAGEL), "vae": BAGEL_VAE}
    model = UnifiedModel(**options)  # type: ignore[arg-type]
    with torch.no_grad():
        latents = model.vae.encode(golden["image"], golden["noise"])
        torch.testing.assert_close(latents, golden["latent_sampled"], atol=atol("bagel/vae.latent_sampled"), rtol=0)
        scale, shift = 2 * BAGEL_VAE["scale_factor"], BAGEL_VAE["shift_factor"] - 1
        other = UnifiedModel(pretrained=str(BAGEL), vae={"scale_factor": scale, "shift_factor": shift})
        expected = 2 * latents + scale
        torch.testing.assert_close(other.vae.encode(golden["image"], golden["noise"]), expected)
    assert UnifiedModel.processor_sizes(options) == UnifiedModel.processor_sizes({"pretrained": str(BAGEL)})


def test_round_trip_is_bit_equal(model: UnifiedModel, directory: Path, tmp_path: Path) -> None:
    write(model, tmp_path / "out", source=directory)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {*FILES, "tokenizer.json", EXPORT, DIGESTS}, "values that no public file has are in a separate file"
    for path in (path for path in (tmp_path / "out").iterdir() if path.name not in (EXPORT, DIGESTS)):
        assert path.read_bytes() == (directory / path.name).read_bytes(), path.name


def test_configs_are_written_where_there_is_no_source(model: UnifiedModel, tmp_path: Path) -> None:
    write(model, tmp_path / "out", dtype=torch.bfloat16)
    for name in CONFIGS:
        export, read = (json.loads((folder / name).read_text()) for folder in (tmp_path / "out", BAGEL))
        assert {key: read[key] for key in export} == export
    again = UnifiedModel(pretrained=str(tmp_path / "out"))
    assert again.sizes == model.sizes
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.bfloat16().float())
    with pytest.raises(ConfigError, match="exists"):
        write(model, tmp_path / "out")


def test_the_table_of_vit_positions_may_be_smaller_than_the_tower_has_learned(directory: Path) -> None:
    """BAGEL's file contains the side of the table in addition to the vision tower's ``image_size``."""
    tensors, name = load_file(directory / FILES[2]), "vit_pos_embed.pos_embed"
    side = math.isqrt(len(tensors[name])) - 1
    tensors[name] = sincos_2d(side, tensors[name].shape[1])
    save_file(tensors, directory / FILES[2])
    model = UnifiedModel(pretrained=str(directory))
    assert torch.equal(model.vit_pos_embed.pos_embed, tensors[name])
    options = {"pretrained": str(directory)}
    assert UnifiedModel.processor_sizes(options)["vit_max_patches_per_side"] == side
    with pytest.raises(ConfigError, match=f"vit_max_patches_per_side is {side + 2}. Allowed: at most {side + 1}"):
        UnifiedModel(**options, vit_max_patches_per_side=side + 2)  # type: ignore[arg-type]


def test_nothing_that_does_not_fit_is_silent(directory: Path) -> None:
    weights = load_file(directory / FILES[2])
    del weights["llm2vae.bias"]
    weights["other.weight"] = torch.zeros(1)
    weights["vae2llm.bias"] = weights["vae2llm.bias"][1:]
    save_file(weights, directory / FILES[2])
    with pytest.raises(CheckpointError) as error:
        UnifiedModel(pretrained=str(directory))
    width = len(weights["vae2llm.bias"])
    shape_error = f"reshaped: vae2llm.bias ({width},) for ({width + 1},)"
    for text in ("missing: llm2vae.bias", "unexpected: other.weight", shape_error):
        assert text in str(error.value)


@pytest.fixture
def parts(tmp_path: Path) -> dict[str, str]:
    """The golden weights as three directories: a plain Qwen2 with a tied head, a whole SigLIP, an autoencoder."""
    weights = load_file(BAGEL / FILES[2])
    llm, vit = tmp_path / "llm", tmp_path / "vit"
    for folder, name in ((llm, CONFIGS[0]), (vit, CONFIGS[1])):
        folder.mkdir()
        shutil.copyfile(BAGEL / name, folder / "config.json")
    plain = {
        name.removeprefix("language_model."): tensor
        for name, tensor in weights.items()
        if name.startswith("language_model.model.") and "_moe_gen" not in name and "_norm." not in name
    }
    save_file(plain, llm / "model.safetensors")
    tower = {n.removeprefix("vit_model."): t for n, t in weights.items() if n.startswith("vit_model.")}
    name = "vision_model.embeddings.patch_embedding.weight"
    side = json.loads((vit / "config.json").read_text())["patch_size"]
    tower[name] = tower[name].unflatten(1, (side, side, -1)).permute(0, 3, 1, 2).contiguous()
    tower |= {"vision_model.head.probe": torch.zeros(1), "text_model.embeddings.weight": torch.zeros(1)}
    save_file(tower, vit / "model.safetensors")
    return {"llm": str(llm), "vit": str(vit), "vae": str(BAGEL / FILES[3])}


@pytest.mark.parametrize("copy_init_moe", [False, True])
def test_from_a_language_model_a_vision_tower_and_an_autoencoder(
    parts: dict[str, str],
    model: UnifiedModel,
    copy_init_moe: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("unigen_ds"), "propagate", True)
    with caplog.at_level(logging.INFO, "unigen_ds"):
        sizes = {key: model.sizes[key] for key in ("latent_patch_size", "max_latent_size", "vit_max_patches_per_side")}
        new = UnifiedModel(pretrained=parts, copy_init_moe=copy_init_moe, **sizes)
    state, expected = new.state_dict(), model.state_dict()
    for name, tensor in expected.items():
        if name.startswith(("vit_model.", "vae.")):
            assert torch.equal(state[name], tensor), name
    und = "language_model.model.layers.0.mlp.up_proj.weight"
    assert torch.equal(state[und], expected[und])
    assert torch.equal(state["language_model.lm_head.weight"], expected["language_model.model.embed_tokens.weight"])
    assert torch.equal(state[und.replace("mlp", "mlp_moe_gen")], state[und]) == copy_init_moe
    assert torch.equal(state["language_model.model.norm_moe_gen.weight"], expected["language_model.model.norm.weight"]
                       ) == copy_init_moe  # fmt: skip
    assert "not used: " in caplog.text and "vision_model.head.probe" in caplog.text
    assert ("copied from und: " in caplog.text) == copy_init_moe and "initialised: " in caplog.text


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        (CONFIGS[0], {"hidden_act": "gelu"}, r"llm_config\.json: hidden_act is 'gelu'"),
        (CONFIGS[0], {"use_sliding_window": True}, "use_sliding_window is True"),
        (CONFIGS[0], {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
        (CONFIGS[0], {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}}, "rope_type is 'llama3'"),
        (CONFIGS[1], {"hidden_act": "gelu"}, r"vit_config\.json: hidden_act is 'gelu'"),
    ],
)
def test_a_config_that_means_other_numbers_is_refused(
    directory: Path, file: str, values: dict[str, object], message: str
) -> None:
    config = json.loads((directory / file).read_text())
    (directory / file).write_text(json.dumps(config | values))
    with pytest.raises(ConfigError, match=message):
        UnifiedModel(pretrained=str(directory))


def test_another_layer_of_the_vision_tower_is_read(tmp_path: Path, model: UnifiedModel) -> None:
    """-2 as BAGEL: two layers of the three that its config counts. -3: one, whose output is what the second reads."""
    shallow = UnifiedModel(pretrained=str(BAGEL), vit_select_layer=-3)
    layers, own = model.vit_model.vision_model.encoder.layers, shallow.vit_model.vision_model.encoder.layers
    assert (len(layers), len(own)) == (2, 1) and model.vit_select_layer == -2
    for name, tensor in own.state_dict().items():
        assert torch.equal(tensor, layers.state_dict()[name]), name
    assert "vit_select_layer" not in model.arguments() and shallow.arguments()["vit_select_layer"] == -3
    write(shallow, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "vit_config.json").read_text())["num_hidden_layers"] == 3
    again = UnifiedModel(pretrained=str(tmp_path / "out"))
    assert again.vit_select_layer == -3 and len(again.vit_model.vision_model.encoder.layers) == 1
    rebuilt = UnifiedModel(**shallow.arguments())
    assert rebuilt.vit_select_layer == -3 and len(rebuilt.vit_model.vision_model.encoder.layers) == 1


def test_files_larger_than_memory_are_mapped_when_they_are_read(tmp_path):
    """Shapes are of the header: a plan needs no more."""
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2**20, 2**20], "data_offsets": [0, 2**41]}}).encode()
    with (tmp_path / "large.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + 2**41)  # a hole: it needs nothing on the disk
    tensors = stored_tensors(tmp_path / "large.safetensors")
    assert tensors["w"].shape == (2**20, 2**20)


def test_a_vision_tower_is_read_as_it_is_saved_alone_and_as_a_part(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = SiglipVisionConfig(**sizes, image_size=8, patch_size=4)
    both = SiglipModel(SiglipConfig(
        vision_config=vision.to_dict(), text_config={**sizes, "vocab_size": 8, "max_position_embeddings": 4}
    ))  # fmt: skip
    both.save_pretrained(tmp_path / "both")
    SiglipVisionModel(vision).save_pretrained(tmp_path / "alone")
    for read in (read_pretrained, nanovlm.read_published):
        states = [read({"vit": str(tmp_path / name)}) for name in ("both", "alone")]
        names = [{name for name in each.tensors if "vision_model." in name} for each in states]
        assert names[0] == names[1] and len(names[0]) > 30
