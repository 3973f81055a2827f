"""Conditions of tests that some installations do not meet."""

import shutil

import pytest
import torch

MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon exists since torch 2.9")
JAVA = pytest.mark.skipif(shutil.which("java") is None, reason="needs a Java runtime")
