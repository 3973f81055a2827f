"""Reading an image: orientation, 8 bits, transparency as in the public code, formats. Pixels are computed by numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.support import make_processor
from tests.data.text.chat_support import character_tokenizer
from unigen_ds.data.images import image_files
from unigen_ds.data.images.image_files import FORMATS, image_header, open_image
from unigen_ds.data.text.tokenizers import ChatTokenizer
from unigen_ds.families.nanovlm.processor import VLMProcessor

RNG = np.random.default_rng(3)
GREY = RNG.integers(0, 65536, (4, 8), dtype=np.uint16)
RGBA = RNG.integers(0, 256, (4, 8, 4), dtype=np.uint8)
LA = RNG.integers(0, 256, (4, 8, 2), dtype=np.uint8)
UPRIGHT = {  # EXIF orientation -> the stored array that is displayed as ``A``
    1: lambda a: a, 2: np.fliplr, 3: lambda a: np.rot90(a, 2), 4: np.flipud, 5: lambda a: a.T,
    6: lambda a: np.rot90(a, 1), 7: lambda a: np.rot90(a, 2).T, 8: lambda a: np.rot90(a, -1),
}  # fmt: skip


def vlm(folder: Path, **changes: Any) -> VLMProcessor:
    character_tokenizer().save_pretrained(folder / "tokenizer")
    sizes = {"tile_size": 16, "vit_patch_size": 4, "pixel_shuffle_factor": 2, "max_image_size": 48}
    return VLMProcessor(ChatTokenizer(path=str(folder / "tokenizer")), **sizes, **changes)  # type: ignore[arg-type]


def pixels(image: Image.Image) -> np.ndarray:
    array = np.asarray(image.convert("RGB"))
    assert image.mode in ("RGB", "L") and "transparency" not in image.info
    return array


def three(array: np.ndarray) -> np.ndarray:
    return np.repeat(array[..., None], 3, axis=2)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_grey_of_16_bits_keeps_its_upper_8(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"deep.{suffix}"
    Image.fromarray(GREY).save(path)
    for processor in (make_processor(), vlm(tmp_path)):
        assert np.array_equal(pixels(processor.read_image(path)), three((GREY >> 8).astype(np.uint8)))


@pytest.mark.parametrize("suffix", ["png", "webp", "tif"])
def test_exif_turns_a_picture_upright(tmp_path: Path, suffix: str) -> None:
    upright = RNG.integers(0, 256, (4, 8), dtype=np.uint8)
    for orientation, turn in UPRIGHT.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        path = tmp_path / f"{orientation}.{suffix}"
        lossless = {"lossless": True} if suffix == "webp" else {}
        Image.fromarray(np.ascontiguousarray(turn(upright))).save(path, exif=exif.tobytes(), **lossless)
        assert image_header(path).size == (8, 4)
        assert np.array_equal(pixels(open_image(path)), three(upright)), orientation


def test_transparency_as_the_public_code_of_the_family(tmp_path: Path) -> None:
    """BAGEL: ``pil_img2rgb``, RGBA over white and no other alpha channel; nanoVLM: ``convert("RGB")``."""
    colours, alpha = RGBA[..., :3].astype(float), RGBA[..., 3:] / 255.0
    white = colours * alpha + 255.0 * (1 - alpha)
    Image.fromarray(RGBA).save(tmp_path / "rgba.png")
    Image.fromarray(LA).save(tmp_path / "la.png")
    palette = Image.fromarray(np.array([[0, 1], [1, 0]], dtype=np.uint8), "P")
    palette.putpalette([10, 20, 30, 40, 50, 60])
    for suffix in ("png", "gif"):
        palette.save(tmp_path / f"palette.{suffix}", transparency=1)
    picture = Image.fromarray(np.array([[[1, 2, 3], [7, 8, 9]]], dtype=np.uint8))
    picture.save(tmp_path / "keyed.png", transparency=(7, 8, 9))
    bagel, nanovlm = make_processor(), vlm(tmp_path)
    assert np.abs(pixels(bagel.read_image(tmp_path / "rgba.png")) - white).max() < 1.0
    assert np.array_equal(pixels(nanovlm.read_image(tmp_path / "rgba.png")), RGBA[..., :3])
    for processor in (bagel, nanovlm):
        assert np.array_equal(pixels(processor.read_image(tmp_path / "la.png")), three(LA[..., 0]))
    first, second, blank = [10, 20, 30], [40, 50, 60], [255, 255, 255]
    for name in ("palette.png", "palette.gif"):
        assert pixels(bagel.read_image(tmp_path / name)).tolist() == [[first, blank], [blank, first]]
        assert pixels(nanovlm.read_image(tmp_path / name)).tolist() == [[first, second], [second, first]]
    assert pixels(bagel.read_image(tmp_path / "keyed.png")).tolist() == [[[1, 2, 3], blank]]
    assert pixels(nanovlm.read_image(tmp_path / "keyed.png")).tolist() == [[[1, 2, 3], [7, 8, 9]]]


def test_only_pictures_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An EPS called .png would start Ghostscript."""
    eps = tmp_path / "drawing.png"
    Image.new("RGB", (4, 4)).save(eps, "EPS")
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *a, **k: pytest.fail("started Ghostscript"))
    assert "none of the formats (read are JPEG" in image_header(eps).error
    with pytest.raises(image_files.UnreadableImage, match="none of the formats"):
        make_processor().read_image(eps)
    assert not {"EPS", "WMF", "PDF"} & set(FORMATS)


def test_pixels_are_counted_before_they_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.png"
    Image.new("L", (20, 20)).save(path)
    monkeypatch.setattr(image_files, "MAX_PIXELS", 399)
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", lambda *_: pytest.fail("decoded"))
    assert "it has 20 x 20 pixels; at most 399 are decoded" in image_header(path).error
    with pytest.raises(image_files.UnreadableImage, match=r"large\.png cannot be decoded: .* 20 x 20 pixels"):
        open_image(path)
