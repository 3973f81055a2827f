"""Randomness as a function of (seed, pass, sample): nothing depends on rank, worker or what ran before."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from unigen_ds.system.log import logger


def derive_seed(*keys: object) -> int:
    """A 63-bit seed from a tuple of keys, equal on every machine (BLAKE2b of their text, NUL between them)."""
    digest = hashlib.blake2b("\0".join(map(str, keys)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*keys: object) -> torch.Generator:
    """A CPU generator keyed by ``keys``, e.g. ``generator(seed, pass_number, sample_id, 'flow')``."""
    return torch.Generator().manual_seed(derive_seed(*keys))


def seed_everything(seed: int, *, rank: int) -> None:
    """Seed the global generators (model initialisation, dropout). Data never draws from them."""
    random.seed(derive_seed(seed, rank, "python"))
    np.random.seed(derive_seed(seed, rank, "numpy") % 2**32)
    torch.manual_seed(derive_seed(seed, rank, "torch"))


def rng_state() -> dict[str, Any]:
    """State of this process's global generators, as tensors and plain numbers (nothing that needs pickle)."""
    version, internal, gauss = random.getstate()
    name, keys, pos, has_gauss, cached_gauss = np.random.get_state(legacy=True)  # type: ignore[misc]
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy_keys": torch.from_numpy(np.asarray(keys, dtype=np.int64).copy()),
        "python_keys": torch.tensor(internal, dtype=torch.int64),
        "scalars": {
            "python_version": version,
            "python_gauss": gauss,
            "numpy_name": str(name),
            "numpy_pos": int(pos),
            "numpy_has_gauss": int(has_gauss),
            "numpy_gauss": float(cached_gauss),
        },
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    scalars = state["scalars"]
    torch.set_rng_state(state["torch"])
    numpy_keys = state["numpy_keys"].numpy().astype(np.uint32)
    names = ("numpy_pos", "numpy_has_gauss", "numpy_gauss")
    np.random.set_state((scalars["numpy_name"], numpy_keys, *(scalars[name] for name in names)))
    keys = tuple(int(k) for k in state["python_keys"].tolist())
    random.setstate((scalars["python_version"], keys, scalars["python_gauss"]))
    # the generator of the CUDA device, which network dropout draws from there, as far as both sides have one
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].to(torch.uint8))
    elif torch.cuda.is_available():
        torch.cuda.manual_seed(derive_seed("cuda", state["torch"].numpy().tobytes().hex()))
    if torch.cuda.is_available() != ("cuda" in state):
        before, now = ("CUDA", "a CPU") if "cuda" in state else ("a CPU", "CUDA")
        text = f"The stored random state is of a run on {before}, this one is on {now}: the draws of network dropout"
        logger().warning("%s differ. Data, order and noise are the same.", text)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Afterwards torch, numpy and Python draw the numbers that they would have drawn without what is inside."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
