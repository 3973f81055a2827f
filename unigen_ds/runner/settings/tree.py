"""The whole tree of settings: built once from a config, and the only form in which a config is passed to lower layers.

``load_settings`` reads a file (``config/overrides.py``), translates keys of mmengine and xtuner, imports the modules of
``custom_imports`` and checks the sections, each once; all problems are in one ``ConfigError``. ``Settings.from_config``
does so with values of a user's own code, and ``load_config`` returns such values: mmengine's ``Config``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from mmengine.config import Config
from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from unigen_ds.backends import single as _single
from unigen_ds.backends.deepspeed import deepspeed as _deepspeed  # noqa: F401 - these register themselves
from unigen_ds.backends.fsdp import fsdp as _fsdp  # noqa: F401
from unigen_ds.checkpoint.manifest import Base
from unigen_ds.checkpoint.partial import LoadSettings
from unigen_ds.config.overrides import ConfigValues, override_path, plain_values, read_values, top_problems
from unigen_ds.config.paths import expand_paths
from unigen_ds.config.registry import BACKENDS, MODELS, find
from unigen_ds.config.section import AS_LIST, Component, Of, Section, argument_defaults, keys, one_or_many
from unigen_ds.config.translation import translate
from unigen_ds.config.values import Number, Time
from unigen_ds.core.batch import DEFAULT_WEIGHT
from unigen_ds.core.errors import ConfigError, raise_any
from unigen_ds.core.json_values import dotted_name, leaves
from unigen_ds.core.progress import Duration, Ruler, Skip
from unigen_ds.data.order import packing as _packing  # noqa: F401
from unigen_ds.data.settings import Tokenizer, TrainDataloader, ValDataloader
from unigen_ds.data.text import tokenizers as _tokenizers  # noqa: F401
from unigen_ds.evaluation import metrics as _metrics  # noqa: F401
from unigen_ds.families import directories as _families  # noqa: F401
from unigen_ds.families.bagel.family import Bagel
from unigen_ds.families.base import family_of
from unigen_ds.hooks.evaluate.evaluate import EvaluateHook
from unigen_ds.hooks.mmengine import stops_early
from unigen_ds.hooks.settings import CustomHook, DefaultHooks
from unigen_ds.models.settings import Lora
from unigen_ds.optim.settings import Finite, OptimWrapper
from unigen_ds.runner.settings.custom_imports import CustomImports, import_custom, importable
from unigen_ds.runner.settings.environment import Environment
from unigen_ds.runner.settings.family_settings import PROCESSOR_KEYS, family_problems
from unigen_ds.schedule.schedule import CurveComponent
from unigen_ds.system.log import notice
from unigen_ds.tracking.settings import Visualizer


class Randomness(Section):
    """Where all random numbers come from."""

    seed: int | None = 0
    """Seed of weights, data order, noise and dropout; a resume needs the same. None: drawn at the first start, recorded
    in every checkpoint and used by a resume. `--seed`."""


class TrainCfg(Section):
    """When training is complete: the first limit that is reached."""

    _UNITS: ClassVar = {"max_epochs": "epoch", "max_iters": "iteration", "max_updates": "update", "max_tokens": "token"}
    max_epochs: Number | None = Field(default=None, gt=0)
    """Passes over the data; may be fractional."""
    max_iters: int | None = Field(default=None, gt=0)
    """Iterations of the first start."""
    max_updates: int | None = Field(default=None, gt=0)
    """Updates of the first start."""
    max_tokens: Number | None = Field(default=None, gt=0)
    """Tokens over all processes."""
    max_time: Time | None = None
    """How long a process may run, as `'3h50m'`, `'1d2h'` or seconds: the run stops before, with a checkpoint and exit
    status 143 ([launching](launching.md#a-time-limit)), and is not complete."""

    @model_validator(mode="after")
    def _one_limit(self) -> TrainCfg:
        if not any(math.isfinite(value) for value, _ in self.limits):
            raise ConfigError("train_cfg sets no limit", allowed=", ".join(self._UNITS))
        return self

    @property
    def limits(self) -> list[tuple[float, str]]:
        """(amount, unit) of each limit that is given."""
        return [(getattr(self, key), unit) for key, unit in self._UNITS.items() if getattr(self, key) is not None]

    def durations(self, ruler: Ruler) -> list[Duration]:
        """When training is complete, in amounts of data. The first limit reached ends it."""
        return [ruler.duration(amount, unit) for amount, unit in self.limits]


class ModelSettings(Section):
    """What a model and its processor are made from: a checkpoint or a published directory has no more of a config."""

    model: Annotated[Component, Of(MODELS)]
    """Component: the model."""
    tokenizer: Tokenizer | None = None
    """Component: text to tokens."""
    processor: Mapping[str, Any] = Field(default={})
    """How records become sequences: of the model's family."""
    lora: Lora | None = None
    """Low-rank adapters, [LoRA, DoRA and QLoRA](lora.md); None: the model itself is trained."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelSettings:
        """The settings in a config, of which nothing else is read. Raises one ``ConfigError`` for all that is wrong."""
        return ModelSettings.parse({key: config[key] for key in ModelSettings.model_fields if key in config})

    @model_validator(mode="before")
    @classmethod
    def _own_sections(cls, config: Any) -> Any:
        """``processor`` and ``loss_weights`` may be None: all their keys are left out."""
        none = ("processor", "loss_weights")
        return {key: {} if key in none and value is None else value for key, value in dict(config).items()}


DATA_SECTIONS = ("custom_imports", "model", "tokenizer", "processor", "train_dataloader", "val_dataloader",
                 "randomness", "loss_weights")  # fmt: skip
"""Sections that decide the data of a run and the weight of each loss."""

Skips = BeforeValidator(lambda value: tuple(map(Skip.parse, one_or_many(value))))


class Settings(ModelSettings):
    """One field for each key of a config."""

    train_dataloader: TrainDataloader
    val_dataloader: ValDataloader | None = None
    """What is evaluated on: one section, or several by name; None: nothing."""
    optim_wrapper: OptimWrapper
    loss_weights: Mapping[str, Finite] = Field(default={})
    """Term of the loss -> weight of its mean; 1 by default."""
    param_scheduler: Annotated[tuple[CurveComponent, ...], AS_LIST] = ()
    """Learning-rate curves."""
    train_cfg: TrainCfg
    backend: Annotated[Component, Of(BACKENDS), BeforeValidator(lambda value: value or {"type": "single"})] = Field(
        default_factory=lambda: Component(_single.SingleBackend)
    )
    """Component: the engine."""
    default_hooks: DefaultHooks = Field(default_factory=lambda: DefaultHooks.parse({}))
    custom_hooks: Annotated[tuple[CustomHook, ...], AS_LIST] = ()
    """List of further hooks."""
    visualizer: Visualizer = Visualizer()
    randomness: Randomness = Randomness()
    env: Environment = Environment()
    load_from: str | None = None
    """With `resume=True`: the checkpoint to resume from; alone, or with `'auto'` at the first start: weights only, from
    zero. `--load-from`."""
    load_cfg: LoadSettings | None = None
    """What may differ, with `load_from` alone."""
    resume: bool | str | None = False
    """True: from the newest valid checkpoint of the work dir, or in full from `load_from`; a path: from that one;
    `'auto'`: from the newest of the work dir, and where there is none as False. `--resume` is `'auto'`, `--resume CKPT`
    a path."""
    base: str | None = None
    """With `lora`: the base's folder instead of `model.pretrained`; a resume needs the manifest's files. `--base`."""
    on_batch_change: Literal["refuse", "keep-batch", "keep-lr", "linear", "sqrt"] = "refuse"
    """How the learning rate changes when a resume has another effective batch: `'keep-lr'`, `'linear'` (times new /
    old), `'sqrt'`; kept by later checkpoints. `'keep-batch'`: it stays as it is, and `batch_size` (at most the
    config's) and `accumulative_counts` follow from the number of processes, also where `world_size` is another one.
    `--on-batch-change`."""
    on_data_change: Literal["refuse", "append", "restart"] = "refuse"
    """Changed data on a resume: `'append'` (records were added: they join from the next epoch on), `'restart'` (a new
    epoch of the new data begins). `--on-data-change`."""
    skip_sequences: Annotated[tuple[Skip, ...], Skips] = ()
    """Ranges `'A:B'` of global sequence numbers that are left out, also by every later resume
    ([skipped sequences](resume/skip_sequences.md)). `--skip-sequences`."""
    work_dir: str | None = None
    """Output folder; None: `work_dirs/<config name>`; `{run_name}` in it: a folder for each run, named by
    `visualizer.run_name`, which is needed then, and found again by a resume. `--work-dir`."""
    checkpoint_dir: str | None = None
    """Folder of the checkpoints, `last_checkpoint`, `best_checkpoint` and `lineage.json`, for one run alone; None: the
    work dir, which has everything else. `{run_name}` in it as in `work_dir`.
    [A folder of their own](checkpoints/files.md#a-folder-of-their-own). `--checkpoint-dir`."""
    launcher: Literal["none", "pytorch", "slurm", "mpi"] = "none"
    """`none`, `pytorch` (torchrun), `slurm` or `mpi`. `--launcher`."""
    world_size: int | None = Field(default=None, ge=1)
    """Number of processes that the config is meant for: a start with another one is refused. None: any."""
    custom_imports: CustomImports = CustomImports()
    """`dict(imports=['my.module'])`: modules that register your own classes, which Python finds (installed,
    `PYTHONPATH`) or which are beside the config or one of its `_base_` files. `generate` and `export` import those of a
    checkpoint's config only with `--allow-custom-imports`, unless they are modules of `unigen_ds` itself, as
    `unigen_ds.examples.digits`."""
    _config: dict[str, Any] = PrivateAttr(default_factory=dict)
    _run_name: str | None = PrivateAttr(default=None)

    @property
    def run_name(self) -> str | None:
        """``visualizer.run_name``, filled in by rank 0 when the run starts; None: not asked for."""
        return self._run_name

    def with_name(self, name: str | None, folder: str | None) -> Settings:
        """The same, with the name of the run and, where it has a folder of its own, that as ``work_dir``."""
        update = {"work_dir": folder} if folder else {}
        if name and "{run_name}" in (self.checkpoint_dir or ""):
            update["checkpoint_dir"] = str(self.checkpoint_dir).replace("{run_name}", name)
        settings = self._replace(update, {**self._config, **update})
        settings._run_name = name
        return settings

    def _replace(self, update: dict[str, Any], config: dict[str, Any]) -> Settings:
        """The same with other values of fields, and the config that has them."""
        settings = self.model_copy(update=update)
        settings._config = config
        return settings

    @property
    def config(self) -> dict[str, Any]:
        """The config that these settings were made from, translated, as plain values: for records of the run."""
        return self._config

    @classmethod
    def from_config(cls, config: Any) -> Settings:
        """Settings from ``load_config``, ``read_config`` or a mapping. Raises one ``ConfigError`` for all mistakes."""
        if isinstance(config, Settings):
            return config
        if isinstance(config, ConfigValues):
            values, errors = config.values, [*config.problems]
        else:
            values = plain_values(config)
            if not isinstance(values, dict):
                raise ConfigError(f"the config is {config!r}", allowed="what load_config returns, or a mapping")
            if not isinstance(config, LoadedConfig):
                for change in translate(values):
                    notice(str(change))
            errors = top_problems(values, known_keys(), file=getattr(config, "filename", None))
        return cls._from_sections({key: value for key, value in values.items() if key in cls.model_fields}, errors)

    @classmethod
    def _from_sections(cls, sections: dict[str, Any], errors: list[ConfigError]) -> Settings:
        """Settings from translated sections. ``errors``: what is wrong besides."""
        try:
            import_custom(sections)
        except ConfigError as error:  # what the module registers is not known
            raise_any([*errors, error])
        try:
            expand_paths(sections)
        except ConfigError as error:
            errors.append(error)
        settings, more = cls.try_parse(sections)
        errors += [*more, *family_problems(sections)]
        raise_any(errors)
        assert settings is not None
        raise_any([*_misfits(settings)])
        settings._config = sections
        return settings

    @classmethod
    def of_data(cls, config: Mapping[str, Any]) -> Settings:
        """``DATA_SECTIONS`` and the precision of a translated config: for tools that do not train. No more is read."""
        values = plain_values(config)
        optimizer = {"type": "AdamW", "lr": 0.0}
        precision = (values.get("optim_wrapper") or {}).get("precision", "fp32")
        filler = {"optim_wrapper": {"optimizer": optimizer, "precision": precision}, "train_cfg": {"max_updates": 1}}
        sections = {key: values[key] for key in DATA_SECTIONS if values.get(key) is not None}
        return cls._from_sections({**sections, **filler}, [])

    @classmethod
    def complete(cls, config: Any) -> Any:
        """See ``Section.complete``; of ``processor`` the keys that the model's family has."""
        values = super().complete(config)
        try:
            family = family_of(find(MODELS, values["model"], where=""))
        except (ConfigError, TypeError, KeyError):
            return values
        defaults = argument_defaults(family.processor_arguments())
        section = {key: defaults[key] for key in PROCESSOR_KEYS if key in defaults}
        weights = {**dict.fromkeys(family.terms, DEFAULT_WEIGHT), **(values["loss_weights"] or {})}
        return {**values, "processor": {**section, **(values["processor"] or {})}, "loss_weights": weights}

    @property
    def term_weights(self) -> dict[str, float]:
        """The weight of each loss term of the model's family."""
        return {t: self.loss_weights.get(t, DEFAULT_WEIGHT) for t in family_of(self.model.cls).terms}

    def with_choices(self, *, seed: int | None, precision: str | None = None, base: Base | None = None) -> Settings:
        """The same with the choices of a plan; a base whose files are not here stays as the config names it."""
        update: dict[str, Any] = {"randomness": Randomness(seed=seed)}
        config = {**self._config, "randomness": {**(self._config.get("randomness") or {}), "seed": seed}}
        if precision not in (None, self.optim_wrapper.precision):
            update["optim_wrapper"] = self.optim_wrapper.model_copy(update={"precision": precision})
            config["optim_wrapper"] = {**config["optim_wrapper"], "precision": precision}
        if base is not None and base.is_here:
            update["model"] = replace(self.model, arguments={**self.model.arguments, "pretrained": base.path})
        return self._replace(update, config)

    def with_resume(self, resume: str) -> Settings:
        """The same, with ``resume`` where the config does not resume."""
        return self if self.resume else self._replace({"resume": resume}, {**self._config, "resume": resume})

    def going_back(self, checkpoint: Path, skip: Skip) -> Settings:
        """The same from ``checkpoint`` without the sequences of ``skip``; records of the run keep its config."""
        update = {"resume": str(checkpoint), "load_from": None, "skip_sequences": (*self.skip_sequences, skip)}
        return self._replace({**update, "load_cfg": None}, self._config)

    @property
    def seed(self) -> int:
        """``randomness.seed``, which the start of a run has settled."""
        assert self.randomness.seed is not None, "the seed is settled by the plan of the start"
        return self.randomness.seed

    @property
    def folder(self) -> Path:
        if self.work_dir is None:
            raise ConfigError("the config has no work_dir", remedy="--work-dir DIR, or work_dir=DIR")
        if "{run_name}" in self.work_dir:
            raise ConfigError(f"work_dir is {self.work_dir!r}", remedy="--work-dir DIR names the folder of the run")
        return Path(self.work_dir)

    @property
    def checkpoints(self) -> Path:
        return self.folder if self.checkpoint_dir is None else Path(self.checkpoint_dir)


def known_keys() -> dict[str, Any]:
    """Every key of a config: those of a section as a mapping, else None."""
    of_family = {"processor": PROCESSOR_KEYS, "loss_weights": Bagel.terms}
    return {**keys(Settings), **{key: dict.fromkeys(names) for key, names in of_family.items()}}


# ---- from files -----------------------------------------------------------------------------------------------------


class LoadedConfig(Config):
    """What ``load_config`` returns: mmengine's ``Config``, translated, without names of the file that are no keys."""


def read_config(name: str | Path, overrides: Iterable[str] | Mapping[str, Any] = ()) -> ConfigValues:
    """Read, override and translate a config, not yet checked. Raises ``ConfigError`` where it cannot be read."""
    config = read_values(name, overrides, known_keys())
    for change in config.changes:
        notice(str(change))
    importable(config)
    return config


def load_settings(name: str | Path, overrides: Iterable[str] | Mapping[str, Any] = ()) -> Settings:
    """Read a config and check it. Raises one ``ConfigError`` for all that is wrong."""
    return Settings.from_config(read_config(name, overrides))


def load_config(name: str | Path, overrides: Iterable[str] | Mapping[str, Any] = ()) -> Config:
    """Read a config with overrides: ``K=V`` texts or a mapping of dotted paths. Sections are checked where it is used.

    Raises one ``ConfigError`` for a broken file, unknown names at the top, and overrides without an effect.
    """
    config = read_config(name, overrides)
    raise_any(config.problems)
    result = LoadedConfig(config.values, cfg_text=config.text, filename=str(config.path))
    expand_paths(result)
    return result


# ---- every key with its value and where it comes from: ``tools/train.py CONFIG --print-config`` ---------------------


def config_lines(settings: Settings, config: ConfigValues) -> list[str]:
    """A line for each key: ``key = value  # origin``."""
    translations = {change.path for change in config.changes}
    overridden = [override_path(key) for key in config.overrides]
    config_leaves = {leaf for leaf, _ in leaves(settings.config)}
    rows = []
    for leaf, value in leaves(settings.complete(settings.config)):
        steps, names = [str(step) for step in leaf], [step for step in leaf if isinstance(step, str)]
        if any(path in (steps[: len(path)], names[: len(path)]) for path in overridden):
            origin = "command line"
        elif dotted_name(leaf) in translations:
            origin = "translated"
        else:
            origin = "config" if config_leaves & {leaf, tuple(names)} else "default"  # a single member is a list of one
        rows.append((f"{dotted_name(leaf)} = {value!r}", origin))
    width = min(max(len(text) for text, _ in rows), 72)
    return [*(f"# {change}" for change in config.changes), *(f"{text:<{width}}  # {origin}" for text, origin in rows)]


# ---- checks that involve several sections ---------------------------------------------------------------------------


def _misfits(settings: Settings) -> Iterator[ConfigError]:
    """Methods that the engine needs and the model does not have, and hooks without the data that they need."""
    engine, model = settings.backend, settings.model
    if "{run_name}" in (settings.work_dir or "") and settings.visualizer.run_name is None:
        yield ConfigError(
            f"work_dir is {settings.work_dir!r}, and visualizer.run_name is not given",
            remedy="visualizer=dict(run_name='{model}_{updates}_{date}'), or 'nanovlm' (docs/configs/visualizer.md)",
        )
    if "{run_name}" in (settings.checkpoint_dir or "") and "{run_name}" not in (settings.work_dir or ""):
        yield ConfigError(
            f"checkpoint_dir is {settings.checkpoint_dir!r}, and work_dir is {settings.work_dir!r}: a resume would look"
            " for its checkpoints under another name",
            allowed="{run_name} in checkpoint_dir where work_dir has it",
        )
    names = {getattr(hook.cls, "name", "") for hook in settings.custom_hooks}
    for hook in settings.custom_hooks if settings.val_dataloader is None else ():
        needs = "EvaluateHook" if issubclass(hook.cls, EvaluateHook) else "EarlyStoppingHook"
        if issubclass(hook.cls, EvaluateHook) or (stops_early(hook) and EvaluateHook.name not in names):
            yield ConfigError(
                f"custom_hooks has an {needs}, and there is no val_dataloader: nothing is evaluated",
                remedy="val_dataloader=dict(split=0.02), or dict(dataset=dict(type=...)); or delete the hook",
            )
    for method, advice in getattr(engine.cls, "model_needs", {}).items():
        if not hasattr(model.cls, method):
            problem = f"model.type is {model.cls.__name__}, which has no {method}(): backend {engine.name!r} needs it"
            yield ConfigError(problem, remedy=advice)
