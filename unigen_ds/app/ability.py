"""What a model can be asked for, and the settings of its answers: those of ``tools/generate.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Annotated, Any

from annotated_types import Ge, Le

from unigen_ds.config.overrides import parse_override
from unigen_ds.config.registry import argument_problems
from unigen_ds.core.errors import ConfigError
from unigen_ds.families.base import family_of
from unigen_ds.inference.prompts import Sampling
from unigen_ds.runner.open.answers import drawing_of
from unigen_ds.system.log import logger

SWITCHES = {"think": "thinks", "images": "reads_images", "history": "converses"}
"""Parameter of ``unified_generate`` -> attribute of an inferencer that is False where it is refused."""


@dataclass(frozen=True)
class Ability:
    """What an inferencer declares: by ``answers``, the attributes in ``SWITCHES``, and the names of the parameters of
    its ``unified_generate``. What it accepts as ``**options`` alone is not offered."""

    name: str
    tasks: tuple[str, ...]
    """``text``, ``picture`` or both."""
    options: frozenset[str]
    """Parameters that have an effect."""
    drawing: Mapping[str, Any]
    """Setting of drawing (``--flow``) -> its default."""

    @classmethod
    def of(cls, inferencer: Any) -> Ability:
        answers, kind = getattr(inferencer, "answers", ("text",)), type(inferencer.model)
        names = {*signature(inferencer.unified_generate).parameters}
        names -= {name for name, switch in SWITCHES.items() if not getattr(inferencer, switch, True)}
        drawing = None
        if "image" in answers:
            drawing = family_of(kind).drawing_settings(inferencer.model, {})
        else:
            names -= {"size", "flow", "on_step", "on_picture"}
        tasks = tuple("picture" if one == "image" else one for one in answers)
        return cls(kind.__name__, tasks, frozenset(names), {} if drawing is None else {**vars(drawing)})


@dataclass(frozen=True)
class AnswerSettings:
    """How a request is answered; the page has a field for each number and each bool. Raises ``ConfigError``."""

    task: str = "text"
    earlier_messages: bool = False
    sampler_steps: bool = False
    think: bool = False
    max_length: Annotated[int, Ge(1)] = 1000
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    samples: Annotated[int, Ge(1), Le(16)] = 1
    """Answers, with the seeds ``seed``, ``seed + 1``, ..."""
    height: Annotated[int, Ge(0)] = 0
    width: Annotated[int, Ge(0)] = 0
    """Of a picture, in pixels; both 0: the model's own size."""
    flow: Mapping[str, str] = field(default_factory=dict)
    """Settings of drawing as texts, those that are not the default."""

    def __post_init__(self) -> None:
        for error in argument_problems(AnswerSettings, vars(self), where="settings"):
            raise error
        Sampling(self.temperature, self.top_p)

    def options_for(self, inferencer: Any, ability: Ability) -> dict[str, Any]:
        """The options of an answer but its seed. A warning names what has no effect on this model. Raises
        ``ConfigError`` where the model cannot answer so at all, or for a wrong setting of drawing."""
        draws = self.task == "picture"
        if self.task not in ability.tasks:
            raise ConfigError(f"{ability.name} does not answer with a {self.task}", allowed=", ".join(ability.tasks))
        size = (self.height, self.width) if draws and (self.height or self.width) else None
        values = {"think": self.think, "size": size, "max_length": self.max_length, "temperature": self.temperature,
                  "top_p": self.top_p}  # fmt: skip
        texts = self.flow if draws else {}
        flow = {key: _value(texts[key], default) for key, default in ability.drawing.items() if key in texts}
        defaults = {name: getattr(AnswerSettings, name, None) for name in values}
        missing = [name for name in values if name not in ability.options and values[name] != defaults[name]]
        if missing or len(flow) < len(texts):
            names = ", ".join((*missing, *(key for key in texts if key not in flow)))
            logger().warning("without effect on %s: %s", ability.name, names)
        drawing = drawing_of(inferencer, flow, understand=not draws)
        return {**values, **{name: defaults[name] for name in missing}, "understand": not draws, "flow": drawing}


def _value(text: str, default: Any) -> Any:
    """A text stays as it is: ``none`` is a name, too."""
    return text if isinstance(default, str) else parse_override(f"_={text}")[1]
