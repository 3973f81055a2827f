"""``load_from`` of what the package and its neighbours write: each file is written by the neighbour's own code."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.end_to_end.resume.other_trainers import neighbours
from tests.end_to_end.resume.other_trainers.test_reading import config, data, short_run  # noqa: F401 - fixtures
from tools.export import main as export
from tools.train import main as train
from tools.train import parser as train_parser
from unigen_ds.config.python_text import config_text
from unigen_ds.core.errors import CheckpointError, ResumeBlocked, UnigenError
from unigen_ds.runner import Runner
from unigen_ds.runner.open.trained import open_model

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
pytestmark = pytest.mark.timeout(900)


def weights(runner: Runner) -> dict[str, Tensor]:
    return dict(runner.backend.model.state_dict())


def load(data: dict, work_dir: Path, path: Path, **overrides: Any) -> Runner:  # noqa: F811
    """Train for one update with a learning rate of 0: the weights at the end are those that were loaded."""
    still = {"optim_wrapper__optimizer__lr": 0.0, "train_cfg__max_updates": 1, "randomness__seed": 5}
    runner = Runner.from_cfg(config(data, work_dir, load_from=str(path), **still, **overrides))
    runner.train()
    return runner


@pytest.fixture(scope="module")
def neighbour_files(short_run: Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:  # noqa: F811
    """Case -> path."""
    (checkpoint,) = short_run.work_dir.glob("*.pth")
    paths = neighbours.write_merged(checkpoint, tmp_path_factory.mktemp("merged"))
    for name, write in neighbours.WRITERS.items():
        model, _ = open_model(short_run.work_dir, raw=True)
        paths |= write(model, tmp_path_factory.mktemp(name))
    folder = tmp_path_factory.mktemp("exported")
    assert export([str(short_run.work_dir), str(folder / "exported"), "--raw"]) == 0
    paths |= neighbours.hugging_face(folder / "exported", folder)
    yield paths


@pytest.mark.slow
def test_every_neighbours_files_load_bit_by_bit(
    data: dict, short_run: Runner, neighbour_files: dict[str, Path], tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    expected, wrong = weights(short_run), {}
    assert torch.equal(expected[HEAD], expected[EMBEDDING]) and len(neighbour_files) == 26
    for number, (case, path) in enumerate(neighbour_files.items()):
        try:
            runner = load(data, tmp_path / str(number), path)
        except UnigenError as error:
            wrong[case] = str(error)
            continue
        report = json.loads((tmp_path / str(number) / "load_report.json").read_text())
        differing = [name for name, tensor in weights(runner).items() if not torch.equal(tensor, expected[name])]
        if differing or report["missing"] or report["unexpected"]:
            wrong[case] = f"{differing} {report}"
    assert wrong == {}


def test_what_cannot_be_resumed_has_the_command_that_works(
    data: dict, short_run: Runner, neighbour_files: dict[str, Path], tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    """Before anything else: no geometry is asked for, and no data is read."""
    state = {name: tensor.clone() for name, tensor in short_run.backend.model.state_dict().items()}
    cases = ("plain.pth", "mmengine's file", "accelerate's FSDP", "accelerate's state", "Trainer's checkpoint")
    for case in cases:
        path = neighbour_files[case]
        settings = config(data, tmp_path / "run", resume=str(path), train_dataloader__dataset__data_path="/no/data")
        with pytest.raises(ResumeBlocked, match="cannot be resumed: of such files the weights alone are read") as error:
            Runner.from_cfg(settings).train()
        remedy = str(error.value).partition("a new run with them: ")[2]
        options = vars(train_parser().parse_args(["CONFIG", *shlex.split(remedy.removesuffix("."))]))
        assert options["work_dir"] == "NEW", case
        assert options["cfg_options"] == [], case
        runner = load(data, tmp_path / case, Path(options["load_from"]))
        assert all(torch.equal(tensor, state[name]) for name, tensor in weights(runner).items()), case
    lightning = {f"net.{name}": tensor for name, tensor in state.items()}
    torch.save({"pytorch-lightning_version": "2.5", "global_step": 9, "state_dict": lightning}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"load_cfg\.revise_keys maps stored names"):
        load(data, tmp_path / "again", tmp_path / "a.ckpt")


FILES_OF_DEEPSPEED = {
    "zero2": ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"],
    "zero3": ["zero_pp_rank_1_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
}


@pytest.fixture(scope="module")
def by_deepspeed(short_run: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    return neighbours.write_deepspeed(short_run.work_dir, tmp_path_factory.mktemp("deepspeed"))


def train_from(path: Path, data: dict, run: Path) -> int:  # noqa: F811
    """``tools/train.py CONFIG --load-from PATH``, for one update with a learning rate of 0."""
    still = {"optim_wrapper__optimizer__lr": 0.0, "randomness__seed": 5}
    run.with_suffix(".py").write_text(config_text(config(data, run, **still).to_dict()), encoding="utf-8")
    return train([str(run.with_suffix(".py")), "--load-from", str(path), "--max-updates", "1"])


def test_a_file_inside_deepspeeds_folder_means_the_weights_of_all_ranks(
    data: dict, short_run: Runner, by_deepspeed: Path, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    """Whichever it is: in stage 3 each file holds a part of every weight."""
    expected = open_model(short_run.work_dir, raw=True)[0].state_dict()
    for number, (stage, name) in enumerate(
        (stage, name) for stage, names in FILES_OF_DEEPSPEED.items() for name in names
    ):
        run = tmp_path / str(number)
        assert train_from(by_deepspeed / stage / "global_step2" / name, data, run) == 0
        state = open_model(run, raw=True)[0].state_dict()
        assert [key for key, tensor in expected.items() if not torch.equal(state[key], tensor)] == [], (stage, name)


def test_a_head_stored_apart_is_not_taken_for_the_tied_one(
    data: dict, neighbour_files: dict[str, Path], tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    state = torch.load(neighbour_files["plain.pth"])
    torch.save({**state, HEAD: state[HEAD] + 1}, tmp_path / "apart.pth")
    with pytest.raises(CheckpointError, match=r"1 not in the model: lm_head\.weight"):
        load(data, tmp_path / "run", tmp_path / "apart.pth")
