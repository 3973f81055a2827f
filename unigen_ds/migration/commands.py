"""One command line, or a file of settings -> names and values, in their order. No shell is started.

Read are ``[NAME=VALUE] torchrun|python|... SCRIPT --name value``, ``NAME=VALUE`` alone, YAML and JSON files, and a
script that consists of one command, comments and lines ``export NAME=VALUE``. A script that computes its command
(variables, loops, several commands) is refused: ``bash -x`` prints the command that it runs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unigen_ds.config.file import read_file
from unigen_ds.core.errors import ConfigError

_STARTER = re.compile(r"torchrun|python[\d.]*|deepspeed|bash|sh|srun|xtuner")
"""Commands that start a training."""
_MODULES = ("torch.distributed.run", "torch.distributed.launch")
"""What ``python -m`` starts torchrun by."""
_LAUNCHERS = ("torchrun", "deepspeed")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_OPERATOR = re.compile(r"[|&;()]+|\d?[<>].*")
_LAUNCH = ("num_nodes", "nnodes", "node_rank", "nproc_per_node", "master_addr", "master_port")
"""Arguments of a launcher, under torchrun's names and BAGEL's."""
_ENVIRONMENT = re.compile(
    r"(CUDA|TORCH|NCCL|GLOO|WANDB|HF|PYTORCH|OMP|MKL|TOKENIZERS|PYTHON|DEEPSPEED|SLURM)[A-Z0-9_]*"
)
"""Variables that libraries read, here as there."""
_SCRIPTS = (".py", ".sh")
MAPPINGS = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Setting:
    """One setting of the other trainer."""

    name: str
    """As the guide has it, without dashes in front."""
    value: Any
    """A text of a command line, a list of them, a value of a file, or True of a flag without a value."""
    source: str
    """As the user wrote it."""


@dataclass
class Command:
    """What a command line, a script or a file states."""

    settings: list[Setting] = field(default_factory=list)
    launch: dict[str, str] = field(default_factory=dict)
    """Of the launcher."""
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
        if name.lower() in _LAUNCH and isinstance(value, str):
            self.launch[name.lower()] = value
        elif _ENVIRONMENT.fullmatch(name) and isinstance(value, str):
            self.environment[name] = value
        else:
            self.settings.append(Setting(name, value, source))

    def read_files(self) -> None:
        """Put the keys of the YAML and JSON files that are among ``files`` before what the command states itself."""
        for name in [name for name in self.files if name.endswith(MAPPINGS)]:
            self.files.remove(name)
            self.settings[:0] = _leaves(read_file(Path(name)).to_dict())


def read_command(words: Sequence[str]) -> Command:
    """Read the words of a command line, a command line in quotes, or one file. Files that it names as arguments
    (``train_fsdp.py config.yaml``) are in ``files``.

    Raises ``ConfigError`` for a file that cannot be read, and for anything but one command that starts a training.
    """
    command, first = Command(), words[0]
    if len(words) == 1 and first.endswith((".py", *MAPPINGS)) and (Path(first).is_file() or " " not in first):
        return Command(files=[first])
    if len(words) == 1 and first.endswith((".sh", ".slurm")) and " " not in first:
        try:
            words = _words_of_text(Path(first).read_text(encoding="utf-8"), where=first)
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{first} cannot be read: {error}", allowed="a shell script") from error
    elif len(words) == 1 and " " in first:
        words = _words_of_text(first, where="it")
    if operators := [word for word in words if _OPERATOR.fullmatch(word)]:
        raise _several(shlex.join(words), f"it has {operators[0]!r}, which is of the shell")
    arguments = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    starts = (i for i, word in enumerate(words) if _STARTER.fullmatch(Path(word).name) or word.endswith(_SCRIPTS))
    begin = min(next(starts, len(words)), arguments)
    for word in words[:begin]:  # variables, and nohup, time, conda run
        if _ASSIGNMENT.fullmatch(word):
            name, _, value = word.partition("=")
            command.add(name, value, f"{name}={shlex.quote(value)}")
        elif word.endswith(MAPPINGS):
            command.files.append(word)
        elif word not in ("export", "env"):
            command.others.append((word, "put it before the command that you start"))
    others = {word for word, _ in command.others}
    if others and (begin == len(words) or words[begin].startswith("-")):
        raise ConfigError(
            f"{shlex.join(words)} starts no training, and states no settings",
            remedy="docs/migrating.md has what replaces each command of the guides",
        )
    _read_start([*words[begin:]], command)
    return command


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


def _read_start(words: list[str], command: Command) -> None:
    """Read a launcher with its options, the script, and its arguments; or arguments alone."""
    is_started = bool(words) and words[0].startswith("-")
    while words:
        word = words.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        if word == "...":
            command.others.append((word, "what else the command has is not stated"))
        elif not word.startswith("-") and (is_started or word.endswith(MAPPINGS)):
            command.files.append(word)
        elif not word.startswith("-"):
            command.starts.append(word)
            is_started = word.endswith(_SCRIPTS) or word == "train"
        elif word == "-m" and words and not is_started:
            is_started = words[0] not in _MODULES
            command.starts.append(words.pop(0) if is_started else "torchrun")
            words = words if is_started else words[1:]
        else:
            values = [value] if equals else []
            most = len(words) if is_started else 1  # an option of a launcher has one value, and the script comes after
            while not equals and len(values) < most and words and _is_value(words[0], of_launcher=not is_started):
                values.append(words.pop(0))
            source = word if equals else shlex.join([word, *values])
            command.add(name.replace("-", "_"), values if len(values) > 1 else values[0] if values else True, source)


def _is_value(word: str, *, of_launcher: bool) -> bool:
    if word.startswith("-"):
        try:
            float(word)
        except ValueError:
            return False
    return word != "..." and not (of_launcher and word.endswith(_SCRIPTS))


def start_command(command: Command, config: str) -> str:
    """Return how the written config is started, as the old one was: with the same processes and variables."""
    launch = {{"num_nodes": "nnodes"}.get(name, name): value for name, value in command.launch.items()}
    words = [f"{name}={shlex.quote(value)}" for name, value in command.environment.items()]
    launchers = [word for word in command.starts if word in _LAUNCHERS]
    words += [*launchers[:1]] or ["torchrun" if launch else "python"]
    words += [f"--{name}={shlex.quote(value)}" for name, value in launch.items()]
    return " ".join([*words, "tools/train.py", config])


def _leaves(values: Mapping[str, Any], section: str = "") -> Iterator[Setting]:
    """The keys of a file, those of sections too: ``train: {lr: 1}`` is ``lr``."""
    for key, value in values.items():
        whole = f"{section}.{key}" if section else str(key)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, whole)
        else:
            yield Setting(str(key), value, f"{whole}: {value!r}")
