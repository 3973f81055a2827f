"""Image files of every mode of PIL, every orientation and many sizes, whole and damaged."""

from __future__ import annotations

import io
import random
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

MODES = (
    "1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "I;16", "F", "La", "RGBa", "RGBX",
)  # fmt: skip
FORMATS = {
    "PNG": ".png", "JPEG": ".jpg", "WEBP": ".webp", "GIF": ".gif", "BMP": ".bmp", "TIFF": ".tif", "PPM": ".ppm",
    "JPEG2000": ".jp2", "AVIF": ".avif", "ICO": ".ico", "TGA": ".tga", "PCX": ".pcx", "SGI": ".sgi", "QOI": ".qoi",
    "EPS": ".eps", "PDF": ".pdf", "IM": ".im", "MSP": ".msp", "XBM": ".xbm", "SPIDER": ".spi", "DDS": ".dds",
}  # fmt: skip
"""What is written; the package reads fewer of them."""
SIZES = [(8, 8), (16, 24), (33, 7), (1, 1), (1, 300), (300, 1), (64, 64)]


def plain(draw: random.Random) -> bytes:
    """A small PNG."""
    stream = io.BytesIO()
    Image.fromarray(_pixels(draw, 8, 8, 3)).save(stream, "PNG")
    return stream.getvalue()


def _pixels(draw: random.Random, width: int, height: int, channels: int) -> Any:
    generator = np.random.default_rng(draw.randrange(2**32))
    colour = generator.integers(0, 256, (1, 1, channels))
    noise = generator.integers(-20, 21, (height, width, channels))
    return np.clip(colour + noise, 0, 255).astype(np.uint8)


def of_mode(draw: random.Random, mode: str, size: tuple[int, int]) -> Image.Image:
    """A picture of one colour with noise."""
    width, height = size
    if mode == "F":
        return Image.fromarray(
            _pixels(draw, width, height, 1)[:, :, 0].astype(np.float32) * draw.choice([1.0, 1e30, float("nan")])
        )
    if mode in ("I", "I;16"):
        values = _pixels(draw, width, height, 1)[:, :, 0].astype(np.uint16) * 257
        return Image.fromarray(values if mode == "I;16" else values.astype(np.int32))
    image = Image.fromarray(_pixels(draw, width, height, 4), "RGBA")
    if mode in ("LAB", "HSV", "PA", "La", "RGBa", "RGBX"):
        bands = len(Image.new(mode, (1, 1)).getbands())
        raw = _pixels(draw, width, height, bands).tobytes()
        return Image.frombytes(mode, size, raw) if mode != "PA" else image.convert("LA").convert("PA")
    return image.convert("RGB").convert(mode) if mode in ("CMYK", "YCbCr", "P", "1") else image.convert(mode)


def wild_picture(draw: random.Random) -> tuple[bytes, str, bool]:
    """Content, suffix, and whether another reader is expected to read it in the same way."""
    if draw.random() < 0.12:
        return special(draw), ".png", False
    for _ in range(20):
        mode, form, size = draw.choice(MODES), draw.choice([*FORMATS]), draw.choice(SIZES)
        stream, options = io.BytesIO(), {}
        image = of_mode(draw, mode, size)
        if draw.random() < 0.3 and form in ("PNG", "JPEG", "WEBP", "TIFF"):
            exif = Image.Exif()
            exif[0x0112] = draw.choice([*range(1, 9), 0, 9, 65535, "x"])
            options["exif"] = exif
        if form in ("GIF", "PNG", "WEBP", "TIFF") and draw.random() < 0.15:
            options |= {"save_all": True, "append_images": [of_mode(draw, mode, size) for _ in range(2)]}
        if form == "GIF" and draw.random() < 0.3:
            options["transparency"] = 0
        try:
            image.save(stream, form, **options)
        except Exception:  # a format has few of the modes
            continue
        if draw.random() < 0.35:
            return broken_picture(draw, stream.getvalue()), FORMATS[form], False
        return stream.getvalue(), FORMATS[form], True
    return plain(draw), ".png", True


def broken_picture(draw: random.Random, content: bytes) -> bytes:
    """Bits changed, or a part missing."""
    data, how = bytearray(content), draw.randrange(5)
    if how == 0:
        return bytes(data[: draw.randrange(len(data))])
    if how == 1:
        return b""
    if how == 2:
        data[draw.randrange(min(len(data), 64))] ^= 1 << draw.randrange(8)
    elif how == 3:
        for _ in range(draw.randrange(1, 5)):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    else:
        at = draw.randrange(len(data))
        data[at : at + 8] = draw.randbytes(8)
    return bytes(data)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _png(side: int, *chunks: bytes) -> bytes:
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + _chunk(b"IEND", b"")


def special(draw: random.Random) -> bytes:
    """A few bytes that claim 10^10 pixels, a comment of 30 MiB in 30 KiB, first bytes alone, or noise."""
    how = draw.randrange(4)
    if how == 0:
        return _png(draw.choice([100_000, 2**31 - 1, 14_000]), _chunk(b"IDAT", zlib.compress(bytes(1000))))
    if how == 1:
        text = _chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(30 << 20), 1))
        return _png(8, text, _chunk(b"IDAT", zlib.compress(bytes(25 * 8))))
    if how == 2:
        return draw.randbytes(draw.randrange(1, 3000))
    return draw.choice([
        b"", b"\0", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"RIFF\0\0\0\0WEBP", b"II*\0", b"BM", b"\0\0\1\0",
        b"%!PS-Adobe-3.0 EPSF-3.0\n", b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    ])  # fmt: skip
