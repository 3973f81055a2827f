"""A server that speaks the part of the Hugging Face Hub's API that uploads use: repositories in memory, over real HTTP.

Files are sent inside of a commit (``regular``), or, with ``lfs`` endings, as the hub wants large files: stored first by
their SHA-256, and then referred to.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

TOKEN = "hf_right"
READ_ONLY = "hf_reads"
SHA = "1" * 40


@dataclass
class Repository:
    private: bool = False
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    messages: list[str] = field(default_factory=list)


@dataclass
class Hub:
    """What the server has. ``status``: every request is answered with this error. ``wait``: before a repository is
    created (at most 60 seconds)."""

    url: str = ""
    status: int | None = None
    lfs: tuple[str, ...] = ()
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    wait: threading.Event | None = None
    waited: bool = False

    def environment(self, home: Path, *, token: str | None = TOKEN) -> dict[str, str]:
        """Variables with which huggingface_hub uses this server."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_TOKEN": token or "", "HF_HUB_OFFLINE": "0",
                "HF_HUB_DISABLE_XET": "1" if self.lfs else "0", "NO_PROXY": "127.0.0.1"}  # fmt: skip

    def use(self, monkeypatch: pytest.MonkeyPatch, home: Path, *, token: str = TOKEN) -> None:
        """The same in this process: of its variables huggingface_hub reads only HF_TOKEN after its import."""
        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", bool(self.lfs))
        monkeypatch.setenv("HF_TOKEN", token)

    def files(self, name: str, branch: str = "main") -> dict[str, bytes]:
        return self.repositories[name].branches[branch]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, as ``Hub.files`` has them."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class Refusal(Exception):
    def __init__(self, status: int, code: str = "", body: Any = None) -> None:
        self.status, self.code, self.body = status, code, body


class Answering(BaseHTTPRequestHandler):
    """A handler without a log that sends whole answers."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None: ...

    def read_body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def send(self, status: int, content: bytes = b"", **headers: str) -> None:
        """Underscores in the names of headers become hyphens."""
        self.send_response(status)
        for name, value in {**headers, "Content_Length": str(len(content))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serving_by(kind: type[Answering], **attributes: Any) -> Iterator[str]:
    """The address of a server on a free port of this machine, while the context lasts."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (kind,), attributes))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class Handler(Answering):
    hub: Hub

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append(f"{self.command} {path}")
        body = self.read_body()
        try:
            if self.hub.status is not None:
                raise Refusal(self.hub.status)
            self.send(200, json.dumps(self._route(path, body)).encode(), Content_Type="application/json")
        except Refusal as refusal:
            code = {"X_Error_Code": refusal.code} if refusal.code else {}
            self.send(refusal.status, json.dumps(refusal.body or {}).encode(), Content_Type="application/json", **code)

    do_POST = do_PUT = do_GET

    def _route(self, path: str, body: bytes) -> Any:
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if parts == ["left"]:
            assert self.hub.wait is not None
            self.hub.wait.set()
            return {}
        if parts[0] == "objects":
            assert hashlib.sha256(body).hexdigest() == parts[1]
            self.hub.objects[parts[1]] = body
            return {}
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in (TOKEN, READ_ONLY):
            raise Refusal(401)
        if self.command == "POST" and token == READ_ONLY:
            raise Refusal(403)
        if parts[-1] == "batch":
            files = json.loads(body)["objects"]
            actions = {entry["oid"]: f"{self.hub.url}/objects/{entry['oid']}" for entry in files}
            return {"transfer": "basic",
                    "objects": [{**e, "actions": {"upload": {"href": actions[e["oid"]]}}} for e in files]}  # fmt: skip
        assert parts[0] == "api", path
        return self._create(json.loads(body)) if parts[1] == "repos" else self._model(parts[2:], body)

    def _create(self, repository: dict[str, Any]) -> Any:
        name = f"{repository['organization']}/{repository['name']}"
        if self.hub.wait is not None:
            self.hub.waited = self.hub.wait.wait(60)
        answer = {"url": f"{self.hub.url}/{name}"}
        if name in self.hub.repositories:
            raise Refusal(409, body=answer)
        self.hub.repositories[name] = Repository(private=repository.get("visibility") == "private")
        return answer

    def _model(self, parts: list[str], body: bytes) -> Any:
        name, action, branch = "/".join(parts[:2]), *[*parts[2:], "revision", "main"][:2]
        if name not in self.hub.repositories:
            raise Refusal(404, "RepoNotFound")
        repository = self.hub.repositories[name]
        if action == "branch":
            repository.branches[branch] = dict(repository.branches["main"])
            return {}
        if branch not in repository.branches:
            raise Refusal(404, "RevisionNotFound")
        if action == "revision":
            return {"id": name, "sha": SHA, "private": repository.private, "tags": [], "siblings": []}
        files = repository.branches[branch]
        if action == "preupload":
            return {"files": [self._mode(entry["path"], files) for entry in json.loads(body)["files"]]}
        assert action == "commit", action
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                repository.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                assert line["key"] == "lfsFile", line["key"]
                files[value["path"]] = self.hub.objects[value["oid"]]
        return {"commitUrl": f"{self.hub.url}/{name}/commit/{SHA}", "commitOid": SHA}

    def _mode(self, path: str, files: dict[str, bytes]) -> dict[str, Any]:
        mode, oid = ("lfs" if path.endswith(self.hub.lfs) else "regular"), None
        if path in files:
            blob = files[path]
            git = hashlib.sha1(b"blob %d\0" % len(blob) + blob).hexdigest()
            oid = hashlib.sha256(blob).hexdigest() if mode == "lfs" else git
        return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid}


@contextmanager
def hub_server(**settings: Any) -> Iterator[Hub]:
    """A server on a free port of this machine, while the context lasts."""
    hub = Hub(**settings)
    with serving_by(Handler, hub=hub) as hub.url:
        yield hub
