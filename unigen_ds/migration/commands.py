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

from unigen_ds.core.errors import ConfigError

_STARTER = re.compile(r"torchrun|python[\d.]*|deepspeed|bash|sh|srun|xtuner")
"""Commands that start a training."""
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
    name: str
    """The setting's name in the guide, without leading dashes."""
    value: Any
    """A text of a command line, a list of them, a value of a file, or True of a flag without a value."""
    source: str
    """The setting as the user wrote it."""


@dataclass
class Command:
    """What a command line, a script or a file states."""

    settings: list[Setting] = field(default_factory=list)
    launch: dict[str, str] = field(default_factory=dict)
    """Settings of the launcher."""
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

    def start(self, config: str) -> str:
        """Return how the written config is started, as the old one was: with the same processes and variables."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        launchers = [word for word in self.starts if word in _LAUNCHERS]
        words += launchers[:1] or ["torchrun" if self.launch else "python"]
        for name, value in self.launch.items():
            words.append(f"--{'nnodes' if name == 'num_nodes' else name}={shlex.quote(value)}")
        return " ".join([*words, "tools/train.py", config])


def read_command(words: Sequence[str]) -> Command:
    """Read a command line, as words or in quotes, or one file. ``files``: those that it names as arguments.

    Raises ``ConfigError`` for an unreadable file, and for anything but one command that starts a training.
    """
    command, first = Command(), words[0]
    if len(words) == 1 and first.endswith((".py", *MAPPINGS)) and (Path(first).is_file() or " " not in first):
        return Command(files=[first])
    if len(words) == 1 and first.endswith((".sh", ".slurm")) and " " not in first:
        try:
            words = _words_of_text(Path(first).read_text(encoding="utf-8"))
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{first} cannot be read: {error}", allowed="a shell script") from error
    elif len(words) == 1 and " " in first:
        words = _words_of_text(first)
    if operators := [word for word in words if _OPERATOR.fullmatch(word)]:
        raise _not_one_command(f"{operators[0]!r} is of the shell")
    is_started = False  # after the script come its arguments
    is_begun = False  # after variables, and nohup, time, conda run
    rest = [*words]
    while rest:
        word = rest.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        is_begun = is_begun or bool(_STARTER.fullmatch(Path(word).name)) or word.endswith(_SCRIPTS)
        if word == "...":
            command.others.append((word, "what else the command has is not stated"))
        elif word == "-m" and rest and is_begun and not is_started:
            module = rest.pop(0)
            is_started = module not in ("torch.distributed.run", "torch.distributed.launch")
            command.starts.append(module if is_started else "torchrun")
        elif word.startswith("-"):
            is_started, is_begun = is_started or not is_begun, True
            values = [value] if equals else []
            most = len(rest) if is_started else 1  # an option of a launcher has one value, and the script comes after
            while not equals and len(values) < most and rest and _is_value(rest[0], of_launcher=not is_started):
                values.append(rest.pop(0))
            source = word if equals else shlex.join([word, *values])
            command.add(name.replace("-", "_"), values if len(values) > 1 else values[0] if values else True, source)
        elif _ASSIGNMENT.fullmatch(word) and not is_begun:
            command.add(name, value, f"{name}={shlex.quote(value)}")
        elif is_started or word.endswith(MAPPINGS):
            command.files.append(word)
        elif is_begun:
            command.starts.append(word)
            is_started = word.endswith(_SCRIPTS) or word == "train"
        elif word not in ("export", "env"):
            command.others.append((word, "put it before the command that you start"))
    if command.others and not command.starts and command.others[0][0] != "...":
        raise ConfigError(
            f"{shlex.join(words)} starts no training, and states no settings",
            remedy="docs/migrating/index.md has what replaces each command of the guides",
        )
    return command


def _not_one_command(why: str) -> ConfigError:
    remedy = "give the command itself, with its variables in front: NAME=VALUE ... COMMAND; `bash -x SCRIPT` prints it"
    return ConfigError(f"it is more than one command line: {why}", remedy=remedy)


def _words_of_text(text: str) -> list[str]:
    """Return the variables that a script exports, and the words of its only command."""
    exports: list[str] = []
    command: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        try:
            words = [*lexer]
        except ValueError as error:
            raise _not_one_command(f"{line.strip()!r} has {str(error).lower()}") from error
        words = words[: next((i for i, word in enumerate(words) if word.startswith("#")), len(words))]
        if expressions := [word for word in words if "$" in word or "`" in word]:
            raise _not_one_command(f"{expressions[0]!r} is of the shell")
        variables = words[1:] if words[:1] == ["export"] else words
        if all(map(_ASSIGNMENT.fullmatch, variables)):
            exports += variables
        elif command:
            raise _not_one_command(f"{shlex.join(command)!r} is followed by {shlex.join(words)!r}")
        else:
            command = words
    return [*exports, *command]


def _is_value(word: str, *, of_launcher: bool) -> bool:
    is_number = re.fullmatch(r"-[\d.]+(e-?\d+)?", word) is not None
    return word != "..." and (not word.startswith("-") or is_number) and not (of_launcher and word.endswith(_SCRIPTS))


def settings_of(values: Mapping[str, Any], section: str = "") -> Iterator[Setting]:
    """The keys of a file, those of sections too: ``train: {lr: 1}`` is ``lr``."""
    for key, value in values.items():
        whole = f"{section}.{key}" if section else str(key)
        if isinstance(value, Mapping) and value:
            yield from settings_of(value, whole)
        else:
            yield Setting(str(key), value, f"{whole}: {value!r}")
