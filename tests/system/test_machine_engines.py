"""The engines' private attributes that we read exist in the installed version, and it is the one that was tested."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.end_to_end.engines.launch import want
from tools.train import main as train
from unigen_ds.backends.deepspeed import deepspeed_config
from unigen_ds.backends.deepspeed.deepspeed_config import ALLOWED_VERSIONS, TESTED_VERSION
from unigen_ds.system import machine

runs = want("inspected")
ROOT = Path(__file__).resolve().parents[2]

COMMON = {"param_groups", "optimizer"}
STAGE_1_AND_2 = COMMON | {"update_lp_params", "_lazy_init_hp_params_optimizer_state", "single_partition_of_fp32_groups"}
STAGE_3 = COMMON | {
    "fp32_partitioned_groups_flat",
    "grad_position",
    "get_param_id",
    "persistent_parameters",
    "_partition_all_parameters",
    "_reassign_or_swap_out_partitioned_parameters",
}
EXPECTED = {
    "zero1@1-fp32": ("DeepSpeedZeroOptimizer", STAGE_1_AND_2, {"_hp_mapping"}),
    "zero1@1-bf16": (
        "BF16_Optimizer",
        COMMON | {"update_lp_params", "_lazy_init_hp_params_optimizer_state", "fp32_groups_flat_partition"},
        {"_hp_mapping"},
    ),
    "zero2@1-fp32": ("DeepSpeedZeroOptimizer", STAGE_1_AND_2, {"_hp_mapping"}),
    "zero3@1-fp32": ("DeepSpeedZeroOptimizer_Stage3", STAGE_3, {"ds_tensor", "ds_numel", "partition_numel"}),
}


def test_the_installed_deepspeed_is_the_tested_one():
    assert version("deepspeed") == TESTED_VERSION
    assert f"deepspeed=={TESTED_VERSION}" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert SpecifierSet(ALLOWED_VERSIONS).contains(TESTED_VERSION)


@pytest.mark.parametrize("installed", ["0.18.9", "0.20.0", None])
def test_another_deepspeed_is_refused_at_the_start(installed, tmp_path, monkeypatch, capsys):
    real = machine.installed
    monkeypatch.setattr(machine, "installed", lambda name: installed if name == "deepspeed" else real(name))
    arguments = ["unified_digits", "--work-dir", str(tmp_path / "run"), "--backend", "deepspeed:zero2"]
    arguments += ["--max-updates", "1", "--cfg-options", f"train_dataloader.dataset.root={tmp_path / 'digits'}"]
    assert train(arguments) == 2
    text = capsys.readouterr().err
    assert (f"deepspeed {installed} is installed" if installed else "deepspeed is not installed") in text
    assert f"pip install 'deepspeed{ALLOWED_VERSIONS}'" in text and not (tmp_path / "run").exists()


@pytest.mark.parametrize("installed", ["0.19.8+cu128", "0.19.9rc1"])
def test_a_release_of_the_tested_series_is_accepted(installed, monkeypatch):
    monkeypatch.setattr(machine, "installed", lambda package: installed)
    deepspeed_config.check_version()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", EXPECTED)
def test_deepspeeds_private_attributes_exist(name):
    folder = runs().outcome(f"inspected/{name}").folder
    found = json.loads((folder / "inspected.json").read_text(encoding="utf-8"))
    cls, zero, parameter = EXPECTED[name]
    assert found["class"] == cls
    assert zero - set(found["zero"]) == set()
    assert parameter - set(found["parameter"]) == set()


@pytest.mark.timeout(3600)
def test_zero_3_still_replaces_the_linear_function():
    """What ``close`` undoes: when this fails, the undoing can go."""
    folder = runs().outcome("inspected/zero3@1-fp32").folder
    assert json.loads((folder / "inspected.json").read_text(encoding="utf-8"))["linear"] == "zero3_linear_wrap"


def test_what_fsdp_is_read_by_exists():
    """Importing them is the test: they are private or lie in private modules."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert callable(compute_local_shape_and_global_offset)
    assert "_local_tensor" in DTensor.__slots__
    for method in ("reshard", "set_requires_gradient_sync", "set_is_last_backward"):
        assert callable(getattr(FSDPModule, method))
