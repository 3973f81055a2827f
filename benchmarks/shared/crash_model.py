"""What may be on a disk after a power cut: recorded changes of files, replayed up to a moment and then partly lost.

In: the log of ``file_recorder.c``, and the folder as it was before. Out: trees (path below the folder -> bytes, None
for a folder) that a file system may show at the next start.

The model. At the moment of the power cut the first ``t`` recorded changes were made. What is certain:

* **Data** of a file is on disk once an fsync or fdatasync of that file has returned after the write. What was written
  later may be there or not, each file on its own, in any order: nothing of it; a prefix; whole blocks of 4 KiB or of
  512 B, others missing; the whole size with zeros. Bytes before that are never lost, and never changed by a later
  write's tear (a sector is written whole).
* **Names** (create, rename, unlink, mkdir, rmdir) and truncations. ``ordered``, as ext4 (data=ordered, delayed
  allocation) and XFS have it: all are in one journal, so afterwards a prefix of them is there, at least those before
  the last fsync that had to write the journal (of a file with data or a size that was not on disk, or of a folder that
  had changed). ``strict``, what POSIX alone promises: a prefix for each folder on its own, at least those before the
  last fsync of that folder; an fsync of a file does not include its name.

A rename is made as a whole or not at all in both. Not in the model: disks that lie about flushes, sectors that are
half written, damage of what was on disk before.
"""

from __future__ import annotations

import random
import struct
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

KINDS = ("", "create", "truncate", "write", "fsync", "mkdir", "rename", "unlink", "rmdir", "link", "symlink",
         "mapping", "unsupported")  # fmt: skip
_HEAD = struct.Struct("<qqqiiii")
Tree = dict[str, bytes | None]
READ_ONLY = ".mapped"
"""Ends the name of a file whose shared mapping is read alone: a merge's, which is deleted (``system/outputs.py``)."""
ROOT = 0
"""The node of the recorded folder."""


@dataclass(frozen=True)
class Change:
    """One recorded operation. Nodes are numbers of files and folders, names are in a folder's node."""

    number: int
    kind: str
    path: str
    """Below the recorded folder."""
    other: str = ""
    node: int = -1
    folder: int = -1
    name: str = ""
    to: int = -1
    to_name: str = ""
    offset: int = 0
    """Of a truncation the size."""
    data: bytes = b""

    def __str__(self) -> str:
        return f"{self.number} {self.kind} {self.path} {self.other}".rstrip()


