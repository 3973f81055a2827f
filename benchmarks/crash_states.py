"""After a power cut at any moment of saves, deletions, a merge or a resume: the last checkpoint is there, and is used.

A session of ``tools/train.py`` and ``tools/zero_to_fp32.py`` is recorded, each change of a file with its data
(``shared/file_recorder.c``): saves with deletion of old checkpoints and a kill within one, a merge, a resume that
removes what the kill left, a resume that goes back to an earlier checkpoint, a second merge. Engines: ``single``,
ZeRO-2, ZeRO-3 and FSDP on two processes, with blocking and with asynchronous saves. Of the changes up to a random
moment a random part is then lost (the model: ``shared/crash_model.py``). For each such state:

1. what ``--resume`` chooses (``runner/start/stages.py: plan_start``) is the last checkpoint that the log has reported
   as saved or a newer one, each file of it byte for byte what was written; before the first report it may be none;
2. ``metrics.jsonl`` and ``ledger.jsonl`` have each line that they had when that checkpoint was published;
3. a merged folder is whole or not there, and is there once the tool has ended;
4. for some states: ``tools/train.py --resume`` trains to the end, and every tensor, loss and line of the ledger is that
   of a run that was never stopped.

The bench itself: the whole recording, replayed, is the folder that the session left, byte by byte.

    python benchmarks/crash_states.py [--num 10000] [--seed 0] [--resumes 50] [--engines single zero2 ...] [--only K]

``--only K`` (with one of ``--engines``) draws one state, resumes it, and keeps its folder. Exit status 1 if a state is
not as it must be. Out: ``results/crash_states_<date>.json``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

ENGINES = {"single": 1, "zero2": 2, "zero3": 2, "fsdp": 2}
BACKENDS = {"single": "single", "zero2": "deepspeed:zero2", "zero3": "deepspeed:zero3", "fsdp": "fsdp:FULL_SHARD"}
SAVES = ("blocking", "async")
UPDATES, STOPPED, BACK = 8, 6, 6
"""Of the run; of its first start; the one of the checkpoint to which a later start goes back."""
CONFIG = """
model = dict(type="DecoderLM", llm=dict(model_type="llama", vocab_size=20, hidden_size=8, intermediate_size=12,
             num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64))
tokenizer = dict(type="WordTokenizer", words="zero one two three four five six seven eight nine".split())
train_dataloader = dict(batch_size=1, seq_length=16, num_workers=0, packing=dict(type="BestFitPacking", window=16),
                        dataset=dict(type="UnifiedGenerationDataset", data_path="{data}"))
