"""Resizing: Pillow's pixels to the bit, by the compiled function and without it."""

from __future__ import annotations

import io
import os
import random
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from unigen_ds.data import resampling
from unigen_ds.data.resampling import Box, Size
from unigen_ds.data.tiles import Tiling
from unigen_ds.data.transforms import CenterCrop, ImageTransform

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("cc") and Path(sysconfig.get_path("include"), "Python.h").exists()
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no C compiler with Python's headers")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The compiled module of this source, built as an installation builds it."""
    folder = tmp_path_factory.mktemp("compiled")
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(folder), "--build-temp", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (path,) = folder.rglob("_bicubic*.so")
    spec = spec_from_file_location("unigen_ds.data._bicubic", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fast(built: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Size]]:
    """The sizes of images that the compiled function has resized so far."""
    done: list[Size] = []

    class Counted:
        def bicubic(self, *arguments: object) -> bool:
            used = built.bicubic(*arguments)
            done.extend([arguments[1]] * used)  # type: ignore[list-item]
            return bool(used)

    monkeypatch.setattr(resampling, "compiled", Counted)
    order = resampling._order
    order.cache_clear()
    assert order() is not None, "this Pillow is not known"
    done.clear()
    yield done
    order.cache_clear()


def picture(size: Size, seed: int = 0) -> Image.Image:
    """Noise, or for odd seeds black and white alone, of which weighted sums are below 0 and above 255."""
    draw = np.random.default_rng(seed)
    values = (
        draw.integers(0, 256, (size[1], size[0], 3)) if seed % 2 == 0 else 255 * draw.integers(0, 2, (*size[::-1], 3))
    )
    return Image.fromarray(values.astype(np.uint8))


def same(image: Image.Image, size: Size, box: Box | None = None) -> bool:
    made = resampling.resized(image, size, box)
    wanted = image.resize(size, Image.Resampling.BICUBIC, box=box)
    return (made.mode, made.size) == (wanted.mode, wanted.size) and made.tobytes() == wanted.tobytes()


@needs_compiler
def test_every_size_has_the_pixels_of_pillow(fast: list[Size]) -> None:
    draw = random.Random(0)
    for seed in range(250):
        width, height, columns, rows = (draw.randint(1, draw.choice((12, 90, 200))) for _ in range(4))
        side = min(width, height)
        x, y = draw.choice((0, (width - side) / 2)), draw.choice((0, (height - side) / 2))
        box = draw.choice((None, (x, y, x + side, y + side)))
        assert same(picture((width, height), seed), (columns, rows), box), (width, height, columns, rows, box)
    assert len(fast) > 80


@needs_compiler
@pytest.mark.parametrize("size", [(512, 256), (200, 650), (641, 37), (31, 500)])
def test_a_tall_and_a_wide_picture(fast: list[Size], size: Size) -> None:
    """Pillow 13 begins with the columns where the height shrinks by much more than the width."""
    for made in ((256, 256), (16, 240), (64, 24), (100, 33)):
        assert same(picture(size, 1), made), made
    assert len(fast) == 4


@needs_compiler
def test_what_is_left_to_pillow(fast: list[Size], monkeypatch: pytest.MonkeyPatch) -> None:
    for image, size in [
        (picture((40, 30)).convert("L"), (20, 20)),
        (picture((40, 30)).convert("RGBA"), (20, 20)),
        (picture((40, 30)), (40, 30)),
        (picture((3, 300)), (20, 20)),
        (picture((40, 30)), (2, 20)),
        (picture((2100, 2000)), (32, 32)),  # more than a block of Pillow's memory
    ]:
        assert same(image, size), (image, size)
    assert fast == []
    with pytest.raises(ValueError, match=r"[Bb]ox"):
        resampling.resized(picture((40, 30)), (20, 20), (0, 0, 41, 30))


@needs_compiler
def test_the_given_picture_is_read_from_its_file_and_stays_as_it_was(fast: list[Size], tmp_path: Path) -> None:
    picture((120, 80)).save(tmp_path / "a.jpg")
    with Image.open(tmp_path / "a.jpg") as image:
        before = np.array(Image.open(tmp_path / "a.jpg"))
        assert same(image, (33, 21)) and np.array_equal(image, before)
    assert fast == [(120, 80)]
    stream = io.BytesIO((tmp_path / "a.jpg").read_bytes()[:900])
    with pytest.raises(OSError, match="truncated"):
        resampling.resized(Image.open(stream), (33, 21))


@needs_compiler
def test_threads_resize_at_the_same_time(fast: list[Size]) -> None:
    images = [picture((150 + i, 120), i) for i in range(32)]
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(lambda image: same(image, (64, 48)), images))
    assert len(fast) == 32


@needs_compiler
def test_transforms_and_tiles_use_it(fast: list[Size], monkeypatch: pytest.MonkeyPatch) -> None:
    image, makers = picture((140, 90)), (ImageTransform(64, 32, 16), CenterCrop(48, 16), Tiling(32, 64))
    with_it = [np.asarray(make(image)) for make in makers]
    assert len(fast) == 3
    monkeypatch.setattr(resampling, "_order", lambda: None)
    without = [np.asarray(make(image)) for make in makers]
    assert len(fast) == 3 and all(map(np.array_equal, with_it, without))


@needs_compiler
def test_a_pillow_that_computes_otherwise_is_not_imitated(
    fast: list[Size], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = Image.Image.resize

    def other(self: Image.Image, size: Size, *more: object, **named: object) -> Image.Image:
        return real(self, size, Image.Resampling.BILINEAR)

    monkeypatch.setattr(Image.Image, "resize", other)
    resampling._order.cache_clear()
    with caplog.at_level("INFO"):
        assert same(picture((40, 30)), (20, 20))
    assert fast == [(40, 32), (24, 20), (33, 90), (44, 32)] * 2 and "does not know" in caplog.text


def test_an_installation_without_a_compiler_builds_and_has_the_same_pixels(tmp_path: Path) -> None:
    for name in ("setup.py", "pyproject.toml", "README.md", "unigen_ds", "tools", "ds_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "out", "--build-temp", "temp"]
    environment = {**os.environ, "CC": "no-such-compiler"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=120)
    assert not list(tmp_path.glob("out/**/*.so"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "unigen_ds.data._bicubic", None)
        patch.delattr("unigen_ds.data._bicubic", raising=False)  # of an import before
        resampling._order.cache_clear()
        assert resampling.compiled() is None and resampling._order() is None
        assert same(picture((50, 40)), (20, 20))
    resampling._order.cache_clear()
