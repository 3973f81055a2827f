"""An image -> the size in its header -> the decoded picture, turned upright -> a tensor in [-1, 1] -> flat patches.

An image is a path, or inside of another file (``StoredImage``). Everything that a file may be and is not read as is
an ``UnreadableImage`` with the reason. The size rule is BAGEL's: the longer side at most ``max_size``, the shorter at
least ``min_size`` (the upper limit wins where both cannot hold), both multiples of ``stride``. Only ``size`` is needed
to plan a sequence, so a data set is indexed without decoding a picture. Resizing is PIL's bicubic on uint8, once.
"""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import IO, Annotated, Literal

import numpy as np
import torch
import xxhash
from annotated_types import Ge
from numpy.typing import NDArray
from PIL import ExifTags, Image, PngImagePlugin, UnidentifiedImageError
from torch import Tensor

from unigen_ds.config.registry import TRANSFORMS, checked
from unigen_ds.core.errors import ConfigError, DataError

warnings.filterwarnings("ignore", module=r"PIL\.")
"""What PIL has to say about a file's details; an image that it cannot read is an error."""
FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO", "TGA", "PCX",
           "SGI", "QOI", "PSD")  # fmt: skip
"""What is opened, whatever the file is called. PIL has more: an EPS, for one, is drawn by starting Ghostscript."""
MAX_PIXELS = 178_956_970
"""Pixels of an image at most, checked before any is decoded: a small file may claim a size that fills the memory."""
_DEEP = ("I;16", "I;16L", "I;16B", "I;16N")
_TURNS = dict(enumerate((
    Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.ROTATE_180, Image.Transpose.FLIP_TOP_BOTTOM,
    Image.Transpose.TRANSPOSE, Image.Transpose.ROTATE_270, Image.Transpose.TRANSVERSE, Image.Transpose.ROTATE_90,
), start=2))  # fmt: skip
"""EXIF orientation -> what brings the picture upright."""
if PngImagePlugin.MAX_TEXT_CHUNK == 1 << 20:  # PIL's, which refuses pictures of the web; a user's own number stays
    PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = 100 << 20


@dataclass(frozen=True)
class Span:
    path: Path
    offset: int
    length: int

    def read(self) -> bytes:
        """Its bytes. Raises ``DataError`` where the file was removed or shortened after it was indexed."""
        try:
            with self.path.open("rb") as stream:
                content = os.pread(stream.fileno(), self.length, self.offset)
        except OSError as error:
            raise lost_file_error(self.path, error.strerror) from error
        if len(content) != self.length:
            raise lost_file_error(self.path, f"it ends at byte {self.offset + len(content)}, before one of its records")
        return content


def lost_file_error(path: Path, why: str | None) -> DataError:
    """Return the error for a data file that was there when it was indexed."""
    return DataError(
        f"data file {path} can no longer be read: {why}",
        remedy="a run reads its data files until it ends: restore the file, then continue with --resume",
    )


class StoredImage(str):
    """An image inside of another file: a value of a table, a member of a tar, base64 in a text. It is used where an
    image's path is. As text it names its position (``train.parquet row 9: image``); its bytes are read when somebody
    opens it. A copy in another process is the text alone: what was read is not sent along with a message about it.
    """

    _data: bytes | Span

    def __new__(cls, name: str, data: bytes | Span) -> StoredImage:
        image = super().__new__(cls, name)
        image._data = data
        return image

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)

    def read(self) -> bytes:
        return self._data.read() if isinstance(self._data, Span) else self._data

    @cached_property
    def digest(self) -> str:
        """XXH3-128 of these bytes, hex."""
        return xxhash.xxh3_128(self.read()).hexdigest()


