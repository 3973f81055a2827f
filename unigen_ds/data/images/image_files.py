"""An image's file or its bytes -> the size in its header, or the decoded image, turned upright.

Everything that a file may be and is not read as is an ``UnreadableImage`` with the reason.
"""

from __future__ import annotations

import os
import re
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image, PngImagePlugin, UnidentifiedImageError

from unigen_ds.core.errors import DataError
from unigen_ds.data.images.stored_image import StoredImage

warnings.filterwarnings("ignore", module=r"PIL\.")
"""What PIL has to say about a file's details; an image that it cannot read is an error."""
_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")
_ORIENTATION = 0x0112
_TEXT_VARIABLE = "UNIGEN_DS_PNG_TEXT_BYTES"
"""Of this project's own processes: those that a run starts have its limit."""


def limit_png_text(nbytes: int) -> None:
    """The texts of a PNG file may have so many bytes, unpacked; in the processes that this one starts, too."""
    os.environ[_TEXT_VARIABLE] = str(nbytes)
    PngImagePlugin.MAX_TEXT_CHUNK, PngImagePlugin.MAX_TEXT_MEMORY = nbytes, nbytes


def raise_png_text_limit() -> None:
    """From PIL's own 1 MiB, which refuses pictures of the web with long comments; a user's own number stays."""
    if PngImagePlugin.MAX_TEXT_CHUNK == 1 << 20:
        PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = int(os.environ.get(_TEXT_VARIABLE, 100 << 20))


raise_png_text_limit()


class UnreadableImage(DataError):
    """A picture cannot be opened or decoded. The loader turns it into a counted skip."""

    path = ""
    """The file, where it is known."""


FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO", "TGA", "PCX",
           "SGI", "QOI", "PSD")  # fmt: skip
"""What is opened, whatever the file is called. PIL has more: an EPS, for one, is drawn by starting Ghostscript."""
MAX_PIXELS = 178_956_970
"""Pixels of an image at most, checked before any is decoded: a small file may claim a size that fills the memory."""
_LONG = 400
"""Characters of a path in a message."""
_IN_TEXT = "; as base64 it is written data:image/png;base64,..."
_BASE64 = re.compile(r"[A-Za-z0-9+/]{256,}={0,2}\Z")
_DEEP = ("I;16", "I;16L", "I;16B", "I;16N")
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation -> what brings the picture upright."""


class ImageContent:
    """An image file that is read once: for its header, and later for its pixels, which are decoded once."""

    def __init__(self, path: str | Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def data(self) -> bytes:
        """The bytes of the file."""
        path = self.path
        return path.read() if isinstance(path, StoredImage) else Path(_no_device(path)).read_bytes()

    @cached_property
    def decoded(self) -> Image.Image:
        """As of ``open_image``."""
        return _decoded(self)


@dataclass(frozen=True)
class ImageHeader:
    """What is known of an image before it is decoded."""

    size: tuple[int, int] | None
    """(width, height), upright; None: not readable."""
    error: str = ""
    """Why it cannot be read."""
    changed: bool = False
    """Whether it is turned, or its grey has 16 bits."""
    mode: str = ""
    """PIL's name for its channels."""
    transparent: bool = False
    """Whether it has an alpha channel or a transparent colour."""
    content: ImageContent | None = field(default=None, compare=False, repr=False)
    """What it was read from, where that was the whole file."""


def image_header(path: str | Path | ImageContent) -> ImageHeader:
    """From the header alone. An unreadable image does not raise."""
    try:
        with _opened(path, "read") as image:
            orientation = _orientation(image)
            width, height = image.size
            if orientation >= 5:
                width, height = height, width
            transparent = image.mode in _ALPHA or "transparency" in image.info
            turned = orientation > 1 or (image.format == "TIFF" and image.size != _stored_size(image))
            content = path if isinstance(path, ImageContent) else None
            return ImageHeader((width, height), "", turned or _is_deep(image), image.mode, transparent, content)
    except UnreadableImage as error:
        return ImageHeader(None, error.problem)


def open_image(path: str | Path | ImageContent) -> Image.Image:
    """Return the decoded picture, upright, grey in 8 bits.

    Raises ``UnreadableImage`` naming the path; a truncated file is refused, not greyed out.
    """
    return path.decoded if isinstance(path, ImageContent) else _decoded(path)


