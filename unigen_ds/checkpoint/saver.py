"""Write one checkpoint so that it either exists completely or not at all.

::

    collect    every rank: the engine lists the files of this rank (collectives, no disk)
    announce   rank 0:     journals flushed to disk, free space checked, iter_100.pth.tmp-<commit>/ made
    write      every rank: writes its files with their hashes, flushes each to disk (disk, no collectives)
    commit     rank 0:     index files, the consolidated files if asked for, manifest.json last,
                           rename: from here on it exists; last_checkpoint, a hint

``announce`` and ``commit`` end with one gather of every rank's outcome to rank 0 and one answer to all, so no rank can
wait in another collective than the others. A failure on any rank makes every rank raise the same ``SaveError``, removes
the staging directory, and leaves every older checkpoint as it was. What is not finite gets a name that no resume loads,
and ends the run.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from unigen_ds.backends.base import Backend
from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.foreign import stored_dtype
from unigen_ds.checkpoint.layouts.safetensors import open_reader, open_shards, rank_file, tensor_readers
from unigen_ds.checkpoint.manifest import FILE_NAME, FULL, FileEntry, Manifest
from unigen_ds.core.errors import ConfigError, SaveError, TrainingError, UnigenError
from unigen_ds.core.json_values import STAMP
from unigen_ds.core.shards import BUFFER, MASTER, OPTIMIZER_FILE, Shard, ShardReader, shard_key
from unigen_ds.system import dist
from unigen_ds.system.files import delete_inside, fsync_path, make_directory, rename_into_place, write_text_atomic
from unigen_ds.system.log import logger
from unigen_ds.system.machine import without_collector
from unigen_ds.system.outputs import (
    Entry,
    Output,
    StateFiles,
    all_finite,
    bytes_output,
    safetensors_output,
    write_output,
)
from unigen_ds.system.seeding import rng_state

TOKENIZER = "tokenizer"
_OUTCOMES = ".written"
"""Folder of a staging directory: what each rank has written, during an asynchronous save."""
Form = Literal["sharded", "full", "both"]
"""The files that a save leaves: the engine's own ones, the consolidated ones, or both."""
_WHOLE_LAYOUT = "safetensors"
"""The layout of the consolidated files, which is that of ``single``."""
_THREADS = 4
"""Files that a rank writes at a time: one is hashed while the system flushes another."""
_MOST = 3
"""Ranks whose errors are in a message, and tensors."""
_REMEDY = (
    "free disk space (it must suffice for one checkpoint more than max_keep_ckpts: an old one is deleted only after the"
    " new one is complete) or fix the permission; older checkpoints and the training itself are untouched"
)


class Background(Protocol):
    """Has another process write a save (``background.py``): ``copy`` once files are listed, then ``start``."""

    def copy(self, attempt: Save, tensors: Sequence[Tensor]) -> None: ...

    def start(self, attempt: Save) -> None: ...

    def wait(self) -> None: ...


