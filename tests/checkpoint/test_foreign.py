"""Directories without a manifest: stored and missing information; nothing in them is executed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file as load_safetensors

from tests.checkpoint import plain_deepspeed
from tests.checkpoint.plain_deepspeed import ACCUMULATE, MICRO, STEPS, ZERO
from tests.checkpoint.support import Evil
from unigen_ds.checkpoint.foreign import read_foreign
from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.progress import Geometry

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).resolve().parents[2]
MODEL_FILE = "mp_rank_00_model_states.pt"


@pytest.fixture(scope="module")
def checkpoints() -> Path:
    return plain_deepspeed.checkpoints()


@pytest.fixture
def copy(checkpoints, tmp_path) -> Path:
    """ZeRO-2, to be changed."""
    return Path(shutil.copytree(checkpoints / "zero2", tmp_path / "copy")) / f"global_step{STEPS}"


def change(folder: Path, **values: Any) -> None:
    """Rewrite the model file with other values; None removes a key."""
    state = {**torch.load(folder / MODEL_FILE, weights_only=False), **values}
    torch.save({key: value for key, value in state.items() if value is not None}, folder / MODEL_FILE)


@pytest.mark.parametrize("case", ZERO)
def test_every_weight_is_the_engines(checkpoints, case):
    foreign = read_foreign(checkpoints / case, tag="iter_6.pth" if case == "mmengine" else None)
    assert foreign.precision == ("bf16" if case == "mmengine" or "bf16" in case else "fp32")
    tensors = load_safetensors(checkpoints / f"{case}.safetensors")
    rows = {row["name"]: row for row in foreign.parameters if row["trainable"]}
    assert rows.keys() == tensors.keys()
    for name, value in tensors.items():
        read = foreign.reader.read("master", name, 0, value.numel())
        assert torch.equal(read, value.flatten()) and rows[name]["shape"] == list(value.shape)
        assert foreign.reader.numel("exp_avg", name) == foreign.reader.numel("exp_avg_sq", name) == value.numel()
        assert float(foreign.reader.read("step", name, 0, 1)) == STEPS


@pytest.mark.parametrize("case", [*ZERO, "zero0"])
def test_what_the_files_tell(checkpoints, case):
    foreign = read_foreign(checkpoints / case, tag="iter_6.pth" if case == "mmengine" else None)
    stage = 2 if case == "mmengine" else int(case[4])
    assert foreign.layout == "deepspeed" and f"ZeRO stage {stage}" in foreign.writer
    assert foreign.geometry == Geometry(MICRO, ACCUMULATE, 2)
    assert (foreign.updates, foreign.skipped_updates) == (STEPS, 0)
    rows = {row["name"]: row for row in foreign.parameters}
    assert rows["emb.weight"]["tied"] == ["head.weight"] and "head.weight" not in rows
    assert "gain" not in rows and "scratch" not in rows
    if stage:
        assert {name for name, row in rows.items() if not row["trainable"]} == {"frozen.weight", "frozen.bias"}
        assert {name for name, row in rows.items() if row["group"] == "1"} == {"norm.weight", "norm.bias"}
    message = " ".join(foreign.unknown)
    for word in ("order of its data", "schedule", "EMA", "random generators"):
        assert word in message
    assert ("Moments" in message) == (stage == 0)


def test_what_mmengine_stores_is_used(checkpoints):
    foreign = read_foreign(checkpoints / "mmengine" / "iter_6.pth")
    assert "run by mmengine 0.10.7" in foreign.writer


def test_what_mmengine_stores_is_data_and_no_class_is_imported(checkpoints):
    code = (
        "import sys; from pathlib import Path; from unigen_ds.checkpoint.foreign import read_foreign;"
        " header = read_foreign(Path(sys.argv[1])).reader.header;"
        " buffer = header['message_hub']['log_scalars']['train/loss'];"
        " assert buffer.state['max_length'] == 1000000, vars(buffer);"
        " assert header['meta']['dataset_meta'] == {'classes': ('a', 'b')};"
        " assert type(buffer).__module__.startswith('unigen_ds.'), type(buffer);"  # mmengine's registry is imported
        " sys.exit('deepspeed' in sys.modules)"
    )
    folder = checkpoints / "mmengine" / "iter_6.pth"
    process = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


# ---- the geometry ----------------------------------------------------------------------------------------------------


def test_auto_is_not_known(copy):
    change(copy, ds_config={"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 4})
    foreign = read_foreign(copy)
    assert foreign.geometry is None
    assert "batch_size is not stored: it cannot be resumed." in foreign.unknown


def test_the_third_number_follows_from_the_total(copy):
    change(copy, ds_config={"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3})
    assert read_foreign(copy).geometry == Geometry(3, 4, 2)


# ---- other directories -----------------------------------------------------------------------------------------------


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        read_foreign(tmp_path)
    (tmp_path / "my.py").write_text("")
    with pytest.raises(CheckpointError, match=r"my\.py is a config, not a checkpoint"):
        read_foreign(tmp_path / "my.py")
    with pytest.raises(CheckpointError, match="does not exist"):
        read_foreign(tmp_path / "absent")


@pytest.mark.parametrize("name", ["mp_rank_01_model_states.pt", "layer_00-model_states.pt"])
def test_a_model_of_another_parallelism_is_refused(copy, name):
    (copy / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{name} is a part of a model split by tensor"):
        read_foreign(copy)


def test_missing_optimizer_files_are_not_taken_for_a_run_without_zero(copy):
    for path in copy.glob("*optim_states.pt"):
        path.unlink()
    with pytest.raises(CheckpointError, match="lacks DeepSpeed's model or optimizer files"):
        read_foreign(copy)


# ---- unpickling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["os.system", "subprocess.Popen", "eval"])
@pytest.mark.parametrize("where", ["client_state", "inside"])
def test_a_call_is_refused_and_never_done(copy, tmp_path, way, where):
    mark = tmp_path / "executed"
    evil = Evil(mark, way)
    change(copy, note=evil if where == "client_state" else {"message_hub": [("a", {"b": evil})]})
    name = way.rpartition(".")[2]  # torch.save writes the modules' names of Python 2
    with pytest.raises(CheckpointError, match=rf"{MODEL_FILE} is refused: it asks for a call of [\w.]*{name}"):
        read_foreign(copy)
    assert not mark.exists()
    torch.load(copy / MODEL_FILE, weights_only=False)  # the payload works: ordinary unpickling runs it
    for _ in range(100):
        if mark.exists():
            break
        subprocess.run(["sleep", "0.05"])
    assert mark.exists()
