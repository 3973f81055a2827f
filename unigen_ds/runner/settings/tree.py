"""The whole tree of settings: built once from a config, and the only form in which a config is passed to lower layers.

``Settings.from_config`` accepts what ``load_config`` returns, mmengine's ``Config``, or a mapping. Keys of mmengine and
xtuner with an obvious meaning are translated once (``config/translation.py``): by ``load_config``, else here. The
modules of ``custom_imports`` are imported, and all problems are reported in one ``ConfigError``.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from mmengine.config import Config
from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from unigen_ds.backends import single as _single
from unigen_ds.backends.deepspeed import deepspeed as _deepspeed  # noqa: F401 - these register themselves
from unigen_ds.backends.fsdp import fsdp as _fsdp  # noqa: F401
from unigen_ds.checkpoint.base_files import Base
from unigen_ds.checkpoint.settings import LoadSettings
from unigen_ds.config import overrides as files
from unigen_ds.config.file import is_of_mmengine
from unigen_ds.config.paths import expand_paths
from unigen_ds.config.registry import BACKENDS, MODELS, find
from unigen_ds.config.section import LISTED, Component, Of, Section, argument_defaults, keys
from unigen_ds.config.translation import translate
from unigen_ds.config.values import Number
from unigen_ds.core.batch import DEFAULT_WEIGHT
from unigen_ds.core.errors import ConfigError, raise_any
from unigen_ds.data.order import packing as _packing  # noqa: F401
from unigen_ds.data.settings import Tokenizer, TrainDataloader, ValDataloader
from unigen_ds.data.text import tokenizers as _tokenizers  # noqa: F401
from unigen_ds.evaluation import metrics as _metrics  # noqa: F401
from unigen_ds.families import directories as _families  # noqa: F401
from unigen_ds.families.bagel.family import Bagel
from unigen_ds.hooks.evaluate.evaluate import EvaluateHook
from unigen_ds.hooks.evaluate.preview import PreviewHook
from unigen_ds.hooks.mmengine import stops_early
from unigen_ds.hooks.settings import CustomHook, DefaultHooks
from unigen_ds.models.settings import Lora
from unigen_ds.optim.settings import Finite, OptimWrapper
from unigen_ds.runner.settings.custom_imports import CustomImports, import_custom, importable
from unigen_ds.runner.settings.environment import Environment
from unigen_ds.runner.settings.family_settings import PROCESSOR_KEYS, channel_problems, family_of_model, family_problems
from unigen_ds.schedule.settings import Curve
from unigen_ds.system.log import notice
from unigen_ds.tracking.settings import Visualizer


def _single_by_default(given: Any) -> Any:
    return given or {"type": "single"}


class Randomness(Section):
    """Where all random numbers come from."""

    seed: int | None = Field(
        default=0,
        description="of weights, data order, noise and dropout; a resume needs the same. None: drawn at the first"
        " start, recorded in every checkpoint and used by a resume. `--seed`",
    )


class TrainCfg(Section):
    """When training is complete: the first limit that is reached."""

    max_epochs: Number | None = Field(default=None, gt=0, description="passes over the data; may be fractional")
    max_iters: int | None = Field(default=None, gt=0, description="iterations of the first start")
    max_updates: int | None = Field(default=None, gt=0, description="updates of the first start")
    max_tokens: Number | None = Field(default=None, gt=0, description="tokens over all processes")

    @model_validator(mode="after")
    def _one_limit(self) -> TrainCfg:
        if not any(math.isfinite(value) for value, _ in self.limits):
            raise ConfigError("train_cfg sets no limit", allowed=", ".join(type(self).model_fields))
        return self

    @property
    def limits(self) -> list[tuple[float, str]]:
        """(amount, unit) of each limit that is given."""
        units = {"max_epochs": "epoch", "max_iters": "iteration", "max_updates": "update", "max_tokens": "token"}
        return [(getattr(self, key), unit) for key, unit in units.items() if getattr(self, key) is not None]


class ModelSettings(Section):
    """What a model and its processor are made from: a checkpoint or a published directory has no more of a config."""

    model: Annotated[Component, Of(MODELS)] = Field(description="component: the model")
    tokenizer: Tokenizer | None = Field(default=None, description="component: text to tokens")
    processor: Mapping[str, Any] = Field(default={}, description="how records become sequences: of the model's family")
    lora: Lora | None = Field(
        default=None,
        description="low-rank adapters, [LoRA, DoRA and QLoRA](lora.md); None: the model itself is trained",
    )

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelSettings:
        """From a config, of which nothing else is read. Raises one ``ConfigError`` for all that is wrong."""
        return ModelSettings.parse({key: config[key] for key in ModelSettings.model_fields if key in config})

    @model_validator(mode="before")
    @classmethod
    def _own_sections(cls, given: Any) -> Any:
        """``processor`` and ``loss_weights`` may be None: all their keys are left out."""
        if not isinstance(given, Mapping):
            return given
        none: dict[str, Any] = {key: {} for key in ("processor", "loss_weights") if key in given and given[key] is None}
        return {**given, **none}


class Settings(ModelSettings):
    """One field for each key of a config."""

    train_dataloader: TrainDataloader = Field(description="the data")
    val_dataloader: ValDataloader | None = Field(
        default=None, description="what is evaluated on: one section, or several by name; None: nothing"
    )
    optim_wrapper: OptimWrapper = Field(description="the optimizer, and what an update is made of")
    loss_weights: Mapping[str, Finite] = Field(
        default={}, description="term of the loss -> weight of its mean; 1 by default"
    )
    param_scheduler: Annotated[tuple[Curve, ...], LISTED] = Field(default=(), description="learning-rate curves")
    train_cfg: TrainCfg = Field(description="the length of training")
    backend: Annotated[Component, Of(BACKENDS, trial=True), BeforeValidator(_single_by_default)] = Field(
        default_factory=lambda: Component(_single.SingleBackend), description="component: the engine"
    )
    default_hooks: DefaultHooks = Field(
        default_factory=lambda: DefaultHooks.parse({}), description="hooks of every run"
    )
    custom_hooks: Annotated[tuple[CustomHook, ...], LISTED] = Field(default=(), description="list of further hooks")
    visualizer: Visualizer = Field(default=Visualizer(), description="log writers")
    randomness: Randomness = Field(default=Randomness(), description="where all random numbers come from")
    env: Environment = Field(default=Environment(), description="settings of the process and of torch")
    load_from: str | None = Field(
        default=None,
        description="with `resume=True`: the checkpoint to resume from; alone, or with `'auto'` at the first start:"
        " weights only, from zero. `--load-from`",
    )
    load_cfg: LoadSettings | None = Field(default=None, description="what may differ, with `load_from` alone")
    resume: bool | str | None = Field(
        default=False,
        description="True: from the newest valid checkpoint of the work dir, or in full from `load_from`; a path: from"
        " that one; `'auto'`: from the newest of the work dir, and where there is none as False. `--resume` is"
        " `'auto'`, `--resume CKPT` a path",
    )
    base: str | None = Field(
        default=None,
        description="with `lora`: the folder of the base's files, in place of `model.pretrained`; on a resume they must"
        " be those that the manifest records. `--base`",
    )
    assume: str | None = Field(
        default=None,
        description="`'batch_size=4,accumulative_counts=2,dp_size=8'`: what a checkpoint of plain DeepSpeed or mmengine"
        " does not contain, for a resume from it. `--assume`",
    )
    on_batch_change: Literal["refuse", "keep-lr", "linear", "sqrt"] = Field(
        default="refuse",
        description="how the learning rate changes when a resume has another effective batch: `'keep-lr'`, `'linear'`"
        " (times new / old), `'sqrt'`; kept by later checkpoints. `--on-batch-change`",
    )
    on_data_change: Literal["refuse", "append", "restart"] = Field(
        default="refuse",
        description="changed data on a resume: `'append'` (records were added: they join from the next epoch on),"
        " `'restart'` (a new epoch of the new data begins). `--on-data-change`",
    )
    work_dir: str | None = Field(
        default=None,
        description="output folder; None: `work_dirs/<config name>`; `{run_name}` in it: a folder for each run,"
        " named by `visualizer.run_name`, which is needed then, and found again by a resume. `--work-dir`",
    )
    checkpoint_dir: str | None = Field(
        default=None,
        description="folder of the checkpoints, `last_checkpoint`, `best_checkpoint` and `lineage.json`, for one run"
        " alone; None: the work dir, which has everything else. `{run_name}` in it as in `work_dir`."
        " [checkpoints.md](checkpoints.md#a-folder-of-their-own). `--checkpoint-dir`",
    )
    launcher: Literal["none", "pytorch", "slurm", "mpi"] = Field(
        default="none", description="`none`, `pytorch` (torchrun), `slurm` or `mpi`. `--launcher`"
    )
    world_size: int | None = Field(
        default=None,
        ge=1,
        description="number of processes that the config is meant for: a start with another one is refused. None: any",
    )
    custom_imports: CustomImports = Field(
        default=CustomImports(),
        description=(
            "`dict(imports=['my.module'])`: modules that register your own classes, which Python finds (installed,"
            " `PYTHONPATH`) or which are beside the config or one of its `_base_` files. `generate` and"
            " `export` import those of a checkpoint's config only with `--allow-custom-imports`,"
            " unless they are modules of `unigen_ds` itself, as `unigen_ds.examples.digits`"
        ),
    )
    _given: dict[str, Any] = PrivateAttr(default_factory=dict)
    _run_name: str | None = PrivateAttr(default=None)

    @property
    def run_name(self) -> str | None:
        """``visualizer.run_name``, filled in by rank 0 when the run starts; None: not asked for."""
        return self._run_name

    def named(self, name: str | None, folder: str | None) -> Settings:
        """The same, with the name of the run and, where it has a folder of its own, that as ``work_dir``."""
        update = {"work_dir": folder} if folder else {}
        if name and "{run_name}" in (self.checkpoint_dir or ""):
            update["checkpoint_dir"] = str(self.checkpoint_dir).replace("{run_name}", name)
        found = self.model_copy(update=update)
        found._given = {**self._given, **update}
        found._run_name = name
        return found

    @property
    def given(self) -> dict[str, Any]:
        """The config that these settings were made from, translated, as plain values: for records of the run."""
        return self._given

    @classmethod
    def from_config(cls, config: Any) -> Settings:
        """Raises one ``ConfigError`` for all that is wrong. ``config`` is not changed."""
        if isinstance(config, Settings):
            return config
        given, errors = normalised(config)
        found, more = cls._of_given(given, whole=True)
        raise_any([*errors, *more])
        assert found is not None
        return found

    @classmethod
    def _of_given(cls, given: dict[str, Any], *, whole: bool) -> tuple[Settings | None, list[ConfigError]]:
        errors: list[ConfigError] = []
        if whole:
            try:
                import_custom(given)
            except ConfigError as error:
                return None, [*cls.checked(given, whole=False)[1], error]
            try:
                expand_paths(given)
            except ConfigError as error:
                errors.append(error)
        found, more = cls.checked(given, whole=whole)
        errors += more
        if whole:
            errors += family_problems(given)
            part = (
                found
                or ModelSettings.checked({key: given[key] for key in ModelSettings.model_fields if key in given})[0]
            )
            errors += [] if part is None else channel_problems(part.model, part.processor)
        if found is None or errors:
            return None, errors
        found._given = given
        return found, list(_misfits(found)) if whole else []

    @classmethod
    def completed(cls, given: Any) -> Any:
        """See ``Section.completed``; of ``processor`` the keys that the model's family has."""
        found = super().completed(given)
        try:
            family = family_of_model(find(MODELS, found["model"], where=""))
        except (ConfigError, TypeError, KeyError):
            return found
        defaults = argument_defaults(family.processor_arguments())
        section = {key: defaults[key] for key in PROCESSOR_KEYS if key in defaults}
        weights = {**dict.fromkeys(family.terms, DEFAULT_WEIGHT), **(found["loss_weights"] or {})}
        return {**found, "processor": {**section, **(found["processor"] or {})}, "loss_weights": weights}

    def plain(self) -> dict[str, Any]:
        found: dict[str, Any] = self.completed(super().plain())
        return found

    @property
    def term_weights(self) -> dict[str, float]:
        """The weight of each loss term of the model's family."""
        return {t: self.loss_weights.get(t, DEFAULT_WEIGHT) for t in family_of_model(self.model.cls).terms}

    @property
    def evaluates(self) -> bool:
        """Whether a hook of the config evaluates."""
        return any(issubclass(hook.cls, EvaluateHook) for hook in self.custom_hooks)

    def with_seed(self, seed: int) -> Settings:
        """The same, with a seed that was drawn or recorded."""
        found = self.model_copy(update={"randomness": Randomness(seed=seed)})
        found._run_name = self._run_name
        found._given = {**self._given, "randomness": {**(self._given.get("randomness") or {}), "seed": seed}}
        return found

    def with_base(self, base: Base | None) -> Settings:
        """The same, with the files of the base where rank 0 has found them. None: nothing changes; nor where this
        machine does not have them there (a cache of the hub).
        """
        if base is None or not base.is_here:
            return self
        model = replace(self.model, arguments={**self.model.arguments, "pretrained": base.path})
        found = self.model_copy(update={"model": model})
        found._run_name, found._given = self._run_name, self._given
        return found

    def with_precision(self, precision: str) -> Settings:
        """The same, with the precision that was chosen where the config has ``'auto'``."""
        if self.optim_wrapper.precision == precision:
            return self
        wrapper = self.optim_wrapper.model_copy(update={"precision": precision})
        found = self.model_copy(update={"optim_wrapper": wrapper})
        found._run_name = self._run_name
        found._given = {**self._given, "optim_wrapper": {**self._given["optim_wrapper"], "precision": precision}}
        return found

    @property
    def seed(self) -> int:
        """``randomness.seed``, which the start of a run has settled."""
        assert self.randomness.seed is not None, "the seed is settled by the plan of the start"
        return self.randomness.seed

    @property
    def folder(self) -> Path:
        """The work dir."""
        if self.work_dir is None:
            raise ConfigError("the config has no work_dir", remedy="--work-dir DIR, or work_dir=DIR")
        if "{run_name}" in self.work_dir:
            raise ConfigError(f"work_dir is {self.work_dir!r}", remedy="--work-dir DIR names the folder of the run")
        return Path(self.work_dir)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder if self.checkpoint_dir is None else Path(self.checkpoint_dir)


