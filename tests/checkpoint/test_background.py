"""Where an asynchronous save puts tensors; what it does is tested in ``tests/end_to_end/resume/saving``."""

from __future__ import annotations

import io

import torch

from unigen_ds.checkpoint.background import _Pickler


def test_large_tensors_are_half_a_page_from_their_source():
    """At a distance just above a multiple of a page a copy needs three times as long."""
    pickler = _Pickler(io.BytesIO())
    tensors = [torch.zeros(numel) for numel in (3, 2**19, 5, 2**19 + 7, 2**19)]
    pickler.dump(tensors)
    end = 0
    for (source, nbytes), (begin, _) in pickler.storages.items():
        assert begin >= end and begin % 64 == 0
        assert nbytes < 2**20 or 1024 <= (begin - source) % 4096 <= 3072
        end = begin + nbytes
    assert len(pickler.storages) == len(tensors) and end <= pickler.nbytes
