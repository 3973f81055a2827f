"""Files that are written past the page cache: the bytes of any other file, whatever the disk takes at once."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
import xxhash

from unigen_ds.system import outputs


@pytest.mark.parametrize("most", [1 << 30, 4096, 777])
def test_a_direct_file_has_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """``most``: bytes that the disk takes at once; a part of a block cannot be followed by whole blocks."""
    content, write, direct = os.urandom(3 * outputs._DIRECT + 12345), os.write, [0]

    def write_part(descriptor: int, data: memoryview) -> int:
        is_direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        direct[0] += bool(is_direct)
        if is_direct and len(data) % 512:
            raise OSError(errno.EINVAL, "not a whole block")
        return write(descriptor, data[:most])

    monkeypatch.setattr(os, "write", write_part)
    with outputs.HashedFile(tmp_path / "file", direct=True) as stream:
        for begin, stop in ((0, 5), (5, 5), (5, 20 << 20), (20 << 20, len(content))):
            stream.write(content[begin:stop])
            stream.flush()  # as ``torch.save`` does: FSDP's file has an archive for each tensor
    assert (tmp_path / "file").read_bytes() == content and stream.tell() == len(content)
    assert stream.digest == f"{outputs.ALGORITHM}:{xxhash.xxh3_128_hexdigest(content)}"
    assert direct[0] == (3 if most > outputs._DIRECT else 1), "three buffers are written so, or the first part of one"
