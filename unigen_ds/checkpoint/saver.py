"""Write one checkpoint so that it either exists completely or not at all.

::

    announce   every rank: the engine lists the files of this rank (collectives, no disk)
               rank 0:     journals flushed to disk, free space checked, iter_100.pth.tmp-<commit>/ made
    write      every rank: writes its files with their hashes, flushes each to disk (disk, no collectives)
    commit     rank 0:     index files, the consolidated files (consolidated.py) if asked for, manifest.json last,
                           rename: from here on it exists; last_checkpoint, a hint
           What is not finite gets a name that no resume loads, and ends the run.

Each phase ends with one gather of every rank's outcome to rank 0 and one short answer to all (``_phase``), so no rank
can wait in another collective than the others. A failure on any rank (a full disk, say) in any phase makes every rank
raise the same ``SaveError``, removes the staging directory, and leaves every older checkpoint as it was. Deleting older
ones is the caller's task, after the commit.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from unigen_ds.backends.base import Backend
from unigen_ds.checkpoint import consolidated, store
from unigen_ds.checkpoint.manifest import FILE_NAME, FileEntry, Manifest, check_stamp
from unigen_ds.core.errors import ConfigError, SaveError, TrainingError, UnigenError
from unigen_ds.core.shards import STAMP, Shard, shard_key
from unigen_ds.system import dist
from unigen_ds.system.files import delete_inside, fsync_path, make_directory, rename_into_place
from unigen_ds.system.log import logger
from unigen_ds.system.outputs import Output, StateFiles, all_finite, bytes_output, safetensors_output, write_output
from unigen_ds.system.seeding import rng_state, set_rng_state

RNG_DIRECTORY, HOOKS_FILE, CONFIG_FILE, TOKENIZER = "rng", "hooks.json", "config.py", "tokenizer"
_THREADS = 4
"""Files that a rank writes at a time: one is hashed while the system flushes another."""
_NAMED = 3
"""Ranks whose errors are in a message, and tensors."""


def save(
    work_dir: Path,
    name: str,
    *,
    backend: Backend,
    manifest: Manifest,
    hook_states: Mapping[str, Any],
    hook_shards: Mapping[str, Sequence[Shard]],
    config_text: str,
    form: consolidated.Form = "sharded",
    before: Callable[[], None] = lambda: None,
    write_tokenizer: Callable[[str], None] | None = None,
) -> Path:
    """Write and commit ``work_dir/name``. Collective. Returns the committed directory; raises ``SaveError``.

    ``hook_shards``: directory name -> shards (``{'ema': [...]}``). ``before`` is called on rank 0 first of all; an
    error of it is a failure of the save. ``manifest`` gets its commit number, files and layout here. A name that exists
    gets a suffix: ``iter_100.pth`` -> ``iter_100_2.pth``. ``write_tokenizer`` fills a folder with the tokenizer's
    files, so that the checkpoint can be used without the folder that its config names. ``form``: as of
    ``CheckpointHook``.
    """
    attempt = _Attempt(work_dir, name, manifest, form)
    listed: list[StateFiles] = []

    def announce() -> tuple[int, set[str]]:
        stamp = {STAMP: manifest.stamp}
        backend.stamp = manifest.stamp
        state = backend.state_files()
        files = [*state.files, _random_state(stamp), *_hook_files(hook_shards, stamp)]
        if dist.is_main():
            files.append(bytes_output(HOOKS_FILE, states_text({**hook_states, **stamp}).encode()))
            files.append(bytes_output(CONFIG_FILE, config_text.encode()))
            files += [] if write_tokenizer is None else _tokenizer_files(write_tokenizer)
        listed.append(StateFiles(state.layout, files, state.index))
        attempt.layout = state.layout
        return sum(file.nbytes for file in files), {os.path.dirname(file.path) for file in files}

    def write() -> tuple[list[FileEntry], list[Any], list[str]]:
        return _write(staging, listed[0].files, beside=not_finite)

    def not_finite() -> list[str]:
        of_hooks = ((folder, shard) for folder, shards in hook_shards.items() for shard in shards)
        bad = [f"{folder} of {shard.name}" for folder, shard in of_hooks if not all_finite(shard.data)]
        return backend.not_finite() + bad

    final, staging = _phase(attempt, announce, then=lambda announced: attempt.prepare(announced, before))
    error = _phase(attempt, write, then=lambda parts: attempt.commit(listed[0], parts))
    if error is not None:
        raise error
    return final


def _tokenizer_files(write: Callable[[str], None]) -> list[Output]:
    with tempfile.TemporaryDirectory() as folder:
        write(folder)
        return [bytes_output(f"{TOKENIZER}/{path.name}", path.read_bytes()) for path in sorted(Path(folder).iterdir())]


def _phase(attempt: _Attempt, action: Callable[[], Any], *, then: Callable[[list[Any]], Any]) -> Any:
    """``action`` on every rank, then ``then`` on rank 0 with what each returned. Collective; returns rank 0's value.

    Where one of them fails, all ranks raise the same error. What the ranks return goes to rank 0 alone.
    """
    try:
        value, problem = _outcome(action)
        gathered = dist.gather_to_main((value, problem))
        answer: tuple[Any, SaveError | None] = (None, None)
        if gathered is not None:
            problems = [problem for _, problem in gathered if problem is not None]
            if not problems:
                result, problem = _outcome(lambda: then([value for value, _ in gathered]))
                answer, problems = (result, None), [] if problem is None else [problem]
            if problems:
                answer = None, attempt.failure(problems)
        result, failure = dist.broadcast_object(answer)
    except BaseException:  # the process is about to end
        attempt.remove()
        raise
    if failure is not None:
        raise failure
    return result


def _outcome(action: Callable[[], Any]) -> tuple[Any, _Problem | None]:
    try:
        return action(), None
    except UnigenError as error:
        return None, _Problem(dist.rank(), error.problem, error.remedy)
    except Exception as error:
        return None, _Problem(dist.rank(), f"{type(error).__name__}: {error}", None)


@dataclass(frozen=True)
class _Problem:
    """Why a phase failed on a rank."""

    rank: int
    text: str
    remedy: str | None


class _Attempt:
    """The state of one save on rank 0. No method communicates."""

    def __init__(self, work_dir: Path, name: str, manifest: Manifest, form: consolidated.Form) -> None:
        self.work_dir, self.manifest, self.form = work_dir, manifest, form
        self.layout = ""
        self.final = work_dir / name
        self.staging: Path | None = None
        self.needed: int | None = None

    def prepare(self, announced: Sequence[tuple[int, set[str]]], before: Callable[[], None]) -> tuple[Path, Path]:
        """Make the staging directory, if there is space. A quota is found only when it is reached; then the save fails.

        ``announced``: by rank, the bytes and the folders of its files.
        """
        self.needed = sum(size for size, _ in announced) * (2 if self.consolidates else 1)
        before()
        make_directory(self.work_dir)
        self.manifest.commit = store.next_commit(self.work_dir)
        self.final = _free_name(self.final)
        if _lacks_space(self.work_dir, self.needed):
            raise UnigenError("the disk has too little free space")
        staging = self.final.with_name(f"{self.final.name}{store.STAGING}{self.manifest.commit}")
        delete_inside(staging, self.work_dir)
        self.staging = staging
        for folder in sorted(set().union({""}, *(folders for _, folders in announced))):
            (staging / folder).mkdir()
        return self.final, staging

    @property
    def consolidates(self) -> bool:
        """Whether consolidated files are written beside those of the ranks."""
        return self.form != "sharded" and self.layout != consolidated.LAYOUT

    def commit(
        self, state: StateFiles, parts: Sequence[tuple[list[FileEntry], list[Any], list[str]]]
    ) -> TrainingError | None:
        """``parts``: of each rank the entries of its files, what their ``write`` returned, and what is not finite.
        Returns the error that ends the run where something is not.
        """
        staging = self.staging
        assert staging is not None
        bad = list(dict.fromkeys(name for *_, names in parts for name in names))
        if bad:
            self.final = _free_name(self.work_dir / f"{store.NOT_FINITE}{self.final.name}")
        index, *_ = _write(staging, state.index([results for _, results, _ in parts]))
        entries = [entry for of_rank, *_ in parts for entry in of_rank] + index
        self.manifest.layout, self.manifest.files = state.layout, sorted(entries, key=lambda entry: entry.path)
        if self.consolidates and not bad:
            plain = (HOOKS_FILE, CONFIG_FILE)
            consolidated.consolidate(staging, self.manifest, form=self.form, rng=RNG_DIRECTORY, plain=plain)
            for folder in (path for path in (staging, *staging.rglob("*")) if path.is_dir()):
                fsync_path(folder)
        _write(staging, [bytes_output(FILE_NAME, self.manifest.to_json().encode())])
        try:
            rename_into_place(staging, self.final)
        except OSError:
            if not staging.exists():  # renamed, but not durable: remove it, because the save is reported as failed
                self.staging = self.final
            raise
        if bad:
            return self._not_finite(bad)
        try:
            store.write_hint(self.work_dir, self.final)
        except OSError as error:  # it is committed; the hint is only for people and other tools
            logger().warning("%s could not be updated: %s", store.HINT, error)
        return None

    def _not_finite(self, bad: Sequence[str]) -> TrainingError:
        """``self.final`` is kept apart; one that was before is deleted."""
        for former in self.work_dir.glob(f"{store.NOT_FINITE}*"):
            if former != self.final and former.is_dir():
                store.delete(former)
                logger().info("Deleted %s: %s is the newest that is not finite.", former, self.final.name)
        names = ", ".join(bad[:_NAMED]) + (f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else "")
        error = TrainingError(
            f"after update {self.manifest.progress.updates} the state is not finite (NaN or infinite): {names}; it is"
            f" kept apart in {self.final}, which no resume loads",
            remedy="--resume continues from the newest checkpoint that is finite: lower the learning rate, or look at"
            " the data since then (tools/inspect_data.py)",
        )
        error.everywhere = True
        return error

    def failure(self, problems: Sequence[_Problem]) -> SaveError:
        """Remove what was written. Returns the error, with its cause and the free space."""
        self.remove()
        parts = [f"rank {problem.rank}: {problem.text}" for problem in problems[:_NAMED]]
        if len(problems) > _NAMED:
            parts.append(f"and {len(problems) - _NAMED} more ranks")
        text = f"could not write checkpoint {self.final}: {'; '.join(parts)}"
        if self.needed is not None and self.work_dir.is_dir():
            text += f"; it needs {_size(self.needed)} and {_size(shutil.disk_usage(self.work_dir).free)} are free there"
        remedy = next((problem.remedy for problem in problems if problem.remedy), None)
        return SaveError(text, remedy=remedy or _REMEDY)

    def remove(self) -> None:
        """Remove the staging directory, if this is rank 0 and it was made."""
        if self.staging is not None:
            try:
                delete_inside(self.staging, self.work_dir)
            except OSError as error:
                logger().warning("%s could not be removed (%s): the next start tries again.", self.staging, error)


_REMEDY = (
    "free disk space (it must suffice for one checkpoint more than max_keep_ckpts: an old one is deleted only"
    " after the new one is complete) or fix the permission; older checkpoints and the training itself are untouched"
)


def _lacks_space(work_dir: Path, needed: int) -> bool:
    return shutil.disk_usage(work_dir).free < needed


def _size(number: int) -> str:
    return f"{number / 2**20:,.1f} MiB ({number:,} bytes)"


def _free_name(wanted: Path) -> Path:
    stem, dot, ending = wanted.name.rpartition(".") if "." in wanted.name else (wanted.name, "", "")
    candidate, number = wanted, 2
    while candidate.exists():
        candidate, number = wanted.with_name(f"{stem}_{number}{dot}{ending}"), number + 1
    return candidate


def _random_state(stamp: Mapping[str, str]) -> Output:
    state = rng_state()
    scalars = json.dumps(state.pop("scalars"))
    return safetensors_output(f"{RNG_DIRECTORY}/{_rank_file()}", state, {"scalars": scalars, **stamp})


def _hook_files(hook_shards: Mapping[str, Sequence[Shard]], stamp: Mapping[str, str]) -> list[Output]:
    """This rank's part of every hook's shards."""
    files = []
    for directory, shards in hook_shards.items():
        tensors = {shard_key(directory, s.name, s.flat_start): s.data for s in shards if s.primary}
        files.append(safetensors_output(f"{directory}/{_rank_file()}", tensors, {"format": "pt", **stamp}))
    return files


def _rank_file() -> str:
    return f"rank{dist.rank():05d}.safetensors"


def _write(
    staging: Path, files: Sequence[Output], *, beside: Callable[[], list[str]] = list
) -> tuple[list[FileEntry], list[Any], list[str]]:
    """Write files and flush them and their folders to disk: their entries, what their ``write`` returned, and the
    result of ``beside``, which is called meanwhile.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        writing = pool.map(lambda file: write_output(staging, file), files)
        result = beside()
        written = list(writing)
    for folder in sorted({(staging / file.path).parent for file in files} | {staging}):
        fsync_path(folder)
    entries = [FileEntry(file.path, size, digest) for file, (size, digest, _) in zip(files, written, strict=True)]
    return entries, [returned for *_, returned in written if returned is not None], result


