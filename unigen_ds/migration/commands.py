"""Command lines, exported variables, shell scripts and YAML -> names and values, in their order. No shell is started.

Understood: ``[NAME=VALUE] torchrun|python|... SCRIPT --name value``, ``export NAME=VALUE``, and all
that ``shell.py`` reads. Everything else of a script is kept as text, so that it can
be reported.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unigen_ds.core.config_file import read_file
from unigen_ds.core.errors import ConfigError
from unigen_ds.migration.shell import Shell, Simple

_STARTER = re.compile(r"torchrun|python[\d.]*|deepspeed|accelerate|bash|sh|sbatch|srun|xtuner")
"""Commands that start a training."""
_LAUNCHERS = ("torchrun", "deepspeed")
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "accelerate")
"""After ``python -m``: a launcher, whose options and script follow."""
_WRAPPERS = {
    "nohup", "exec", "env", "command", "sudo", "time", "nice", "ionice", "timeout", "setsid", "stdbuf", "unbuffer",
    "numactl", "taskset", "conda", "mamba", "micromamba", "uv", "poetry", "pipenv", "singularity", "apptainer",
    "docker", "then", "do", "else", "{", "!",
}  # fmt: skip
"""Words before a command that starts a training."""
_CONDITIONS = {"if", "elif", "for", "while", "until", "case"}
_KEYWORDS = {"then", "else", "fi", "do", "done", "esac", "{", "}", "!", "function"}
_OF_ACCELERATE = {"num_machines": "nnodes", "machine_rank": "node_rank", "main_process_ip": "master_addr",
                  "main_process_port": "master_port"}  # fmt: skip
_OF_PYTHON = re.compile(r"-[BEIOsSuvx]+")
LAUNCH = ("num_nodes", "nnodes", "node_rank", "nproc_per_node", "master_addr", "master_port")
"""Arguments of a launcher, under torchrun's names and BAGEL's."""
_ENVIRONMENT = re.compile(
    r"(CUDA|TORCH|NCCL|GLOO|WANDB|HF|PYTORCH|OMP|MKL|TOKENIZERS|PYTHON|DEEPSPEED|SLURM)[A-Z0-9_]*"
)
"""Variables that libraries read, here as there."""
_SCRIPTS = (".py", ".sh", ".slurm")
_SOURCES = (*_SCRIPTS, ".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Given:
    """One setting as it was given."""

    name: str
    """As the guide has it, without dashes in front."""
    value: Any
    """A text of a command line, a value of a file, or True of a flag without a value."""
    shown: str
    """As it was written."""


@dataclass
class Command:
    """What a command line, a script or a file states."""

    given: list[Given] = field(default_factory=list)
    launch: dict[str, str] = field(default_factory=dict)
    """Of the launcher: see ``LAUNCH``."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that libraries read."""
    files: list[str] = field(default_factory=list)
    """Arguments without a name: the YAML of a trainer, a config."""
    starts: list[str] = field(default_factory=list)
    """Words before the first argument: ``torchrun``, ``train.py``."""
    other: list[tuple[str, str]] = field(default_factory=list)
    """Text that is no setting, and why it is none."""
    helpers: set[str] = field(default_factory=set)
    """Variables of a script whose values its commands have."""


def read_command(words: Sequence[str]) -> Command:
    """From the words of a command line, or of one file: ``.sh``, ``.yaml`` or ``.json``. Files that it names as
    arguments (``train_fsdp.py config.yaml``) are in ``files``.

    Raises ``ConfigError`` for a file that cannot be read, or no words.
    """
    if not words:
        raise ConfigError("nothing is given", allowed="a file, or -- and the command line: -- --learning_rate 1e-5")
    found, shell = Command(), Shell()
    if len(words) == 1 and words[0].endswith((".sh", ".slurm")) and " " not in words[0]:
        _read_commands(shell.script(_script(Path(words[0]))), found)
    elif len(words) == 1 and words[0].endswith(_SOURCES) and (Path(words[0]).is_file() or " " not in words[0]):
        found.files.append(words[0])
    elif len(words) == 1 and " " in words[0]:  # a command line in quotes
        _read_commands(shell.script(words[0]), found)
    else:
        _read_commands(shell.command_line(words), found)
    found.helpers = shell.used
    if not (found.given or found.launch or found.environment or found.files or found.starts):
        raise ConfigError(
            f"{shlex.join(words)} starts no training, and states no settings",
            remedy="docs/migrating.md has what replaces each command of the guides",
        )
    return found