optim_wrapper = dict(optimizer=dict(type="AdamW", lr=5e-3))
train_cfg = dict(max_updates={updates})
custom_hooks = [dict(type="EMAHook", momentum=0.1)]
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=1, unit="update", max_keep_ckpts=2, {hook}))
randomness = dict(seed=1)
"""
RUN, FIRST, SECOND = "run", "out/of/first", "second"
"""Below the recorded folder: the work dir, and what the merges write."""


# ---- the session: a process with the recorder, which forks those of the programs -------------------------------------


def serve(deepspeed: bool) -> None:
    """Read a task in each line, run its program on each rank in a fork, and answer with how they ended."""
    import importlib

    from tests.end_to_end.engines.worker import PRELOADED

    packages = [name for name in PRELOADED if deepspeed or not name.startswith("deepspeed")]
    for name in (*packages, "unigen_ds.checkpoint.convert", "tools.train", "tools.zero_to_fp32"):
        importlib.import_module(name)
    from unigen_ds.system.dist import free_port

    for line in sys.stdin:
        task = json.loads(line)
        port, processes = free_port(), {}
        for rank in range(task["world"]):
            if (child := os.fork()) == 0:
                run_program(task, rank, port)
            processes[child] = rank
        statuses = [0] * task["world"]
        while processes:
            child, status = os.wait()
            if child not in processes:
                continue
            statuses[processes.pop(child)] = os.waitstatus_to_exitcode(status)
            if status and processes:
                time.sleep(0.5)
                for other in processes:
                    os.kill(other, signal.SIGKILL)
        print(json.dumps(statuses), flush=True)


def run_program(task: dict[str, Any], rank: int, port: int) -> None:
    status = 1
    try:
        output = os.open(f"{task['output']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if task["world"] > 1:
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": task["world"], "LOCAL_WORLD_SIZE": task["world"]}
            os.environ.update({name: str(value) for name, value in {**address, **ranks}.items()})
        if task["root"]:
            arm(task["root"], task["log"], task["kill"])
        sys.argv = [task["program"], *task["arguments"]]
        module = sys.modules[f"tools.{task['program']}"]
        status = module.main(task["arguments"])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def arm(root: str, log: str, kill: str) -> None:
    """Record the changes below ``root`` from now on, those of programs that this process starts too."""
    os.environ.update(FILE_RECORDER_ROOT=root, FILE_RECORDER_LOG=log, FILE_RECORDER_KILL=kill)
    ctypes.CDLL(None).file_recorder_arm(root.encode(), log.encode(), kill.encode())


class Session:
    """Starts programs, one after the other."""

    def __init__(self, base: Path, world: int) -> None:
        library = base / "file_recorder.so"
        source = ROOT / "benchmarks" / "shared" / "file_recorder.c"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl", "-lpthread"], check=True)
        self.base = base
        variables = {"LD_PRELOAD": str(library), "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(world)], env={**os.environ, **variables}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(
        self, program: str, *arguments: str | Path, world: int = 1, root: Any = "", log: Any = "", kill: str = ""
    ) -> tuple[list[int], str]:
        """Statuses of all ranks, and what they printed. With ``root`` it is recorded."""
        output = self.base / "output"
        for path in self.base.glob("output.*"):
            path.unlink()
        task = {"program": program, "arguments": [*map(str, arguments)], "world": world, "output": str(output),
                "root": str(root), "log": str(log), "kill": kill}  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(task), file=self._process.stdin, flush=True)
        statuses = json.loads(self._process.stdout.readline())
        return statuses, "".join(path.read_text(errors="replace") for path in sorted(self.base.glob("output.*")))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


# ---- a recording, and what must be true of its states ----------------------------------------------------------------


@dataclass
class Checkpoint:
    """One that was published."""

    name: str
    at: int
    """Number of its rename."""
    files: dict[str, bytes | None]
    lines: dict[str, list[dict[str, Any]]]
    """Lines that counted then, of each journal."""
    updates: int
    reported_at: float = float("inf")
    """Number of the change after which the log has it."""


@dataclass
class Case:
    """A recorded session of one engine."""

    engine: str
    saves: str
    folder: Path
    session: Session
    straight: Path
    """The work dir of the run that was never stopped."""
    checkpoints: list[Checkpoint] = field(default_factory=list)
    merges: dict[str, tuple[int, dict[str, bytes | None]]] = field(default_factory=dict)
    """Folder of a merge -> the change that published it, and its files."""
    ends: dict[str, int] = field(default_factory=dict)
    """Folder of a merge -> number of changes when its tool had ended."""
    backs: int = 0
    """The change after which the run goes back."""

    def __post_init__(self) -> None:
        from unigen_ds.config.overrides import with_backend
        from unigen_ds.runner.settings.tree import Settings, read_config

        self.root = self.folder / "root"
        self.config = self.folder / "config.py"
        changes = with_backend({"work_dir": str(self.root / RUN)}, BACKENDS[self.engine])
        self._record()
        self._find_events()
        self.settings = Settings.from_config(read_config(str(self.config), changes)).with_resume("auto")

    def train(self, *more: str | Path, work_dir: Path, **how: Any) -> tuple[list[int], str]:
        return train(self.session, self.config, self.engine, *more, work_dir=work_dir, **how)

    def _record(self) -> None:
        from shared.crash_model import Recording, read_inodes, read_tree

        write_inputs(self.folder, self.root, hook=f"async_save={self.saves == 'async'}")
        before, tree, log = read_inodes(self.root), read_tree(self.root), self.folder / "log"
        run = self.root / RUN
        recording: dict[str, Any] = {"root": self.root, "log": log}

        def count() -> int:
            return len(Recording(self.root, log, before, tree).changes)

        def recorded_run(*arguments: str | Path, kill: str = "") -> list[int]:
            statuses, text = self.train(*arguments, work_dir=run, kill=kill, **recording)
            assert kill or not any(statuses), text
            return statuses

        def merge(out: str, *options: str) -> None:
            statuses, text = self.session.run("zero_to_fp32", run, self.root / out, *options, **recording)
            assert not any(statuses), text
            self.ends[out] = count()

        statuses = recorded_run("--max-updates", str(STOPPED), kill=f"iter_{STOPPED - 1}.pth.tmp-")
        assert any(statuses) == (self.saves == "blocking"), "the trainer or the writer was killed within a save"
        if self.saves == "async":
            recorded_run("--resume")
        else:
            merge(FIRST)
            form = "default_hooks.checkpoint.form=full"
            recorded_run("--resume", "--max-updates", str(STOPPED + 1), "--cfg-options", form)
            self.backs = count()
            recorded_run("--resume", run / f"iter_{BACK}.pth")
            merge(SECOND, "--safe-serialization", "--max-shard-size", "1KB")
        self.recording = Recording(self.root, log, before, tree)
        whole, there = self.recording.whole(len(self.recording.changes)), read_tree(self.root)
        different = sorted(path for path in whole.keys() | there.keys() if whole.get(path, 0) != there.get(path, 0))
        assert not different, f"the replayed recording is not the folder: {different}"

    def _find_events(self) -> None:
        from shared.crash_model import below

        from unigen_ds.checkpoint.manifest import FILE_NAME
        from unigen_ds.checkpoint.store import DELETING, STAGING

        for change in self.recording.changes:
            path, (folder, _, name) = change.path, change.other.rpartition("/")
            if change.kind == "rename" and folder == RUN and f".pth{STAGING}" in path and DELETING not in name:
                tree = self.recording.whole(change.number + 1)
                files = below(tree, change.other)
                updates = json.loads(files[FILE_NAME] or b"")["progress"]["updates"]
                lines = {name: lines_until(tree.get(f"{RUN}/{name}") or b"", updates) for name in JOURNALS}
                self.checkpoints.append(Checkpoint(name, change.number, files, lines, updates))
            elif change.kind == "rename" and change.other in (FIRST, SECOND):
                files = below(self.recording.whole(change.number + 1), change.other)
                self.merges[change.other] = change.number, files
            elif change.kind == "write" and path == f"{RUN}/train.log":
                for save in re.findall(rb"Saved checkpoint \S+/(\S+)\.", change.data):
                    last = [one for one in self.checkpoints if one.name == save.decode()][-1]
                    last.reported_at = change.number + 1
        assert len(self.checkpoints) >= UPDATES - 1 and self.merges.keys() == self.ends.keys(), self.checkpoints

    def choices(self, t: int) -> list[Checkpoint] | None:
        """The checkpoints one of which a resume must choose; None: or none at all."""
        saves = [one for one in self.checkpoints if one.reported_at <= t]
        if not saves:
            return None
        last = saves[-1]
        choices = [one for one in self.checkpoints if one.at < t and one.at >= last.at]
        if self.backs and last.reported_at <= self.backs < t:
            choices += [one for one in self.checkpoints if one.name == f"iter_{BACK}.pth"]
        return choices

    def problem(self, t: int, tree: dict[str, bytes | None]) -> tuple[str | None, str]:
        """What is wrong with the state in the folder, if anything, and what a resume does with it."""
        from shared.crash_model import below

        from unigen_ds.core.errors import UnigenError
        from unigen_ds.runner.start.stages import plan_start

        for out, (at, files) in self.merges.items():
            there = below(tree, out)
            if out in tree and (at >= t or there != files):
                missing = sorted(name for name in files if there.get(name) != files[name])
                return f"merged {out} is there and is not whole: {missing}", "merged"
            if out not in tree and t >= self.ends[out]:
                return f"merged {out} is gone, and its tool had ended", "merged"
        choices = self.choices(t)
        try:
            plan = plan_start(self.settings)
        except UnigenError as error:
            text = f"refused: {error}"
            return (None if choices is None else text), "refused"
        if plan.mode == "fresh":
            return (None if choices is None else "from scratch, and a checkpoint was reported as saved"), "fresh"
        assert plan.checkpoint is not None and plan.manifest is not None
        name = plan.checkpoint.name
        candidates = [one for one in self.checkpoints if one.at < t]
        (choice,) = [one for one in candidates if one.name == name][-1:] or [None]
        if choice is None:
            return f"{name} was never published", "resume"
        if choices is not None and choice not in choices:
            return f"{name} is chosen; allowed: {[one.name for one in choices]}", "resume"
        there = below(tree, f"{RUN}/{name}")
        if there != choice.files:
            return f"{name} is chosen and is not what was written", "resume"
        for journal, lines in choice.lines.items():
            if lines_until(tree.get(f"{RUN}/{journal}") or b"", choice.updates) != lines:
                return f"{journal} lacks lines up to update {choice.updates} of {name}", "resume"
        return None, "resume" if choices is None or name == choices[0].name else "resume newer"

    def resume(self) -> str | None:
        """Train on from the state in the folder; what differs from the run that was never stopped."""
        from tests.end_to_end.engines.launch import METRICS, tensors, unequal
        from unigen_ds.checkpoint import store
        from unigen_ds.system.journals import read_lines

        run = self.root / RUN
        statuses, text = self.train("--resume", work_dir=run)
        if any(statuses):
            return f"the resume ended with {statuses}: {text[-2000:]}"
        (one, _), (other, _) = store.newest(run), store.newest(self.straight)
        assert one is not None and other is not None
        if different := unequal(tensors(one.path), tensors(other.path)):
            return f"tensors differ: {different[:3]}"
        names = (*METRICS, "lr", "sequences", "tokens", "samples")
        for journal in JOURNALS:
            a, b = (read_lines(folder / journal) for folder in (run, self.straight))
            if journal == "metrics.jsonl":
                a, b = ([{name: line.get(name) for name in ("update", *names)} for line in lines] for lines in (a, b))
            if a != b:
                return f"{journal} differs"
        return None


JOURNALS = ("metrics.jsonl", "ledger.jsonl")


def lines_until(content: bytes, updates: int) -> list[dict[str, Any]]:
    """The lines of a journal that count, up to an update."""
    from unigen_ds.system.journals import in_effect

    lines = []
    for text in content.decode(errors="replace").split("\n"):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return [line for line in in_effect(lines) if line.get("update", 0) <= updates]


def write_inputs(folder: Path, root: Path, *, hook: str) -> None:
    """The config and the data, whose index is written beside it by the first start."""
    (root / "data").mkdir(parents=True)
    words = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    records = [{"text": " ".join(words[(k + n) % 10] for n in range(3 + k % 9))} for k in range(40)]
    (root / "data" / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    text = CONFIG.format(data=root / "data" / "train.jsonl", updates=UPDATES, hook=hook)
    (folder / "config.py").write_text(text)


def train(
    session: Session, config: Path, engine: str, *more: str | Path, work_dir: Path, **how: Any
) -> tuple[list[int], str]:
    options = ["--backend", BACKENDS[engine], "--work-dir", work_dir]
    return session.run("train", config, *options, *more, world=ENGINES[engine], **how)


# ---- the campaign ----------------------------------------------------------------------------------------------------


def campaign(engine: str, kinds: Sequence[str], numbers: range, seed: int, resumes: int, base: Path) -> dict[str, Any]:
    """The states of one engine, of each kind of save as many."""
    from shared.crash_model import write_tree

    session = Session(base, ENGINES[engine])
    result: dict[str, Any] = {"states": 0, "resumed": 0, "changes": {}, "ends": Counter(), "wrong": {}}
    try:
        straight = base / "straight"
        write_inputs(base, straight, hook="")
        statuses, text = train(session, base / "config.py", engine, work_dir=straight / RUN)
        assert not any(statuses), text
        for part, saves in enumerate(kinds):
            folder = base / saves
            folder.mkdir()
            case = Case(engine, saves, folder, session, straight / RUN)
            total = len(case.recording.changes)
            result["changes"][saves] = total
            own = numbers[part :: len(kinds)]
            to_resume = {own[k * len(own) // resumes] for k in range(part, resumes, len(kinds))}
            for number in own:
                draw = random.Random(f"{seed} {engine} {number}")
                t = draw.randint(0, total)
                tree, how = case.recording.after_cut(t, draw)
                shutil.rmtree(case.root)
                case.root.mkdir()
                write_tree(case.root, tree)
                wrong, end = case.problem(t, tree)
                if number in to_resume and wrong is None:
                    wrong = case.resume()
                    result["resumed"] += 1
                result["states"] += 1
                result["ends"][end] += 1
                if wrong is not None:
                    last = str(case.recording.changes[t - 1]) if t else "the start"
                    result["wrong"][f"{engine} {number}"] = f"{saves}, after {last} ({how}): {wrong}"
                    print(engine, number, result["wrong"][f"{engine} {number}"], flush=True)
    finally:
        session.close()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=10_000, help="states of all engines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resumes", type=int, default=50, help="states that are trained to the end")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=[*ENGINES])
    parser.add_argument("--saves", nargs="+", choices=SAVES, default=[*SAVES])
    parser.add_argument("--only", type=int, metavar="K", help="one state of one engine, kept")
    parser.add_argument("--no-result", action="store_true")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(deepspeed=arguments.serve > 1)
        return 0
    from shared.record import write_result

    began, shared = time.monotonic(), len(arguments.engines)
    each, resumes = -(-arguments.num // shared), arguments.resumes // shared
    numbers = range(each) if arguments.only is None else range(arguments.only, arguments.only + 1)
    by_engine = {}
    for engine in arguments.engines:
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        base = Path(tempfile.mkdtemp(prefix=f"crash-states-{engine}-", dir=memory))
        try:
            by_engine[engine] = campaign(engine, arguments.saves, numbers, arguments.seed, resumes, base)
        finally:
            if arguments.only is None:
                shutil.rmtree(base)
        print(engine, {key: value for key, value in by_engine[engine].items() if key != "wrong"}, flush=True)
    wrong = {number: text for one in by_engine.values() for number, text in one.pop("wrong").items()}
    states, num_resumed = (sum(one[key] for one in by_engine.values()) for key in ("states", "resumed"))
    seconds = round(time.monotonic() - began, 1)
    result = {"seed": arguments.seed, "states": states, "resumed": num_resumed, "seconds": seconds,
              "engines": by_engine, "wrong": wrong}  # fmt: skip
    print(f"{states} states, {num_resumed} trained to the end, {len(wrong)} wrong")
    if not arguments.no_result:
        print(write_result("crash_states", result))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
