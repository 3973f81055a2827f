"""Learning-rate curves in closed form: a curve in the units of a config -> the same curve measured in data.

A curve class carries the arguments of mmengine's scheduler of the same name. ``Curve.place`` turns them, once, into a
``PlacedCurve`` whose numbers are sequences (or tokens), and which maps the value of earlier curves to a new one
at any progress. mmengine multiplies the previous step's value instead, so it must have made every step; a closed form
needs nothing but the position, so nothing of it can be lost on a resume.

A curve moves in *steps* (mmengine's ``last_step``), and some end one step before ``end``: ``LinearLR`` reaches
``end_factor`` at its last step, not after it. A step is kept as an amount of data: one iteration or one update of the
first geometry. With ``convert_to_iter_based`` it is one update, so that 8 sequences x 1 and 4 x 2 accumulated are
trained with the same learning rate from the first update on; without accumulation that is mmengine's iteration.
Curves in sequences or tokens are continuous: their step is 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Lt
from pydantic import AllowInfNan

from unigen_ds.config.registry import CURVES, check_arguments
from unigen_ds.config.values import NotNegative, Share
from unigen_ds.core.errors import ConfigError, nearest
from unigen_ds.core.progress import Progress, Ruler


@dataclass(frozen=True)
class Point:
    """A position at which a curve is evaluated. Data counts are in the curve's own axis."""

    given: float
    """Value returned by the earlier curves."""
    base: float
    """The group's learning rate in the config."""
    since: float
    """Data since the curve began, not negative."""
    length: float
    """Data from begin to end; ``inf`` where the curve has no end."""
    step: float

    @property
    def last(self) -> float:
        """Position of the curve's last step, counted from its begin."""
        return max(self.length - self.step, 0.0)

    @property
    def position(self) -> float:
        """``since``, at most the last step: after ``end`` a curve keeps its value."""
        return min(self.since, self.last)

    @property
    def past(self) -> bool:
        return self.since >= self.length


