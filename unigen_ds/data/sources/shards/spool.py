"""Local copies of the shards of a streamed data set: a limited number of bytes is kept at a time.

A shard is one file, fetched whole when one of its records is first needed, and then read at random like any local file;
shards that were used longest ago are removed when another one needs the space. Which ones are here changes no record:
what was removed is fetched again. All processes of a node share the folder. A shard is fetched by the process that
comes first, the others wait; one that is being read is not removed. Both follow from locks of the kernel, so a process
that is killed anywhere leaves neither a lock nor half a file under a shard's name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from unigen_ds.core.errors import DataError
from unigen_ds.data.cache.array_cache import fingerprint
from unigen_ds.data.sources.unpacked import shown as shown
from unigen_ds.data.sources.unpacked import write_where_space
from unigen_ds.system.files import delete_inside
from unigen_ds.system.log import logger

_T = TypeVar("_T")
_UNUSUAL = re.compile(r"[^\w.\-]")
_COPY = re.compile(r"[0-9a-f]{16}-")
_LONGEST_NAME = 100
_LONGEST_WAIT_S = 30.0
_LONGEST_ASKED_S = 600.0
"""Wait that a server may ask for."""


@dataclass(frozen=True)
class DataShard:
    """One file of a streamed data set."""

    name: str
    """How messages call it, and what the fingerprint of the data has: its path below the folder of all."""
    url: str
    """What it is fetched by."""
    size: int | None = None
    """Bytes; None: not known before it is fetched."""
    version: str | None = None
    """Changes with its content (an ETag, a digest); None: nothing of this kind is known."""

    @property
    def facts(self) -> tuple[object, ...]:
        """What the fingerprint of the data has of it."""
        return self.name, self.size, self.version

    @property
    def file_name(self) -> str:
        """Of its copy."""
        return _UNUSUAL.sub("_", self.name.rpartition("/")[2])[-_LONGEST_NAME:] or "records"

    @property
    def copied(self) -> int:
        """Bytes that a copy needs, as far as it is known: a local file is linked."""
        return self.size or 0 if "://" in self.url else 0


class Missing(Exception):
    """A shard that is not where it should be: trying again is of no use."""


class Spool:
    """The folder of the copies.

    Args:
        folder: shared by the processes of a node.
        limit: bytes that are kept; what is being used is never removed, so it may be more for a while.
        attempts: of fetching a shard.
        fetch: copies a shard into a file. What the file has already is the beginning of the shard; it may also be
            replaced by a link. Raises ``Missing``, or anything else where another attempt may succeed.
    """

    def __init__(self, folder: Path, *, limit: int, attempts: int, fetch: Callable[[DataShard, Path], None]) -> None:
        self.folder, self.limit, self.attempts, self._fetch = folder, limit, attempts, fetch
        self._fetched: dict[str, int] = {}
        for part in (self.index_folder, self._shards, self._locks):
            try:
                part.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise DataError(
                    f"the folder {part} for streamed shards cannot be made: {error.strerror}",
                    remedy="cache_dir=FOLDER of the data set: a folder that can be written",
                ) from error

    @property
    def index_folder(self) -> Path:
        """Indexes of shards: they stay when the shards are removed."""
        return self.folder / "index"

    @property
    def _shards(self) -> Path:
        return self.folder / "shards"

    @property
    def _locks(self) -> Path:
        return self.folder / "locks"

    @contextmanager
    def reading(self, shard: DataShard) -> Iterator[Path]:
        """The file of a shard, fetched if it is not here; it is kept until the context ends.

        Raises ``DataError`` where it cannot be fetched.
        """
        name = _key(shard)
        file = self._shards / name / shard.file_name
        while True:
            with self._locked(name, fcntl.LOCK_SH):
                if _is_whole(file, shard):
                    os.utime(file.parent)  # used now
                    yield file
                    return
            self.fetch(shard)

    def fetch(self, shard: DataShard) -> None:
        """Make a copy of a shard where there is none. Raises ``DataError`` where it cannot be fetched."""
        name = _key(shard)
        file = self._shards / name / shard.file_name
        if _is_whole(file, shard):  # without waiting for those who read it
            return
        with self._locked(name, fcntl.LOCK_EX):
            if _is_whole(file, shard):
                return
            if os.path.lexists(file):
                logger().warning("shard %s: its copy %s is damaged, and is fetched again", shard.name, file)
            with suppress(OSError):
                delete_inside(file.parent, self._shards)  # of a process that was killed
            self._make_space(shard)
            file.parent.mkdir(parents=True, exist_ok=True)
            times = self._fetched[name] = self._fetched.get(name, 0) + 1
            if times > 1:
                logger().info("shard %s was removed to make space and is fetched again (time %d)", shard.name, times)
            problem = f"shard {shard.name} cannot be stored in {self.folder}"
            write_where_space(file, shard.copied, lambda target: self._copy(shard, target), problem)

    def _copy(self, shard: DataShard, target: Path) -> None:
        """``fetch`` into an empty file, with several attempts."""

        def size() -> int:
            return target.stat().st_size if target.exists() else 0

        def act() -> None:
            self._fetch(shard, target)
            if shard.size is not None and size() != shard.size:
                raise OSError(f"it ends after {size():,} of {shard.size:,} bytes")

        what = f"fetching shard {shard.name} from {shard.url}"
        attempted(what, self.attempts, act, progress=lambda: f", after {size():,} bytes")

    def _make_space(self, shard: DataShard) -> None:
        """Remove the copies that were used longest ago, as far as the limit requires. Called with the shard's lock."""
        needed = shard.copied
        if needed > self.limit:
            raise DataError(
                f"shard {shard.name} has {shown(needed)}, and streaming.cache_gib keeps {shown(self.limit)}",
                remedy="a larger streaming.cache_gib, or smaller shards",
            )
        copies = sorted(_copies(self._shards))
        total = sum(size for _, size, _ in copies)
        for _, size, folder in copies:
            if total + needed <= self.limit:
                break
            if folder.name != _key(shard) and self._removed(folder):
                total -= size

    def _removed(self, folder: Path) -> bool:
        """Remove a copy; False: somebody reads it, or fetches it."""
        with self._locked(folder.name, fcntl.LOCK_EX | fcntl.LOCK_NB) as locked:
            if locked:
                with suppress(OSError):
                    delete_inside(folder, self._shards)
            return locked

    @contextmanager
    def _locked(self, name: str, kind: int) -> Iterator[bool]:
        """A lock of the kernel for a shard; its value: whether it is held. It ends with the process."""
        with (self._locks / name).open("a") as stream:
            try:
                fcntl.flock(stream.fileno(), kind)
            except BlockingIOError:
                yield False
                return
            except OSError as error:
                raise DataError(
                    f"the folder {self.folder} for streamed shards has no locks: {error.strerror}",
                    remedy="cache_dir=FOLDER of the data set: a folder of a local disk",
                ) from error
            try:
                yield True
            finally:  # explicitly: a process that was started meanwhile has the same open file
                fcntl.flock(stream.fileno(), fcntl.LOCK_UN)


