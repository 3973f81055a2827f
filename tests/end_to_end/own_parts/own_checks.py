"""A user's module with a check of the checklist, one of the dry run, and a reader of another trainer's training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from unigen_ds import (
    DRY_RUN_CHECKS,
    FOREIGN_STATES,
    RESUME_CHECKS,
    Checked,
    Finding,
    ForeignState,
    Known,
    Manifest,
    Proposal,
    ShardReader,
    ok,
    problem,
    slices_of,
)


@RESUME_CHECKS.register_module()
def check_words(manifest: Manifest, proposal: Proposal) -> Iterator[Finding]:
    was, now = (len(config.get("tokenizer", {}).get("words", ())) for config in (manifest.config, proposal.config))
    yield Finding("own.words", "ok" if was == now else "warn", f"{was} words", f"{now} words", "another vocabulary")


@DRY_RUN_CHECKS.register_module(name="words")
def check_tokenizer(known: Known) -> Iterator[Checked]:
    tokenizer = known.need("start").data.processor.tokenizer  # raises where no earlier check could build it
    yield ok(f"{len(tokenizer)} ids") if len(tokenizer) < 64 else problem("too many words", remedy="fewer words")


@FOREIGN_STATES.register_module()
def read_notebook(path: Path) -> ForeignState | None:
    """``notebook.pt``: the weights, and the moments by the names that the optimizer has for them."""
    if not (path / "notebook.pt").is_file():
        return None  # not mine
    notebook = torch.load(path / "notebook.pt", weights_only=True, mmap=True)  # nothing that a file brings is executed
    reader = ShardReader()
    for kind in ("master", "exp_avg", "exp_avg_sq", "step"):  # "master": the weights
        for name, tensor in notebook[kind].items():
            reader.add(kind, name, 0, tensor.numel(), slices_of(tensor), shape=tensor.shape)
    updates = notebook["updates"]
    return ForeignState(reader, "a notebook", updates=updates, batch_size=4, accumulative_counts=1, dp_size=1)