def problems_of(config: Mapping[str, Any]) -> list[ConfigError]:
    """What is wrong with a whole config, one error each. It is not changed."""
    schema = known_keys()
    known = {key: files.plain_values(value) for key, value in config.items() if key in schema}
    unknown = files.top_problems({key: value for key, value in config.items() if key not in schema}, schema)
    return [*unknown, *Settings._of_given(known, whole=True)[1]]


def known_keys() -> dict[str, Any]:
    """Every key of a config: those of a section as a mapping, else None."""
    of_family = {"processor": PROCESSOR_KEYS, "loss_weights": Bagel.terms}
    found = keys(Settings)
    found["default_hooks"] = {name: files.OfFamily() for name in found["default_hooks"]}  # components with a default
    found["val_dataloader"] = files.MayBeSeveral(found["val_dataloader"])
    return {**found, **{key: files.OfFamily(dict.fromkeys(names)) for key, names in of_family.items()}}


# ---- from files -----------------------------------------------------------------------------------------------------


def load_config(name: str | Path, overrides: Iterable[str] | Mapping[str, Any] = (), *, whole: bool = False) -> Config:
    """Read a config, check its keys, apply overrides (``K=V`` texts of ``--cfg-options`` or a mapping of dotted paths).

    ``whole``: components, missing sections and everything else are checked, too, as ``Settings.from_config`` does.
    Raises one ``ConfigError`` for a broken file, unknown keys, wrong values, and overrides without an effect.
    """
    try:
        return _load(name, overrides, whole=whole)
    except ConfigError as error:
        broken = "cannot be read" in error.problem and not isinstance(error.__cause__, SyntaxError)
        if not (broken or "model.type" in str(error)) or not is_of_mmengine(path := files.config_path(name)):
            raise
        command = f"python tools/migrate.py xtuner --out my_config.py {shlex.quote(str(path))}"
        raise ConfigError(f"{path} is a config of xtuner or mmengine", remedy=f"{command} writes one of it") from error


