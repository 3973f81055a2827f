"""The server of ``processes.popen``: it has imported torch and other large packages, and forks for each request.

A child is in the state in which a new interpreter would be just before it runs the program, but for what is imported:
its environment, working directory, standard files, ``sys.argv``, ``sys.path`` and ``__main__`` are those asked for.

The server has one thread and ends with the process that started it. It imports the project from the tree that this file
is in: in a copy of the tree (``tests/mutate.py``) that is the copy.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import io
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import TextIO

PRELOADED = (
    "unigen_ds.runner", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "PIL.Image",
    "transformers.tokenization_utils_tokenizers", "transformers.models.auto.tokenization_auto",
    "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.module_inject.auto_ep_layer",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip
"""What training would import sooner or later; DeepSpeed alone is 2 s of a process."""
FILES = 3
"""Standard input, output and error."""
SIZE = 4
"""Bytes of the length that precedes a request."""


class Request:
    """What a child is to be."""

    def __init__(self, connection: socket.socket) -> None:
        size, self.files, _, _ = socket.recv_fds(connection, SIZE, FILES)
        body = connection.makefile("rb", buffering=0)
        text = b""
        while len(text) < int.from_bytes(size, "big"):
            text += body.read(65536) or b""
        message = json.loads(text)
        self.executable: str = message["executable"]
        self.command: list[str] = message["command"]
        self.environment: dict[str, str] = message["environment"]
        self.folder: str = message["folder"]
        self.new_session: bool = message["new_session"]
        self.interruptible: bool = message["interruptible"]


def serve(listening: socket.socket) -> Request:
    """Fork for each request; returns in a child alone. Ends when standard input does: with the process that asks."""
    running: dict[int, tuple[int, socket.socket]] = {}  # of the pid's file: pid, connection
    while True:
        ready, _, _ = select.select([0, listening, *running], [], [])
        for descriptor in set(ready) & running.keys():
            process, connection = running.pop(descriptor)
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            os.close(descriptor)
            with connection, contextlib.suppress(OSError):  # nobody may wait any more
                connection.sendall(f"{status}\n".encode())
        if listening in ready:
            connection = listening.accept()[0]
            request = Request(connection)
            process = os.fork()
            if process == 0:
                for other in (listening, connection, *(one for _, one in running.values())):
                    other.close()
                for number in running:
                    os.close(number)
                return request
            for number in request.files:
                os.close(number)
            running[os.pidfd_open(process)] = process, connection
            with contextlib.suppress(OSError):
                connection.sendall(f"{process}\n".encode())
        elif 0 in ready:
            os._exit(0)


def become(request: Request, path: list[str]) -> tuple[CodeType, ModuleType]:
    """The state in which a new interpreter would be just before it runs the program, and the program."""
    if request.new_session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler if request.interruptible else signal.SIG_IGN)
    for number, descriptor in enumerate(request.files):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = sys.__stdin__ = _stream(sys.stdin, 0, "r")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _stream(sys.stdout, 1, "w")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(sys.stderr, 2, "w")  # type: ignore[misc]
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    for package in ("numpy", "torch"):
        importlib.import_module(package).random.seed()  # else all children draw the same
    if "HF_ENDPOINT" in request.environment:
        importlib.reload(sys.modules["huggingface_hub.constants"])
    own_path = [entry for entry in request.environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = ["", *own_path, *path]
    importlib.invalidate_caches()
    first, *more = request.command
    main = ModuleType("__main__")
    if first == "-c":
        sys.argv[:] = ["-c", *more[1:]]
        code = compile(more[0], "<string>", "exec")
    elif first == "-m":
        sys.path[0] = request.folder
        name = more[0]
        if (spec := importlib.util.find_spec(name)) is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        assert spec is not None and spec.origin is not None, f"no module {name}"
        code = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
        main.__spec__, main.__file__, main.__package__ = spec, spec.origin, spec.parent
        sys.argv[:] = [spec.origin, *more[1:]]
    else:
        sys.path[0] = str(Path(first).resolve().parent)
        sys.argv[:] = [first, *more]
        main.__file__ = first
        code = compile(Path(first).read_bytes(), first, "exec")
    sys.executable = request.executable
    sys.orig_argv[:] = [sys.executable, *request.command]
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    return code, main


def _stream(own: TextIO, number: int, mode: str) -> TextIO:
    """As the interpreter opens it: with the server's encoding, whose locale is the same."""
    binary = open(number, mode + "b", closefd=False)  # noqa: SIM115
    line_buffered = number == 2 or os.isatty(number)
    stream = io.TextIOWrapper(binary, encoding=own.encoding, errors=own.errors, line_buffering=line_buffered)
    stream.mode = mode  # type: ignore[misc]
    return stream


def main() -> None:
    """Import, then fork."""
    listening = socket.socket(fileno=int(sys.argv[1]))
    own_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [entry for entry in sys.path[1:] if entry not in own_path]
    for name in PRELOADED:
        importlib.import_module(name)
    sys.modules["PIL.Image"].init()
    sys.modules["unigen_ds.checkpoint.manifest"].current_versions()
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    gc.collect()
    gc.freeze()  # else every collection of a child would go through, and so copy, all that was imported
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads would not survive a fork"
    code, module = become(serve(listening), path)
    exec(code, module.__dict__)


if __name__ == "__main__":
    main()
