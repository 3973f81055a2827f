"""Command lines, exported variables, shell scripts and YAML -> names and values, in their order. No shell is started.

Understood: ``[NAME=VALUE] torchrun|python|... SCRIPT --name value``, ``export NAME=VALUE``, ``${NAME:-default}``.
Everything else of a script is kept as text, so that it can be reported.
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

STARTERS = ("torchrun", "python", "python3", "deepspeed", "accelerate", "bash", "sh", "sbatch", "srun", "xtuner")
"""Commands that start a training."""
_LAUNCHERS = ("torchrun", "deepspeed")
LAUNCH = ("num_nodes", "nnodes", "node_rank", "nproc_per_node", "master_addr", "master_port")
"""Arguments of a launcher, under torchrun's names and BAGEL's."""
_ENVIRONMENT = re.compile(
    r"(CUDA|TORCH|NCCL|GLOO|WANDB|HF|PYTORCH|OMP|MKL|TOKENIZERS|PYTHON|DEEPSPEED|SLURM)[A-Z0-9_]*"
)
"""Variables that libraries read, here as there."""
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
_OPERATOR = re.compile(r"\d?>.*|\||\|\||&&?|;|<.*")
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


def read_command(words: Sequence[str]) -> Command:
    """From the words of a command line, or of one file: ``.sh``, ``.yaml`` or ``.json``. Files that it names as
    arguments (``train_fsdp.py config.yaml``) are in ``files``.

    Raises ``ConfigError`` for a file that cannot be read, or no words.
    """
    if not words:
        raise ConfigError("nothing is given", allowed="a file, or -- and the command line: -- --learning_rate 1e-5")
    found = Command()
    if len(words) == 1 and words[0].endswith((".sh", ".slurm")):
        read_script(Path(words[0]), found)
    elif len(words) == 1 and words[0].endswith(_SOURCES):
        found.files.append(words[0])
    else:
        _read_words([*words], found, {})
    if not (found.given or found.launch or found.environment or found.files or found.starts):
        raise ConfigError(
            f"{shlex.join(words)} starts no training, and states no settings",
            remedy="docs/migrating.md has what replaces each command of the guides",
        )
    return found


def read_script(path: Path, found: Command) -> None:
    """A shell script, line by line; its ``if``, ``for`` and functions are not interpreted."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", allowed="a shell script") from error
    variables: dict[str, str] = {}
    for line in re.sub(r"\\\n", " ", text).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            found.other.append((line.strip(), f"it is not a whole command: {error}"))
            continue
        if words:
            _read_words(words, found, variables)


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """``$NAME`` and ``${NAME:-default}`` of the script itself; others stay."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return variables.get(name, match[0] if match[3] is None else match[3].strip("\"'"))

    return _VARIABLE.sub(value, text)


def _read_words(words: list[str], found: Command, variables: dict[str, str]) -> None:
    """The words of one command."""
    line = shlex.join(words)
    if words and words[0] == "export":
        words = words[1:]
    while words and (match := _ASSIGNMENT.fullmatch(words[0])):
        name, value = match[1], _expanded(match[2], variables)
        variables[name] = value
        _keep(name, value, f"{name}={shlex.quote(value)}", found)
        words = words[1:]
    if not words:
        return
    end = next((i for i, word in enumerate(words) if _OPERATOR.fullmatch(word)), len(words))
    if end < len(words):
        found.other.append((shlex.join(words[end:]), "it is of the shell: append it to the command that you start"))
        words = words[:end]
    first = Path(words[0]).name
    if not words[0].startswith("-") and first not in STARTERS and not words[0].endswith(_SOURCES):
        found.other.append((line, "it starts no training: docs/migrating.md has what replaces it"))
        return
    if len(words) > 1 and Path(words[1]).name.startswith("eval"):  # sbatch eval.slurm
        found.other.append((line, "it starts an evaluation: docs/evaluation.md"))
        return
    _read_arguments([_expanded(word, variables) for word in words], found)


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
                values.append(words[0])
                words = words[1:]
            key = name.replace("-", "_")
            shown = word if equals else shlex.join([word, *values])
            if key == "m" and not of_script:  # python -m MODULE
                found.starts += values
                of_script = True
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
    words = [f"{name}={value}" for name, value in command.environment.items()]
    started_by = next((word for word in command.starts if word in _LAUNCHERS), "torchrun" if launch else "python")
    words += [started_by, *(f"--{name}={value}" for name, value in launch.items())]
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
