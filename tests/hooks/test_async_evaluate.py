"""Evaluations by other processes while a run trains: real processes, an imitation of ``sbatch``, kills and restarts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import processes
from tests.processes import ENVIRONMENT, ROOT
from tests.text_run import text_config, words
from unigen_ds.checkpoint.home import RUN
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.metrics import read_lines
from unigen_ds.core.registry import HOOKS
from unigen_ds.evaluation.jobs import JobFolder, arguments_of, filled, new_job, read_result
from unigen_ds.hooks.base import Hook, Run
from unigen_ds.runner import Runner

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
    """Waits after given updates until every evaluation that has started has a result (an update is fast)."""

    name = "wait"

    def __init__(self, *, updates: list[int], seconds: float = 30.0) -> None:
        self.updates, self.seconds = updates, seconds

    def before_update(self, run: Run) -> None:
        folder, end = run.work_dir / "eval_results" / "run", time.monotonic() + self.seconds
        while run.progress.updates in self.updates and time.monotonic() < end:
            jobs = [job for path in folder.glob("*.job") if (job := json.loads(path.read_text()))["pid"] is not None]
            if all((folder / f"step_{job['update']}.json").exists() or _ended(job) for job in jobs):
                time.sleep(0.1)
                break
            time.sleep(0.02)


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
class AloneHook(Hook):
    """No other process may start evaluations while this run trains."""

    name = "alone"

    def before_update(self, run: Run) -> None:
        assert not (run.work_dir / "eval_results" / "run" / "queue.worker").exists()


def _ended(job: dict[str, Any]) -> bool:
    """Whether it is a local process that has ended without a result, and no parent has asked for its status."""
    if "sbatch" in job["command"][0]:
        return False
    return "Z" in Path(f"/proc/{job['pid']}/stat").read_text().rpartition(")")[2]


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "evaluate.py").write_text(EVALUATE)
    return f"{sys.executable} {tmp_path / 'evaluate.py'} {{checkpoint}} {{step}} {{out}}"


def config(
    folder: Path, command: Any, *, updates: int, wait: tuple[int, ...] = (), without: bool = False, **hook: Any
) -> Any:
    turns = (("user", 3), ("assistant", 5))
    records = [
        {"conversations": [{"role": role, "type": "text", "content": words(number, k)} for role, number in turns]}
        for k in range(40)
    ]
    own = {key: hook.pop(key) for key in list(hook) if "__" in key or key in ("resume", "train_cfg")}
    given = {"interval": 2, "unit": "update", "poll_seconds": 0, **hook}
    evaluate = [] if without else [{"type": "AsyncEvaluateHook", "command": command, **given}]
    return text_config(folder, records, **{
        "train_cfg": {"max_updates": updates},
        "default_hooks__checkpoint": {"interval": 1, "by_epoch": False, "max_keep_ckpts": 1},
        "custom_hooks": [{"type": "AloneHook"}, {"type": "WaitHook", "updates": list(wait)}, *evaluate],
        **own,
    })  # fmt: skip


def run(folder: Path, command: Any, **arguments: Any) -> Runner:
    runner = Runner.from_cfg(config(folder, command, **arguments))
    runner.train()
    return runner


def logged(folder: Path) -> list[tuple[int, dict[str, float]]]:
    lines = read_lines(folder / "run" / "metrics.jsonl")
    return [(line["update"], {k: v for k, v in line.items() if k.startswith("lmms_eval/")})
            for line in lines if line.get("event") == "async_evaluation"]  # fmt: skip


def log(folder: Path) -> str:
    return (folder / "run" / "train.log").read_text(encoding="utf-8")


def until(condition: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_local_process_evaluates_while_the_training_continues(tmp_path, script):
    """Its checkpoint is kept until then, and its result is logged once, at its update."""
    run(tmp_path, f"{script} 0.3", updates=8, wait=(7,), max_running=4)
    expected = [(n, {"lmms_eval/mmstar/average": 0.5, "lmms_eval/mme": float(n)}) for n in (2, 4, 6)]
    assert logged(tmp_path)[:3] == expected
    text = log(tmp_path)
    assert "Evaluation of update 2 started" in text and "has 1 values that are no numbers" in text
    assert (
        text.index("Evaluation of update 2 started") < text.index("update 7  iteration")
        if "update 7  " in text
        else True
    )
    assert "WARNING" not in text
    until((tmp_path / "run" / "eval_results" / "run" / "step_8.json").exists)
    run(tmp_path, f"{script} 0.3", updates=8, resume=True)
    assert [update for update, _ in logged(tmp_path)] == [2, 4, 6, 8]
    run(tmp_path, f"{script} 0.3", updates=9, resume=True)
    assert [update for update, _ in logged(tmp_path)] == [2, 4, 6, 8]
    assert sorted(path.name for path in (tmp_path / "run").glob("*.pth")) == ["iter_9.pth"]
    assert not list((tmp_path / "run" / "eval_results" / "run").glob("*.job"))


def process_of(folder: Path, command: str, **arguments: Any) -> str:
    """Train in a process of its own; returns what it printed."""
    config(folder, command, **arguments).dump(str(folder / "whole.py"))
    program = "import sys, tests.hooks.test_async_evaluate\nfrom tools.train import main\nsys.exit(main(sys.argv[1:]))"
    training = processes.run(
        [sys.executable, "-c", program, str(folder / "whole.py")], cwd=ROOT, env=ENVIRONMENT, text=True
    )
    assert training.returncode == 0, training.stderr
    return training.stderr


@pytest.fixture
def slow(tmp_path: Path) -> str:
    """The command of a program that writes when it begins and ends into ``seen.txt``, and needs a second."""
    (tmp_path / "slow.py").write_text(
        "import os, sys, time\nlog = open(sys.argv[3], 'a')\nprint('begins', sys.argv[2], file=log, flush=True)\n"
        "time.sleep(1)\nassert os.path.exists(sys.argv[2])\nprint('ends', sys.argv[2], file=log, flush=True)\n"
        "open(sys.argv[1], 'w').write('{\"results\": {\"a\": 1}}')\n"
    )
    return f"{sys.executable} {tmp_path / 'slow.py'} {{out}} {{checkpoint}} {tmp_path / 'seen.txt'}"


def seen(folder: Path) -> list[str]:
    return [line.split()[0] for line in (folder / "seen.txt").read_text().splitlines()]


def test_what_waits_when_the_training_has_ended_is_evaluated(tmp_path, slow):
    """One at a time, by a process of its own; checkpoints are kept until then, and the next start logs all results."""
    folder = tmp_path / "run" / "eval_results" / "run"
    text = process_of(tmp_path, slow, updates=6)
    assert "Evaluations without a result yet: 3. Running, also after this training has ended: update 2 (process" in text
    assert "Waiting: update 4, 6; process " in text and "starts them in this order, 1 at a time" in text
    assert "checkpoints are kept" in text and "tools/report.py" in text and not logged(tmp_path)
    assert sorted(path.name for path in (tmp_path / "run").glob("*.pth")) == ["iter_2.pth", "iter_4.pth", "iter_6.pth"]
    until((folder / "step_6.json").exists)
    assert seen(tmp_path) == ["begins", "ends"] * 3, "one at a time"
    assert not (folder / "queue.worker").exists() and not (folder / "queue.log").read_text()
    run(tmp_path, slow, updates=6, resume=True)
    assert [update for update, _ in logged(tmp_path)] == [2, 4, 6] and not list(folder.glob("*.job"))


def test_the_next_start_has_the_queue_again(tmp_path, slow):
    """While another process still works it off: each checkpoint is evaluated once, one at a time."""
    run(tmp_path, slow, updates=6)
    worker = tmp_path / "run" / "eval_results" / "run" / "queue.worker"
    first = worker.read_text()
    run(tmp_path, slow, updates=7, resume=True, wait_at_end=True)
    assert first and not worker.exists() and [update for update, _ in logged(tmp_path)] == [2, 4, 6]
    time.sleep(0.7)  # the first process would have started another one by now
    assert seen(tmp_path) == ["begins", "ends"] * 3
    assert "Waiting for 3 evaluations" in log(tmp_path) or "Waiting for 2 evaluations" in log(tmp_path)


def test_a_stopped_run_leaves_the_queue_to_its_next_start(tmp_path, script):
    stop = {"type": "StopHook"}
    body = config(tmp_path, f"{script} 3", updates=6)
    body["custom_hooks"].append(stop)
    Runner.from_cfg(body).train()
    assert "Waiting: update 4; the next start of this run starts them" in log(tmp_path)
    assert not (tmp_path / "run" / "eval_results" / "run" / "queue.worker").exists()
    run(tmp_path, f"{script} 0", updates=6, resume=True, wait_at_end=True)
    assert [update for update, _ in logged(tmp_path)] == [2, 4, 6]


def test_training_is_bit_equal_with_and_without_it(tmp_path, script):
    names = ("with", "without")
    for name in names:
        (tmp_path / name).mkdir()
        Runner.from_cfg(config(tmp_path / name, f"{script} 0", updates=4, without=name == "without")).train()
    mine, plain = (
        load_file(tmp_path / name / "run" / "iter_4.pth" / "model.safetensors") for name in ("with", "without")
    )
    assert all(torch.equal(mine[name], plain[name]) for name in plain)
    ledgers = [(tmp_path / name / "run" / "ledger.jsonl").read_text() for name in names]
    assert ledgers[0] == ledgers[1]


def test_a_waiting_one_keeps_its_checkpoint(tmp_path, script):
    """One process at a time: the checkpoints of updates 4 and 6 wait, and are there when their turn comes."""
    run(tmp_path, f"{script} 0.3", updates=10, wait=(6, 7, 8, 9), max_running=1)
    assert [update for update, _ in logged(tmp_path)][:3] == [2, 4, 6]


def test_results_that_arrive_while_the_training_is_dead(tmp_path, script):
    """The training is killed by SIGKILL while an evaluation runs; the next start logs it at its update, once."""
    body = config(tmp_path, f"{script} 1.5", updates=400)
    body.dump(str(tmp_path / "whole.py"))
    command = [sys.executable, "-c", "import sys, tests.hooks.test_async_evaluate\nfrom tools.train import main\n"
               "sys.exit(main(sys.argv[1:]))", str(tmp_path / "whole.py")]  # fmt: skip
    folder = tmp_path / "run" / "eval_results" / "run"
    training = processes.popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: (folder / "step_2.log").exists() and '"pid": null' not in (folder / "step_2.job").read_text(), 60)
    training.send_signal(signal.SIGKILL)
    training.wait()
    assert not (folder / "step_2.json").exists() and not logged(tmp_path)
    until((folder / "step_2.json").exists)
    resumed = run(tmp_path, f"{script} 1.5", updates=400, resume=True, interval=1000,
                  train_cfg={"max_updates": 1 + newest(tmp_path)})  # fmt: skip
    assert resumed.progress.updates > 2
    assert logged(tmp_path)[0] == (2, {"lmms_eval/mmstar/average": 0.5, "lmms_eval/mme": 2.0})
    assert [update for update, _ in logged(tmp_path)].count(2) == 1


def newest(folder: Path) -> int:
    return max(int(path.stem.split("_")[1]) for path in (folder / "run").glob("iter_*.pth"))


SBATCH = """#!/bin/sh
# an imitation: answers at once, and runs the rest later, as a batch system does
echo "some advice of the cluster"
echo "Submitted batch job 4711"
echo "$@" > "$SUBMITTED"
nohup sh -c 'sleep 0.3; shift; exec "$@"' - "$@" > /dev/null 2>&1 &
"""


def test_sbatch(tmp_path, script, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(SBATCH)
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SUBMITTED", str(tmp_path / "submitted"))
    run(tmp_path, f"sbatch eval.slurm {script} 0", updates=3, wait=(2,))
    assert [update for update, _ in logged(tmp_path)] == [2]
    assert (tmp_path / "submitted").read_text().startswith(f"eval.slurm {sys.executable}")


def test_a_batch_job_keeps_its_checkpoint_until_it_is_given_up(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho 17\n")  # --parsable
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    runner = Runner.from_cfg(config(tmp_path, "sbatch --parsable eval.slurm {checkpoint} {out}", updates=5, interval=4))
    runner.train()
    hook = next(hook for hook in runner.hooks if hook.name == "async_evaluate")
    until(lambda: (hook.after_train(runner), hook._jobs[4].batch_job)[1] == "17")  # type: ignore[func-returns-value]
    run(tmp_path, "sbatch x {checkpoint} {out}", updates=7, interval=1000, resume=True)
    assert (tmp_path / "run" / "iter_4.pth").is_dir() and not (tmp_path / "run" / "iter_5.pth").exists()
    run(tmp_path, "sbatch x {checkpoint} {out}", updates=9, interval=1000, resume=True, give_up_hours=1e-9)
    assert not (tmp_path / "run" / "iter_4.pth").exists()
    assert "(batch job 17) has no result after" in log(tmp_path)


@pytest.mark.parametrize(
    "text, problem",
    [
        ("{", "it is no JSON"),
        ("[1]", 'no object under "results"'),
        ('{"results": {"a": "b"}}', "it has no number"),
        ('{"results": {"a": 1}, "global_step": 3}', 'its "global_step" is 3'),
    ],
)
def test_a_malformed_result_is_named_once(tmp_path, text, problem):
    write = f"import sys; open(sys.argv[1], 'w').write({text!r})"
    run(tmp_path, [sys.executable, "-c", write, "{out}", "{checkpoint}"], updates=5, wait=(2, 3, 4), interval=2)
    assert not logged(tmp_path)
    assert log(tmp_path).count("step_2.json is not logged") == 1 and problem in log(tmp_path)


def test_a_result_that_is_repaired_by_hand_is_logged(tmp_path):
    folder = tmp_path / "run" / "eval_results" / "run"
    run(tmp_path, [sys.executable, "-c", "pass", *NEEDED], updates=3)
    (folder / "step_2.json").write_text('{"results": [{"values": {"val/loss": 1.5}, "provenance": {"a": 1}}]}')
    run(tmp_path, [sys.executable, "-c", "pass", *NEEDED], updates=3, resume=True)
    assert logged(tmp_path) == [(2, {"lmms_eval/val/loss": 1.5})]


def test_what_goes_wrong_never_ends_the_training(tmp_path):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    held = config(tmp_path, f"{program} {{checkpoint}} {{out}}", updates=3)
    held["custom_hooks"].append({"type": "DeleteHook", "path": str(program)})
    Runner.from_cfg(held).train()
    assert "cannot be started: there is no program" in log(tmp_path)
    (tmp_path / "b").mkdir()
    run(
        tmp_path / "b",
        [sys.executable, "-c", "print('no memory'); raise SystemExit(5)", *NEEDED],
        updates=4,
        wait=(2, 3),
    )
    assert "has ended with status 5 without a result" in log(tmp_path / "b")
    assert "no memory" in (tmp_path / "b" / "run" / "eval_results" / "run" / "step_2.log").read_text()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "run").mkdir()
    (tmp_path / "c" / "run" / "eval_results").write_text("a file where the folder would be")
    assert run(tmp_path / "c", [sys.executable, "-c", "pass", *NEEDED], updates=3).progress.updates == 3
    assert "Training continues" in log(tmp_path / "c")


def test_the_next_start_names_how_a_process_ended(tmp_path):
    """After the last update: nobody of this run saw it end, with a status or by a signal."""
    folder = tmp_path / "run" / "eval_results" / "run"
    fails = "import time; time.sleep(0.3); print('loading'); print('no memory'); raise SystemExit(5)"
    run(tmp_path, [sys.executable, "-c", fails, *NEEDED], updates=2)
    until(lambda: (folder / "step_2.status").exists() and (folder / "step_2.status").read_text().strip())
    assert "evaluation of update 2 has ended" not in log(tmp_path)
    run(tmp_path, [sys.executable, "-c", fails, *NEEDED], updates=3, resume=True)
    line = next(one for one in log(tmp_path).splitlines() if "evaluation of update 2 has ended" in one)
    assert "with status 5 without a result" in line and "step_2.log: loading | no memory. Command: " in line
    job = new_job(7, 1, tmp_path, ("sleep", "9"), tmp_path / "out")
    jobs = JobFolder(tmp_path / "jobs")
    jobs.folder.mkdir()
    job = jobs.start(job, {})
    jobs.cancel(job)
    until(lambda: JobFolder(jobs.folder).status(job) is not None)
    assert JobFolder(jobs.folder).status(job) == -1 and jobs.last_lines(7) == "nothing was printed"


@pytest.mark.parametrize(
    "command, problem",
    [
        ("python my/ev.py", r"has no \{checkpoint\} and no \{out\}, so no result can come: python my/ev.py"),
        (
            "sbatch eval.slurm {checkpoint} {step}",
            r"has no \{out\}.*Allowed: \{checkpoint\}.*\{out\}.*sbatch.*\{step\}",
        ),
        (["python", "{out}"], r"has no \{checkpoint\}, so"),
        ("pyhton ev.py {checkpoint} {out}", "no program 'pyhton'.*Remedy: install it"),
        ("/nowhere/evaluate {checkpoint} {out}", "no program '/nowhere/evaluate'"),
        (f"{sys.executable} -u nothere.py {{checkpoint}} {{out}}", "no file 'nothere.py', which .*relative path"),
        ("sh nothere.sh {checkpoint} {out}", "no file 'nothere.sh'"),
        ("sh -c 'x' {checkpoint} {out} > log.txt", r"has '>', which only a shell .*sh -c '\.\.\.'"),
        ("true {checkpoint} {out} 2>&1", "has '2>&1', which"),
        ("cd x && true {checkpoint} {out}", "has '&&', which"),
        ("cd x; true {checkpoint} {out}", "has 'x;', which"),
    ],
)
def test_a_command_without_a_result_is_refused_at_the_start(tmp_path, command, problem):
    with pytest.raises(ConfigError, match=problem):
        run(tmp_path, command, updates=1)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_results_of_an_abandoned_branch_are_not_logged(tmp_path, script):
    """The run goes back to before update 4, whose result is there already, and evaluates update 4 again."""
    keep = {"default_hooks__checkpoint__max_keep_ckpts": -1}
    run(tmp_path, f"{script} 0", updates=6, wait=(2, 4, 5), **keep)
    assert [update for update, _ in logged(tmp_path)][:2] == [2, 4]
    run(tmp_path, f"{script} 0", updates=5, wait=(4,), resume=str(tmp_path / "run" / "iter_3.pth"), **keep)
    assert [update for update, _ in logged(tmp_path)] == [2, 4]
    assert (tmp_path / "run" / "eval_results" / "run" / "step_4.json.abandoned").exists()


def test_evaluations_of_another_run_are_left_alone(tmp_path, script):
    """Two work dirs of one name, one shared folder of results: none ends, sets aside or logs what is the other's; nor
    does a copy of the work dir. Each start of a run has the folder of its first one.
    """
    shared, command = tmp_path / "shared", f"{script} 2.5"
    one, two, copy = (tmp_path / name for name in ("one", "two", "copy"))
    one.mkdir(), two.mkdir()
    run(one, command, updates=4, max_running=1, results=str(shared))  # update 2 is evaluated, 4 waits
    running = json.loads((shared / "run" / "step_2.job").read_text())
    shutil.copytree(one, copy)
    folders = []
    for folder, resume in ((two, False), (copy, str(copy / "run" / "iter_2.pth"))):
        run(folder, f"{script} 0", updates=6, results=str(shared), max_running=9, wait_at_end=True, resume=resume)
        assert [update for update, _ in logged(folder)] == [2, 4, 6][resume is not False :]
        folders.append(f"run-{(folder / 'run' / RUN).read_text()[:8]}")
        assert f"{shared / 'run'} has the evaluations of another run" in log(folder)
        assert not [text for text in ("is ended:", "is now", "Hook:") if text in log(folder)]
    assert sorted(path.name for path in shared.iterdir()) == sorted(["run", *folders]) and len(set(folders)) == 2
    until((shared / "run" / "step_4.json").exists)
    assert json.loads((shared / "run" / "step_2.json").read_text())["results"]["mme"] == 2, running
    shutil.move(one, tmp_path / "moved")
    run(tmp_path / "moved", command, updates=4, results=str(shared), resume=True)
    assert [update for update, _ in logged(tmp_path / "moved")] == [2, 4]
    ids = {Manifest.read(path).run for path in tmp_path.glob("*/run/iter_*.pth")}
    assert len(ids) == 3 and all(len(each) == 16 for each in ids)


def test_only_its_own_process_is_ended(tmp_path):
    """Not one whose number is of another container, and not one that has got the number later. One of another
    container that has ended with it is not waited for.
    """
    jobs = JobFolder(tmp_path)
    own = jobs.start(new_job(2, 1, tmp_path, ["sleep", "60"], tmp_path / "out"), {})
    process = jobs._processes.pop(own.pid)  # as after another start
    elsewhere = replace(own, pid_space="elsewhere")
    cases = {elsewhere: None, replace(own, pid_start="1"): -1, replace(own, pid_start=""): -1,
             replace(own, pid=0, pid_start=""): -1}  # fmt: skip
    for other, status in cases.items():
        assert jobs.status(other) == status
        jobs.cancel(other)
    assert process.poll() is None and jobs.status(own) is None
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL and jobs.status(own) == -1
    until(lambda: jobs.status(elsewhere) == -1)


def test_no_shell_reads_a_command(tmp_path):
    """Nothing in a path is executed, also where the command passes text to a shell itself."""
    evil = "/data/$(touch pwned); touch pwned {step}"
    values = {"checkpoint": evil, "step": "7", "out": "o"}
    assert filled(arguments_of("run 'a b' {checkpoint} x={step}", where="c"), values) == ("run", "a b", evil, "x=7")
    for command in ("bash -c 'cat {checkpoint}'", "sbatch --wrap 'cat {checkpoint}'"):
        *_, text = filled(arguments_of(command, where="c"), values)
        subprocess.run(["bash", "-c", text], cwd=tmp_path, capture_output=True)
        assert text == f"cat '{evil}'" and not list(tmp_path.iterdir())
    for allowed in ("sh -c 'a > b; c'", "sbatch --wrap='a && b > c'", "run '<image>' a|b", r"find \;"):
        arguments_of(allowed, where="c")
    assert filled(("sbatch", "--wrap=cat {checkpoint}"), values)[1] == f"--wrap=cat '{evil}'"


@pytest.mark.parametrize(
    "command, problem",
    [("", "is empty"), ("a 'b", "No closing quotation"), ("a {chekpoint}", r"\{chekpoint\}.*Allowed: \{checkpoint\}")],
)
def test_commands_that_cannot_work_are_refused(command, problem):
    with pytest.raises(ConfigError, match=problem):
        arguments_of(command, where="AsyncEvaluateHook.command")


def test_numbers_of_a_result(tmp_path):
    path = tmp_path / "step_3.json"
    path.write_text(json.dumps({"results": {"a": {"b": 1, "c": True, "d": "x", "e": None}, "f": 0.5}}))
    assert read_result(path, update=3) == ({"a/b": 1.0, "f": 0.5}, 3)
    (tmp_path / "step_x.json").write_text("{}")
    assert JobFolder(tmp_path).results() == [(3, path)]