class ImageContent:
    """An image file that is read once, has its header read once, and its pixels decoded once, later."""

    def __init__(self, path: str | Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def header(self) -> Image.Image:
        """The image, not decoded. Raises what PIL raises."""
        with _bytes_of(self.path) as stream:
            return _open(BytesIO(stream.read()))

    @cached_property
    def picture(self) -> Image.Image:
        return _decode(self)


AnyImage = str | Path | ImageContent


class UnreadableImage(DataError):
    """A picture, the one at ``path``, cannot be opened or decoded. The loader turns it into a counted skip."""

    def __init__(self, problem: str, *, path: str = "", **advice: str | None) -> None:
        super().__init__(problem, **advice)
        self.path = path


@dataclass(frozen=True)
class ImageHeader:
    size: tuple[int, int] | None
    """(width, height), upright; None: not readable."""
    error: str = ""
    content: ImageContent | None = field(default=None, compare=False, repr=False)
    """What it was read from, where that was the whole file."""


def image_header(path: AnyImage) -> ImageHeader:
    """Return the size of an image from its header alone. An unreadable image does not raise."""
    try:
        with _open_header(path, "read") as image:
            size = image.size if _orientation(image) < 5 else (image.size[1], image.size[0])
            return ImageHeader(size, content=path if isinstance(path, ImageContent) else None)
    except UnreadableImage as error:
        return ImageHeader(None, error.problem)


def open_image(path: AnyImage) -> Image.Image:
    """The picture, upright, grey in 8 bits. Raises ``UnreadableImage`` naming the path, also for a truncated file."""
    return path.picture if isinstance(path, ImageContent) else _decode(path)


def _decode(path: AnyImage) -> Image.Image:
    with _open_header(path, "decoded") as image:
        orientation = _orientation(image)
        image.load()
        picture: Image.Image = image
        if image.mode in _DEEP or (image.mode == "I" and image.format in ("PNG", "PPM")):  # grey of 16 bits
            # the upper 8 bits, as PIL reads colours of 16 bits; it clips grey to 255, which is white almost everywhere
            picture = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8))
        return picture.transpose(_TURNS[orientation]) if orientation in _TURNS else picture


@contextmanager
def _open_header(path: AnyImage, what: str) -> Iterator[Image.Image]:
    """The image, not decoded. Raises ``UnreadableImage``, also for errors of the block: it cannot be ``what``."""
    try:
        if isinstance(path, ImageContent):
            yield path.header
        else:
            with _bytes_of(path) as source, _open(source) as image:
                yield image
    except MemoryError:
        raise
    except Exception as error:  # PIL's readers raise anything on a broken file
        reason = f"{type(error).__name__}: {_shorten(error)}"
        if isinstance(error, UnidentifiedImageError):
            reason = f"its content is none of the formats (read are {', '.join(FORMATS)})"
        elif isinstance(error, OSError) and error.errno is not None and error.strerror:
            reason = f"{type(error).__name__}: {error.strerror}"
        raise UnreadableImage(f"image {_shorten(path)} cannot be {what}: {reason}", path=str(path)) from error


def _open(source: IO[bytes]) -> Image.Image:
    Image.init()
    image = Image.open(source, formats=[name for name in FORMATS if name in Image.OPEN])  # that this PIL has
    width, height = image.size
    if min(width, height) < 1:
        raise ValueError(f"its size is {width} x {height}")
    if width * height > MAX_PIXELS:
        raise ValueError(f"it has {width} x {height} pixels; at most {MAX_PIXELS:,} are decoded")
    return image


def _bytes_of(path: str | Path) -> IO[bytes]:
    """Raises ``ValueError`` where reading may never end: a pipe, a socket, a device."""
    if isinstance(path, StoredImage):
        return BytesIO(path.read())
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ValueError("it is a pipe, a socket or a device, not a file")
    return open(path, "rb")


def _shorten(value: object) -> str:
    """The beginning and the end of a long text: a record may have anything where a path is expected."""
    text = str(value)
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-100:]}"


def _orientation(image: Image.Image) -> int:
    """EXIF's, 1 to 8, from the header; 1 for a TIFF."""
    if image.format == "TIFF" or (image.format == "PNG" and not {"exif", "Raw profile type exif"} & set(image.info)):
        return 1  # a PNG would be decoded to look for EXIF data after its pixels
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged EXIF data is no reason to leave out the picture
        return 1
    return orientation if orientation in _TURNS else 1


