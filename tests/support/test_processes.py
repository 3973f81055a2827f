"""A forked process is, for the program, what a new interpreter would be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ENVIRONMENT, ROOT, forkable, forked_python, popen, run, server

pytestmark = pytest.mark.slow
SHOWN = """
import json, os, signal, sys, threading
import torch, unigen_ds
if __name__ == "__main__":
    print(json.dumps({
        "argv": sys.argv[1:], "folder": os.getcwd(), "path": sys.path,
        "environment": {name: value for name, value in os.environ.items() if name not in ("LC_CTYPE", "_")},
        "threads": [threading.active_count(), torch.get_num_threads()], "input": sys.stdin.read(),
        "files": [stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "open": len(os.listdir("/proc/self/fd")), "group": os.getpgrp() == os.getpgid(os.getppid()),
        "signals": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)],
        "unigen_ds": unigen_ds.__file__, "main": [__name__, sys.modules["__main__"].__dict__ is globals()],
        "encodings": [stream.encoding for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "errors": [stream.errors for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "examples": [name for name in sys.modules if name.startswith(("unigen_ds.examples", "tests"))],
    }))
    print("to the error stream", file=sys.stderr)
    sys.exit(7)
"""


@pytest.mark.parametrize("way", ["-c", "-m", "script"])
def test_it_has_the_state_of_a_new_interpreter(way: str, tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(SHOWN)
    program = {"-c": ["-c", SHOWN], "-m": ["-m", "shown"], "script": [str(tmp_path / "shown.py")]}[way]
    command = [sys.executable, *program, "first", "--second"]
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "RANK": "3"}
    how = {"cwd": tmp_path, "env": environment, "text": True}
    assert forkable(command, environment)
    states = []
    for start in (popen, subprocess.Popen):
        with start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how) as process:
            out, err = process.communicate("given", timeout=240)
        assert process.returncode == 7 and err == "to the error stream\n", err
        states.append(json.loads(out))
    assert states[0] == states[1] and states[0]["environment"]["RANK"] == "3"


def test_what_a_script_starts_as_python_is_one(tmp_path: Path) -> None:
    """With its arguments, environment and files; signals reach it, and its exit status comes back."""
    python = forked_python(tmp_path)
    code = """import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print(sys.argv, os.environ["MINE"], sys.stdin.read(), "unigen_ds.runner" in sys.modules, sys.executable, flush=True)
if sys.argv[1]:
    signal.sigwait([signal.SIGUSR1])
    sys.exit(7)
"""
    how = {"env": {**ENVIRONMENT, "MINE": "x"}, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    for text, status in (("signal", 7), ("", 0)):
        with popen([python, "-u", "-c", code, text], **how) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("given")
            process.stdin.close()
            assert process.stdout.readline() == f"['-c', '{text}'] x given True {python}\n"
            if text:
                process.send_signal(signal.SIGUSR1)
            assert process.wait(60) == status


@pytest.mark.parametrize(
    ("command", "changes"),
    [
        ([sys.executable, "-c", ""], {"OMP_NUM_THREADS": "2"}),
        ([sys.executable, "-c", ""], {"HF_HOME": "/tmp"}),
        ([sys.executable, "-c", ""], {"DS_ACCELERATOR": "xpu"}),
        ([sys.executable, "-c", ""], {"PYTHONHASHSEED": "0"}),
        ([sys.executable, "-X", "importtime", "-c", ""], {}),
        (["/bin/sh", "-c", ""], {}),
    ],
)
def test_what_could_differ_is_started_by_exec(command: list[str], changes: dict[str, str]) -> None:
    assert not forkable(command, {**ENVIRONMENT, **changes})
    assert forkable([sys.executable, "-c", ""], ENVIRONMENT)


def test_the_server_ends_with_the_process_that_started_it() -> None:
    code = "from tests.support.processes import run, server\nimport sys, os\nrun([sys.executable, '-c', ''])\n"
    code += "print(server().pid, flush=True)\nos.kill(os.getpid(), 9)"
    process = run([sys.executable, "-c", code], env=ENVIRONMENT, text=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    other = int(process.stdout)
    assert other != server().pid
    with pytest.raises(ProcessLookupError):
        for _ in range(600):
            os.kill(other, 0)
            signal.sigtimedwait([], 0.05)
