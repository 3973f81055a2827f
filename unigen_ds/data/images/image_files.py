"""An image's file or its bytes -> the size in its header, or the decoded image, turned upright.

Everything that a file may be and is not read as is an ``UnreadableImage`` with the reason.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, PngImagePlugin, UnidentifiedImageError

from unigen_ds.core.errors import DataError
from unigen_ds.data.images.stored_image import StoredImage

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
_UNKNOWN = f" (read are {', '.join(FORMATS)})"
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
    """An image file that is read and parsed once: for its header, and later for its pixels."""

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self.decoded: Image.Image | None = None
        self.failed: UnreadableImage | None = None

    def __str__(self) -> str:
        return str(self._path)

    @cached_property
    def opened(self) -> Image.Image:
        """Not decoded. Raises what PIL raises."""
        path = self._path
        content = path.read() if isinstance(path, StoredImage) else Path(_no_device(path)).read_bytes()
        return Image.open(BytesIO(content), formats=_formats())


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


def image_size(path: str | Path) -> tuple[int, int]:
    """(width, height) from the header. Raises ``UnreadableImage`` naming the path."""
    header = image_header(path)
    if header.size is None:
        raise UnreadableImage(header.error)
    return header.size


def open_image(path: str | Path | ImageContent) -> Image.Image:
    """The decoded picture, upright, grey in 8 bits.

    Raises ``UnreadableImage`` naming the path; a truncated file is refused, not greyed out.
    """
    if not isinstance(path, ImageContent):
        return _decoded(path)
    if path.failed is not None:  # PIL decodes what is left of a broken file without an error, the second time
        raise path.failed
    if path.decoded is None:
        try:
            path.decoded = _decoded(path)
        except UnreadableImage as error:
            path.failed = error
            raise
    return path.decoded


def _decoded(path: str | Path | ImageContent) -> Image.Image:
    with _opened(path, "decoded") as image:
        orientation = _orientation(image)
        image.load()
        if _is_deep(image):
            # the upper 8 bits, as PIL reads colours of 16 bits; it clips grey to 255, which is white almost everywhere
            return _turned(Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8)), orientation)
        return _turned(image, orientation)


class _WithoutWarnings:
    """No Python warnings while any thread is inside. ``warnings.catch_warnings`` keeps one state for all threads: where
    two overlap, the second restores what the first had set, and nothing warns for the rest of the process.
    """

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._caught = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._caught = warnings.catch_warnings()
                self._caught.__enter__()
                warnings.simplefilter("ignore")

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._caught.__exit__(None, None, None)


_WITHOUT_WARNINGS = _WithoutWarnings()
os.register_at_fork(after_in_child=_WITHOUT_WARNINGS.__init__)  # type: ignore[misc]  # no other thread is there any more


@contextmanager
def _opened(path: str | Path | ImageContent, what: str) -> Iterator[Image.Image]:
    """The file, its header read. Raises ``UnreadableImage`` for any error in the block."""
    # by its path PIL maps an uncompressed TIFF into memory, with width and height exchanged where EXIF turns it
    try:
        with _WITHOUT_WARNINGS, ExitStack() as files:
            if isinstance(path, ImageContent):
                image = path.opened
            else:
                source: Any = path
                if isinstance(path, StoredImage):
                    source = BytesIO(path.read())
                else:
                    source = files.enter_context(open(_no_device(path), "rb"))
                image = files.enter_context(Image.open(source, formats=_formats()))
            width, height = image.size
            if min(width, height) < 1:
                raise ValueError(f"its size is {width} x {height}")
            if width * height > MAX_PIXELS:
                raise ValueError(f"it has {width} x {height} pixels; at most {MAX_PIXELS:,} are decoded")
            yield image
    except MemoryError:
        raise
    except Exception as error:  # PIL's readers raise anything on a broken file
        raise UnreadableImage(f"image {_shown_path(path)} cannot be {what}: {_why(path, error)}") from error


def _why(path: str | Path | ImageContent, error: Exception) -> str:
    """What is wrong with an image, without its path."""
    if isinstance(error, UnidentifiedImageError):
        return f"it is empty: 0 bytes{_UNKNOWN}" if _is_empty(path) else f"its content is none of the formats{_UNKNOWN}"
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        return f"{type(error).__name__}: {error.strerror}{_IN_TEXT if _is_base64(path) else ''}"
    return f"{type(error).__name__}: {_brief(error)}"


def _is_empty(path: str | Path | ImageContent) -> bool:
    source = path._path if isinstance(path, ImageContent) else path
    try:
        return not (source.read() if isinstance(source, StoredImage) else os.path.getsize(source))
    except (OSError, DataError):
        return False


def _is_base64(path: str | Path | ImageContent) -> bool:
    """Whether a record has the image itself where its path is expected."""
    return _BASE64.search(str(path)) is not None


def _shown_path(path: str | Path | ImageContent) -> str:
    text = str(path)
    found = _BASE64.search(text)
    return _brief(text) if found is None else f"{found[0][: _LONG // 8]} ... ({len(text):,} characters)"


def _brief(text: object) -> str:
    """The beginning and the end of a long one: a record may have anything where a path is expected."""
    shown = str(text)
    return shown if len(shown) <= _LONG else f"{shown[: _LONG // 2]} ... {shown[-_LONG // 4 :]}"


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
        found = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # damaged EXIF data is no reason to leave out the picture
        return 1
    return found if found in _TURNS else 1


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
