"""The unified model compared with numbers from the public BAGEL code (``tests/golden/README.md``), in fp32.

Starts from the saved VAE latents; every size and id is read from the files of ``UNIGEN_GOLDEN``.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from tests.support.golden_files import BAGEL, BAGEL_VAE, GOLDEN, read_json
from unigen_ds.core.batch import CAUSAL, FULL, NOISE, PackedBatch
from unigen_ds.families.bagel.model import UnifiedModel
from unigen_ds.models import flow
from unigen_ds.models.vae import encode_by_size

MODES = {"causal": CAUSAL, "full": FULL, "noise": NOISE}


def _json(name: str):
    return read_json(BAGEL / name)


@pytest.fixture(scope="module")
def tolerance() -> dict[str, float]:
    values = read_json(GOLDEN / "tolerance.json")
    return {k.removeprefix("bagel/"): v.get("suggested_atol", 0) for k, v in values.items() if k.startswith("bagel/")}


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(BAGEL / "train.safetensors")


@pytest.fixture(scope="module")
def model() -> UnifiedModel:
    meta, llm, vit = _json("golden.json"), _json("llm_config.json"), _json("vit_config.json")
    sizes = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "rms_norm_eps", "rope_theta",
    )  # fmt: skip
    vit_sizes = (
        "hidden_size", "intermediate_size", "num_attention_heads", "image_size", "patch_size", "num_channels",
        "layer_norm_eps",
    )  # fmt: skip
    model = UnifiedModel(
        llm={key: llm[key] for key in sizes},
        vit={key: vit[key] for key in vit_sizes}
        | {"num_hidden_layers": vit["num_hidden_layers"] + meta["vit_select_layer"] + 1},
        vae={"type": "PixelAutoencoder", "channels": meta["vae_params"]["z_channels"]},
        latent_patch_size=meta["bagel_config"]["latent_patch_size"],
        max_latent_size=meta["bagel_config"]["max_latent_size"],
        timestep_shift=meta["bagel_config"]["timestep_shift"],
    )
    tables = {
        name: model.get_parameter(name).clone() for name in ("latent_pos_embed.pos_embed", "vit_pos_embed.pos_embed")
    }
    weights = load_file(BAGEL / "ema.safetensors")
    for name, table in tables.items():
        torch.testing.assert_close(table, weights[name], atol=1e-6, rtol=0)
    model.load_state_dict(weights, strict=True)
    return model


@pytest.fixture(scope="module")
def batch(golden) -> PackedBatch:
    plan = _json("train.json")
    splits = torch.tensor(plan["split_lens"])
    documents = torch.tensor(plan["sample_lens"])
    timesteps = golden["packed_timesteps"]
    patch = _json("golden.json")["bagel_config"]["latent_patch_size"]
    stride = patch * _json("golden.json")["vae_params"]["downsample"]
    shapes = tuple((h // stride, w // stride) for _, h, w in plan["vae_image_shapes"])
    return PackedBatch(
        document_ids=torch.arange(len(documents)).repeat_interleave(documents),
        document_lengths=tuple(plan["sample_lens"]),
        split_ids=torch.arange(len(splits)).repeat_interleave(splits),
        split_modes=torch.tensor([MODES[mode] for mode in plan["attn_modes"]]),
        position_ids=golden["packed_position_ids"],
        text_ids=golden["packed_text_ids"],
        text_index=golden["packed_text_indexes"],
        text_target_ids=golden["packed_label_ids"],
        text_target_index=golden["ce_loss_indexes"],
        text_target_weight=torch.ones(len(golden["ce_loss_indexes"])),
        vit_patches=golden["packed_vit_tokens"],
        vit_index=golden["packed_vit_token_indexes"],
        vit_position_ids=golden["packed_vit_position_ids"],
        vit_lengths=tuple(golden["vit_token_seqlens"].tolist()),
        vae_images=golden["padded_images"],
        vae_noise=golden["vae_noise"],
        latent_shapes=shapes,
        latent_index=golden["packed_vae_token_indexes"],
        latent_position_ids=golden["packed_latent_position_ids"],
        timesteps=timesteps,
        flow_noise=golden["flow_noise"],
        image_target_index=golden["mse_loss_indexes"],
    )


def _clean(model, batch, golden):
    p, padded = model.latent_patch_size, zip(golden["padded_latent"], batch.latent_shapes, strict=True)
    return torch.cat([flow.patchify_latent(x[:, : r * p, : c * p], (r, c), p) for x, (r, c) in padded])


def _close(actual, expected, atol):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


def test_parts(model, batch, golden, tolerance):
    t_L = flow.shift_timesteps(torch.sigmoid(batch.timesteps), model.timestep_shift)
    _close(t_L, golden["mid.shifted_timesteps"], tolerance["mid.shifted_timesteps"])
    _close(model.time_embedder(t_L, dtype=torch.float32), golden["mid.time_embed"], tolerance["mid.time_embed"])
    vit = model.vit_model.vision_model(batch.vit_patches, batch.vit_position_ids, batch.vit_lengths)
    _close(vit, golden["mid.vit_last_hidden_state"], tolerance["mid.vit_last_hidden_state"])
    _close(model.connector(vit), golden["mid.connector_out"], tolerance["mid.connector_out"])


def test_hidden_states_of_every_layer(model, batch, golden, tolerance):
    t_L = flow.shift_timesteps(torch.sigmoid(batch.timesteps), model.timestep_shift)
    noisy = flow.interpolate(_clean(model, batch, golden), batch.flow_noise, t_L)
    outputs: list[torch.Tensor] = []
    handles = [
        layer.register_forward_hook(lambda module, inputs, output: outputs.append(output))
        for layer in model.language_model.model.layers
    ]
    embedding, _order, _num_und = model._embed(batch, noisy, t_L)
    hidden, index_of = model.hidden_states(batch, noisy, t_L)
    for handle in handles:
        handle.remove()
    _close(embedding[index_of], golden["mid.packed_sequence"], tolerance["mid.packed_sequence"])
    assert len(outputs) > 0
    for number, output in enumerate(outputs):
        name = f"mid.layer_{number}_out"
        _close(output[index_of], golden[name], tolerance[name])
    _close(hidden[index_of], golden["out.last_hidden_state"], tolerance["out.last_hidden_state"])


def test_losses_and_gradients(model, batch, golden, tolerance):
    plan = _json("train.json")
    model.zero_grad()
    terms = model.loss_terms(batch, _clean(model, batch, golden))
    counts = batch.target_counts()
    assert counts == {"text": plan["n_ce"], "image": plan["n_mse"]}
    _close(terms.sums["text"] / counts["text"], torch.tensor(plan["ce_mean"]), tolerance["ce_mean"])
    _close(terms.sums["image"] / counts["image"], torch.tensor(plan["mse_mean"]), tolerance["mse_mean"])
    loss = terms.weighted_sum({"text": 1.0, "image": 1.0}, counts)
    _close(loss, torch.tensor(plan["loss"]), tolerance["loss"])
    loss.backward()
    count = 0
    for name, expected in golden.items():
        if name.startswith("grad."):
            _close(model.get_parameter(name[5:]).grad, expected, tolerance["grad (full tensors)"])
            count += 1
    assert count == len(plan["grad_full"])
    for name, norm in plan["grad_norm"].items():
        grad = model.get_parameter(name).grad
        if norm is None:
            assert grad is None
        elif norm > 1e-3:
            assert abs(grad.norm().item() / norm - 1) < tolerance["grad_norm (relative, norms > 1e-3)"], name


def test_an_image_is_encoded_as_if_it_were_alone(batch, golden, tolerance):
    """The public code pads all images of a pack to the largest; here the padding does not reach the latents."""
    model, atol = UnifiedModel(pretrained=str(BAGEL), vae=BAGEL_VAE), tolerance["padded_latent"]
    together = encode_by_size(model.vae, batch, model.latent_patch_size)
    counts = [rows * columns for rows, columns in batch.latent_shapes]
    for number, (shape, patches) in enumerate(zip(batch.latent_shapes, together.split(counts), strict=True)):
        one = dataclasses.replace(
            batch,
            vae_images=batch.vae_images[number : number + 1],
            vae_noise=batch.vae_noise[number : number + 1],
            latent_shapes=(shape,),
        )
        alone = encode_by_size(model.vae, one, model.latent_patch_size)
        _close(patches, alone, atol)
    assert (together - _clean(model, batch, golden)).abs().max() > 1000 * atol or len({*batch.latent_shapes}) == 1
    terms = model(batch)
    assert all(torch.isfinite(value) for value in terms.sums.values())