def _script(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", allowed="a shell script") from error


def _read_commands(commands: Iterable[Simple], found: Command) -> None:
    """One after the other; ``if``, ``for`` and functions are not interpreted."""
    for one in commands:
        if one.unfinished:
            found.other.append((one.source, f"it is not a whole command: {one.unfinished}"))
            continue
        for name, value in one.assigned:
            _keep(name, value, f"{name}={shlex.quote(value)}", found)
        if one.words:
            _read_simple(one, found)


def _read_simple(one: Simple, found: Command) -> None:
    """The words of one command, without the variables before it."""
    words = one.words
    first = next((i for i, word in enumerate(words) if _STARTER.fullmatch(Path(word).name)), None)
    if first and words[0] in _WRAPPERS:  # nohup, env NAME=VALUE, conda run -n NAME, then
        for word in words[:first]:
            name, equals, value = word.partition("=")
            if equals and name.isidentifier():
                _keep(name, value, f"{name}={shlex.quote(value)}", found)
        if kept := [word for word in words[:first] if "=" not in word and word not in _KEYWORDS]:
            found.other.append((shlex.join(kept), "it is of the shell: put it before the command that you start"))
        words = words[first:]
    if not words[0].startswith("-") and not _starts(words[0]):
        if words[0] in _CONDITIONS:
            found.other.append((one.source, "it is not interpreted: the commands inside are read one after the other"))
        elif words[0] not in _KEYWORDS or words[0] in ("[", "[["):
            found.other.append(
                (f"{one.source} {one.after}".strip(), "it starts no training: docs/migrating.md has what replaces it")
            )
        return
    if len(words) > 1 and Path(words[1]).name.startswith("eval"):  # sbatch eval.slurm
        found.other.append((shlex.join(words), "it starts an evaluation: docs/evaluation.md"))
        return
    if one.after:
        found.other.append((one.after.strip(), "it is of the shell: append it to the command that you start"))
    _read_arguments(words, found)


def _starts(word: str) -> bool:
    return bool(_STARTER.fullmatch(Path(word).name)) or (word.endswith(_SOURCES) and not word.startswith("-"))


def _read_arguments(words: list[str], found: Command) -> None:
    """``torchrun --nproc_per_node=8 train.py config.yaml --name value``."""
    of_script = words[0].startswith("-")  # nothing is started: arguments alone
    while words:
        word, words = words[0], words[1:]
        if word.startswith("-") and not _is_number(word) and word != "-":
            name, equals, value = word.lstrip("-").partition("=")
            values = [value] if equals else []
            while not equals and words and _is_value(words[0]) and not (values and not of_script):
                if not of_script and words[0].endswith(_SCRIPTS):
                    break
                if values and words[0].startswith("$"):  # a variable of more arguments, which is not known
                    break
                values.append(words[0])
                words = words[1:]
            key = name.replace("-", "_")
            shown = word if equals else shlex.join([word, *values])
            if key == "m" and not of_script:  # python -m MODULE
                launches = bool(values) and values[0] in _MODULES
                found.starts += ["torchrun" if launches and "torch" in values[0] else one for one in values]
                of_script = not launches
            elif not of_script and _OF_PYTHON.fullmatch(word) and found.starts:
                found.other.append((word, "it is an option of the interpreter"))
                words = [*values, *words]
            elif not of_script and key in _OF_ACCELERATE and values:
                _keep(_OF_ACCELERATE[key], values[0], shown, found)
            elif not of_script and key == "num_processes" and values:
                found.launch["num_processes"] = values[0]
            else:
                _keep(key, True if not values else values[0] if len(values) == 1 else values, shown, found)
        elif word == "...":
            found.other.append((word, "what else the command has is not stated"))
        elif of_script or (found.starts and not word.endswith(_SCRIPTS) and word not in ("train", "launch")):
            found.files.append(word)
        else:
            found.starts.append(word)
            of_script = word.endswith(_SCRIPTS) or word == "train"


def _keep(name: str, value: Any, shown: str, found: Command) -> None:
    """Of the launcher, or of the trainer."""
    if name.lower() in LAUNCH and isinstance(value, str):
        found.launch[name.lower()] = value
    elif _ENVIRONMENT.fullmatch(name) and isinstance(value, str):
        found.environment[name] = value
    else:
        found.given.append(Given(name, value, shown))


def start_command(command: Command, config: str) -> str:
    """How the written config is started, as the old one was: with the same processes and variables."""
    launch = {{"num_nodes": "nnodes"}.get(name, name): value for name, value in command.launch.items()}
    total, nodes = launch.pop("num_processes", ""), launch.get("nnodes", "1")
    if total.isdecimal() and nodes.isdecimal() and int(nodes):  # accelerate counts those of all nodes
        launch["nproc_per_node"] = str(int(total) // int(nodes))
    words = [f"{name}={shlex.quote(value)}" for name, value in command.environment.items()]
    started_by = next((word for word in command.starts if word in _LAUNCHERS), "torchrun" if launch else "python")
    words += [started_by, *(f"--{name}={shlex.quote(value)}" for name, value in launch.items())]
    return " ".join([*words, "tools/train.py", config])


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _is_value(word: str) -> bool:
    return word != "..." and (not word.startswith("-") or _is_number(word))


def read_mapping(path: Path) -> list[Given]:
    """The keys of a YAML or JSON file, those of sections too: ``train: {lr: 1}`` is ``lr``. Read by the safe loader."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist", remedy="run it in the folder of the old trainer, or give the path")
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(f"{path} is no YAML file", allowed=".yaml, .yml or .json")
    return [*_leaves(read_file(path).to_dict())]


def read_files(command: Command) -> None:
    """The keys of the YAML and JSON files that a command names, before what it states itself."""
    for name in [name for name in command.files if name.endswith((".yaml", ".yml", ".json"))]:
        command.files.remove(name)
        command.given[:0] = read_mapping(Path(name))


def _leaves(values: Mapping[str, Any], section: str = "") -> Iterator[Given]:
    for key, value in values.items():
        whole = f"{section}.{key}" if section else str(key)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, whole)
        else:
            yield Given(str(key), value, f"{whole}: {value!r}")


class GivenByName(dict[str, Given]):
    """Name -> what was given last. ``repeated`` has what was given before."""

    def __init__(self, given: Iterable[Given]) -> None:
        super().__init__()
        self.repeated: list[Given] = []
        for one in given:
            if one.name in self:
                self.repeated.append(self[one.name])
            self[one.name] = one
