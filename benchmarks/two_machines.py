"""Two machines lose each other in an update and in a save: is anything of the training lost?

In: two network namespaces that a pair of virtual interfaces connects, torchrun with ``--nnodes 1:2`` in each, started
again where it fails, as a job scheduler does. The link is down for less time than a collective may wait, and for more,
each in an update and in a save (after the files are written, before the commit). Out: what each fault led to, in
``results/two_machines_<date>.json``; exit status 1 if an update is lost or done twice, its samples are not those of a
run without faults, a loss differs by more than rounding, or a checkpoint does not verify.

    python benchmarks/two_machines.py [--no-result]

It needs root, for ``ip netns``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shared.record import ROOT, write_result

TIMEOUT_S, SHORT_S, LONG_S = 20, 5, 60
"""A collective may wait; the link is down."""
FAULTS = (("update", SHORT_S, 4), ("save", SHORT_S, 10), ("update", LONG_S, 16), ("save", LONG_S, 40))
"""Where the link goes down, for how long, and from which update on."""
UPDATES = 80
MACHINES = {"a": "10.77.0.1", "b": "10.77.0.2"}
HOOK = """
import os, time
from pathlib import Path
from unigen_ds.checkpoint import saver
from unigen_ds.config.registry import HOOKS
from unigen_ds.hooks.base import Hook

write = saver.Save.write

def slow_write(self, trained):
    write(self, trained)
    Path(os.environ["SAVES"]).touch()
    time.sleep(1.0)
    Path(os.environ["SAVES"]).unlink(missing_ok=True)

saver.Save.write = slow_write

@HOOKS.register_module()
class SlowHook(Hook):
    def before_train_iter(self, run, index, batch):
        time.sleep(0.25)
"""


class Machine(threading.Thread):
    """Starts torchrun in a namespace until it ends with 0."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], log: Path) -> None:
        super().__init__(daemon=True)
        self.name, self.starts, self._command, self._environment, self._log = name, 0, command, environment, log
        self.process: subprocess.Popen[Any] | None = None
        self.stopped = False

    def run(self) -> None:
        with self._log.open("wb") as output:
            while not self.stopped and self.starts < 30:
                self.starts += 1
                self.process = subprocess.Popen(
                    ["ip", "netns", "exec", f"unigen-{self.name}", *self._command],
                    cwd=ROOT, env=self._environment, stdout=output, stderr=output, start_new_session=True,
                )  # fmt: skip
                if self.process.wait() == 0:
                    return
                time.sleep(1.0)

    def stop(self) -> None:
        self.stopped = True
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)


def ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, stderr=None if check else subprocess.DEVNULL)


def connect() -> None:
    """Both namespaces, and the link between them."""
    for name in MACHINES:
        ip("netns", "add", f"unigen-{name}")
    ip("link", "add", "eth-a", "netns", "unigen-a", "type", "veth", "peer", "name", "eth-b", "netns", "unigen-b")
    for name, address in MACHINES.items():
        ip("-n", f"unigen-{name}", "addr", "add", f"{address}/24", "dev", f"eth-{name}")
        ip("-n", f"unigen-{name}", "link", "set", "lo", "up")
        ip("-n", f"unigen-{name}", "link", "set", f"eth-{name}", "up")


