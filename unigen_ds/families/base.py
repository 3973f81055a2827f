"""What makes one kind of model: ``Family``, the registry's lookup, and what families of conversations share.

A family is found from the model's class (``model.type``), so a config names only the model. A user's own family is a
module in ``custom_imports`` that registers a model in ``MODELS`` and a subclass of ``Family`` in ``FAMILIES``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from unigen_ds.config.registry import FAMILIES, MODELS, TRANSFORMS, build, check_arguments, find
from unigen_ds.config.section import one_or_many
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.core.json_values import stored_object
from unigen_ds.data.images.augment import CHANGES
from unigen_ds.data.samples.processor import ConversationProcessor, Processor
from unigen_ds.models.weights import Pretrained
from unigen_ds.system.files import copy_files, new_directory


class PublishedFormat:
    """A directory in which others publish such models."""

    name: str
    """What messages call the format, as in ``nanoVLM's directory``."""
    pretrained: ClassVar[bool] = True
    """Whether ``model.pretrained`` of ``config`` reads the weights; otherwise they are read as a checkpoint's."""
    complete: ClassVar[bool] = False
    """Whether the directory has all that a config would have: a config that is passed beside it is not used."""
    general: ClassVar[bool] = False
    """Whether it recognises many kinds of models: then it is asked after all others."""
    parts: ClassVar[tuple[str, ...]] = ()
    """Names of files of weights that mean their directory: ``weights`` reads them, as their own names are not ours."""

    def recognises(self, folder: Path) -> bool:
        """Whether the folder is one. Called for any path; reads at most its small files."""
        raise NotImplementedError(f"{type(self).__name__}.recognises")

    def config(self, folder: Path) -> dict[str, Any]:
        """The sections ``model``, ``tokenizer`` and ``processor`` of a config for it.

        Raises ``ConfigError`` or ``CheckpointError`` where the folder lacks a file for that.
        """
        raise NotImplementedError(f"{type(self).__name__}.config")

    def weights(self, folder: Path) -> Pretrained | None:
        """Its tensors by the model's names, for ``load_from`` and the tools. No value is read yet. None (the default):
        files of weights in it have the model's names. Raises as ``config``.
        """
        return None

    def sizes(self, folder: Path) -> dict[str, Any]:
        """Arguments of the model that configs in any folder of weights state, where they are of this format; else {}.
        ``load_from`` compares them with the model's where no shape shows them. Raises as ``config``.
        """
        return {}

    def write(
        self, model: Any, processor: Any, out: Path, *, source: Path | None, dtype: torch.dtype, max_shard_size: str
    ) -> None:
        """Write the model into the new folder ``out``: complete, or not at all.

        Args:
            source: a directory of the same sizes, whose other files are copied byte for byte.
            dtype: of the weights.
            max_shard_size: of a file, where the format can have several.

        Raises ``ConfigError`` where ``out`` exists or ``source`` does not fit, ``CheckpointError`` on a full disk.
        """
        raise NotImplementedError(f"{type(self).__name__}.write")


class Family:
    """One kind of model. Subclass it, set the attributes, register it in ``FAMILIES``; it has no state.

    The engines call methods of the model itself: ``shard_units() -> list of layers``, to shard them one by one,
    and optionally ``flops(batch) -> float``.
    """

    model: ClassVar[type[nn.Module]]
    """Registered in ``MODELS``; ``forward(batch) -> LossTerms``. Its subclasses belong to the family, too."""
    terms: ClassVar[Sequence[str] | Mapping[str, str]]
    """Names of its loss terms: the keys of ``LossTerms.sums``, of ``Batch.target_counts()`` and of ``loss_weights``. A
    mapping has also what each weighs, for docs/configs/loss_weights.md."""
    published: ClassVar[tuple[PublishedFormat, ...]] = ()
    """The first one is what an export writes."""
    processor_type: ClassVar[Any]
    """The class of its processor; the section ``processor`` sets its arguments."""
    needs_tokenizer: ClassVar[bool] = True
    """Whether a config must have a ``tokenizer``."""
    drawing: ClassVar[type | None] = None
    """How a picture is drawn: a frozen dataclass, whose fields are the keys of ``flow`` of ``PreviewHook``, of
    ``generation`` of metrics, and of ``tools/generate.py --flow``. None: nothing can be set."""

    def build(self, spec: Mapping[str, Any], *, vocab_size: int | None) -> nn.Module:
        """The model of the section ``model``. ``vocab_size``: the tokenizer's, where there is one.

        Runs with torch's generator seeded, maybe on the meta device (only a model with ``initial_weights``).
        """
        return build(MODELS, spec, where="model")

    def processor_arguments(self) -> Any:
        """The callable whose arguments the section ``processor`` sets: its annotations define what is allowed."""
        return self.processor_type

    def processor(self, spec: Mapping[str, Any], section: Mapping[str, Any], *, tokenizer: Any, seed: int) -> Processor:
        """What makes batches of records.

        Args:
            spec: the section ``model``. Sizes that it fixes (``processor_sizes(spec)`` of the model's class, where it
                has that) are the processor's, too, and not set in ``section``.
            section: the section ``processor``.
            tokenizer: None where the config has none.
            seed: of all random numbers of the data.
        """
        kind: Any = find(MODELS, spec, where="model")
        sizes = kind.processor_sizes(spec) if hasattr(kind, "processor_sizes") else {}
        both = sorted(set(sizes) & set(section))
        if both:
            raise ConfigError(f"processor sets {', '.join(both)}", remedy="leave it out: the model's config fixes it")
        return self.processor_arguments()(tokenizer=tokenizer, seed=seed, **sizes, **section)

    def chance_level(self, processor: Any) -> Mapping[str, float]:
        """The mean of a loss term where the model has learned nothing, of the terms of which it is known: a fine-tune
        whose first loss is as high is warned about (``FirstUpdateHook``)."""
        return {}

    def drawing_settings(self, model: Any, settings: Mapping[str, Any], *, where: str = "flow") -> Any:
        """The argument ``flow`` of the inferencer: ``settings``, with defaults that may depend on ``model``;
        None, to check ``settings`` alone. Raises ``ConfigError`` for an unknown key or a wrong value of ``where``.
        """
        if self.drawing is None:
            if settings:
                problem = f"{where} sets {', '.join(settings)}, and {self.model.__name__} has no settings of drawing"
                raise ConfigError(problem, remedy="leave it out")
            return None
        check_arguments(self.drawing, settings, where=where)
        return self.drawing(**settings)

    def inferencer(self, model: Any, processor: Any) -> Any:
        """An object with ``unified_generate(prompt, ...) -> Generated``, for ``tools/generate.py`` and ``PreviewHook``.

        With ``answers`` and ``complete`` it answers validation records, too; with ``idle`` each process of a sharding
        engine generates its own part (docs/extending/answers.md). ``model`` may be a ``TrainedModel``.
        """
        raise ConfigError(f"{self.model.__name__} has no inference", remedy="use the model itself, in your own code")


