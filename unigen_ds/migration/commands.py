"""One command line, or a file of settings -> names and values, in their order. No shell is started.

Read are ``[NAME=VALUE] torchrun|python|... SCRIPT --name value``, ``NAME=VALUE`` alone, YAML and JSON files, and a
script that consists of one command, comments and lines ``export NAME=VALUE``. A script that computes its command
(variables, loops, several commands) is refused: ``bash -x`` prints the command that it runs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unigen_ds.config.file import read_file
from unigen_ds.core.errors import ConfigError

_STARTER = re.compile(r"torchrun|python[\d.]*|deepspeed|accelerate|bash|sh|sbatch|srun|xtuner")
"""Commands that start a training."""
_WRAPPERS = (
    "nohup", "exec", "env", "time", "nice", "timeout", "numactl", "taskset", "conda", "uv", "poetry", "singularity",
    "docker",
)  # fmt: skip
"""Words before a command that starts a training."""
_LAUNCHERS = ("torchrun", "deepspeed")
_MODULES = {"torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun", "accelerate": "accelerate",
            "accelerate.commands.launch": "accelerate"}  # fmt: skip
"""Launchers that ``python -m`` starts, and their names."""
_OF_ACCELERATE = {"num_machines": "nnodes", "machine_rank": "node_rank", "main_process_ip": "master_addr",
                  "main_process_port": "master_port"}  # fmt: skip
_OF_PYTHON = re.compile(r"-[BEIOsSuvx]+")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_OPERATOR = re.compile(r"[|&;()]+|\d?[<>].*")
LAUNCH = ("num_nodes", "nnodes", "node_rank", "nproc_per_node", "master_addr", "master_port")
"""Arguments of a launcher, under torchrun's names and BAGEL's."""
_ENVIRONMENT = re.compile(
    r"(CUDA|TORCH|NCCL|GLOO|WANDB|HF|PYTORCH|OMP|MKL|TOKENIZERS|PYTHON|DEEPSPEED|SLURM)[A-Z0-9_]*"
)
"""Variables that libraries read, here as there."""
_SHELL = (".sh", ".slurm")
_SCRIPTS = (".py", *_SHELL)
MAPPINGS = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Setting:
    """One setting of the other trainer."""

    name: str
    """As the guide has it, without dashes in front."""
    value: Any
    """A text of a command line, a value of a file, or True of a flag without a value."""
    source: str
    """As the user wrote it."""


@dataclass
class Command:
    """What a command line, a script or a file states."""

    settings: list[Setting] = field(default_factory=list)
    launch: dict[str, str] = field(default_factory=dict)
    """Of the launcher: see ``LAUNCH``."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that libraries read."""
    files: list[str] = field(default_factory=list)
    """Arguments without a name: the YAML of a trainer, a config."""
    starts: list[str] = field(default_factory=list)
    """Words before the first argument: ``torchrun``, ``train.py``."""
    others: list[tuple[str, str]] = field(default_factory=list)
    """Text that is no setting, and why it is none."""

    def add(self, name: str, value: Any, source: str) -> None:
        """Add a setting of the launcher, of a library, or of the trainer."""
        if name.lower() in LAUNCH and isinstance(value, str):
            self.launch[name.lower()] = value
        elif _ENVIRONMENT.fullmatch(name) and isinstance(value, str):
            self.environment[name] = value
        else:
            self.settings.append(Setting(name, value, source))


def read_command(words: Sequence[str]) -> Command:
    """Read the words of a command line, a command line in quotes, or one file. Files that it names as arguments
    (``train_fsdp.py config.yaml``) are in ``files``.

    Raises ``ConfigError`` for a file that cannot be read, and for anything but one command that starts a training.
    """
    command, first = Command(), words[0]
    if len(words) == 1 and first.endswith((".py", *MAPPINGS)) and (Path(first).is_file() or " " not in first):
        return Command(files=[first])
    if len(words) == 1 and first.endswith(_SHELL) and " " not in first:
        words = _words_of_text(_script(Path(first)), where=first)
    elif len(words) == 1 and " " in first:
        words = _words_of_text(first, where="it")
    operators = [word for word in words if _OPERATOR.fullmatch(word)]
    if operators:
        raise _several(shlex.join(words), f"it has {operators[0]!r}, which is of the shell")
    rest = [*words[1:]] if words[0] == "export" else [*words]
    while rest and _ASSIGNMENT.fullmatch(rest[0]):
        _assign(rest.pop(0), command)
    if rest:
        _read_start(rest, command)
    return command


