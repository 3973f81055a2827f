"""``torchrun --nnodes 1:2``: a node is lost, and the other goes on alone with the same effective batch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.end_to_end.resume.ended_processes.test_launchers import TRAIN, written_config
from tests.support.processes import together
from tests.tiny import tiny_config
from tools import resume
from unigen_ds.checkpoint.store import list_checkpoints
from unigen_ds.checks.resume import inspect_resume
from unigen_ds.core.progress import Geometry
from unigen_ds.runner import Runner
from unigen_ds.runner.settings.tree import load_config
from unigen_ds.system.dist import free_port
from unigen_ds.system.journals import read_lines

pytestmark = pytest.mark.timeout(900)
UPDATES = 5
LOST_NODE = """
import os, signal
from unigen_ds.config.registry import HOOKS
from unigen_ds.hooks.base import Hook

@HOOKS.register_module()
class LostNodeHook(Hook):
    def before_train_iter(self, run, index, batch):
        if "LOST" in os.environ and run.progress.updates == 3:
            os.kill(os.getppid(), signal.SIGKILL)  # the agent
            os.kill(os.getpid(), signal.SIGKILL)
"""


def agent(port: int, *arguments: str, host: bool, number: str = "1:2") -> list[str]:
    """A node's torchrun; it notices in 12 s that another one is lost, and waits 15 s for others."""
    how = f"is_host={host},last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=12"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", number, "--nproc_per_node", "1"]
    command += ["--max-restarts", "3", "--monitor-interval", "0.5", "--rdzv-backend", "c10d", "--rdzv-id", "job"]
    return [*command, "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", how, TRAIN, *arguments, "--resume"]


@pytest.mark.slow
def test_a_run_goes_on_with_the_nodes_that_are_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, alone, work_dir = tmp_path / "digits", tmp_path / "alone", tmp_path / "run"
    one = tiny_config(alone, data, train_dataloader__batch_size=8, param_scheduler=[])
    Runner.from_cfg(one, max_updates=UPDATES).train()
    work_dir.mkdir()
    (work_dir / "lost_node.py").write_text(LOST_NODE, encoding="utf-8")
    hooks = {
        "custom_imports": {"imports": ["unigen_ds.examples.digits", "lost_node"]},
        "custom_hooks": [{"type": "LostNodeHook"}],
        "default_hooks__checkpoint__interval": 1,
    }
    config = written_config(work_dir, data, world_size=2, on_batch_change="keep-batch", **hooks)
    arguments, port = [config, "--backend", "fsdp", "--max-updates", str(UPDATES)], free_port()
    nodes = [agent(port, *arguments, host=True), agent(port, *arguments, host=False)]
    first, second = together(nodes, [{}, {"LOST": "1"}], timeout_s=480.0)
    assert (first.status, second.status) == (0, -9), first.ending + second.ending
    log = (work_dir / "train.log").read_text(encoding="utf-8")
    line = "on_batch_change is 'keep-batch': 2 per device x 1 process(es) x 4 accumulated = 8; it was 2 per device x 2 "
    assert log.count(line) == 1 and "ERROR rank 1 does not answer" in log, log
    ledgers, metrics = ([read_lines(folder / f"{name}.jsonl") for folder in (alone, work_dir)]
                        for name in ("ledger", "metrics"))  # fmt: skip
    assert ledgers[0] == ledgers[1] and len(ledgers[0]) == UPDATES, "the same samples, each once"
    losses, of_run = ([line["loss"] for line in lines] for lines in metrics)
    assert of_run == pytest.approx(losses, rel=1e-5)
    sizes = [report.manifest.geometry.global_batch_size for report in list_checkpoints(work_dir) if report.manifest]
    assert set(sizes) == {8}
    report = inspect_resume(
        load_config(config, {"world_size": None, "optim_wrapper.accumulative_counts": 1}), world_size=1
    )
    assert report.geometry == Geometry(2, 4, 1) and not report.blocked, (
        "the batch of the checkpoint, not 2 x 1 of the config"
    )
    assert resume.main([config, "--world-size", "3", "--backend", "fsdp"]) == 2
    output = capsys.readouterr().err
    assert "8 sequences cannot be split over 3 process(es)" in output and "1, 2, 4, 8 processes" in output


def test_world_size_states_the_batch_where_no_checkpoint_does(tmp_path: Path) -> None:
    one = {"train_dataloader__batch_size": 4, "param_scheduler": [], "on_batch_change": "keep-batch"}
    runner = Runner.from_cfg(tiny_config(tmp_path, tmp_path / "digits", world_size=3, **one))
    assert runner.geometry == Geometry(4, 3, 1)