@dataclass(frozen=True)
class PlacedCurve:
    """A curve measured in data. Plain numbers only: this is what a checkpoint stores."""

    type: str
    axis: str
    """``sequence`` or ``token``."""
    begin: float
    end: float | None
    step: float
    staircase: bool
    """True: constant inside a step (mmengine's plain ``by_epoch=True``)."""
    arguments: Mapping[str, Any]

    def map(self, value: float, *, base: float, progress: Progress) -> float:
        """The value of this curve for ``value`` at ``progress``; ``value`` itself before ``begin``."""
        position = float(progress.count(self.axis))
        if self.staircase:
            position = math.floor(position / self.step) * self.step
        if position < self.begin:
            return value
        length = math.inf if self.end is None else self.end - self.begin
        point = Point(given=value, base=base, since=position - self.begin, length=length, step=self.step)
        return CURVES.module_dict[self.type].evaluate(point, self.arguments)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> PlacedCurve:
        """Raises ``ConfigError`` when the curve's class is not registered (a custom import is missing)."""
        if state["type"] not in CURVES.module_dict:
            raise ConfigError(
                f"the stored schedule has a curve of type {state['type']!r}",
                remedy=nearest(state["type"], CURVES.module_dict) + "; a curve of your own belongs in custom_imports",
            )
        return cls(**{field.name: state[field.name] for field in dataclasses.fields(cls)})


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Arguments that every curve has, mmengine's names. A subclass adds its own and defines ``evaluate``.

    Args:
        by_epoch: True (meant by None): ``begin`` and ``end`` are epochs; False: iterations of the first start.
        begin: where the curve begins.
        end: where it ends, after ``begin``; None: the end of training.
        convert_to_iter_based: with epochs: the curve moves with every update and fractions of an epoch are allowed. Its
            step is one update of the first start (mmengine's iteration, where nothing is accumulated).
        unit: ``epoch``, ``iteration``, ``update``, ``sequence`` or ``token``; overrides ``by_epoch``.
    """

    by_epoch: bool | None = None
    begin: NotNegative = 0
    end: Annotated[float, Ge(0)] | None = None
    convert_to_iter_based: bool = False
    unit: Literal["epoch", "iteration", "update", "sequence", "token"] | None = None

    default_unit: ClassVar[str] = "epoch"
    needs_end: ClassVar[bool] = True
    """Whether the curve's form depends on its end."""

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        check_arguments(type(self), values, where=type(self).__name__)
        if self.end is not None and self.end <= self.begin:
            raise ConfigError(f"begin is {self.begin} and end is {self.end}", allowed="an end after the begin")
        if self.convert_to_iter_based and self.counted_in != "epoch":
            raise ConfigError(
                f"convert_to_iter_based=True with begin and end in {self.counted_in}s",
                allowed="by_epoch=True",
                remedy="leave convert_to_iter_based out: the curve already moves with every update",
            )
        self.check_own()

    def check_own(self) -> None:
        """Raise ``ConfigError`` for a value of the subclass's own arguments that cannot work."""

    @property
    def counted_in(self) -> str:
        """The unit of ``begin`` and ``end``."""
        if self.unit is not None:
            return self.unit
        if self.by_epoch is None:
            return self.default_unit
        return "epoch" if self.by_epoch else "iteration"

    @property
    def staircase(self) -> bool:
        return self.counted_in == "epoch" and not self.convert_to_iter_based

    def place(self, *, ruler: Ruler, total_sequences: float) -> PlacedCurve:
        """This curve in sequences (tokens stay tokens), with the geometry of the first start."""
        unit, epoch = self.counted_in, float(ruler.sequences_per_epoch)
        if self.staircase:
            step = epoch
        elif unit in ("sequence", "token"):
            step = 0.0
        else:
            step = float(ruler.to_sequences(1, "iteration" if unit == "iteration" else "update"))

        def data(value: float) -> float:
            """Convert a position to the curve's axis; 0.07 epochs of 100 are 7, not 7.000000000000001."""
            amount = value if unit == "token" else ruler.to_sequences(value, unit)
            return float(round(amount)) if abs(amount - round(amount)) < 1e-6 else float(amount)

        def whole_steps(amount: float) -> float:
            """Rounded down to whole steps, as mmengine does (0.1 of 781 iterations are 78), where an epoch has whole
            ones; where not (packing), the exact fraction is meant."""
            if self.convert_to_iter_based and ruler.sequences_per_epoch % step == 0:
                return amount // step * step
            return amount

        begin, end = data(self.begin), None
        limit = 10**9 if unit in ("epoch", "iteration") else math.inf  # mmengine's INF: the end of training
        if self.end is not None and self.end < limit:
            end = data(self.end)
            if self.staircase and (begin % epoch or end % epoch):
                raise ConfigError(
                    f"begin is {self.begin} and end is {self.end} epochs",
                    allowed="whole epochs for a curve that changes once per epoch",
                    remedy="add convert_to_iter_based=True",
                )
            if whole_steps(begin) < whole_steps(end):
                begin, end = whole_steps(begin), whole_steps(end)
        else:  # it ends with the training
            begin = whole_steps(begin)
            if self.staircase:  # the epoch in which training stops counts as a whole one
                end = math.ceil(total_sequences / epoch - 1e-9) * epoch
            elif unit != "token":
                end = float(total_sequences)
        if end is None and self.needs_end:
            problem = f"end is {self.end!r} with unit 'token'"
            raise ConfigError(problem, remedy="give the end in tokens: it cannot be known in advance")
        if end is not None and end <= begin:
            raise ConfigError(
                f"begin is {self.begin} {unit}(s), the range ends after {end:g} sequences",
                remedy="begin before the end of training, or train longer",
            )
        axis = "token" if unit == "token" else "sequence"
        return PlacedCurve(type(self).__name__, axis, begin, end, step, self.staircase, self.arguments(data))

    def arguments(self, to_data: Callable[[float], float]) -> dict[str, Any]:
        """The subclass's own arguments; those that are positions go through ``to_data``."""
        shared = {field.name for field in dataclasses.fields(Curve)}
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in shared}

    @staticmethod
    def evaluate(point: Point, arguments: Mapping[str, Any]) -> float:
        """The closed form. Pure: called by ``PlacedCurve.map`` on every rank, at every update."""
        raise NotImplementedError


@CURVES.register_module()
@dataclass(frozen=True, kw_only=True)
class LinearLR(Curve):
    """Multiplies by a factor that goes from ``start_factor`` at the first step to ``end_factor`` at the last one.

    Args:
        start_factor: factor at the first step.
        end_factor: factor at the last one.
    """

    start_factor: Share = 1.0 / 3
    end_factor: Share = 1.0

    @staticmethod
    def evaluate(point: Point, arguments: Mapping[str, Any]) -> float:
        start, end = arguments["start_factor"], arguments["end_factor"]
        if point.last == 0:  # a range of one step has no slope; mmengine would stay at start_factor
            return point.given * (end if point.past else start)
        return point.given * (start + (end - start) * (point.position / point.last))


@CURVES.register_module()
@dataclass(frozen=True, kw_only=True)
class ConstantLR(Curve):
    """Multiplies by ``factor`` until the last step before ``end``, to which it no longer applies (as in mmengine).

    Args:
        factor: factor until the last step before ``end``.
    """

    factor: Share = 1.0 / 3
    needs_end: ClassVar[bool] = False

    @staticmethod
    def evaluate(point: Point, arguments: Mapping[str, Any]) -> float:
        applies = not point.past if point.last == 0 else point.since < point.last
        return point.given * arguments["factor"] if applies else point.given


