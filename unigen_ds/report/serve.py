"""The report of a run that continues, in a browser: ``serve_report`` answers on 127.0.0.1 with the page of ``page.py``.

The page is made when somebody asks for it and files of the run have changed since, but never for more than a fifth of
the time. Its own script asks every few seconds, and exchanges what it shows: scrolling and open details stay. Nothing
else of the disk is served, and only to this machine: a request with another host's name (DNS rebinding) is refused.
"""

from __future__ import annotations

import contextlib
import errno
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import xxhash

from unigen_ds.checkpoint.home import home_of
from unigen_ds.core.errors import ConfigError, UnigenError
from unigen_ds.report.page import report_text
from unigen_ds.report.reading import PREVIEWS, RESULTS, SCORES

ADDRESS = "127.0.0.1"
HOSTS = (ADDRESS, "localhost")
EVERY_S = 3.0
"""Between two requests of an open page."""


class LivePage:
    """The page of some runs, made anew where their files have changed. Used by several threads."""

    def __init__(self, work_dirs: Sequence[Path], *, max_pictures: int) -> None:
        self._work_dirs, self._max_pictures = work_dirs, max_pictures
        self._lock, self._next = threading.Lock(), 0.0
        self._state: list[tuple[str, int, int]] | None = None
        self._content, self._tag = b"", ""

    def read(self) -> tuple[bytes, str]:
        """The page, and its tag. Raises as ``report_text`` does."""
        with self._lock:
            now = time.monotonic()
            if now >= self._next and (state := sorted(self._files())) != self._state:
                text = report_text(self._work_dirs, max_pictures=self._max_pictures, every_s=EVERY_S)
                self._content, self._state = text.encode(), state
                self._tag = f'"{xxhash.xxh3_64_hexdigest(self._content)}"'
                self._next = time.monotonic() + max(1.0, 5 * (time.monotonic() - now))
            return self._content, self._tag

    def _files(self) -> Iterator[tuple[str, int, int]]:
        """Name, time and size of what a report reads; a checkpoint appears by one rename in its folder."""
        for folder in self._work_dirs:
            inner = (path for name in (PREVIEWS, RESULTS, SCORES) for path in (folder / name).rglob("*"))
            for path in (*folder.iterdir(), *home_of(folder).iterdir(), *inner):
                if path.suffix != ".html":
                    try:
                        status = path.stat()
                    except OSError:  # removed since
                        continue
                    yield str(path), status.st_mtime_ns, status.st_size


def serve_report(work_dirs: Sequence[Path], *, port: int, max_pictures: int, ready: Callable[[str], Any]) -> None:
    """Serve the report until Ctrl-C; port 0: a free one. ``ready`` is called with the address. Raises ``ConfigError``
    for a port that cannot be used, and what ``report_text`` raises for the first page."""
    page = LivePage(work_dirs, max_pictures=max_pictures)
    page.read()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content, tag, status = b"", "", 200
            if (self.headers.get("Host") or "").rpartition(":")[0] not in HOSTS:
                status, content = 403, f"only {' and '.join(HOSTS)} are served\n".encode()
            elif self.path.partition("?")[0] != "/":
                status, content = 404, b"there is only the report, at /\n"
            else:
                try:
                    content, tag = page.read()
                except (UnigenError, OSError) as error:  # the folder is gone, say: it may come back
                    status, content = 503, f"{error}\n".encode()
            if tag and self.headers.get("If-None-Match") == tag:
                status, content = 304, b""
            with contextlib.suppress(ConnectionError):  # the browser has closed it
                self.send_response(status)
                self.send_header("Content-Type", "text/html; charset=utf-8" if status == 200 else "text/plain")
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Cache-Control", "no-cache")
                if tag:
                    self.send_header("ETag", tag)
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Requests are not listed."""

    try:
        server = ThreadingHTTPServer((ADDRESS, port), Handler)
    except OSError as error:
        problem = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error}"
        raise ConfigError(f"port {port} of {ADDRESS} {problem}", remedy="--port N; 0: a free one") from error
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's script ignores it for what runs beside it
    with server, contextlib.suppress(KeyboardInterrupt):
        ready(f"http://{ADDRESS}:{server.server_port}/")
        server.serve_forever()
