"""Evaluations by other processes while a run trains: real processes, an imitation of ``sbatch``, kills and restarts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support import processes
from tests.support.processes import ENVIRONMENT, ROOT
from tests.text_run import log, talks, text_config
from unigen_ds.checkpoint.home import RUN
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.config.registry import HOOKS
from unigen_ds.core.errors import ConfigError
from unigen_ds.evaluation.jobs.evaluation_job import Job, JobFolder, arguments_of, fill_fields
from unigen_ds.hooks.base import Hook, Run
from unigen_ds.hooks.evaluate.async_evaluate import AsyncEvaluateHook
from unigen_ds.runner import Runner
from unigen_ds.system.journals import read_lines

EVALUATE = """
import json, os, sys, time
checkpoint, step, out, seconds = sys.argv[1:5]
assert "RANK" not in os.environ and "WORLD_SIZE" not in os.environ, "the training's processes"
time.sleep(float(seconds))
assert os.path.exists(checkpoint + "/manifest.json"), "deleted while it was evaluated"
with open(out, "w") as stream:
    results = {"mmstar": {"average": 0.5, "alias": "x"}, "mme": int(step)}
    json.dump({"global_step": int(step), "results": results}, stream)
"""
NEEDED = ("{checkpoint}", "{out}")


@HOOKS.register_module(force=True)
class WaitHook(Hook):
    """Waits after some updates until every command has ended, and batch jobs have a result (an update is fast)."""

    name = "wait"

    def __init__(self, *, updates: list[int]) -> None:
        self.updates = updates

    def before_update(self, run: Run) -> None:
        if run.progress.updates in self.updates:
            jobs = JobFolder(run.work_dir / "eval_results" / "run")
            until(lambda: all(isinstance(jobs.status(job), int) for job in jobs.records() if isinstance(job, Job)))
            batch = [job.update for job in jobs.records() if isinstance(job, Job) and "sbatch" in job.command[0]]
            until(lambda: all(jobs.file(update, "json").exists() for update in batch))
            time.sleep(0.1)


@HOOKS.register_module(force=True)
class DeleteHook(Hook):
    """Deletes a file when the training begins."""

    name = "delete"

    def __init__(self, *, path: str) -> None:
        self.path = Path(path)

    def before_train(self, run: Run) -> None:
        self.path.unlink()


@HOOKS.register_module(force=True)
class StopHook(Hook):
    """Sends this process SIGTERM in update 4."""

    name = "stop"

    def before_update(self, run: Run) -> None:
        if run.progress.updates == 3:
            os.kill(os.getpid(), signal.SIGTERM)


@HOOKS.register_module(force=True)
class KillHook(Hook):
    """SIGKILL once the checkpoint of update 2 is there, before its evaluation is asked for."""

    name = "kill"

    def after_save_checkpoint(self, run: Run, path: Path) -> None:
        if run.progress.updates == 2:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "evaluate.py").write_text(EVALUATE)
    return f"{sys.executable} {tmp_path / 'evaluate.py'} {{checkpoint}} {{step}} {{out}}"


def config(
    folder: Path, command: Any, *, updates: int, wait: tuple[int, ...] = (), without: bool = False, **hook: Any
) -> Any:
    own = {key: hook.pop(key) for key in list(hook) if "__" in key or key in ("resume", "train_cfg", "custom_hooks")}
    options = {"interval": 2, "unit": "update", "poll_seconds": 0, **hook}
    evaluate = [] if without else [{"type": "AsyncEvaluateHook", "command": command, **options}]
    return text_config(folder, talks(40), **{
        "train_cfg": {"max_updates": updates},
        "default_hooks__checkpoint": {"interval": 1, "by_epoch": False, "max_keep_ckpts": 1},
        "custom_hooks": [{"type": "WaitHook", "updates": list(wait)}, *evaluate],
        **own,
    })  # fmt: skip


def run(folder: Path, command: Any, **arguments: Any) -> Runner:
    runner = Runner.from_cfg(config(folder, command, **arguments))
    runner.train()
    return runner


def logged_results(folder: Path) -> list[tuple[int, dict[str, float]]]:
    lines = read_lines(folder / "run" / "metrics.jsonl")
    return [(line["update"], {k: v for k, v in line.items() if k.startswith("lmms_eval/")})
            for line in lines if line.get("event") == "async_evaluation"]  # fmt: skip


def until(condition: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_local_process_evaluates_while_the_training_continues(tmp_path, script):
    """Its checkpoint is kept until then, and its result is logged once, at its update."""
    run(tmp_path, f"{script} 0.3", updates=8, wait=(7,))
    assert logged_results(tmp_path)[:3] == [
        (n, {"lmms_eval/mmstar/average": 0.5, "lmms_eval/mme": float(n)}) for n in (2, 4, 6)
    ]
    text = log(tmp_path)
    assert "Evaluation of update 2 asked for" in text and "has 1 values that are no numbers" in text
    assert "WARNING" not in text
    until((tmp_path / "run" / "eval_results" / "run" / "step_8.json").exists)
    for updates in (8, 9):
        run(tmp_path, f"{script} 0.3", updates=updates, resume=True, wait_at_end=True)
        assert [update for update, _ in logged_results(tmp_path)] == [2, 4, 6, 8]
    assert sorted(path.name for path in (tmp_path / "run").glob("*.pth")) == ["iter_9.pth"]
    assert not list((tmp_path / "run" / "eval_results" / "run").glob("*.job"))


@HOOKS.register_module(force=True)
class LateHook(AsyncEvaluateHook):
    """Every evaluation ends between the last look for results and the question what still runs."""

    name = "late"

    def _local(self) -> list[int]:
        if self._folder.worker is not None:
            until(lambda: all(isinstance(self._folder.status(job), int) for job in self._jobs.values()))
        return super()._local()


def test_an_evaluation_that_ends_while_the_run_ends_is_logged(tmp_path, script):
    late = {"type": "LateHook", "command": f"{script} 0", "interval": 2, "unit": "update", "wait_at_end": True}
    run(tmp_path, "", updates=2, without=True, custom_hooks=[late])
    assert [update for update, _ in logged_results(tmp_path)] == [2]


def process(folder: Path, command: str, **arguments: Any) -> list[str]:
    """The command that trains in a process of its own."""
    config(folder, command, **arguments).dump(str(folder / "whole.py"))
    program = f"import sys, {__name__}\nfrom tools.train import main\nsys.exit(main(sys.argv[1:]))"
    return [sys.executable, "-c", program, str(folder / "whole.py")]


@pytest.fixture
def slow(tmp_path: Path) -> str:
    """The command of a program that writes when it begins and ends into ``seen.txt``, and ends when ``go`` is there."""
    (tmp_path / "slow.py").write_text(
        "import os, sys, time\nlog = open(sys.argv[3], 'a')\nprint('begins', sys.argv[2], file=log, flush=True)\n"
        "while not os.path.exists(sys.argv[4]):\n    time.sleep(0.02)\n"
        "assert os.path.exists(sys.argv[2])\nprint('ends', sys.argv[2], file=log, flush=True)\n"
        "open(sys.argv[1], 'w').write('{\"results\": {\"a\": 1}}')\n"
    )
    return f"{sys.executable} {tmp_path / 'slow.py'} {{out}} {{checkpoint}} {tmp_path / 'seen.txt'} {tmp_path / 'go'}"


def calls(folder: Path) -> list[str]:
    return [line.split()[0] for line in (folder / "seen.txt").read_text().splitlines()]


def test_what_waits_when_the_training_has_ended_is_evaluated(tmp_path, slow):
    """One at a time, by a process of its own; checkpoints are kept until then, and the next start logs all results."""
    folder = tmp_path / "run" / "eval_results" / "run"
    training = processes.run(process(tmp_path, slow, updates=6), cwd=ROOT, env=ENVIRONMENT, text=True)
    assert training.returncode == 0, training.stderr
    text = training.stderr
    assert "Evaluations without a result yet: update 2, 4, 6; process " in text and "one at a time" in text
    assert "checkpoints are kept" in text and "tools/report.py" in text and not logged_results(tmp_path)
    assert sorted(path.name for path in (tmp_path / "run").glob("*.pth")) == ["iter_2.pth", "iter_4.pth", "iter_6.pth"]
    (tmp_path / "go").touch()
    until((folder / "step_6.json").exists)
    assert calls(tmp_path) == ["begins", "ends"] * 3, "one at a time"
    assert not (folder / "worker.log").read_text()
    run(tmp_path, slow, updates=6, resume=True, wait_at_end=True)
    assert [update for update, _ in logged_results(tmp_path)] == [2, 4, 6] and not list(folder.glob("*.job"))


def test_a_stopped_run_starts_nothing_more_until_its_next_start(tmp_path, slow):
    body = config(tmp_path, slow, updates=6)
    body["custom_hooks"].append({"type": "StopHook"})
    runner = Runner.from_cfg(body)
    runner.train()
    assert "4; they wait for the next start of this run" in log(tmp_path)
    (tmp_path / "go").touch()
    hook = next(hook for hook in runner.hooks if hook.name == "async_evaluate")
    assert hook._folder.worker.wait(30) == 0
    assert not (tmp_path / "seen.txt").exists() or "iter_4.pth" not in (tmp_path / "seen.txt").read_text()
    run(tmp_path, slow, updates=6, resume=True, wait_at_end=True)
    assert [update for update, _ in logged_results(tmp_path)] == [2, 4, 6]


def test_results_that_arrive_while_the_training_is_dead(tmp_path, script):
    """The training is killed by SIGKILL while an evaluation runs; the next start logs it at its update, once."""
    command = process(tmp_path, f"{script} 1.5", updates=400)
    folder = tmp_path / "run" / "eval_results" / "run"
    training = processes.popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until((folder / "step_2.log").exists, 60)
    training.send_signal(signal.SIGKILL)
    training.wait()
    assert not (folder / "step_2.json").exists() and not logged_results(tmp_path)
    until((folder / "step_2.json").exists)
    runner = run(tmp_path, f"{script} 1.5", updates=400, resume=True, interval=1000,
                  train_cfg={"max_updates": 1 + newest(tmp_path)})  # fmt: skip
    assert runner.progress.updates > 2
    assert logged_results(tmp_path)[0] == (2, {"lmms_eval/mmstar/average": 0.5, "lmms_eval/mme": 2.0})
    assert [update for update, _ in logged_results(tmp_path)].count(2) == 1


def test_a_checkpoint_whose_evaluation_was_not_yet_asked_for_is_evaluated_after_the_resume(tmp_path, script):
    command = process(tmp_path, f"{script} 0", updates=4, custom_hooks=[
        {"type": "KillHook"}, {"type": "AsyncEvaluateHook", "command": f"{script} 0", "interval": 2, "unit": "update"},
    ])  # fmt: skip
    assert processes.run(command, cwd=ROOT, env=ENVIRONMENT, text=True).returncode == -signal.SIGKILL
    assert newest(tmp_path) == 2 and not (tmp_path / "run" / "eval_results" / "run" / "step_2.json").exists()
    run(tmp_path, f"{script} 0", updates=4, resume=True, wait_at_end=True)
    assert [update for update, _ in logged_results(tmp_path)] == [2, 4]


def newest(folder: Path) -> int:
    return max(int(path.stem.split("_")[1]) for path in (folder / "run").glob("iter_*.pth"))


SBATCH = """#!/bin/sh
# an imitation: answers at once, and runs the rest later, as a batch system does
echo "some advice of the cluster"
echo "Submitted batch job 4711"
echo "$@" > "$SUBMITTED"
nohup sh -c 'sleep 0.3; shift; exec "$@"' - "$@" > /dev/null 2>&1 &
"""


def submit_by(monkeypatch, folder: Path, script: str) -> None:
    """``script`` is found as ``sbatch``."""
    (folder / "sbatch").write_text(script)
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_sbatch(tmp_path, script, monkeypatch):
    submit_by(monkeypatch, tmp_path, SBATCH)
    monkeypatch.setenv("SUBMITTED", str(tmp_path / "submitted"))
    run(tmp_path, f"sbatch eval.slurm {script} 0", updates=3, wait=(2,))
    assert [update for update, _ in logged_results(tmp_path)] == [2]
    assert (tmp_path / "submitted").read_text().startswith(f"eval.slurm {sys.executable}")


def test_a_batch_job_keeps_its_checkpoint_until_it_is_given_up(tmp_path, monkeypatch):
    submit_by(monkeypatch, tmp_path, "#!/bin/sh\necho 17\n")  # --parsable
    runner = Runner.from_cfg(config(tmp_path, "sbatch --parsable eval.slurm {checkpoint} {out}", updates=5, interval=4))
    runner.train()
    hook = next(hook for hook in runner.hooks if hook.name == "async_evaluate")
    until(lambda: hook._folder.batch_job(hook._jobs[4]) == "17")
    run(tmp_path, "sbatch x {checkpoint} {out}", updates=7, interval=1000, resume=True)
    assert (tmp_path / "run" / "iter_4.pth").is_dir() and not (tmp_path / "run" / "iter_5.pth").exists()
    run(tmp_path, "sbatch x {checkpoint} {out}", updates=9, interval=1000, resume=True, give_up_hours=1e-9)
    assert not (tmp_path / "run" / "iter_4.pth").exists()
    assert "(batch job 17) has no result after" in log(tmp_path)


@pytest.mark.parametrize(
    "text, problem",
    [
        ("{", "it is no JSON"),
        ('{"results": {"a": "b"}}', "it has no number"),
        ('{"results": {"a": 1}, "global_step": 3}', 'its "global_step" is 3'),
    ],
)
def test_a_malformed_result_is_named_once(tmp_path, text, problem):
    write = f"import sys; open(sys.argv[1], 'w').write({text!r})"
    run(tmp_path, [sys.executable, "-c", write, "{out}", "{checkpoint}"], updates=5, wait=(2, 3, 4), interval=2)
    assert not logged_results(tmp_path)
    assert log(tmp_path).count("step_2.json is not logged") == 1 and problem in log(tmp_path)


def test_a_result_that_is_repaired_by_hand_is_logged(tmp_path):
    folder = tmp_path / "run" / "eval_results" / "run"
    run(tmp_path, [sys.executable, "-c", "pass", *NEEDED], updates=3)
    (folder / "step_2.json").write_text('{"results": [{"values": {"val/loss": 1.5}, "provenance": {"a": 1}}]}')
    run(tmp_path, [sys.executable, "-c", "pass", *NEEDED], updates=3, resume=True, wait_at_end=True)
    assert logged_results(tmp_path) == [(2, {"lmms_eval/val/loss": 1.5})]


def test_what_goes_wrong_never_ends_the_training(tmp_path):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    settings = config(tmp_path, f"{program} {{checkpoint}} {{out}}", updates=3, wait_at_end=True)
    settings["custom_hooks"].append({"type": "DeleteHook", "path": str(program)})
    Runner.from_cfg(settings).train()
    assert "with status 127 without a result" in log(tmp_path) and "it cannot be started" in log(tmp_path)
    (tmp_path / "b").mkdir()
    fails = [sys.executable, "-c", "print('no memory'); raise SystemExit(5)", *NEEDED]
    run(tmp_path / "b", fails, updates=4, wait=(2, 3))
    assert "has ended with status 5 without a result" in log(tmp_path / "b")
    assert "no memory" in (tmp_path / "b" / "run" / "eval_results" / "run" / "step_2.log").read_text()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "run").mkdir()
    (tmp_path / "c" / "run" / "eval_results").write_text("a file where the folder would be")
    assert run(tmp_path / "c", [sys.executable, "-c", "pass", *NEEDED], updates=3).progress.updates == 3
    assert "Training continues" in log(tmp_path / "c")


@pytest.mark.parametrize(
    "command, problem",
    [
        ("python my/ev.py", r"has no \{checkpoint\} and has no \{out\}: python my/ev.py"),
        ("sbatch eval.slurm {checkpoint} {step}", r"has no \{out\}.*Allowed: .*sbatch.*\{step\}"),
        ("pyhton ev.py {checkpoint} {out}", "no program 'pyhton'.*Remedy: install it"),
        ("a 'b", "No closing quotation"),
        ("a {chekpoint}", r"\{chekpoint\}.*Allowed: \{checkpoint\}"),
    ],
)
def test_a_command_that_cannot_work_is_refused_at_the_start(tmp_path, command, problem):
    with pytest.raises(ConfigError, match=problem):
        run(tmp_path, command, updates=1)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_results_of_an_abandoned_branch_are_not_logged(tmp_path, script):
    """The run goes back to before update 4, whose result is there already, and evaluates update 4 again."""
    keep = {"default_hooks__checkpoint__max_keep_ckpts": -1}
    run(tmp_path, f"{script} 0", updates=6, wait=(2, 4, 5), **keep)
    assert [update for update, _ in logged_results(tmp_path)][:2] == [2, 4]
    run(tmp_path, f"{script} 0", updates=5, wait=(4,), resume=str(tmp_path / "run" / "iter_3.pth"), **keep)
    assert [update for update, _ in logged_results(tmp_path)] == [2, 4]
    assert (tmp_path / "run" / "eval_results" / "run" / "step_4.json.abandoned").exists()


def test_evaluations_of_another_run_are_left_alone(tmp_path, script):
    """Two work dirs of one name, one shared folder of results: none ends, sets aside or logs what is the other's; nor
    does a copy of the work dir. Each start of a run has the folder of its first one.
    """
    shared, command = tmp_path / "shared", f"{script} 2.5"
    one, two, copy = (tmp_path / name for name in ("one", "two", "copy"))
    one.mkdir(), two.mkdir()
    run(one, command, updates=4, results=str(shared))  # update 2 is evaluated, 4 waits
    running = json.loads((shared / "run" / "step_2.job").read_text())
    shutil.copytree(one, copy)
    folders, jobs = [], JobFolder(shared / "run")
    for folder, resume in ((two, False), (copy, str(copy / "run" / "iter_2.pth"))):
        run(folder, f"{script} 0", updates=6, results=str(shared), wait_at_end=True, resume=resume)
        assert [update for update, _ in logged_results(folder)] == [2, 4, 6]
        folders.append(f"run-{(folder / 'run' / RUN).read_text()[:8]}")
        assert f"{shared / 'run'} has the evaluations of another run" in log(folder)
        assert not [text for text in ("is ended:", "is now", "Hook:") if text in log(folder)]
    assert sorted(path.name for path in shared.iterdir()) == sorted(["run", *folders]) and len(set(folders)) == 2
    until(lambda: all(isinstance(jobs.status(job), int) for job in jobs.records() if isinstance(job, Job)))
    assert json.loads((shared / "run" / "step_2.json").read_text())["results"]["mme"] == 2, running
    shutil.move(one, tmp_path / "moved")
    run(tmp_path / "moved", command, updates=4, results=str(shared), resume=True)
    assert [update for update, _ in logged_results(tmp_path / "moved")] == [2, 4]
    ids = {Manifest.read(path).run for path in tmp_path.glob("*/run/iter_*.pth")}
    assert len(ids) == 3 and all(len(each) == 16 for each in ids)


def start(jobs: JobFolder, update: int) -> int:
    """The number of a new job's process, which writes it first."""
    show = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    jobs.add(Job(update, 1, "iter.pth", (sys.executable, "-c", show), time.time()))
    jobs.start_worker({})
    until(lambda: jobs.file(update, "log").exists() and jobs.last_lines(update).isdigit())
    return int(jobs.last_lines(update))