@CURVES.register_module()
@dataclass(frozen=True, kw_only=True)
class CosineAnnealingLR(Curve):
    """``eta_min + (given - eta_min) * (1 + cos(pi * t / T_max)) / 2``; SGDR, https://arxiv.org/abs/1608.03983.

    ``T_max`` (in the unit of ``begin`` and ``end``) is end - begin unless given; beyond it the cosine rises again.

    Args:
        T_max: half a period, in the curve's unit; None: end - begin.
        eta_min: smallest learning rate; 0 where neither is given.
        eta_min_ratio: the same as a fraction of the group's own; one of the two.
    """

    T_max: Annotated[float, Gt(0), AllowInfNan(False)] | None = None
    eta_min: NotNegative | None = None
    eta_min_ratio: NotNegative | None = None

    def check_own(self) -> None:
        if self.eta_min is not None and self.eta_min_ratio is not None:
            raise ConfigError(
                f"eta_min is {self.eta_min} and eta_min_ratio is {self.eta_min_ratio}", allowed="one of the two"
            )

    @property
    def needs_end(self) -> bool:  # type: ignore[override]
        return self.T_max is None

    def arguments(self, to_data: Callable[[float], float]) -> dict[str, Any]:
        own = Curve.arguments(self, to_data)
        period = None if self.T_max is None else to_data(self.T_max)
        if period == 0:
            raise ConfigError(
                f"T_max is {self.T_max} {self.counted_in}(s), less than a sequence", allowed="a longer one"
            )
        return {**own, "T_max": period}

    @staticmethod
    def evaluate(point: Point, arguments: Mapping[str, Any]) -> float:
        period = point.length if arguments["T_max"] is None else arguments["T_max"]
        ratio = arguments["eta_min_ratio"]
        eta_min = (arguments["eta_min"] or 0.0) if ratio is None else point.base * ratio
        return eta_min + (point.given - eta_min) * (1 + math.cos(math.pi * (point.position / period))) / 2


@CURVES.register_module()
@dataclass(frozen=True, kw_only=True)
class PolyLR(Curve):
    """``eta_min + (given - eta_min) * (1 - t / T) ** power`` with T one step less than end - begin (mmengine).

    Args:
        eta_min: smallest learning rate.
        power: exponent of the remaining share.
    """

    eta_min: NotNegative = 0.0
    power: NotNegative = 1.0

    @staticmethod
    def evaluate(point: Point, arguments: Mapping[str, Any]) -> float:
        if point.last == 0:
            return point.given
        rest = (point.last - point.position) / point.last
        return arguments["eta_min"] + (point.given - arguments["eta_min"]) * rest ** arguments["power"]


@CURVES.register_module()
@dataclass(frozen=True, kw_only=True)
class MultiStepLR(Curve):
    """Multiplies by ``gamma`` once for every milestone passed. Milestones count from ``begin`` (mmengine).

    Args:
        milestones: list of positions, counted from ``begin``.
        gamma: factor at each of them.
    """

    milestones: tuple[NotNegative, ...]
    gamma: NotNegative = 0.1
    needs_end: ClassVar[bool] = False

    def arguments(self, to_data: Callable[[float], float]) -> dict[str, Any]:
        return {"milestones": [to_data(m) for m in self.milestones], "gamma": self.gamma}

    @staticmethod
    def evaluate(point: Point, arguments: Mapping[str, Any]) -> float:
        count = sum(milestone <= point.position for milestone in arguments["milestones"])
        return point.given * arguments["gamma"] ** count


@CURVES.register_module()
@dataclass(frozen=True, kw_only=True)
class WarmupCosineLR(Curve):
    """nanoVLM's curve (``get_lr`` of huggingface/nanoVLM): linear warm-up, cosine to ``min_ratio``, then constant.

    The warm-up lasts ``warmup_ratio * total`` updates, not rounded, and update ``i`` gets ``(i + 1) / warm-up``.
    So the last one of a warm-up that is no whole number overshoots: 4.76 times the base at 7 updates. It is kept,
    since the aim is that code's own numbers. Counts in updates unless ``unit`` or ``by_epoch`` is given.

    Args:
        warmup_ratio: share of the whole that warms up.
        min_ratio: smallest learning rate as a fraction.
    """

    warmup_ratio: Annotated[float, Ge(0), Lt(1)] = 0.03
    min_ratio: Share = 0.1

    default_unit: ClassVar[str] = "update"

    @staticmethod
    def evaluate(point: Point, arguments: Mapping[str, Any]) -> float:
        warmup, smallest = arguments["warmup_ratio"] * point.length, arguments["min_ratio"]
        if point.since < warmup:
            return point.given * ((point.since + point.step) / warmup)
        if point.past:
            return point.given * smallest
        cosine = (1 + math.cos(math.pi * ((point.since - warmup) / (point.length - warmup)))) / 2
        return point.given * (smallest + cosine * (1 - smallest))
