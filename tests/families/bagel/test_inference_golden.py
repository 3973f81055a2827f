"""Sampling, understanding and editing against numbers from the public BAGEL code, in fp32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from tests.support.golden_files import BAGEL, BAGEL_META, BAGEL_VAE, atol, read_json
from unigen_ds.data.images.image_files import ImageTransform
from unigen_ds.families.bagel.flow_settings import FlowSettings
from unigen_ds.families.bagel.inference import THINK_THEN_DRAW, Context, Contexts, InterleaveInferencer
from unigen_ds.families.bagel.model import UnifiedModel
from unigen_ds.families.bagel.processor import UnifiedProcessor
from unigen_ds.inference.generated import to_picture
from unigen_ds.system.seeding import generator

META, CASES = BAGEL_META, read_json(BAGEL / "infer.json")
GIVEN = {"pretrained": str(BAGEL), "vae": BAGEL_VAE}


class Ids:
    """A tokenizer whose texts are numbers (another word is its length): the vectors come without one."""

    bos_id, eos_id = META["special_ids"]["bos_token_id"], META["special_ids"]["eos_token_id"]
    image_start_id, image_end_id = META["special_ids"]["start_of_image"], META["special_ids"]["end_of_image"]
    pad_id, fingerprint = eos_id, "ids"

    def encode(self, text: str) -> list[int]:
        return [int(word) if word.isdigit() else len(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(str(i) for i in ids if i not in (self.bos_id, self.eos_id))


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(BAGEL / "infer.safetensors")


@pytest.fixture(scope="module")
def inferencer() -> InterleaveInferencer:
    model = UnifiedModel(**GIVEN).eval()
    processor = UnifiedProcessor(
        Ids(),
        vae_transform=ImageTransform(*META["vae_transform"]),
        vit_transform=ImageTransform(*META["vit_transform"]),
        **UnifiedModel.processor_sizes(GIVEN),
    )
    return InterleaveInferencer(model, processor)


def close(kind: str, name: str, actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), atol=atol(f"bagel/{kind}.*.{name}"), rtol=0)


def settings(case: dict[str, Any]) -> FlowSettings:
    return FlowSettings(
        num_timesteps=case["num_timesteps"],
        timestep_shift=case["timestep_shift"],
        text_scale=case["cfg_text_scale"],
        image_scale=case["cfg_img_scale"],
        interval=tuple(case["cfg_interval"]),
        renorm=case["cfg_renorm_type"],
        renorm_min=case["cfg_renorm_min"],
    )


def compare_drawing(
    inferencer: InterleaveInferencer, contexts: Contexts, golden: dict[str, Tensor], kind: str, name: str
) -> None:
    case, stride = CASES[kind][name], inferencer.processor.vae_downsample
    assert (len(contexts.full.cache.layers[0][0]), contexts.full.position) == (
        case["context"]["kv_len"],
        case["context"]["rope"],
    )
    steps: list[tuple[float, Tensor, Tensor]] = []
    height, width = case["image_shapes"]
    grid = (height // stride, width // stride)
    noise = golden[f"{kind}.init_noise"]
    x = inferencer.denoise(contexts, noise, grid, flow=settings(case), on_step=lambda *step: steps.append(step))
    prefix = f"{kind}.{name}"
    close(kind, "t", torch.tensor([step[0] for step in steps]), golden[f"{prefix}.t"])
    close(kind, "x_t", torch.stack([step[1] for step in steps]), golden[f"{prefix}.x_t"])
    close(kind, "v_t", torch.stack([step[2] for step in steps]), golden[f"{prefix}.v_t"])
    close(kind, "latent", x, golden[f"{prefix}.latent"])
    if f"{prefix}.image" in golden:
        image = inferencer.decode(x, grid)
        close(kind, "image", image, golden[f"{prefix}.image"])
        picture = torch.from_numpy(np.array(to_picture(image)))
        close(kind, "image_uint8", picture, golden[f"{prefix}.image_uint8"])


@pytest.mark.parametrize("name", CASES["t2i"])
def test_text_to_image(inferencer: InterleaveInferencer, golden: dict[str, Tensor], name: str) -> None:
    contexts = Contexts()
    for context in (contexts.full, contexts.without_image):
        inferencer.extend_text(context, golden["t2i.prompt_ids"].tolist())
    compare_drawing(inferencer, contexts, golden, "t2i", name)


def test_guidance_ends_below_its_interval(inferencer: InterleaveInferencer, golden: dict[str, Tensor]) -> None:
    """All times of the vectors are above theirs. ``t <= 0.7`` is drawn without guidance, from the same patches on."""
    contexts = Contexts()
    for context in (contexts.full, contexts.without_image):
        inferencer.extend_text(context, golden["t2i.prompt_ids"].tolist())
    case = CASES["t2i"]["nocfg"]
    stride = inferencer.processor.vae_downsample
    height, width = case["image_shapes"]

    def steps(scale: float, low: float) -> list[tuple[float, Tensor, Tensor]]:
        calls: list[tuple[float, Tensor, Tensor]] = []
        flow = replace(settings(case), text_scale=scale, interval=(low, 1.0))
        inferencer.denoise(contexts, golden["t2i.init_noise"], (height // stride, width // stride), flow=flow,
                           on_step=lambda *step: calls.append(step))  # fmt: skip
        return calls

    whole, above, none = steps(4.0, 0.0), steps(4.0, 0.7), steps(1.0, 0.0)
    first = next(k for k, (t, _, _) in enumerate(above) if t <= 0.7)
    assert 0 < first < len(above) - 1
    assert all(torch.equal(a[2], b[2]) for a, b in zip(above[:first], whole[:first], strict=True))
    assert not torch.equal(above[0][2], none[0][2]), "it is guided before"
    assert torch.equal(above[first][1], whole[first][1]) and not torch.equal(above[first][2], whole[first][2])


@torch.no_grad()
@pytest.mark.parametrize("name", CASES["edit"])
def test_editing(inferencer: InterleaveInferencer, golden: dict[str, Tensor], name: str) -> None:
    contexts = Contexts()
    latent = inferencer.model.vae.encode(golden["edit.vae_image"][None], golden["edit.vae_noise"])
    torch.testing.assert_close(latent, golden["edit.vae_latent"], atol=atol("bagel/edit.vae_latent"), rtol=0)
    inferencer.extend_vae(contexts.full, golden["edit.vae_image"], golden["edit.vae_noise"][0])
    inferencer.extend_vit(contexts.full, golden["edit.vit_image"])
    contexts.without_text = contexts.full.copy()
    for context in (contexts.full, contexts.without_image):
        inferencer.extend_text(context, golden["edit.prompt_ids"].tolist())
    compare_drawing(inferencer, contexts, golden, "edit", name)


@pytest.mark.parametrize("name", CASES["und"])
def test_understanding(inferencer: InterleaveInferencer, golden: dict[str, Tensor], name: str) -> None:
    context, case = Context(), CASES["und"][name]
    if case["has_image"]:
        inferencer.extend_vit(context, golden[f"und.{name}.vit_image"])
    inferencer.extend_text(context, golden[f"und.{name}.prompt_ids"].tolist())
    before, logits = len(context.cache.layers[0][0]), []
    head = inferencer.model.language_model.lm_head
    handle = head.register_forward_hook(lambda module, inputs, output: logits.append(output))
    ids = inferencer.write(context, max_length=case["max_length"])
    handle.remove()
    assert ids == golden[f"und.{name}.generated_ids"].tolist()
    close("und", "logits", torch.cat(logits), golden[f"und.{name}.logits"])
    assert len(context.cache.layers[0][0]) == before, "the context stays as it is"


def words(ids: Tensor) -> str:
    return " ".join(map(str, ids.tolist()))


def test_from_pictures_to_answers(inferencer: InterleaveInferencer, golden: dict[str, Tensor]) -> None:
    """The whole way: the picture is resized for the autoencoder first, then for the vision tower."""
    for name, case in CASES["und"].items():
        images = [Image.open(BAGEL / case["png"])] if case["has_image"] else []
        prompt = words(golden[f"und.{name}.prompt_ids"])
        result = inferencer.unified_generate(prompt, images=images, understand=True, max_length=case["max_length"])
        ids = golden[f"und.{name}.generated_ids"][1:].tolist()
        assert result.text == inferencer.processor.tokenizer.decode(ids) and not result.images


def test_an_edit_is_drawn_from_the_picture_as_both_encoders_see_it(
    inferencer: InterleaveInferencer, golden: dict[str, Tensor]
) -> None:
    """Resized for the autoencoder first, then, from that, for the vision tower; without text: all before the prompt."""
    processor, contexts = inferencer.processor, Contexts()
    flow = FlowSettings(num_timesteps=3, text_scale=3.0, image_scale=2.0)
    picture, prompt = Image.open(BAGEL / CASES["edit"]["text_channel"]["png"]).resize((90, 61)), "1 2 3"
    result = inferencer.unified_generate(prompt, images=[picture], flow=flow, seed=3)
    scaled_picture = processor.vae_transform.resize(picture)
    assert scaled_picture.size != picture.size and result.images[0].size == scaled_picture.size
    pixels, side = processor.vae_transform(scaled_picture), processor.vae_spatial_downsample
    shape = (processor.latent_channels, pixels.shape[1] // side, pixels.shape[2] // side)
    inferencer.extend_vae(contexts.full, pixels, torch.randn(shape, generator=generator(3, 0, "vae")))
    inferencer.extend_vit(contexts.full, scaled_picture)
    contexts.without_text = contexts.full.copy()
    for context in (contexts.full, contexts.without_image):
        inferencer.extend_text(context, processor.tokenizer.encode(prompt))
    grid = (pixels.shape[1] // processor.vae_downsample, pixels.shape[2] // processor.vae_downsample)
    noise = torch.randn(grid[0] * grid[1], len(golden["t2i.init_noise"][0]), generator=generator(3, 0, "draw"))
    by_hand = inferencer.decode(inferencer.denoise(contexts, noise, grid, flow=flow), grid)
    assert result.images[0].tobytes() == to_picture(by_hand).tobytes()


def test_thinking_comes_first_and_is_drawn_from(inferencer: InterleaveInferencer, golden: dict[str, Tensor]) -> None:
    flow, prompt = FlowSettings(num_timesteps=3, text_scale=3.0, image_scale=2.0), words(golden["t2i.prompt_ids"])
    side = 2 * inferencer.processor.vae_downsample
    result = inferencer.unified_generate(prompt, think=True, size=(side, side), flow=flow, max_length=6)
    encode, contexts = inferencer.processor.tokenizer.encode, Contexts()
    for context in (contexts.full, contexts.without_text, contexts.without_image):
        inferencer.extend_text(context, encode(THINK_THEN_DRAW))
    for context in (contexts.full, contexts.without_image):
        inferencer.extend_text(context, encode(prompt))
    thoughts = inferencer.write(contexts.full, max_length=6)[1:]
    assert thoughts and encode(result.text) == thoughts
    inferencer.extend_text(contexts.full, thoughts)
    noise = torch.randn(4, len(golden["t2i.init_noise"][0]), generator=generator(0, 0, "draw"))
    by_hand = inferencer.decode(inferencer.denoise(contexts, noise, (2, 2), flow=flow), (2, 2))
    assert result.images[0].tobytes() == to_picture(by_hand).tobytes()
    answer = inferencer.unified_generate(prompt, think=True, understand=True, max_length=6)
    assert answer.text and not answer.images
