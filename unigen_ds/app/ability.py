"""What a model can be asked for, and the settings of its answers: those of ``tools/generate.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from inspect import signature
from typing import Annotated, Any

from annotated_types import Ge, Le

from unigen_ds.config.overrides import parse_override
from unigen_ds.config.registry import check_arguments
from unigen_ds.core.errors import ConfigError
from unigen_ds.families.base import family_of
from unigen_ds.inference.prompts import Sampling
from unigen_ds.runner.open.answers import can_draw
from unigen_ds.system.log import logger

OF_DRAWING = ("size", "flow", "on_step", "on_picture")
OPTIONS = ("think", "size", "max_length", "temperature", "top_p", "seed")


@dataclass(frozen=True)
class Ability:
    """What an inferencer declares: in ``answers``, ``reads_images``, ``thinks``, ``interleaves`` and ``converses``, and by
    the names of the parameters of its ``unified_generate``. What it accepts as ``**options`` alone is not offered."""

    name: str
    draws: bool
    writes: bool
    reads_images: bool
    interleaves: bool
    """Whether ``parts`` may have earlier messages."""
    converses: bool
    """Whether earlier messages can be shown, as ``parts`` or as ``history``."""
    options: frozenset[str]
    """Parameters of ``unified_generate`` that have an effect."""
    drawing: Mapping[str, str]
    """Setting of drawing (``--flow``) -> its default."""

    @classmethod
    def of(cls, inferencer: Any) -> Ability:
        draws, names = can_draw(inferencer), set(signature(inferencer.unified_generate).parameters)
        if not draws:
            names -= {*OF_DRAWING}
        names -= {name for name, attribute in (("think", "thinks"), ("images", "reads_images"), ("history", "converses"))
                  if not getattr(inferencer, attribute, True)}  # fmt: skip
        interleaves = "parts" in names and getattr(inferencer, "interleaves", False)
        kind = type(inferencer.model)
        drawing = family_of(kind).drawing_settings(inferencer.model, {}) if draws else None
        return cls(
            name=kind.__name__,
            draws=draws,
            writes="text" in getattr(inferencer, "answers", ("text",)),
            reads_images="images" in names,
            interleaves=interleaves,
            converses=interleaves or "history" in names,
            options=frozenset(names),
            drawing={} if drawing is None else {key: str(value) for key, value in vars(drawing).items()},
        )


@dataclass(frozen=True)
class Settings:
    """How a request is answered. Raises ``ConfigError`` for values that cannot work."""

    draw: bool = False
    remember: bool = False
    """Whether the model reads the earlier messages of the conversation, too."""
    steps: bool = False
    """Whether the picture of each step of the sampler is kept."""
    think: bool = False
    height: Annotated[int, Ge(1)] | None = None
    width: Annotated[int, Ge(1)] | None = None
    max_length: Annotated[int, Ge(1)] = 1000
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    samples: Annotated[int, Ge(1), Le(16)] = 1
    """Answers to the request, with the seeds ``seed``, ``seed + 1``, ..."""
    flow: Mapping[str, str] = field(default_factory=dict)
    """Settings of drawing as texts, those that are not the default."""

    def __post_init__(self) -> None:
        check_arguments(Settings, vars(self), where="settings")
        Sampling(self.temperature, self.top_p)
        if (self.height is None) != (self.width is None):
            raise ConfigError("height and width: one of the two is empty", remedy="both, or none: the model's own size")

    @property
    def size(self) -> tuple[int, int] | None:
        return (self.height, self.width) if self.height and self.width else None

    def flow_for(self, ability: Ability) -> dict[str, Any]:
        """The settings of drawing that the model has."""
        return dict(parse_override(f"{key}={text}") for key, text in self.flow.items() if key in ability.drawing)

    def options_for(self, ability: Ability) -> dict[str, Any]:
        """The options of an answer but its seed. What has no effect on this model is in a warning. Raises ``ConfigError``
        where the model cannot answer at all."""
        if not (ability.draws if self.draw else ability.writes):
            what, instead = ("pictures", "a text") if self.draw else ("texts", "a picture")
            raise ConfigError(f"{ability.name} makes no {what}", remedy=f"ask it for {instead}")
        values = {name: getattr(self, name) for name in OPTIONS}
        defaults = {**{one.name: one.default for one in fields(self)}, "size": None}
        changed = {name for name in OPTIONS if values[name] != defaults[name]}
        missing = sorted(changed - ability.options) + [key for key in self.flow if key not in ability.drawing]
        if not self.draw:  # those of drawing are for the next picture
            missing = [name for name in missing if name != "size" and name not in self.flow]
            values["size"] = None
        if missing:
            logger().warning("without effect on %s: %s", ability.name, ", ".join(missing))
        return {"understand": not self.draw, **{n: defaults[n] if n in missing else v for n, v in values.items()}}
