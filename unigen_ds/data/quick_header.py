"""Size and mode of a plain JPEG or PNG file from its first bytes: a tenth of the time that PIL needs to open it.

Only what PIL reads in the same way, whatever comes later in the file: a JPEG without EXIF, XMP or several pictures, a
PNG of 8 bits without palette, transparent colour or text before its pixels. For everything else, and for whatever looks
wrong, the answer is None, and PIL decides (``image_files.py``).
"""

from __future__ import annotations

import zlib

FIRST_BYTES = 8192
"""Of a file: enough for the header of a JPEG with a colour profile."""
_LARGEST = 1 << 25
"""Pixels above which PIL itself has rules."""
_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
_START_OF_FRAME = (0xC0, 0xC1, 0xC2)
_START_OF_SCAN, _QUANTIZATION = 0xDA, 0xDB
_SKIPPED = (0xC4, 0xDD, 0xFE)
"""Huffman tables, restart interval, comment."""
_JPEG_MODES = {1: "L", 3: "RGB", 4: "CMYK"}
_PNG_MODES = {0: "L", 2: "RGB", 4: "LA", 6: "RGBA"}
_BEFORE_PIXELS = {b"gAMA": 4, b"pHYs": 9, b"sRGB": 1}
"""Chunk -> its length."""

Header = tuple[int, int, str]
"""Width, height and PIL's name of the mode."""


def quick_header(first: bytes) -> Header | None:
    """Of a file that begins with ``first``; None: PIL must look at it."""
    if first.startswith(_JPEG):
        return _jpeg(first)
    if first.startswith(_PNG):
        return _png(first)
    return None


def _jpeg(first: bytes) -> Header | None:
    at, found, end = 2, None, len(first)
    while at + 4 <= end and first[at] == 0xFF:
        marker, length = first[at + 1], (first[at + 2] << 8) | first[at + 3]
        begin, stop = at + 4, at + 2 + length
        if length < 2 or stop > end:
            return None
        if marker in _SKIPPED:  # first, because most segments are
            pass
        elif marker == _START_OF_SCAN:
            return found
        elif marker in _START_OF_FRAME:
            if found is not None or length < 8:
                return None
            found = _frame(first[begin:stop])
            if found is None:
                return None
        elif marker == _QUANTIZATION:
            if (length - 2) % 65 or max(first[begin:stop:65], default=0) > 15:
                return None
        elif not _plain_application(marker, first[begin:stop]):
            return None
        at = stop
    return None


def _frame(segment: bytes) -> Header | None:
    height, width, layers = (segment[1] << 8) | segment[2], (segment[3] << 8) | segment[4], segment[5]
    plain = segment[0] == 8 and len(segment) == 6 + 3 * layers and layers in _JPEG_MODES
    return (width, height, _JPEG_MODES[layers]) if plain and 0 < width * height <= _LARGEST else None


def _plain_application(marker: int, segment: bytes) -> bool:
    """Whether it is an application's segment without anything about size, orientation or further pictures."""
    if marker == 0xE0:
        return segment.startswith(b"JFIF\0") and len(segment) >= 14
    if marker == 0xE2:
        return segment.startswith(b"ICC_PROFILE\0") and len(segment) >= 14
    return marker == 0xEE and segment.startswith(b"Adobe") and len(segment) >= 12


def _png(first: bytes) -> Header | None:
    at, found = len(_PNG), None
    while at + 8 <= len(first):
        length, kind = int.from_bytes(first[at : at + 4], "big"), first[at + 4 : at + 8]
        if kind == b"IDAT":
            return found
        stop = at + 12 + length
        if stop > len(first) or int.from_bytes(first[stop - 4 : stop], "big") != zlib.crc32(first[at + 4 : stop - 4]):
            return None
        if kind == b"IHDR" and found is None and length == 13:
            width, height = (int.from_bytes(first[at + 8 + k : at + 12 + k], "big") for k in (0, 4))
            depth, colours, *rest = first[at + 16 : at + 21]
            if depth != 8 or colours not in _PNG_MODES or rest[:2] != [0, 0] or not 0 < width * height <= _LARGEST:
                return None
            found = (width, height, _PNG_MODES[colours])
        elif _BEFORE_PIXELS.get(kind) != length or found is None:
            return None
        at = stop
    return None
