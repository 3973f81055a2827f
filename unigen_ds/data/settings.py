"""``train_dataloader``, ``val_dataloader`` and ``tokenizer`` of a config, and the components that they are made of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, TypeAdapter, model_validator

from unigen_ds.config.registry import DATASETS, PACKERS, TOKENIZERS, TRANSFORMS
from unigen_ds.config.section import AS_LIST, Component, Of, Section
from unigen_ds.config.values import Number
from unigen_ds.core.errors import ConfigError
from unigen_ds.data.datasets.adapter import DatasetAdapter as DatasetAdapter  # registers it
from unigen_ds.data.datasets.groups import DataGroup

Tokenizer = Annotated[Component, Of(TOKENIZERS)]
Transform = Annotated[Component, Of(TRANSFORMS)]
_Source = Annotated[Component, Of(DATASETS, from_run=("processor",))]


class TrainDataloader(Section):
    """What is trained on, and how it is split into sequences."""

    batch_size: int | None = Field(default=None, ge=1)
    """Sequences per device per iteration; may be left out where `global_batch_size` is given."""
    global_batch_size: int | None = Field(default=None, ge=1)
    """Sequences per update over all processes and iterations; it is split evenly, and a total that cannot be is an
    error that names the nearest ones."""
    dataset: Annotated[tuple[_Source, ...], AS_LIST] = Field(min_length=1)
    """Component, or a list of them: a mixture."""
    groups: Mapping[str, DataGroup] = Field(default={})
    """Name -> `dict(weight=..., mandatory=False)`: sources that share a weight, each with `group=` a name.
    [mixtures](data/mixtures.md)."""
    seq_length: int = Field(default=4096, ge=1)
    """Tokens of a sequence at most."""
    max_sample_tokens: int | None = Field(default=None, ge=1)
    """Tokens of a sample at most: `overflow` is for longer ones; None: `seq_length`. Beside mandatory groups: what
    leaves space for one of their samples."""
    overflow: Literal["split", "truncate", "skip", "error"] | None = None
    """Longer records: `'split'`, `'truncate'`, `'skip'` or `'error'`; None: plain texts are split, all others are
    skipped and counted. [records longer than `seq_length`](data/left_out.md#records-longer-than-seq_length)."""
    packing: Annotated[Component, Of(PACKERS)] | None = None
    """Component that puts several samples into a sequence; None: one each."""
    drop_last: bool = True
    """Unpacked: leave out the samples that fill no whole iteration. False: fill up the last iteration with empty
    sequences, so nothing repeats. A packed epoch always keeps all."""
    num_workers: int = Field(default=0, ge=0)
    """Loading processes; 0 loads in the training process. Changes nothing about the data."""
    prefetch_factor: int | None = Field(default=2, ge=1)
    """Micro-batches that each worker keeps ready, at least 1; None: 2."""
    pin_memory: bool | None = None
    """Page-locked batches; None: with CUDA."""
    timeout: Number = Field(default=0.0, ge=0)
    """Seconds to wait for a worker before an error; 0: for ever."""
    max_skipped_fraction: Number = Field(default=0.01, ge=0)
    """Share of samples that may be undecodable before the run stops; checked from 100 samples on."""

    @model_validator(mode="after")
    def _check_size(self) -> TrainDataloader:
        if self.batch_size is None and self.global_batch_size is None:
            raise ConfigError("train_dataloader has no batch_size", allowed="sequences per device per iteration")
        if self.max_sample_tokens is not None and self.max_sample_tokens > self.seq_length:
            problem = f"train_dataloader.max_sample_tokens is {self.max_sample_tokens}"
            raise ConfigError(problem, allowed=f"at most seq_length, {self.seq_length}")
        return self


class ValDataloader(Section):
    """What is evaluated on: records of its own, or a share of the training records. One sample a sequence. A config may
    have several such sections by name instead of one: ``sets`` has them.
    """

    dataset: Annotated[tuple[_Source, ...], AS_LIST] = ()
    """Component, or a list of them, whose losses are also given one by one; or `split`."""
    split: Number | None = Field(default=None, gt=0, lt=1)
    """Share of the training records that is evaluated on and never trained on. Which records is a function of `seed`
    and of their content: equal ones stay together, appended ones move no other one."""
    seed: int | None = None
    """Seed of `split`, and of the noise and time steps; None: `randomness.seed`."""
    batch_size: int | None = Field(default=None, ge=1)
    """Sequences per device of an evaluation; None: that of the training."""
    seq_length: int | None = Field(default=None, ge=1)
    """Tokens of a sequence at most; None: that of `train_dataloader`."""
    overflow: Literal["split", "truncate", "skip", "error"] | None = None
    """Longer records, as in `train_dataloader`; None: as there."""
    num_workers: int | None = Field(default=None, ge=0)
    """Loading processes, which live for one evaluation; None: as many as `train_dataloader` has."""
    prefetch_factor: int | None = Field(default=2, ge=1)
    """Batches that each worker keeps ready, at least 1; None: 2."""
    pin_memory: bool | None = None
    """Page-locked batches; None: with CUDA."""
    timeout: Number = Field(default=0.0, ge=0)
    """Seconds to wait for a worker before an error; 0: for ever."""
    metrics: Annotated[tuple[str, ...], AS_LIST] = ()
    """Those of `EvaluateHook.metrics` that score this data, by their classes (`BLEU`) or the names of their values
    (`bleu`); empty: all."""
    _sets: Mapping[str, ValDataloader] = PrivateAttr(default_factory=dict)

    @property
    def sets(self) -> Mapping[str, ValDataloader]:
        """Each section by its name, in the order of the config; the name of a single section is empty."""
        return self._sets or {"": self}

    @property
    def division(self) -> tuple[float | None, int | None]:
        """The share of the training records that is evaluated on, and its seed; None: no share, the run's seed."""
        return next(((one.split, one.seed) for one in self.sets.values() if one.split is not None), (None, None))

    @classmethod
    def is_several(cls, config: Any) -> bool:
        """Whether no key is one of a section, and every value is a mapping, or None for a set that is left out."""
        return (
            isinstance(config, Mapping)
            and bool(config)
            and not {*config} & {*cls.model_fields}
            and all(isinstance(one, Mapping | None) for one in config.values())
        )

    def items(self) -> Iterator[tuple[str, Any]]:
        return iter(self._sets.items()) if self._sets else super().items()

    @model_validator(mode="wrap")
    @classmethod
    def _several(cls, config: Any, handler: ModelWrapValidatorHandler[ValDataloader]) -> ValDataloader:
        if not isinstance(config, Mapping):
            return handler(config)
        config = {key: value for key, value in config.items() if not str(key).startswith("_")}
        if not cls.is_several(config):
            names = [key for key in config if key not in cls.model_fields and isinstance(config[key], Mapping)]
            if names:
                raise ConfigError(
                    f"val_dataloader has names of sets ({', '.join(names)}) beside keys of one section",
                    allowed="the keys of one section, or names of several, each with a section",
                    remedy="val_dataloader=dict(NAME=dict(dataset=..., batch_size=8), ...): every key inside of a set",
                )
            return handler(config)
        sections = {name: one for name, one in config.items() if one is not None}
        for name, section in sections.items():
            if name == "loss" or not re.fullmatch(r"[A-Za-z]\w*(-\w+)*", str(name)) or cls.is_several(section):
                choices = "names of letters, digits, - and _, a letter first, but not 'loss'; each with one section"
                raise ConfigError(f"val_dataloader has a set {name!r}: {section!r}", allowed=choices)
        adapter: TypeAdapter[dict[str, ValDataloader]] = TypeAdapter(dict[str, cls])  # type: ignore[valid-type]
        several = cls.model_construct()
        several._sets = adapter.validate_python(sections)
        return several

    @model_validator(mode="after")
    def _one_origin(self) -> ValDataloader:
        if self._sets:
            if sum(one.split is not None for one in self._sets.values()) > 1:
                remedy = "one set with a split, a dataset of its own for each other set"
                raise ConfigError("several sets of val_dataloader have a split", remedy=remedy)
            return self
        if bool(self.dataset) == (self.split is not None):
            keys = "both dataset and split" if self.dataset else "neither dataset nor split"
            raise ConfigError(
                f"val_dataloader has {keys}",
                allowed="dataset=dict(type=...), or split=0.02: a share of the training records",
                remedy="val_dataloader=None: no validation",
            )
        return self


def evaluation_sections(
    training: Mapping[str, Any], file: str | None, changes: Mapping[str, int | None]
) -> Mapping[str, Any]:
    """The data sections of an evaluation, as the config of a training has them; empty: it names no data.

    Args:
        training: the plain config.
        file: of records, instead of ``val_dataloader``'s data: the first data set that reads a file reads this one,
            with its filters; without one, the usual one does.
        changes: keys of ``val_dataloader``, of each set; None: as they are.
    """
    section, trained_on = (dict(training.get(f"{name}_dataloader") or {}) for name in ("val", "train"))
    loaders = {"": section}
    if ValDataloader.is_several(section):
        loaders = {name: dict(one) for name, one in section.items() if one is not None}
    first = next(iter(loaders.values()), {})
    if file is not None:
        dataset: dict[str, Any] = {"type": "UnifiedGenerationDataset"}
        sources = [one.get("dataset") or () for one in (first, trained_on)]
        members = [member for one in sources for member in ([one] if isinstance(one, Mapping) else one)]
        if reader := next((member for member in members if "data_path" in member), None):
            dataset = {key: value for key, value in reader.items() if key not in ("name", "format", "num_used_data")}
        rest = {key: value for key, value in first.items() if key not in ("split", "metrics")}
        first = {**rest, "dataset": {**dataset, "data_path": file}}
        loaders = {"": first}
    if not loaders or not all(loaders.values()):
        return {}
    overrides = {key: value for key, value in changes.items() if value is not None}
    loaders = {name: {**loader, **overrides} for name, loader in loaders.items()}
    return {
        "train_dataloader": trained_on or {"batch_size": 1, "dataset": first.get("dataset")},
        "val_dataloader": loaders.get("", loaders),
    }