def restore_rng(directory: Path, manifest: Manifest) -> bool:
    """Restore this rank's generators. False, on all ranks alike, where the checkpoint has another process count's."""
    path = directory / RNG_DIRECTORY / f"rank{dist.rank():05d}.safetensors"
    if len(list(path.parent.glob("rank*.safetensors"))) != dist.world_size():
        return False
    from safetensors import safe_open

    with safe_open(path, framework="pt") as stream:
        metadata = stream.metadata()
    check_stamp(path, metadata.get(STAMP), manifest)
    state: dict[str, Any] = dict(load_file(path))
    state["torch"] = state["torch"].to(torch.uint8)
    set_rng_state(state | {"scalars": json.loads(metadata["scalars"])})
    return True


def states_text(states: Mapping[str, Any]) -> str:
    """``hooks.json``. Raises ``ConfigError`` with the name of a hook whose state JSON cannot have."""
    for name, state in states.items():
        try:
            json.dumps(state)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"the state of the hook {name!r} cannot be stored as JSON: {error}",
                allowed="numbers, texts, lists and dicts from state_dict()",
                remedy="convert them there (float(x), x.tolist()); large tensors belong into shards()",
            ) from error
    return json.dumps(states, indent=1)


def read_hook_states(directory: Path, manifest: Manifest) -> dict[str, Any]:
    """``hooks.json`` of a checkpoint: name of a hook -> its state."""
    path = directory / HOOKS_FILE
    states = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    check_stamp(path, states.pop(STAMP, None), manifest)
    return states
