"""Whether a file is text that can be read: UTF-8, no byte order mark where a parser would trip over it, not binary."""

from __future__ import annotations

import codecs
from pathlib import Path

_BOM = codecs.BOM_UTF8
_UTF_32 = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def encoding_problem(path: Path, *, bom_allowed: bool = False) -> tuple[str, str] | None:
    """What is wrong with the encoding, from the first bytes, and the command that converts the file; else None.

    UTF-16 without a mark is recognised by its zero bytes, which no JSON, YAML or Python text has.
    """
    with path.open("rb") as stream:
        head = stream.read(64)
    convert = "iconv -f {} -t UTF-8 " + f"{path.name} > utf8{path.suffix}"
    if head.startswith(_UTF_32):
        return "is UTF-32 text, not UTF-8", convert.format("UTF-32")
    if head.startswith(_UTF_16):
        return "is UTF-16 text, not UTF-8", convert.format("UTF-16")
    if b"\0" in head[:4] and len(head) > 1:
        return "is UTF-16 text, not UTF-8", convert.format("UTF-16LE" if head[1:2] == b"\0" else "UTF-16BE")
    if head.startswith(_BOM) and not bom_allowed:
        return "begins with a byte order mark (BOM)", f"sed -i '1s/^\\xEF\\xBB\\xBF//' {path.name}"
    return None
