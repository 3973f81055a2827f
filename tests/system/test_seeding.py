"""Randomness is a function of its keys, and a restored state draws the same numbers again."""

import random
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from unigen_ds.system.seeding import derive_seed, generator, rng_state, seed_everything, set_rng_state


def draw() -> tuple[float, float, float, float]:
    return random.gauss(0, 1), float(np.random.standard_normal()), float(torch.randn(())), random.random()


def test_derived_seeds_are_fixed_for_ever() -> None:
    # A changed value would change every sample's noise on resume: these are part of the checkpoint format.
    assert derive_seed(42, 0, "a:1", "flow") == 7_677_002_289_989_696_334
    assert derive_seed(42, 0, "a:1", "flow") != derive_seed(42, 0, "a:1", "time")
    assert 0 <= derive_seed("x") < 2**63
    assert derive_seed("a/b", "c") != derive_seed("a", "b/c"), "the separator is in no key"


def test_generators_are_independent_of_what_ran_before() -> None:
    first = torch.randn(4, generator=generator(1, "s", "flow"))
    torch.manual_seed(99)
    torch.randn(10)
    assert torch.equal(first, torch.randn(4, generator=generator(1, "s", "flow")))
    assert not torch.equal(first, torch.randn(4, generator=generator(2, "s", "flow")))


def test_seed_everything_differs_by_rank() -> None:
    seed_everything(7, rank=0)
    first = draw()
    seed_everything(7, rank=1)
    assert all(a != b for a, b in zip(first, draw(), strict=True))
    seed_everything(7, rank=0)
    assert draw() == first


def test_a_state_that_went_through_a_file_restores_every_generator(tmp_path: Path) -> None:
    seed_everything(3, rank=0)
    draw()  # leaves a half-used gauss pair in each generator
    state = rng_state()
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    save_file(tensors, tmp_path / "rng.safetensors")
    expected = [draw() for _ in range(3)]
    set_rng_state({**load_file(tmp_path / "rng.safetensors"), "scalars": state["scalars"]})
    assert [draw() for _ in range(3)] == expected
