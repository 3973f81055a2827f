"""``tools/report.py --serve``: a process that serves the report of a run that continues, and nothing else."""

from __future__ import annotations

import http.client
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import ENVIRONMENT, ROOT, popen, run
from tests.tiny import tiny_config
from tools.report import main
from unigen_ds.checkpoint.home import WorkDirLock
from unigen_ds.report.page import report_text
from unigen_ds.runner import Runner

TOOL = [sys.executable, str(ROOT / "tools" / "report.py")]


def ask(port: int, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str, str]:
    """Status, tag and content."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.getheader("ETag", ""), answer.read().decode()


def train(work_dir: Path, digits: Path, until: int) -> None:
    saves = {"default_hooks__checkpoint__interval": 1, "default_hooks__checkpoint__by_epoch": False}
    Runner.from_cfg(tiny_config(work_dir, digits, resume="auto", **saves), max_updates=until).train()


def test_the_page_follows_the_run_and_nothing_else_is_served(tmp_path: Path, digits: Path) -> None:
    work_dir = tmp_path / "run"
    train(work_dir, digits, 1)
    lock = WorkDirLock(work_dir)
    assert ">running<" in report_text([work_dir])
    lock.release()
    assert ">running<" not in report_text([work_dir])
    command = [*TOOL, str(work_dir), "--serve", "--port", "0"]
    server = popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline().partition("127.0.0.1:")[2].partition("/")[0])
        status, tag, page = ask(port)
        assert status == 200 and "iter_1.pth" in page and "iter_2.pth" not in page and 'id="live"' in page
        assert ask(port, **{"If-None-Match": tag}) == (304, tag, "")
        for path in ("/metrics.jsonl", "/../metrics.jsonl", "//etc/passwd", f"/{work_dir}/config.py"):
            assert ask(port, path)[0] == 404
        assert ask(port, Host="evil.example:80")[0] == 403 and ask(port, Host=f"localhost:{port}")[0] == 200
        assert ask(port, method="POST")[0] == 501
        result = run([*TOOL, str(work_dir), "--serve", "--port", str(port)], cwd=ROOT, env=ENVIRONMENT, text=True)
        assert result.returncode == 2 and f"port {port} of 127.0.0.1 is in use" in result.stderr
        train(work_dir, digits, 2)
        end = time.monotonic() + 20
        while (answer := ask(port))[1] == tag and time.monotonic() < end:
            time.sleep(0.2)
        assert answer[0] == 200 and "iter_2.pth" in answer[2]
        work_dir.rename(tmp_path / "elsewhere")
        while (answer := ask(port))[0] == 200 and time.monotonic() < end:
            time.sleep(0.2)
        assert answer[0] == 503 and "No such file" in answer[2]
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=20) == 0 and server.stdout.read() == ""
    finally:
        server.kill()


def test_options_that_exclude_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--port", "1"], ["--serve", "--port", "65536"], ["--serve", "--out", "a.html"]):
        with pytest.raises(SystemExit, match="2"):
            main([str(tmp_path), *words])
    assert main([str(tmp_path), "--serve", "--port", "0"]) == 1 and "is no run" in capsys.readouterr().err
