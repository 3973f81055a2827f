"""Conditions of tests that some installations do not meet."""

import pytest
import torch

MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon exists since torch 2.9")