class Recording:
    """The changes of a log, with the nodes that they belong to."""

    def __init__(self, root: Path, log: Path, before: Mapping[str, int], tree: Tree) -> None:
        """``before``: path -> inode of what was in ``root``, whose content is ``tree``."""
        self.changes: list[Change] = []
        self.names: dict[int, dict[str, int]] = {ROOT: {}}
        """Of the start: folder -> name -> node."""
        self.content: dict[int, bytes] = {}
        """Of the start: file -> bytes."""
        self._inodes: dict[int, int] = {}
        self._count = 1
        for path in sorted(tree):
            node = self._new(before[path])
            folder, name = self._locate(self.names, path)
            self.names[folder][name] = node
            if tree[path] is None:
                self.names[node] = {}
            else:
                self.content[node] = tree[path] or b""
        self._bind(root, log)
        self.folders: defaultdict[int, list[int]] = defaultdict(list)
        """folder -> numbers of its fsyncs."""
        self.of_file: defaultdict[int, list[Change]] = defaultdict(list)
        """file -> its writes and truncations."""
        self.flushes: defaultdict[int, list[int]] = defaultdict(list)
        """file -> numbers of its fsyncs."""
        self.in_journal = [0]
        """For each ``t``: how many changes are in the journal at least."""
        first_changes: dict[int, int] = {}
        dirty: set[int] = set()
        for change in self.changes:
            number = self.in_journal[-1]
            if change.kind == "fsync":
                (self.folders if change.node in self._folders else self.flushes)[change.node].append(change.number)
                number = max(number, change.number if change.node in dirty else first_changes.pop(change.node, 0))
                dirty.discard(change.node)
            elif change.kind in ("write", "truncate"):
                self.of_file[change.node].append(change)
                dirty.add(change.node)
            else:
                for node in {change.node, change.folder, change.to} - {-1}:
                    first_changes[node] = change.number + 1
            self.in_journal.append(number)

    def _new(self, inode: int) -> int:
        node, self._count = self._count, self._count + 1
        self._inodes[inode] = node
        return node

    def _locate(self, names: dict[int, dict[str, int]], path: str) -> tuple[int, str]:
        *folders, name = path.split("/")
        node = ROOT
        for folder in folders:
            node = names[node][folder]
        return node, name

    def _bind(self, root: Path, log: Path) -> None:
        """Read the log with the names as they were at each change."""
        names = {folder: dict(inside) for folder, inside in self.names.items()}
        content, at = log.read_bytes() if log.exists() else b"", 0
        while at < len(content):
            inode, offset, size, number, _, one, two = _HEAD.unpack_from(content, at)
            at += _HEAD.size
            kind = KINDS[number]
            path, at = content[at : at + one].decode(), at + one
            other, at = content[at : at + two].decode(), at + two
            data = b""
            if kind == "write":
                data, at = content[at : at + size], at + size
            path = path.removeprefix(f"{root}/").removeprefix(str(root))
            fields: dict[str, int | str] = {}
            if kind in ("create", "mkdir"):
                node = self._new(inode)
                folder, name = self._locate(names, path)
                fields = {"node": node, "folder": folder, "name": name}
                names[folder][name] = node
                if kind == "mkdir":
                    names[node] = {}
            elif kind in ("write", "truncate", "fsync"):
                fields = {"node": ROOT if not path else self._inodes[inode]}
            elif kind in ("unlink", "rmdir"):
                folder, name = self._locate(names, path)
                fields = {"node": names[folder].pop(name), "folder": folder, "name": name}
            elif kind == "rename":
                other = other.removeprefix(f"{root}/")
                folder, name = self._locate(names, path)
                to, to_name = self._locate(names, other)
                fields = {"node": names[folder].pop(name), "folder": folder, "name": name, "to": to, "to_name": to_name}
                names[to][to_name] = int(fields["node"])
            elif kind != "mapping" or not path.endswith(READ_ONLY):
                raise NotImplementedError(f"{kind} {path} {other}: the model has no such change")
            change = Change(len(self.changes), kind, path, other, offset=offset, data=data, **fields)  # type: ignore[arg-type]
            self.changes.append(change)
        self._folders = set(names)

    def whole(self, t: int) -> Tree:
        """What programs see after ``t`` changes, when nothing is lost."""
        names = self._names(t, lambda change: True)
        return self._tree(names, lambda node: self._whole_file(node, t))

    def _whole_file(self, node: int, t: int) -> bytes:
        return bytes(_apply(bytearray(self.content.get(node, b"")), self._until(node, t)))

    def _until(self, node: int, t: int) -> list[Change]:
        changes = self.of_file.get(node, [])
        return changes[: bisect_left(changes, t, key=lambda change: change.number)]

    def _names(self, t: int, is_there) -> dict[int, dict[str, int]]:  # type: ignore[no-untyped-def]
        names = {folder: dict(inside) for folder, inside in self.names.items()}
        for change in self.changes[:t]:
            if change.folder < 0 or not is_there(change):
                continue
            inside = names.setdefault(change.folder, {})
            if change.kind in ("create", "mkdir"):
                inside[change.name] = change.node
            elif change.kind == "rename":
                if inside.pop(change.name, None) is not None:
                    names.setdefault(change.to, {})[change.to_name] = change.node
            else:
                inside.pop(change.name, None)
        return names

    def _tree(self, names, content) -> Tree:  # type: ignore[no-untyped-def]
        tree: Tree = {}

        def walk(folder: int, path: str) -> None:
            for name, node in names.get(folder, {}).items():
                if node in self._folders:
                    tree[f"{path}{name}"] = None
                    walk(node, f"{path}{name}/")
                else:
                    tree[f"{path}{name}"] = content(node)

        walk(ROOT, "")
        return tree

    def after_cut(self, t: int, draw: random.Random) -> tuple[Tree, str]:
        """One tree that may be there after a power cut at ``t``, and how it was drawn."""
        strict = draw.random() < 0.5
        if strict:
            cuts: dict[int, int] = {}
            cut_folders = set[int]()
            share = draw.random()

            def is_there(change: Change) -> bool:
                folders = {change.folder, change.to} - {-1}
                for folder in folders - cuts.keys():
                    least = self._last(self.folders.get(folder, []), t)
                    cuts[folder] = t if draw.random() < share else draw.choice((least, draw.randint(least, t)))
                if any(change.number < self._last(self.folders.get(folder, []), t) for folder in folders):
                    return True
                if folders & cut_folders or any(change.number >= cuts[folder] for folder in folders):
                    cut_folders.update(folders)
                    return False
                return True

            names, how = self._names(t, is_there), f"strict, {share:.2f} of the folders whole"
        else:
            least = self.in_journal[t]
            cut = draw.choice((least, t, draw.randint(least, t)))
            names = self._names(t, lambda change: change.number < cut)
            how = f"ordered, names up to {cut} of {least}-{t}"
        style = draw.choice(("nothing", "all", "prefix", 4096, 512, "zeros", "mixed"))

        def content(node: int) -> bytes:
            last_flush = self._last(self.flushes.get(node, []), t)
            changes = self._until(node, t)
            num_safe = bisect_left(changes, last_flush, key=lambda change: change.number)
            base = _apply(bytearray(self.content.get(node, b"")), changes[:num_safe])
            loose = changes[num_safe:]
            if not loose:
                return bytes(base)
            last = draw.randint(last_flush, t) if strict else cut
            writes: list[Change] = []
            for change in loose:
                if change.kind == "write":
                    writes.append(change)
                elif change.number < last:
                    base, writes = _apply(base, [*writes, change]), []
                else:
                    break
            one = style if style != "mixed" else draw.choice(("nothing", "all", "prefix", 4096, 512, "zeros"))
            return bytes(_tear(base, writes, one, draw))

        return self._tree(names, content), f"{how}; data: {style}"

    @staticmethod
    def _last(numbers: list[int], t: int) -> int:
        at = bisect_left(numbers, t)
        return numbers[at - 1] if at else 0