def flatten(image: Image.Image, *, white: bool) -> Image.Image:
    """``image`` without transparency. ``white``: as BAGEL's ``pil_img2rgb``: RGBA, and images with a transparent
    colour, on white; of others alpha is left out. Else as nanoVLM: ``convert("RGB")``, which leaves out all of it.
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
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, (255, 255, 255, 255)), rgba)
    return image.convert(mode)


@TRANSFORMS.register_module()
class ImageTransform:
    """Resize by the rule above and normalise to [-1, 1].

    Args:
        max_size: longest side in pixels; within the model's position table.
        min_size: shortest side in pixels, where ``max_size`` allows it; at most ``max_size``.
        stride: both sides are multiples of so many pixels; a multiple of the ViT's patch, or of the pixels under one
            latent patch.
        mode: ``RGB`` (3 channels) or ``L`` (grey, 1 channel).
    """

    @checked()
    def __init__(
        self,
        max_size: Annotated[int, Ge(1)],
        min_size: Annotated[int, Ge(1)],
        stride: Annotated[int, Ge(1)],
        mode: Literal["RGB", "L"] = "RGB",
    ) -> None:
        if min_size > max_size or stride > max_size:
            problem = f"image transform of max_size {max_size}, min_size {min_size}, stride {stride}"
            raise ConfigError(problem, allowed="min_size and stride of at most max_size")
        self.max_size, self.min_size, self.stride, self.mode = max_size, min_size, stride, mode

    @property
    def channels(self) -> int:
        return 3 if self.mode == "RGB" else 1

    @property
    def largest_side(self) -> int:
        """The longest side that ``size`` can return."""
        return _round_side(self.max_size, self.stride)

    @property
    def fingerprint(self) -> str:
        """Changes whenever a size or a pixel may change."""
        return f"{type(self).__name__}/{self.max_size}/{self.min_size}/{self.stride}/{self.mode}"

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return (width, height) after the transform, by the rule at the top of this file."""
        scale = max(min(self.max_size / max(width, height), 1.0), self.min_size / min(width, height))
        width, height = _round_side(width * scale, self.stride), _round_side(height * scale, self.stride)
        if max(width, height) > self.max_size:
            scale = self.max_size / max(width, height)
            width, height = _round_side(width * scale, self.stride), _round_side(height * scale, self.stride)
        return width, height

    def resize(self, image: Image.Image) -> Image.Image:
        """The picture in ``mode`` and at its final size. It may be called by several threads."""
        image = on_white(image, self.mode)
        return image.resize(self.size(*image.size), Image.Resampling.BICUBIC)

    def __call__(self, image: Image.Image) -> Tensor:
        """[C, H, W] float32 in [-1, 1]."""
        return normalize(np.array(self.resize(image), dtype=np.uint8))


def _round_side(side: float, stride: int) -> int:
    # to whole pixels first, as the public code does: 23.6 pixels at stride 16 become 32, not 16
    return max(stride, round(round(side) / stride) * stride)


def normalize(pixels: NDArray[np.uint8]) -> Tensor:
    """[H, W, C] or [H, W] bytes -> [C, H, W] float32 in [-1, 1], in memory as [H, W, C]."""
    channels_last = torch.from_numpy(pixels).reshape(*pixels.shape[:2], -1).float()
    return channels_last.div_(255).sub_(0.5).div_(0.5).permute(2, 0, 1)


def patchify(image: Tensor, patch_size: int) -> Tensor:
    """[C, H, W] -> [H/p * W/p, p * p * C]: patches row by row; (row, column, channel) inside a patch."""
    (channels, height, width), p = image.shape, patch_size
    blocks = image.reshape(channels, height // p, p, width // p, p)
    return blocks.permute(1, 3, 2, 4, 0).reshape(-1, p * p * channels)