def is_alive(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


def test_what_is_abandoned_or_left_by_a_worker_is_ended(tmp_path):
    """A command ends when its record is deleted, or with its worker; what a killed worker left has ended unseen."""
    jobs = JobFolder(tmp_path)
    process = start(jobs, 2)
    (job,) = jobs.records()
    assert jobs.status(job) == "running"
    jobs.remove(job, cancel=True)
    until(lambda: not is_alive(process))
    assert jobs.worker.wait(30) == 0
    process = start(jobs, 4)
    jobs.worker.terminate()
    assert jobs.worker.wait(30) == 143
    until(lambda: not is_alive(process))
    (job,) = jobs.records()
    assert jobs.status(job) == "running" and jobs.start_worker({}) and jobs.worker.wait(30) == 0
    assert jobs.status(job) == -1


def test_no_shell_reads_a_command(tmp_path):
    """Nothing in a path is executed, also where the command passes text to a shell itself."""
    evil = "/data/$(touch pwned); touch pwned {step}"
    values = {"checkpoint": evil, "step": "7", "out": "o"}
    words = arguments_of("run 'a b' {checkpoint} x={step} {out}", where="c")
    assert fill_fields(words, values) == ("run", "a b", evil, "x=7", "o")
    for command in ("bash {out} -c 'cat {checkpoint}'", "sbatch {out} --wrap 'cat {checkpoint}'"):
        *_, text = fill_fields(arguments_of(command, where="c"), values)
        subprocess.run(["bash", "-c", text], cwd=tmp_path, capture_output=True)
        assert text == f"cat '{evil}'" and not list(tmp_path.iterdir())
    assert fill_fields(("sbatch", "--wrap=cat {checkpoint}"), values)[1] == f"--wrap=cat '{evil}'"


def test_training_is_bit_equal_with_and_without_it(tmp_path, script):
    names = ("with", "without")
    for name in names:
        (tmp_path / name).mkdir()
        Runner.from_cfg(config(tmp_path / name, f"{script} 0", updates=4, without=name == "without")).train()
    mine, plain = (load_file(tmp_path / name / "run" / "iter_4.pth" / "model.safetensors") for name in names)
    assert all(torch.equal(mine[name], plain[name]) for name in plain)
    ledgers = [(tmp_path / name / "run" / "ledger.jsonl").read_text() for name in names]
    assert ledgers[0] == ledgers[1]