def _apply(content: bytearray, changes: list[Change]) -> bytearray:
    content = bytearray(content)
    for change in changes:
        end = change.offset + len(change.data)  # a truncation has no data
        if end > len(content):
            content.extend(bytes(end - len(content)))
        if change.kind == "truncate":
            del content[end:]
        else:
            content[change.offset : end] = change.data
    return content


def _tear(base: bytearray, writes: list[Change], style: str | int, draw: random.Random) -> bytearray:
    """``base`` with a part of ``writes``."""
    whole = _apply(base, writes)
    if style == "nothing" or not writes:
        return base
    if style == "all":
        return whole
    if style == "prefix":
        number = draw.randrange(len(writes))
        part = writes[number]
        short = Change(part.number, "write", "", offset=part.offset, data=part.data[: draw.randint(0, len(part.data))])
        return _apply(base, [*writes[:number], short])
    longer = bytearray(base)
    longer.extend(bytes(max(0, len(whole) - len(base))))
    size = len(whole)
    if isinstance(style, int):
        there = -1
        for begin in range(0, len(whole), style):
            if draw.random() < 0.5:
                longer[begin : begin + style] = whole[begin : begin + style]
                there = begin
        size = draw.choice((len(whole), max(len(base), min(len(whole), there + style if there >= 0 else 0))))
    del longer[max(size, len(base)) :]
    return longer


def read_tree(root: Path) -> Tree:
    """A folder's content."""
    return {path.relative_to(root).as_posix(): None if path.is_dir() else path.read_bytes() for path in root.rglob("*")}


def read_inodes(root: Path) -> dict[str, int]:
    return {path.relative_to(root).as_posix(): path.stat().st_ino for path in root.rglob("*")}


def write_tree(root: Path, tree: Tree) -> None:
    """Write a tree into an empty folder."""
    for path, content in sorted(tree.items()):
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)


def below(tree: Tree, folder: str) -> Tree:
    """The part of a tree in ``folder``."""
    return {path[len(folder) + 1 :]: content for path, content in tree.items() if path.startswith(f"{folder}/")}
