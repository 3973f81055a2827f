"""A server of files over real HTTP, and what real ones do on bad days: errors, pages instead of files, transfers that
end early, wrong lengths, silence, content that changes between two requests.

The same files are also a data set of the Hugging Face hub, ``org/name``, in the part of the hub's API that listing and
downloading use: with revisions, private where it has a token, and with a limit of requests.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.support.hub_server import Answering, serving_by

COMMIT = "1" * 40
NAME = "org/name"
RESET_S = 3
"""Seconds that a client is asked to wait which has sent too many requests."""
SILENT_S = 0.5
"""Longer than the client waits, where a test is about silence."""
PAGE = b"<!DOCTYPE html>\n<html><body>Please sign in to the network first.</body></html>\n"
ANSWERS: dict[str, Callable[[bytes], tuple[bytes, dict[str, str]]]] = {
    "short": lambda content: (content[: len(content) // 2], {"Content-Length": str(len(content))}),
    "reset": lambda content: (content[: len(content) // 2], {"Content-Length": str(len(content))}),
    "silent": lambda content: (content[: len(content) // 2], {"Content-Length": str(len(content))}),
    "long": lambda content: (content + b"\n{}\nmore", {}),
    "chunks_cut": lambda content: (b"%x\r\n%s\r\n" % (9, content[:9]), {"Transfer-Encoding": "chunked"}),
    "page": lambda content: (PAGE, {"Content-Type": "text/html; charset=utf-8", "ETag": ""}),
    "new_etag": lambda content: (content, {"ETag": f'"{time.time_ns()}"'}),
    "compressed_wrongly": lambda content: (content, {"Content-Encoding": "gzip"}),
    "changed": lambda content: (content, {}),
}
"""What is wrong with an answer, by name -> its body, and headers in place of the right ones."""


@dataclass
class Fault:
    """What is wrong with some of the answers: of ``ANSWERS``, or the number of a status."""

    name: str
    methods: tuple[str, ...] = ("GET",)
    times: int = -1
    """How many answers; -1: all."""
    after: int = 0
    """Answers to these methods that are right before it."""

    def applies(self, method: str) -> bool:
        """Called once for each request."""
        if method not in self.methods or not self.times:
            return False
        self.after, wait = max(self.after - 1, 0), self.after
        self.times -= not wait
        return not wait


@dataclass
class ShardServer:
    """What the server has, and what was asked of it."""

    folder: Path
    url: str = ""
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    """Of a file, by its name."""
    later: bytes = b""
    """What the fault ``changed`` makes of a file, from then on."""
    etags: bool = True
    token: str | None = None
    """Of the data set of the hub, which is private then."""
    revisions: dict[str, Path] = field(default_factory=dict)
    """Of the hub: other folders, by the names of their revisions."""
    num_limited: int = 0
    """Requests to the hub that are still answered by: too many requests."""
    transfers: list[str] = field(default_factory=list)
    """The name of each request for content."""


class _Handler(Answering):
    shards: ShardServer

    def do_GET(self) -> None:
        with contextlib.suppress(ConnectionError):
            self._answer()

    do_HEAD = do_POST = do_GET

    def _answer(self) -> None:
        shards, name = self.shards, unquote(urlsplit(self.path).path).lstrip("/")
        folder = shards.folder
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
        fault = next((one.name for one in shards.faults.get(name, ()) if one.applies(self.command)), "")
        if fault == "changed":
            path.write_bytes(shards.later)
        content = body = path.read_bytes()
        headers = {
            "Content-Type": "application/octet-stream",
            "X-Repo-Commit": COMMIT,
            "Content-Length": str(len(content)),
        }
        if shards.etags:
            headers["ETag"] = f'"{hashlib.md5(content).hexdigest()}"'
        if fault.isdigit():
            body, headers = b"", {"Retry-After": "0", "Content-Length": "0"} if fault != "204" else {}
        elif fault:
            body, wrong = ANSWERS[fault](content)
            length = {} if "Transfer-Encoding" in wrong else {"Content-Length": str(len(body))}
            headers = {**headers, "Content-Length": "", "Connection": "close", **length, **wrong}
        self.send_response(int(fault) if fault.isdigit() else 200)
        for key, value in headers.items():
            if value:
                self.send_header(key, value)
        self.end_headers()
        self.close_connection = bool(fault)
        if self.command == "GET":
            shards.transfers.append(name)
            self.wfile.write(body)
        if fault in ("short", "reset", "silent"):
            self.wfile.flush()
            time.sleep(SILENT_S if fault == "silent" else 0.1)  # what arrives with the error is lost to the client
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _folder_of(self, revision: str) -> Path | None:
        """Of a branch, a tag or a commit."""
        number = {"main": self.shards.folder, COMMIT: self.shards.folder}
        for k, (name, folder) in enumerate(self.shards.revisions.items(), start=2):
            number |= {name: folder, str(k) * 40: folder}
        return number.get(revision)

    def _refused_by_hub(self) -> bool:
        """As the hub: without the token a private data set is not there."""
        shards, code, more = self.shards, 0, {}
        if shards.token is not None and self.headers.get("Authorization") != f"Bearer {shards.token}":
            code, more = 401, {"X_Error_Code": "RepoNotFound"}
        elif shards.num_limited:
            shards.num_limited -= 1
            code, more = 429, {"Retry_After": str(RESET_S)}
        if not code:
            return False
        self.read_body()
        self.send(code, **more)
        return True

    def _answer_of_hub(self, query: str) -> None:
        """What a repository has, and the facts of its files."""
        self.read_body()
        revision = [*query.split("/"), "main"][1] if "/" in query else "main"
        folder = self._folder_of(revision)
        if folder is None:
            return self.send(404, X_Error_Code="RevisionNotFound")
        commit = next((one for k in "123456789" if self._folder_of(one := k * 40) == folder), COMMIT)
        contents = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
        answer: Any = {
            "id": NAME, "sha": commit, "private": self.shards.token is not None, "tags": [], "downloads": 0, "likes": 0,
            "siblings": [{"rfilename": name} for name in contents],
        }  # fmt: skip
        if query.startswith(("tree/", "paths-info/")):
            answer = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in contents.items()
            ]
        self.send(200, json.dumps(answer).encode(), Content_Type="application/json")


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[ShardServer]:
    """A server of the files in ``folder``, until the context ends."""
    shards = ShardServer(folder, **settings)
    with serving_by(_Handler, shards=shards) as shards.url:
        yield shards
