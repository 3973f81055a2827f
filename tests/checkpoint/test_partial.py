"""Weights of one model for another: which are loaded, from where, and the report about the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from unigen_ds.checkpoint import partial
from unigen_ds.checkpoint.layouts.safetensors import SafetensorsReader
from unigen_ds.checkpoint.partial import Fit, FittedReader, LoadSettings, fit
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.core.shards import MASTER

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Recorder(SafetensorsReader):
    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        self.__dict__.setdefault("requests", []).append((name, start, stop))
        return super().read(kind, name, start, stop)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def store_tensors(folder: Path, tensors: dict[str, Tensor], *, parameters: list[str] | None = None) -> Recorder:
    save_file(tensors, folder / "model.safetensors")
    return Recorder(folder, parameters=parameters)


def rows(*names: str, tied: dict[str, str] | None = None, **shapes: tuple[int, ...]) -> list[dict[str, Any]]:
    """A parameter table; in names of keywords ``__`` means a dot."""
    sizes = {name: (2, 3) for name in names} | {name.replace("__", "."): shape for name, shape in shapes.items()}
    aliases = tied or {}
    return [{"name": name, "shape": [*shape], "tied": [aliases[name]] if name in aliases else []}
            for name, shape in sizes.items()]  # fmt: skip


def allowing(**cfg: Any) -> LoadSettings:
    return LoadSettings.parse(cfg, where="load_cfg")


def compare(reader: SafetensorsReader, table: list[dict[str, Any]], ours: list[dict[str, Any]], **cfg: Any) -> Fit:
    return fit(reader, table, parameters=ours, buffers={}, cfg=allowing(**cfg))


# ---- names ----------------------------------------------------------------------------------------------------------


def test_two_names_that_become_one_are_refused(tmp_path):
    reader = store_tensors(tmp_path, {"a.w": numbers(2, 3), "b.w": numbers(2, 3)})
    with pytest.raises(CheckpointError, match=r"a\.w and b\.w of the checkpoint both become w\."):
        compare(reader, rows("a.w", "b.w"), rows("w"), revise_keys=[(r"^[ab]\.", "")], allow=["unexpected"])


def test_tied_weights_fill_a_model_that_does_not_tie_them_and_the_opposite_case_is_reported(tmp_path):
    reader = store_tensors(tmp_path, {EMBEDDING: numbers(2, 3)})
    fit = compare(reader, rows(EMBEDDING, tied={EMBEDDING: HEAD}), rows(EMBEDDING, HEAD))
    fit.check(LoadSettings())
    assert fit.sources == {(MASTER, EMBEDDING): (MASTER, EMBEDDING), (MASTER, HEAD): (MASTER, EMBEDDING)}
    apart = {EMBEDDING: numbers(2, 3), HEAD: numbers(2, 3, seed=1)}
    fit = compare(store_tensors(tmp_path, apart), rows(EMBEDDING, HEAD), rows(EMBEDDING, tied={EMBEDDING: HEAD}))
    with pytest.raises(CheckpointError, match=r"1 not in the model: lm_head\.weight.*allow=\['unexpected'\]"):
        fit.check(LoadSettings())


def test_tied_weights_that_are_stored_twice_are_taken_where_they_are_equal(tmp_path, monkeypatch):
    """Compared in pieces, of which the last one differs in a single element."""
    monkeypatch.setattr(partial, "_PIECE", 4)
    weight = numbers(2, 3)
    reader = store_tensors(tmp_path, {EMBEDDING: weight, HEAD: weight.clone()})
    tables = rows(EMBEDDING, HEAD), rows(EMBEDDING, tied={EMBEDDING: HEAD})
    compare(reader, *tables).check(LoadSettings())
    assert {request[1:] for request in reader.requests} == {(0, 4), (4, 6)}
    other = weight.clone()
    other[1, 2] += 1
    assert compare(store_tensors(tmp_path, {EMBEDDING: weight, HEAD: other}), *tables).unexpected == [HEAD]


# ---- the vocabulary -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_rows_are_the_mean_for_any_division_into_ranges(tmp_path, monkeypatch, dtype):
    """Also if the stored rows are summed in several pieces, of which the last is shorter."""
    monkeypatch.setattr(partial, "_PIECE", 7)
    old = numbers(5, 3).to(dtype)
    reader = store_tensors(tmp_path, {EMBEDDING: old})
    fit = compare(reader, rows(**{EMBEDDING: (5, 3)}), rows(**{EMBEDDING: (8, 3)}), resize_vocab=True)
    assert fit.resized == {EMBEDDING: ((5, 3), (8, 3))} and not fit.initial_names
    whole = torch.cat([old.float(), old.double().mean(0, keepdim=True).float().expand(3, 3)]).flatten()
    for start in range(25):
        for stop in range(start, 25):
            new_rows = FittedReader(reader, fit)
            assert torch.equal(new_rows.read(MASTER, EMBEDDING, start, stop).float(), whole[start:stop]), (start, stop)
    assert new_rows.numel(MASTER, EMBEDDING) == 24


def test_rows_are_removed_only_if_requested(tmp_path):
    old = numbers(5, 3)
    reader = store_tensors(tmp_path, {HEAD: old})
    tables = rows(**{HEAD: (5, 3)}), rows(**{HEAD: (4, 3)})
    with pytest.raises(
        CheckpointError, match=r"1 of another shape: lm_head.weight was \[5, 3\] and is \[4, 3\].*shrink"
    ):
        compare(reader, *tables, resize_vocab=True).check(LoadSettings())
    fit = compare(reader, *tables, resize_vocab="shrink")
    assert torch.equal(FittedReader(reader, fit).read(MASTER, HEAD, 0, 12), old[:4].flatten())


@pytest.mark.parametrize(("name", "shape"), [("proj.weight", (8, 3)), (HEAD, (8, 4)), (HEAD, (8,)), (HEAD, (5, 3, 1))])
def test_only_rows_of_a_vocabulary_are_resized(tmp_path, name, shape):
    reader = store_tensors(tmp_path, {name: numbers(5, 3)})
    fit = compare(reader, rows(**{name: (5, 3)}), rows(**{name: shape}), resize_vocab=True)
    assert fit.reshaped == {name: ((5, 3), shape)} and not fit.resized


# ---- differences ----------------------------------------------------------------------------------------------------


def test_each_difference_is_refused_by_name_until_it_is_allowed(tmp_path):
    reader = store_tensors(tmp_path, {"same": numbers(2, 3), "turned": numbers(2, 3), "old": numbers(2, 3)})
    tables = rows("same", "turned", "old"), rows("same", "new", turned=(3, 2))
    fit = compare(reader, *tables)
    assert (fit.missing, fit.unexpected, fit.reshaped) == (["new"], ["old"], {"turned": ((2, 3), (3, 2))})
    assert fit.initial_names == {"new", "turned"}
    for left_out, message in (("missing", "new"), ("unexpected", "old"), ("reshaped", r"was \[2, 3\] and is \[3, 2\]")):
        kinds = {"missing", "unexpected", "reshaped"} - {left_out}
        with pytest.raises(CheckpointError, match=rf"{message}.*load_cfg\.allow=\['{left_out}'\]"):
            fit.check(LoadSettings(allow=tuple(kinds)))
    everything = allowing(allow=["missing", "unexpected", "reshaped"])
    fit.check(everything)
    nothing = compare(reader, rows("same"), rows("other"))
    with pytest.raises(CheckpointError, match="nothing in the checkpoint has the name"):
        nothing.check(everything)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"revise_keys": [("(", "")]}, "revise_keys: .*missing"),
        ({"revise_keys": ["^module"]}, "revise_keys"),
        ({"allow": ["mising"]}, "allow is .*Allowed: a list of missing, unexpected, reshaped, sizes"),
        ({"allow": "missing"}, "allow is 'missing'"),
        ({"resize_vocab": "grow"}, "resize_vocab is 'grow'.*'shrink'"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(options, message):
    with pytest.raises(ConfigError, match=f"load_cfg.{message}"):
        allowing(**options)
