"""Values against type hints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from unigen_ds.config.registry import CURVES, component_problems
from unigen_ds.config.values import fits
from unigen_ds.schedule.curves import Curve, NotNegative


class Own:
    def __init__(self, size: int, *, path: str | Path = "", words: Sequence[str] = ()) -> None: ...


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (int, [0, -3], [True, 1.0, "1", None]),
        (float, [0, 1.5, float("inf")], [False, "1e-3", None, float("nan")]),
        (bool, [True], [1, "yes"]),
        (str, ["a"], [1, Path("a")]),
        (str | Path | None, ["a", Path("a"), None], [3, ["a"]]),
        (Literal["RGB", "L"], ["L"], ["CMYK", 1]),
        (Sequence[str], [["a"], ("a", "b"), []], ["ab", [1], {}]),
        (tuple[float, float], [(0.9, 0.95), [1, 2]], ["ab", 3.0]),
        (Mapping[str, Any], [{}, {"a": 1}], [[], "a"]),
        (Sequence[Mapping] | None, [[{}], None], [[1], {}]),
        (Own, [3, Own(1)], []),
        (Any, [3, None, "x"], []),
    ],
)
def test_what_fits(hint: Any, good: list[Any], bad: list[Any]) -> None:
    assert [fits(value, hint) for value in good] == [True] * len(good)
    assert [fits(value, hint) for value in bad] == [False] * len(bad)


@dataclass(frozen=True, kw_only=True)
class Steps(Curve):
    """A curve of another module than its base class, whose annotations that module alone knows."""

    sizes: tuple[NotNegative, ...]


def test_limits_of_the_arguments_of_a_dataclass_and_of_its_base() -> None:
    wrong = {"type": Steps, "begin": -1, "sizes": [1, float("inf")], "end": "3"}
    problems = [str(error) for error in component_problems(CURVES, wrong, where="param_scheduler[0]")]
    assert problems == [
        "param_scheduler[0].begin is -1. Allowed: a number of at least 0.",
        "param_scheduler[0].sizes is [1, inf]. Allowed: a list, each a number of at least 0.",
        "param_scheduler[0].end is '3'. Allowed: a number of at least 0 or None.",
    ]
    assert not component_problems(CURVES, {"type": Steps, "begin": 1, "sizes": [1, 0.5]}, where="param_scheduler[0]")