def _load(name: str | Path, overrides: Iterable[str] | Mapping[str, Any], *, whole: bool) -> Config:
    config, schema, overrides = files.read(name), known_keys(), files.overrides_of(overrides)
    errors = files.apply_overrides(config, overrides, schema)
    config = files.LoadedConfig(_translated(files.plain_values(config)), cfg_text=config.text, filename=config.filename)
    errors += files.top_problems(config, schema, file=config.filename, overrides=overrides)
    known = {key: value for key, value in files.plain_values(config).items() if key in schema}
    importable(config)
    errors += Settings._of_given(known, whole=whole)[1]
    raise_any(errors)
    for key in [*config]:
        if key not in schema and not key.startswith("_"):
            config.pop(key)  # a helper variable: the file has read it
    expand_paths(config)
    return config


def _translated(values: dict[str, Any]) -> dict[str, Any]:
    """The values, which are changed in place, without keys of mmengine; the log has a line for each."""
    for change in translate(values):
        notice(str(change))
    return values


def normalised(config: Any) -> tuple[dict[str, Any], list[ConfigError]]:
    """The sections of a config as plain values, translated, and an error for each unknown name."""
    values, schema = files.plain_values(config), known_keys()
    if not isinstance(values, dict):
        raise ConfigError(f"the config is {config!r}", allowed="what load_config returns, or a mapping")
    if not isinstance(config, files.LoadedConfig):
        _translated(values)
    problems = files.top_problems(values, schema, file=getattr(config, "filename", None))
    return {key: value for key, value in values.items() if key in schema}, problems