def _decoded(path: str | Path | ImageContent) -> Image.Image:
    with _opened(path, "decoded") as image:
        orientation = _orientation(image)
        image.load()
        if _is_deep(image):
            # the upper 8 bits, as PIL reads colours of 16 bits; it clips grey to 255, which is white almost everywhere
            return _turned(Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8)), orientation)
        return _turned(image, orientation)


@contextmanager
def _opened(path: str | Path | ImageContent, what: str) -> Iterator[Image.Image]:
    """The image, not decoded. Raises ``UnreadableImage``, also for errors of the block: it cannot be ``what``."""
    try:
        with _bytes_of(path) as source, Image.open(source, formats=_formats()) as image:
            width, height = image.size
            if min(width, height) < 1:
                raise ValueError(f"its size is {width} x {height}")
            if width * height > MAX_PIXELS:
                raise ValueError(f"it has {width} x {height} pixels; at most {MAX_PIXELS:,} are decoded")
            yield image
    except MemoryError:
        raise
    except Exception as error:  # PIL's readers raise anything on a broken file
        raise UnreadableImage(f"image {_shorten(path)} cannot be {what}: {_reason(path, error)}") from error


def _bytes_of(path: str | Path | ImageContent) -> IO[bytes]:
    if isinstance(path, ImageContent):
        return BytesIO(path.data)
    return BytesIO(path.read()) if isinstance(path, StoredImage) else open(_no_device(path), "rb")


def _reason(path: str | Path | ImageContent, error: Exception) -> str:
    """What is wrong with an image, without its path."""
    if isinstance(error, UnidentifiedImageError):
        return f"its content is none of the formats (read are {', '.join(FORMATS)})"
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        in_text = _BASE64.search(str(path)) is not None  # the image itself where its path is expected
        return f"{type(error).__name__}: {error.strerror}{_IN_TEXT if in_text else ''}"
    return f"{type(error).__name__}: {_shorten(error)}"


def _shorten(value: object) -> str:
    """The beginning and the end of a long text: a record may have anything where a path is expected."""
    text = str(value)
    return text if len(text) <= _LONG else f"{text[: _LONG // 2]} ... {text[-_LONG // 4 :]}"


def _no_device(path: str | Path) -> str | Path:
    """The path itself. Raises ``ValueError`` where reading it may never end: a pipe, a socket, a device."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ValueError("it is a pipe, a socket or a device, not a file")
    return path


@cache
def _formats() -> tuple[str, ...]:
    """Those of ``FORMATS`` that this PIL was built with."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _orientation(image: Image.Image) -> int:
    """EXIF's, 1 to 8, from the header. A TIFF is turned by PIL itself, while it is decoded."""
    if image.format == "TIFF" or (image.format == "PNG" and not {"exif", "Raw profile type exif"} & set(image.info)):
        return 1  # a PNG would be decoded to look for EXIF data after its pixels
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # damaged EXIF data is no reason to leave out the picture
        return 1
    return orientation if orientation in _TURNS else 1


def _stored_size(tiff: Any) -> tuple[int, int]:
    return tiff.tag_v2.get(256), tiff.tag_v2.get(257)


def _is_deep(image: Image.Image) -> bool:
    """Whether its grey has 16 bits."""
    return image.mode in _DEEP or (image.mode == "I" and image.format in ("PNG", "PPM"))


def _turned(image: Image.Image, orientation: int) -> Image.Image:
    return image.transpose(_TURNS[orientation]) if orientation in _TURNS else image


def flattened(image: Image.Image, *, white: bool) -> Image.Image:
    """``image`` without transparency, in RGB or L.

    ``white``: as BAGEL's ``pil_img2rgb``: RGBA, and images with a transparent colour, on white; of others an alpha
    channel is left out. Else as nanoVLM: PIL's ``convert("RGB")``, which leaves out every alpha channel.
    """
    if white and (image.mode == "RGBA" or image.info.get("transparency") is not None):
        return on_white(image, "RGB")
    if image.mode not in ("RGB", "L"):
        image = image.convert("RGB")
    if "transparency" in image.info:  # a colour that the next step would treat as transparent
        image = image.copy()
        del image.info["transparency"]
    return image


def on_white(image: Image.Image, mode: str) -> Image.Image:
    """``image`` in ``mode``; transparent pixels become white."""
    if image.mode == mode and "transparency" not in image.info:
        return image
    if image.mode in _ALPHA or "transparency" in image.info:
        rgba = image.convert("RGBA")
        background = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        image = Image.alpha_composite(background, rgba)
    return image.convert(mode)
