"""Where an asynchronous save puts tensors; what it does is tested in ``tests/end_to_end/resume/saving``."""

from __future__ import annotations

import io

import torch

from unigen_ds.checkpoint.background import _Memory, _Pickler


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


def test_a_save_that_is_a_little_longer_fits_into_the_memory_of_the_last_one():
    """A number that has a digit more must not let a process map all of its memory anew."""
    pickler, memory = _Pickler(io.BytesIO()), _Memory()
    pickler.dump(torch.zeros(3))
    maps = []
    for length in (100, 101, 10_000):
        memory.fill(pickler, memoryview(bytearray(length)))
        memory.wait()
        maps.append(memory._map)
    assert maps[0] is maps[1] is maps[2] is not None
