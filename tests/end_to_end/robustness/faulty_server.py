"""A server of files over real HTTP that does what real ones do on bad days: errors, pages instead of files, transfers
that end early, wrong lengths and ranges, silence, content that changes between two requests.

One server answers all cases of a process; each case has a folder of its own in the urls.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PAGE = b"<!DOCTYPE html>\n<html><body>Please sign in to the network first.</body></html>\n"
SILENT_S = 0.5
"""Longer than the client waits, in these cases."""
STATUSES = (204, 301, 304, 400, 401, 403, 404, 405, 410, 416, 418, 429, 451, 500, 502, 503, 504)


@dataclass
class Fault:
    """What is wrong with some of the answers."""

    name: str
    methods: tuple[str, ...] = ("GET",)
    times: int = -1
    """How many answers; -1: all."""
    after: int = 0
    """Answers to these methods that are right before it."""
    ranged: bool | None = None
    """Only answers to requests with a range, or without; None: both."""

    def applies(self, method: str, ranged: bool) -> bool:
        """Called once for each request."""
        if method not in self.methods or self.ranged not in (None, ranged) or not self.times:
            return False
        if self.after:
            self.after -= 1
            return False
        self.times -= 1
        return True


@dataclass
class File:
    """One file of the server. ``etag``: whether it has one."""

    content: bytes
    later: bytes = b""
    """What the fault ``changed`` makes of it, from then on."""
    etag: bool = True
    ranges: bool = True
    faults: list[Fault] = field(default_factory=list)
    kind: str = "application/octet-stream"
    wait: str = "0"
    """Seconds, with status 429."""


class _Handler(BaseHTTPRequestHandler):
    files: dict[str, File]
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None: ...

    def do_GET(self) -> None:
        file = self.files.get(self.path)
        if file is None:
            return self._send(404, b"no such file")
        ranged = self.headers.get("Range", "").startswith("bytes=")
        fault = next((one for one in file.faults if one.applies(self.command, ranged)), None)
        with contextlib.suppress(ConnectionError):
            if fault is None:
                self._right(file)
            elif fault.name.isdigit():
                wait = {"Retry-After": file.wait} if fault.name == "429" else {}
                self._send(int(fault.name), b"something is wrong", wait)
            else:
                FAULTS[fault.name](self, file)

    do_HEAD = do_GET

    def _send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, *, length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status not in (204, 304) and length != -1:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command == "GET" and status not in (204, 304):
            self.wfile.write(body)

    def _headers(self, file: File) -> dict[str, str]:
        etag = {"ETag": f'"{hashlib.md5(file.content).hexdigest()}"'} if file.etag else {}
        return {"Accept-Ranges": "bytes" if file.ranges else "none", "Content-Type": file.kind, **etag}

    def _range(self, file: File) -> tuple[int, int] | None:
        asked = self.headers.get("Range", "")
        if not file.ranges or not asked.startswith("bytes="):
            return None
        first, _, last = asked.removeprefix("bytes=").partition("-")
        return int(first), min(int(last) + 1 if last else len(file.content), len(file.content))

    def _right(self, file: File, *, shift: int = 0) -> None:
        """``shift``: of the bytes that answer a range."""
        found, headers, size = self._range(file), self._headers(file), len(file.content)
        if found is None:
            return self._send(200, file.content, headers)
        begin, end = found
        if begin >= size:
            return self._send(416, b"", {"Content-Range": f"bytes */{size}"})
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        self._send(206, (file.content * 2)[begin + shift : end + shift], headers)

    def _part(self, file: File) -> bytes:
        begin, end = self._range(file) or (0, len(file.content))
        return file.content[begin:end]

    def _ended(self, file: File, body: bytes, *, length: int | None) -> None:
        """An answer after which the connection is closed. ``length``: of the header; None: it has none."""
        self.close_connection = True
        headers = {**self._headers(file), "Connection": "close"}
        ranged = self._range(file)
        if ranged is not None:
            headers["Content-Range"] = f"bytes {ranged[0]}-{ranged[1] - 1}/{len(file.content)}"
        self._send(200 if ranged is None else 206, body, headers, length=-1 if length is None else length)

    def _arrived(self) -> None:
        """What arrives with the end of the connection is lost to the client."""
        self.wfile.flush()
        threading.Event().wait(0.1)

    def short(self, file: File) -> None:
        part = self._part(file)
        self._ended(file, part[: len(part) // 2], length=len(part))
        self._arrived()

    def cut(self, file: File) -> None:
        part = self._part(file)
        self._ended(file, part[: len(part) // 2], length=len(part) // 2)

    def long(self, file: File) -> None:
        part = self._part(file) + b"\n{}\nmore"
        self._ended(file, part, length=len(part))

    def empty(self, file: File) -> None:
        self._ended(file, b"", length=0)

    def endless(self, file: File) -> None:
        self._ended(file, self._part(file), length=10**15)

    def bad_length(self, file: File) -> None:
        self.close_connection = True
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n" + self._part(file))

    def no_length(self, file: File) -> None:
        self._ended(file, self._part(file), length=None)

    def chunked(self, file: File, *, whole: bool = True) -> None:
        self.close_connection = True
        self._send(200, b"", {**self._headers(file), "Transfer-Encoding": "chunked"}, length=-1)
        if self.command == "GET":
            half = len(file.content) // 2
            for part in (file.content[:half], file.content[half:])[: 1 + whole]:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part) if part else b"")
            self.wfile.write(b"0\r\n\r\n" if whole else b"")

    def chunks_cut(self, file: File) -> None:
        self.chunked(file, whole=False)

    def reset(self, file: File) -> None:
        part = self._part(file)
        self._ended(file, part[: len(part) // 2], length=len(part))
        self._arrived()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def silent(self, file: File) -> None:
        part = self._part(file)
        self._ended(file, part[: len(part) // 2], length=len(part))
        self.wfile.flush()
        threading.Event().wait(SILENT_S)

    def never(self, file: File) -> None:
        self.close_connection = True
        threading.Event().wait(SILENT_S)

    def garbage(self, file: File) -> None:
        self.close_connection = True
        self.wfile.write(b"\x00\xff not a protocol\r\n\r\n" + file.content)

    def page(self, file: File) -> None:
        self._send(200, PAGE, {"Content-Type": "text/html; charset=utf-8"})

    def page_of_the_size(self, file: File) -> None:
        """With the size and version of the file."""
        size = len(file.content)
        headers = {**self._headers(file), "Content-Type": "text/html"}
        self._send(200, PAGE.ljust(size)[:size], headers)

    def loop(self, file: File) -> None:
        self._send(302, b"", {"Location": self.path})

    def nowhere(self, file: File) -> None:
        self._send(302, b"", {"Location": "http://127.0.0.1:9/"})

    def no_range(self, file: File) -> None:
        self._send(200, file.content, self._headers(file))

    def wrong_range(self, file: File) -> None:
        self._right(file, shift=3)

    def new_etag(self, file: File) -> None:
        self._send(200, file.content, {**self._headers(file), "ETag": f'"{id(object())}{threading.get_ident()}"'})

    def compressed(self, file: File) -> None:
        self._send(200, gzip.compress(file.content), {**self._headers(file), "Content-Encoding": "gzip"})

    def compressed_wrongly(self, file: File) -> None:
        self._send(200, file.content, {**self._headers(file), "Content-Encoding": "gzip"})

    def changed(self, file: File) -> None:
        """From now on, and in this answer."""
        file.content = file.later
        self._right(file)


FAULTS: dict[str, Callable[[_Handler, File], None]] = {
    name: getattr(_Handler, name)
    for name in (
        "short", "cut", "long", "empty", "endless", "bad_length", "no_length", "chunked", "chunks_cut", "reset",
        "silent", "never", "garbage", "page", "page_of_the_size", "loop", "nowhere", "no_range", "wrong_range",
        "new_etag", "compressed", "compressed_wrongly", "changed",
    )
}  # fmt: skip
"""By their name; a number is a status."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no error here."""


@cache
def server() -> tuple[str, dict[str, File]]:
    """(url, path -> file) of the server of this process."""
    files: dict[str, File] = {}
    found = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"files": files}))
    threading.Thread(target=found.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{found.server_port}", files