class ConversationFamily(Family):
    """A family that learns from conversations: it has a tokenizer and a ``ConversationProcessor``."""

    terms: ClassVar[Mapping[str, str]] = {"text": "weight of the mean cross-entropy per text target"}
    processor_type: ClassVar[type[ConversationProcessor]]

    def build(self, spec: Mapping[str, Any], *, vocab_size: int | None) -> nn.Module:
        """``model.llm.vocab_size`` is the tokenizer's where it is not given."""
        if _follows_tokenizer(spec):
            spec = {**spec, "llm": {**spec["llm"], "vocab_size": vocab_size}}
        model: Any = super().build(spec, vocab_size=vocab_size)
        if vocab_size is not None and model.vocab_size < vocab_size:
            raise ConfigError(
                f"the model's vocabulary has {model.vocab_size} rows",
                allowed=f"at least {vocab_size}, the tokenizer's",
                remedy=f"the tokenizer of these weights, or vocab_size={vocab_size} in model.llm (model.config)",
            )
        return model

    def processor(self, spec: Mapping[str, Any], section: Mapping[str, Any], *, tokenizer: Any, seed: int) -> Processor:
        transforms: dict[str, Any] = {}
        for key in ("vit_transform", "vae_transform"):
            if section.get(key) is not None:
                transforms[key] = build(TRANSFORMS, section[key], where=f"processor.{key}")
        for key in CHANGES:
            if specs := one_or_many(section.get(key)):
                transforms[key] = [build(TRANSFORMS, one, where=f"processor.{key}[{i}]") for i, one in enumerate(specs)]
        processor: Any = super().processor(spec, {**section, **transforms}, tokenizer=tokenizer, seed=seed)
        vocab_size = (spec.get("llm") or {}).get("vocab_size")
        if vocab_size is None and _follows_tokenizer(spec) and hasattr(tokenizer, "__len__"):
            vocab_size = len(tokenizer)
        processor.vocab_size = vocab_size  # None: the model's files decide
        return processor

    def chance_level(self, processor: Any) -> Mapping[str, float]:
        """Return the cross-entropy of a uniform guess over the tokenizer's vocabulary."""
        return {"text": math.log(len(processor.tokenizer))}


def _follows_tokenizer(spec: Mapping[str, Any]) -> bool:
    """Whether the vocabulary of the section ``model`` is the tokenizer's: neither the config nor files have one."""
    llm = spec.get("llm")
    return isinstance(llm, Mapping) and llm.get("vocab_size") is None and not spec.get("pretrained")


TRANSFORMERS_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
"""Endings of the files with weights in a directory of transformers."""


@contextmanager
def published_folder(out: Path, tokenizer: Any, source: Path | None, *, without: tuple[str, ...]) -> Iterator[Path]:
    """A new folder ``out``, complete when the block ends or not there: with the files of ``source`` that have none of
    the endings ``without``, else with the tokenizer's. Raises ``ConfigError`` where it exists, ``CheckpointError``
    where it cannot be written.
    """
    with new_directory(out) as folder:
        if source is not None:
            copy_files(source, folder, accepts=lambda name: not name.endswith(without))
        elif tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
        yield folder


def read_statement(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a directory; {} where there is none, or a damaged one."""
    try:
        return stored_object(path)
    except CheckpointError:
        return {}


def families() -> list[Family]:
    return [kind() for kind in FAMILIES.module_dict.values()]


def family_of(kind: type) -> Family:
    """The family of a model's class: the one with the nearest base class. Raises ``ConfigError`` where none has it."""
    of_bases = {family.model: family for family in families()}
    family = next((of_bases[base] for base in kind.__mro__ if base in of_bases), None)
    if family is None:
        raise ConfigError(
            f"model.type is {kind.__name__!r}, and no registered family has this model",
            allowed=f"{', '.join(sorted(model.__name__ for model in of_bases))}, or a subclass of one",
            remedy="name the module that registers its family in custom_imports; docs/extending/model.md shows how to"
            " write one",
        )
    return family


def exported_format(family: Family, kind: type) -> PublishedFormat:
    """The format that an export of a ``kind`` writes. Raises ``ConfigError`` where its family has none."""
    if not family.published:
        raise ConfigError(
            f"{kind.__name__} has no published form",
            allowed=", ".join(family.model.__name__ for family in families() if family.published),
            remedy="tools/zero_to_fp32.py writes plain weights of any model",
        )
    return family.published[0]
