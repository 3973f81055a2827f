"""A server of files over real HTTP: ranges and ETags, and transfers that it ends early.

The same files are also a data set of the Hugging Face hub, ``org/name``, in the part of the hub's API that listing and
downloading use: with revisions, private where it has a token, and with a limit of requests.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.hub_server import Answering, serving_by

COMMIT = "1" * 40
NAME = "org/name"
RESET_S = 3
"""Seconds that a client is asked to wait which has sent too many requests."""


@dataclass
class Served:
    """What the server has, and what was asked of it."""

    folder: Path
    url: str = ""
    interrupt: dict[str, int] = field(default_factory=dict)
    """Name of a file -> how many of its transfers still end in the middle; -1: all."""
    ranges: bool = True
    etags: bool = True
    asked: list[str] = field(default_factory=list)
    token: str | None = None
    """Of the data set of the hub, which is private then."""
    revisions: dict[str, Path] = field(default_factory=dict)
    """Of the hub: other folders, by the names of their revisions."""
    limited: int = 0
    """Requests to the hub that are still answered by: too many requests."""
    transfers: list[tuple[str, int]] = field(default_factory=list)
    """(name, first byte) of each request for content."""

    def number(self, name: str) -> int:
        """Transfers of a file."""
        return sum(found == name for found, _ in self.transfers)


class _Handler(Answering):
    served: Served

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        self.served.asked.append(f"{self.command} {self.path}")
        served, name = self.served, unquote(urlsplit(self.path).path).lstrip("/")
        folder = served.folder
        if name.startswith((f"api/datasets/{NAME}", f"datasets/{NAME}/resolve/")) and self._refused_by_hub():
            return
        if name.startswith(f"api/datasets/{NAME}"):
            return self._answer_of_hub(name.removeprefix(f"api/datasets/{NAME}").strip("/"))
        if name.startswith(f"datasets/{NAME}/resolve/"):
            revision, _, name = name.removeprefix(f"datasets/{NAME}/resolve/").partition("/")
            folder = self._folder_of(revision) or folder
        path = folder / name
        if not path.is_file():
            return self.send(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
        content, begin, end = path.read_bytes(), 0, path.stat().st_size
        etag = hashlib.md5(content).hexdigest()
        asked = self.headers.get("Range", "")
        if served.ranges and asked.startswith("bytes="):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last) + 1 if last else end, end)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Accept-Ranges", "bytes" if served.ranges else "none")
        self.send_header("X-Repo-Commit", COMMIT)
        if served.etags:
            self.send_header("ETag", f'"{etag}"')
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        if not body:
            return
        served.transfers.append((name, begin))
        part = content[begin:end]
        if served.interrupt.get(name, 0):
            served.interrupt[name] -= 1
            part = part[: len(part) // 2]
            self.close_connection = True
        self.wfile.write(part)
        if self.close_connection:
            time.sleep(0.2)  # what arrives with the error is lost to the client

    def do_POST(self) -> None:
        self._answer(body=True)

    def _folder_of(self, revision: str) -> Path | None:
        """Of a branch, a tag or a commit."""
        number = {"main": self.served.folder, COMMIT: self.served.folder}
        for k, (name, folder) in enumerate(self.served.revisions.items(), start=2):
            number |= {name: folder, str(k) * 40: folder}
        return number.get(revision)

    def _refused_by_hub(self) -> bool:
        """As the hub: without the token a private data set is not there."""
        served, code, more = self.served, 0, {}
        if served.token is not None and self.headers.get("Authorization") != f"Bearer {served.token}":
            code, more = 401, {"X_Error_Code": "RepoNotFound"}
        elif served.limited:
            served.limited -= 1
            code, more = 429, {"Retry_After": str(RESET_S)}
        if not code:
            return False
        self.read_body()
        self.send(code, **more)
        return True

    def _answer_of_hub(self, asked: str) -> None:
        """What a repository has, and the facts of its files."""
        self.read_body()
        revision = [*asked.split("/"), "main"][1] if "/" in asked else "main"
        folder = self._folder_of(revision)
        if folder is None:
            return self.send(404, X_Error_Code="RevisionNotFound")
        commit = next((one for k in "123456789" if self._folder_of(one := k * 40) == folder), COMMIT)
        paths = sorted(path for path in folder.iterdir() if path.is_file())
        listed = [
            {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": hashlib.sha1(content).hexdigest()}
            for path in paths
            for content in [path.read_bytes()]
        ]
        found: Any = {
            "id": NAME, "sha": commit, "private": self.served.token is not None, "tags": [], "downloads": 0, "likes": 0,
            "siblings": [{"rfilename": path.name} for path in paths],
        }  # fmt: skip
        if asked.startswith(("tree/", "paths-info/")):
            found = listed
        self.send(200, json.dumps(found).encode(), Content_Type="application/json")


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """A server of the files in ``folder``, until the context ends."""
    served = Served(folder)
    with serving_by(_Handler, served=served) as served.url:
        yield served