@without_collector()
def save(
    work_dir: Path,
    name: str,
    *,
    backend: Backend,
    manifest: Manifest,
    hook_states: Mapping[str, Any],
    hook_shards: Mapping[str, Sequence[Shard]],
    config_text: str,
    form: Form = "sharded",
    before: Callable[[], None] = lambda: None,
    write_tokenizer: Callable[[str], None] | None = None,
    then: Callable[[Path], None] | None = None,
    background: Background | None = None,
) -> Path | None:
    """Write and commit ``work_dir/name``. Collective. Returns the committed directory; raises ``SaveError``.

    With ``background`` another process writes it: None, and its ``finish`` returns it.

    ``hook_shards``: directory name -> shards (``{'ema': [...]}``). ``before`` is called on rank 0 first of all; an
    error of it is a failure of the save. ``manifest`` gets its commit number, files and layout here. A name that exists
    gets a suffix: ``iter_100.pth`` -> ``iter_100_2.pth``. ``write_tokenizer`` fills a folder with the tokenizer's
    files. ``form``: as of ``CheckpointHook``. ``then`` is called with the committed directory, where that is written.
    """

    def collect() -> StateFiles:
        stamp = {STAMP: manifest.stamp}
        backend.stamp = manifest.stamp
        state = backend.state_files()
        generators = rng_state()
        metadata = {"scalars": json.dumps(generators.pop("scalars")), **stamp}
        entries = [Entry.of(*item) for item in generators.items()]
        outputs = [*state.files, safetensors_output(f"{store.RNG_DIRECTORY}/{rank_file()}", entries, metadata)]
        for folder, shards in hook_shards.items():
            entries = [Entry.of(shard_key(folder, s.name, s.flat_start), s.data) for s in shards if s.primary]
            outputs.append(safetensors_output(f"{folder}/{rank_file()}", entries, {"format": "pt", **stamp}))
        if dist.is_main():
            outputs.append(bytes_output(store.HOOKS_FILE, states_text({**hook_states, **stamp}).encode()))
            outputs.append(bytes_output(store.CONFIG_FILE, config_text.encode()))
            with tempfile.TemporaryDirectory() as temporary:
                if write_tokenizer is not None:
                    write_tokenizer(temporary)
                paths = sorted(Path(temporary).iterdir())
                outputs += [bytes_output(f"{TOKENIZER}/{path.name}", path.read_bytes()) for path in paths]
        return dataclasses.replace(state, files=outputs)

    def tensors() -> Iterator[Tensor]:
        yield from backend.trained_tensors()
        yield from (shard.data for shards in hook_shards.values() for shard in shards)

    attempt = Save(work_dir, name, manifest, form)
    attempt.then = then
    try:
        attempt.collect(collect)
        if background is not None:
            background.copy(attempt, list(tensors()))  # while rank 0 prepares the folder
        attempt.announce(before)
        if background is not None:
            background.start(attempt)
            return None
        attempt.write(tensors())
        return attempt.commit()
    except BaseException:
        if background is not None:
            background.wait()
        attempt.remove()
        raise


class _Outcome(NamedTuple):
    """The result of a phase on a rank, or the reason why it failed there."""

    value: Any
    rank: int = 0
    problem: str | None = None
    remedy: str | None = None


