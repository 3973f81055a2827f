"""Conditions of tests: what some installations do not have, and time."""

import shutil
from typing import Any

import pytest
import torch

MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon exists since torch 2.9")
JAVA = pytest.mark.skipif(shutil.which("java") is None, reason="needs a Java runtime")


def slow(*cases: Any) -> list[Any]:
    """These cases of a parametrized test for ``make slow``: a value each, or a tuple of values."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
