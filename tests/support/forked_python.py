"""Called as ``python`` is, but a fork of the server of ``processes.py`` runs the program: ``processes.forked_python``.

It needs the standard library alone, so it starts in 30 ms. It passes signals on and ends as the fork ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

SIZE = 4
"""As in ``fork_server.py``."""
PASSED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_READ_BY_IMPORTS = {"TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL"}
"""Variables that torch reads when it is imported: with one of them a program is run by a new interpreter."""


def main() -> int:
    address, python, own, *command = sys.argv[1:]
    options = [option for option in command[:1] if option == "-u"]
    command = command[len(options) :]
    if command[0] != "-m" and _READ_BY_IMPORTS & os.environ.keys():
        os.execv(python, [python, *options, *command])
    request = {
        "executable": own, "command": command, "environment": dict(os.environ), "folder": os.getcwd(),
        "new_session": False, "interruptible": signal.getsignal(signal.SIGINT) is not signal.SIG_IGN,
    }  # fmt: skip
    body = json.dumps(request).encode()
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED)  # until it is known to whom
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.connect(address)
    socket.send_fds(server, [len(body).to_bytes(SIZE, "big")], [0, 1, 2])
    server.sendall(body)
    lines = server.makefile()
    process = int(lines.readline())
    for signal_number in PASSED:
        signal.signal(signal_number, lambda number, frame: os.kill(process, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED)
    status = int(lines.readline())
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