def _outcome(action: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(action())
    except UnigenError as error:
        return _Outcome(None, dist.rank(), error.problem, error.remedy)
    except Exception as error:
        return _Outcome(None, dist.rank(), f"{type(error).__name__}: {error}")


class Save:
    """One checkpoint on its way to the disk: ``collect``, ``announce``, ``write``, ``commit``. ``write`` uses no
    collective, and needs of the engine's memory only what the outputs read.
    """

    then: Callable[[Path], None] | None = None

    def __init__(self, work_dir: Path, name: str, manifest: Manifest, form: Form) -> None:
        self.work_dir, self.manifest, self.form = work_dir, manifest, form
        self.final = work_dir / name
        self.staging: Path | None = None
        """The folder that this rank writes to; on rank 0 None once it is renamed."""
        self._state = StateFiles("", [])
        self._need: tuple[int, int] | None = None
        """Bytes and files of all ranks."""
        self._collect_outcome = self._write_outcome = _Outcome(None)

    @property
    def decisions(self) -> tuple[Path | None, Path, tuple[int, int] | None, int]:
        """What ``announce`` adds: to be set where a copy was made before."""
        return self.staging, self.final, self._need, self.manifest.commit

    @decisions.setter
    def decisions(self, values: tuple[Path | None, Path, tuple[int, int] | None, int]) -> None:
        self.staging, self.final, self._need, self.manifest.commit = values

    def collect(self, collect: Callable[[], StateFiles]) -> None:
        """List the files of this rank. ``announce`` raises errors."""

        def describe_files() -> tuple[int, int, set[str]]:
            self._state = collect()
            files = self._state.files
            folders = {os.path.dirname(file.path) for file in files}
            return sum(file.nbytes for file in files), len(files), folders

        self._collect_outcome = _outcome(describe_files)

    def announce(self, before: Callable[[], None]) -> None:
        """Make the staging directory for the files of every rank; ``before`` is called on rank 0 first of all.
        Collective; raises ``SaveError``.
        """

        def prepare(parts: Sequence[tuple[int, int, set[str]]]) -> Path:
            """A quota is found only when it is reached; then the save fails."""
            sizes, numbers, of_ranks = zip(*parts, strict=True)
            folders = sorted({""}.union(*of_ranks))
            self._need = sum(sizes) * (2 if self._consolidates else 1), sum(numbers) + len(folders) + 1  # the manifest
            before()
            make_directory(self.work_dir)
            self.manifest.commit = store.next_commit(self.work_dir)
            self.final = free_name(self.final)
            if _free(self.work_dir)[0] < self._need[0]:
                raise UnigenError("the disk has too little free space")
            staging = self.final.with_name(f"{self.final.name}{store.STAGING}{self.manifest.commit}")
            delete_inside(staging, self.work_dir)
            self.staging = staging
            for folder in folders:
                (staging / folder).mkdir()
            return staging

        self.staging = self._agree(self._collect_outcome, prepare)

    def write(self, tensors: Iterable[Tensor], *, direct: bool = False) -> None:
        """Write this rank's files (``write_output``), and look whether all ``tensors`` are finite. No collective:
        ``commit`` raises errors."""

        def write_all() -> tuple[list[FileEntry], list[Any], bool]:
            assert self.staging is not None
            return *_write(self.staging, self._state.files, direct), all(map(all_finite, tensors))

        self._write_outcome = _outcome(write_all)

    def commit(self) -> Path:
        """Make the checkpoint exist, once every rank has written. Collective. Raises ``SaveError``; and
        ``TrainingError`` for one that is not finite, which is kept apart.
        """
        final, error = self._agree(self._write_outcome, self._publish)
        if error is not None:
            raise error
        return final

    def _agree(self, outcome: _Outcome, then: Callable[[list[Any]], Any]) -> Any:
        """``then`` on rank 0 with what each rank's phase returned, which goes to rank 0 alone. Collective; returns rank
        0's value, or raises the same error on all ranks.
        """
        outcomes = dist.gather_to_main(outcome)
        result, failure = dist.broadcast_object(None if outcomes is None else self._answer(outcomes, then))
        if failure is not None:
            raise failure
        return result

    def _answer(self, outcomes: Sequence[_Outcome], then: Callable[[list[Any]], Any]) -> tuple[Any, SaveError | None]:
        """Return what ``then`` returns on rank 0, or the error where it or a rank has failed."""
        failures = [one for one in outcomes if one.problem is not None]
        if not failures:
            result = _outcome(lambda: then([one.value for one in outcomes]))
            if result.problem is None:
                return result.value, None
            failures = [result]
        self.remove()
        parts = [f"rank {one.rank}: {one.problem}" for one in failures[:_MOST]]
        parts += [f"and {len(failures) - _MOST} more ranks"] * (len(failures) > _MOST)
        with suppress(OSError):  # of a disk that is gone
            (size, files), (free, inodes) = self._need or (0, 0), _free(self.work_dir)
            if size:
                parts.append(f"it needs {size:,} bytes and {free:,} bytes are free there")
            if files > inodes:
                parts.append(f"it has {files:,} files and only {inodes:,.0f} can be made there (df -i)")
        remedy = next((one.remedy for one in failures if one.remedy), _REMEDY)
        return None, SaveError(f"could not write checkpoint {self.final}: {'; '.join(parts)}", remedy=remedy)

    def complete(self, tensors: Iterable[Tensor], wait: Callable[[], None]) -> Any:
        """``write`` and ``commit`` without collectives, in a process for each rank: what each has written is a file in
        the staging directory, where that of rank 0 finds it. ``wait`` is called between two looks, and may raise.
        Returns on rank 0 what ``commit`` returns, and the error. Raises the error of any other rank.
        """
        self.write(tensors, direct=True)
        assert self.staging is not None
        folder = self.staging / _OUTCOMES
        if not dist.is_main():
            if self._write_outcome.problem is not None:
                raise UnigenError(self._write_outcome.problem)
            folder.mkdir(exist_ok=True)
            text = json.dumps(self._write_outcome.value, default=dataclasses.astuple)
            write_text_atomic(folder / f"{dist.rank()}.json", text)
            return None

        def publish(own: list[Any]) -> Any:
            for rank in range(1, dist.world_size()):
                while not (path := folder / f"{rank}.json").exists():
                    wait()
                entries, *rest = json.loads(path.read_text(encoding="utf-8"))
                own.append(([FileEntry(*entry) for entry in entries], *rest))
            delete_inside(folder, self.work_dir)
            return self._publish(own)

        return self._answer([self._write_outcome], publish)

    @property
    def _consolidates(self) -> bool:
        """Whether consolidated files are written beside those of the ranks."""
        return self.form != "sharded" and self._state.layout != _WHOLE_LAYOUT

    def _publish(self, parts: Sequence[tuple[list[FileEntry], list[Any], bool]]) -> tuple[Path, TrainingError | None]:
        """``parts``: of each rank the entries of its files, what their ``write`` returned, and whether all is finite.
        Returns the checkpoint, and the error that ends the run where something is not finite.
        """
        staging, is_finite = self.staging, all(finite for *_, finite in parts)
        assert staging is not None
        if not is_finite:
            self.final = free_name(self.work_dir / f"{store.NOT_FINITE}{self.final.name}")
        entries = [entry for of_rank, *_ in parts for entry in of_rank]
        if (index := self._state.index) is not None:
            entries += _write(staging, index([results for _, results, _ in parts]))[0]
        self.manifest.layout, self.manifest.files = self._state.layout, sorted(entries)
        if self._consolidates and is_finite:
            _consolidate(staging, self.manifest, form=self.form)
        _write(staging, [bytes_output(FILE_NAME, self.manifest.to_json().encode())])
        try:
            rename_into_place(staging, self.final)
        except OSError:
            if not staging.exists():  # renamed, but not durable: remove it, because the save is reported as failed
                self.staging = self.final
            raise
        self.staging = None
        if is_finite:
            try:
                store.write_hint(self.work_dir, self.final)
            except OSError as error:  # it is committed; the hint is only for people and other tools
                logger().warning("%s could not be updated: %s", store.HINT, error)
            if self.then is not None:
                self.then(self.final)
            return self.final, None
        for former in self.work_dir.glob(f"{store.NOT_FINITE}*"):
            if former != self.final and former.is_dir():
                store.delete(former)
                logger().info("Deleted %s: %s is the newest that is not finite.", former, self.final.name)
        names = _not_finite(self.final, self.manifest)
        more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
        end = TrainingError(
            f"after update {self.manifest.progress.updates} the state is not finite (NaN or infinite):"
            f" {', '.join(names[:_MOST])}{more}; it is kept apart in {self.final}, which no resume loads",
            remedy="--resume continues from the newest checkpoint that is finite: lower the learning rate, or look at"
            " the data since then (tools/inspect_data.py)",
        )
        end.everywhere = True
        return self.final, end

    def remove(self) -> None:
        """Remove the staging directory, if this is rank 0 and it was made."""
        if self.staging is not None and dist.is_main():
            try:
                delete_inside(self.staging, self.work_dir)
            except OSError as error:
                logger().warning("%s could not be removed (%s): the next start tries again.", self.staging, error)


def _free(folder: Path) -> tuple[int, float]:
    """Bytes and files that can still be written below ``folder``."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize, status.f_favail if status.f_files else math.inf


def free_name(path: Path) -> Path:
    """``path``, or the first of ``<stem>_2``, ``<stem>_3``, ... that does not exist."""
    stem, dot, ending = path.name.rpartition(".") if "." in path.name else (path.name, "", "")
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_name(f"{stem}_{number}{dot}{ending}"), number + 1
    return candidate


def _write(staging: Path, files: Sequence[Output], direct: bool = False) -> tuple[list[FileEntry], list[Any]]:
    """Write files and flush them and their folders to disk: their entries, and what their ``write`` returned."""
    with ThreadPoolExecutor(_THREADS) as pool:
        results = list(pool.map(lambda file: write_output(staging, file, direct=direct), files))
    for folder in sorted({(staging / file.path).parent for file in files} | {staging}):
        fsync_path(folder)
    entries = [FileEntry(file.path, size, digest) for file, (size, digest, _) in zip(files, results, strict=True)]
    return entries, [result for *_, result in results if result is not None]


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


def _not_finite(directory: Path, manifest: Manifest) -> list[str]:
    """The tensors of a checkpoint that are not finite, but frozen ones and buffers, the weights first."""
    trained = {parameter["name"] for parameter in manifest.parameters if parameter["trainable"]}
    readers = tensor_readers(directory, manifest)
    return [
        name if kind == MASTER else f"{kind} of {name}"
        for kind, name in sorted(readers, key=lambda key: key[0] != MASTER)
        if kind != BUFFER and (kind != MASTER or name in trained) and not all_finite(readers[kind, name]())
    ]


def _consolidate(staging: Path, manifest: Manifest, *, form: Form) -> None:
    """Add the consolidated files (the layout of ``single``) to a staging folder, or replace the engine's by them, and
    list them in ``manifest``, which lists the engine's. The generators' states stay a file of each rank.

    Rank 0 makes them from those of the ranks, a piece of 16 MiB at a time: no process ever has the whole model, no
    collective can leave a rank waiting, and it works for every engine whose layout can be read. With ``'both'``,
    ``full/`` is a checkpoint of its own, with its own manifest.
    """
    reader, readers, metadata = open_reader(staging, manifest), open_shards(staging, manifest), {STAMP: manifest.stamp}
    paths = {entry.path for entry in manifest.files if os.path.dirname(entry.path) in ("", *readers)}
    engines = paths - {store.HOOKS_FILE, store.CONFIG_FILE}
    rest = [entry for entry in manifest.files if entry.path not in engines]
    weights = [
        Entry(name, shape, stored_dtype(reader, kind, name, shape), partial(reader.parts, kind, name))
        for (kind, name), shape in reader.shapes.items()
        if kind in (MASTER, BUFFER)
    ]
    state = _flat(reader, set(reader.kinds()) - {MASTER, BUFFER})
    contents = {"model": weights, OPTIMIZER_FILE.partition(".")[0]: state}
    contents |= {f"{folder}/rank00000": _flat(shards, shards.kinds()) for folder, shards in readers.items()}
    full = staging / FULL
    full.mkdir()
    outputs = [
        safetensors_output(f"{name}.safetensors", entries, {"format": "pt", **metadata})
        for name, entries in contents.items()
    ]
    entries, _ = _write(full, outputs)
    whole = dataclasses.replace(manifest, layout=_WHOLE_LAYOUT, files=sorted([*rest, *entries]))
    if form == "both":
        others = [bytes_output(entry.path, (staging / entry.path).read_bytes()) for entry in rest]
        others.append(bytes_output(FILE_NAME, whole.to_json().encode()))
        entries += _write(full, others)[0]
        inside = [dataclasses.replace(entry, path=f"{FULL}/{entry.path}") for entry in entries]
        manifest.files = sorted([*manifest.files, *inside])
        return
    for path in engines:
        (staging / path).unlink()
    for entry in entries:
        os.replace(full / entry.path, staging / entry.path)
    for folder in readers:
        fsync_path(staging / folder)
    delete_inside(full, staging)
    manifest.layout, manifest.files = whole.layout, whole.files


def _flat(reader: ShardReader, kinds: Iterable[str]) -> list[Entry]:
    """Every tensor of some kinds, in one piece from its first element on."""
    entries = []
    for kind in sorted(kinds):
        for name in reader.names(kind):
            shape = (reader.numel(kind, name),)
            dtype = stored_dtype(reader, kind, name, shape)
            entries.append(Entry(shard_key(kind, name, 0), shape, dtype, partial(reader.parts, kind, name)))
    return entries
