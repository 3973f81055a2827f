"""A file at a url: its size and version, and a copy of it, by the file systems of ``fsspec``.

What they leave open is decided here. A transfer that ended early is continued only where the server answers with the
rest of the file, which overlaps what is here by some bytes; otherwise it begins again. After it, the server must still
have the version that was listed. So a copy is never put together from two files, or from a file and the page of an
error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from unigen_ds.core.errors import DataError
from unigen_ds.data.sources.shards.spool import DataShard, Missing
from unigen_ds.data.sources.unpacked import needed
from unigen_ds.system.files import quick_digest

_T = TypeVar("_T")
_BLOCK = 8 << 20
DIGESTED = 2
"""MiB of a local shard, at its beginning and its end, by which it is recognised: there may be thousands of shards."""
_OVERLAP = 4096
"""Bytes that a continued transfer reads again, to compare them."""
_SILENCE_S = 60.0
"""Seconds without a byte, or without a connection, after which a transfer over HTTP is interrupted."""
_PAGE = re.compile(rb"\s*<(!doctype\s+html|html)\b", re.IGNORECASE)


def filesystem_of(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The file system of a url, and its path there. Raises ``DataError`` where a package is missing."""
    fsspec = needed("fsspec.core", f"the url {url}")
    settings = dict(options)
    if url.startswith("http"):
        aiohttp = needed("aiohttp", f"the url {url}")
        limits = aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE_S, sock_read=_SILENCE_S)
        settings.setdefault("client_kwargs", {"timeout": limits})
    try:
        filesystem, path = fsspec.url_to_fs(url, **settings)
    except (ImportError, ValueError) as error:  # a package of the protocol, or no such protocol
        raise DataError(
            f"{url}: {error}", remedy="install the package that it names, or use another protocol"
        ) from error
    return filesystem, str(path)


def protocols(filesystem: Any) -> Sequence[str]:
    """Return the names of a file system."""
    names = filesystem.protocol
    return (names,) if isinstance(names, str) else tuple(names)


def looked_at(filesystem: Any, path: str) -> tuple[int | None, str | None]:
    """Size and version of a file, as far as its server has them.

    Raises ``Missing`` where it does not exist or may not be read.
    """
    info = refused(lambda: filesystem.info(path))
    if "file" in protocols(filesystem):
        return info["size"], quick_digest(Path(path), blocks=DIGESTED)
    return info.get("size"), _version(info)


def _version(info: Mapping[str, Any]) -> str | None:
    """What changes with a file's content, of the facts that its server has."""
    lfs = info.get("lfs")
    digest = lfs.get("sha256") if isinstance(lfs, Mapping) else getattr(lfs, "sha256", None)
    names = ("blob_id", "ETag", "etag", "md5Hash", "checksum", "LastModified", "Last-Modified", "mtime")
    version = next((value for value in (digest, *map(info.get, names)) if value), None)
    return None if version is None else str(version)


def copy_of(shard: DataShard, target: Path, options: Mapping[str, Any]) -> None:
    """The file of a shard as ``target``, from where an earlier attempt ended.

    Raises ``Missing``, or ``OSError`` and what the file system raises where another attempt may succeed.
    """
    filesystem, path = filesystem_of(shard.url, options)
    begin = _usable(shard, target)
    with _opened(filesystem, path, begin) as (stream, first), target.open("r+b" if begin else "wb") as copy:
        if first is not None:
            copy.seek(first)
            if _exactly(stream, begin - first) != copy.read(begin - first):
                copy.truncate(0)
                raise OSError("the server continues it with other bytes than it began with")
        else:
            copy.truncate(0)
        while block := stream.read(_BLOCK):
            copy.write(block)
        headers = getattr(getattr(stream, "r", None), "headers", {})  # of a response over HTTP
    if str(headers.get("Content-Type", "")).startswith("text/html"):
        with target.open("rb") as copy:
            is_page = _PAGE.match(copy.read(512))
        if is_page:
            target.write_bytes(b"")
            raise OSError("the server answers with an HTML page in place of the file")
    listed, now = (shard.size, shard.version), looked_at(filesystem, path)
    if now != listed:
        target.write_bytes(b"")
        raise OSError(f"it changed: size and version are {now}, and were {listed} when the shards were listed")


def _usable(shard: DataShard, target: Path) -> int:
    """Bytes of the target that may be continued: none of a file without a version, or of one that is too long."""
    begin = target.stat().st_size if target.exists() else 0
    return 0 if shard.version is None or (shard.size is not None and begin > shard.size) else begin


@contextmanager
def _opened(filesystem: Any, path: str, begin: int) -> Iterator[tuple[Any, int | None]]:
    """A stream, and its first byte where it continues a file of ``begin`` bytes; None: it begins with the file."""
    first = max(begin - _OVERLAP, 0)
    if {"http", "https"} & set(protocols(filesystem)):
        ranged = {"Range": f"bytes={first}-"} if begin else {}
        headers = {**filesystem.kwargs.get("headers", {}), "Accept-Encoding": "identity", **ranged}
        # in one request, also from the middle: fsspec would accept a page of an error as a block of the file
        with refused(lambda: filesystem.open(path, "rb", block_size=0, size=1, headers=headers)) as stream:
            response = stream.r
            if response.status not in (200, 206):
                raise OSError(f"the server answers with status {response.status}")
            if not begin or response.status == 200:
                yield stream, None
                return
            if not str(response.headers.get("Content-Range", "")).startswith(f"bytes {first}-"):
                raise OSError("the server answers with another range of bytes than it was asked for")
            yield stream, first
        return
    whole = {"block_size": 0} if not begin and "hf" in protocols(filesystem) else {"block_size": _BLOCK}
    with refused(lambda: filesystem.open(path, "rb", **whole)) as stream:
        if begin:
            stream.seek(first)
        yield stream, first if begin else None


def _exactly(stream: Any, number: int) -> bytes:
    """So many bytes, or all that are left: a stream may return fewer at a time."""
    content = b""
    while len(content) < number and (block := stream.read(number - len(content))):
        content += block
    return content


def refused(act: Callable[[], _T]) -> _T:
    """``act()``. Raises ``Missing`` where the file does not exist or may not be read, so that nothing is tried again.

    The HTTP file system reports a lost connection as a missing file, too; only its cause shows which it is.
    """
    try:
        return act()
    except Exception as error:
        cause = error.__cause__ or error
        response = getattr(cause, "response", None)
        status = getattr(cause, "status", None) or getattr(response, "status_code", None)
        if status in (401, 403) or isinstance(error, PermissionError):
            raise Missing("access is refused") from error
        if status in (404, 410) or isinstance(cause, FileNotFoundError):
            raise Missing("it does not exist") from error
        raise