def _script(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", allowed="a shell script") from error


def _several(name: str, why: str) -> ConfigError:
    remedy = "give the command itself, with its variables in front: NAME=VALUE ... COMMAND; `bash -x SCRIPT` prints it"
    return ConfigError(f"{name} is more than one command line: {why}", remedy=remedy)


def _words_of_text(text: str, *, where: str) -> list[str]:
    """Return the variables that a script exports, and the words of its only command."""
    exports: list[str] = []
    command: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        try:
            words = [*lexer]
        except ValueError as error:
            raise _several(where, f"{line.strip()!r} has {str(error).lower()}") from error
        comment = next((i for i, word in enumerate(words) if word.startswith("#")), len(words))
        words = words[:comment]
        if unknown := next((word for word in words if "$" in word or "`" in word), None):
            raise _several(where, f"the shell computes {unknown!r}")
        variables = words[1:] if words[:1] == ["export"] else words
        if all(map(_ASSIGNMENT.fullmatch, variables)):
            exports += variables
        elif command:
            raise _several(where, f"{shlex.join(command)!r} is followed by {shlex.join(words)!r}")
        else:
            command = words
    return [*exports, *command]


def _assign(word: str, command: Command) -> None:
    name, _, value = word.partition("=")
    command.add(name, value, f"{name}={shlex.quote(value)}")


def _read_start(words: list[str], command: Command) -> None:
    """Read a command without the variables before it, or arguments alone."""
    line = shlex.join(words)
    start = next((i for i, word in enumerate(words) if _STARTER.fullmatch(Path(word).name)), 0)
    if start and words[0] in _WRAPPERS:  # nohup, env NAME=VALUE, conda run -n NAME
        before = words[:start]
        for word in filter(_ASSIGNMENT.fullmatch, before):
            _assign(word, command)
        if wrapper := [word for word in before if not _ASSIGNMENT.fullmatch(word)]:
            command.others.append((shlex.join(wrapper), "put it before the command that you start"))
        words = words[start:]
    first = words[0]
    if not first.startswith("-"):
        starts = _STARTER.fullmatch(Path(first).name) or first.endswith((*_SCRIPTS, *MAPPINGS))
        if not starts or (len(words) > 1 and Path(words[1]).name.startswith("eval")):  # sbatch eval.slurm
            raise ConfigError(
                f"{line} starts no training, and states no settings",
                remedy="docs/migrating.md has what replaces each command of the guides",
            )
        words = _read_launcher(words, command)
    _read_arguments(words, command)


def _read_launcher(words: list[str], command: Command) -> list[str]:
    """Read what is before the arguments of the trainer, and return these: ``torchrun --nproc_per_node=8 train.py``."""
    while words:
        word, words = words[0], words[1:]
        name, equals, value = word.lstrip("-").partition("=")
        key = name.replace("-", "_")
        if not word.startswith("-"):
            if command.starts and word not in ("train", "launch") and not word.endswith(_SCRIPTS):
                return [word, *words]
            command.starts.append(word)
            if word.endswith(_SCRIPTS) or word == "train":
                return words
        elif word == "-m" and words:
            command.starts.append(_MODULES.get(words[0], words[0]))
            if words[0] not in _MODULES:
                return words[1:]
            words = words[1:]
        elif _OF_PYTHON.fullmatch(word):
            command.others.append((word, "it is an option of the interpreter"))
        else:
            if not equals and words and _is_value(words[0]) and not words[0].endswith(_SCRIPTS):
                value, words = words[0], words[1:]
            if key == "num_processes":
                command.launch[key] = value
            else:
                source = word if equals else f"{word} {shlex.quote(value)}" if value else word
                command.add(_OF_ACCELERATE.get(key, key), value or True, source)
    return words


def _read_arguments(words: list[str], command: Command) -> None:
    """Read the trainer's own arguments: ``config.yaml --name value --names one two --flag``."""
    while words:
        word, words = words[0], words[1:]
        name, equals, value = word.lstrip("-").partition("=")
        if word == "...":
            command.others.append((word, "what else the command has is not stated"))
        elif not word.startswith("-"):
            command.files.append(word)
        else:
            values = [value] if equals else []
            while not equals and words and _is_value(words[0]):
                values, words = [*values, words[0]], words[1:]
            source = word if equals else shlex.join([word, *values])
            read = True if not values else values[0] if len(values) == 1 else values
            command.add(name.replace("-", "_"), read, source)


def _is_value(word: str) -> bool:
    if word.startswith("-"):
        try:
            float(word)
        except ValueError:
            return False
    return word != "..."


def start_command(command: Command, config: str) -> str:
    """Return how the written config is started, as the old one was: with the same processes and variables."""
    launch = {{"num_nodes": "nnodes"}.get(name, name): value for name, value in command.launch.items()}
    total, nodes = launch.pop("num_processes", ""), launch.get("nnodes", "1")
    if total.isdecimal() and nodes.isdecimal() and int(nodes):  # accelerate counts those of all nodes
        launch["nproc_per_node"] = str(int(total) // int(nodes))
    words = [f"{name}={shlex.quote(value)}" for name, value in command.environment.items()]
    launchers = [word for word in command.starts if word in _LAUNCHERS]
    words += [*launchers[:1]] or ["torchrun" if launch else "python"]
    words += [f"--{name}={shlex.quote(value)}" for name, value in launch.items()]
    return " ".join([*words, "tools/train.py", config])


def read_mapping(path: Path) -> list[Setting]:
    """Read the keys of a YAML or JSON file, those of sections too: ``train: {lr: 1}`` is ``lr``."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist", remedy="run it in the folder of the old trainer, or give the path")
    return [*_leaves(read_file(path).to_dict())]


def read_files(command: Command) -> None:
    """Put the keys of the YAML and JSON files that a command names before what it states itself."""
    for name in [name for name in command.files if name.endswith(MAPPINGS)]:
        command.files.remove(name)
        command.settings[:0] = read_mapping(Path(name))


def _leaves(values: Mapping[str, Any], section: str = "") -> Iterator[Setting]:
    for key, value in values.items():
        whole = f"{section}.{key}" if section else str(key)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, whole)
        else:
            yield Setting(str(key), value, f"{whole}: {value!r}")


def sources(settings: Iterable[Setting | None]) -> str:
    """Return what the user wrote, for a comment."""
    return ", ".join(one.source for one in settings if one is not None)