# ---- checks that involve several sections ---------------------------------------------------------------------------


_ADD_VALIDATION = "val_dataloader=dict(split=0.02), or dict(dataset=dict(type=...)); or delete the hook"


def _misfits(settings: Settings) -> Iterator[ConfigError]:
    """Methods that the engine needs and the model does not have, and hooks without the data that they need."""
    engine, model = settings.backend, settings.model
    if "{run_name}" in (settings.work_dir or "") and settings.visualizer.run_name is None:
        yield ConfigError(
            f"work_dir is {settings.work_dir!r}, and visualizer.run_name is not given",
            allowed="{run_name} in work_dir where visualizer.run_name is a template",
            remedy="visualizer=dict(run_name='{model}_{updates}_{date}'), say (docs/configs.md lists the fields), or"
            " run_name='nanovlm'",
        )
    if "{run_name}" in (settings.checkpoint_dir or "") and "{run_name}" not in (settings.work_dir or ""):
        yield ConfigError(
            f"checkpoint_dir is {settings.checkpoint_dir!r}, and work_dir is {settings.work_dir!r}: a resume would look"
            " for its checkpoints under another name",
            allowed="{run_name} in checkpoint_dir where work_dir has it",
        )
    if settings.evaluates and settings.val_dataloader is None:
        yield ConfigError(
            "custom_hooks has an EvaluateHook, and there is no val_dataloader",
            remedy=_ADD_VALIDATION,
        )
    hooks = settings.custom_hooks
    if settings.val_dataloader is None and not any(
        getattr(hook.cls, "name", "") == EvaluateHook.name for hook in hooks
    ):
        problem = "custom_hooks has an EarlyStoppingHook, and there is no val_dataloader: nothing is evaluated"
        yield from (ConfigError(problem, remedy=_ADD_VALIDATION) for hook in hooks if stops_early(hook))
    yield from _drawing_problems(settings)
    for method, advice in getattr(engine.cls, "model_needs", {}).items():
        if not hasattr(model.cls, method):
            problem = (
                f"model.type is {model.cls.__name__}, which has no {method}(), and backend {engine.name!r} needs it"
            )
            yield ConfigError(problem, remedy=advice)


def _drawing_problems(settings: Settings) -> Iterator[ConfigError]:
    """Settings of drawing that the model's family does not have."""
    family = family_of_model(settings.model.cls)
    for hook in settings.custom_hooks:
        preview, of_metrics = issubclass(hook.cls, PreviewHook), issubclass(hook.cls, EvaluateHook)
        flow = hook.get("flow") if preview else (hook.get("generation") or {}).get("flow") if of_metrics else None
        where = "PreviewHook.flow" if preview else "EvaluateHook.generation.flow"
        if flow and family.drawing is None:
            notice(f"{where} has no effect: {family.model.__name__} has no settings of drawing.")
        elif isinstance(flow, Mapping):
            try:
                family.drawing_settings(None, flow, where=where)
            except ConfigError as error:
                yield error