def measure(folder: Path) -> dict[str, Any]:
    from tests.tiny import tiny_config
    from unigen_ds.checkpoint.store import list_checkpoints, verify_manifest
    from unigen_ds.config.python_text import config_text
    from unigen_ds.runner import Runner
    from unigen_ds.system.journals import read_lines

    data, alone, work_dir, saves = folder / "digits", folder / "alone", folder / "run", folder / "saves"
    options = {"param_scheduler": [], "train_cfg__max_epochs": 50}
    Runner.from_cfg(tiny_config(alone, data, train_dataloader__batch_size=4, **options), max_updates=UPDATES).train()
    work_dir.mkdir()
    (work_dir / "slow_hook.py").write_text(HOOK, encoding="utf-8")
    own = {
        "custom_imports": {"imports": ["unigen_ds.examples.digits", "slow_hook"]},
        "custom_hooks": [{"type": "SlowHook"}],
        "train_dataloader__batch_size": 2, "world_size": 2, "on_batch_change": "keep-batch",
        "env__dist_timeout_s": TIMEOUT_S, "default_hooks__checkpoint__interval": 2,
        "default_hooks__checkpoint__max_keep_ckpts": 3,
    }  # fmt: skip
    (work_dir / "given.py").write_text(config_text(tiny_config(work_dir, data, **options, **own).to_dict()))
    machines = []
    for name, address in MACHINES.items():
        rendezvous = f"is_host={name == 'a'},last_call_timeout=8,keep_alive_interval=2,keep_alive_max_attempt=3"
        rendezvous += f",read_timeout={10 * LONG_S}"  # else the agent whose link is down ends after a minute
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc_per_node", "1"]
        command += ["--max-restarts", "9", "--rdzv-backend", "c10d", "--rdzv-id", "job", "--local-addr", address]
        command += ["--rdzv-endpoint", f"{MACHINES['a']}:29400", "--rdzv-conf", rendezvous, "--monitor-interval", "0.5"]
        command += [str(ROOT / "tools" / "train.py"), str(work_dir / "given.py"), "--backend", "fsdp", "--resume"]
        command += ["--max-updates", str(UPDATES)]
        variables = {
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "SAVES": str(saves),
            "GLOO_SOCKET_IFNAME": f"eth-{name}", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }  # fmt: skip
        machines.append(Machine(name, command, {**os.environ, **variables}, folder / f"{name}.log"))
    rows: list[dict[str, Any]] = []
    try:
        for machine in machines:
            machine.start()
        for where, seconds, update in FAULTS:
            rows.append(fault(where, seconds, update, machines=machines, work_dir=work_dir, saves=saves))
            print(rows[-1], flush=True)
        for machine in machines:
            machine.join(timeout=300)
        ended = not any(machine.is_alive() for machine in machines)
    finally:
        for machine in machines:
            machine.stop()
    ledgers = [read_lines(one / "ledger.jsonl") for one in (alone, work_dir)]
    losses = [[line["loss"] for line in read_lines(one / "metrics.jsonl")] for one in (alone, work_dir)]
    same = len(losses[0]) == len(losses[1]) and all(
        abs(one - two) < 1e-4 * abs(one) for one, two in zip(*losses, strict=True)
    )
    checkpoints = list_checkpoints(work_dir)
    for one in checkpoints:
        verify_manifest(one.path)
    return {"ended": ended, "ledger as without faults": ledgers[0] == ledgers[1], "losses equal": same,
            "checkpoints that verify": len(checkpoints), "faults": rows}  # fmt: skip


def fault(
    where: str, seconds: int, update: int, *, machines: list[Machine], work_dir: Path, saves: Path
) -> dict[str, Any]:
    """Take the link down once, and wait until both machines train again."""
    from unigen_ds.system.journals import last_update

    def count_updates() -> int:
        return last_update(work_dir / "metrics.jsonl")

    wait(lambda: count_updates() >= update and both(work_dir), machines, update=update)
    wait(lambda: saves.exists() == (where == "save"), machines, update=update)
    length, before = len(log_of(work_dir)), count_updates()
    ip("-n", "unigen-b", "link", "set", "eth-b", "down")
    time.sleep(seconds)
    during = count_updates()
    ip("-n", "unigen-b", "link", "set", "eth-b", "up")
    wait(lambda: count_updates() > before + 2 and both(work_dir), machines, update=update)
    marks = ("ERROR", "No progress", "keep-batch", "Auto resumed")
    lines = [line for line in log_of(work_dir)[length:].splitlines() if any(mark in line for mark in marks)]
    return {"in": where, "seconds": seconds, "update": before, "update when it was up again": during,
            "starts of torchrun": {machine.name: machine.starts for machine in machines},
            "log": [re.sub(r"/\S+/", "", line[24:240]) for line in lines]}  # fmt: skip


def log_of(work_dir: Path) -> str:
    path = work_dir / "train.log"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def both(work_dir: Path) -> bool:
    """Whether the present start has two processes."""
    starts = [line for line in log_of(work_dir).splitlines() if "Effective batch:" in line]
    return bool(starts) and "x 2 process(es)" in starts[-1]


def wait(condition: Any, machines: list[Machine], *, update: int, timeout_s: float = 400.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end or not any(machine.is_alive() for machine in machines):
            raise SystemExit(f"the run does not continue after the fault at update {update}")
        time.sleep(0.02)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-result", action="store_true", help="write no file in results/")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="two-machines-"))
    try:
        connect()
        result = measure(folder)
    finally:
        for name in MACHINES:
            ip("netns", "del", f"unigen-{name}", check=False)
    print(result)
    good = result["ended"] and result["ledger as without faults"] and result["losses equal"]
    if not arguments.no_result:
        write_result("two_machines", result)
    if good:
        shutil.rmtree(folder)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