def _key(shard: DataShard) -> str:
    """A name for its copy: that of another version of the shard is another one."""
    facts = shard.facts if shard.version else (shard.url, *shard.facts)
    return f"{fingerprint(*facts)[:16]}-{shard.file_name}"


def _is_whole(file: Path, shard: DataShard) -> bool:
    """Whether a copy is there, as far as its size shows it."""
    try:
        status = file.stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and shard.size in (None, status.st_size)


def _copies(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """When each copy was used last, its bytes, and its folder. What has another name is a user's."""
    for path in filter(lambda path: _COPY.match(path.name), folder.iterdir()):
        with suppress(OSError):  # removed meanwhile
            yield path.stat().st_mtime, sum(file.lstat().st_size for file in path.rglob("*")), path


def attempted(what: str, attempts: int, act: Callable[[], _T], *, progress: Callable[[], str] = str) -> _T:
    """``act()``, again after an error, with a message that counts. ``progress``: what it has done so far.

    Raises ``DataError`` after the last attempt, or at once for ``Missing``.
    """
    for attempt in range(1, attempts + 1):
        try:
            return act()
        except DataError:
            raise
        except Missing as error:
            raise DataError(f"{what}: {error}", remedy="check its name, and who may read it") from error
        except Exception as error:  # every protocol has errors of its own
            failure = error
            if getattr(failure, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                raise
            text = str(failure).splitlines()
            problem = (f"{text[0]}" if text else type(failure).__name__) + progress()
            if attempt == attempts:
                raise DataError(
                    f"{what} failed in {attempts} attempt{'s' * (attempts > 1)}: {problem}",
                    remedy="check the network and the shard, then continue with --resume: nothing of the run is lost",
                ) from failure
        wait = max(min(2.0 ** (attempt - 1), _LONGEST_WAIT_S), _asked_wait(failure))
        logger().warning(
            "%s: attempt %d of %d failed (%s); the next one follows in %g s", what, attempt, attempts, problem, wait
        )
        time.sleep(wait)
    raise AssertionError("attempts is at least 1")


def _asked_wait(error: Exception) -> float:
    """Seconds that a server asks for (the header Retry-After of HTTP), at most ten minutes; 0: it asks for none."""
    for one in (error, error.__cause__):
        headers = getattr(one, "headers", None) or getattr(getattr(one, "response", None), "headers", None) or {}
        text = str(headers.get("Retry-After", ""))
        if text.isdecimal():
            return min(float(text), _LONGEST_ASKED_S)
    return 0.0
