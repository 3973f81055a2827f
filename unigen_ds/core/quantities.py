"""Sizes and shares as a command line has them: ``80GiB``, ``5%``."""

from __future__ import annotations

import argparse

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


def size(text: str) -> int:
    """``80GiB`` -> bytes."""
    digits = text.strip().rstrip("BbGgIiKkMmTt ")
    unit = text.strip()[len(digits) :].strip().upper()
    try:
        nbytes = round(float(digits) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        nbytes = -1
    if nbytes < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: 80GiB, 24GB, 512MiB, or a number of bytes")
    return nbytes


def share(text: str) -> float:
    """``5%`` -> 0.05."""
    try:
        value = float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: 5%, or a number from 0 to below 1")
    return value


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: a whole number of at least 1")
    return int(text)
